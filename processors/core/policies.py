"""Moved to turnlog.processors.core.methods.policies; this path goes with 0.2.0."""

import warnings

from turnlog.processors.core.methods.policies import Policies, Policy

__all__ = ["Policies", "Policy"]
warnings.warn(f"{__name__} moved to turnlog.processors.core.methods.policies", DeprecationWarning, stacklevel=2)
