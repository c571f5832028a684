"""Moved to turnlog.infra.blobs; this path goes with 0.2.0."""

import warnings

from turnlog.infra.blobs import inlined

__all__ = ["inlined"]
warnings.warn("turnlog.infra.payloads moved to turnlog.infra.blobs", DeprecationWarning, stacklevel=2)
