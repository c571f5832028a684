"""Samples appended and delivered, by turnlog and by bare aiokafka: what G1 and G2 measure."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import numpy as np
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from log_server import LogServer, logprobs, token_ids

from turnlog.infra.event_log import EventLog
from turnlog.infra.log import Log, Partition, TopicSpec
from turnlog.infra.registry import MemoryRegistry
from turnlog.schemas.events import Outcome, Purpose, SampleSpan, SegmentSample
from turnlog.schemas.ids import digest
from turnlog.schemas.topics import MAX_MESSAGE_BYTES, SAMPLES
from turnlog.schemas.types import TurnId

TOKENS, SAMPLED, PARTITIONS = 8192, 4096, 4
RAW = "raw"
FLOOR_IS = "bytes of the same size through bare aiokafka, neither encoded nor decoded"
ONE_PROCESS = "producer and reader share one Python process, as the broker shares its machine"

Deliver = Callable[[Sequence[int]], Awaitable[None]]
"""Appends records of these numbers at once and returns when the reader has them all."""


def sample(number: int, rng: np.random.Generator) -> SegmentSample:
    """A row of 8 turns, half of it sampled."""
    session, length = digest("session", number), SAMPLED // 8
    spans = tuple(
        SampleSpan(turn * TOKENS // 8 + length, length, TurnId(session, turn), version=3, trained=True)
        for turn in range(8)
    )
    return SegmentSample(
        event_id=digest("sample", number), run_id="bench", group_id=digest("group", number), session_id=session,
        rollout_id=digest("rollout", number), rollout_index=number % 16, task_id="task", sample_id=str(number),
        purpose=Purpose.train, segment_index=0, segment_count=1, is_anchor=True, token_ids=token_ids(rng, TOKENS),
        spans=spans, logprobs=logprobs(rng, SAMPLED), temperature=1.0, logprob_kind="at_temperature", advantage=0.5,
        reward=1.0, outcome=Outcome.completed, recipe="bench", weight_version_min=3, weight_version_max=3,
    )  # fmt: skip


def samples(count: int, rng: np.random.Generator) -> list[SegmentSample]:
    """So many rows of different groups. They share the tokens of 64, and are made before anything is measured."""
    whole = [sample(number, rng) for number in range(min(count, 64))]
    return [
        dataclasses.replace(whole[number % 64], sample_id=str(number), group_id=digest("group", number))
        for number in range(count)
    ]


async def create_topics(log: Log, *, fsync: bool = False) -> None:
    """For samples and for bare bytes."""
    config = {"max.message.bytes": str(MAX_MESSAGE_BYTES)} | ({"flush.messages": "1"} if fsync else {})
    await log.create_topics([TopicSpec(name, PARTITIONS, 1, config) for name in (SAMPLES.name, RAW)])


@asynccontextmanager
async def ours(log: Log, rows: list[SegmentSample]) -> AsyncIterator[Deliver]:
    """Through EventLog: encode, append, read committed, decode. No more than `rows` may be in flight."""
    waiting: dict[str, asyncio.Future[None]] = {}

    async def deliver(numbers: Sequence[int]) -> None:
        acks = []
        for number in numbers:
            row = rows[number % len(rows)]
            waiting[row.sample_id] = asyncio.get_running_loop().create_future()
            acks += [await events.submit(row), waiting[row.sample_id]]
        await asyncio.gather(*acks)

    async def receive() -> None:
        while True:
            for record in await reader.poll(timeout_s=1.0):
                row = await events.decode(record)
                assert len(row.token_ids) == TOKENS * 4
                waiting.pop(row.sample_id).set_result(None)

    places = [Partition(SAMPLES.name, number) for number in range(PARTITIONS)]
    async with EventLog.open(log, MemoryRegistry(), writer="bench") as events, log.reader() as reader:
        reader.assign(await log.end_offsets(places))
        async with running(receive()):
            yield deliver


@asynccontextmanager
async def floor(server: LogServer, size: int, rng: np.random.Generator) -> AsyncIterator[Deliver]:
    """Bare aiokafka: acks=all, idempotent, read_committed; the value is bytes."""
    waiting: dict[bytes, asyncio.Future[None]] = {}
    body, topic = rng.bytes(size), server.prefix + RAW

    async def deliver(numbers: Sequence[int]) -> None:
        acks: list[Awaitable[object]] = []
        for number in numbers:
            key = digest("group", number).encode()
            waiting[key] = asyncio.get_running_loop().create_future()
            acks += [await producer.send(topic, body, key=key), waiting[key]]
        await asyncio.gather(*acks)

    async def receive() -> None:
        while True:
            for batch in (await consumer.getmany(timeout_ms=1000)).values():
                for record in batch:
                    waiting.pop(record.key).set_result(None)

    producer = AIOKafkaProducer(
        bootstrap_servers=server.bootstrap, acks="all", enable_idempotence=True, max_batch_size=1 << 20,
        max_request_size=8 << 20,
    )  # fmt: skip
    consumer = AIOKafkaConsumer(
        bootstrap_servers=server.bootstrap, isolation_level="read_committed", enable_auto_commit=False,
        max_partition_fetch_bytes=8 << 20,
    )  # fmt: skip
    places = [TopicPartition(topic, number) for number in range(PARTITIONS)]
    async with producer, consumer:
        consumer.assign(places)
        for place, end in (await consumer.end_offsets(places)).items():
            consumer.seek(place, end)
        async with running(receive()):
            yield deliver


@asynccontextmanager
async def running(work: Awaitable[None]) -> AsyncIterator[None]:
    """Run `work` beside the block; its error ends the block's wait."""
    task = asyncio.ensure_future(work)
    try:
        yield
    finally:
        if task.done():
            task.result()
        task.cancel()
        await asyncio.wait({task})


async def rate(deliver: Deliver, numbers: itertools.count[int], requests: int, *, of: int, in_flight: int) -> float:
    """Records per second of so many requests `of` so many records each."""
    left = iter(range(requests))

    async def worker() -> None:
        for _ in left:
            await deliver(list(itertools.islice(numbers, of)))

    started = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(in_flight)))
    return requests * of / (time.perf_counter() - started)


async def alone(deliver: Deliver, numbers: itertools.count[int], requests: int, *, of: int) -> list[float]:
    """Milliseconds from append to delivery, one request at a time."""
    took = []
    for _ in range(requests):
        batch = list(itertools.islice(numbers, of))
        started = time.perf_counter()
        await deliver(batch)
        took.append((time.perf_counter() - started) * 1000)
    return took


async def encoded_size(log: Log, row: SegmentSample) -> int:
    """Bytes of a row's record."""
    async with EventLog.open(log, MemoryRegistry(), writer="size") as events:
        return len(events.codec.encode(row))
