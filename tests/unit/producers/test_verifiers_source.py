"""The source `verifiers` without verifiers: options, and what an episode's answer becomes."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest

from tests.each import each
from turnlog.environments import BadSource, TaskSource, TruncatedRun, Verdict, task_source
from turnlog.plugins.verifiers_env.guest.verifiers_guest.relay import PATH_HEADER
from turnlog.plugins.verifiers_env.process import EnvironmentOptions
from turnlog.plugins.verifiers_env.profile import PATH_HEADER as READ_HEADER
from turnlog.plugins.verifiers_env.profile import verifiers
from turnlog.plugins.verifiers_env.source import NO_REWARD, EpisodeUnscored, result_of


def trace(**fields: Any) -> dict[str, Any]:
    default = {
        "role": "agent",
        "trained": True,
        "rewards": {"right": [1.0, 2.0]},
        "metrics": {},
        "entries": 1,
        "ok": True,
    }
    return {**default, "stop": "agent_completed", "limit": False, "turns": 1, "errors": [], **fields}


def answer(*traces: dict[str, Any], **fields: Any) -> dict[str, Any]:
    default = {"role": "agent", "refused": "", "unreachable": "", "ok": True, "errors": [], "traces": list(traces)}
    return {**default, **fields}


ERROR = {"type": "TaskError", "message": "a bug", "traceback": "File x, line 1"}


def test_weighted_rewards_are_summed_and_metrics_stand_beside_them() -> None:
    rewards = {"right": [1.0, 2.0], "short": [0.5, -1.0]}
    found = result_of(answer(trace(rewards=rewards, metrics={"calls": 3, "odd": math.nan, "none": None})))
    assert isinstance(found, Verdict)
    assert found.value == 1.5
    assert found.components == {"right": 2.0, "short": -0.5, "metric/calls": 3.0}


def test_several_traces_of_the_trained_role_give_their_mean_and_other_roles_give_nothing() -> None:
    other = trace(role="user", trained=False, rewards={"right": [9.0, 9.0]})
    found = result_of(answer(trace(), other, trace(rewards={"right": [0.0, 2.0]})))
    assert isinstance(found, Verdict)
    assert (found.value, found.components) == (1.0, {"right": 1.0})


@each("rewards", [{}, {"right": None}, {"right": [math.nan, 1.0]}, {"right": [1.0, 1.0], "other": None}])
def test_a_reward_that_is_missing_makes_no_number(rewards: dict[str, Any]) -> None:
    found = result_of(answer(trace(rewards=rewards)))
    assert isinstance(found, Verdict)
    assert math.isnan(found.value)
    assert math.isnan(found.components[next(reversed(rewards), NO_REWARD)])


def test_a_limit_truncates_and_keeps_the_reward() -> None:
    found = result_of(answer(trace(stop="max_turns", limit=True)))
    assert isinstance(found, TruncatedRun)
    assert found.verdict is not None
    assert (found.reason, found.verdict.value) == ("max_turns", 2.0)
    refused = result_of(answer(trace(), refused="context_length_exceeded"))
    assert isinstance(refused, TruncatedRun)
    assert refused.reason == "context"


@each("fields, said", [
    ({"ok": False, "traces": [trace(ok=False, errors=[ERROR])]}, "TaskError: a bug\nFile x, line 1"),
    ({"ok": False, "errors": [ERROR], "traces": []}, "TaskError: a bug"),
    ({"traces": [trace(trained=False)]}, "role agent did not act"),
    ({"traces": [trace()], "unreachable": "ClientConnectorError"}, "the gateway gave no answer: ClientConnectorError"),
])  # fmt: skip
def test_an_episode_that_failed_has_no_reward_and_says_why(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(EpisodeUnscored) as failed:
        result_of(answer(**fields))
    assert said in str(failed.value)


@each("text, said", [
    ("verifiers", "missing a required argument: 'env'"),
    ("verifiers env=x", "missing a required argument: 'python'"),
    ("verifiers env=x python=/p speed=9", "the options of verifiers are env, python, args"),
    ("verifiers env= python=/p", "must not be empty"),
    ("verifiers env=x python=/p args={", "no JSON"),
    ("verifiers env=x python=/p args=[]", "a JSON list, not an object"),
])  # fmt: skip
def test_an_option_that_cannot_be_used_is_named(text: str, said: str) -> None:
    with pytest.raises(BadSource, match=said):
        task_source(text)


def test_a_source_starts_nothing_before_it_is_used_and_makes_tasks_of_rows() -> None:
    source = task_source("verifiers env=owner/game@0.1 python=/no/such/python")
    assert isinstance(source, TaskSource)
    assert source.name == "verifiers-game"
    task = source.task({"id": "a", "prompt": "Play.", "data": {}, "version": "game==0.1 verifiers==0.4.0"})
    assert (task.id, task.environment.name, task.environment.version) == (
        "a", "verifiers:owner/game@0.1", "game==0.1 verifiers==0.4.0",
    )  # fmt: skip
    assert task.agent is not None
    assert task.agent.name == "verifiers"


def test_the_environment_sees_no_variable_that_nobody_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TURNLOG_KAFKA_PASSWORD", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "UV_CACHE_DIR"):
        monkeypatch.setenv(name, "x")
    options = EnvironmentOptions(env="x", python=sys.executable, variables=("OPENAI_API_KEY",))
    found = options.environ().keys()
    assert {"PATH", "OPENAI_API_KEY", "UV_CACHE_DIR"} <= found
    assert not {"TURNLOG_KAFKA_PASSWORD", "AWS_SECRET_ACCESS_KEY"} & found


def test_the_profile_reads_the_header_of_the_relay() -> None:
    assert PATH_HEADER == READ_HEADER
    assert verifiers({PATH_HEADER: "side/user"}, "", None, ()) == "side/user"
    assert verifiers({}, "", None, ()) is None
