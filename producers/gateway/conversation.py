"""The turns of one session in memory: found by the messages that they answer, stored with shared tokens.

Both look-ups descend a tree. In the tree of messages, a node is a link of the hash chain h_k = H(h_(k-1), message_k). A
message that arrives in exactly the form last seen at its node is that message; only other messages are normalised and
hashed. In the radix tree of tokens, a node (`Strand`) is a growing array of the ids that come after a point of its
parent. A session therefore takes memory in proportion to its new tokens, however often its history is rewritten. The
part of a request that repeats earlier turns is compared, and never hashed or stored again.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from orjson import dumps as _json

from turnlog.infra.environments.players import UNTRAINED
from turnlog.processors.core.lineages import MAIN
from turnlog.processors.core.turns import Ids, common
from turnlog.producers.gateway.images import within
from turnlog.producers.gateway.messages import (
    Message,
    as_said,
    call_ids,
    join_prefill,
    message,
    message_list,
    without_name,
)
from turnlog.schemas.events.turns import CUT_OFF, FinishReason, ImageRef, TokenSnapshot, TurnCompleted
from turnlog.schemas.types import BlobRef, TurnId, float32s, pack_int32s

if TYPE_CHECKING:
    from hashlib import _Hash


class TokenCursor(NamedTuple):
    """Cursor in the token tree: the point after the first `depth` ids of a path, with the node that holds the last of
    them."""

    strand: Strand
    depth: int


@dataclass(slots=True, eq=False)
class Strand:
    """Radix-tree node: the ids from `start` on of a path whose first `start` ids the ancestors hold."""

    above: Strand | None
    start: int
    ids: array[int] = field(default_factory=lambda: array("i"))
    turns: list[RecordedTurn] = field(default_factory=list)
    """Turns that end in this node, ordered by length."""
    below: dict[tuple[int, int], Strand] = field(default_factory=dict)
    """Child nodes by branch depth and first id."""

    @property
    def end(self) -> int:
        """Length in ids of a path that ends at the end of this node."""
        return self.start + len(self.ids)

    def slice(self, start: int, end: int) -> Ids:
        """Return ids [start, end) of the path, as far as this node holds them. The result is a copy, because an array
        whose buffer is exported cannot grow."""
        return np.array(self.ids[max(0, start - self.start) : max(0, end - self.start)], dtype=np.int32)


class Strands:
    """Radix tree of token ids. Paths are looked up and added; nothing is removed."""

    def __init__(self) -> None:
        self.start = TokenCursor(Strand(None, 0), 0)
        self.held = 0
        """Number of ids in memory."""
        self._images: dict[tuple[str, int], int] = {}
        """(sha256, placeholder id) -> the number that replaces the placeholders of this image in the tree."""

    def to_tree_ids(self, ids: Ids | Sequence[int], images: Sequence[ImageRef], start: int) -> Ids:
        """Return a copy of a prompt's ids from `start` on, in the form in which the tree stores them. The placeholders
        of each image are replaced by a negative number of its own, so that prompts that differ only in an image branch
        there."""
        keyed = np.array(ids, dtype=np.int32)
        for one in images:
            if one.position >= start:
                name = (one.image.sha256, int(ids[one.position - start]))
                number = self._images.setdefault(name, -1 - len(self._images))
                keyed[one.position - start :][: one.tokens] = number
        return keyed

    def plain(self, ids: Ids) -> Ids:
        """Return the ids as the model sees them, with image placeholders restored."""
        if not self._images:
            return ids
        placeholders = np.array([token for _, token in self._images], dtype=np.int32)
        return np.where(ids < 0, placeholders[np.minimum(ids, -1) * -1 - 1], ids)

    def follow(self, ids: Ids, start: TokenCursor) -> TokenCursor:
        """Return the cursor at which a path that passes `start` and continues with `ids` leaves everything stored."""
        strand, depth = start
        done = 0
        while True:
            same = common(strand.slice(depth, depth + len(ids) - done), ids[done:])
            depth, done = depth + same, done + same
            below = strand.below.get((depth, int(ids[done]))) if done < len(ids) else None
            if below is None:
                return TokenCursor(strand, depth)
            strand = below

    def add(self, turn: RecordedTurn, ids: Ids, start: TokenCursor) -> None:
        """Store the path of a turn, which passes `start` and continues with `ids`; set the turn's node."""
        strand, depth = self.follow(ids, start)
        new = array("i", ids[depth - start.depth :].tobytes())
        if new and depth < strand.end:
            strand.below[depth, new[0]] = strand = Strand(strand, depth)
        strand.ids.extend(new)
        self.held += len(new)
        turn.strand = strand
        insort(strand.turns, turn, key=_length)


