"""`turnlog status` of roles that no supervisor of ours runs: from the log and their health addresses."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.addresses import variables
from turnlog.infra.embedded.ports import HOST, free_ports
from turnlog.infra.roles.health import Health, serve_health
from turnlog.infra.roles.role import open_role
from turnlog.infra.roles.runs import configure
from turnlog.infra.run_folder import Endpoints, write_endpoints
from turnlog.schemas.events import EngineWeightsLoaded, StepCompleted, WeightVersionPublished
from turnlog.settings import Settings

pytestmark = pytest.mark.kafka


async def status(settings: Settings, *arguments: str) -> tuple[int | None, str]:
    env = {
        **os.environ,
        **variables(settings),
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "turnlog.cli", "status", *arguments, env=env, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, out.decode()


async def test_the_log_and_health_addresses_tell_what_no_supervisor_knows(live_settings: Settings) -> None:
    run = live_settings.run.id
    async with open_role("test", live_settings) as role:
        await configure(role)
        for event in (weights(run), engine(run), step(run, 0), step(run, 1)):
            await role.events.append(event)
    ready, waits, nobody = Health("runner"), Health("assembler"), f"http://{HOST}:{free_ports(1)[0]}"
    ready.mark_started()
    ready.warn("hands", ["it has no hands"])
    waits.mark_started()
    waits.unmet("unit 2", "stopped at agent.turns[2]@7")
    ports = free_ports(2)
    async with serve_health(ready, (HOST, ports[0])), serve_health(waits, (HOST, ports[1])):
        one, other = (f"http://{HOST}:{port}" for port in ports)
        code, said = await status(live_settings, "--json", "--health", f"{one},{other},{nobody}")
        found: dict[str, Any] = json.loads(said)
        assert code == 1
        assert found["processes"] == []
        assert found["health"][one] == {
            "role": "runner", "alive": True, "ready": True, "why": "", "warnings": ["it has no hands"],
        }  # fmt: skip
        assert found["warnings"] == {one: ["it has no hands"]}
        assert found["health"][other]["why"] == "stopped at agent.turns[2]@7"
        assert not found["health"][nobody]["alive"]
        assert found["lag"]["runner"] == {"tasks": 0, "agent.tool-results": 0}
        assert found["lag"]["trainer"] == {"sample-batches": 0}
        assert found["engines"] == {"sglang-0": {"state": "serving", "version": 0, "url": "http://engine"}}
        progress = found["progress"]
        assert (progress["draws_trained"], progress["draws_planned"], progress["newest_version"]) == (2, 30, 0)
        assert progress["last_step"]["batch"] == 1
        code, said = await status(live_settings, "--health", one)
        assert code == 0
        for line in (
            "draws trained: 2 of 30",
            "sglang-0: serving, weight version 0",
            f"warning from {one}: it has no hands",
        ):
            assert line in said


async def test_a_run_that_was_up_here_and_is_not_any_more_is_not_up(live_settings: Settings) -> None:
    write_endpoints(Path(live_settings.run.directory), Endpoints(kafka="", registry="", store=""))
    code, said = await status(live_settings)
    assert code == 3
    assert "is not up" in said


def weights(run: str) -> WeightVersionPublished:
    return WeightVersionPublished(
        event_id="w0", run_id=run, version=0, step=0, batch_index=-1, incarnation=0, kind="full", base_version=None,
        files=(), dtype="float32", checksums={}, checkpoint=None,
    )  # fmt: skip


def engine(run: str) -> EngineWeightsLoaded:
    return EngineWeightsLoaded(
        event_id="e0", run_id=run, engine_id="sglang-0", url="http://engine", state="serving", version=0,
        superseded=(), seconds={},
    )  # fmt: skip


def step(run: str, batch: int) -> StepCompleted:
    return StepCompleted(
        event_id=f"s{batch}", run_id=run, batch_index=batch, draw_index=batch, incarnation=0, step=batch + 1, loss=0.5,
        grad_norm=0.0, learning_rate=0.0, lag_max=0, tokens=0, trained_tokens=0, masked={}, skipped=False,
        reward_mean=0.25, logprob_gap_max=0.0, logprob_gap_mean=0.0, entropy=None, clip_fraction=0.0, seconds={},
        world_size=1,
    )  # fmt: skip
