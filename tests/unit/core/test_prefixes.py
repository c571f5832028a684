"""Prefixes that rows share: the longest with any row before, and the first row that has it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from turnlog.processors.core.batches.prefixes import shared_prefixes

ROWS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), min_size=1, max_size=12)


def flat(rows: list[list[int]]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Tokens of all rows, and their lengths."""
    return np.concatenate([np.array(row, "<i4") for row in rows]), np.array([len(row) for row in rows], "<i4")


def same(one: list[int], other: list[int]) -> int:
    """The number of first entries that two rows share."""
    return next((at for at, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), min(len(one), len(other)))


@given(ROWS)
def test_a_row_s_parent_is_the_first_of_those_before_it_that_share_most(rows: list[list[int]]) -> None:
    found = shared_prefixes(*flat(rows))
    assert found.parents.dtype == found.lengths.dtype == "<i4"
    for row, (parent, length) in enumerate(zip(found.parents.tolist(), found.lengths.tolist(), strict=True)):
        known = [same(rows[row], other) for other in rows[:row]]
        most = max(known, default=0)
        assert (parent, length) == ((known.index(most), most) if most else (-1, 0))


def test_tokens_are_the_same_where_all_their_columns_are() -> None:
    ids, lengths = flat([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 5]])
    more = np.zeros((12, 2), "u1")
    more[[2, 6, 10], 1] = 7, 8, 8
    assert shared_prefixes(ids, lengths).lengths.tolist() == [0, 3, 4]
    found = shared_prefixes(ids, lengths, [more])
    assert (found.parents.tolist(), found.lengths.tolist()) == ([-1, 0, 1], [0, 2, 4])
