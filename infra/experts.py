"""Moved to turnlog.infra.blobs; this path goes with 0.2.0."""

import warnings

from turnlog.infra.blobs import expert_rows

__all__ = ["expert_rows"]
warnings.warn("turnlog.infra.experts moved to turnlog.infra.blobs", DeprecationWarning, stacklevel=2)
