"""What became of each session's tokens in its group: a restatement of the fold's books from its records alone.

The fold counts while it folds (settlement.py). Here the same is said again from agent.sessions, the snapshots' counts,
TurnTreeAssembled and GroupScored, so that a record which disagrees with the others is found and named.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from turnlog.processors.core.accounts import Account, Imbalance, total
from turnlog.processors.core.assembly import named_turns
from turnlog.processors.core.spine import Spine
from turnlog.processors.core.turns import TurnKey, key_of
from turnlog.schemas.events import GroupScored, GroupStatus, MaskReason, TreeBooks, TurnTreeAssembled


@dataclass(frozen=True, slots=True)
class Sampled:
    """One turn's output on the log."""

    offset: int
    tokens: int
    refused: bool


@dataclass(frozen=True, slots=True)
class Tree:
    """What is kept of a TurnTreeAssembled: a run has many, and their nodes are large."""

    books: TreeBooks
    bare: bool
    """Without nodes: of a session that names no turn, or of one that was refused."""

    @classmethod
    def of(cls, event: TurnTreeAssembled) -> Tree:
        """Of the record."""
        return cls(event.books, not event.nodes)


@dataclass(slots=True)
class GroupRecords:
    """What the topics say of one group."""

    spine: Spine
    turns: dict[str, dict[TurnKey, Sampled]] = field(default_factory=dict)
    """Session -> its turns; the first snapshot of a turn counts."""
    trees: dict[str, Tree] = field(default_factory=dict)
    score: GroupScored | None = None
    samples: dict[str, int] = field(default_factory=dict)
    """Session -> tokens that its samples mark as trained."""

    def sessions(self) -> dict[str, Account]:
        """Per session: what its samples hold for training, and what the group masks."""
        end = max((self._end(session) for session in self._scored()), default=-1)
        return {session: self._account(session, end) for session in self.turns}

    def imbalances(self, group_id: str, accounts: dict[str, Account]) -> list[Imbalance]:
        """What trees, samples and score say differently from `accounts`."""
        found: list[Imbalance] = []
        for session, tree in self.trees.items():
            end = self._end(session)
            held = sum(turn.tokens for turn in self.turns.get(session, {}).values() if turn.offset <= end)
            books = tree.books
            if held != books.sampled:
                says = f"its tree counts {books.sampled} sampled tokens, the snapshots hold {held}"
                found.append(Imbalance("session", session, says))
            if session in self._worth() and self.samples.get(session, 0) != books.trained:
                says = f"its tree trains {books.trained} tokens, its samples hold {self.samples.get(session, 0)}"
                found.append(Imbalance("session", session, says))
        if self.score is None:
            return found
        said, summed = self.score.books, total(accounts.values())
        late = summed.sampled - said.sampled
        masked = Counter(said.masked) + Counter({MaskReason.late.value: late})
        if (said.trained, +masked) != (summed.trained, +summed.masked):
            says = (f"GroupScored trains {said.trained} and masks {dict(sorted(masked.items()))}, its sessions "
                    f"{summed.trained} and {dict(sorted(summed.masked.items()))}")  # fmt: skip
            found.append(Imbalance("group", group_id, says))
        return found

    def _scored(self) -> list[str]:
        """Sessions that were assembled when the group was scored."""
        vouched = self.spine.vouched
        return [session for session in self.spine.settled if vouched is None or session in vouched]

    def _worth(self) -> set[str]:
        """Sessions with an advantage."""
        rollouts = self.score.rollouts if self.score is not None else ()
        return {rollout.session_id for rollout in rollouts if rollout.advantage is not None}

    def _end(self, session: str) -> int:
        """Offset of the last snapshot that the session's finish names."""
        known, turns = self.spine.sessions.get(session), self.turns.get(session, {})
        if known is None or known.finish is None:
            return -1
        named = [key_of(turn) for turn in named_turns(known)]
        return max((turns[turn].offset for turn in named if turn in turns), default=-1)

    def _account(self, session: str, end: int) -> Account:
        turns = self.turns[session].values()
        account = Account(sampled=sum(turn.tokens for turn in turns))
        if self.score is None:
            account.mask({MaskReason.unused.value: account.sampled})
            return account
        inside = sum(turn.tokens for turn in turns if turn.offset <= end)
        account.mask({MaskReason.late.value: account.sampled - inside})
        reason = self._fate(session)
        if reason is not None:
            account.mask({reason.value: inside})
            return account
        account.trained = self.samples.get(session, 0)
        if session in self.trees:
            account.mask(self.trees[session].books.masked)
        account.mask(self._unnamed(session, end))
        return account

    def _fate(self, session: str) -> MaskReason | None:
        """Why the whole session is masked; None if its tree decides."""
        assert self.score is not None
        if self.score.status is not GroupStatus.trained:
            return MaskReason.discarded_group
        if session not in self._scored():
            return MaskReason.late
        if session in self._worth():
            return None
        return MaskReason.refused if self._refused(session) else MaskReason.excluded_outcome

    def _refused(self, session: str) -> bool:
        """By the spine, or since a record of a turn that it names was."""
        known = self.spine.sessions[session]
        bare = session in self.trees and self.trees[session].bare
        return known.refused or (bare and known.finish is not None and bool(known.finish.turns))

    def _unnamed(self, session: str, end: int) -> Counter[str]:
        """Turns that came after the last one that the session needs, before the end of its group."""
        finish = self.spine.sessions[session].finish
        undelivered = {key_of(turn) for turn in finish.undelivered} if finish is not None else set()
        own, masked = self._end(session), Counter[str]()
        for key, turn in self.turns[session].items():
            if own < turn.offset <= end:
                reason = MaskReason.undelivered if key in undelivered else MaskReason.not_named
                masked[(MaskReason.refused if turn.refused else reason).value] += turn.tokens
        return masked
