"""What the groups of purpose `eval` say of each weight version.

A session counts for the version that sampled all of it; one that spans a weight update is `mixed` and counts for none.
A session that failed for reasons of ours, or that nobody could judge, is `excluded`: it is no failure of the policy's.

pass@k is the unbiased estimator of Chen et al. 2021, "Evaluating Large Language Models Trained on Code", eq. 1: of a
task with n samples, c of which passed, 1 - C(n - c, k) / C(n, k), averaged over the tasks with n >= k. Its interval is
Wilson's (1927) at 95 % with a task as the unit, since samples of one task are no independent draws; no estimate of a
task varies more than a coin, so that it is rather too wide. The mean reward's is 1.96 standard errors over tasks.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

from turnlog.processors.core.fold.settlement import PASS
from turnlog.schemas.events import (
    Event,
    GroupRequested,
    GroupScored,
    Purpose,
    TurnTreeAssembled,
    WeightVersionPublished,
)

Z = 1.959963984540054
"""Of a two-sided 95 %."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with its 95 % interval; without one, low and high are the figure."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def pass_at(k: int, samples: int, passed: int) -> float:
    """Of one task: the chance that of k samples at least one passes. Needs k <= samples."""
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def wilson(share: float, count: int) -> Estimate:
    """The score interval of a share of `count` draws."""
    middle, spread = share + Z * Z / (2 * count), Z * math.sqrt(share * (1 - share) / count + Z * Z / (4 * count**2))
    whole = 1 + Z * Z / count
    return Estimate(share, max(0.0, (middle - spread) / whole), min(1.0, (middle + spread) / whole))


def mean(values: Sequence[float]) -> Estimate:
    """Of one value per task."""
    middle = fmean(values)
    spread = Z * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return Estimate(middle, middle - spread, middle + spread)


@dataclass(slots=True)
class Version:
    """The rewards that one weight version earned."""

    number: int
    rewards: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """By task."""
    step: int | None = None
    checkpoint: str | None = None

    @property
    def sessions(self) -> int:
        """That count."""
        return sum(map(len, self.rewards.values()))

    @property
    def reward(self) -> Estimate:
        """Mean over tasks of the mean of each."""
        return mean([fmean(of_task) for of_task in self.rewards.values()])

    def passing(self, k: int) -> Estimate | None:
        """pass@k over the tasks with so many samples; None where no task has them."""
        found = [
            pass_at(k, len(of_task), sum(reward >= PASS for reward in of_task))
            for of_task in self.rewards.values()
            if len(of_task) >= k
        ]
        return wilson(fmean(found), len(found)) if found else None

    @property
    def rank(self) -> tuple[float, float, int]:
        """By the lower end of pass@1, so that a version with few tasks does not lead by luck; then reward, then age."""
        first = self.passing(1)
        return (first.low if first else 0.0, self.reward.value, self.number)

    def body(self, ks: Iterable[int]) -> dict[str, Any]:
        """As JSON."""
        passing = {str(k): told for k in ks if (told := self.passing(k)) is not None}
        return {
            "version": self.number,
            "step": self.step,
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
    """What eval groups say."""

    versions: dict[int, Version] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    """mixed | excluded -> sessions."""
    asked: int = 0
    """Groups that the feeder asked for; those of a service of yours are not among them."""
    scored: int = 0
    """Groups."""

    @property
    def best(self) -> Version | None:
        """See Version.rank."""
        return max(self.versions.values(), key=lambda version: version.rank, default=None)

    def in_order(self) -> list[Version]:
        """Oldest first."""
        return [self.versions[number] for number in sorted(self.versions)]

    def ks(self) -> list[int]:
        """1, 2, 4, ... up to the samples of a task."""
        most = max(
            (len(of_task) for version in self.versions.values() for of_task in version.rewards.values()), default=1
        )
        return [1 << power for power in range(most.bit_length())]

    def add(self, scored: GroupScored, sampled_by: Mapping[str, tuple[int, int]]) -> None:
        """`sampled_by`: session -> oldest and newest version of its sampled tokens."""
        self.scored += 1
        for rollout in scored.rollouts:
            oldest, newest = sampled_by.get(rollout.session_id, (-1, -1))
            if rollout.reward is None or rollout.excluded_reason is not None or newest < 0:
                self.left_out["excluded"] += 1
            elif oldest != newest:
                self.left_out["mixed"] += 1
            else:
                version = self.versions.setdefault(newest, Version(newest))
                version.rewards[scored.task_id].append(rollout.reward)


class EvalGroups:
    """The fold of eval groups, in any order of the topics; repeats change nothing. Of sessions that train it holds what
    their group's score has not let go of yet, and the group's id."""

    READS = frozenset(one.__name__ for one in (GroupRequested, GroupScored, TurnTreeAssembled, WeightVersionPublished))
    """Records."""

    def __init__(self) -> None:
        self._asked: dict[str, int] = {}
        """Group -> its round: how often [eval] every draws were trained before it was asked for"""
        self._scored: dict[str, GroupScored] = {}
        self._trees: defaultdict[str, dict[str, tuple[int, int]]] = defaultdict(dict)
        self._training: set[str] = set()
        self.published: dict[int, WeightVersionPublished] = {}
        """By version."""

    def apply(self, event: Event) -> None:
        """Fold one event."""
        if isinstance(event, WeightVersionPublished):
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

    def settled(self, round_: int) -> bool:
        """Whether nothing of a round is still to come; one that was passed over is settled with the next."""
        waiting = {asked for group, asked in self._asked.items() if group not in self._scored}
        return round_ not in waiting and round_ <= max(self._asked.values(), default=-1)

    def evaluations(self) -> Evaluations:
        """What they say so far."""
        found = Evaluations(asked=len(self._asked))
        for group, event in self._scored.items():
            found.add(event, self._trees.get(group, {}))
        for number, version in found.versions.items():
            if (published := self.published.get(number)) is not None:
                version.step, version.checkpoint = published.step, published.checkpoint
        return found


def versions_of(tree: TurnTreeAssembled) -> tuple[int, int]:
    """Oldest and newest weight version of a session's sampled tokens; -1 without any."""
    sampled = [node for node in tree.nodes if node.version_max >= 0]
    return (
        min((node.version_min for node in sampled), default=-1),
        max((node.version_max for node in sampled), default=-1),
    )
