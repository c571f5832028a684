"""Prefixes that rows of a batch have in common.

Rows begin with the same tokens where they have the same prompt (the rollouts of a group), and where the turns of a
session branch (a compaction, a sub-agent, a retried turn).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrefixes:
    """The rows of a batch as a forest: each row begins with tokens of its parent, behind which it has its own."""

    parents: NDArray[np.int32]
    """[n] int32, index of a row before this one with which it has the longest prefix in common; the first of several.
    -1: it shares its first token with none.
    """
    lengths: NDArray[np.int32]
    """[n] int32, number of tokens that a row shares with its parent; 0 without a parent."""


@dataclass(slots=True)
class _Node:
    """Neighbouring tokens of a row: from the end of the node above to `end`."""

    row: int
    """The first row that has these tokens."""
    end: int
    below: _Below = field(default_factory=dict)
    """Nodes that continue this one."""


_Below = dict[bytes, _Node]
"""Nodes by the bytes of their first token."""


def shared_prefixes(
    token_ids: NDArray[np.int32], lengths: NDArray[np.int32], more: Sequence[NDArray[Any]] = ()
) -> SharedPrefixes:
    """Return the prefixes that rows share with rows before them.

    `token_ids` [T] holds the tokens of all rows, one row after the other; `lengths` [n] counts them. Tokens are the
    same if their entries of every array [T, ...] in `more` are equal, too. The time is linear in the tokens.
    """
    ends = np.cumsum(lengths)
    rows = [
        [column[end - length : end] for column in (token_ids, *more)] for end, length in np.stack([ends, lengths], 1)
    ]
    top: _Below = {}
    found = np.array([_insert(top, row, rows) for row in range(len(rows))], "<i4")
    return SharedPrefixes(*found.reshape(len(rows), 2).T)


def _insert(below: _Below, row: int, rows: Sequence[Sequence[NDArray[Any]]]) -> tuple[int, int]:
    """Add a row to the tree; return the first row with its longest known prefix (-1: none), and its length."""
    own, depth, parent = rows[row], 0, -1
    while depth < len(own[0]) and (found := below.get(_first(own, depth))):
        known, last = rows[found.row], min(found.end, len(own[0]))
        same = depth + min(_count_same(known[at][depth:last], own[at][depth:last]) for at in range(len(own)))
        parent, depth = found.row, same
        if same < found.end:
            rest = _Node(found.row, found.end, found.below)
            found.end, found.below = same, {_first(known, same): rest}
        below = found.below
    if depth < len(own[0]):
        below[_first(own, depth)] = _Node(row, len(own[0]))
    return parent, depth


def _first(columns: Sequence[NDArray[Any]], at: int) -> bytes:
    return b"".join([column[at].tobytes() for column in columns])  # each has the same size in every row


def _count_same(known: NDArray[Any], own: NDArray[Any]) -> int:
    """Return the number of equal entries before the first different one."""
    different = np.flatnonzero((known != own).reshape(len(known), -1).any(1))
    return int(different[0]) if len(different) else len(known)
