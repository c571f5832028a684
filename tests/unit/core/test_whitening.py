"""Whitening: exact, the same bits in any order, over trained tokens alone."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnlog.processors.core.batches.weighting import EPSILON, Whitening, whitening

brief = settings(deadline=None)
VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30)


def test_mean_and_deviation_of_a_worked_batch():
    found = whitening([np.array([1.0, 1.0, 1.0]), np.array([5.0])])
    assert found == Whitening(2.0, math.sqrt(3.0))
    assert found.apply(np.array([1.0, 5.0])) == pytest.approx([-1 / math.sqrt(3), math.sqrt(3)], rel=1e-5)
    assert found.apply(np.array([5.0]))[0] == 3.0 / (math.sqrt(3.0) + EPSILON)


@brief
@given(value=st.floats(-1e30, 1e30), tokens=st.integers(1, 9))
def test_equal_advantages_have_deviation_exactly_zero_and_become_zero(value, tokens):
    found = whitening([np.full(tokens, value)])
    assert found == Whitening(value, 0.0)
    assert not found.apply(np.full(tokens, value)).any()


@brief
@given(values=VALUES, cuts=st.integers(1, 6), rng=st.randoms(use_true_random=False))
def test_neither_order_nor_cuts_change_a_bit(values, cuts, rng: random.Random):
    mixed = rng.sample(values, len(values))
    edges = sorted(rng.randint(0, len(mixed)) for _ in range(cuts))
    parts = np.split(np.array(mixed), edges)
    assert whitening(parts) == whitening([np.array(values)])


@brief
@given(values=VALUES)
def test_it_agrees_with_numpy(values):
    found = whitening([np.array(values)])
    assert found.mean == pytest.approx(np.mean(values), abs=1e-6)
    assert found.std == pytest.approx(np.std(values), abs=1e-4)


@brief
@given(values=st.lists(st.integers(-64, 64), min_size=2, max_size=30), constant=st.integers(-64, 64))
def test_whitened_advantages_have_mean_zero_and_forget_a_constant(values, constant):
    plain, moved = np.array(values, float), np.array(values, float) + constant
    white = whitening([plain]).apply(plain)
    assert white.sum() == pytest.approx(0, abs=1e-9)
    assert white.std() == pytest.approx(float(len(set(values)) > 1), abs=1e-4)
    assert whitening([moved]).apply(moved) == pytest.approx(white, abs=1e-12)


def test_the_largest_floats_that_a_row_holds_do_not_overflow():
    largest = float(np.finfo(np.float32).max)
    assert whitening([np.array([largest, -largest])]) == Whitening(0.0, largest)


def test_nothing_cannot_be_whitened():
    with pytest.raises(ValueError, match="no trained token"):
        whitening([])
