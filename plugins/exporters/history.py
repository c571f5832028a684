"""The effective optimizer steps of a run as a curve: what each step adds to it, and which steps a later one takes
back."""

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
"""Numeric fields of StepCompleted."""
OFFSET = "log/offset"
"""Name of the value that holds the step's offset on train-steps. A tracker's position is the highest one in its
files."""


@dataclass(frozen=True, slots=True)
class Point:
    """A step with its position on the log."""

    offset: int
    time_s: float
    """Unix time at which the step was written."""
    step: StepCompleted

    def scalars(self) -> dict[str, float]:
        """Return all numbers of the step by name, such as train/loss, seconds/step, metrics/kl."""
        step = self.step
        plain = {f"train/{name}": getattr(step, name) for name in PLAIN}
        maps: dict[str, Mapping[str, float]] = {"masked": step.masked, "seconds": step.seconds, "metrics": step.metrics}
        inside = {f"{kind}/{name}": value for kind, values in maps.items() for name, value in sorted(values.items())}
        return {name: float(value) for name, value in (plain | inside).items() if value is not None}


@dataclass(slots=True)
class StepHistory:
    """The effective steps of the records up to some position."""

    points: list[Point] = field(default_factory=list)
    """Ordered by batch."""
    life: int = 0
    """Number of times that steps were taken back."""

    def take(self, point: Point) -> bool:
        """Add a step, and return whether it is effective. A step of a later trainer generation takes back the step of
        its batch and all later ones: they are done again, since its weights do not include them."""
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
    """The files of an external program. The position is read from the files themselves and stored nowhere else, so the
    two cannot disagree."""

    there: int
    """Highest offset in the files; -1 if there is none."""

    def take(self, history: StepHistory) -> None:
        """Write the last point of a history unless the files contain it already. Raises OSError."""
        ...

    def flush(self) -> None:
        """Make everything that was written visible to readers of the files."""
        ...
