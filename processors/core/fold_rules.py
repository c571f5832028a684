"""Moved to turnlog.processors.core.methods.rules; this path goes with 0.2.0."""

import warnings

from turnlog.processors.core.methods.rules import FoldRules

__all__ = ["FoldRules"]
warnings.warn(f"{__name__} moved to turnlog.processors.core.methods.rules", DeprecationWarning, stacklevel=2)
