"""Rows to ranks and microbatches: properties over all lengths, sizes and limits."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnlog.trainer.microbatches import microbatches

LENGTHS = st.lists(st.integers(1, 300), min_size=0, max_size=60)
RANKS = st.integers(1, 5)
LIMITS = st.integers(1, 2000)


@given(LENGTHS, RANKS, LIMITS)
def test_every_row_is_in_exactly_one_microbatch(lengths: list[int], ranks: int, limit: int) -> None:
    plan = microbatches(lengths, ranks, limit)
    assert sorted(row for rank in plan for batch in rank for row in batch) == list(range(len(lengths)))


@given(LENGTHS, RANKS, LIMITS)
def test_every_rank_runs_equally_many_and_at_least_one(lengths: list[int], ranks: int, limit: int) -> None:
    plan = microbatches(lengths, ranks, limit)
    assert len(plan) == ranks
    assert len({len(rank) for rank in plan}) == 1
    assert plan[0]


@given(LENGTHS, RANKS, LIMITS)
def test_padded_size_stays_within_the_limit_unless_a_row_alone_exceeds_it(
    lengths: list[int], ranks: int, limit: int
) -> None:
    for batch in (batch for rank in microbatches(lengths, ranks, limit) for batch in rank if batch):
        assert len(batch) == 1 or len(batch) * max(lengths[row] for row in batch) <= limit


@given(LENGTHS, RANKS, LIMITS)
def test_ranks_differ_by_no_more_tokens_than_the_longest_row(lengths: list[int], ranks: int, limit: int) -> None:
    loads = [sum(lengths[row] for batch in rank for row in batch) for rank in microbatches(lengths, ranks, limit)]
    assert max(loads) - min(loads) <= max(lengths, default=0)


@given(LENGTHS, RANKS, LIMITS)
def test_rows_stay_in_canonical_order_within_a_microbatch(lengths: list[int], ranks: int, limit: int) -> None:
    assert all(batch == tuple(sorted(batch)) for rank in microbatches(lengths, ranks, limit) for batch in rank)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(1, 3))
def test_the_fullest_rank_has_at_most_a_third_more_tokens_than_the_best_deal_there_is(
    lengths: list[int], ranks: int
) -> None:
    """Graham 1969: longest processing time first is within 4/3 - 1/(3m) of the optimum, here found by trying all."""
    best = min(
        max(sum(length for length, to in zip(lengths, deal, strict=True) if to == rank) for rank in range(ranks))
        for deal in itertools.product(range(ranks), repeat=len(lengths))
    )
    fullest = max(sum(lengths[row] for one in rank for row in one) for rank in microbatches(lengths, ranks, 10**6))
    assert Fraction(fullest) <= (Fraction(4, 3) - Fraction(1, 3 * ranks)) * best


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 9)), min_size=1, max_size=40),
    st.tuples(RANKS, LIMITS),
    st.tuples(RANKS, LIMITS),
)
def test_another_layout_computes_the_same_step(
    rows: list[tuple[int, int]], before: tuple[int, int], after: tuple[int, int]
) -> None:
    """A checkpoint may restart on other ranks and limits: each row is in the sum of the step once, as before."""
    lengths = [length for length, _ in rows]
    total = sum(trained for _, trained in rows)

    def step(ranks: int, limit: int) -> Fraction:
        loads = microbatches(lengths, ranks, limit)
        return sum((Fraction(rows[row][1], total) for rank in loads for one in rank for row in one), Fraction(0))

    assert step(*before) == step(*after) == 1


@given(LENGTHS, RANKS, LIMITS, st.booleans(), st.integers(0, 2**60 - 1))
def test_rows_of_two_kinds_share_no_microbatch(
    lengths: list[int], ranks: int, limit: int, packing: bool, drawn: int
) -> None:
    kinds = [bool(drawn >> row & 1) for row in range(len(lengths))]
    plan = microbatches(lengths, ranks, limit, packing=packing, kinds=kinds)
    assert sorted(row for rank in plan for batch in rank for row in batch) == list(range(len(lengths)))
    assert all(len({kinds[row] for row in batch}) <= 1 for rank in plan for batch in rank)


def squared(length: int) -> int:
    """A cost that long rows have more of than tokens."""
    return length * (length + 100)


def computed(lengths: list[int], batch: Sequence[int], *, packing: bool) -> int:
    """Cost of a microbatch with its padding."""
    costs = [squared(lengths[row]) for row in batch]
    return sum(costs) if packing else len(costs) * max(costs, default=0)


@given(LENGTHS, RANKS, LIMITS)
def test_the_costliest_microbatch_costs_no_more_than_where_each_is_filled_up(
    lengths: list[int], ranks: int, limit: int
) -> None:
    plan = microbatches(lengths, ranks, limit, cost=squared)
    full = [filled_up(sorted(row for one in rank for row in one), lengths, limit) for rank in plan]
    assert len(plan[0]) == max(1, *map(len, full))
    for ours, theirs in zip(plan, full, strict=True):
        costliest = max((computed(lengths, one, packing=False) for one in theirs), default=0)
        assert max(computed(lengths, one, packing=False) for one in ours) <= costliest


def filled_up(rows: list[int], lengths: list[int], limit: int) -> list[list[int]]:
    """Padded rows, the longest first, each with those before it while tokens allow."""
    done: list[list[int]] = []
    for row in sorted(rows, key=lambda row: (-lengths[row], row)):
        if done and (len(done[-1]) + 1) * lengths[done[-1][0]] <= limit:
            done[-1].append(row)
        else:
            done.append([row])
    return done


@given(LENGTHS, RANKS, LIMITS, st.booleans())
def test_the_costliest_microbatches_come_first_so_that_those_of_one_turn_are_alike(
    lengths: list[int], ranks: int, limit: int, packing: bool
) -> None:
    for rank in microbatches(lengths, ranks, limit, cost=squared, packing=packing):
        costs = [computed(lengths, batch, packing=packing) for batch in rank]
        assert costs == sorted(costs, reverse=True)


@given(LENGTHS, RANKS, LIMITS)
def test_packed_microbatches_differ_by_no_more_than_the_last_row_that_the_costliest_took(
    lengths: list[int], ranks: int, limit: int
) -> None:
    """Longest processing time first: it was the cheapest then. A row above the limit was alone in it."""
    for rank in microbatches(lengths, ranks, limit, packing=True):
        costs = [tokens_of(lengths, batch) for batch in rank]
        assert costs[0] - costs[-1] <= min((lengths[row] for row in rank[0]), default=0)


def tokens_of(lengths: list[int], batch: Sequence[int]) -> int:
    return sum(lengths[row] for row in batch)


@given(LENGTHS, RANKS, LIMITS)
def test_packed_tokens_stay_within_the_limit_unless_a_row_alone_exceeds_it(
    lengths: list[int], ranks: int, limit: int
) -> None:
    for batch in (batch for rank in microbatches(lengths, ranks, limit, packing=True) for batch in rank):
        assert len(batch) <= 1 or tokens_of(lengths, batch) <= limit


@given(LENGTHS, RANKS, LIMITS)
def test_the_deal_depends_on_lengths_alone(lengths: list[int], ranks: int, limit: int) -> None:
    assert microbatches(tuple(lengths), ranks, limit) == microbatches(list(lengths), ranks, limit)


def test_more_ranks_than_rows_leaves_stand_ins() -> None:
    assert microbatches([5], 3, 10) == (((0,),), ((),), ((),))


@pytest.mark.parametrize(("ranks", "limit"), [(0, 1), (1, 0)])
def test_nonsense_is_refused(ranks: int, limit: int) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        microbatches([1], ranks, limit)
