"""The trainer on a real log and store, fed with hand-made manifests."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.fakes.batches import append_batches, synthetic_model
from turnlog.infra.embedded.ports import free_ports
from turnlog.infra.log import Partition
from turnlog.infra.roles.role import Role, open_role
from turnlog.schemas.events import (
    EngineDraining,
    EngineRegistered,
    Event,
    StepCompleted,
    WeightVersionPublished,
)
from turnlog.schemas.topics import STEPS, WEIGHTS
from turnlog.settings import Settings
from turnlog.trainer.loop import rerun

pytestmark = pytest.mark.kafka
ROLE = """
import json, sys
from turnlog.infra.roles.runs import serve
from turnlog.settings import from_tables
from turnlog.trainer.loop import main
if __name__ == "__main__":
    serve("trainer", main, from_tables(json.load(sys.stdin), {}, source="test"))
"""


@pytest.fixture
def settings(live_settings: Settings, tmp_path: Path) -> Settings:
    """A run of six draws on a random tiny model, one thread, checkpoints every second step."""
    return dataclasses.replace(
        live_settings,
        model=dataclasses.replace(live_settings.model, path=str(synthetic_model(tmp_path / "model"))),
        feeder=dataclasses.replace(live_settings.feeder, draws=6),
        trainer=dataclasses.replace(live_settings.trainer, threads=1, checkpoint_every=2),
    )


@pytest.fixture
async def role(settings: Settings) -> AsyncIterator[Role]:
    async with open_role("test", settings) as role:
        yield role


@pytest.mark.parametrize("checkpoints", ["folder", pytest.param("s3", marks=pytest.mark.long)])
async def test_trains_every_batch_once_and_publishes_each_draw_also_over_a_stop(
    settings: Settings, role: Role, checkpoints: str, tmp_path: Path
) -> None:
    """With a store it goes on in another directory, as on another machine."""
    settings = dataclasses.replace(settings, trainer=dataclasses.replace(settings.trainer, checkpoints=checkpoints))
    await append_batches(role.events, role.blobs, settings.run.id, 3)
    first = await start(settings)
    await steps_until(role, 3)
    first.terminate()
    assert await first.wait() == 0
    await append_batches(role.events, role.blobs, settings.run.id, 6)
    bolder = dataclasses.replace(settings, trainer=dataclasses.replace(settings.trainer, clip_low=0.3))
    refused = await start(bolder, stderr=subprocess.PIPE)
    _, errors = await refused.communicate()
    assert refused.returncode != 0
    assert b"SettingsError: step-00000003-i0 was trained with other settings: trainer.clip_low 0.2 -> 0.3" in errors
    directory = str(tmp_path / "elsewhere") if checkpoints == "s3" else settings.run.directory
    second = await start(dataclasses.replace(settings, run=dataclasses.replace(settings.run, directory=directory)))
    assert await second.wait() == 0
    steps = await steps_of(role)
    assert [(step.batch_index, step.incarnation) for step in steps] == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 1)]
    assert [step.step for step in steps] == list(range(1, 7))
    versions = await versions_of(role)
    assert [(version.version, version.batch_index) for version in versions[:4]] == [(n, n - 1) for n in range(4)]
    assert [(version.version, version.batch_index) for version in versions[4:]] == [(n, n - 2) for n in range(4, 8)]
    assert versions[0].checkpoint is not None
    restored = next(version for version in versions if version.incarnation == 1)
    assert (restored.version, restored.batch_index, restored.step) == (4, 2, 3)
    assert restored.files == versions[3].files
    assert restored.checkpoint is not None
    where = "s3://" if checkpoints == "s3" else f"{settings.run.directory}/checkpoints/"
    assert restored.checkpoint.startswith(where)
    assert restored.checkpoint.endswith("/step-00000003-i0")


@pytest.mark.long  # the suite has the turns in memory (test_colocation.py)
async def test_on_a_shared_device_no_step_begins_before_every_engine_has_let_go(
    settings: Settings, role: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an engine said in an earlier turn counts for nothing."""
    port = free_ports(1)[0]
    monkeypatch.setenv("TURNLOG_HEALTH_PORT", str(port))
    engine = {"run_id": settings.run.id, "engine_id": "e", "url": "http://e", "version": 0}
    await role.events.append(
        EngineRegistered(event_id="0", state="serving", model="m", **engine)  # type: ignore[arg-type]
    )
    await append_batches(role.events, role.blobs, settings.run.id, 2)
    shared = dataclasses.replace(
        settings,
        engine=dataclasses.replace(settings.engine, colocate=True),
        feeder=dataclasses.replace(settings.feeder, draws=2),
    )
    trainer = await start(shared)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http:
        for turn in range(2):
            while "e still on the trainer's devices" not in await ready(http) or len(await versions_of(role)) <= turn:
                assert trainer.returncode is None
                await asyncio.sleep(0.05)  # another process says so
            assert len(await steps_of(role)) == turn
            await role.events.append(
                EngineDraining(event_id=f"{turn + 1}", state="released", published=turn, **engine)  # type: ignore[arg-type]
            )
    assert await trainer.wait() == 0
    assert [step.batch_index for step in await steps_of(role)] == [0, 1]