def above(place: TokenCursor, depth: int | None = None) -> Iterator[TokenCursor]:
    """Yield the cursors at which the path to `place` leaves each node, from the lowest node up. The first one is at
    `depth`; nodes that begin there or later are skipped."""
    strand: Strand | None = place.strand
    at = place.depth if depth is None else depth
    while strand is not None:
        if at > strand.start or strand.above is None:
            yield TokenCursor(strand, at)
            at = strand.start
        strand = strand.above


def line(place: TokenCursor) -> Ids:
    """Return all ids of the path up to `place`."""
    pieces = [strand.slice(strand.start, depth) for strand, depth in above(place)]
    return np.concatenate(pieces[::-1])


def holders(place: TokenCursor) -> Iterator[RecordedTurn]:
    """Yield the turns whose paths pass `place`: first those in its node, shortest first, then those in descendants."""
    waiting = [place.strand]
    while waiting:
        strand = waiting.pop()
        yield from strand.turns[bisect_left(strand.turns, place.depth, key=_length) :]
        waiting += (below for (depth, _), below in strand.below.items() if depth >= place.depth)


def longest(place: TokenCursor) -> RecordedTurn | None:
    """Return the longest turn that ends in the node of `place`, at or before it."""
    turns = place.strand.turns
    at = bisect_right(turns, place.depth, key=_length)
    return turns[at - 1] if at else None


def points(place: TokenCursor) -> Iterator[int]:
    """Yield the depths in a node at which other turns may share its path: `place` itself, then the ends of turns and
    the branch points before it, deepest first."""
    yield place.depth
    strand = place.strand
    depths = {turn.total for turn in strand.turns} | {depth for depth, _ in strand.below}
    yield from sorted((depth for depth in depths if strand.start < depth < place.depth), reverse=True)


def _length(turn: RecordedTurn) -> int:
    return turn.total


@dataclass(slots=True, eq=False)
class MessageNode:
    """Node of the message tree: one message after those above it."""

    above: MessageNode | None
    chain: bytes
    seen: tuple[Any, Message | None]
    """The message as last received, and its normalised form; None in the root node. Both are replaced together as one
    tuple, because threads read requests."""
    next: MessageNode | None = None
    """The message that was seen last after this one."""
    answers: list[RecordedTurn] = field(default_factory=list)
    """Turns whose messages and response end here."""
    root_reason: str = ""
    """`boundary_reason` of the first turn without a base whose request ended exactly here."""

    @property
    def message(self) -> Message | None:
        """The message as last received, normalised."""
        return self.seen[1]


