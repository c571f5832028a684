"""Loss weights as integers: the four weightings by hand, and that wrong ones are found in the columns themselves."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.each import each
from turnlog.processors.core.batches.rows import BatchRows
from turnlog.processors.core.batches.weighting import LiveRow, Weights, WeightsDoNotAddUp, check_rows, weigh
from turnlog.schemas.events import Weighting

WEIGHTINGS = [one for one in Weighting if one is not Weighting.unknown]
ROWS = [LiveRow("p1", "t1", 3), LiveRow("p1", "t1", 2), LiveRow("p1", "t2", 2), LiveRow("p2", "t3", 4)]


def columns(rows: list[LiveRow], weights: Weights) -> BatchRows:
    """One context token in front of each row's trained ones."""
    lengths = np.array([row.trained_tokens + 1 for row in rows], "<i4")
    trained = np.concatenate([[0] + [1] * row.trained_tokens for row in rows]).astype("|u1")
    tokens = int(lengths.sum())
    return BatchRows(
        sample_ids=tuple(f"{index}" for index in range(len(rows))),
        group_ids=tuple(row.group_id for row in rows),
        session_ids=tuple(row.session_id for row in rows),
        rollout_index=np.zeros(len(rows), "<i4"),
        segment_index=np.zeros(len(rows), "<i4"),
        lengths=lengths,
        token_ids=np.arange(tokens, dtype="<i4"),
        trained=trained,
        logprobs=np.zeros(tokens, "<f4"),
        advantages=trained.astype("<f4"),
        weight_divisor=np.array(weights.divisors, "<i8"),
        temperature=np.ones(len(rows), "<f4"),
        rewards=np.ones(len(rows), "<f4"),
        version_min=np.zeros(len(rows), "<i4"),
        version_max=np.zeros(len(rows), "<i4"),
    )


@pytest.mark.parametrize(
    ("weighting", "divisors"),
    [
        (Weighting.prompt, (14, 14, 14, 8)),
        (Weighting.trajectory, (15, 15, 6, 12)),
        (Weighting.token, (11, 11, 11, 11)),
        (Weighting.constant, (30, 30, 30, 30)),
    ],
)
def test_the_four_weightings_of_the_worked_example(weighting: Weighting, divisors: tuple[int, ...]) -> None:
    weights = weigh(ROWS, weighting, 10)
    assert weights.divisors == divisors
    assert (weights.prompts, weights.trajectories, weights.trained_tokens) == (2, 3, 11)
    assert weights.constant_length == (10 if weighting is Weighting.constant else 0)
    check_rows(columns(ROWS, weights), weights, weighting)


@pytest.mark.parametrize(
    ("weighting", "rows", "batch", "denominators"),
    [
        # p1 = t1 (3 + 2 tokens) and t2 (2): M_p = 7; p2 = 4
        (Weighting.prompt, [("p1", "t1", 3), ("p1", "t1", 2), ("p1", "t2", 2), ("p2", "t3", 4)], 4, [3.5, 3.5, 3.5, 2]),
        (Weighting.prompt, [("p1", "t1", 1), ("p2", "t2", 1)], 2, [1, 1]),
        (Weighting.prompt, [("p1", "t1", 1)], 2, [0.5]),  # the other prompt is dead: it counts nowhere
        (Weighting.prompt, [("p1", "t1", 100), ("p1", "t1", 150), ("p2", "t2", 200)], 4, [125, 125, 100]),
        (Weighting.trajectory, [("p1", "7", 2), ("p1", "7", 3), ("p1", "9", 1)], 2, [5, 5, 1]),
    ],
)
def test_a_mean_over_the_batch_of_sums_by_these_denominators_is_the_same_weight(
    weighting: Weighting, rows: list[tuple[str, str, int]], batch: int, denominators: list[float]
) -> None:
    """Trainers that divide each row's sum by a denominator and then by the batch size (conformance numbers)."""
    weights = weigh([LiveRow(*row) for row in rows], weighting, 1)
    assert [divisor / batch for divisor in weights.divisors] == denominators


