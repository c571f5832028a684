"""The turns of one session in memory: found by the messages that they answer, stored as strands of shared tokens.

A strand is one growing array of ids that a line of turns shares, so a session of N tokens takes O(N) bytes however
many turns it has.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from turnlog.producers.gateway.images import agreeing
from turnlog.producers.gateway.messages import CHAIN_START, Message, chained
from turnlog.schemas.events.turns import FinishReason, ImageRef
from turnlog.schemas.types import BlobRef, TurnId

CUT_OFF = frozenset({FinishReason.abort, FinishReason.error})
"""Ends of turns that are not all of what the policy would have said."""


@dataclass(slots=True)
class Strand:
    """Ids of a line of turns; `turns` in order of their length."""

    ids: array[int] = field(default_factory=lambda: array("i"))
    turns: list[Turn] = field(default_factory=list)

    def holder(self, common: int, *, covered: bool) -> tuple[Turn | None, int]:
        """The turn that holds most of the first `common` ids, the earliest of several, and how many; `covered`: of
        those alone whose routed experts are stored."""
        turns = [turn for turn in self.turns if turn.covered or not covered]
        best = max(turns, key=lambda turn: min(turn.total, common), default=None)
        return best, min(best.total, common) if best is not None else 0


@dataclass(slots=True, kw_only=True)
class Turn:
    """One recorded turn. Its tokens are the first `total` ids of its strand: prompt, then output."""

    id: TurnId
    base: Turn | None
    request_sha256: str
    tools_sha256: str
    system_sha256: str
    new_raw: list[Any]
    """The request's messages beyond the base's, as they came."""
    new: tuple[Message, ...]
    response_raw: dict[str, Any]
    response: Message
    asked: bytes
    """Hash chain over all messages of the request."""
    chain: bytes
    """The same and the response."""
    finish_reason: FinishReason
    aborted: bool
    cached_tokens: int
    output_tokens: int
    versions: tuple[int, int]
    """Weight version of the first and of the last output token."""
    strand: Strand
    total: int
    images: tuple[ImageRef, ...] = ()
    """Every image in the prompt, by position."""
    covered: bool = False
    """The routed experts of all its tokens are stored: its own, and those of every turn that it is stored against."""
    handed_over: bool = False
    """This gateway sent its last byte to a client. Of a turn of an earlier epoch nobody knows."""
    continued: bool = False
    """Another turn has this one as its base."""

    @property
    def whole(self) -> bool:
        """The engine ended it; a turn that was cut off is no answer."""
        return self.finish_reason not in CUT_OFF

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return self.total - self.output_tokens

    @property
    def last(self) -> int:
        """The last id of prompt + output."""
        return self.strand.ids[self.total - 1]

    def tokens(self) -> list[int]:
        """Prompt + output."""
        return self.strand.ids[: self.total].tolist()

    def lineage(self) -> Iterator[Turn]:
        """This turn, its base, and so on to the root."""
        turn: Turn | None = self
        while turn is not None:
            yield turn
            turn = turn.base

    @property
    def root(self) -> Turn:
        """The turn at the beginning of its lineage."""
        *_, root = self.lineage()
        return root

    def messages(self) -> list[Any]:
        """All messages up to and with the response, as they came."""
        return [one for turn in reversed(list(self.lineage())) for one in (*turn.new_raw, turn.response_raw)]


class Conversation:
    """Recorded turns in the order in which they were recorded."""

    def __init__(self) -> None:
        self.turns: dict[TurnId, Turn] = {}
        self._answered: dict[bytes, list[Turn]] = {}
        self._requested: dict[str, list[Turn]] = {}
        """By sha256 of the request's body."""
        self._strands: list[Strand] = []
        self._roots: dict[bytes, str] = {}
        """Boundary reason by what a root was asked."""
        self._openings: set[bytes] = set()
        self._covered = False

    def base_of(self, messages: Sequence[Message]) -> tuple[Turn | None, int]:
        """The turn whose messages and response are a prefix of `messages`, longest first, then the latest; and that
        prefix's length."""
        chain = chained(CHAIN_START, messages)
        for length in range(len(messages), 0, -1):
            for turn in reversed(self._answered.get(chain[length - 1], ())):
                if _reasoning_agrees(turn, messages[:length]):
                    return turn, length
        return None, 0

    @property
    def shown(self) -> dict[str, BlobRef]:
        """Every image of a recorded turn, by sha256."""
        return {one.image.sha256: one.image for turn in self.turns.values() for one in turn.images}

    def reason_of_root(self, messages: Sequence[Message]) -> str:
        """Why a prompt has no base. A retry has the reason of what it asks again."""
        if not self.turns:
            return "first"
        rewritten = "history_rewritten" if messages[0].digest in self._openings else "new_conversation"
        return self._roots.get(chained(CHAIN_START, messages)[-1], rewritten)

    def parent_of(
        self,
        prompt: Sequence[int],
        base: Turn | None,
        appended: bool,
        images: Sequence[ImageRef] = (),
        *,
        covered: bool = False,
    ) -> tuple[Turn | None, int]:
        """Where to store the prompt against: the turn with the longest common prefix of tokens and images, and that
        length. `covered`: only turns whose routed experts are stored, where there is any, so that no gap is passed
        on."""
        covered = covered and self._covered
        fits = base is not None and appended and (base.covered or not covered)
        if base is not None and fits and len(self._strands) == 1:
            return base, base.total
        best, length = (base, base.total) if base is not None and fits else (None, 0)
        ids = np.asarray(prompt, dtype=np.int32)
        for strand in self._strands:
            common = _common(ids, np.frombuffer(strand.ids.tobytes(), dtype=np.int32))
            if common > length:
                turn, shared = strand.holder(common, covered=covered)
                shared = agreeing(shared, images, turn.images) if turn is not None else 0
                if shared > length:
                    best, length = turn, shared
        return best, length

    def record(self, turn: Turn, prompt: Sequence[int], output: Sequence[int], appended: bool, reason: str) -> None:
        """Add a turn; sets its strand. `appended`: the prompt extends the base's tokens; `reason`: its boundary's."""
        base = turn.base
        if base is not None:
            base.continued = True
        else:
            self._openings.add(turn.new[0].digest)
            self._roots.setdefault(turn.asked, reason)
        if base is not None and appended and base.total == len(base.strand.ids):
            turn.strand = base.strand
            turn.strand.ids.extend(prompt[base.total :])
        else:
            turn.strand = Strand(array("i", prompt))
            self._strands.append(turn.strand)
        turn.strand.ids.extend(output)
        turn.total = len(turn.strand.ids)
        turn.strand.turns.append(turn)
        self.turns[turn.id] = turn
        self._covered = self._covered or turn.covered
        self._answered.setdefault(turn.chain, []).append(turn)
        self._requested.setdefault(turn.request_sha256, []).append(turn)

    def repeated(self, request_sha256: str) -> Turn | None:
        """The whole turn that an identical body asks for again: nothing continues it, and this gateway has not handed
        it over."""
        turns = reversed(self._requested.get(request_sha256, ()))
        return next((turn for turn in turns if turn.whole and not turn.continued and not turn.handed_over), None)

    def main_line(self) -> Turn | None:
        """The newest whole turn of the first root's lineage, or of a root that asked the same again."""
        first = next(iter(self.turns.values()), None)
        for turn in reversed(self.turns.values()):
            if first is not None and turn.whole and turn.root.asked == first.root.asked:
                return turn
        return None


def prompt_sha256(prompt: Sequence[int]) -> str:
    """Hex sha256 of the ids as little-endian int32."""
    return hashlib.sha256(np.asarray(prompt, dtype="<i4").tobytes()).hexdigest()


def _common(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> int:
    size = min(len(one), len(other))
    differs = np.flatnonzero(one[:size] != other[:size])
    return int(differs[0]) if len(differs) else size


def _reasoning_agrees(turn: Turn, messages: Sequence[Message]) -> bool:
    """Reasoning that is absent in the echo matches any; present, it must match."""
    if not any(one.reasoning for one in messages):
        return True
    recorded = [one for each in reversed(list(turn.lineage())) for one in (*each.new, each.response)]
    return all(
        not echo.reasoning or echo.reasoning == own.reasoning for echo, own in zip(messages, recorded, strict=True)
    )