class MessageTree:
    """Messages of recorded turns, against which requests are parsed."""

    def __init__(self) -> None:
        self.start = MessageNode(None, b"", (None, None))
        self._said: dict[bytes, MessageNode] = {}
        self._calls: dict[str, RecordedTurn] = {}
        """Turns by the id of their first tool call. Ids are derived from session, turn and position, so no two turns
        share one."""

    def unlink(self) -> None:
        """Remove the links to newer messages and to turns; see `Conversation.unlink`."""
        for said in (self.start, *self._said.values()):
            said.next = None
            said.answers.clear()
        self._calls.clear()

    def read(self, raw: Any, places: Sequence[str] | None = None) -> tuple[Message, ...]:
        """Return the messages of a request. May run in any thread. `places` holds the client's name for each message;
        the default is messages[N]. Raises BadRequest, which names the message."""
        read: list[Message] = []
        said: MessageNode | None = self.start
        for index, one in enumerate(message_list(raw)):
            after = said.next if said is not None else None
            # Only tool calls hold values that are equal in Python but not in JSON, such as 1 and true.
            last, known = after.seen if after is not None else (None, None)
            if known is None or one != last or ("tool_calls" in one and _json(one) != _json(last)):
                this = message(one, places[index] if places else f"messages[{index}]")
                after = None
                if said is not None:
                    after, this = self._after(said, this)
                if said is not None and after is not None and not this.pictures:  # their bytes are kept in the store
                    said.next, after.seen = after, (one, this)
            else:
                this = known
            said = after
            read.append(this)
        return tuple(read)

    def _after(self, said: MessageNode, one: Message) -> tuple[MessageNode | None, Message]:
        """Return the node to which a message leads, or None, and the message. Where a client changed what a turn
        answered here, the returned message is the recorded answer."""
        after = self._said.get(_link(said, one))
        if after is not None or one.role != "assistant":
            return after, one
        ids = call_ids(one)
        if ids and (turn := self._calls.get(ids[0])) is not None and turn.answered.above is said:
            own = as_said(turn.answer, one)
            return (None, one) if own is None else (turn.answered, own)
        if "name" in one.template and not one.pictures:
            after = self._said.get(_link(said, bare := without_name(one)))
            if after is not None and after.answers:
                return after, replace(bare, changed={"name": one.template["name"]})
        return None, one

    def walk(self, messages: Sequence[Message]) -> Iterator[MessageNode]:
        """Yield the known nodes of a conversation, message by message, up to the first unknown message."""
        said = self.start
        for one in messages:
            after = said.next
            if after is None or after.seen[1] is not one:
                after = self._said.get(_link(said, one))
            if after is None:
                return
            yield after
            said = after

    def add(self, above: MessageNode, raw: Any, one: Message) -> MessageNode:
        """Return the node of a message after `above`; add it if it is new."""
        link = _link(above, one)
        if link not in self._said:
            self._said[link] = MessageNode(above, link, (raw, one))
        above.next = self._said[link]
        return above.next

    def answer(self, said: MessageNode, turn: RecordedTurn) -> None:
        """Register a turn whose answer ends at node `said`."""
        turn.answered = said
        said.answers.append(turn)
        if calls := turn.response_raw.get("tool_calls"):
            self._calls[calls[0]["id"]] = turn

    def alias(self, above: MessageNode, one: Message, known: MessageNode) -> None:
        """Let message `one` after `above` lead to node `known`."""
        self._said.setdefault(_link(above, one), known)


def _link(above: MessageNode, one: Message) -> bytes:
    return hashlib.blake2b(above.chain + one.digest, digest_size=16).digest()


class TurnAnswer(NamedTuple):
    """A turn's answer as its client gets it."""

    response: dict[str, Any]
    """The assistant's message."""
    ids: list[int]
    """The sampled ids."""
    logprobs: list[float]
    """Log-probs of `ids` in nats; empty if they are not recorded."""
    stopped_by: str | None
    """The stop sequence that ended the answer."""


