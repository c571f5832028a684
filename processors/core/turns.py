"""The fold's state of a turn: the checked tokens of its snapshot, and the conversation data of its TurnCompleted.

The radix tree of a session's tokens tells which turns are a prefix of which prompt, without storing whole prompts.
Every turn is inserted below the position where its storage parent's prefix ends, so it costs O(new tokens). S is a
turn's prompt + output.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from turnlog.processors.core.errors import (
    BaseBeyondParent,
    BaseNotBefore,
    BrokenArray,
    EmptyPrompt,
    ImageOutOfPlace,
    LogprobLengthMismatch,
    NotFinite,
    PayloadNotFetched,
    PromptHashMismatch,
    SpansDoNotCover,
    TokenOutOfRange,
    UnknownParent,
    UnknownVersion,
)
from turnlog.processors.core.experts import check_layout
from turnlog.schemas.events import (
    ExpertsLayout,
    FinishReason,
    ImageRef,
    TokenSnapshot,
    TurnCompleted,
    VersionSpan,
    sampled_tokens,
)
from turnlog.schemas.types import FLOAT32, INT32, BlobRef, Payload, TurnId

if TYPE_CHECKING:
    from hashlib import _Hash

Ids = NDArray[np.int32]

NO_TOOLS: Final = frozenset({"", *(hashlib.sha256(text).hexdigest() for text in (b"", b"[]", b"null"))})
"""Values of tools_sha256 that mean "no tools"."""


TurnKey = tuple[str, int]
"""(`epoch`, `index`) of a TurnId. It hashes ten times faster than a TurnId, and every record is looked up."""


def key_of(turn: TurnId) -> TurnKey:
    """Return the key of a turn within its session."""
    return turn.epoch, turn.index


@dataclass(slots=True)
class Kinship:
    """A turn's place in its conversation, according to its TurnCompleted. The messages are not retained."""

    base: TurnId | None
    """Turn whose messages it continues; None for a root."""
    agent_path: str | None
    """Path that a harness profile assigned; None without one."""
    system_sha256: str
    has_tools: bool
    finish_reason: FinishReason
    aborted: bool
    """Whether its client was seen disconnected."""
    summary: TurnId | None = None
    """Turn whose summary of the history its messages begin with; None unless it is a root that quotes one."""


def kinship(event: TurnCompleted) -> Kinship:
    """Return a turn's place in its conversation. Raises BaseNotBefore if the base is the turn itself or a later one of
    its ownership term.
    """
    base = event.base_turn
    if base is not None and base.epoch == event.turn.epoch and base.index >= event.turn.index:
        raise BaseNotBefore(
            event.session_id,
            event.turn,
            f"base_turn is turn {base.index}",
            "a base is an earlier turn: fix the gateway",
        )
    return Kinship(
        base, event.agent_path, event.system_sha256, event.tools_sha256 not in NO_TOOLS,
        event.finish_reason, event.aborted, event.summary_turn,
    )  # fmt: skip


