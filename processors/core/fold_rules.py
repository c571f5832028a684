"""The settings that the fold of a group depends on, as one value; their hash stands in every derived record."""

from __future__ import annotations

from dataclasses import dataclass

FOLD_VERSION = "1"
"""Changes whenever the same records would give other outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldRules:
    """How turns become segments and rewards become advantages (docs/folds.md)."""

    run_id: str
    settings_sha256: str
    policy: str = "prefix"
    estimator: str = "grpo"
    """A name in `estimators.ESTIMATORS`."""
    std_ddof: int = 1
    """Delta degrees of freedom of the group's standard deviation: 1 sample, 0 population."""
    min_valid: int = 2
    """Valid rollouts below which a group is discarded."""
    zero_variance: str = "keep"
    """keep: advantage 0 | discard"""
    truncated: str = "train"
    """train | mask_last_turn | exclude"""
    train_sub_agents: bool = True
    train_side_calls: bool = False
