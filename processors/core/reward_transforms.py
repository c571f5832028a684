"""Moved to turnlog.processors.core.methods.reward_transforms; this path goes with 0.2.0."""

import warnings

from turnlog.processors.core.methods.reward_transforms import RewardTransform

__all__ = ["RewardTransform"]
warnings.warn(
    f"{__name__} moved to turnlog.processors.core.methods.reward_transforms", DeprecationWarning, stacklevel=2
)
