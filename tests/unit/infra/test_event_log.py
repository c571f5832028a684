"""Events in one transaction: all of them in order, each in its key's partition, or none."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.fakes.memory_log import Died, MemoryLog
from turnlog.infra.event_log import EventLog
from turnlog.infra.log import Partition, Record, Transactor, partition_of
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.topics_admin import specs
from turnlog.names import RECORD_HEADER
from turnlog.schemas import UndecodableRecord
from turnlog.schemas.codec import HEADER
from turnlog.schemas.events import ToolCallCancelled
from turnlog.schemas.topics import TOOL_CALLS
from turnlog.settings import KafkaSettings, Settings

PARTITIONS = 3
EVENTS = [
    ToolCallCancelled(
        event_id=str(number), run_id="r", group_id="g", session_id="s", floor=0, rollout_id=f"r{number % 5}",
        call_id=str(number), reason="",
    )
    for number in range(20)
]  # fmt: skip


@asynccontextmanager
async def opened(log: MemoryLog) -> AsyncIterator[tuple[EventLog, Transactor]]:
    await log.create_topics(specs(Settings(kafka=KafkaSettings(groups=1, rollouts=PARTITIONS))))
    async with EventLog.open(log, MemoryRegistry(), writer="w") as events, log.transactor("t") as transactor:
        yield events, transactor


def written(log: MemoryLog, events: EventLog) -> dict[int, list[str]]:
    """Call ids by partition, of what a reader may see."""
    found = {}
    for number in range(PARTITIONS):
        records, _ = log.broker.read(Partition(TOOL_CALLS.name, number), 0, 100)
        assert all((RECORD_HEADER, b"ToolCallCancelled") in record.headers for record in records)
        found[number] = [events.codec.decode(record.value).call_id for record in records]
    return found


@pytest.mark.parametrize("schema", [[], "long", None, {"name": ["StepCompleted"]}, {"name": "x" * 100_000}])
async def test_a_record_under_json_that_is_no_schema_is_undecodable(schema: object) -> None:
    registry = MemoryRegistry()
    async with EventLog.open(MemoryLog(), registry, writer="test") as events:
        registry.schemas[77_777] = schema  # type: ignore[assignment]
        record = Record("engine-status", 0, 0, b"", HEADER.pack(0, 77_777), (), 0)
        for _ in range(2):
            with pytest.raises(UndecodableRecord, match="schema id 77777"):
                await events.decode(record)


async def test_events_keep_their_order_in_the_partitions_of_their_keys() -> None:
    log = MemoryLog()
    async with opened(log) as (events, transactor):
        await events.transact(transactor, EVENTS, partitions=PARTITIONS)
        found = written(log, events)
    for number in range(PARTITIONS):
        wanted = [event.call_id for event in EVENTS if partition_of(event.rollout_id.encode(), PARTITIONS) == number]
        assert found[number] == wanted


@pytest.mark.parametrize("point", range(1, 10, 2))
async def test_a_writer_killed_before_the_commit_has_written_nothing(point: int) -> None:
    log = MemoryLog()
    async with opened(log) as (events, transactor):
        before = log.points
        await events.transact(transactor, EVENTS, partitions=PARTITIONS)
        whole = log.points - before
        log.dies_at = log.points + whole * point // 10
        with pytest.raises(Died):
            await events.transact(transactor, EVENTS, partitions=PARTITIONS)
        assert sum(len(found) for found in written(log, events).values()) == len(EVENTS)


async def test_an_event_that_does_not_encode_leaves_no_transaction_open() -> None:
    log = MemoryLog()
    async with opened(log) as (events, transactor):
        broken = dataclasses.replace(EVENTS[1], reason=5)
        with pytest.raises(TypeError):
            await events.transact(transactor, [EVENTS[0], broken], partitions=PARTITIONS)
        await events.transact(transactor, EVENTS[:1], partitions=PARTITIONS)
        assert sum(len(found) for found in written(log, events).values()) == 1
