"""Rows that are packed behind one another train as they do alone, and compute little else."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.fakes.batches import synthetic_rows
from turnlog.trainer.families.costs import row_flops
from turnlog.trainer.families.shape import TINY, ModelShape
from turnlog.trainer.launch import process_group
from turnlog.trainer.learner import Learner
from turnlog.trainer.microbatches import context_shard, microbatches, pack_rows, pad_rows, worth_packing
from turnlog.trainer.plan import LearnerOptions, PolicyGradient
from turnlog.trainer.warm_start import random_weights

OBJECTIVE = PolicyGradient(0.2, 0.2)
PACKED = LearnerOptions(threads=1, microbatch_tokens=200, packing="on")
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """One rank for the module."""
    torch.set_num_threads(1)
    with process_group():
        yield


def test_a_padded_batch_after_a_packed_one_is_not_cut() -> None:
    learner = Learner(TINY, random_weights(TINY, 1), replace(PACKED, packing="auto"))
    short = synthetic_rows(0)
    before = learner.measure(short, OBJECTIVE)
    learner.measure(synthetic_rows(1, rows=2, lengths=np.array([200, 400], "<i4")), OBJECTIVE)
    assert learner.measure(short, OBJECTIVE) == before


def test_every_position_of_a_row_is_in_one_context_rank_s_share() -> None:
    rows = synthetic_rows(0, rows=4)
    batch = pad_rows(rows, (0, 1, 2, 3), CPU, multiple=4)
    positions = [-(-(int(length) - 1) // 4) * 4 for length in rows.lengths]
    whole = pack_rows(batch, positions)
    assert whole.edges == tuple(np.cumsum([0, *positions]).tolist())
    parts = [context_shard(whole, rank, 2) for rank in range(2)]
    assert sorted(torch.cat([part.weights for part in parts], 1)[0].tolist()) == sorted(whole.weights[0].tolist())
    assert int(whole.trained.sum()) == int(rows.trained.sum())


def given(lengths: NDArray[np.int32], shape: ModelShape = TINY, **options: Any) -> list[tuple[int, ...]]:
    """The size of each of the tensors that the model is run on in a pass over rows of these lengths."""
    learner, sizes = Learner(shape, random_weights(shape, 1), LearnerOptions(**options)), list[tuple[int, ...]]()
    learner.policy.model.register_forward_pre_hook(lambda _, inputs: sizes.append(tuple(inputs[0].shape)))
    learner.measure(synthetic_rows(0, rows=len(lengths), lengths=lengths), OBJECTIVE)
    return sizes


def test_nearly_all_that_is_computed_of_long_rows_is_real() -> None:
    lengths, shape = np.random.default_rng(0).lognormal(6.2, 0.8, 24).astype("<i4"), replace(TINY, positions=8192)
    assert lengths.mean() > 500
    packed_share, padded_share = (
        (lengths - 1).sum() / sum(map(math.prod, given(lengths, shape, packing=one, microbatch_tokens=4096)))
        for one in ("on", "off")
    )
    assert 1 >= packed_share >= 0.95 > padded_share


@pytest.mark.parametrize(
    ("packing", "sizes"), [("on", [(1, 14 * 49), (1, 399 + 2 * 49)]), ("off", [(16, 49), (1, 399)])]
)
def test_a_step_s_microbatches_are_balanced_by_what_rows_cost(packing: str, sizes: list[tuple[int, ...]]) -> None:
    """By its tokens alone the row of 400 would share a microbatch with more of the others."""
    assert given(np.array([400, *[50] * 16], "<i4"), packing=packing, microbatch_tokens=800) == sizes


@pytest.mark.parametrize(
    ("lengths", "worth"),
    [([300, 300, 300], False), ([300, 280, 310], False), ([300, 100, 30], True), ([20, 10], False)],
)
def test_rows_are_packed_where_their_padding_costs_more_than_they_do(lengths: list[int], worth: bool) -> None:
    assert worth_packing(microbatches(lengths, 1, 1000), lengths) is worth


def test_packed_microbatches_are_as_few_as_may_be_and_alike() -> None:
    lengths = np.random.default_rng(0).integers(10, 400, 60).tolist()
    (plan,) = microbatches(lengths, 1, 1000, packing=True)
    sizes = [sum(lengths[row] for row in one) for one in plan]
    assert max(sizes) <= 1000
    assert len(sizes) == -(-sum(lengths) // 1000)
    assert max(sizes) - min(sizes) <= min(lengths[row] for row in plan[0])
    assert sorted(row for one in plan for row in one) == list(range(60))


def test_ranks_are_balanced_by_what_rows_cost() -> None:
    """One row of 4,000 tokens costs a small model more than eight of 500."""
    lengths = [4000, *[500] * 8, *[100] * 10]

    def cost(length: int) -> int:
        return row_flops(TINY, length)

    loads = [
        sum(cost(lengths[row]) for one in rank for row in one) for rank in microbatches(lengths, 2, 10**6, cost=cost)
    ]
    assert max(loads) - min(loads) <= max(map(cost, lengths))
    by_tokens = [sum(cost(lengths[row]) for one in rank for row in one) for rank in microbatches(lengths, 2, 10**6)]
    assert max(loads) < max(by_tokens)
