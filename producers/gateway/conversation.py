"""The turns of one session in memory: found by the messages that they answer, stored with the tokens that they share.

Both look-ups go down a tree: messages by a hash chain whose prefix is passed by comparing shapes seen before, tokens by
a radix tree (strands.py). What a request repeats is compared and never hashed or stored again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np

from turnlog.processors.core.turns import Ids
from turnlog.producers.gateway.message_tree import MessageTree, Said
from turnlog.producers.gateway.messages import Message, joined
from turnlog.producers.gateway.strands import Place, Strand, Strands, above, holders, line, longest, points
from turnlog.schemas.events.turns import FinishReason, ImageRef
from turnlog.schemas.types import BlobRef, TurnId, pack_int32s

if TYPE_CHECKING:
    from hashlib import _Hash

CUT_OFF = frozenset({FinishReason.abort, FinishReason.error})
"""Ends of turns that are not all of what the policy would have said."""


@dataclass(slots=True, kw_only=True, eq=False)
class Turn:
    """One recorded turn. Its tokens are the first `total` ids of the line to its strand: prompt, then output."""

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
    finish_reason: FinishReason
    aborted: bool
    cached_tokens: int
    output_tokens: int
    versions: tuple[int, int]
    """Weight version of the first and of the last output token."""
    total: int
    boundary_reason: str
    images: tuple[ImageRef, ...] = ()
    """Every image in the prompt, by position."""
    covered: bool = False
    """The routed experts of all its tokens are stored: its own, and those of every turn that it is stored against."""
    handed_over: bool = False
    """This gateway sent its last byte to a client. Of a turn of an earlier epoch nobody knows."""
    continued: bool = False
    """Another turn has this one as its base."""
    strand: Strand = field(init=False)
    hashed: _Hash
    """sha256 over prompt + output as little-endian int32."""
    asked: Said = field(init=False)
    """The last message of its request."""
    answered: Said = field(init=False)
    """The assistant's message as an echo has it: the response, behind the prefill where the request ended in one."""

    @property
    def whole(self) -> bool:
        """The engine ended it; a turn that was cut off is no answer."""
        return self.finish_reason not in CUT_OFF

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return self.total - self.output_tokens

    @property
    def place(self) -> Place:
        """Where its tokens end."""
        return Place(self.strand, self.total)

    @property
    def last(self) -> int:
        """The last id of prompt + output."""
        return self.strand.ids[self.total - 1 - self.strand.start]

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

    def messages(self) -> list[tuple[Any, Message]]:
        """All messages up to and with the response, as they came and to compare."""
        said: list[tuple[Any, Message]] = []
        for turn in reversed(list(self.lineage())):
            said += zip(turn.new_raw, turn.new, strict=True)
            if said[-1][1].role == "assistant":
                said[-1] = joined(said[-1][1], turn.response_raw)
            else:
                said.append((turn.response_raw, turn.response))
        return said


