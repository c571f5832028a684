"""Accounts of tokens: sampled = trained + masked by reason, and what a disagreement between two records looks like."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

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