@dataclass(slots=True, eq=False)
class TurnTokenDelta:
    """The tokens of one turn as a delta to its storage parent: views of the record's bytes, never whole prompts.

    S = prompt + output; prompt = parent's S[:base_len] + delta. Memory is O(new tokens). `delta` and `output` are
    int32, `logprobs` float32 with one value per token of `output`.
    """

    offset: int
    """Offset of the snapshot in agent.token-snapshots."""
    parent: TurnTokenDelta | None
    """Storage parent; None if the whole prompt is in `delta`."""
    base_len: int
    """Number of leading tokens taken from the parent's S."""
    delta: Ids
    """[prompt_len - base_len] int32, the rest of the prompt."""
    output: Ids
    """[output tokens] int32."""
    logprobs: NDArray[np.float32]
    """[output tokens] float32."""
    versions: tuple[VersionSpan, ...]
    """Weight versions of the output; their lengths sum to its length."""
    temperature: float
    logprob_kind: str
    prompt_sha256: str
    experts: BlobRef | None
    experts_layout: ExpertsLayout | None
    images: tuple[ImageRef, ...]
    """Every image in the prompt, ordered by position."""
    constrained: bool
    """True if a grammar constrained the choice of tokens."""
    redacted: bool
    """True if the record withholds ids that the engine saw."""
    hashed_base: _Hash
    """sha256 over the little-endian bytes of S[:base_len]."""
    hashed: _Hash
    """sha256 over S; a child that extends S continues it."""
    prompt_len: int
    """Number of tokens in the prompt."""
    length: int
    """Number of tokens in S."""

    def chain(self, length: int) -> list[tuple[TurnTokenDelta, int]]:
        """Return the owners of S[:length], first token first: (turn, end), each turn owning [its base_len, end)."""
        owners: list[tuple[TurnTokenDelta, int]] = []
        owner: TurnTokenDelta | None = self
        while owner is not None and length > 0:
            if length > owner.base_len:
                owners.append((owner, length))
                length = owner.base_len
            owner = owner.parent
        return owners[::-1]

    def prefix(self, length: int) -> list[Ids]:
        """Return S[:length] as views, in order."""
        pieces: list[Ids] = []
        for owner, end in self.chain(length):
            if end == owner.length:
                pieces += owner.delta, owner.output
                continue
            own, cut = end - owner.base_len, len(owner.delta)
            pieces.append(owner.delta[:own])
            if own > cut:
                pieces.append(owner.output[: own - cut])
        return pieces

    def hash_prefix(self, length: int) -> _Hash:
        """Return sha256 over S[:length], which must not be updated in place. Costs O(1) where a turn ends, else
        O(tokens of one turn).
        """
        owner: TurnTokenDelta = self
        while length < owner.base_len:
            assert owner.parent is not None
            owner = owner.parent
        if length == owner.length:
            return owner.hashed
        hashed = owner.hashed_base.copy()
        own, cut = length - owner.base_len, len(owner.delta)
        hashed.update(owner.delta[:own].data)
        if own > cut:
            hashed.update(owner.output[: own - cut].data)
        return hashed


@dataclass(frozen=True, slots=True)
class RefusedTokens:
    """A rejected snapshot: only its number of sampled tokens is retained."""

    offset: int
    """Offset of the snapshot in agent.token-snapshots."""
    output_tokens: int


def refused_tokens(event: TokenSnapshot, offset: int) -> RefusedTokens:
    """Return the retained part of a rejected snapshot; the count agrees with the record's `output_tokens` header."""
    return RefusedTokens(offset, sampled_tokens(event))


def tokens(event: TokenSnapshot, offset: int, parent: TurnTokenDelta | None, *, erased: bool = False) -> TurnTokenDelta:
    """Check a snapshot against itself and its storage parent, and return its tokens.

    `parent` holds the tokens of event.parent_turn, as found among the snapshots before this one. If the content of the
    session was `erased`, the hash of the prompt is not checked. Raises a SnapshotError that names session, turn,
    numbers and remedy; raises PayloadNotFetched for a BlobRef. Costs O(new tokens) if the prompt extends the parent.
    """
    delta = _ids(event, "delta_ids", event.delta_ids)
    output = _ids(event, "output_ids", event.output_ids)
    output_len = len(output)
    logprobs = _logprobs(event, output_len)
    _check_spans(event, output_len)
    base_len = event.base_len
    prompt_len = base_len + len(delta)
    length = prompt_len + output_len
    _check_parent(event, parent, prompt_len)
    if event.experts_layout is not None:
        check_layout(event, length)
    images = _visible(event, parent, prompt_len) if event.images or (parent is not None and parent.images) else ()
    if parent is None:
        hashed_base = hashlib.sha256()
    else:
        hashed_base = parent.hashed if base_len == parent.length else parent.hash_prefix(base_len)
    hashed = hashed_base.copy()
    hashed.update(event.delta_ids)  # type: ignore[arg-type] # bytes, or `_ids` would have raised
    if (found := hashed.hexdigest()) != event.prompt_sha256 and not erased:
        raise PromptHashMismatch(
            event.session_id, event.turn,
            f"the prompt of {base_len} + {len(delta)} tokens hashes to {found[:16]}..., the record says "
            f"{event.prompt_sha256[:16]}...",
            "the gateway stored other tokens than the engine saw: compare parent_turn, base_len and delta_ids",
        )  # fmt: skip
    hashed.update(event.output_ids)  # type: ignore[arg-type]
    return TurnTokenDelta(
        offset, parent, base_len, delta, output, logprobs, event.version_spans, event.temperature,
        event.logprob_kind, event.prompt_sha256, event.experts, event.experts_layout, images,
        event.constrained, event.redacted,
        hashed_base, hashed, prompt_len, length,
    )  # fmt: skip


