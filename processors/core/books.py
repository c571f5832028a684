"""Books: every output token is trained once or masked under one named reason (invariant I3)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from turnlog.processors.core import BooksDoNotBalance
from turnlog.schemas.events import (
    BatchSkipped,
    GroupScored,
    GroupStatus,
    MaskReason,
    SampleBatchFormed,
    StepCompleted,
    TreeBooks,
)


class Ledger:
    """Counts output tokens, turn by turn. `sampled` is counted apart, so that a lost turn shows."""

    def __init__(self) -> None:
        self.trained = 0
        self._masked: Counter[str] = Counter()

    def enter(self, tokens: int, reason: MaskReason | None) -> None:
        """Count a turn's output tokens as trained (None) or masked."""
        if reason is None:
            self.trained += tokens
        elif tokens:
            self._masked[reason.value] += tokens

    def close(self, about: str, sampled: int) -> TreeBooks:
        """The books, reasons in alphabetical order. Raises BooksDoNotBalance."""
        masked = dict(sorted(self._masked.items()))
        if sampled != self.trained + sum(masked.values()):
            raise BooksDoNotBalance(about, sampled, self.trained, masked)
        return TreeBooks(sampled, self.trained, masked)


LEVELS = ("session", "group", "batch", "run")


@dataclass(slots=True)
class Account:
    """Output tokens of a session, a group or a run; of a batch, those of the samples that its draw took."""

    sampled: int = 0
    trained: int = 0
    masked: Counter[str] = field(default_factory=Counter)

    @property
    def missing(self) -> int:
        """Sampled tokens that are neither trained nor masked; below zero, tokens that were counted twice."""
        return self.sampled - self.trained - self.masked.total()

    @property
    def balance(self) -> bool:
        """sampled == trained + masked, and no entry is below zero."""
        return self.missing == 0 and min((self.trained, *self.masked.values())) >= 0

    def mask(self, masked: Mapping[str, int]) -> None:
        """Add entries; those of no tokens leave no trace."""
        self.masked.update({reason: tokens for reason, tokens in masked.items() if tokens})

    def body(self) -> dict[str, object]:
        """As JSON, reasons in alphabetical order."""
        return {"sampled": self.sampled, "trained": self.trained, "masked": dict(sorted(self.masked.items())),
                "balance": self.balance}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Imbalance:
    """Two records disagree."""

    level: str
    id: str
    says: str

    def __str__(self) -> str:
        return f"{self.level} {self.id}: {self.says}"


def total(accounts: Iterable[Account]) -> Account:
    """Their sum."""
    found = Account()
    for account in accounts:
        found.sampled += account.sampled
        found.trained += account.trained
        found.mask(account.masked)
    return found


def run_books(
    sampled_by_group: dict[str, int],
    scored: Iterable[GroupScored],
    manifests: Iterable[SampleBatchFormed | BatchSkipped],
    steps: Iterable[StepCompleted],
) -> Account:
    """What groups, manifests and steps say, added up against what snapshots sampled.

    `steps` may hold several incarnations of a batch; the highest counts. Groups that were never scored, or
    scored and never drawn, or formed into a batch that no step ate, are `unused`. A draw that trained what
    no group gave, or lost what one gave, leaves the sum short or long: no balance.
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
    trained = _trained(manifests, counting_steps(steps), masked)
    return Account(sum(sampled_by_group.values()), trained, Counter({k: n for k, n in sorted(masked.items()) if n}))


class OfBatch(Protocol):
    """A step, or what is kept of one."""

    @property
    def batch_index(self) -> int:
        """Of the batch that was stepped on."""

    @property
    def incarnation(self) -> int:
        """Of the trainer."""


Step = TypeVar("Step", bound=OfBatch)


def counting_step(known: Step | None, step: Step) -> Step:
    """Which of two steps of a batch counts, `step` being the later on the log: that of the higher incarnation, of one
    incarnation's the later."""
    return step if known is None or known.incarnation <= step.incarnation else known


def counting_steps(steps: Iterable[Step]) -> dict[int, Step]:
    """Of each batch the step that counts, by index; `steps` are in order of the log."""
    found: dict[int, Step] = {}
    for step in steps:
        found[step.batch_index] = counting_step(found.get(step.batch_index), step)
    return dict(sorted(found.items()))


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
