"""A sandbox worker on the log in memory, with real subprocess sandboxes: the fixture `house`."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.fakes.memory_log import MemoryLog
from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.event_log import EventLog
from turnlog.infra.log import Partition
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.role import Role, session_keys
from turnlog.infra.topics_admin import apply
from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers.backends.bubblewrap import Bubblewrap
from turnlog.sandbox_workers.backends.subprocess_backend import Subprocess
from turnlog.sandbox_workers.egress import Egress
from turnlog.sandbox_workers.pooling import SandboxPools
from turnlog.sandbox_workers.pooling.pool import Pool
from turnlog.sandbox_workers.protocol import Command, Execution, OnOutput, Provider, Sandbox, SandboxDied, Shape
from turnlog.sandbox_workers.worker import SandboxWorker
from turnlog.schemas.events import (
    DeadLetter,
    Event,
    SandboxLimits,
    SandboxSpec,
    ToolCallCancelled,
    ToolCallCompleted,
    ToolCallRequested,
    ToolCallStarted,
)
from turnlog.schemas.ids import digest
from turnlog.schemas.topics import DEAD_LETTERS, TOOL_CALLS, TOOL_RESULTS
from turnlog.settings import ErasureSettings, KafkaSettings, RunSettings, Settings

LOG_EPOCH = 1_700_000_001.0
"""Seconds; the log in memory counts its milliseconds from just before."""
FIRST_UIDS = itertools.count(240_000, 10)
"""No two workers of this machine may have users in common."""
E = TypeVar("E", bound=Event)
DURABLE = SandboxSpec(backend="subprocess", durable_workspace=True)


class Mortal:
    """A real backend whose sandboxes go away in the middle of their first `deaths` calls."""

    def __init__(self, real: Provider, deaths: int) -> None:
        self.name, self.sessions, self.networks, self.places = real.name, real.sessions, real.networks, real.places
        self.real = real
        self.deaths = deaths
        self.shapes: list[Shape] = []
        """Of the sandboxes that came up."""

    async def start(self, slot: int, shape: Shape) -> Sandbox:
        """See Provider."""
        sandbox = await self.real.start(slot, shape)
        self.shapes.append(shape)
        alive = sandbox.exec

        async def run(command: Command, limits: SandboxLimits, *, on_output: OnOutput | None = None) -> Execution:
            if self.deaths:
                self.deaths -= 1
                await sandbox.close()
                raise SandboxDied("killed by the test")
            return await alive(command, limits, on_output=on_output)

        sandbox.exec = run  # type: ignore[method-assign]
        return sandbox

    async def environment(self, shape: Shape) -> Mapping[str, str]:
        """See Provider."""
        return await self.real.environment(shape)

    async def close(self) -> None:
        """See Provider."""
        await self.real.close()


async def here(name: str, port: int) -> list[str]:
    """Every name is this machine's."""
    return ["127.0.0.1"]


