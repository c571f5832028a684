"""Roles as processes on a real Apache Kafka: killed while sessions are answered, batches trained, weights loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.environments.openenv_servers import upstream_python
from turnlog.settings import Settings

CHAOS = Path(__file__).resolve().parents[2] / "benchmarks" / "chaos"


pytestmark = [pytest.mark.kafka, pytest.mark.chaos]


def told(settings: Settings, script: str, *arguments: str, timeout_s: float = 250.0) -> dict[str, Any]:
    """The line of a chaos run on these servers."""
    addresses = {
        "TURNLOG_KAFKA_BOOTSTRAP": settings.kafka.bootstrap,
        "TURNLOG_KAFKA_PREFIX": settings.kafka.prefix,
        "TURNLOG_REGISTRY_URL": settings.registry.url,
        "TURNLOG_STORE_ENDPOINT": settings.store.endpoint,
        "TURNLOG_STORE_SECRET_KEY": settings.store.secret_key,
    }
    command = [sys.executable, str(CHAOS / script), *arguments]
    ran = subprocess.run(
        command, env={**os.environ, **addresses}, stdout=subprocess.PIPE, check=False, timeout=timeout_s
    )
    line: dict[str, Any] = json.loads(ran.stdout)
    return line


@pytest.mark.long
def test_what_was_judged_trains_whoever_was_killed_meanwhile(live_settings: Settings) -> None:
    """The suite kills runners in memory (test_runner_sessions.py), and names the turn that was judged over a gateway's
    death (test_gateway_retries.py)."""
    line = told(live_settings, "answers.py", "--kills", "3")
    assert line["kills"] == 3
    assert (line["lost"], line["twice"], line["skipped"], line["identical"]) == (0, 0, 0, True)
    assert line["detail"]["sessions"]
    assert line["ok"], line


@pytest.mark.long
def test_an_engine_that_is_away_for_longer_than_a_deadline_costs_no_session_anything(live_settings: Settings) -> None:
    """The suite has every part away for any time, in virtual time (test_outages.py)."""
    line = told(live_settings, "outage.py", "--kills", "2")
    assert (line["kills"], line["lost"], line["twice"], line["skipped"], line["identical"]) == (2, 0, 0, 0, True)
    assert line["detail"]["waited_longer_than_their_deadline"], "sessions were open meanwhile"
    assert line["detail"]["too_slow_themselves"] == ["truncated"], "a deadline holds for what a session spends itself"
    assert line["ok"], line


@pytest.mark.long
def test_sessions_go_on_where_a_killed_runner_left_them_and_no_call_takes_effect_twice(live_settings: Settings) -> None:
    """The suite kills a runner at each of its points in memory (test_runner_sessions.py)."""
    line = told(live_settings, "runner.py", "--kills", "2")
    assert line["kills"] == 2
    assert (line["lost"], line["twice"], line["skipped"], line["identical"]) == (0, 0, 0, True)
    assert line["detail"]["effects"] == line["detail"]["calls"] > 0
    assert line["detail"]["struck_while"], "somebody was in the middle of something"
    assert line["ok"], line


@pytest.mark.long
@pytest.mark.parametrize(
    ("checkpoints", "places"),
    [("folder", ("step", "export", "upload", "save", "commit")), ("s3", ("put", "step", "manifest", "fetch"))],
)
def test_a_trainer_killed_in_each_thing_that_it_does_trains_the_same(
    live_settings: Settings, checkpoints: str, places: tuple[str, ...]
) -> None:
    """The suite kills a trainer between two updates in memory (test_draws.py), and stops one on a real log
    (test_trainer_loop.py)."""
    line = told(live_settings, "trainer.py", "--kills", str(len(places)), "--checkpoints", checkpoints)
    assert line["detail"]["struck"] == dict.fromkeys(places, 1)
    assert (line["lost"], line["twice"], line["skipped"], line["identical"]) == (0, 0, 0, True)
    assert line["ok"], line


@pytest.mark.long
def test_a_trainer_of_trl_killed_in_each_thing_that_it_does_trains_the_same(live_settings: Settings) -> None:
    """The suite kills one after a step (test_trl_trainer.py)."""
    places = ("step", "publish", "commit", "save", "start")
    line = told(live_settings, "trainer_trl.py", "--kills", str(len(places)))
    assert line["detail"]["struck"] == dict.fromkeys(places, 1)
    assert (line["lost"], line["twice"], line["skipped"], line["identical"]) == (0, 0, 0, True)
    assert line["ok"], line


def test_a_gateway_killed_under_a_hundred_streams_loses_none_and_leaves_nothing_running(
    live_settings: Settings,
) -> None:
    line = told(live_settings, "takeover.py", "--kills", "1")
    assert (line["lost"], line["twice"], line["skipped"], line["identical"]) == (0, 0, 0, True)
    assert line["detail"]["adoptions"] == line["detail"]["of_the_victims"] > 0
    assert line["detail"]["slowest_end_s"] < 5
    assert line["ok"], line


@pytest.mark.parametrize(("drained", "streams"), [(1, 10), pytest.param(5, 100, marks=pytest.mark.long)])
def test_engines_that_join_and_leave_under_streams_lose_no_turn(
    live_settings: Settings, drained: int, streams: int
) -> None:
    line = told(live_settings, "elastic.py", "--kills", str(drained), "--streams", str(streams))
    assert (line["lost"], line["twice"], line["skipped"], line["identical"]) == (0, 0, 0, True)
    assert line["detail"]["sessions"] == drained * streams
    assert len(line["detail"]["drains_s"]) == drained
    assert line["ok"], line


@pytest.mark.long
@pytest.mark.parametrize(("engine", "kills"), [("scripted", 4), pytest.param("real", 4, marks=pytest.mark.engine)])
def test_whatever_kills_loaders_an_engine_answers_by_weights_that_an_event_names(
    live_settings: Settings, engine: str, kills: int
) -> None:
    """The suite kills a loader in memory (test_loader.py), and has its contract with engines
    (test_loader_contract.py)."""
    line = told(live_settings, "loader.py", "--kills", str(kills), "--engine", engine)
    fetches, swaps = ("rebuild", "download", "hash", "seal"), ("load", "acknowledge", "continue", "pause")
    assert line["detail"]["struck"] == dict.fromkeys((*fetches[:kills], *swaps[:kills]), 1)
    assert (line["lost"], line["twice"], line["skipped"], line["identical"]) == (0, 0, 0, True)
    assert line["detail"]["answers"] > 0
    assert line["ok"], line


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("engine", ["scripted", pytest.param("real", marks=pytest.mark.engine)])
def test_whoever_is_struck_while_ranks_send_weights_each_version_is_named_once(
    live_settings: Settings, engine: str
) -> None:
    """The suite ends transfers early in memory (test_transfers.py, test_direct_weights.py)."""
    line = told(live_settings, "loader_direct.py", "--kills", "1", "--engine", engine, timeout_s=1700.0)
    assert line["kills"] == 8
    assert (line["lost"], line["twice"], line["skipped"], line["identical"]) == (0, 0, 0, True)
    assert line["detail"]["direct_loads"] > 0
    assert line["detail"]["answers"] > 0
    assert line["ok"], line


@pytest.mark.long
def test_no_step_of_an_environment_is_lost_or_taken_twice_whoever_is_killed(live_settings: Settings) -> None:
    """The suite kills runners between steps in memory (test_runner_environments.py), and workers and servers of OpenEnv
    in test_openenv.py."""
    upstream_python()  # made before the time runs
    line = told(live_settings, "environments.py", "--kills", "1")
    assert line["kills"] == 4
    assert (line["lost"], line["twice"], line["skipped"], line["identical"]) == (0, 0, 0, True)
    assert line["detail"]["steps"]
    assert line["ok"], line