def _visible(event: TokenSnapshot, parent: TurnTokenDelta | None, prompt_len: int) -> tuple[ImageRef, ...]:
    """Return every image in the turn's prompt, ordered by position.

    Raises ImageOutOfPlace for an image that lies outside the prompt, that the parent already supplies, or that overlaps
    another.
    """
    given = parent.images if parent is not None else ()
    kept = tuple(image for image in given if image.position + image.tokens <= event.base_len)
    images = tuple(sorted((*kept, *event.images), key=lambda image: image.position))
    end = 0
    for image in images:
        if image.position < end or image.tokens < 1 or image.position + image.tokens > prompt_len:
            raise ImageOutOfPlace(
                event.session_id, event.turn,
                f"an image at {image.position} with {image.tokens} tokens, {end} are taken of a prompt of {prompt_len}",
                "images lie in the prompt, one after another, each named by the turn whose delta brings its end",
            )  # fmt: skip
        end = image.position + image.tokens
    return images


def agree(earlier: TurnTokenDelta, later: TurnTokenDelta) -> bool:
    """Whether the images within `earlier` are the same at those positions in `later`."""
    if not earlier.images and not later.images:
        return True
    return earlier.images == tuple(image for image in later.images if image.position < earlier.length)


def _array_error(event: TokenSnapshot, field: str, payload: Payload) -> Exception:
    """Return the error of a field of which NumPy cannot make an array."""
    if isinstance(payload, BlobRef):
        return PayloadNotFetched(event.session_id, field)
    says = f"{field} has {len(payload)} bytes"
    return BrokenArray(event.session_id, event.turn, says, "pack 4 bytes per number, little-endian")


def _ids(event: TokenSnapshot, field: str, payload: Payload) -> Ids:
    try:
        ids: Ids = np.frombuffer(payload, INT32)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise _array_error(event, field, payload) from None
    # argmin costs half of minimum.reduce for the ids of a usual turn: 0.7 instead of 1.3 us.
    if len(ids) and (lowest := ids.item(ids.argmin())) < 0:
        raise TokenOutOfRange(event.session_id, event.turn, f"{field} holds id {lowest}", "token ids start at 0")
    return ids


def _logprobs(event: TokenSnapshot, output_len: int) -> NDArray[np.float32]:
    try:
        logprobs: NDArray[np.float32] = np.frombuffer(event.output_logprobs, FLOAT32)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise _array_error(event, "output_logprobs", event.output_logprobs) from None
    if len(logprobs) != output_len:
        raise LogprobLengthMismatch(
            event.session_id, event.turn, f"{output_len} output ids, {len(logprobs)} log-probs",
            "the engine must return one log-prob per sampled token",
        )  # fmt: skip
    if not (0 <= event.temperature < math.inf and _finite(logprobs)):
        raise NotFinite(
            event.session_id, event.turn,
            f"{int((~np.isfinite(logprobs)).sum())} of {output_len} log-probs are not finite; temperature "
            f"{event.temperature}",
            "sample with a finite temperature >= 0 and return finite log-probs",
        )  # fmt: skip
    return logprobs


