"""Moved to turnlog.processors.core.fold.render; this path goes with 0.2.0."""

import warnings

from turnlog.processors.core.fold.render import render as draw
from turnlog.processors.core.fold.render import sizes

__all__ = ["draw", "sizes"]
warnings.warn(f"{__name__} moved to turnlog.processors.core.fold.render", DeprecationWarning, stacklevel=2)
