"""Moved to turnlog.processors.core.methods.estimators; this path goes with 0.2.0."""

import warnings

from turnlog.processors.core.methods.estimators import (
    Advantages,
    Estimator,
    EstimatorOptions,
    Trajectory,
    TurnReward,
    dr_grpo,
    grpo,
    of_rewards,
    rloo,
)

__all__ = [
    "Advantages",
    "Estimator",
    "EstimatorOptions",
    "Trajectory",
    "TurnReward",
    "dr_grpo",
    "grpo",
    "of_rewards",
    "rloo",
]
warnings.warn(f"{__name__} moved to turnlog.processors.core.methods.estimators", DeprecationWarning, stacklevel=2)
