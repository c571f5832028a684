"""The radix tree of a session's tokens: which turns are a prefix of which prompt, without storing whole prompts.

Every turn is inserted below the position where its storage parent's prefix ends, so it costs O(new tokens). S is a
turn's prompt + output.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from turnlog.processors.core.turns import Ids, TurnTokenDelta

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
