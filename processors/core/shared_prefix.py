"""How many tokens two turns share from the start, without building either."""

from __future__ import annotations

from turnlog.processors.core.tree import common
from turnlog.processors.core.turns import Ids, Tokens


def shared_prefix(one: Tokens, one_len: int, other: Tokens, other_len: int) -> int:
    """Length of the longest common prefix of one's S[:one_len] and other's S[:other_len].

    Tokens that both take from one record are the same memory and are not looked at.
    """
    shortest = min(one_len, other_len)
    if _taken(one, other) >= shortest:
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


def _taken(one: Tokens, other: Tokens) -> int:
    """How many tokens of `one` are those of `other` because it is stored against them."""
    owner: Tokens | None = other
    length = other.length
    while owner is not None and owner is not one:
        length, owner = min(length, owner.base_len), owner.parent
    return length if owner is one else 0


def _same(a: Ids, b: Ids) -> int:
    """`common` of two arrays of one length, without a look at what is one memory."""
    return len(a) if a.__array_interface__["data"] == b.__array_interface__["data"] else common(a, b)
