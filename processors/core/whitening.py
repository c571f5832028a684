"""Moved to turnlog.processors.core.batches.whitening; this path goes with 0.2.0."""

import warnings

from turnlog.processors.core.batches.whitening import whitening

__all__ = ["whitening"]
warnings.warn(f"{__name__} moved to turnlog.processors.core.batches.whitening", DeprecationWarning, stacklevel=2)
