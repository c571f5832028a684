"""Rewards that tests write: what counts, what is no reward, and those of several steps."""

from __future__ import annotations

from typing import Any

import pytest

from tests.each import each
from turnlog.plugins.harbor.rewards import NoReward, combine_steps, main_reward, passes_gate, read_rewards
from turnlog.plugins.harbor.tables import StepTable


@each(
    ("said", "rewards"),
    [
        ({"txt": "1\n"}, {"reward": 1.0}),
        ({"txt": " -0.5e-1 ", "json": None}, {"reward": -0.05}),
        ({"txt": "0", "json": '{"reward": true, "other": 2}'}, {"reward": 1.0, "other": 2.0}),
        ({"json": '{"score": 0.25}'}, {"score": 0.25}),
    ],
)
def test_what_tests_write_is_a_reward(said: dict[str, Any], rewards: dict[str, float]) -> None:
    assert read_rewards(said) == rewards
    assert main_reward(rewards) == next(iter(rewards.values()))


@each(
    ("said", "why"),
    [
        ({}, "wrote neither"),
        ({"txt": " \n"}, "reward.txt is empty"),
        ({"txt": "passed"}, "no number"),
        ({"txt": "nan"}, "not finite"),
        ({"txt": "1e999"}, "not finite"),
        ({"txt": "1", "json": ""}, "reward.json is empty"),
        ({"json": "{"}, "no JSON"),
        ({"json": "[1]"}, "not an object"),
        ({"json": "1.0"}, "not an object"),
        ({"json": "{}"}, "not an object"),
        ({"json": '{"reward": "1"}'}, "'1', which is no number"),
        ({"json": '{"reward": null}'}, "no number"),
        ({"json": '{"reward": NaN}'}, "not finite"),
        ({"json": '{"reward": 1' + "0" * 400 + "}"}, "not finite"),
        ({"json": "[" * 100_000}, "no JSON"),
    ],
)
def test_anything_else_is_no_reward_and_never_zero(said: dict[str, Any], why: str) -> None:
    with pytest.raises(NoReward, match=why):
        read_rewards(said)


def test_one_of_several_rewards_must_be_chosen() -> None:
    with pytest.raises(NoReward, match="choose one by reward=NAME"):
        main_reward({"a": 1.0, "b": 2.0})
    assert main_reward({"a": 1.0, "b": 2.0}, "b") == 2.0


def test_steps_combine_by_the_tasks_strategy_and_stop_at_a_gate() -> None:
    first, second = {"reward": 1.0, "style": 4.0}, {"reward": 0.5}
    mean = combine_steps(None, [first, second])
    assert (mean.value, mean.components) == (0.75, {"style": 2.0})
    assert combine_steps("final", [first, second]).value == 0.5
    assert combine_steps("mean", [first, {}]).value == 0.5
    assert passes_gate(StepTable(name="a", min_reward=1.0), first)
    assert not passes_gate(StepTable(name="a", min_reward=1.0), second)
    assert not passes_gate(StepTable(name="a", min_reward={"reward": 0.5, "style": 1.0}), second)
    assert passes_gate(StepTable(name="a"), {})
