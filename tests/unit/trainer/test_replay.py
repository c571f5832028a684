"""Recorded routing in the trainer: refused where it cannot be replayed, and what replaying it gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.fakes.batches import synthetic_rows, with_random_experts
from tests.reference.plain import PlainLearner
from turnlog.processors.core.batches.rows import BatchRows
from turnlog.trainer import ExpertsUnfit
from turnlog.trainer.families.shape import TINY, TINY_MIXTURE, Mixture
from turnlog.trainer.launch import process_group
from turnlog.trainer.learner import Learner
from turnlog.trainer.microbatches import pad_rows
from turnlog.trainer.models.experts import RoutedRows, attach_experts, unrouted_rows
from turnlog.trainer.plan import LearnerOptions, PolicyGradient
from turnlog.trainer.warm_start import random_weights

OBJECTIVE = PolicyGradient(0.2, 0.2)
ONE = LearnerOptions(threads=1, microbatch_tokens=200)
ROWS = synthetic_rows(0)
MIXTURE = dataclasses.replace(TINY_MIXTURE, mixture=Mixture(experts=16, experts_per_token=4, expert_ffn=32))


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """One rank for the module."""
    torch.set_num_threads(1)
    with process_group():
        yield


def plain_rows(rows: RoutedRows) -> BatchRows:
    """The same without experts."""
    return BatchRows(**{field.name: getattr(rows, field.name) for field in dataclasses.fields(BatchRows)})


@pytest.mark.parametrize(("recompute", "some"), [("none", False), ("none", True), ("full", True)])
def test_steps_on_recorded_experts_are_those_of_transformers_on_the_same(recompute: str, some: bool) -> None:
    """`some`: with rows between them of which nothing was recorded."""
    weights = random_weights(TINY_MIXTURE, 1)
    learner = Learner(TINY_MIXTURE, weights, dataclasses.replace(ONE, recompute=recompute))
    plain = PlainLearner(TINY_MIXTURE, weights, ONE)
    for step in range(2):
        rows = with_random_experts(synthetic_rows(step), TINY_MIXTURE, step, some=some)
        ours, theirs = learner.step(rows, OBJECTIVE, 1e-3), plain.step(rows, OBJECTIVE, 1e-3)
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-5)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-5)


def test_unrouted_rows_that_are_not_to_train_are_masked_and_move_nothing() -> None:
    rows = with_random_experts(ROWS, TINY_MIXTURE, 0, some=True)
    options = dataclasses.replace(ONE, unrouted_train=False)
    learner = Learner(TINY_MIXTURE, random_weights(TINY_MIXTURE, 1), options)
    other = np.where(np.repeat(unrouted_rows(rows), rows.lengths) & (rows.trained > 0), np.float32(7), rows.advantages)
    result, same = (learner.measure(each, OBJECTIVE) for each in (rows, dataclasses.replace(rows, advantages=other)))
    assert result.masked == int(rows.trained_per_row()[unrouted_rows(rows)].sum()) > 0
    assert result.trained_tokens == int(rows.trained.sum())
    assert same.loss == result.loss


def test_the_gap_to_an_engine_of_another_precision_shrinks() -> None:
    weights = random_weights(MIXTURE, 1)
    weights = {name: tensor * 4 if tensor.dim() == 2 else tensor for name, tensor in weights.items()}
    rows = PlainLearner(MIXTURE, weights, ONE).record_rows(ROWS)
    learner = Learner(MIXTURE, weights, ONE)
    replayed, chosen = learner.measure(rows, OBJECTIVE), learner.measure(plain_rows(rows), OBJECTIVE)
    assert replayed.logprob_gap_max < chosen.logprob_gap_max / 2
    assert replayed.logprob_gap_mean < chosen.logprob_gap_mean


def test_after_a_replay_routers_choose_for_themselves() -> None:
    learner = Learner(TINY_MIXTURE, random_weights(TINY_MIXTURE, 1), ONE)
    before = learner.measure(ROWS, OBJECTIVE)
    assert learner.measure(with_random_experts(ROWS, TINY_MIXTURE, 0), OBJECTIVE).loss != before.loss
    assert learner.measure(ROWS, OBJECTIVE) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ids: ids[:, :1], r"experts of shape \(\d+, 1, 2\), the rows of this model \(qwen3_moe\) take"),
        (lambda ids: put(ids, 4), "sample-0-000: an expert outside of the model's 4"),
        (lambda ids: put(ids, ids[3, 1, 1]), "sample-0-000: one expert twice at token 3 in layer 1"),
    ],
)
def test_experts_that_cannot_be_replayed_are_refused_by_name(change: Any, message: str) -> None:
    ids = with_random_experts(ROWS, TINY_MIXTURE, 0).experts
    with pytest.raises(ExpertsUnfit, match=message):
        attach_experts(ROWS, change(ids), TINY_MIXTURE)


def put(ids: Any, expert: int) -> Any:
    """With another first expert of token 3 in layer 1."""
    changed = ids.copy()
    changed[3, 1, 0] = expert
    return changed


def test_what_stands_at_a_row_s_last_token_is_not_read() -> None:
    ids = with_random_experts(ROWS, TINY_MIXTURE, 0).experts.copy()
    ids[ROWS.starts + ROWS.lengths - 1] = 255
    learner = Learner(TINY_MIXTURE, random_weights(TINY_MIXTURE, 1), ONE)
    assert np.isfinite(learner.step(attach_experts(ROWS, ids, TINY_MIXTURE), OBJECTIVE, 1e-3).loss)


def test_a_dense_model_has_no_experts_to_replay() -> None:
    with pytest.raises(ExpertsUnfit, match=r"this model \(qwen3\)"):
        attach_experts(ROWS, np.zeros((len(ROWS.token_ids), TINY.layers, 0), "u1"), TINY)


def test_a_microbatch_holds_two_bytes_for_each_recorded_expert() -> None:
    rows = with_random_experts(ROWS, TINY_MIXTURE, 0)
    batch = pad_rows(rows, (0, 1), torch.device("cpu"))
    assert batch.experts is not None
    assert batch.experts.element_size() == 2
    wanted = torch.from_numpy(rows.experts[: int(rows.lengths[0]) - 1].astype("i8"))
    assert torch.equal(batch.experts[0, : len(wanted)].long(), wanted)