def _finite(values: NDArray[np.float32]) -> bool:
    """Whether all values are finite, in one pass: 0.9 instead of 2.0 us. The sum of squares is finite only if every
    value is; if it overflows, each value is checked.
    """
    return math.isfinite(values.dot(values)) or bool(np.isfinite(values).all())


def _check_spans(event: TokenSnapshot, output_len: int) -> None:
    covered = shortest = oldest = 0
    for span in event.version_spans:
        covered += span.length
        shortest = span.length if span.length < shortest else shortest
        oldest = span.version if span.version < oldest else oldest
    if covered != output_len or shortest < 0:
        raise SpansDoNotCover(
            event.session_id, event.turn, f"version spans cover {covered} of {output_len} output ids",
            "spans must cover the output exactly",
        )  # fmt: skip
    if oldest < 0:
        raise UnknownVersion(
            event.session_id, event.turn, f"a span of version {oldest}",
            "serve only engines whose weight version is known",
        )  # fmt: skip


def _check_parent(event: TokenSnapshot, parent: TurnTokenDelta | None, prompt_len: int) -> None:
    if parent is None and (event.parent_turn is not None or event.base_len != 0):
        raise UnknownParent(
            event.session_id, event.turn, f"takes {event.base_len} tokens of {event.parent_turn}, not before it",
            "a parent's snapshot stands before its child's in agent.token-snapshots and was not refused",
        )  # fmt: skip
    if parent is not None and not 0 <= event.base_len <= parent.length:
        raise BaseBeyondParent(
            event.session_id, event.turn, f"base_len {event.base_len}, the parent has {parent.length} tokens",
            "base_len counts tokens of the parent's prompt and output",
        )  # fmt: skip
    if prompt_len == 0:
        raise EmptyPrompt(event.session_id, event.turn, "the prompt has no token", "sample on at least one token")


NOBODY = 1 << 62
"""Greater than every order."""


class RadixNode:
    """A radix-tree node: a prompt or a turn ends here, or two turns diverge."""

    __slots__ = ("above", "below", "depth", "earliest", "ending", "label")

    def __init__(self, above: RadixNode | None, depth: int, label: Ids) -> None:
        self.above = above
        self.depth = depth
        """Number of tokens from the root to this node."""
        self.label = label
        """The tokens on the edge from `above` to this node."""
        self.below: dict[int, RadixNode] = {}
        """Children by first token."""
        self.ending: list[int] = []
        """Orders of the marked turns whose S ends here, ascending."""
        self.earliest = NOBODY
        """Lowest order of a marked turn whose S passes through or ends here."""


class TokenTree:
    """Radix tree over token ids. Insert parents before their children, mark the turns that are to be found, then query.
    `order` is a turn's rank in its session.
    """

    def __init__(self) -> None:
        self._root = RadixNode(None, 0, np.empty(0, dtype=np.int32))
        self._ends: dict[TurnTokenDelta, tuple[RadixNode, RadixNode]] = {}

    def insert(self, turn: TurnTokenDelta) -> None:
        """Add a turn whose storage parent is in the tree."""
        place = self._root
        if turn.parent is not None:
            place = self._ends[turn.parent][1]
            while place.above is not None and place.above.depth >= turn.base_len:
                place = place.above
        prompt = _grow(place, turn.base_len, turn.delta)
        self._ends[turn] = prompt, _grow(prompt, prompt.depth, turn.output)

    def mark(self, turn: TurnTokenDelta, order: int) -> None:
        """Make a turn visible to queries. Turns are marked in ascending order."""
        node: RadixNode | None = self._ends[turn][1]
        assert node is not None
        node.ending.append(order)
        while node is not None and node.earliest > order:
            node.earliest = order
            node = node.above

    def prefix_turns(self, turn: TurnTokenDelta, order: int) -> Iterator[int]:
        """Yield the orders of marked earlier turns whose S is a prefix of this prompt: longest first, then latest
        first.
        """
        node: RadixNode | None = self._ends[turn][0]
        while node is not None:
            yield from (other for other in reversed(node.ending) if other < order)
            node = node.above

    def dissolve(self) -> None:
        """Release the tokens: nodes reference each other both ways, so the tokens would stay until the next full
        collection.
        """
        nodes = [self._root]
        self._ends.clear()
        while nodes:
            node = nodes.pop()
            nodes += node.below.values()
            node.above = None
            node.below = {}

    def shared_length(self, turn: TurnTokenDelta, order: int) -> int:
        """Return the length of the longest prefix that this prompt shares with any marked earlier turn."""
        node: RadixNode | None = self._ends[turn][0]
        while node is not None and node.earliest >= order:
            node = node.above
        return node.depth if node is not None else 0


