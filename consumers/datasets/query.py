"""The query of a dataset build: filters, options and their legal values, as one value that the manifest repeats.

Filters are applied one after another. A row that is removed is counted under the first filter that it failed.
"""

from __future__ import annotations

import dataclasses
import re
import string
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

from turnlog.consumers.datasets import BadQuery
from turnlog.schemas.events import Environment, Outcome, Purpose

DEDUPES = ("none", "tokens", "task")
PAIRS = ("extremes", "all")


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Filters and options; an empty tuple or None admits everything. docs/datasets.md has an example of each."""

    runs: tuple[str, ...] = ()
    """Run ids, or `any`. If empty, the run of the settings."""
    recipes: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()
    task_types: tuple[str, ...] = ()
    """`task_type`, else `type`, of the dataset row in RolloutRequested."""
    tasks: tuple[str, ...] = ()
    purposes: tuple[str, ...] = (Purpose.train.value,)
    outcomes: tuple[str, ...] = ()
    min_reward: float | None = None
    max_reward: float | None = None
    min_version: int | None = None
    """Minimum of the oldest weight version among a row's sampled tokens."""
    max_version: int | None = None
    """Maximum of the newest weight version among a row's sampled tokens."""
    since_ms: int | None = None
    """Lower limit of the record timestamp in milliseconds since 1970, inclusive."""
    until_ms: int | None = None
    """Upper limit of the record timestamp, exclusive."""
    min_step: int | None = None
    """Lower limit of the batch_index of the manifest that trained the row, inclusive."""
    max_step: int | None = None
    environment_versions: tuple[str, ...] = ()
    expire_before: tuple[str, ...] = ()
    """VERSION, or NAME=VERSION for one environment. Rows of older versions are removed."""
    dedupe: str = "none"
    """Rule for repeated rows: none | tokens: equal content counts once | task: only the first group of a task that
    yields a row"""
    best_of_group: bool = False
    """View sft: take only the session with the highest reward of each group."""
    best: int | None = None
    """View sft: maximum number of sessions per group; those with the highest rewards are taken."""
    pairs: str = "extremes"
    """View preference: extremes (the best against the worst of a group) | all (every two sessions of unequal
    reward)."""
    min_margin: float = 0.0
    """View preference: minimum difference between the rewards of a pair."""

    def check(self, view: str) -> None:
        """Check the values for a view. Raises BadQuery, which names the option."""
        for name, legal in (("purposes", Purpose), ("outcomes", Outcome)):
            for value in getattr(self, name):
                if value not in list(legal):
                    raise BadQuery(f"{name}: {value!r} is none of {', '.join(legal)}")
        for low, high in (("min_reward", "max_reward"), ("min_version", "max_version"), ("min_step", "max_step"),
                          ("since_ms", "until_ms")):  # fmt: skip
            least, most = getattr(self, low), getattr(self, high)
            if least is not None and most is not None and least > most:
                raise BadQuery(f"{low} {least} is above {high} {most}: nothing could pass")
        for name, value, choices in (("dedupe", self.dedupe, DEDUPES), ("pairs", self.pairs, PAIRS)):
            if value not in choices:
                raise BadQuery(f"{name}: {value!r} is none of {', '.join(choices)}")
        self._check_best(view)
        if (self.pairs != "extremes" or self.min_margin) and view != "preference":
            raise BadQuery(f"pairs and min_margin need the view preference, not {view}")
        if self.min_margin < 0:
            raise BadQuery(f"min_margin {self.min_margin} must not be negative")

    def _check_best(self, view: str) -> None:
        for name, given in (("best_of_group", self.best_of_group), ("best", self.best is not None)):
            if given and view != "sft":
                raise BadQuery(f"{name} needs the view sft, not {view}")
        if self.best is not None and self.best < 1:
            raise BadQuery(f"best {self.best} must be at least 1")

    def non_default_values(self) -> dict[str, Any]:
        """Return the values that differ from the defaults, and `purposes`, for the manifest."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        defaults = dataclasses.asdict(Query())
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in given.items()
            if value != defaults[name] or name == "purposes"
        }

    @property
    def joins_tasks(self) -> bool:
        """Whether a filter needs RolloutRequested."""
        return bool(self.datasets or self.task_types)

    @property
    def joins_environments(self) -> bool:
        """Whether a filter needs SessionStarted."""
        return bool(self.environment_versions or self.expire_before)

    @property
    def joins_steps(self) -> bool:
        """Whether a filter needs the manifests of batches."""
        return self.min_step is not None or self.max_step is not None


def version_key(version: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key for any text as a version, in the order that people expect: runs of digits compare as numbers,
    the rest as text."""
    return tuple(map(_part_key, re.findall(r"[0-9]+|[^0-9.\-_]+", version)))


