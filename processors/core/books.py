"""Books: every output token is trained once or masked under one named reason."""

from __future__ import annotations

from collections import Counter

from turnlog.processors.core.errors import BooksDoNotBalance
from turnlog.schemas.events import MaskReason, TreeBooks


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
