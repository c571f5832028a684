"""The books of a run: every sampled token is trained once or masked under one named reason (invariant I3).

Three levels meet here: what groups say, what manifests say, what steps say; against what snapshots sampled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from turnlog.schemas.events import BatchSkipped, GroupScored, GroupStatus, MaskReason, SampleBatchFormed, StepCompleted


@dataclass(frozen=True, slots=True)
class RunBooks:
    """Tokens of a run."""

    sampled: int
    trained: int
    masked: dict[str, int]

    @property
    def balance(self) -> bool:
        """sampled == trained + sum of masked, and no entry below zero."""
        return self.sampled == self.trained + sum(self.masked.values()) and min(self.masked.values(), default=0) >= 0


def run_books(
    sampled_by_group: dict[str, int],
    scored: Iterable[GroupScored],
    manifests: Iterable[SampleBatchFormed | BatchSkipped],
    steps: Iterable[StepCompleted],
) -> RunBooks:
    """Add the levels up. `steps` may hold several incarnations of a batch; the highest counts.

    Groups that were never scored, or scored and never drawn, or formed into a batch that no step ate, are `unused`. A
    draw that trained what no group gave, or lost what one gave, leaves the sum short or long: no balance.
    """
    masked: Counter[str] = Counter()
    taken: set[str] = set()
    unscored = dict(sampled_by_group)
    manifests = list(manifests)
    for manifest in manifests:
        taken.update(manifest.groups)
    for score in scored:
        sampled = unscored.pop(score.group_id, 0)
        masked[MaskReason.late.value] += sampled - score.books.sampled
        masked.update(score.books.masked)
        if score.status is not GroupStatus.trained or score.group_id not in taken:
            masked[MaskReason.unused.value] += score.books.trained
    masked[MaskReason.unused.value] += sum(unscored.values())
    trained = _trained(manifests, {step.batch_index: step for step in sorted(steps, key=_incarnation)}, masked)
    return RunBooks(sum(sampled_by_group.values()), trained, {k: n for k, n in sorted(masked.items()) if n})


def _incarnation(step: StepCompleted) -> int:
    return step.incarnation


def _trained(
    manifests: list[SampleBatchFormed | BatchSkipped], steps: dict[int, StepCompleted], masked: Counter[str]
) -> int:
    """Tokens that steps trained; adds what batches and steps masked to `masked`."""
    trained = 0
    for manifest in manifests:
        masked.update(manifest.masked)
        for row in manifest.dropped:
            masked[row.reason] += row.sampled_tokens
        if isinstance(manifest, BatchSkipped):
            continue
        step = steps.get(manifest.batch_index)
        if step is None:
            masked[MaskReason.unused.value] += manifest.trained_tokens
        else:
            masked.update(step.masked)
            trained += manifest.trained_tokens - sum(step.masked.values())
    return trained
