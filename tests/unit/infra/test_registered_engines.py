"""The loader of an engine that was registered with its kind, as the supervisor starts it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fakes.memory_log import MemoryLog
from turnlog.consumers.loader.role import engine_of
from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.embedded.on_log import OnLog
from turnlog.infra.embedded.plan import LaunchPlan
from turnlog.infra.embedded.supervisor import Supervisor
from turnlog.infra.event_log import EventLog
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.roles import fleet
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.role import Role
from turnlog.infra.topics_admin import apply
from turnlog.settings import (
    EngineSettings,
    KafkaSettings,
    RegistrySettings,
    RunSettings,
    Settings,
    StoreSettings,
    from_tables,
)

URL = "http://new.example:8000"


@pytest.fixture
async def role(tmp_path: Path) -> AsyncIterator[Role]:
    """Of the supervisor of a run whose engines are the user's own."""
    settings = Settings(
        run=RunSettings(id="run", directory=str(tmp_path)),
        engine=EngineSettings(urls=("http://one.example",), kinds=("sglang", "sglang")),
        kafka=KafkaSettings(bootstrap="kafka.example:9092"),
        registry=RegistrySettings(url="http://registry.example"),
        store=StoreSettings(endpoint="https://s3.example"),
    )
    log = MemoryLog()
    await apply(log, settings)
    async with EventLog.open(log, MemoryRegistry(), writer="test") as events:
        yield Role("supervisor", "supervisor", settings, log, events, MemoryBlobs(), Health("supervisor"))


@contextlib.asynccontextmanager
async def followed(role: Role) -> AsyncIterator[Supervisor]:
    """While the block runs, a supervisor has the members that the log asks for. Their topics are never created, so none
    of them is started."""
    plan = LaunchPlan(role.settings, ("loader",))
    supervisor = Supervisor([one for one in plan.members if one.launch.name == "topics"], lambda _: None)
    following = asyncio.create_task(OnLog(role.settings, plan, supervisor, lambda: None).follow(role))
    try:
        yield supervisor
    finally:
        following.cancel()
        await asyncio.wait([following])
        await supervisor.remove(*supervisor.watched)


async def loader_has(supervisor: Supervisor, name: str, kind: str) -> None:
    """Wait until the loader of the engine takes it for one of this kind, as its own process would."""
    async with asyncio.timeout(20):
        while True:
            watched = supervisor.watched.get(f"loader-{name.removeprefix('engine-')}")
            if watched is not None:
                env = dict(watched.member.launch.env)
                settings = from_tables({"engine": {"kinds": ["sglang", "sglang"]}}, env, source="test")
                engine = engine_of(settings, env)
                if (engine.id, engine.url, engine.kind) == (name, URL, kind):
                    return
            await asyncio.sleep(0.01)


async def test_a_loader_has_the_kind_with_which_its_engine_is_registered_whatever_its_name(role: Role) -> None:
    async with followed(role) as supervisor:
        asked = await fleet.register(role, URL, name="engine-1", kind="vllm")
        await loader_has(supervisor, asked.id, "vllm")


async def test_a_loader_starts_again_if_its_engine_is_registered_as_another_kind(role: Role) -> None:
    async with followed(role) as supervisor:
        asked = await fleet.register(role, URL)
        await loader_has(supervisor, asked.id, "sglang")
        await fleet.register(role, URL, kind="vllm")
        await loader_has(supervisor, asked.id, "vllm")
    async with followed(role) as supervisor:  # the next supervisor reads it of the log
        await loader_has(supervisor, asked.id, "vllm")
