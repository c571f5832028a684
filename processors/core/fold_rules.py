"""The settings that the fold of a group depends on, as one value; their hash stands in every derived record."""

from __future__ import annotations

from dataclasses import dataclass

from turnlog.processors.core.estimators import Estimator, EstimatorOptions
from turnlog.processors.core.fold_versions import LATEST, FoldVersion
from turnlog.processors.core.group_filters import ZERO_VARIANCE
from turnlog.processors.core.methods import BUILT_IN, ChosenFilter, ChosenTransform, Methods
from turnlog.processors.core.policies import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldRules:
    """How turns become segments and rewards become advantages (docs/folds.md)."""

    run_id: str
    settings_sha256: str
    version: FoldVersion = LATEST
    """Of the run: which rules its records are folded by."""
    policy: str = "prefix"
    """A name in `methods.policies`."""
    fork_threshold_tokens: int = 1024
    """Of policy slime: a turn with fewer output tokens realigns what drifted before it; 0 always forks."""
    estimator: str = "grpo"
    """A name in `methods.estimators`."""
    std_ddof: int = 1
    """Delta degrees of freedom of the group's standard deviation: 1 sample, 0 population."""
    discount: float = 1.0
    """Of `step`: per main turn, in [0, 1]."""
    min_valid: int = 0
    """Valid rollouts below which a group is discarded; 0 or less: what the estimator needs."""
    zero_variance: str = "keep"
    """keep: advantage 0 | discard; without a meaning for estimators that do not compare within the group"""
    group_filters: tuple[str, ...] = ()
    """Applied in order to groups that would be trained: `name:number:...`"""
    reward_transforms: tuple[str, ...] = ()
    """Applied in order to each reward: `name:number:...`"""
    truncated: str = "train"
    """train | mask_last_turn | exclude"""
    train_sub_agents: bool = True
    train_side_calls: bool = False
    methods: Methods = BUILT_IN
    """What the names above mean."""

    @property
    def cutting(self) -> Policy:
        """The policy. Raises SettingsError."""
        return self.methods.policies[self.policy]

    @property
    def formula(self) -> Estimator:
        """The estimator. Raises SettingsError."""
        return self.methods.estimator(self.estimator)

    @property
    def options(self) -> EstimatorOptions:
        """What the estimator reads of the settings."""
        return EstimatorOptions(self.std_ddof, self.discount)

    @property
    def least_valid(self) -> int:
        """Valid rollouts that a group needs, at least 1."""
        return self.min_valid if self.min_valid > 0 else self.formula.min_valid

    @property
    def filters(self) -> tuple[ChosenFilter, ...]:
        """The group filters, zero variance first. Raises SettingsError."""
        flat = self.zero_variance == "discard" and self.formula.centred
        return ((ChosenFilter(ZERO_VARIANCE),) if flat else ()) + self.methods.filters(self.group_filters)

    @property
    def transforms(self) -> tuple[ChosenTransform, ...]:
        """The reward transforms. Raises SettingsError."""
        return self.methods.transforms(self.reward_transforms)
