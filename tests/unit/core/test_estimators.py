"""The numbers of docs/folds.md, and what holds for every group of rewards under every estimator."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnlog.processors.core.methods.estimators import (
    EstimatorOptions,
    Trajectory,
    TurnReward,
    dr_grpo,
    grpo,
    reinforce,
    rloo,
)
from turnlog.processors.core.methods.rules import BUILT_IN, estimate

NAMES = sorted(BUILT_IN.estimators)
CENTRED = sorted(name for name, estimator in BUILT_IN.estimators.items() if estimator.is_group_relative)
OPTIONS = EstimatorOptions()
AS_IT_IS = ("reinforce", "reinforce_pp", "none")
"""No baseline of the group: the advantage is the reward (reinforce_pp is whitened in the batcher)."""
brief = settings(deadline=None)
SIXTY_FOURTHS = st.integers(-512, 512).map(lambda number: number / 64)
"""Rewards whose sums are exact, so that only the estimator's own rounding shows."""


@st.composite
def groups(draw, rewards=SIXTY_FOURTHS, least=1):
    """Trajectories with 0 to 5 turns, some of sub-agents, some with step rewards."""
    turn = st.builds(TurnReward, st.one_of(st.just(0.0), rewards), st.booleans())
    made = []
    for _ in range(draw(st.integers(least, 8))):
        reward = draw(rewards)
        made.append(Trajectory(reward, reward, tuple(draw(st.lists(turn, max_size=5)))))
    return made


def advantages(name, trajectories, options=OPTIONS):
    return estimate(BUILT_IN.estimator(name), trajectories, options)


def plain(*rewards):
    return [Trajectory(reward, reward) for reward in rewards]


def shifted(trajectories, constant):
    return [replace(t, reward=t.reward + constant, final=t.final + constant) for t in trajectories]


def test_one_success_in_four_by_both_deviations():
    assert grpo([1, 0, 0, 0], 1).values == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-5)
    assert grpo([1, 0, 0, 0], 0).values == pytest.approx([1.7320508, *[-0.5773503] * 3], rel=1e-5)
    assert grpo([1, 0, 0, 0], 1).values[0] == 0.75 / (0.5 + 1e-6)


def test_the_deviation_of_equal_rewards_is_recorded_as_zero():
    assert (grpo([0.5, 0.5], 0).std, grpo([0.5, 0.5], 0).baseline) == (0.0, 0.5)


@pytest.mark.parametrize("group", [[1, 2, 3, 4], [10, 12], [5, 6, 7]])
def test_dr_grpo_has_mean_zero(group):
    assert sum(dr_grpo(group).values) == 0
    assert dr_grpo(group).baseline == sum(group) / len(group)
    assert dr_grpo(group).std is None


def test_rloo_takes_off_the_mean_of_the_others():
    rewards = [1, 2, 3, 4]
    others = [reward - (sum(rewards) - reward) / 3 for reward in rewards]
    assert rloo(rewards).values == pytest.approx([-2, -2 / 3, 2 / 3, 2])
    assert rloo(rewards).values == pytest.approx(others)
    assert rloo([7.0]).values == (0.0,)


def test_reinforce_is_the_reward_itself():
    assert reinforce([1.5, 7]).values == (1.5, 7)
    assert reinforce([1.5, 7]).baseline == 0.0


@pytest.mark.parametrize("name", AS_IT_IS)
def test_without_a_baseline_of_the_group_the_advantage_is_the_reward(name):
    assert advantages(name, plain(1.5, 7)).values == (1.5, 7)
    assert advantages(name, plain(3)).values == (3,)


def test_reinforce_pp_baseline_takes_off_the_mean_before_the_batcher_whitens():
    assert advantages("reinforce_pp_baseline", plain(1, 0)).values == (0.5, -0.5)
    assert [name for name in NAMES if BUILT_IN.estimator(name).whiten] == ["reinforce_pp", "reinforce_pp_baseline"]


def test_names_and_versions_are_what_scores_say():
    assert {estimator.label for estimator in BUILT_IN.estimators.values()} == {
        "grpo/1", "dr_grpo/1", "rloo/1", "reinforce/1", "reinforce_pp/1", "reinforce_pp_baseline/1", "step/1", "none/1",
    }  # fmt: skip


