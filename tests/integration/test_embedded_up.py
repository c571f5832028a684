"""A run's servers under the supervisor: up, down, up again, and nothing left behind however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from turnlog.infra import run_folder
from turnlog.infra.embedded import AlreadyUp, EmbeddedError, ModelMissing, NotReady, NotUp, PortTaken
from turnlog.infra.embedded.broker_cluster import Brokers
from turnlog.infra.embedded.ports import HOST, free_ports, listens
from turnlog.infra.embedded.process import find_marked_pids, wait_readable
from turnlog.infra.embedded.supervisor import ChildState
from turnlog.infra.embedded.up import down, status_processes, up
from turnlog.infra.kafka import KafkaLog
from turnlog.infra.kafka.security import Login
from turnlog.infra.log import Appender, LogUnreachable, Partition, TopicSpec
from turnlog.infra.registry import HttpRegistry, RegistryRefused
from turnlog.infra.run_folder import KAFKA_KEY, REGISTRY_KEY, is_live, read_state, write_settings
from turnlog.sandbox_settings import SandboxSettings
from turnlog.settings import (
    EngineSettings,
    IndexSettings,
    KafkaSettings,
    LivenessSettings,
    ModelSettings,
    RegistrySettings,
    RunSettings,
    Settings,
)
from turnlog.verbs.demo import demo
from turnlog.verbs.run_loop import configure_command
from turnlog.verbs.verb import endpoint_lines

pytestmark = pytest.mark.kafka
SCHEMA = {"type": "record", "name": "Kept", "fields": []}


def _settings(directory: Path, **changes: Any) -> Settings:
    engine = EngineSettings(urls=(f"http://{HOST}:{free_ports(1)[0]}",))
    return Settings(**{"run": RunSettings(id="r", directory=str(directory)), "engine": engine, **changes})


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[Settings]:
    made = _settings(tmp_path / "runs" / "r")
    yield made
    with contextlib.suppress(NotUp):
        down(made, say=_silent)


async def test_a_run_goes_up_and_down_and_up_again_with_what_it_held(settings: Settings) -> None:
    said: list[str] = []
    first = up(settings, (), say=said.append)
    assert any("kafka ready" in line for line in said)
    assert any(first.kafka in line for line in endpoint_lines(first))
    directory = Path(settings.run.directory)
    assert run_folder.read_endpoints(directory) == first
    states = {child["name"]: child["state"] for child in status_processes(settings)}
    assert states == {"kafka": "ready", "store": "ready", "registry": "ready", "topics": "done"}
    registry = HttpRegistry(run_folder.resolve_endpoints(settings).registry)
    schema_id = await registry.register("kept", SCHEMA)
    await registry.close()
    with pytest.raises(AlreadyUp, match="turnlog down"):
        up(settings, (), say=_silent)
    await _is_left_alone_by_a_demo(settings, first)

    down(settings, say=_silent)
    assert find_marked_pids(read_state(directory)["scope"]) == []
    assert not (directory / run_folder.FILE).exists()
    assert status_processes(settings) == []
    with pytest.raises(NotUp, match="turnlog up"):
        down(settings, say=_silent)

    up(settings, (), say=_silent)
    registry = HttpRegistry(run_folder.resolve_endpoints(settings).registry)
    assert await registry.schema(schema_id) == SCHEMA
    await registry.close()


async def test_broker_and_registry_take_nobody_who_does_not_log_in(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """Other users of the machine reach their ports, too."""
    directory, place = Path(settings.run.directory), Partition("mine", 0)
    async with _as_an_earlier_release(directory) as log:  # its run had no logins
        await log.create_topics([TopicSpec(place.topic, 1, 1, {})])
        async with log.appender() as appender:
            await _appended(appender, place.topic)
    up(settings, (), say=_silent)
    known = run_folder.resolve_endpoints(settings)
    async with opened_log(settings) as log:
        assert (await log.end_offsets([place]))[place] == 50
    assert "in the clear" not in caplog.text  # on the loopback that is no news
    for name in (KAFKA_KEY, REGISTRY_KEY, Path("kafka", "server.properties")):
        assert (directory / name).stat().st_mode & 0o777 == 0o600
    controller = (directory / "kafka" / "server.properties").read_text().partition("CONTROLLER://")[2].split("\n")[0]
    nobody = dataclasses.replace(
        known.kafka, security_protocol="PLAINTEXT", sasl_mechanism="", username="", password=""
    )
    for bootstrap in (known.kafka.bootstrap, controller):
        for stranger in (nobody, dataclasses.replace(known.kafka, password=f"{known.kafka.password}x")):
            named = dataclasses.replace(stranger, bootstrap=bootstrap)
            unwanted = KafkaLog(bootstrap, login=Login(named), answer_s=3.0)
            with pytest.raises(LogUnreachable):
                await unwanted.topics()
            await unwanted.close()
    registry = HttpRegistry(RegistrySettings(url=known.registry.url))
    with pytest.raises(RegistryRefused):
        await registry.register("kept", SCHEMA)
    await registry.close()


@contextlib.asynccontextmanager
async def _as_an_earlier_release(directory: Path) -> AsyncIterator[KafkaLog]:
    with Brokers(directory, count=1) as brokers:
        log = KafkaLog(brokers.bootstrap)
        try:
            yield log
        finally:
            await log.close()


async def _isolated(_: SandboxSettings) -> str:
    return ""


async def _is_left_alone_by_a_demo(settings: Settings, found: run_folder.Endpoints) -> None:
    with pytest.raises(AlreadyUp):
        await asyncio.to_thread(demo, settings, lambda same: same, _isolated, steps=1, engines=None)
    assert is_live(Path(settings.run.directory))
    assert {child["state"] for child in status_processes(settings)} == {"ready", "done"}
    assert run_folder.read_endpoints(Path(settings.run.directory)) == found


def test_an_attached_run_that_is_not_ready_in_time_is_stopped(settings: Settings) -> None:
    with pytest.raises(NotReady, match="everything was stopped"):
        up(settings, (), attached=True, timeout_s=0.5, say=_silent)
    assert not is_live(Path(settings.run.directory))


@pytest.mark.long  # the suite has the supervisor's rule (test_embedded_supervisor.py) and the catalogue of roles
def test_a_damaged_index_is_reported_and_tried_again_and_nothing_else_is_started_anew(settings: Settings) -> None:
    directory = Path(settings.run.directory)
    directory.mkdir(parents=True)
    (directory / "index.sqlite").write_bytes(b"no database" * 1000)
    kept = dataclasses.replace(settings, index=IndexSettings(enabled=True))
    up(kept, ("index",), say=_silent)
    configure_command(run_folder.resolve_endpoints(kept))  # until then the indexer waits, and opens no file

    def index(wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline:
            (child,) = [child for child in status_processes(kept) if child["name"] == "index-0"]
            if wanted(child):
                return child
            time.sleep(0.5)  # a state in the supervisor's file is no event
        raise AssertionError(f"index-0 is {child}")

    child = index(lambda child: child["restarts"] > 5)
    assert child["state"] in (ChildState.RESTARTING, ChildState.STARTING, ChildState.READY)
    assert "DamagedIndex" in child["error"]
    assert {one["restarts"] for one in status_processes(kept) if one["name"] != "index-0"} == {0}
    (directory / "index.sqlite").unlink()
    index(lambda child: child["state"] == ChildState.READY and (directory / "index.sqlite").exists())


@contextlib.asynccontextmanager
async def opened_log(settings: Settings) -> AsyncIterator[KafkaLog]:
    log = KafkaLog.of(run_folder.resolve_endpoints(settings).kafka)
    try:
        yield log
    finally:
        await log.close()


async def _appended(appender: Appender, topic: str) -> int:
    for number in range(50):
        await appender.append(topic, b"key", str(number).encode())
    return 50


@contextlib.contextmanager
def _foreground(directory: Path, **changes: Any) -> Iterator[tuple[subprocess.Popen[bytes], Iterator[dict[str, Any]]]]:
    """`turnlog supervise` without roles, and what it tells."""
    directory.mkdir(parents=True)
    path = write_settings(directory, _settings(directory, **changes))
    reading, writing = os.pipe()
    argv = [sys.executable, "-m", "turnlog.cli", "--settings", str(path), "supervise"]
    env = {**os.environ, "TURNLOG_NOTIFY_FD": str(writing), "TURNLOG_SUPERVISED_ROLES": ""}
    with subprocess.Popen(argv, env=env, pass_fds=[writing], stderr=subprocess.DEVNULL) as supervisor:
        os.close(writing)
        with open(reading, "rb") as pipe:
            yield supervisor, map(json.loads, pipe)


def test_ctrl_c_in_the_foreground_leaves_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "r"
    with _foreground(directory) as (supervisor, told):
        assert any("ready" in line for line in told)
        assert len(find_marked_pids(read_state(directory)["scope"])) == 3
        supervisor.send_signal(signal.SIGINT)
        stopped = [line["child"]["name"] for line in told if line["child"]["state"] == "stopped"]
        assert supervisor.wait(60) == 0
    assert stopped[0] == "registry"
    assert set(stopped[1:]) == {"kafka", "store"}
    assert find_marked_pids(read_state(directory)["scope"]) == []


@pytest.mark.long  # the suite stops a child of its own under the same supervisor (test_embedded_supervisor.py)
def test_each_server_that_is_stopped_is_killed_and_comes_back(tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "r"
    bounds = LivenessSettings(servers_s=4.0)
    with _foreground(directory, liveness=bounds) as (supervisor, told):
        assert any("ready" in line for line in told)
        for name in ("registry", "store", "kafka"):
            stopped = next(child["pid"] for child in read_state(directory)["children"] if child["name"] == name)
            os.kill(stopped, signal.SIGSTOP)
            changes = (line["child"] for line in told if "child" in line and line["child"]["name"] == name)
            again = next(child for child in changes if child["state"] == "ready")
            assert again["restarts"] == 1
            assert again["error_type"] == "Hung"
            assert f"{name} gave no answer for" in again["error"]
        supervisor.send_signal(signal.SIGINT)
        assert supervisor.wait(60) == 0


def test_a_killed_broker_comes_back_on_its_port_and_a_killed_supervisor_leaves_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "r"
    with _foreground(directory) as (supervisor, told):
        assert any("ready" in line for line in told)
        port = int(run_folder.read_endpoints(directory).kafka.rpartition(":")[2])
        state = read_state(directory)
        os.kill(next(child["pid"] for child in state["children"] if child["name"] == "kafka"), signal.SIGKILL)
        changes = (line["child"] for line in told if "child" in line)
        again = next(child for child in changes if child["name"] == "kafka" and child["state"] == "ready")
        assert again["restarts"] == 1
        assert listens(port)

        family = [os.pidfd_open(pid) for pid in find_marked_pids(state["scope"])]
        assert len(family) >= 3
        supervisor.kill()
    for pidfd in family:
        assert wait_readable(pidfd, 30)
        os.close(pidfd)
    assert find_marked_pids(state["scope"]) == []


def test_an_attached_run_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "r"
    directory.mkdir(parents=True)
    path = write_settings(directory, _settings(directory))
    code = (
        "import os, signal, sys, pathlib\n"
        "from turnlog.settings import load\n"
        "from turnlog.infra.embedded.up import up\n"
        "found = up(load(pathlib.Path(sys.argv[1]), {}), (), attached=True, say=lambda _: None)\n"
        "print(found.supervisor_pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    argv = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pidfd = os.pidfd_open(int(owner.stdout.readline()))
        owner.kill()
    assert wait_readable(pidfd, 60)
    os.close(pidfd)
    assert find_marked_pids(read_state(directory)["scope"]) == []


@pytest.mark.parametrize(
    ("changes", "error", "why"),
    [
        ({"kafka": "taken"}, PortTaken, r"\[kafka\] port"),
        ({"engine": EngineSettings(), "model": ModelSettings(path="/nowhere")}, ModelMissing, r"\[model\] path"),
    ],
)
def test_what_keeps_a_run_from_starting_is_told_to_who_asked(
    tmp_path: Path, changes: dict[str, Any], error: type[EmbeddedError], why: str
) -> None:
    directory = tmp_path / "runs" / "r"
    with socket.create_server((HOST, 0)) as other:
        if changes.get("kafka") == "taken":
            changes = {"kafka": KafkaSettings(port=other.getsockname()[1])}
        with pytest.raises(error, match=why):
            up(_settings(directory, **changes), (), say=_silent)
    assert status_processes(_settings(directory)) == []


def _silent(_: str) -> None:
    """Progress that nobody reads."""
