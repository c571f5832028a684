"""The server is killed between and within requests: losses are the same bit for bit, and nothing has two results."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.unit.tinker.conftest import ApiClient, TinkerWorld
from turnlog.infra.event_log import EventLog
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.role import Role
from turnlog.plugins.tinker import ServerEnds, StateDiverged
from turnlog.plugins.tinker.results import ServerLog
from turnlog.schemas.events import TenantCommandCompleted, TenantCommandReceived, TenantStateSaved
from turnlog.schemas.topics import TENANT_COMMANDS, TENANT_RESULTS
from turnlog.settings import Settings

Told = list[tuple[str, Any]]


async def story(api: ApiClient, told: Told) -> None:
    """Two models side by side: steps, a save, a load that goes back, a step, and the end of the session."""
    session = await api.session()
    models = [await api.model(session, number) for number in range(2)]
    for step in range(2):
        for number, model in enumerate(models):
            trained = await api.train(model, 2 * step + 1, seed=10 * number + step)
            stepped = await api.step(model, 2 * step + 2)
            told.append((model, (await api.result(trained)).SerializeToString(deterministic=True)))
            told.append((model, await api.result(stepped)))
        if step == 0:
            first = models[0]
    saved = await api.result(await api.post("save_weights", {"model_id": first, "path": "one", "seq_id": 5}))
    told.append((first, saved))
    trained = await api.train(first, 6, seed=77)
    told.append((first, (await api.result(trained)).SerializeToString(deterministic=True)))
    body = {"model_id": first, "path": saved["path"], "seq_id": 7, "optimizer": True}
    told.append((first, await api.result(await api.post("load_weights", body))))
    told.append((first, (await api.result(await api.train(first, 8, seed=78))).SerializeToString(deterministic=True)))
    await api.post(f"sessions/{session}/finish", {"reason": {"type": "success"}})


async def lives(world: TinkerWorld, settings: Settings, kills: list[int]) -> Told:
    """Play the story against a server that dies at these points of its lives, one after the other."""
    told: Told = []
    api = ApiClient(settings)
    playing = asyncio.create_task(story(api, told))
    try:
        for dies_at in (*kills, None):
            async with world.life(dies_at=dies_at) as running:
                await asyncio.wait([playing, running], return_when=asyncio.FIRST_COMPLETED)
            if playing.done():
                break
        await playing
    finally:
        playing.cancel()
        await api.close()
    return told


async def check_once(world: TinkerWorld) -> None:
    """Every request has one result at most, and every result a request."""
    results = [one for one in await world.recorded(TENANT_RESULTS) if isinstance(one, TenantCommandCompleted)]
    assert max(Counter(one.request_id for one in results).values()) == 1
    asked = {one.request_id for one in await world.recorded(TENANT_COMMANDS) if isinstance(one, TenantCommandReceived)}
    assert {one.request_id for one in results} <= asked


async def test_a_server_that_is_killed_anywhere_gives_the_same_bits(
    tinker_world: TinkerWorld, tinker_settings: Settings, request: pytest.FixtureRequest
) -> None:
    plain = await lives(tinker_world, tinker_settings, [])
    assert any(isinstance(one, TenantStateSaved) for one in await tinker_world.recorded(TENANT_RESULTS))
    points, chance = tinker_world.points, random.Random(5)
    assert points > 60
    for _ in range(4):
        world = await fresh(tinker_settings)
        kills = [chance.randint(2, points) for _ in range(3)]
        assert await lives(world, tinker_settings, kills) == plain, kills
        await check_once(world)


@pytest.mark.long
async def test_a_server_that_is_killed_at_each_point_gives_the_same_bits(
    tinker_world: TinkerWorld, tinker_settings: Settings
) -> None:
    plain = await lives(tinker_world, tinker_settings, [])
    for dies_at in range(1, tinker_world.points):
        world = await fresh(tinker_settings)
        assert await lives(world, tinker_settings, [dies_at]) == plain, dies_at
        await check_once(world)


async def fresh(settings: Settings) -> TinkerWorld:
    from turnlog.infra.topics_admin import apply

    world = TinkerWorld(settings)
    await apply(world.log, settings)
    return world


async def test_whoever_waits_for_a_server_that_ends_is_told(tinker_world: TinkerWorld) -> None:
    log, settings, blobs = tinker_world.log, tinker_world.settings, tinker_world.blobs
    async with EventLog.open(log, tinker_world.registry, writer="t") as events, log.transactor("t") as transactor:
        server = ServerLog(Role("tinker", "t", settings, log, events, blobs, Health("tinker")), transactor)
        waiting = asyncio.create_task(server.wait_until(lambda: False))
        await asyncio.sleep(0)
        await server.end()
        with pytest.raises(ServerEnds):
            await waiting
        with pytest.raises(ServerEnds):
            await server.wait_until(lambda: False)
        await server.wait_until(lambda: True)


async def test_a_restart_removes_the_temporary_files_of_a_server_that_was_killed(
    tinker_world: TinkerWorld, tinker_settings: Settings, api: ApiClient
) -> None:
    left = Path(tinker_settings.run.directory) / "tinker-scratch" / "left" / "snapshot"
    left.mkdir(parents=True)
    async with tinker_world.life():
        model = await api.model(await api.session())
        await api.result(await api.train(model, 1))
        assert not left.parent.exists()
        await api.result(await api.post("save_weights", {"model_id": model, "path": "one", "seq_id": 2}))
    assert not list(left.parent.parent.iterdir()), "what is saved leaves nothing"


async def test_a_restart_without_snapshots_executes_everything_again(
    tinker_world: TinkerWorld, tinker_settings: Settings, api: ApiClient
) -> None:
    async with tinker_world.life():
        model = await api.model(await api.session())
        for step in range(4):
            await api.result(await api.train(model, 2 * step + 1, seed=step))
            await api.result(await api.step(model, 2 * step + 2))
    for name in [name for name in tinker_world.blobs.named if "snapshots" in name]:
        del tinker_world.blobs.named[name]
    async with tinker_world.life():
        again = await api.result(await api.train(model, 9, seed=0))
    other = await fresh(tinker_settings)
    async with other.life():
        model = await api.model(await api.session())
        for step in range(4):
            await api.result(await api.train(model, 2 * step + 1, seed=step))
            await api.result(await api.step(model, 2 * step + 2))
        assert (await api.result(await api.train(model, 9, seed=0))) == again


async def test_a_model_that_is_not_the_one_of_before_is_noticed(
    tinker_world: TinkerWorld, tinker_settings: Settings, api: ApiClient, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from dataclasses import replace

    from tests.tiny_model import make_tiny_model

    async with tinker_world.life():
        model = await api.model(await api.session())
        await api.result(await api.train(model, 1))
    other = make_tiny_model(tmp_path_factory.mktemp("other") / "model", seed=1)
    tinker_world.settings = replace(tinker_settings, model=replace(tinker_settings.model, path=str(other)))
    async with tinker_world.life() as running:
        await asyncio.wait([running])
        assert isinstance(running.exception(), StateDiverged)
