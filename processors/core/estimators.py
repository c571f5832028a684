"""Advantages of a group's trajectories: pure functions registered by name and version."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

GRPO_EPSILON = 1e-6
"""Added to the standard deviation (DeepSeekMath, arXiv 2402.03300, section 4.1, as its implementations do)."""


@dataclass(frozen=True, slots=True)
class Advantages:
    """One scalar per trajectory, in the order of the rewards."""

    values: tuple[float, ...]
    baseline: float
    std: float | None
    """None for estimators that do not divide by it."""


@dataclass(frozen=True, slots=True)
class Estimator:
    """`estimate(rewards, ddof)`: rewards of the valid trajectories by rollout_index, at least one."""

    name: str
    version: int
    estimate: Callable[[Sequence[float], int], Advantages]

    @property
    def label(self) -> str:
        """As it stands in GroupScored."""
        return f"{self.name}/{self.version}"


def grpo(rewards: Sequence[float], ddof: int) -> Advantages:
    """(r - mean) / (std + 1e-6), std with `ddof` delta degrees of freedom; exactly 0 when all rewards are equal."""
    mean = _mean(rewards)
    if min(rewards) == max(rewards):
        return Advantages((0.0,) * len(rewards), mean, 0.0)
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - ddof))
    return Advantages(tuple((reward - mean) / (std + GRPO_EPSILON) for reward in rewards), mean, std)


def dr_grpo(rewards: Sequence[float], ddof: int) -> Advantages:
    """r - mean (Dr. GRPO, arXiv 2503.20783); `ddof` is not used."""
    mean = _mean(rewards)
    return Advantages(tuple(reward - mean for reward in rewards), mean, None)


def _mean(rewards: Sequence[float]) -> float:
    """Rounded once, so bitwise the same in any order; the reward itself when all are equal."""
    return rewards[0] if min(rewards) == max(rewards) else math.fsum(rewards) / len(rewards)


ESTIMATORS: dict[str, Estimator] = {
    estimator.name: estimator for estimator in (Estimator("grpo", 1, grpo), Estimator("dr_grpo", 1, dr_grpo))
}
