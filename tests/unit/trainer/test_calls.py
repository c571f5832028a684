"""What rank 0 lays out and others map: the same arrays, held once. That ranks step on them: test_trainer_layouts.py."""

from __future__ import annotations

import dataclasses

import numpy as np

from tests.fakes.batches import synthetic_rows, with_random_experts
from tests.unit.trainer.test_learner import ONE, random_weights
from turnlog.processors.core.batches.rows import BatchRows, rows_sha256
from turnlog.trainer.algorithms.objective import ForwardPassResults
from turnlog.trainer.calls import RankZero, laid_out
from turnlog.trainer.families.shape import TINY, TINY_MIXTURE
from turnlog.trainer.launch import process_group
from turnlog.trainer.learner import Learner
from turnlog.trainer.models.experts import RoutedRows
from turnlog.trainer.plan import imitation

SMALL = synthetic_rows(0)
ROWS = with_random_experts(SMALL, TINY_MIXTURE, 0)


def test_what_is_mapped_is_what_was_laid_out_and_outlives_it() -> None:
    numbers = ForwardPassResults(proximal=np.arange(5, dtype="<f4"))
    with laid_out(("step", (ROWS, numbers, 0.5))) as there:
        assert there is not None
        method, (rows, told, rate) = there.read()
    assert (method, rate) == ("step", 0.5)
    assert isinstance(rows, RoutedRows)
    assert rows_sha256(rows) == rows_sha256(ROWS)
    assert np.array_equal(rows.experts, ROWS.experts)
    assert np.array_equal(told.proximal, numbers.proximal)
    arrays = [getattr(rows, field.name) for field in dataclasses.fields(BatchRows)]
    assert all(array.flags.aligned for array in arrays if isinstance(array, np.ndarray))
    assert len(there.rest) < ROWS.token_ids.nbytes


def test_what_one_writes_to_its_own_nobody_else_sees() -> None:
    with laid_out(ROWS) as there:
        assert there is not None
        mine, yours = there.read(), there.read()
        mine.token_ids[:] = 0
    assert np.array_equal(yours.token_ids, ROWS.token_ids)


def test_a_call_without_arrays_is_not_laid_out() -> None:
    with laid_out(("saved", (True,))) as there:
        assert there is None


def test_a_call_has_the_arguments_and_the_result_of_the_method_that_it_names() -> None:
    with process_group() as control:
        learner = Learner(TINY, random_weights(TINY, 9), ONE)
        everyone = RankZero(learner, control, 1)
        assert everyone.call(Learner.finish_save, True) == everyone.call(Learner.finish_save, wait=False) == {}
        assert np.array_equal(everyone.call(Learner.logprobs, SMALL), learner.logprobs(SMALL))
        assert everyone.call(Learner.measure, SMALL, objective=imitation) == learner.measure(SMALL, imitation)