class Conversation:
    """Recorded turns in the order in which they were recorded."""

    def __init__(self) -> None:
        self.turns: dict[TurnId, Turn] = {}
        self.messages = MessageTree()
        self.strands = Strands()
        self.shown: dict[str, BlobRef] = {}
        """Every image of a recorded turn, by sha256."""
        self._requested: dict[str, list[Turn]] = {}
        """By sha256 of the request's body."""
        self._covered = False

    def base_of(self, messages: Sequence[Message]) -> tuple[Turn | None, int]:
        """The turn whose messages and response are a prefix of `messages`, longest first, then the latest; and that
        prefix's length."""
        passed = [(said, length) for length, said in enumerate(self.messages.passed(messages), 1) if said.answers]
        for said, length in reversed(passed):
            for turn in reversed(said.answers):
                if _reasoning_agrees(turn, messages[:length]):
                    return turn, length
        return None, 0

    def tokens(self, turn: Turn) -> Ids:
        """Prompt + output."""
        return self.strands.plain(line(turn.place))

    def reason_of_root(self, messages: Sequence[Message]) -> str:
        """Why a prompt has no base. A retry has the reason of what it asks again."""
        if not self.turns:
            return "first"
        passed = list(self.messages.passed(messages))
        if len(passed) == len(messages) and passed[-1].root_reason:
            return passed[-1].root_reason
        return "history_rewritten" if passed else "new_conversation"

    def extends(self, base: Turn, prompt: Sequence[int], images: Sequence[ImageRef], known: Place) -> bool:
        """Whether a prompt that passes `known` begins with all of the base, the same images in it."""
        if known == base.place:
            return True
        return np.array_equal(self.strands.keyed(prompt, images, 0)[: base.total], line(base.place))

    def stored_against(
        self, ids: Sequence[int], known: Place, images: Sequence[ImageRef] = (), *, covered: bool = False
    ) -> tuple[Turn | None, int]:
        """Where to store a prompt that passes `known` and goes on with `ids`: a turn with the longest common prefix of
        tokens and images, and its length. `covered`: only turns whose routed experts are stored, where there is any,
        so that no gap is passed on."""
        covered = covered and self._covered
        for place in above(self.strands.follow(self.strands.keyed(ids, images, known.depth), known)):
            for depth in points(place):
                turns = holders(Place(place.strand, depth))
                turn = next((turn for turn in turns if turn.covered or not covered), None)
                if turn is not None and depth:
                    return turn, depth
        return None, 0

    def record(self, turn: Turn, ids: Sequence[int], output: Sequence[int], known: Place) -> None:
        """Add a turn whose prompt passes `known` and goes on with `ids`; sets its strand and its messages' places."""
        self.strands.add(turn, self.strands.keyed([*ids, *output], turn.images, known.depth), known)
        said = turn.base.answered if turn.base is not None else self.messages.start
        for raw, one in zip(turn.new_raw, turn.new, strict=True):
            said = self.messages.add(said, raw, one)
        turn.asked = said
        if turn.base is not None:
            turn.base.continued = True
        elif not said.root_reason:
            said.root_reason = turn.boundary_reason
        turn.answered = self._answered(said, turn)
        turn.answered.answers.append(turn)
        self.turns[turn.id] = turn
        self.shown |= {one.image.sha256: one.image for one in turn.images}
        self._covered = self._covered or turn.covered
        self._requested.setdefault(turn.request_sha256, []).append(turn)

    def _answered(self, asked: Said, turn: Turn) -> Said:
        """Where the assistant's message stands. A prefill and the response to it are one message, and two for a client
        that echoes both."""
        assert asked.message is not None
        if asked.message.role != "assistant":
            return self.messages.add(asked, turn.response_raw, turn.response)
        assert asked.above is not None
        one = self.messages.add(asked.above, *joined(asked.message, turn.response_raw))
        self.messages.alias(asked, turn.response, one)
        return one

    def hashed(self, place: Place) -> _Hash:
        """sha256 over the line to `place`, from the end of the nearest turn on: not to be updated in place."""
        pieces, hashed = [], sha256()
        for strand, depth in above(place):
            turn = longest(Place(strand, depth))
            pieces.append(strand.slice(turn.total if turn else strand.start, depth))
            if turn is not None:
                hashed = turn.hashed.copy()
                break
        for piece in reversed(pieces):
            hashed.update(self.strands.plain(piece).data)
        return hashed

    def repeated(self, request_sha256: str) -> Turn | None:
        """The whole turn that an identical body asks for again: nothing continues it, and this gateway has not handed
        it over."""
        turns = reversed(self._requested.get(request_sha256, ()))
        return next((turn for turn in turns if turn.whole and not turn.continued and not turn.handed_over), None)

    def main_line(self) -> Turn | None:
        """The newest whole turn of the first root's lineage, or of a root that asked the same again."""
        first = next(iter(self.turns.values()), None)
        for turn in reversed(self.turns.values()):
            if first is not None and turn.whole and turn.root.asked is first.root.asked:
                return turn
        return None


def continued(hashed: _Hash, ids: Sequence[int]) -> _Hash:
    """sha256 over what was hashed and `ids` as little-endian int32."""
    hashed = hashed.copy()
    hashed.update(pack_int32s(ids))
    return hashed


def _reasoning_agrees(turn: Turn, messages: Sequence[Message]) -> bool:
    """Reasoning that is absent in the echo matches any; present, it must match."""
    if not any(one.reasoning for one in messages):
        return True
    recorded = [own for _, own in turn.messages()]
    return len(recorded) == len(messages) and all(
        not echo.reasoning or echo.reasoning == own.reasoning for echo, own in zip(messages, recorded, strict=True)
    )
