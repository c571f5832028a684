"""Evaluation of each weight version from the groups of purpose `eval`.

A session is attributed to the version that sampled all of it. A session that spans a weight update is `mixed` and is
attributed to none. A session that failed for infrastructure reasons, or that nobody could judge, is `excluded`: it is
not a failure of the policy.

pass@k is the unbiased estimator of Chen et al. 2021, "Evaluating Large Language Models Trained on Code", eq. 1: for a
task with n samples, c of which passed, 1 - C(n - c, k) / C(n, k), averaged over the tasks with n >= k. Its interval is
Wilson's (1927) at 95 % with a task as the unit, since samples of one task are not independent; the estimate of a task
varies no more than a coin toss, so the interval is rather too wide. The interval of the mean reward is 1.96 standard
errors over tasks.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

from turnlog.processors.core.fold.settlement import PASS
from turnlog.processors.core.views.progress import ANNOUNCED
from turnlog.schemas.events import (
    Event,
    GroupRequested,
    GroupScored,
    Purpose,
    TurnTreeAssembled,
    WeightVersionPublished,
)

Z = 1.959963984540054
"""Quantile of the normal distribution for a two-sided 95 % interval."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its 95 % interval; if there is no interval, low and high equal the value."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def pass_at(k: int, samples: int, passed: int) -> float:
    """Return the probability that at least one of k samples of a task passes. Needs k <= samples."""
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def wilson(share: float, count: int) -> Estimate:
    """Return Wilson's score interval for a share observed in `count` trials."""
    middle, spread = share + Z * Z / (2 * count), Z * math.sqrt(share * (1 - share) / count + Z * Z / (4 * count**2))
    whole = 1 + Z * Z / count
    return Estimate(share, max(0.0, (middle - spread) / whole), min(1.0, (middle + spread) / whole))


def mean(values: Sequence[float]) -> Estimate:
    """Return the mean of one value per task, with its interval."""
    middle = fmean(values)
    spread = Z * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return Estimate(middle, middle - spread, middle + spread)


