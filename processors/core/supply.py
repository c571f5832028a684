"""What agent.turns and agent.token-snapshots supply for one session: the first record of each turn, checked."""

from __future__ import annotations

from collections.abc import Iterable

from turnlog.processors.core.errors import FoldError
from turnlog.processors.core.turns import (
    Kinship,
    RefusedTokens,
    Tokens,
    TurnKey,
    key_of,
    kinship,
    refused_tokens,
    tokens,
)
from turnlog.schemas.events import TokenSnapshot, TurnCompleted
from turnlog.schemas.types import TurnId


class Supply:
    """Data of one session. Each topic alone, in its own order, decides what stands here."""

    def __init__(self) -> None:
        self.kinships: dict[TurnKey, Kinship | None] = {}
        """None: refused."""
        self.snapshots: dict[TurnKey, Tokens | RefusedTokens] = {}
        self._epochs: dict[str, str] = {}

    def add_turn(self, event: TurnCompleted) -> None:
        """Keep the first record of a turn. Raises BaseNotBefore after keeping it as refused."""
        turn = self._key(event.turn)
        if turn not in self.kinships:
            self.kinships[turn] = None
            self.kinships[turn] = kinship(event)

    def add_snapshot(self, offset: int, event: TokenSnapshot) -> None:
        """Keep the first record of a turn. Raises SnapshotError after keeping it as refused."""
        turn = self._key(event.turn)
        if turn in self.snapshots:
            return
        parent = self.snapshots.get(key_of(event.parent_turn)) if event.parent_turn is not None else None
        try:
            self.snapshots[turn] = tokens(event, offset, parent if isinstance(parent, Tokens) else None)
        except FoldError:
            self.snapshots[turn] = refused_tokens(event, offset)
            raise

    def refused(self, named: Iterable[TurnKey]) -> bool:
        """Whether a record of a named turn was refused."""
        return any(self.kinships[turn] is None or isinstance(self.snapshots[turn], RefusedTokens) for turn in named)

    def end(self, named: Iterable[TurnKey]) -> int:
        """Highest snapshot offset of the named turns, -1 for none.

        What stands at or below it has been read whenever the named turns are supplied, whatever the order of topics.
        """
        return max((self.snapshots[turn].offset for turn in named), default=-1)

    def key(self) -> object:
        """Canonical comparable value."""
        return (
            tuple(sorted((turn, repr(kin)) for turn, kin in self.kinships.items())),
            tuple(sorted(_snapshot_key(turn, snapshot) for turn, snapshot in self.snapshots.items())),
        )

    def _key(self, turn: TurnId) -> TurnKey:
        """A key on one copy of its epoch's name: thousands of turns share it."""
        return self._epochs.setdefault(turn.epoch, turn.epoch), turn.index


def output_tokens(snapshot: Tokens | RefusedTokens) -> int:
    """How many tokens the turn sampled."""
    return len(snapshot.output) if isinstance(snapshot, Tokens) else snapshot.output_tokens


def _snapshot_key(turn: TurnKey, snapshot: Tokens | RefusedTokens) -> tuple[TurnKey, int, int, str]:
    about = snapshot.prompt_sha256 if isinstance(snapshot, Tokens) else "refused"
    return turn, snapshot.offset, output_tokens(snapshot), about