def test_a_group_baseline_needs_two_rollouts_and_the_others_one():
    least = {name: estimator.min_valid for name, estimator in BUILT_IN.estimators.items()}
    assert least == {name: 2 if name in CENTRED else 1 for name in NAMES}
    assert set(AS_IT_IS) == set(NAMES) - set(CENTRED)


@pytest.mark.parametrize("name", NAMES)
@brief
@given(group=groups(st.floats(-1e6, 1e6)), ddof=st.integers(0, 1), rng=st.randoms(use_true_random=False))
def test_a_trajectorys_advantage_does_not_depend_on_its_place(name, group, ddof, rng: random.Random):
    options = EstimatorOptions(ddof, 0.9)
    order = list(range(len(group)))
    rng.shuffle(order)
    straight, mixed = advantages(name, group, options), advantages(name, [group[i] for i in order], options)
    assert [straight.values[i] for i in order] == list(mixed.values)
    assert (straight.baseline, straight.std) == (mixed.baseline, mixed.std)
    if straight.per_turn is not None:
        assert [straight.per_turn[i] for i in order] == list(mixed.per_turn)


@pytest.mark.parametrize("name", CENTRED)
@brief
@given(reward=st.floats(-1e6, 1e6), size=st.integers(1, 20), turns=st.integers(0, 4), ddof=st.integers(0, 1))
def test_equal_trajectories_have_advantage_exactly_zero(name, reward, size, turns, ddof):
    alone = 2 if name == "step" else 1  # one rollout's turns are held against each other there
    group = [Trajectory(reward, reward, (TurnReward(0.25),) * turns)] * max(size, alone)
    found = advantages(name, group, EstimatorOptions(ddof, 1.0))
    assert set(found.values) == {0.0}
    assert {value for one in found.per_turn or () for value in one} <= {0.0}


@pytest.mark.parametrize("name", [name for name in CENTRED if name != "step"])
@brief
@given(group=groups(), ddof=st.integers(0, 1))
def test_the_advantages_of_a_group_sum_to_zero(name, group, ddof):
    values = advantages(name, group, EstimatorOptions(ddof)).values
    assert math.fsum(values) == pytest.approx(0, abs=1e-9 * (1 + max(map(abs, values))) * len(values))


@brief
@given(group=groups(least=2), discount=st.sampled_from([0.0, 0.5, 1.0]))
def test_under_step_the_main_turns_of_one_place_sum_to_zero(group, discount):
    per_turn = advantages("step", group, EstimatorOptions(discount=discount)).per_turn
    places: dict[int, list[float]] = {}
    for trajectory, values in zip(group, per_turn, strict=True):
        mains = [turn.main for turn in trajectory.turns]
        flags = mains if any(mains) else [True] * len(mains)
        for place, value in enumerate(value for value, main in zip(values, flags, strict=True) if main):
            places.setdefault(place, []).append(value)
    for values in places.values():
        if len(values) > 1:
            assert math.fsum(values) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("name", CENTRED)
@brief
@given(group=groups(least=2), constant=SIXTY_FOURTHS, ddof=st.integers(0, 1))
def test_a_constant_added_to_all_rewards_changes_nothing(name, group, constant, ddof):
    """Under `step` it is added to the verdicts, and holds undiscounted: a discount would weigh it by the turns left."""
    options = EstimatorOptions(ddof)
    found, again = advantages(name, group, options), advantages(name, shifted(group, constant), options)
    turns = [trajectory.turns for trajectory in group]
    if name != "step" or all(turns):
        assert found.values == pytest.approx(again.values, abs=1e-8)
    for one, other in zip(found.per_turn or (), again.per_turn or (), strict=True):
        assert one == pytest.approx(other, abs=1e-9)


@pytest.mark.parametrize("name", AS_IT_IS)
def test_without_a_baseline_a_constant_shows(name):
    """reinforce_pp forgets it when its batch is whitened: test_whitening.py."""
    assert advantages(name, shifted(plain(1, 2), 3)).values == (4, 5)
