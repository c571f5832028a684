"""What rows are asked for: filters, choices and their legal values, as one value that the manifest repeats."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from turnlog.consumers.datasets.errors import BadQuery
from turnlog.schemas.events import Outcome, Purpose

DEDUPES = ("none", "tokens", "task")
PAIRS = ("extremes", "all")


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Filters; an empty tuple or None lets everything pass. docs/datasets.md has an example of each."""

    runs: tuple[str, ...] = ()
    """Run ids, or `any`; none is the run of the settings."""
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
    """Of the oldest weight version among a row's sampled tokens."""
    max_version: int | None = None
    """Of the newest."""
    since_ms: int | None = None
    """Record timestamp, milliseconds since 1970, inclusive."""
    until_ms: int | None = None
    """Exclusive."""
    min_step: int | None = None
    """batch_index of the manifest that trained the row, inclusive."""
    max_step: int | None = None
    environment_versions: tuple[str, ...] = ()
    expire_before: tuple[str, ...] = ()
    """VERSION, or NAME=VERSION for one environment: rows of older versions have expired."""
    dedupe: str = "none"
    """none | tokens: equal content counts once | task: the first group of a task that gives a row"""
    best_of_group: bool = False
    """sft: only the best rewarded session of a group."""
    pairs: str = "extremes"
    """preference: extremes: the best against the worst of a group | all: every two of unequal reward"""
    min_margin: float = 0.0
    """preference: least difference of the rewards of a pair."""

    def check(self, view: str) -> None:
        """Raises BadQuery naming the option."""
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
        if self.best_of_group and view != "sft":
            raise BadQuery(f"best_of_group is of the view sft, not of {view}")
        if (self.pairs != "extremes" or self.min_margin) and view != "preference":
            raise BadQuery(f"pairs and min_margin are of the view preference, not of {view}")
        if self.min_margin < 0:
            raise BadQuery(f"min_margin {self.min_margin} must not be negative")

    def asked(self) -> dict[str, Any]:
        """What differs from the defaults, for the manifest."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        defaults = dataclasses.asdict(Query())
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in given.items()
            if value != defaults[name] or name == "purposes"
        }

    @property
    def joins_tasks(self) -> bool:
        """Some filter needs RolloutRequested."""
        return bool(self.datasets or self.task_types)

    @property
    def joins_environments(self) -> bool:
        """Some filter needs SessionStarted."""
        return bool(self.environment_versions or self.expire_before)

    @property
    def joins_steps(self) -> bool:
        """Some filter needs the manifests of batches."""
        return self.min_step is not None or self.max_step is not None


def version_key(version: str) -> tuple[tuple[int, int | str], ...]:
    """Versions in the order that people mean: runs of digits compare as numbers, the rest as text."""
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in re.findall(r"\d+|[^\d.\-_]+", version))
