"""The load-balancing loss of routers: its gradient is that of the definition over all tokens of a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.each import each
from tests.fakes.batches import synthetic_rows, with_random_experts
from tests.reference.plain import PlainLearner, held_by_transformers
from turnlog.processors.core.batches.rows import BatchRows
from turnlog.trainer import LayoutUnfit
from turnlog.trainer.families.shape import TINY, TINY_MIXTURE
from turnlog.trainer.launch import process_group
from turnlog.trainer.learner import Learner
from turnlog.trainer.plan import LearnerOptions, PolicyGradient, check_layout
from turnlog.trainer.warm_start import random_weights

OBJECTIVE = PolicyGradient(0.2, 0.2)
BALANCED = LearnerOptions(threads=1, packing="off", moe_aux_loss_coeff=0.5, microbatch_tokens=1)
"""Each row is a microbatch of its own."""


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """One rank for the module."""
    torch.set_num_threads(1)
    with process_group():
        yield


def both(rows: BatchRows, options: LearnerOptions) -> None:
    """Check that two steps are those of transformers, with its loss added, and that this loss weighs."""
    weights = random_weights(TINY_MIXTURE, 1)
    learner, plain = Learner(TINY_MIXTURE, weights, options), PlainLearner(TINY_MIXTURE, weights, options)
    without = Learner(TINY_MIXTURE, weights, dataclasses.replace(options, moe_aux_loss_coeff=0.0))
    for _ in range(2):
        found, wanted, other = (one.step(rows, OBJECTIVE, 1e-3) for one in (learner, plain, without))
        assert found.loss == pytest.approx(wanted.loss, abs=1e-5)
        assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-5)
        assert abs(found.grad_norm - other.grad_norm) > 1e-3 * found.grad_norm
    after = plain.export()
    exported = held_by_transformers(learner.export(), TINY_MIXTURE)
    assert max(float((tensor - after[name]).abs().max()) for name, tensor in exported.items()) < 1e-4


@each("change", [{}, {"packing": "on"}, {"recompute": "full"}])
def test_steps_are_those_of_transformers_with_its_loss(change: dict[str, Any]) -> None:
    both(synthetic_rows(0), dataclasses.replace(BALANCED, **change))


def test_choices_are_those_of_the_routers_where_recorded_ones_are_replayed() -> None:
    both(with_random_experts(synthetic_rows(0), TINY_MIXTURE, 0), BALANCED)


def test_padding_does_not_count() -> None:
    lengths = np.full(4, 20, np.int32)
    rows = synthetic_rows(0, rows=4, lengths=lengths)
    wide = dataclasses.replace(BALANCED, microbatch_tokens=10_000)
    one, other = (
        Learner(TINY_MIXTURE, random_weights(TINY_MIXTURE, 1), dataclasses.replace(wide, packing=packing))
        for packing in ("off", "on")
    )
    longer = synthetic_rows(0, rows=4, lengths=np.array([12, 40, 20, 31], np.int32))
    for some in (rows, longer):
        found, wanted = (learner.step(some, OBJECTIVE, 0.0) for learner in (one, other))
        assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-5)


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(LayoutUnfit, match=r"moe_aux_loss_coeff = 0\.5 is not supported .* set it to 0"):
        check_layout(TINY, BALANCED)
