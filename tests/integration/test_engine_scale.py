"""`turnlog engines scale` on a run that is up: real engines with their loaders come, and leave under requests."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.weights import version
from turnlog.cli import main
from turnlog.infra.embedded.up import down, status_processes, up
from turnlog.infra.history import events
from turnlog.infra.roles import fleet
from turnlog.infra.roles.role import Role, open_role
from turnlog.infra.roles.runs import configure
from turnlog.infra.run_folder import SETTINGS, read_endpoints
from turnlog.processors.core.views.fleet import SERVING
from turnlog.schemas.events import EngineRequested, TurnCompleted
from turnlog.schemas.topics import ENGINE_REQUESTS, TURNS
from turnlog.settings import EngineSettings, GatewaySettings, ModelSettings, Settings
from turnlog.trainer.weights import read_weights

pytestmark = [pytest.mark.kafka, pytest.mark.engine, pytest.mark.long]  # chaos/elastic.py stands in the suite
QUESTION = "3 + 5 = ?"
KEY = {"authorization": "Bearer key-of-these-tests"}


@pytest.fixture
async def role(live_settings: Settings, tiny_model: Path) -> AsyncIterator[Role]:
    """Of a run that is up with one hosted engine, which serves version 0."""
    engine = EngineSettings(start_timeout_s=600.0, drain_s=2.0)
    async with hosted(dataclasses.replace(live_settings, engine=engine), tiny_model) as role:
        await serving(role, "engine-0")
        yield role


@asynccontextmanager
async def hosted(settings: Settings, model: Path) -> AsyncIterator[Role]:
    """While the block runs, a gateway and the settings' engines are up, and version 0 is published."""
    settings = dataclasses.replace(
        settings, model=ModelSettings(path=str(model)), gateway=GatewaySettings(signing_key="key-of-these-tests")
    )
    await asyncio.to_thread(up, settings, ("gateway", "loader"), wait=False, say=lambda _: None)
    try:
        async with open_role("test", settings) as role:
            await configure(role)
            weights = {name: tensor.float() for name, tensor in read_weights(model).items()}
            await role.events.append(await version(weights, 0, role.blobs, model, run_id=settings.run.id))
            yield role
    finally:
        await asyncio.to_thread(down, settings, say=lambda _: None)


async def serving(role: Role, *names: str) -> None:
    """Wait until exactly these serve, which other processes say."""
    now: set[str] = set()
    while now != set(names):
        now = {one.id for one in (await fleet.read(role)).engines.values() if one.state == SERVING}
        await asyncio.sleep(0.2)


async def turn(http: httpx.AsyncClient, name: str, tokens: int) -> dict[str, Any]:
    """One answered turn of a session of its own."""
    body = {"rollout_id": name, "group_id": name, "purpose": "other", "sampling": {"max_new_tokens": tokens}}
    session = (await http.post("/sessions", json=body, headers=KEY)).raise_for_status().json()
    token = {"authorization": f"Bearer {session['token']}"}
    answer = await http.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": QUESTION}]}, headers=token
    )
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


@asynccontextmanager
async def asked_on_and_on(http: httpx.AsyncClient, at_once: int) -> AsyncIterator[list[dict[str, Any]]]:
    """While the block runs so many sessions are under way; those that ended. Raises what one of them met."""
    ended: list[dict[str, Any]] = []
    numbers, stop = itertools.count(), asyncio.Event()

    async def client() -> None:
        while not stop.is_set():
            ended.append(await turn(http, f"load-{next(numbers)}", 200))

    async with asyncio.TaskGroup() as clients:
        for _ in range(at_once):
            clients.create_task(client())
        yield ended
        stop.set()


def directory_of(role: Role) -> Path:
    return Path(role.settings.run.directory)


async def scale(role: Role, count: int) -> None:
    """As an operator does."""
    asked = ["--settings", str(directory_of(role) / SETTINGS), "engines", "scale", str(count)]
    assert await asyncio.to_thread(main, asked) == 0


async def served(role: Role, name: str) -> None:
    """Wait for one more turn of that engine."""
    before = now = await turns_of(role, name)
    while now == before:
        await asyncio.sleep(0.2)
        now = await turns_of(role, name)


async def turns_of(role: Role, name: str) -> int:
    turns = [one async for _, one in events(role, TURNS) if isinstance(one, TurnCompleted)]
    return sum(one.engine_id == name for one in turns)


async def test_engines_that_scale_asks_for_come_and_leave_and_no_request_is_lost(role: Role) -> None:
    async with httpx.AsyncClient(base_url=read_endpoints(directory_of(role)).gateway, timeout=300) as http:
        async with asked_on_and_on(http, 4) as ended:
            await scale(role, 2)
            await served(role, "engine-1")
            await scale(role, 1)
        assert ended
        assert all(one["choices"][0]["finish_reason"] in ("stop", "length") for one in ended)
    await serving(role, "engine-0")
    names = {process["name"] for process in status_processes(role.settings)}
    while names & {"engine-1", "loader-1"}:
        await asyncio.sleep(0.2)
        names = {process["name"] for process in status_processes(role.settings)}
    assert {"engine-0", "loader-0"} <= names
    asked = [one async for _, one in events(role, ENGINE_REQUESTS) if isinstance(one, EngineRequested)]
    assert [(one.engine_id, one.wanted, one.by) for one in asked] == [
        ("engine-0", "serving", "settings"), ("engine-1", "serving", "operator"), ("engine-1", "gone", "operator")
    ]  # fmt: skip


async def test_what_a_newcomer_costs_beyond_its_own_start_is_measured_stage_by_stage(role: Role) -> None:
    script = Path(__file__).parents[2] / "benchmarks/e1_scale.py"
    kept = directory_of(role) / SETTINGS
    done = await asyncio.create_subprocess_exec(
        sys.executable, str(script), str(kept), env=os.environ | {"BENCH_SIZE": "smallest"}, stdout=PIPE
    )
    said, _ = await done.communicate()
    line = json.loads(said.splitlines()[-1])
    (stages,) = line["detail"]["rounds"]
    beyond = stages["obeyed"] + stages["registered"] + stages["loaded"] + stages["turn"]
    assert beyond == pytest.approx(stages["beyond"], abs=0.05)
    assert stages["loader"] < stages["own_start"], "it starts beside its engine, not after it"
    assert line["value"] == stages["beyond"]