@dataclass(slots=True)
class VersionRewards:
    """The rewards of one weight version."""

    number: int
    rewards: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Task -> rewards of its sessions."""
    step: int | None = None
    checkpoint: str | None = None
    state: str | None = None
    """announced (no file holds the weights) | durable."""

    @property
    def sessions(self) -> int:
        """Number of attributed sessions."""
        return sum(map(len, self.rewards.values()))

    @property
    def reward(self) -> Estimate:
        """Mean over tasks of the mean reward of each task."""
        return mean([fmean(of_task) for of_task in self.rewards.values()])

    def passing(self, k: int) -> Estimate | None:
        """Return pass@k over the tasks with at least k samples; None if there are none."""
        found = [
            pass_at(k, len(of_task), sum(reward >= PASS for reward in of_task))
            for of_task in self.rewards.values()
            if len(of_task) >= k
        ]
        return wilson(fmean(found), len(found)) if found else None

    @property
    def rank(self) -> tuple[float, float, int]:
        """Sort key: the lower bound of pass@1, so that a version with few tasks does not lead by luck; then reward,
        then number.
        """
        first = self.passing(1)
        return (first.low if first else 0.0, self.reward.value, self.number)

    def body(self, ks: Iterable[int]) -> dict[str, Any]:
        """Return the version as a JSON object, with pass@k for each of `ks`."""
        passing = {str(k): told for k in ks if (told := self.passing(k)) is not None}
        return {
            "version": self.number,
            "step": self.step,
            "state": self.state,
            "checkpoint": self.checkpoint,
            "tasks": len(self.rewards),
            "sessions": self.sessions,
            "reward": _body(self.reward),
            "pass": {k: _body(told) for k, told in passing.items()},
        }


def _body(told: Estimate) -> dict[str, float]:
    return {"value": told.value, "low": told.low, "high": told.high}


@dataclass(slots=True)
class Evaluations:
    """Results of the eval groups."""

    versions: dict[int, VersionRewards] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    """mixed | excluded -> number of sessions."""
    asked: int = 0
    """Number of groups that the feeder requested; groups of an external service are not included."""
    scored: int = 0
    """Number of groups scored."""

    @property
    def best(self) -> VersionRewards | None:
        """The version with the highest `VersionRewards.rank`; None if there are none."""
        return max(self.versions.values(), key=lambda version: version.rank, default=None)

    def in_order(self) -> list[VersionRewards]:
        """Return the versions, oldest first."""
        return [self.versions[number] for number in sorted(self.versions)]

    def ks(self) -> list[int]:
        """Return 1, 2, 4, ... up to the largest number of samples of a task."""
        most = max(
            (len(of_task) for version in self.versions.values() for of_task in version.rewards.values()), default=1
        )
        return [1 << power for power in range(most.bit_length())]

    def add(self, scored: GroupScored, sampled_by: Mapping[str, tuple[int, int]]) -> None:
        """Add the rewards of a scored group. `sampled_by` maps a session to the oldest and newest version of its
        sampled tokens.
        """
        self.scored += 1
        for rollout in scored.rollouts:
            oldest, newest = sampled_by.get(rollout.session_id, (-1, -1))
            if rollout.reward is None or rollout.excluded_reason is not None or newest < 0:
                self.left_out["excluded"] += 1
            elif oldest != newest:
                self.left_out["mixed"] += 1
            else:
                version = self.versions.setdefault(newest, VersionRewards(newest))
                version.rewards[scored.task_id].append(rollout.reward)


class EvalGroups:
    """Fold of eval groups, with the topics in any order; repeated records change nothing.

    Of sessions that train, it retains the trees of groups that are not scored yet, and the ids of scored groups.
    """

    READS = frozenset(one.__name__ for one in (GroupRequested, GroupScored, TurnTreeAssembled, WeightVersionPublished))
    """Names of the record types that the fold reads."""

    def __init__(self) -> None:
        self._asked: dict[str, int] = {}
        """Group -> its round: how often [eval] every rollout batches were trained before it was requested."""
        self._scored: dict[str, GroupScored] = {}
        self._trees: defaultdict[str, dict[str, tuple[int, int]]] = defaultdict(dict)
        self._training: set[str] = set()
        self.published: dict[int, WeightVersionPublished] = {}
        """Version -> its publication, the record that names its files if there is one."""

    def apply(self, event: Event) -> None:
        """Fold one event."""
        if isinstance(event, WeightVersionPublished):
            if event.state != ANNOUNCED or event.version not in self.published:
                self.published[event.version] = event
        elif isinstance(event, GroupRequested) and event.purpose is Purpose.eval:
            self._asked[event.group_id] = event.dataset_epoch
        elif isinstance(event, GroupScored):
            if event.purpose is Purpose.eval:
                self._scored.setdefault(event.group_id, event)
            else:
                self._training.add(event.group_id)
                self._trees.pop(event.group_id, None)
        elif isinstance(event, TurnTreeAssembled) and event.group_id not in self._training:
            self._trees[event.group_id][event.session_id] = versions_of(event)

    def is_settled(self, round_: int) -> bool:
        """Whether no group of a round is still open; a round that was skipped is settled with the next."""
        waiting = {asked for group, asked in self._asked.items() if group not in self._scored}
        return round_ not in waiting and round_ <= max(self._asked.values(), default=-1)

    def evaluations(self) -> Evaluations:
        """Return the results so far."""
        found = Evaluations(asked=len(self._asked))
        for group, event in self._scored.items():
            found.add(event, self._trees.get(group, {}))
        for number, version in found.versions.items():
            if (published := self.published.get(number)) is not None:
                version.step, version.checkpoint = published.step, published.checkpoint
                version.state = published.state
        return found


def versions_of(tree: TurnTreeAssembled) -> tuple[int, int]:
    """Return the oldest and newest weight version of a session's sampled tokens; (-1, -1) without sampled tokens."""
    sampled = [node for node in tree.nodes if node.version_max >= 0]
    return (
        min((node.version_min for node in sampled), default=-1),
        max((node.version_max for node in sampled), default=-1),
    )
