"""Every built-in family against transformers, with a small model of each: steps, packed rows, adapters, recorded
experts, and refusals.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.each import each
from tests.fakes.batches import synthetic_rows, with_random_experts
from tests.proofs import each_family
from tests.reference.parity import nontrivial_weights
from tests.reference.plain import PlainLearner, held_by_transformers
from tests.reference.small_models import SMALL
from turnlog.processors.core.batches.rows import BatchRows
from turnlog.trainer import LayoutUnfit
from turnlog.trainer.families.family import BUILT_IN, family
from turnlog.trainer.families.shape import ModelShape
from turnlog.trainer.launch import process_group
from turnlog.trainer.learner import Learner
from turnlog.trainer.plan import LearnerOptions, PolicyGradient, check_layout

OBJECTIVE = PolicyGradient(0.2, 0.2)
ONE = LearnerOptions(threads=1, microbatch_tokens=200)


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """One rank for the module."""
    torch.set_num_threads(1)
    with process_group():
        yield


def rows_of(shape: ModelShape, step: int) -> BatchRows:
    """Return rows of which a mixture has recorded experts, except for every third row."""
    rows = synthetic_rows(step, rows=8)
    return with_random_experts(rows, shape, step, some=True) if shape.mixture else rows


def check_steps(shape: ModelShape, options: LearnerOptions, *rows: BatchRows) -> tuple[Learner, PlainLearner]:
    """Check that steps are those of transformers and AdamW; return both learners after them."""
    given = nontrivial_weights(shape, 1)
    learner, plain = Learner(shape, given, options), PlainLearner(shape, given, options)
    for batch in rows:
        ours, theirs = learner.step(batch, OBJECTIVE, 1e-3), plain.step(batch, OBJECTIVE, 1e-3)
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-5)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-5)
    return learner, plain


@each_family("train")
def test_steps_are_those_of_transformers_and_adamw(shape: ModelShape) -> None:
    learner, plain = check_steps(shape, ONE, *(synthetic_rows(step, rows=8) for step in range(2)))
    wanted = plain.export()
    ours = held_by_transformers(learner.export(), shape)
    assert all((tensor - wanted[name]).abs().max() < 1e-4 for name, tensor in ours.items())


@each_family("packing")
def test_a_step_of_packed_rows_and_recomputed_layers_is_that_of_transformers(shape: ModelShape) -> None:
    check_steps(shape, dataclasses.replace(ONE, packing="on", recompute="full"), rows_of(shape, 0))


@each_family("LoRA")
def test_steps_of_adapters_are_those_of_a_plain_low_rank_model(shape: ModelShape) -> None:
    check_steps(shape, dataclasses.replace(ONE, lora_rank=4, lora_alpha=8.0), rows_of(shape, 0), rows_of(shape, 1))


@each_family("router replay")
def test_a_step_on_recorded_experts_is_that_of_transformers_on_the_same(shape: ModelShape) -> None:
    check_steps(shape, ONE, rows_of(shape, 0))


@each(
    ("kind", "setting"),
    [(kind, setting) for kind in BUILT_IN for setting in family(kind).without],
)
def test_what_a_family_does_not_support_is_refused_by_the_name_of_the_setting(kind: str, setting: str) -> None:
    value: Any = {"context_parallel": 2, "publish": "adapter"}[setting]
    with pytest.raises(LayoutUnfit, match=f"^trainer.{setting} = {value} is not supported for {kind}, because "):
        check_layout(SMALL[kind], LearnerOptions(**{setting: value}))
