"""Engines on the nodes of a real Ray, scripted ones with real loaders, under sessions; a node dies.

What engines say is of no matter here (test_engine_scale.py has real ones that come and go), and three SGLangs beside a
Ray starve each other on a small machine.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util import placement_group_table

from tests.integration.test_engine_scale import asked_on_and_on, directory_of, hosted, scale, served, serving
from tests.ray_nodes import actors, room, two_nodes
from turnlog.infra.embedded.up import status_processes
from turnlog.infra.history import all_events
from turnlog.infra.roles import fleet
from turnlog.infra.roles.role import Role
from turnlog.infra.run_folder import read_endpoints
from turnlog.processors.core.views.fleet import SERVING, FleetEngine
from turnlog.schemas.events import EngineGone, TurnCompleted
from turnlog.schemas.topics import ENGINES, TURNS
from turnlog.settings import EngineSettings, Settings

pytestmark = [
    pytest.mark.timeout(1200),
    *(pytest.mark.kafka, pytest.mark.engine, pytest.mark.long),  # unit/infra/test_embedded_on_ray.py has the rules
]


DEVICE = {"num_gpus": 1}
"""Of a node: Ray counts it, nobody uses it."""
SCALE_INS = 5
"""Under load, before a node dies."""
SCRIPTED = Path(__file__).parents[1] / "fakes/scripted"


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("PYTHONPATH", str(SCRIPTED))  # its nodes', and so its actors'
    with two_nodes(**DEVICE) as cluster:
        yield cluster


@pytest.fixture
async def role(live_settings: Settings, tiny_model: Path, cluster: Cluster) -> AsyncIterator[Role]:
    """Of a run with an engine on each node."""
    engine = EngineSettings(
        launcher="ray",
        ray_address=cluster.address,
        device="cuda",
        count=2,
        start_timeout_s=120.0,
        request_timeout_s=300.0,
        drain_s=2.0,
    )
    async with hosted(dataclasses.replace(live_settings, engine=engine), tiny_model) as role:
        await serving(role, "engine-0", "engine-1")
        yield role
    assert not actors("EngineHost")
    _, alive = psutil.wait_procs(of_run(role), 30)
    assert not alive
    ray.init(cluster.address)
    try:
        assert {group["state"] for group in placement_group_table().values()} == {"REMOVED"}
    finally:
        ray.shutdown()


def of_run(role: Role) -> list[psutil.Process]:
    """Engines and loaders, wherever they are."""
    folder = str(directory_of(role))
    return [
        one for one in psutil.process_iter(["cmdline"]) if any(folder in part for part in one.info["cmdline"] or ())
    ]


async def engine(role: Role, name: str) -> FleetEngine:
    return (await fleet.read(role)).engines[name]


async def says_what_it_lacks(role: Role, name: str) -> str:
    """Wait until the process that holds an engine says so."""
    found = ""
    while "Ray did not place" not in found:
        await asyncio.sleep(0.2)
        found = "".join(str(one["waiting"]) for one in status_processes(role.settings) if one["name"] == name)
    return found


async def replaced(role: Role, name: str, url: str) -> None:
    """Wait until an engine of that name serves elsewhere."""
    now = await engine(role, name)
    while now.state != SERVING or now.url == url:
        await asyncio.sleep(0.2)
        now = await engine(role, name)


async def test_engines_on_ray_come_and_go_and_one_whose_node_dies_is_replaced_and_no_session_is_lost(
    role: Role, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len({one.ppid() for one in actors("EngineHost")}) == 2  # a node each
    (doomed,) = cluster.worker_nodes
    async with httpx.AsyncClient(base_url=read_endpoints(directory_of(role)).gateway, timeout=300) as http:
        async with asked_on_and_on(http, 4) as ended:
            scaling = asyncio.create_task(scale(role, 3))
            lacks = await says_what_it_lacks(role, "engine-2")
            assert "a bundle of {'CPU': 1, 'GPU': 1}; free in its cluster: " in lacks
            assert "engine.ray_cpus" in lacks
            await asyncio.to_thread(cluster.add_node, **room(**DEVICE))
            await scaling
            assert "engine-2 waits: " in capsys.readouterr().err
            await served(role, "engine-2")
            await scale(role, 2)
            for _ in range(SCALE_INS - 1):
                await scale(role, 3)
                await served(role, "engine-2")
                await scale(role, 2)

            raylet = doomed.all_processes["raylet"][0].process.pid
            (name,) = await of_node(role, raylet)
            before = await engine(role, name)
            await asyncio.to_thread(cluster.remove_node, doomed, allow_graceful=False)
            await replaced(role, name, before.url)
            await scale(role, 1)
        assert ended
        assert {one["choices"][0]["finish_reason"] for one in ended} <= {"stop", "tool_calls"}  # whole
    gone = [one for one in await all_events(role, ENGINES) if isinstance(one, EngineGone) and one.url == before.url]
    assert [one.engine_id for one in gone] == [name]
    assert "ActorLost: its actor is gone" in gone[0].cause
    turns = Counter(one.session_id for one in await all_events(role, TURNS) if isinstance(one, TurnCompleted))
    assert (len(turns), set(turns.values())) == (len(ended), {1})


async def of_node(role: Role, raylet: int) -> list[str]:
    """Names of the engines below a node's raylet, by their addresses."""
    below = {one.pid for one in actors("EngineHost") if one.ppid() == raylet}
    ports = {
        connection.laddr.port
        for pid in below
        for child in psutil.Process(pid).children(recursive=True)
        for connection in child.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    engines = (await fleet.read(role)).engines.values()
    return [one.id for one in engines if one.state == SERVING and int(one.url.rpartition(":")[2]) in ports]
