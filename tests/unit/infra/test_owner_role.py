"""The loop of a role that alone acts on a run."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from tests.fakes.memory_broker import MemoryBroker
from tests.fakes.memory_log import MemoryLog
from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.event_log import EventLog
from turnlog.infra.log import REACHED_EVERY_S, Commit, Partition, Reader, Record, TopicSpec
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.loop import OwnerRole
from turnlog.infra.roles.role import Role
from turnlog.names import ConsumerGroup, TransactionalId
from turnlog.schemas.topics import STEPS
from turnlog.settings import Settings

PLACE = Partition(STEPS.name, 0)
POLLS = 30


class CountingWork:
    """Reads one topic, and stops its role after so many polls."""

    def __init__(self, stopping: asyncio.Event) -> None:
        self._stopping = stopping
        self.acts = 0
        self.commits_built = 0

    async def take(self, records: list[Record]) -> None: ...

    async def begin(self) -> Mapping[Partition, int]:
        return {}

    async def act(self, reader: Reader) -> None:
        self.acts += 1
        if self.acts == POLLS:
            self._stopping.set()

    def commits(self, reader: Reader, places: Sequence[Partition]) -> dict[Partition, Commit]:
        self.commits_built += 1
        return {PLACE: Commit.low_water(reader.position(PLACE), high=reader.position(PLACE))}


async def test_progress_is_computed_once_per_interval_and_not_once_per_poll() -> None:
    """It is a JSON text of every partition, which cost the batcher and the feeder more than an idle poll."""
    broker = MemoryBroker()
    broker.create([TopicSpec(STEPS.name, 1, 1, {})])
    log = MemoryLog(broker)
    async with EventLog.open(log, MemoryRegistry(), writer="batcher") as events:
        role = Role("batcher", "batcher", Settings(), log, events, MemoryBlobs(), Health("batcher"))
        work = CountingWork(role.stopping)
        owner = OwnerRole(owner=TransactionalId.BATCHER, group=ConsumerGroup.BATCHER, poll_s=0.001)
        began = asyncio.get_running_loop().time()
        async with log.transactor("batcher") as transactor:
            await owner.serve(role, {PLACE: 0}, work, transactor)
        intervals = (asyncio.get_running_loop().time() - began) // REACHED_EVERY_S
    assert work.acts == POLLS
    assert work.commits_built <= 3 + intervals, "at the begin, at the end, and once per interval"
