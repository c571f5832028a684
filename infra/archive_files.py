"""Moved to turnlog.infra.archive.files; this path goes with 0.2.0."""

import warnings

from turnlog.infra.archive.files import RangeFile, read_range

__all__ = ["RangeFile", "read_range"]
warnings.warn("turnlog.infra.archive_files moved to turnlog.infra.archive.files", DeprecationWarning, stacklevel=2)
