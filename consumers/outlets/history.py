"""The optimizer steps that count, as a curve: what each adds to it, and where one takes others back."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from turnlog.processors.core.books import counting_step
from turnlog.schemas.events import StepCompleted

PLAIN = (
    "batch_index", "draw_index", "incarnation", "loss", "grad_norm", "learning_rate", "reward_mean", "lag_max",
    "lag_excess", "tokens", "trained_tokens", "skipped", "logprob_gap_max", "logprob_gap_mean", "entropy",
    "clip_fraction", "old_cache_tokens", "old_cache_gap_max", "old_cache_gap_mean",
)  # fmt: skip
"""Fields of StepCompleted that are a number."""
OFFSET = "log/offset"
"""Of the step on train-steps: a tracker's position is the highest that stands in it."""


@dataclass(frozen=True, slots=True)
class Point:
    """A step where it stands on the log."""

    offset: int
    time_s: float
    """When it was written, Unix time."""
    step: StepCompleted

    def scalars(self) -> dict[str, float]:
        """Everything that the step says in numbers, by name: train/loss, seconds/step, metrics/kl."""
        step = self.step
        plain = {f"train/{name}": getattr(step, name) for name in PLAIN}
        maps: dict[str, Mapping[str, float]] = {"masked": step.masked, "seconds": step.seconds, "metrics": step.metrics}
        inside = {f"{kind}/{name}": value for kind, values in maps.items() for name, value in sorted(values.items())}
        return {name: float(value) for name, value in (plain | inside).items() if value is not None}


@dataclass(slots=True)
class History:
    """What counts of the records up to one place."""

    points: list[Point] = field(default_factory=list)
    """By batch."""
    life: int = 0
    """How often steps were taken back."""

    def take(self, point: Point) -> bool:
        """Whether the step counts. One of a later incarnation takes back the step of its batch and all behind it: they
        are done again, since its weights never had them."""
        batch = point.step.batch_index
        at = bisect_left(self.points, batch, key=lambda each: each.step.batch_index)
        behind = self.points[at:]
        held = behind[0].step if behind and behind[0].step.batch_index == batch else None
        if counting_step(held, point.step) is not point.step:
            return False
        self.life += bool(behind)
        self.points[at:] = [point]
        return True


class Tracker(Protocol):
    """A program's files, which say themselves how far they are: no position is kept beside them, so that none can
    disagree with them."""

    there: int
    """The highest offset that stands in them; -1 in none."""

    def take(self, history: History) -> None:
        """Write the last point of a history, unless it is there. Raises OSError."""
        ...

    def flush(self) -> None:
        """Let readers of the files see what was written."""
        ...
