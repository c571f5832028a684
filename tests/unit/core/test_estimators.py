"""The numbers of docs/folds.md, and what holds for every group of rewards."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnlog.processors.core.estimators import ESTIMATORS, dr_grpo, grpo

rewards = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20)


def test_one_success_in_four_by_both_deviations():
    assert grpo([1, 0, 0, 0], 1).values == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-5)
    assert grpo([1, 0, 0, 0], 0).values == pytest.approx([1.7320508, *[-0.5773503] * 3], rel=1e-5)
    assert grpo([1, 0, 0, 0], 1).values[0] == 0.75 / (0.5 + 1e-6)


@pytest.mark.parametrize("group", [[1, 2, 3, 4], [10, 12], [5, 6, 7]])
def test_dr_grpo_has_mean_zero(group):
    assert sum(dr_grpo(group, 1).values) == 0
    assert dr_grpo(group, 1).baseline == sum(group) / len(group)
    assert dr_grpo(group, 1).std is None


def test_names_and_versions_are_what_scores_say():
    assert {name: estimator.label for name, estimator in ESTIMATORS.items()} == {
        "grpo": "grpo/1",
        "dr_grpo": "dr_grpo/1",
    }


@given(rewards, st.sampled_from(sorted(ESTIMATORS)), st.integers(0, 1), st.randoms(use_true_random=False))
def test_a_trajectorys_advantage_does_not_depend_on_its_place(group, name, ddof, rng: random.Random):
    order = list(range(len(group)))
    rng.shuffle(order)
    straight = ESTIMATORS[name].estimate(group, ddof)
    shuffled = ESTIMATORS[name].estimate([group[i] for i in order], ddof)
    assert [straight.values[i] for i in order] == list(shuffled.values)


@given(st.floats(-1e6, 1e6), st.integers(1, 20), st.sampled_from(sorted(ESTIMATORS)), st.integers(0, 1))
def test_equal_rewards_have_advantage_exactly_zero(reward, size, name, ddof):
    assert set(ESTIMATORS[name].estimate([reward] * size, ddof).values) == {0.0}