@dataclass(slots=True, kw_only=True, eq=False)
class RecordedTurn:
    """A recorded turn. Its tokens, prompt then output, are the first `total` ids of the path to its node."""

    id: TurnId
    base: RecordedTurn | None
    request_sha256: str
    tools_sha256: str
    system_sha256: str
    new_raw: list[Any]
    """The request's messages after those of the base, as received."""
    new: tuple[Message, ...]
    response_raw: dict[str, Any]
    response: Message
    finish_reason: FinishReason
    stopped_by: str | None
    aborted: bool
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int = 0
    own_s: float = 0.0
    """Seconds during which an engine sampled for this turn."""
    waited_s: float = 0.0
    """Seconds of its life during which no engine sampled for it."""
    logprobs: bytes
    """Log-probs of the output, little-endian float32, as recorded."""
    versions: tuple[int, int]
    """Weight versions of the first and the last output token."""
    total: int
    boundary_reason: str
    agent_path: str | None = None
    """Name of the requesting agent, as its harness reports it."""
    summary: TurnId | None = None
    """Turn whose summary of the history its messages begin with (summaries.py)."""
    images: tuple[ImageRef, ...] = ()
    """All images in the prompt, ordered by position."""
    covered: bool = False
    """True if the routed experts of all its tokens are stored: its own, and those of every turn that it is stored
    against."""
    redacted: bool = False
    """True if its records withhold tokens. No turn is continued from it, and it answers no repeat."""
    answer_told: TurnAnswer | None = None
    """The answer that the client gets, if the records show less; unknown for turns of earlier ownership terms."""
    handed_over: bool = False
    """True if this gateway sent the turn's last byte to a client. Unknown for turns of earlier ownership terms."""
    continued: bool = False
    """True if another turn has this one as its base."""
    strand: Strand = field(init=False)
    hashed: _Hash
    """sha256 over prompt + output as little-endian int32."""
    asked: MessageNode = field(init=False)
    """Node of the last message of its request."""
    answered: MessageNode = field(init=False)
    """Node of the assistant's message as a client echoes it: the response, appended to the prefill if the request ended
    in one."""

    @classmethod
    def from_records(
        cls,
        completed: TurnCompleted,
        snapshot: TokenSnapshot,
        *,
        base: RecordedTurn | None,
        parent: RecordedTurn | None,
        hashed: _Hash,
        new_raw: list[Any],
        new: tuple[Message, ...],
        response_raw: dict[str, Any],
    ) -> RecordedTurn:
        """Build the turn from its two records, just written or read back, with inline payloads. `parent` is the turn
        that its tokens are stored against; `hashed` is the hash over prompt + output."""
        logprobs = snapshot.output_logprobs
        assert isinstance(logprobs, bytes)
        return cls(
            id=completed.turn,
            base=base,
            request_sha256=completed.request_sha256,
            tools_sha256=completed.tools_sha256,
            system_sha256=completed.system_sha256,
            new_raw=new_raw,
            new=new,
            response_raw=response_raw,
            response=message(response_raw, "response"),
            finish_reason=completed.finish_reason,
            stopped_by=completed.stopped_by,
            aborted=completed.aborted,
            cached_tokens=completed.cached_tokens,
            output_tokens=completed.output_tokens,
            reasoning_tokens=completed.reasoning_tokens,
            own_s=completed.total_s - completed.waited_s,
            waited_s=completed.waited_s,
            logprobs=logprobs,
            versions=(completed.weight_version_first, completed.weight_version_last),
            hashed=hashed,
            boundary_reason=snapshot.boundary_reason,
            agent_path=completed.agent_path,
            summary=completed.summary_turn,
            total=completed.prompt_tokens + completed.output_tokens,
            images=(*within(snapshot.base_len, parent.images if parent else ()), *snapshot.images),
            redacted=snapshot.redacted,
            covered=snapshot.experts is not None and (parent is None or parent.covered),
        )

    @property
    def whole(self) -> bool:
        """True if the engine finished the turn. A turn that was cut off is no answer."""
        return self.finish_reason not in CUT_OFF

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return self.total - self.output_tokens

    @property
    def place(self) -> TokenCursor:
        """Cursor at which its tokens end."""
        return TokenCursor(self.strand, self.total)

    @property
    def output(self) -> Ids:
        """The sampled ids."""
        return line(self.place)[self.prompt_tokens :]

    @property
    def answer(self) -> Message:
        """The assistant's message as a client echoes it."""
        asked = self.asked.message
        assert asked is not None
        return join_prefill(asked, self.response_raw)[1] if asked.role == "assistant" else self.response

    @property
    def told(self) -> TurnAnswer:
        """The answer that the client gets, as far as this gateway knows it."""
        if self.answer_told is not None:
            return self.answer_told
        return TurnAnswer(self.response_raw, self.output.tolist(), float32s(self.logprobs).tolist(), self.stopped_by)

    @property
    def last(self) -> int:
        """The last id of prompt + output."""
        return self.strand.ids[self.total - 1 - self.strand.start]

    def lineage(self) -> Iterator[RecordedTurn]:
        """Yield this turn, its base, and so on to the root."""
        turn: RecordedTurn | None = self
        while turn is not None:
            yield turn
            turn = turn.base

    @property
    def root(self) -> RecordedTurn:
        """The first turn of its lineage."""
        *_, root = self.lineage()
        return root

    def messages(self) -> list[tuple[Any, Message]]:
        """Return all messages up to and including the response, each as received and normalised."""
        said: list[tuple[Any, Message]] = []
        for turn in reversed(list(self.lineage())):
            said += zip(turn.new_raw, turn.new, strict=True)
            if said[-1][1].role == "assistant":
                said[-1] = join_prefill(said[-1][1], turn.response_raw)
            else:
                said.append((turn.response_raw, turn.response))
        return said


