"""Polls of an assembler touch only the partition tasks that have something to do."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import numpy as np

from tests.fakes.memory_broker import MemoryBroker
from tests.fakes.memory_log import MemoryLog
from tests.fakes.sessions import GroupName, Shape, whole_group
from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.event_log import EventLog
from turnlog.infra.log import TopicSpec
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.runs import Configured
from turnlog.processors.runtime.assembler import AssemblerRunner, assembler_plan
from turnlog.schemas.topics import CATALOGUE
from turnlog.settings import RunSettings, Settings

PARTITIONS = 12
SETTINGS = Settings(run=RunSettings(id="run"))
PLAN = assembler_plan(Configured.today(SETTINGS), SETTINGS.assembler)


async def test_a_poll_of_one_partition_creates_no_task_and_an_idle_one_steps_nothing() -> None:
    """Twelve partition tasks cost twelve tasks of asyncio at every poll, records or not, which was a fifth of what the
    assembler spent on a short session."""
    broker = MemoryBroker()
    broker.create(TopicSpec(t.name, PARTITIONS if t.partitions == "groups" else 1, 1, {}) for t in CATALOGUE)
    log = MemoryLog(broker)
    created: list[str] = []
    loop = asyncio.get_running_loop()

    def count(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **how: Any) -> asyncio.Task[Any]:
        created.append(coroutine.__qualname__)
        return asyncio.Task(coroutine, loop=loop, **how)

    async with EventLog.open(log, MemoryRegistry(), writer="test") as events:
        runner = AssemblerRunner(PLAN, log, events, MemoryBlobs(), Health("assembler"), clock=lambda: 0.0)
        async with runner.join_group("assembler-0") as reader:
            while len(runner.units) < PARTITIONS:
                await runner.turn(reader, poll_s=0.001)
            for event in whole_group(GroupName("run", "a", 0, 1), np.random.default_rng(1), turns=2, shape=Shape()):
                await events.append(event)
            loop.set_task_factory(count)
            folded = 0
            while folded < 7:
                folded += await runner.turn(reader, poll_s=0.001)
            for _ in range(3):
                assert await runner.turn(reader, poll_s=0.001) == 0
            loop.set_task_factory(None)
    steps = [name for name in created if name.startswith(AssemblerRunner.__name__)]
    assert (folded, steps) == (7, [])
