"""Moved to turnlog.processors.core.methods.segments; this path goes with 0.2.0."""

import warnings

from turnlog.processors.core.methods.segments import Segments, cut, taken_out

__all__ = ["Segments", "cut", "taken_out"]
warnings.warn(f"{__name__} moved to turnlog.processors.core.methods.segments", DeprecationWarning, stacklevel=2)