class Conversation:
    """The recorded turns of one session, in order of recording."""

    def __init__(self) -> None:
        self.turns: dict[TurnId, RecordedTurn] = {}
        self.messages = MessageTree()
        self.strands = Strands()
        self.shown: dict[str, BlobRef] = {}
        """All images of recorded turns, by sha256."""
        self.deleted: set[TurnId] = set()
        """Turns that a client deleted; this gateway no longer serves them."""
        self.answered: set[bytes] = set()
        """Digests of the recorded answers."""
        self._requested: dict[str, list[RecordedTurn]] = {}
        """Turns by the sha256 of the request's body."""
        self._covered = False

    def unlink(self) -> None:
        """Remove the links from older messages and tokens to newer ones. Whatever nobody else references is then freed
        at once, instead of waiting for a garbage collection, which a gateway seldom runs (infra/roles/event_loop.py). A
        turn that is still referenced can be read; no other turn can be looked up or recorded."""
        self.messages.unlink()
        for strand in (self.strands.start.strand, *(turn.strand for turn in self.turns.values())):
            strand.below.clear()
            strand.turns.clear()

    def base_of(
        self, messages: Sequence[Message], named: TurnId | None = None, path: str | None = None
    ) -> tuple[RecordedTurn | None, int]:
        """Return the turn whose messages and response are a prefix of `messages`, and the length of that prefix. The
        turn `named` wins; then the longest prefix, then a turn of the agent `path`, then the turn whose calls have
        these ids, then the latest turn."""
        passed = [(said, length) for length, said in enumerate(self.messages.walk(messages), 1) if said.answers]
        for said, length in reversed(passed):
            ids, latest = call_ids(messages[length - 1]), said.answers[::-1]
            for turn in sorted(
                latest, key=lambda turn: (path not in (None, turn.agent_path), call_ids(turn.response) != ids)
            ):
                if named in (None, turn.id) and _reasoning_agrees(turn, messages[:length]):
                    return turn, length
        return self.base_of(messages, path=path) if named is not None else (None, 0)

    def tokens(self, turn: RecordedTurn) -> Ids:
        """Return the ids of prompt + output."""
        return self.strands.plain(line(turn.place))

    def reason_of_root(self, messages: Sequence[Message]) -> str:
        """Return the reason why a prompt has no base. A retry has the same reason as the request that it repeats."""
        if not self.turns:
            return "first"
        passed = list(self.messages.walk(messages))
        if len(passed) == len(messages) and passed[-1].root_reason:
            return passed[-1].root_reason
        return "history_rewritten" if passed else "new_conversation"

    def extends(self, base: RecordedTurn, prompt: Ids, images: Sequence[ImageRef], known: TokenCursor) -> bool:
        """Return whether a prompt that passes `known` begins with all of the base, including the same images."""
        if known == base.place:
            return True
        return np.array_equal(self.strands.to_tree_ids(prompt, images, 0)[: base.total], line(base.place))

    def stored_against(
        self, ids: Ids | Sequence[int], known: TokenCursor, images: Sequence[ImageRef] = (), *, covered: bool = False
    ) -> tuple[RecordedTurn | None, int]:
        """Return the turn that a prompt should be stored against, and the length of their common prefix. The prompt
        passes `known` and continues with `ids`; the turn shares the longest prefix of tokens and images. With
        `covered`, only turns whose routed experts are stored qualify, if the session has any, so that no gap is
        inherited."""
        covered = covered and self._covered
        for place in above(self.strands.follow(self.strands.to_tree_ids(ids, images, known.depth), known)):
            for depth in points(place):
                turns = holders(TokenCursor(place.strand, depth))
                turn = next((turn for turn in turns if turn.covered or not covered), None)
                if turn is not None and depth:
                    return turn, depth
        return None, 0

    def record(self, turn: RecordedTurn, ids: Ids | Sequence[int], output: Sequence[int], known: TokenCursor) -> None:
        """Add a turn whose prompt passes `known` and continues with `ids`; set its node and those of its messages."""
        line = np.concatenate((np.array(ids, dtype=np.int32), np.array(output, dtype=np.int32)))
        self.strands.add(turn, self.strands.to_tree_ids(line, turn.images, known.depth), known)
        said = turn.base.answered if turn.base is not None else self.messages.start
        for raw, one in zip(turn.new_raw, turn.new, strict=True):
            said = self.messages.add(said, raw, one)
        turn.asked = said
        if turn.base is not None:
            turn.base.continued = True
        elif not said.root_reason:
            said.root_reason = turn.boundary_reason
        self.messages.answer(self._add_answer(said, turn), turn)
        self.turns[turn.id] = turn
        self.answered.add(turn.answer.digest)
        self.shown |= {one.image.sha256: one.image for one in turn.images}
        self._covered = self._covered or turn.covered
        self._requested.setdefault(turn.request_sha256, []).append(turn)

    def _add_answer(self, asked: MessageNode, turn: RecordedTurn) -> MessageNode:
        """Return the node of the assistant's message. A prefill and its response are one message, but two for a client
        that echoes both."""
        assert asked.message is not None
        if asked.message.role != "assistant":
            return self.messages.add(asked, turn.response_raw, turn.response)
        assert asked.above is not None
        one = self.messages.add(asked.above, *join_prefill(asked.message, turn.response_raw))
        self.messages.alias(asked, turn.response, one)
        return one

    def hash_path(self, place: TokenCursor) -> _Hash:
        """Return the sha256 over the path to `place`, starting from the end of the nearest turn. Copy it before
        updating it."""
        pieces, hashed = [], sha256()
        for strand, depth in above(place):
            turn = longest(TokenCursor(strand, depth))
            pieces.append(strand.slice(turn.total if turn else strand.start, depth))
            if turn is not None:
                hashed = turn.hashed.copy()
                break
        for piece in reversed(pieces):
            hashed.update(self.strands.plain(piece).data)
        return hashed

    def find_repeat(self, request_sha256: str, path: str | None = None) -> RecordedTurn | None:
        """Return the completed turn that an identical body of the same agent requests again: no turn continues it, and
        this gateway has not delivered it. `path` is the agent's; None stands for any."""
        turns = [turn for turn in self._requested.get(request_sha256, ()) if path in (None, turn.agent_path)]
        return next((one for one in reversed(turns) if _answers_repeat(one)), None)

    def last_turns(self) -> dict[str, RecordedTurn]:
        """Return the newest completed turn of each agent that has a path."""
        return {turn.agent_path: turn for turn in self.turns.values() if turn.whole and turn.agent_path is not None}

    def main_line(self) -> RecordedTurn | None:
        """Return the newest completed turn of the main agent. If no harness names the main agent, it is the lineage of
        the first root, of a root whose request is the same, or of one that begins with a summary."""
        named = [turn for turn in self.turns.values() if turn.whole and turn.agent_path in ("", MAIN)]
        if named:
            return named[-1]
        others = [turn for turn in self.turns.values() if not (turn.agent_path or "").startswith(UNTRAINED)]
        first = next(iter(others), None)  # a simulated user may speak before the agent
        for turn in reversed(others):
            if first is None or not turn.whole:
                continue
            if turn.root.summary is not None or turn.root.asked is first.root.asked:
                return turn
        return None


def _answers_repeat(turn: RecordedTurn) -> bool:
    return turn.whole and not turn.continued and not turn.handed_over and not turn.redacted


def extend_hash(hashed: _Hash, ids: Ids | Sequence[int]) -> _Hash:
    """Return a copy of `hashed` that is extended by `ids` as little-endian int32."""
    hashed = hashed.copy()
    hashed.update(pack_int32s(ids))
    return hashed


def _reasoning_agrees(turn: RecordedTurn, messages: Sequence[Message]) -> bool:
    """Return whether the reasoning in the echo matches the turn's. Reasoning that the echo omits matches any."""
    if not any(map(attrgetter("reasoning"), messages)):
        return True
    recorded = [own for _, own in turn.messages()]
    return len(recorded) == len(messages) and all(
        not echo.reasoning or echo.reasoning == own.reasoning for echo, own in zip(messages, recorded, strict=True)
    )
