"""Estimator `step` by hand: rewards to go, the place of sub-agents and verdicts, and both baselines."""

from __future__ import annotations

import pytest

from turnlog.processors.core.methods.estimators import EstimatorOptions, Trajectory, TurnReward, step


def rollout(text, final=0.0):
    """`1 .5 a2 0`: step rewards in order of turns; `a` marks a sub-agent's."""
    turns = tuple(TurnReward(float(one.lstrip("a")), not one.startswith("a")) for one in text.split())
    return Trajectory(final, final, turns)


def per_turn(*rollouts, discount=1.0):
    found = step(rollouts, EstimatorOptions(discount=discount))
    assert found.per_turn is not None
    return [list(values) for values in found.per_turn]


def test_rewards_to_go_are_discounted_per_turn():
    # to go: 1 + .5 x (2 + .5 x 4) = 3, 4, 4; the other has 0 everywhere; means 1.5, 2, 2
    assert per_turn(rollout("1 2 4"), rollout("0 0 0"), discount=0.5) == [[1.5, 2, 2], [-1.5, -2, -2]]


def test_the_verdict_stands_at_the_last_main_turn():
    # to go: 1 + .5 x (0 + 8) = 5, 8; the other 0, 0
    assert per_turn(rollout("1 0", final=8), rollout("0 0"), discount=0.5) == [[2.5, 4], [-2.5, -4]]


def test_undiscounted_and_without_step_rewards_it_is_the_reward_less_the_mean():
    assert per_turn(rollout("0 0", final=1), rollout("0 0", final=0)) == [[0.5, 0.5], [-0.5, -0.5]]


def test_a_turn_that_fewer_than_two_rollouts_have_is_held_against_all_turns_of_the_group():
    # to go: 6, 5, 3 and 2: place 0 has mean 4; places 1 and 2 have one rollout, so mean of all four turns = 4
    assert per_turn(rollout("1 2 3"), rollout("2")) == [[2, 1, -1], [-2]]


def test_a_sub_agents_turn_stands_where_the_main_turn_does_that_reads_its_answer():
    # places: main 0, sub 1, main 1. To go: 4, 4 (its own 1 + main's 3), 3; the other rollout: 1, 1. Means 2.5 and 2.
    found = per_turn(rollout("0 a1 3"), rollout("0 1"))
    assert found == [[1.5, 2, 1], [-1.5, -1]]


def test_a_main_turn_earns_nothing_of_a_sub_agent_that_ran_before_it():
    assert per_turn(rollout("a5 1"), rollout("1")) == [[5, 0], [0]]


def test_turns_behind_the_last_main_turn_share_its_place_and_the_verdict():
    # a title made after the end: to go 1 for both of its turns, as for main's
    assert per_turn(rollout("0 a0", final=1), rollout("0", final=0)) == [[0.5, 0.5], [-0.5]]


def test_discounting_counts_main_turns_only():
    # three sub-agents between two main turns are no further away than none
    few, many = rollout("0 1", final=4), rollout("0 a0 a0 a0 1", final=4)
    found = step((few, many), EstimatorOptions(discount=0.5))
    assert found.values == (0.0, 0.0)


def test_without_a_main_lineage_every_turn_counts():
    assert per_turn(rollout("a1 a2"), rollout("a0 a0")) == [[1.5, 1], [-1.5, -1]]


def test_the_scalar_is_the_first_main_turns_number_and_zero_without_turns():
    found = step((rollout("a7 1 2"), rollout("5 0"), rollout("", final=9)), EstimatorOptions())
    assert found.values == (-1.0, 1.0, 0.0)
    assert found.baseline == 4.0
    assert found.std is None


def test_groups_without_any_turn_have_no_advantage():
    assert step((rollout(""), rollout("")), EstimatorOptions()).values == (0.0, 0.0)


@pytest.mark.parametrize("discount", [0.0, 0.25, 1.0])
def test_the_last_turn_has_its_own_reward_whatever_the_discount(discount):
    assert per_turn(rollout("9 3"), rollout("9 1"), discount=discount)[0][1] == 1