def _part_key(part: str) -> tuple[int, int, str]:
    """Compare digits by their count and then as text, and accept only ASCII digits. Versions are chosen freely by
    whoever opens a session, and int() rejects the superscript two, which Python counts as a digit, and five thousand
    digits."""
    if part[0] not in string.digits:
        return 1, 0, part
    significant = part.lstrip("0")
    return 0, len(significant), significant


class TaskFacts(NamedTuple):
    """The facts that RolloutRequested holds about a group."""

    dataset: str | None = None
    task_type: str | None = None


@dataclass(slots=True)
class Joined:
    """Facts that a candidate's own record lacks, limited to those that the query needs."""

    tasks: dict[str, TaskFacts] = field(default_factory=dict)
    """Keyed by group id."""
    trained: set[bytes] = field(default_factory=set)
    """`short` ids of the samples and sessions that the selected steps trained."""


class Facts(NamedTuple):
    """Properties of a sample or session that filters look at."""

    group_id: str
    task_id: str
    purpose: Purpose
    outcome: Outcome
    reward: float
    timestamp_ms: int
    trained_as: str
    """Id of the sample or session that manifests use."""


class Filters:
    """The filters of one query. `removed` counts removed candidates by filter."""

    def __init__(self, query: Query, joined: Joined, removed: Counter[str]) -> None:
        self._query = query
        self._joined = joined
        self.removed = removed

    def admits(self, facts: Facts) -> bool:
        """Return whether every filter admits the candidate; count it if not."""
        return self.count_removal(next(self._failed_filters(facts), None))

    def admits_recipe(self, recipe: str) -> bool:
        """See admits."""
        return self.count_removal("recipe" if self._query.recipes and recipe not in self._query.recipes else None)

    def admits_versions(self, least: int, most: int) -> bool:
        """See admits."""
        query = self._query
        if query.min_version is not None and least < query.min_version:
            return self.count_removal("min_version")
        return self.count_removal("max_version" if query.max_version is not None and most > query.max_version else None)

    def check_environment(self, environment: Environment) -> str | None:
        """Return the name of the filter that an environment fails, or None."""
        query = self._query
        if query.environment_versions and environment.version not in query.environment_versions:
            return "environment_version"
        for each in query.expire_before:
            name, _, version = each.rpartition("=")
            if name in ("", environment.name) and version_key(environment.version) < version_key(version):
                return "expire_before"
        return None

    def count_removal(self, reason: str | None) -> bool:
        """Count the reason, if there is one. Return True if there is none."""
        if reason is not None:
            self.removed[reason] += 1
        return reason is None

    def _failed_filters(self, facts: Facts) -> Iterator[str]:
        query = self._query
        if query.purposes and facts.purpose not in query.purposes:
            yield "purpose"
        if query.tasks and facts.task_id not in query.tasks:
            yield "task"
        if query.joins_tasks:
            task = self._joined.tasks.get(facts.group_id, TaskFacts())
            if query.datasets and task.dataset not in query.datasets:
                yield "dataset"
            if query.task_types and task.task_type not in query.task_types:
                yield "task_type"
        if query.outcomes and facts.outcome not in query.outcomes:
            yield "outcome"
        if query.min_reward is not None and facts.reward < query.min_reward:
            yield "min_reward"
        if query.max_reward is not None and facts.reward > query.max_reward:
            yield "max_reward"
        if query.since_ms is not None and facts.timestamp_ms < query.since_ms:
            yield "since"
        if query.until_ms is not None and facts.timestamp_ms >= query.until_ms:
            yield "until"
        if query.joins_steps and short(facts.trained_as) not in self._joined.trained:
            yield "step"


class Seen:
    """Rows already written, as far as `dedupe` needs them: 16 bytes per row, or one group per task."""

    def __init__(self, dedupe: str, removed: Counter[str]) -> None:
        self._dedupe = dedupe
        self._removed = removed
        self._contents: set[bytes] = set()
        self._groups: dict[bytes, bytes] = {}

    @property
    def compares_content(self) -> bool:
        """Whether `admits` uses the content."""
        return self._dedupe == "tokens"

    def admits(self, task_id: str, group_id: str, content: bytes) -> bool:
        """Return False for a repeated row, and count it. `content` is what must differ: token ids or messages."""
        if self._dedupe == "tokens":
            key = blake2b(content, digest_size=16).digest()
            new = key not in self._contents
            self._contents.add(key)
        elif self._dedupe == "task":
            new = self._groups.setdefault(short(task_id), short(group_id)) == short(group_id)
        else:
            new = True
        if not new:
            self._removed[f"dedupe_{self._dedupe}"] += 1
        return new


def short(name: str) -> bytes:
    """Return 16 bytes that replace an id in large sets."""
    return blake2b(name.encode(), digest_size=16).digest()
