"""Moved to turnlog.infra.blobs; this path goes with 0.2.0."""

import warnings

from turnlog.infra.blobs import MemoryBlobs

__all__ = ["MemoryBlobs"]
warnings.warn("turnlog.infra.memory_blobs moved to turnlog.infra.blobs", DeprecationWarning, stacklevel=2)
