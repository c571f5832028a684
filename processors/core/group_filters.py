"""Moved to turnlog.processors.core.methods.group_filters; this path goes with 0.2.0."""

import warnings

from turnlog.processors.core.methods.group_filters import GroupFilter

__all__ = ["GroupFilter"]
warnings.warn(f"{__name__} moved to turnlog.processors.core.methods.group_filters", DeprecationWarning, stacklevel=2)
