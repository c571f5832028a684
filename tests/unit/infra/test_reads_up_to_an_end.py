"""`infra.history` on the log in memory; the contract of the log runs it on Kafka and on the archive, too."""

from __future__ import annotations

import pytest

from tests.fakes.memory_log import MemoryLog
from turnlog.infra.history import assign_from_start, caught_up, read_range
from turnlog.infra.log import OffsetOutOfRange, Partition, TopicSpec

A, B = Partition("in", 0), Partition("in", 1)


@pytest.fixture
async def log() -> MemoryLog:
    """A topic of two partitions, with three records in each."""
    log = MemoryLog()
    await log.create_topics([TopicSpec("in", 2, 1, {})])
    async with log.appender() as appender:
        for number in range(6):
            await appender.append("in", b"k", b"%d" % number, partition=number % 2)
    return log


async def append(log: MemoryLog, place: Partition, value: bytes) -> None:
    async with log.appender() as appender:
        await appender.append(place.topic, b"k", value, partition=place.number)


async def test_a_range_holds_its_start_and_not_its_end(log: MemoryLog) -> None:
    async with log.reader() as reader:
        found = [record async for record in read_range(reader, {A: 1, B: 0}, {A: 3, B: 1})]
    assert sorted((record.partition, record.offset) for record in found) == [(0, 1), (0, 2), (1, 0)]


async def test_records_that_are_appended_during_a_read_are_not_part_of_it(log: MemoryLog) -> None:
    found = []
    async with log.reader() as reader:
        async for record in read_range(reader, {A: 0, B: 0}, await log.end_offsets([A, B]), max_records=1):
            found.append(record.value)
            await append(log, A, b"later")
    assert sorted(found) == [b"0", b"1", b"2", b"3", b"4", b"5"]


async def test_a_read_ends_where_only_markers_and_aborted_records_lie_before_the_end(log: MemoryLog) -> None:
    start = (await log.end_offsets([A]))[A]
    async with log.transactor("t") as transactor:
        await transactor.begin()
        await transactor.send("in", 0, b"k", b"aborted")
        await transactor.abort()
    ends = await log.end_offsets([A])
    assert ends[A] > start
    async with log.reader() as reader:
        assert [record async for record in read_range(reader, {A: start}, ends)] == []
        assert caught_up(reader, ends)


async def test_a_read_of_nothing_ends_without_a_poll(log: MemoryLog) -> None:
    log.broker.serves = False
    async with log.reader() as reader:
        assert [record async for record in read_range(reader, {}, {})] == []
        assert [record async for record in read_range(reader, {A: 3}, {A: 3, B: 3})] == []


async def test_a_read_that_is_abandoned_leaves_the_reader_to_its_owner(log: MemoryLog) -> None:
    async with log.reader() as reader:
        first = await anext(read_range(reader, {A: 1}, {A: 3}), None)
        second = await anext(read_range(reader, {B: 2}, {B: 3}), None)
    assert first is not None
    assert second is not None
    assert (first.value, second.value) == (b"2", b"5")


async def test_a_read_from_a_pruned_start_fails(log: MemoryLog) -> None:
    await log.delete_before({A: 2})
    async with log.reader() as reader:
        with pytest.raises(OffsetOutOfRange):
            await anext(read_range(reader, {A: 0}, {A: 3}))


async def test_an_owner_that_goes_on_keeps_what_came_with_the_last_records(log: MemoryLog) -> None:
    await log.delete_before({A: 1})
    found = []
    async with log.reader() as reader:
        ends = await assign_from_start(log, reader, [A, B])
        assert ends == {A: 3, B: 3}
        await append(log, A, b"later")
        while not caught_up(reader, ends):
            found += await reader.poll(max_records=2)
        while len(found) < 6:
            found += await reader.poll()
    assert sorted(record.value for record in found) == [b"1", b"2", b"3", b"4", b"5", b"later"]