def broken_divisor(rows: BatchRows) -> BatchRows:
    divisors = rows.weight_divisor.copy()
    divisors[1] += 1
    return replace(rows, weight_divisor=divisors)


def one_more_trained(rows: BatchRows) -> BatchRows:
    trained = rows.trained.copy()
    trained[0] = 1
    return replace(rows, trained=trained)


def one_row_masked(rows: BatchRows) -> BatchRows:
    trained = rows.trained.copy()
    trained[rows.starts[2] : rows.starts[2] + rows.lengths[2]] = 0
    return replace(rows, trained=trained)


def flag_of_two(rows: BatchRows) -> BatchRows:
    return replace(rows, trained=rows.trained * 2)


def another_prompt(rows: BatchRows) -> BatchRows:
    return replace(rows, group_ids=("p9", *rows.group_ids[1:]))


def another_trajectory(rows: BatchRows) -> BatchRows:
    return replace(rows, session_ids=("t9", *rows.session_ids[1:]))


def no_version(rows: BatchRows) -> BatchRows:
    return replace(rows, version_min=np.full(len(rows), -1, "<i4"))


@each("weighting", WEIGHTINGS)
@each(
    "corrupt",
    [broken_divisor, one_more_trained, one_row_masked, flag_of_two, another_prompt, another_trajectory, no_version],
)
def test_columns_that_do_not_add_up_are_found(corrupt: object, weighting: Weighting) -> None:
    weights = weigh(ROWS, weighting, 10)
    assert callable(corrupt)
    with pytest.raises(WeightsDoNotAddUp, match=f"weighting {weighting}: .*; nothing was published"):
        check_rows(corrupt(columns(ROWS, weights)), weights, weighting)


def test_weights_that_only_sum_to_one_are_not_enough() -> None:
    """Both prompts have their half, but one row of the first takes the other's share."""
    weights = weigh(ROWS, Weighting.prompt, 1)
    skewed = np.array([21, 7, 28, 8], "<i8")  # 3/21 + 2/7 + 2/28 = 1/2
    assert sum(Fraction(n, int(d)) for n, d in zip((3, 2, 2), skewed, strict=False)) == Fraction(1, 2)
    with pytest.raises(WeightsDoNotAddUp, match="p1 has divisors"):
        check_rows(replace(columns(ROWS, weights), weight_divisor=skewed), weights, Weighting.prompt)


@given(
    rows=st.lists(
        st.builds(LiveRow, st.sampled_from("pqr"), st.sampled_from("stuv"), st.integers(1, 9)), min_size=1, max_size=9
    ),
    weighting=st.sampled_from(WEIGHTINGS),
    length=st.integers(1, 40),
)
def test_the_weights_of_any_rows_pass_and_sum_as_they_must(
    rows: list[LiveRow], weighting: Weighting, length: int
) -> None:
    weights = weigh(rows, weighting, length)
    check_rows(columns(rows, weights), weights, weighting)
    total = sum(Fraction(row.trained_tokens, divisor) for row, divisor in zip(rows, weights.divisors, strict=True))
    constant = Fraction(weights.trained_tokens, weights.trajectories * length)
    assert total == (constant if weighting is Weighting.constant else 1)


def test_a_row_is_sampled_by_its_oldest_and_newest_version_and_by_what_is_known_between() -> None:
    rows = replace(columns(ROWS, weigh(ROWS, Weighting.token, 0)), version_min=np.array([2, 2, 5, 9], "<i4"),
                   version_max=np.array([5, 5, 5, 9], "<i4"))  # fmt: skip
    assert rows.sampled_by([]) == {2, 5, 9}
    assert rows.sampled_by([0, 3, 7, 9, 12]) == {2, 3, 5, 9}
    untrained = replace(rows, trained=np.zeros_like(rows.trained))
    assert untrained.sampled_by([3]) == set()
