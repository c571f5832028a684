"""What an engine on Ray is made of, and what is said of one that died, without a Ray."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fakes.memory_log import MemoryLog
from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.embedded import EngineDied
from turnlog.infra.embedded.on_log import OnLog
from turnlog.infra.embedded.plan import LaunchPlan
from turnlog.infra.embedded.supervisor import ChildState, Supervisor, Watched
from turnlog.infra.event_log import EventLog
from turnlog.infra.history import all_events
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.roles import fleet
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.role import Role
from turnlog.infra.topics_admin import apply
from turnlog.plugins.ray.actor import members_of
from turnlog.plugins.ray.hosting import bundle_of
from turnlog.processors.core.views.fleet import GONE, SERVING, FleetEngine
from turnlog.schemas.events import EngineGone, EngineRegistered
from turnlog.schemas.topics import ENGINES
from turnlog.settings import (
    EngineSettings,
    KafkaSettings,
    ModelSettings,
    RegistrySettings,
    RunSettings,
    Settings,
    StoreSettings,
)

THERE = "127.0.0.3"


@pytest.fixture
def settings(tmp_path: Path, tiny_model: Path) -> Settings:
    """Of a run whose engines are on Ray; nothing else of it is started."""
    return Settings(
        run=RunSettings(id="run", directory=str(tmp_path)),
        model=ModelSettings(path=str(tiny_model)),
        engine=EngineSettings(launcher="ray"),
        kafka=KafkaSettings(bootstrap="kafka.example:9092"),
        registry=RegistrySettings(url="http://registry.example"),
        store=StoreSettings(endpoint="https://s3.example"),
    )


def test_an_engine_and_its_loader_are_members_of_its_actor_at_the_address_of_its_node(settings: Settings) -> None:
    url, (engine, loader) = members_of(settings, "engine-3", THERE)
    assert url.startswith(f"http://{THERE}:")
    argv = engine.launch.argv
    assert argv[argv.index("--host") + 1] == THERE
    assert argv[argv.index("--random-seed") + 1] == "4"
    env = loader.launch.env
    assert (loader.launch.name, env["TURNLOG_ENGINE_ID"], env["TURNLOG_ENGINE_URL"]) == ("loader-3", "engine-3", url)
    assert (engine.essential, loader.essential) == (True, True)


def test_an_engine_takes_devices_of_its_node_where_it_runs_on_some() -> None:
    assert bundle_of(EngineSettings(ray_cpus=3, ray_gpus=2)) == {"CPU": 3}
    assert bundle_of(EngineSettings(ray_cpus=3, ray_gpus=2, device="cuda")) == {"CPU": 3, "GPU": 2}


def test_nothing_of_a_supervisor_imports_ray() -> None:
    program = "import sys, turnlog.cli, turnlog.infra.embedded.up, turnlog.plugins.ray; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


@pytest.fixture
async def role(settings: Settings) -> AsyncIterator[Role]:
    log = MemoryLog()
    await apply(log, settings)
    async with EventLog.open(log, MemoryRegistry(), writer="test") as events:
        yield Role("supervisor", "supervisor", settings, log, events, MemoryBlobs(), Health("supervisor"))


async def until(role: Role, state: str, cause: str = "") -> FleetEngine:
    """Of engine-0."""
    async with asyncio.timeout(20):
        while True:
            found = (await fleet.read(role)).engines.get("engine-0")
            if found is not None and (found.state, found.cause) == (state, cause):
                return found
            await asyncio.sleep(0.01)


async def serves(role: Role, number: int) -> None:
    await role.events.append(
        EngineRegistered(
            event_id=f"{number:032x}",
            run_id="run",
            engine_id="engine-0",
            url=f"http://node-{number}:1",
            state=SERVING,
            version=number,
            model="turnlog-policy",
        )
    )


async def test_an_engine_that_took_its_loader_with_it_is_said_to_be_gone_unless_it_is_there_again(role: Role) -> None:
    plan = LaunchPlan(role.settings, ("loader",))
    (holder,) = [Watched(member) for member in plan.members if member.launch.name == "engine-0"]
    on_log = OnLog(role.settings, plan, Supervisor([], lambda _: None), lambda: None)

    def becomes(state: ChildState, error: str) -> None:
        holder.state, holder.error = state, EngineDied(error)
        on_log.on_change(holder)

    following = asyncio.create_task(on_log.follow(role))
    await serves(role, 1)
    said = "turnlog engine: ActorLost: its node died"
    becomes(ChildState.RESTARTING, f"engine-0 ended with status 2\nINFO of before\n{said}\nINFO of Ray")
    gone = await until(role, GONE, said)
    assert (gone.url, gone.version, gone.wanted, gone.by) == ("http://node-1:1", 1, "serving", "settings")
    await serves(role, 2)
    becomes(ChildState.RESTARTING, "nobody reads of that one")
    becomes(ChildState.READY, "")
    assert (await until(role, SERVING)).url == "http://node-2:1"
    becomes(ChildState.FAILED, "it died twice")
    await until(role, GONE, "it died twice")
    causes = [event.cause for event in await all_events(role, ENGINES) if isinstance(event, EngineGone)]
    assert causes == [said, "it died twice"]
    following.cancel()
    await asyncio.wait([following])