def _grow(node: RadixNode, depth: int, ids: Ids) -> RadixNode:
    """Return the node at the end of `ids`, starting at `depth` on the edge to `node`; create it, with forks, if it is
    new.
    """
    done = 0
    while done < len(ids):
        if depth == node.depth:
            first = int(ids[done])
            if first not in node.below:
                leaf = RadixNode(node, depth + len(ids) - done, ids[done:])
                node.below[first] = leaf
                return leaf
            node = node.below[first]
        edge, rest = node.label[len(node.label) - (node.depth - depth) :], ids[done:]
        same = common(edge, rest)
        depth, done = depth + same, done + same
        if depth < node.depth:
            node = _split(node, depth)
    return node if depth == node.depth else _split(node, depth)


def common(a: Ids, b: Ids) -> int:
    """Return the length of the longest common prefix."""
    size = min(len(a), len(b))
    differ = a[:size] != b[:size]
    first = int(differ.argmax()) if size else 0
    return first if size and differ[first] else size


def _split(node: RadixNode, depth: int) -> RadixNode:
    """Insert a new node at `depth` on the edge to `node` and return it."""
    above = node.above
    assert above is not None
    cut = depth - above.depth
    middle = RadixNode(above, depth, node.label[:cut])
    above.below[int(node.label[0])] = middle
    node.above, node.label = middle, node.label[cut:]
    middle.below[int(node.label[0])] = node
    middle.earliest = node.earliest
    return middle


def shared_prefix(one: TurnTokenDelta, one_len: int, other: TurnTokenDelta, other_len: int) -> int:
    """Return the length of the longest common prefix of one's S[:one_len] and other's S[:other_len].

    Tokens that both take from one record share memory and are not compared.
    """
    shortest = min(one_len, other_len)
    if _inherited_length(one, other) >= shortest:
        return shortest
    ours, theirs = one.prefix(one_len), other.prefix(other_len)
    at = i = j = from_i = from_j = 0
    while i < len(ours) and j < len(theirs):
        size = min(len(ours[i]) - from_i, len(theirs[j]) - from_j)
        same = _same(ours[i][from_i : from_i + size], theirs[j][from_j : from_j + size])
        at += same
        if same < size:
            break
        from_i, from_j = from_i + size, from_j + size
        if from_i == len(ours[i]):
            i, from_i = i + 1, 0
        if from_j == len(theirs[j]):
            j, from_j = j + 1, 0
    return at


def _inherited_length(one: TurnTokenDelta, other: TurnTokenDelta) -> int:
    """Return how many leading tokens of `other` are those of `one` because it is stored against `one`. The result is 0
    if the chain ends elsewhere, with a turn that is stored against nothing.
    """
    owner: TurnTokenDelta | None = other
    length = other.length
    while owner is not None and owner is not one:
        length, owner = min(length, owner.base_len), owner.parent
    return length


def _same(a: Ids, b: Ids) -> int:
    """Return `common` of two arrays of equal length, without comparing arrays that share their memory."""
    return len(a) if a.__array_interface__["data"] == b.__array_interface__["data"] else common(a, b)
