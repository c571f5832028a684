"""ENV: steps per second through the adapters of interactive environments, beside a bare client of the same server.

64 sessions act at once; each asks for its next step when it has the answer to the last. Through an adapter, a step is a
tool call: its request is appended to the log (in memory, so that the broker's share is not in the figure), a sandbox
worker announces it, sends it to the server, and appends the answer, which the session reads. The bare client sends the
same steps over the same kind of connection and keeps nothing. Rounds of both alternate. `value` and `floor` are of the
adapter whose share is the smallest; `detail` has all.

    python benchmarks/env.py [--only openenv,mcp]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

import psutil
from env_mcp import McpAdapter
from row import say, size, told

from tests.environments.openenv_servers import guessing
from tests.fakes.memory_log import MemoryLog
from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.event_log import EventLog
from turnlog.infra.log import Partition
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.role import Role
from turnlog.infra.topics_admin import apply
from turnlog.plugins.openenv.client import DirectNetwork, OpenEnvSession
from turnlog.sandbox_settings import EgressSettings, SandboxSettings
from turnlog.sandbox_workers.egress import Egress
from turnlog.sandbox_workers.pooling import SandboxPools
from turnlog.sandbox_workers.worker import SandboxWorker
from turnlog.schemas.events import SandboxLimits, SandboxSpec, ToolCallCompleted, ToolCallRequested, ToolStatus
from turnlog.schemas.topics import TOOL_RESULTS
from turnlog.settings import RunSettings, Settings

GOAL_SHARE = 0.5
SESSIONS, STEPS, ROUNDS = size((64, 40, 5), smallest=(4, 3, 1))
LOG_EPOCH = 1_700_000_001.0
"""Seconds; the log in memory counts its milliseconds from just before."""
SPEC = SandboxSpec(backend="subprocess", limits=SandboxLimits(wall_s=60.0))


class Adapter(Protocol):
    """An adapter, with a server to measure it at."""

    name: str
    """Tool on the log, and name in `detail`."""
    url: str
    """Address that [egress] has to grant; empty if none."""
    pid: int
    """Process of the server."""

    def opening(self, session: int) -> dict[str, Any]:
        """Arguments of a session's first call."""
        ...

    def step(self, session: int, number: int) -> dict[str, Any]:
        """Arguments of a step's call."""
        ...

    async def connect(self, session: int) -> BareSession:
        """Begin a session by a bare client."""
        ...


class BareSession(Protocol):
    """A session of a bare client."""

    async def step(self, number: int) -> None:
        """Take a step."""
        ...

    async def close(self) -> None:
        """End it."""
        ...


class OpenEnvAdapter:
    """The tool `openenv`, at a server on upstream's classes."""

    name = "openenv"

    def __init__(self, url: str, pid: int, network: DirectNetwork) -> None:
        self.url, self.pid, self._network = url, pid, network

    @classmethod
    @asynccontextmanager
    async def open(cls) -> AsyncIterator[OpenEnvAdapter]:
        """Start the server; an episode is longer than any round."""
        places = 2 * (ROUNDS + 1) * SESSIONS
        async with guessing(sessions=places) as server, contextlib.aclosing(DirectNetwork()) as network:
            yield cls(server.url, server.process.pid, network)

    def opening(self, session: int) -> dict[str, Any]:
        return {"reset": True, "server": self.url, "seed": session, "options": {"most": 10**9}}

    def step(self, session: int, number: int) -> dict[str, Any]:
        return {"action": {"number": wrong(session, number)}}

    async def connect(self, session: int) -> BareSession:
        connection = await OpenEnvSession.connect(self.url, self._network)
        await connection.reset({"seed": session, "most": 10**9}, timeout_s=60.0)
        return BareOpenEnv(session, connection)


def wrong(session: int, number: int) -> int:
    """A guess that does not end the episode of the seed `session`."""
    return (random.Random(session).randrange(100) + 1 + number % 50) % 100


class BareOpenEnv:
    """See BareSession."""

    def __init__(self, session: int, connection: OpenEnvSession) -> None:
        self._session, self._connection = session, connection

    async def step(self, number: int) -> None:
        await self._connection.step({"number": wrong(self._session, number)}, timeout_s=60.0)

    async def close(self) -> None:
        await self._connection.close()


ADAPTERS: dict[str, Callable[[], AbstractAsyncContextManager[Adapter]]] = {
    "openenv": OpenEnvAdapter.open, "mcp": McpAdapter.open
}  # fmt: skip


async def bare(adapter: Adapter) -> dict[str, float]:
    """Steps per second of a bare client, and core-milliseconds per step of this process and of the server."""
    sessions = await asyncio.gather(*(adapter.connect(number) for number in range(SESSIONS)))

    async def play(session: BareSession) -> None:
        for number in range(STEPS):
            await session.step(number)

    with measured(adapter) as found:
        await asyncio.gather(*map(play, sessions))
    await asyncio.gather(*(session.close() for session in sessions))
    return found


@contextlib.contextmanager
def measured(adapter: Adapter) -> Any:
    """Fill in the figures of SESSIONS x STEPS steps that are taken within the block."""
    found: dict[str, float] = {}
    server = psutil.Process(adapter.pid)
    before, own, began = sum(server.cpu_times()[:2]), time.process_time(), time.perf_counter()
    yield found
    took, steps = time.perf_counter() - began, SESSIONS * STEPS
    found["steps_per_s"] = steps / took
    found["core_ms"] = (time.process_time() - own) * 1e3 / steps
    found["server_core_ms"] = (sum(server.cpu_times()[:2]) - before) * 1e3 / steps