async def ready(http: httpx.AsyncClient) -> str:
    """What it waits for; nothing before it listens."""
    try:
        return (await http.get("/readyz")).text
    except httpx.TransportError:
        return ""


@pytest.mark.parametrize("checkpoints", ["folder", "s3"])
@pytest.mark.long  # the suite stops one rank, and steps with two (test_trainer_layouts.py)
async def test_two_ranks_train_the_same_over_a_stop_of_all_their_processes_and_on_two_machines_behind_it(
    settings: Settings, role: Role, tmp_path: Path, checkpoints: str
) -> None:
    """With a store, each of the two machines has a directory of its own, empty at first."""
    await append_batches(role.events, role.blobs, settings.run.id, 3)
    ranks = dataclasses.replace(settings.trainer, world_size=2, tensor_parallel=2, checkpoints=checkpoints)
    two = dataclasses.replace(settings, trainer=ranks)
    first = await start(two, start_new_session=True)
    await steps_until(role, 3)
    os.killpg(first.pid, signal.SIGTERM)  # as a machine that goes away does: to rank 1, too
    assert await first.wait() == 0
    await append_batches(role.events, role.blobs, settings.run.id, 6)
    by_torchrun = dataclasses.replace(two, trainer=dataclasses.replace(ranks, launcher="torchrun"))
    agents = await agents_of_two_machines(by_torchrun, tmp_path)
    assert [await agent.wait() for agent in agents] == [0, 0]
    if checkpoints == "s3":
        held = [
            sorted(path.name for path in machine.glob("*/s3/step-00000006-i1/__*")) for machine in machines(tmp_path)
        ]
        assert sorted(held) == [["__0_0.distcp"], ["__1_0.distcp"]], "each machine has its rank's shard"
    steps = await steps_of(role)
    assert [(step.batch_index, step.incarnation) for step in steps] == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 1)]
    assert {step.world_size for step in steps} == {2}
    losses = await asyncio.to_thread(rerun, settings, None, 6)
    assert [step.loss for step in steps] == pytest.approx(losses, abs=1e-5)


async def steps_until(role: Role, count: int) -> None:
    """Wait until `count` steps are on the log."""
    partition = Partition(STEPS.name, 0)
    async with asyncio.timeout(240), role.log.reader() as reader:
        reader.assign({partition: 0})
        seen = 0
        while seen < count:
            seen += len(await reader.poll())


async def start(
    settings: Settings, *, stderr: int | None = None, start_new_session: bool = False
) -> asyncio.subprocess.Process:
    """A trainer process on `settings`."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", ROLE), stdin=subprocess.PIPE, stderr=stderr, start_new_session=start_new_session
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(tables(settings)).encode())
    process.stdin.close()
    return process


async def agents_of_two_machines(settings: Settings, folder: Path) -> list[asyncio.subprocess.Process]:
    """Two torchruns that meet on the loopback, with a rank each; they share a directory if checkpoints lie there."""
    (folder / "role.py").write_text(ROLE)
    meet = ("--rdzv-backend", "c10d", "--rdzv-id", "two", "--rdzv-endpoint", f"127.0.0.1:{free_ports(1)[0]}")
    command = (sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1")
    agents = []
    for machine in machines(folder):
        if settings.trainer.checkpoints == "s3":
            settings = dataclasses.replace(settings, run=dataclasses.replace(settings.run, directory=str(machine)))
        file = machine.with_suffix(".json")
        file.write_text(json.dumps(tables(settings)))
        with file.open() as given:
            agents.append(
                await asyncio.create_subprocess_exec(
                    *command, *meet, "--local-addr", "127.0.0.1", str(folder / "role.py"), stdin=given
                )
            )
    return agents


def machines(folder: Path) -> list[Path]:
    return [folder / "first", folder / "second"]


def tables(settings: Settings) -> dict[str, dict[str, object]]:
    """`settings` as the tables of a TOML file."""
    return json.loads(json.dumps(dataclasses.asdict(settings)))  # type: ignore[no-any-return]


async def steps_of(role: Role) -> list[StepCompleted]:
    return [event for event in await everything(role, STEPS.name) if isinstance(event, StepCompleted)]


async def versions_of(role: Role) -> list[WeightVersionPublished]:
    return [event for event in await everything(role, WEIGHTS.name) if isinstance(event, WeightVersionPublished)]


async def everything(role: Role, topic: str) -> list[Event]:
    """All committed events of a one-partition topic."""
    partition = Partition(topic, 0)
    end = (await role.log.end_offsets([partition]))[partition]
    events: list[Event] = []
    async with role.log.reader() as reader:
        reader.assign({partition: 0})
        while reader.position(partition) < end:
            events += [await role.events.decode(record) for record in await reader.poll()]
    return events
