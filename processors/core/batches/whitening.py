"""Moved to turnlog.processors.core.batches.weighting; this path goes with 0.2.0."""

import warnings

from turnlog.processors.core.batches.weighting import whitening

__all__ = ["whitening"]
warnings.warn(
    "turnlog.processors.core.batches.whitening moved to turnlog.processors.core.batches.weighting",
    DeprecationWarning,
    stacklevel=2,
)
