"""Moved to turnlog.processors.core.methods.estimators; this path goes with 0.2.0."""

import warnings

from turnlog.processors.core.methods.estimators import step

__all__ = ["step"]
warnings.warn(f"{__name__} moved to turnlog.processors.core.methods.estimators", DeprecationWarning, stacklevel=2)
