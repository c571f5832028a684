"""Token accounting: every output token is trained once or masked under one named reason (invariant I3)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from turnlog.processors.core.errors import BooksDoNotBalance
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
    """Count of output tokens, turn by turn. `sampled` is counted separately, so that a lost turn is noticed."""

    def __init__(self) -> None:
        self.trained = 0
        self._masked: Counter[str] = Counter()

    def enter(self, tokens: int, reason: MaskReason | None) -> None:
        """Count a turn's output tokens as trained (reason None) or masked."""
        if reason is None:
            self.trained += tokens
        elif tokens:
            self._masked[reason.value] += tokens

    def close(self, about: str, sampled: int) -> TreeBooks:
        """Return the totals, reasons in alphabetical order. Raises BooksDoNotBalance if `sampled` is not trained +
        masked.
        """
        masked = dict(sorted(self._masked.items()))
        if sampled != self.trained + sum(masked.values()):
            raise BooksDoNotBalance(about, sampled, self.trained, masked)
        return TreeBooks(sampled, self.trained, masked)


LEVELS = ("session", "group", "batch", "run")


@dataclass(slots=True)
class TokenAccount:
    """Output tokens of a session, a group or a run; for a batch, those of the samples that its rollout batch took."""

    sampled: int = 0
    trained: int = 0
    masked: Counter[str] = field(default_factory=Counter)

    @property
    def missing(self) -> int:
        """Number of sampled tokens that are neither trained nor masked; negative if tokens were counted twice."""
        return self.sampled - self.trained - self.masked.total()

    @property
    def balance(self) -> bool:
        """True if sampled == trained + masked and no entry is negative."""
        return self.missing == 0 and min((self.trained, *self.masked.values())) >= 0

    def mask(self, masked: Mapping[str, int]) -> None:
        """Add masked tokens by reason; entries of 0 tokens are ignored."""
        self.masked.update({reason: tokens for reason, tokens in masked.items() if tokens})

    def body(self) -> dict[str, object]:
        """Return the account as a JSON object, reasons in alphabetical order."""
        return {"sampled": self.sampled, "trained": self.trained, "masked": dict(sorted(self.masked.items())),
                "balance": self.balance}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Imbalance:
    """A disagreement between two records."""

    level: str
    id: str
    says: str

    def __str__(self) -> str:
        return f"{self.level} {self.id}: {self.says}"


def total(accounts: Iterable[TokenAccount]) -> TokenAccount:
    """Return the sum of `accounts`."""
    found = TokenAccount()
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
) -> TokenAccount:
    """Add up groups, manifests and steps against the tokens that snapshots sampled.

    `steps` may hold several trainer generations of a batch; the highest is effective. Groups that were never scored, or
    scored and never taken into a rollout batch, or formed into a batch that no step trained, are `unused`. If a rollout
    batch trained tokens that no group supplied, or lost tokens that one supplied, the account does not balance.
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
    trained = _count_trained(manifests, counting_steps(steps), masked)
    return TokenAccount(
        sum(sampled_by_group.values()), trained, Counter({k: n for k, n in sorted(masked.items()) if n})
    )


class OfBatch(Protocol):
    """A step, or the retained part of one."""

    @property
    def batch_index(self) -> int:
        """Index of the batch that was stepped on."""

    @property
    def incarnation(self) -> int:
        """Generation of the trainer."""


Step = TypeVar("Step", bound=OfBatch)


def counting_step(known: Step | None, step: Step) -> Step:
    """Return the effective one of two steps of a batch, `step` being the later on the log: that of the higher trainer
    generation, and within one generation the later.
    """
    return step if known is None or known.incarnation <= step.incarnation else known


def counting_steps(steps: Iterable[Step]) -> dict[int, Step]:
    """Return the effective step of each batch, by index; `steps` must be in log order."""
    found: dict[int, Step] = {}
    for step in steps:
        found[step.batch_index] = counting_step(found.get(step.batch_index), step)
    return dict(sorted(found.items()))


def _count_trained(
    manifests: list[SampleBatchFormed | BatchSkipped], steps: dict[int, StepCompleted], masked: Counter[str]
) -> int:
    """Return the number of tokens that steps trained; add what batches and steps masked to `masked`."""
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
