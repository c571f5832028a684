"""How many requests the clients of the log send to a broker for what they do."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from uuid import uuid4

import pytest

from tests.fakes.kafka_requests import API_VERSIONS, FETCH, counted_requests
from turnlog.infra.kafka import KafkaLog
from turnlog.infra.kafka.paced_fetcher import FULL_BYTES
from turnlog.infra.log import Appender, GroupReader, Partition, Reader, TopicSpec

IN = Partition("in", 0)
PATIENCE_S = 60.0
PAUSE_S = 3600.0


@pytest.fixture
async def sent() -> AsyncIterator[Counter[int]]:
    with counted_requests(asyncio.get_running_loop()) as sent:
        yield sent


@pytest.fixture
async def log(kafka: str, sent: Counter[int]) -> AsyncIterator[KafkaLog]:
    log = KafkaLog(kafka, prefix=f"t{uuid4().hex[:8]}-")
    try:
        await log.create_topics([TopicSpec("in", 1, 1, {}), TopicSpec("side", 1, 1, {})])
        yield log
    finally:
        await log.close()


async def joined(log: KafkaLog, stack: AsyncExitStack, pause_s: float) -> GroupReader:
    """A member that has the partition, and reads it from its start."""
    mine = asyncio.Event()

    async def assigned(_: frozenset[int]) -> None:
        mine.set()
        reader.seek(IN, 0)

    async def revoked(_: frozenset[int]) -> None:
        pass

    group = log.group_reader("g", ["in"], assigned=assigned, revoked=revoked, pause_s=pause_s)
    reader = await stack.enter_async_context(group)
    async with asyncio.timeout(PATIENCE_S):
        while not mine.is_set():
            await reader.poll(timeout_s=0.1)
    return reader


async def arrived(reader: Reader, count: int) -> None:
    """Return once so many records were polled."""
    async with asyncio.timeout(PATIENCE_S):
        while count > 0:
            count -= len(await reader.poll(timeout_s=1.0))


async def append(appender: Appender, values: int, size: int = 1) -> None:
    for _ in range(values):
        await appender.append("in", b"key", bytes(size))


@pytest.mark.kafka
async def test_a_reader_that_pauses_sends_no_fetch_while_others_write(log: KafkaLog, sent: Counter[int]) -> None:
    """The first record arrives at once; what is written in the pause waits for its end, which this test does not."""
    async with AsyncExitStack() as stack:
        appender = await stack.enter_async_context(log.appender())
        reader = await joined(log, stack, PAUSE_S)
        await append(appender, 1)
        await arrived(reader, 1)
        before = sent[FETCH]
        await append(appender, 50)
        assert await reader.poll(timeout_s=0.0) == []
        assert sent[FETCH] == before


@pytest.mark.kafka
async def test_a_pause_ends_and_one_fetch_brings_all_of_it(log: KafkaLog, sent: Counter[int]) -> None:
    async with AsyncExitStack() as stack:
        appender = await stack.enter_async_context(log.appender())
        reader = await stack.enter_async_context(log.reader(patient=True))
        reader.assign({IN: 0})
        await append(appender, 1)
        await arrived(reader, 1)
        before = sent[FETCH]
        await append(appender, 10)
        await arrived(reader, 10)
        assert sent[FETCH] <= before + 2, "half a second holds ten appends even on a slow machine, or two hold them"


@pytest.mark.kafka
async def test_a_reader_of_the_past_does_not_pause(log: KafkaLog) -> None:
    """Each fetch brings as much as FULL_BYTES, after which no pause begins."""
    async with AsyncExitStack() as stack:
        appender = await stack.enter_async_context(log.appender())
        reader = await joined(log, stack, PAUSE_S)
        for _ in range(3):
            await append(appender, 1, FULL_BYTES)
            await arrived(reader, 1)


@pytest.mark.kafka
async def test_a_pause_ends_with_its_reader_and_with_its_assignment(log: KafkaLog) -> None:
    async with AsyncExitStack() as stack:
        appender = await stack.enter_async_context(log.appender())
        reader = await joined(log, stack, PAUSE_S)
        await append(appender, 1)
        await arrived(reader, 1)
        reader.assign({IN: 0})
        await arrived(reader, 1)
        async with asyncio.timeout(PATIENCE_S):
            await stack.aclose()


@pytest.mark.kafka
async def test_a_fetch_that_waits_holds_up_no_other_assignment(log: KafkaLog, sent: Counter[int]) -> None:
    """The broker answers the requests of a connection one after another: the next fetch takes another connection."""
    async with log.appender() as appender, log.reader() as reader:
        await append(appender, 1)
        reader.assign({IN: 1})
        waiting = sent[FETCH]
        while sent[FETCH] == waiting:
            assert await reader.poll(timeout_s=0.01) == []
        connections = sent[API_VERSIONS]
        reader.assign({IN: 0})
        await arrived(reader, 1)
        assert sent[API_VERSIONS] == connections + 1


@pytest.mark.kafka
async def test_no_fetch_leaves_a_partition_out_whose_records_are_not_taken_yet(
    log: KafkaLog, sent: Counter[int]
) -> None:
    """A role that folds for a second would else find that a fetch of other partitions waits for records."""
    async with log.appender() as appender, log.reader() as reader, log.reader() as idle:
        reader.assign({IN: 0, Partition("side", 0): 0})
        before = sent[FETCH]
        await append(appender, 1)
        await idle.poll(timeout_s=0.5)  # which lets time pass: it reads nothing
        assert sent[FETCH] <= before + 1
        await arrived(reader, 1)
