"""A run is listed, paused, resumed and closed by facts on its log; feeder and runner as processes on real servers."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tests.addresses import variables
from tests.integration.test_run_configure import serve_weights
from tests.integration.test_status_elsewhere import step
from turnlog.infra.embedded.ports import HOST, free_ports
from turnlog.infra.log import Partition
from turnlog.infra.roles.role import Role, RunPhase, open_role
from turnlog.infra.roles.runs import configure, set_phase
from turnlog.infra.run_folder import write_settings
from turnlog.schemas.events import RolloutRequested
from turnlog.schemas.topics import TASKS
from turnlog.settings import KafkaSettings, RegistrySettings, RunSettings, Settings
from turnlog.verbs.run_list import RunSummary, list_command, runs_of

pytestmark = pytest.mark.kafka
PATIENCE_S = 60.0


async def turnlog(settings: Settings, *verb: str) -> tuple[int | None, str, str]:
    """Exit status, what it said, and the last line of what it said aside."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "turnlog.cli", *verb, env={**os.environ, **variables(settings)},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    return process.returncode, out.decode(), err.decode().strip().rpartition("\n")[2]


@asynccontextmanager
async def live(settings: Settings, verb: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A role as a process, and its health address."""
    port = free_ports(1)[0]
    env = {**os.environ, **variables(settings), "TURNLOG_HEALTH_PORT": str(port)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "turnlog.cli", "role", verb, env=env, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        yield process, f"http://{HOST}:{port}"
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def waits_for(address: str, what: str) -> None:
    """Until /readyz says so (it is asked: nothing tells of its changes)."""
    async with asyncio.timeout(PATIENCE_S), httpx.AsyncClient() as client:
        while True:
            try:
                said = (await client.get(f"{address}/readyz")).json()["waiting"]
            except httpx.TransportError:
                said = {"start": "does not listen yet"}
            if what in str(said):
                return
            await asyncio.sleep(0.1)


async def requested(role: Role) -> list[RolloutRequested]:
    """What the feeder asked for, as soon as it asked for anything."""
    async with asyncio.timeout(PATIENCE_S), role.log.reader() as reader:
        reader.assign({Partition(TASKS.name, number): 0 for number in range(role.settings.kafka.rollouts)})
        found: list[RolloutRequested] = []
        while not found:
            found += [await role.events.decode(record) for record in await reader.poll()]
        return found


async def listed(settings: Settings) -> RunSummary:
    """The run among all of the cluster."""
    (found,) = [run for run in await runs_of(settings) if run.run == settings.run.id]
    return found


async def test_feeder_and_runner_obey_a_pause_a_resume_and_a_close(live_settings: Settings) -> None:
    run = live_settings.run.id
    async with (
        open_role("test", live_settings) as role,
        live(live_settings, "feeder") as (feeder, health),
        live(live_settings, "runner") as (runner, runner_health),
    ):
        await configure(role)
        assert (await listed(live_settings)).state == "configured"
        await set_phase(role, RunPhase.PAUSED)
        await waits_for(health, "the run is paused: continue it with `turnlog run resume`")
        await serve_weights(role.events.append, live_settings)  # a feeder that has not read the pause yet would request
        await waits_for(runner_health, "gateway")
        ends = await role.log.end_offsets([Partition(TASKS.name, number) for number in range(4)])
        assert set(ends.values()) == {0}, "nothing was asked for while the run was paused"
        await set_phase(role, RunPhase.RUNNING)
        assert {request.run_id for request in await requested(role)} == {run}
        assert (await listed(live_settings)).state == "running"
        await set_phase(role, RunPhase.PAUSED)
        await waits_for(health, "the run is paused")
        assert (feeder.returncode, runner.returncode) == (None, None)
        await set_phase(role, RunPhase.CLOSED)
        async with asyncio.timeout(PATIENCE_S):
            assert [await feeder.wait(), await runner.wait()] == [0, 0], "both end as one that was asked to stop"
    refused = await asyncio.gather(*(turnlog(live_settings, *verb) for verb in (["role", "runner"], ["run", "resume"])))
    for status, _, why in refused:
        assert status == 2
        assert f"RunClosed: run {run!r} is closed: no role starts for it any more" in why


async def test_the_verbs_say_what_they_did_and_the_list_names_the_run(live_settings: Settings) -> None:
    run = live_settings.run.id
    status, _, why = await turnlog(live_settings, "run", "pause")
    assert status == 2
    assert f"NotConfigured: run {run!r} is not configured" in why
    async with open_role("test", live_settings) as role:
        await configure(role)
        await role.events.append(step(run, 0))
        assert await turnlog(live_settings, "run", "pause") == (
            0, f"run {run!r} is paused: no more groups are requested, and work in progress finishes\n", "",
        )  # fmt: skip
        await set_phase(role, RunPhase.PAUSED)
    status, said, why = await turnlog(live_settings, "run", "list", "--json")
    assert status == 0, why
    (found,) = [one for one in json.loads(said) if one["run"] == run]
    assert (found["state"], found["last_step"], found["draws_trained"], found["draws_planned"]) == ("paused", 1, 1, 30)
    assert (found["prefix"], found["kafka"]) == (live_settings.kafka.prefix, live_settings.kafka.bootstrap)
    _, said, _ = await turnlog(live_settings, "status")
    assert "the run is paused\n" in said


async def test_the_list_knows_directories_whose_servers_do_not_run(
    live_settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = dataclasses.replace(live_settings, run=RunSettings(id="here", directory=str(tmp_path / "here")))
    off = RunSettings(id="off", directory=str(tmp_path / "off"))
    embedded = dataclasses.replace(there, kafka=KafkaSettings(), run=off)
    lost = dataclasses.replace(
        there,
        registry=RegistrySettings(url=f"http://{HOST}:{free_ports(1)[0]}"),
        run=RunSettings(id="lost", directory=str(tmp_path / "lost")),
        kafka=KafkaSettings(bootstrap="nowhere.invalid:9092"),
    )
    for name, settings in (("here", there), ("off", embedded), ("lost", lost)):
        (tmp_path / name).mkdir()
        write_settings(tmp_path / name, settings)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "settings.toml").write_text("[run")
    async with open_role("test", live_settings) as role:
        await configure(role)
    await asyncio.to_thread(list_command, there, as_json=True)
    found = {one["run"]: one for one in json.loads(capsys.readouterr().out)}
    assert (found["off"]["state"], found["off"]["directory"]) == ("down", str(tmp_path / "off"))
    assert (found["lost"]["state"], found["broken"]["state"]) == ("down", "unreadable")
    assert "check [registry] url" in found["lost"]["why"]
    assert str(tmp_path / "broken" / "settings.toml") in found["broken"]["why"]
    assert found[live_settings.run.id]["state"] == "configured"
