"""Moved to turnlog.processors.core.fold.group; this path goes with 0.2.0."""

import warnings

from turnlog.processors.core.fold.group import offline

__all__ = ["offline"]
warnings.warn(f"{__name__} moved to turnlog.processors.core.fold.group", DeprecationWarning, stacklevel=2)
