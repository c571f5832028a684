"""Filters for scored groups that are not worth training: pure functions of a group's trajectories, by name and version.

A group that a filter discards is recorded in GroupScored as `discarded` under the filter's name. Its tokens are
accounted for as `discarded_group`, and the feeder samples its task again (dynamic sampling, DAPO, arXiv 2503.14476).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from turnlog.processors.core.methods.estimators import Advantages, Trajectory, mean_of


@dataclass(frozen=True, slots=True)
class GroupFilter:
    """A named filter. `discards(trajectories, advantages, *arguments)` receives the valid trajectories with transformed
    rewards.
    """

    name: str
    version: int
    discards: Callable[..., bool]
    arguments: tuple[str, ...] = ()
    """Names of the arguments that a setting must give: `mean_outside:LOW:HIGH`."""


def zero_variance(trajectories: Sequence[Trajectory], advantages: Advantages) -> bool:
    """Whether all rewards are equal or, under a per-turn estimator, no turn has an advantage."""
    if advantages.per_turn is not None:
        return not any(any(turns) for turns in advantages.per_turn)
    rewards = [trajectory.reward for trajectory in trajectories]
    return min(rewards) == max(rewards)


def all_failed(trajectories: Sequence[Trajectory], _: Advantages, best: float) -> bool:
    """Whether no reward is above `best`."""
    return all(trajectory.reward <= best for trajectory in trajectories)


def all_solved(trajectories: Sequence[Trajectory], _: Advantages, least: float) -> bool:
    """Whether every reward is at least `least`."""
    return all(trajectory.reward >= least for trajectory in trajectories)


def mean_outside(trajectories: Sequence[Trajectory], _: Advantages, low: float, high: float) -> bool:
    """Whether the group's mean reward lies outside [low, high]: the task is too hard or too easy for the policy."""
    return not low <= mean_of([trajectory.reward for trajectory in trajectories]) <= high


ZERO_VARIANCE = GroupFilter("zero_variance", 1, zero_variance)
FILTERS = (
    ZERO_VARIANCE,
    GroupFilter("all_failed", 1, all_failed, ("best",)),
    GroupFilter("all_solved", 1, all_solved, ("least",)),
    GroupFilter("mean_outside", 1, mean_outside, ("low", "high")),
)