class Recorded:
    """A sandbox worker on a log in memory, and sessions that act by it."""

    def __init__(self, adapter: Adapter, log: MemoryLog, events: EventLog) -> None:
        self._adapter, self._log, self._events = adapter, log, events
        self._waiting: dict[str, asyncio.Future[ToolCallCompleted]] = {}
        self.round = 0

    @classmethod
    @asynccontextmanager
    async def open(cls, adapter: Adapter) -> AsyncIterator[Recorded]:
        """Start the worker."""
        host = adapter.url.partition("://")[2]
        settings = Settings(
            run=RunSettings(id="bench"),
            sandbox=SandboxSettings(backend="subprocess", slots=1, prewarm=0, wall_s=60.0, first_uid=770_000),
            egress=EgressSettings(allow=(f"* {adapter.url}/*",), private_hosts=(host,), tls="refuse"),
        )
        log, blobs, registry = MemoryLog(), MemoryBlobs(), MemoryRegistry()
        await apply(log, settings)
        async with (
            EventLog.open(log, registry, writer="worker", blobs=blobs) as worker_events,
            EventLog.open(log, registry, writer="sessions", blobs=blobs) as events,
            SandboxPools.open(settings) as pools,
            Egress.open_temporary(settings.egress, blobs) as egress,
        ):
            role = Role("sandbox", "bench", settings, log, worker_events, blobs, Health("sandbox"))
            worker = SandboxWorker(role, pools, egress=egress, clock=lambda: LOG_EPOCH)
            tasks = [asyncio.create_task(worker.run())]
            recorded = cls(adapter, log, events)
            tasks.append(asyncio.create_task(recorded.follow(settings.kafka.rollouts)))
            try:
                yield recorded
            finally:
                role.stopping.set()
                await tasks[0]
                tasks[1].cancel()
                await asyncio.wait(tasks)

    async def follow(self, partitions: int) -> None:
        """Give each answer to the session that waits for it."""
        places = [Partition(TOOL_RESULTS.name, number) for number in range(partitions)]
        async with self._log.reader() as reader:
            reader.assign(await self._log.start_offsets(places))
            while True:
                for record in await reader.poll():
                    event = await self._events.decode(record)
                    if isinstance(event, ToolCallCompleted) and event.call_id in self._waiting:
                        self._waiting.pop(event.call_id).set_result(event)

    async def call(self, session: str, number: int, arguments: Mapping[str, Any]) -> None:
        """Ask for a call of a session, and wait for its answer."""
        name = f"{session}.{number}"
        waiting = self._waiting[name] = asyncio.get_running_loop().create_future()
        await self._events.append(
            ToolCallRequested(
                event_id=name, run_id="bench", group_id="g", session_id=session, floor=0, rollout_id=session,
                call_id=name, call_seq=number, tool=self._adapter.name, arguments=json.dumps(arguments).encode(),
                sandbox=SPEC, workspace=None, deadline_s=1e9,
            )
        )  # fmt: skip
        answer = await waiting
        assert answer.status is ToolStatus.ok, answer

    async def play(self) -> dict[str, float]:
        """Steps per second of one round, and core-milliseconds per step of this process (sessions, log and worker) and
        of the server."""
        self.round += 1
        names = [f"{self.round}.{number}" for number in range(SESSIONS)]
        await asyncio.gather(*(self.call(name, 0, self._adapter.opening(number)) for number, name in enumerate(names)))

        async def session(number: int, name: str) -> None:
            for step in range(STEPS):
                await self.call(name, step + 1, self._adapter.step(number, step))

        with measured(self._adapter) as found:
            await asyncio.gather(*(session(number, name) for number, name in enumerate(names)))
        return found


async def compared(name: str) -> dict[str, float]:
    """The figures of one adapter: those of the round whose share is the median, since other work comes and goes."""
    rounds: list[dict[str, float]] = []
    async with ADAPTERS[name]() as adapter, Recorded.open(adapter) as recorded:
        for number in range(ROUNDS):
            plain, through = await bare(adapter), await recorded.play()
            rounds.append(
                {
                    "steps_per_s": through["steps_per_s"],
                    "bare_steps_per_s": plain["steps_per_s"],
                    "share": through["steps_per_s"] / plain["steps_per_s"],
                    "core_ms_per_step": through["core_ms"],
                    "bare_core_ms_per_step": plain["core_ms"],
                    "server_core_ms_per_step": through["server_core_ms"],
                }
            )
            say(f"{name}, round {number + 1}: {rounds[-1]}")
    return sorted(rounds, key=lambda each: each["share"])[len(rounds) // 2]


async def main() -> int:
    """Measure, and print the line."""
    parser = argparse.ArgumentParser(description="Steps per second through the adapters of environments.")
    parser.add_argument("--only", default="", help="openenv, mcp")
    only = parser.parse_args().only or ",".join(ADAPTERS)
    found = {name: await compared(name) for name in only.split(",")}
    least = min(found.values(), key=lambda each: each["share"])
    return told(
        id="ENV", value=least["steps_per_s"], unit="steps/s", goal=None, met=True, floor=least["bare_steps_per_s"],
        goal_share=GOAL_SHARE, rate=True,
        detail={
            name: {figure: round(value, 3) for figure, value in each.items()} for name, each in found.items()
        } | {"sessions": SESSIONS, "cores": os.cpu_count()},
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