@dataclass
class House:
    """A log with the catalogue's topics, a store, and workers on them."""

    log: MemoryLog
    events: EventLog
    registry: MemoryRegistry
    settings: Settings
    folder: Path
    blobs: MemoryBlobs = field(default_factory=MemoryBlobs)
    deaths: int = 0
    backend: type[Subprocess] | type[Bubblewrap] = Subprocess
    clock: Callable[[], float] = lambda: LOG_EPOCH
    pace: dict[str, float] = field(default_factory=dict)
    """commit_s, move_s and stop_s of workers to come."""
    shapes: list[Shape] = field(default_factory=list)
    """Of the latest worker's sandboxes."""

    @asynccontextmanager
    async def worker(
        self,
        *,
        fallback: bool = False,
        slots: int = 2,
        prewarm: int = 0,
        instance: str = "sandbox-0",
        log: MemoryLog | None = None,
    ) -> AsyncIterator[Role]:
        """A live worker; drained at the end."""
        log = log or MemoryLog(self.log.broker)
        uid = next(FIRST_UIDS)
        async with AsyncExitStack() as stack:
            events = await stack.enter_async_context(
                EventLog.open(log, self.registry, writer="worker", blobs=self.blobs, keys=session_keys(self.settings))
            )
            egress = None
            if self.settings.egress.allow:
                opening = Egress.open(self.settings.egress, self.blobs, self.folder, resolve=here)
                egress = await stack.enter_async_context(opening)
            role = Role("sandbox", instance, self.settings, log, events, self.blobs, Health("sandbox"))
            settings = dataclasses.replace(self.settings.sandbox, first_uid=uid)
            provider = Mortal(await self.backend.open(settings), self.deaths)
            self.shapes = provider.shapes
            pool = Pool(provider, slots=slots, prewarm=prewarm)
            pools = SandboxPools(dict.fromkeys(("bubblewrap", "subprocess"), pool), fallback=fallback)
            worker = SandboxWorker(role, pools, egress=egress, clock=self.clock, **self.pace)
            running = asyncio.create_task(worker.run())
            try:
                yield role
            finally:
                role.stopping.set()
                try:
                    await running
                finally:
                    await pool.close()
                    await provider.close()

    # -- what is written

    async def ask(self, *requests: Event) -> None:
        """Append, in order."""
        for request in requests:
            await self.events.append(request)

    def call(self, name: str, seq: int = 0, *, session: str = "s", **changes: object) -> ToolCallRequested:
        """A python call that prints its own name."""
        request = ToolCallRequested(
            event_id=digest(name),
            run_id="run",
            group_id="g",
            session_id=session,
            floor=3,
            rollout_id=session,
            call_id=name,
            call_seq=seq,
            tool="python",
            arguments=json.dumps({"code": f"print({name!r})"}).encode(),
            sandbox=SandboxSpec(backend="subprocess"),
            workspace=None,
            deadline_s=3600.0,
        )
        return dataclasses.replace(request, **changes)  # type: ignore[arg-type]

    def shell(self, name: str, command: str, seq: int = 0, **changes: Any) -> ToolCallRequested:
        """A shell call."""
        arguments = json.dumps({"command": command}).encode()
        return self.call(name, seq, tool="shell", arguments=arguments, **changes)

    def durable(self, name: str, command: str, seq: int, workspace: object, **changes: Any) -> ToolCallRequested:
        """A shell call of a session that keeps its files."""
        return self.shell(name, command, seq, **{"sandbox": DURABLE, "workspace": workspace, **changes})

    def cancelled(self, name: str, *, session: str = "s") -> ToolCallCancelled:
        """Nobody waits for call `name`."""
        return ToolCallCancelled(
            event_id=digest("cancel", name),
            run_id="run",
            group_id="g",
            session_id=session,
            floor=3,
            rollout_id=session,
            call_id=name,
            reason="session over",
        )

    def started(self, name: str, attempt: int) -> ToolCallStarted:
        """What a worker that died had written."""
        return ToolCallStarted(
            event_id=digest(name, attempt),
            run_id="run",
            group_id="g",
            session_id="s",
            floor=3,
            rollout_id="s",
            call_id=name,
            attempt=attempt,
            worker="dead",
        )

    # -- what is read

    async def read(self, topic: str, kind: type[E]) -> list[E]:
        """Every event of a class in a topic, by partition and offset."""
        specs = await self.log.topics()
        places = [Partition(topic, number) for number in range(specs[topic].partitions)]
        ends = await self.log.end_offsets(places)
        starts = await self.log.start_offsets(places)
        found: list[E] = []
        async with self.log.reader() as reader:
            reader.assign(starts)
            while any(reader.position(place) < ends[place] for place in places):
                decoded = [await self.events.decode(record) for record in await reader.poll()]
                found += [event for event in decoded if isinstance(event, kind)]
        return found

    async def starts(self) -> list[ToolCallStarted]:
        """Every ToolCallStarted."""
        return await self.read(TOOL_RESULTS.name, ToolCallStarted)

    async def completed(self, count: int) -> list[ToolCallCompleted]:
        """The answers, once there are `count`."""
        return await self.until(count, lambda: self.read(TOOL_RESULTS.name, ToolCallCompleted))

    async def answer(self, request: ToolCallRequested) -> ToolCallCompleted:
        """Append one request and wait for its first answer."""
        await self.ask(request)
        while True:
            for event in await self.read(TOOL_RESULTS.name, ToolCallCompleted):
                if event.call_id == request.call_id:
                    return event
            assert await self.log.broker.changed(30.0), request.call_id

    async def parked(self, count: int) -> list[DeadLetter]:
        """The dead letters, once there are `count`."""
        return await self.until(count, lambda: self.read(DEAD_LETTERS.name, DeadLetter))

    async def until(self, count: int, read: Callable[[], Awaitable[list[E]]]) -> list[E]:
        """What `read` gives, once it is so much."""
        deadline = time.monotonic() + 30
        while len(found := await read()) < count:
            assert time.monotonic() < deadline, f"{len(found)} of {count}: {found}"
            await self.log.broker.changed(0.5)
        return found

    async def committed(self) -> dict[int, int]:
        """Committed offsets by partition."""
        places = [Partition(TOOL_CALLS.name, number) for number in range(2)]
        return {
            place.number: commit.offset for place, commit in (await self.log.commits("run.sandbox", places)).items()
        }


@asynccontextmanager
async def housed(folder: Path, master_keys: str = "") -> AsyncIterator[House]:
    """An empty log."""
    settings = Settings(
        erasure=ErasureSettings(master_keys=master_keys),
        run=RunSettings(id="run"),
        kafka=KafkaSettings(rollouts=2),
        sandbox=SandboxSettings(backend="subprocess", wall_s=10.0),
    )
    log = MemoryLog()
    await apply(log, settings)
    registry = MemoryRegistry()
    async with EventLog.open(log, registry, writer="test", keys=session_keys(settings)) as events:
        yield House(log, events, registry, settings, folder)


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    """See housed."""
    async with housed(tmp_path) as house:
        yield house
