"""G1: durable append and delivery of 8,192-token samples, one SegmentSample per request.

A sample counts when a read_committed reader has decoded it. Rounds of ours and of the floor (the same number of bytes
through bare aiokafka, neither encoded nor decoded) alternate in the same run, on the same broker and event loop. Not
shown: a reader in another process, which would have a core of its own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import numpy as np
import uvloop
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from log_server import ACKS, broker, logprobs, percentile, say, token_ids, told

from turnlog.infra.event_log import EventLog
from turnlog.infra.kafka import KafkaLog
from turnlog.infra.log import Log, Partition, TopicSpec
from turnlog.infra.registry import MemoryRegistry
from turnlog.schemas.events import Outcome, Purpose, SampleSpan, SegmentSample
from turnlog.schemas.ids import digest
from turnlog.schemas.topics import MAX_MESSAGE_BYTES, SAMPLES
from turnlog.schemas.types import TurnId

TOKENS, SAMPLED, PARTITIONS = 8192, 4096, 4
IN_FLIGHT, ROUNDS, PER_ROUND, ALONE = 8, 3, 1500, 400
GOAL, GOAL_P50_MS, GOAL_P99_MS = 1000, 3.0, 15.0
RAW = "raw"

Deliver = Callable[[int], Awaitable[None]]
"""Appends record number n and returns when the reader has it."""


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


@asynccontextmanager
async def ours(log: Log, rows: list[SegmentSample]) -> AsyncIterator[Deliver]:
    """Through EventLog: encode, append, read committed, decode."""
    waiting: dict[str, asyncio.Future[None]] = {}

    async def deliver(number: int) -> None:
        row = rows[number % len(rows)]
        row = dataclasses.replace(row, sample_id=str(number), group_id=digest("group", number))
        waiting[row.sample_id] = done = asyncio.get_running_loop().create_future()
        await events.append(row)
        await done

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
async def floor(bootstrap: str, size: int, rng: np.random.Generator) -> AsyncIterator[Deliver]:
    """Bare aiokafka: acks=all, idempotent, read_committed; the value is bytes."""
    waiting: dict[bytes, asyncio.Future[None]] = {}
    body = rng.bytes(size)

    async def deliver(number: int) -> None:
        key = digest("group", number).encode()
        waiting[key] = done = asyncio.get_running_loop().create_future()
        await producer.send_and_wait(RAW, body, key=key)
        await done

    async def receive() -> None:
        while True:
            for batch in (await consumer.getmany(timeout_ms=1000)).values():
                for record in batch:
                    waiting.pop(record.key).set_result(None)

    producer = AIOKafkaProducer(
        bootstrap_servers=bootstrap,
        acks="all",
        enable_idempotence=True,
        max_batch_size=1 << 20,
        max_request_size=8 << 20,
    )
    consumer = AIOKafkaConsumer(
        bootstrap_servers=bootstrap, isolation_level="read_committed", enable_auto_commit=False,
        max_partition_fetch_bytes=8 << 20,
    )  # fmt: skip
    places = [TopicPartition(RAW, number) for number in range(PARTITIONS)]
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


async def rate(deliver: Deliver, numbers: itertools.count[int]) -> float:
    """Records per second with IN_FLIGHT requests at once."""
    left = iter(range(PER_ROUND))

    async def worker() -> None:
        for _ in left:
            await deliver(next(numbers))

    started = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(IN_FLIGHT)))
    return PER_ROUND / (time.perf_counter() - started)


async def alone(deliver: Deliver, numbers: itertools.count[int]) -> list[float]:
    """Milliseconds from append to delivery, one at a time."""
    took = []
    for _ in range(ALONE):
        started = time.perf_counter()
        await deliver(next(numbers))
        took.append((time.perf_counter() - started) * 1000)
    return took


async def measure(bootstrap: str) -> int:
    """Alternate, then report."""
    rng, numbers = np.random.default_rng(0), itertools.count()
    rows = [sample(number, rng) for number in range(64)]
    log, synced = KafkaLog(bootstrap), KafkaLog(bootstrap, prefix="fsync-")
    large = {"max.message.bytes": str(MAX_MESSAGE_BYTES)}
    await log.create_topics([TopicSpec(name, PARTITIONS, 1, large) for name in (SAMPLES.name, RAW)])
    await synced.create_topics([TopicSpec(SAMPLES.name, PARTITIONS, 1, {**large, "flush.messages": "1"})])
    async with EventLog.open(log, MemoryRegistry(), writer="size") as events:
        size = len(events.codec.encode(rows[0]))
    got: dict[str, list[float]] = {"ours": [], "floor": [], "fsync": []}
    single: dict[str, list[float]] = {"ours": [], "floor": []}
    async with ours(log, rows) as here, floor(bootstrap, size, rng) as bare, ours(synced, rows) as flushed:
        for deliver in (here, bare, flushed):
            await rate(deliver, numbers)  # the broker compiles what it runs often
        for _ in range(ROUNDS):
            got["floor"].append(await rate(bare, numbers))
            got["ours"].append(await rate(here, numbers))
            got["fsync"].append(await rate(flushed, numbers))
            single["floor"] += await alone(bare, numbers)
            single["ours"] += await alone(here, numbers)
            say(f"samples/s: { ({name: round(values[-1]) for name, values in got.items()}) }")
    await log.close()
    await synced.close()
    value, p50, p99 = statistics.median(got["ours"]), percentile(single["ours"], 0.5), percentile(single["ours"], 0.99)
    return told(
        id="G1", value=round(value, 1), unit="samples/s", goal=GOAL,
        ok=value >= GOAL and p50 <= GOAL_P50_MS and p99 <= GOAL_P99_MS, floor=round(statistics.median(got["floor"]), 1),
        detail={
            "tokens": TOKENS, "bytes_per_sample": size, "in_flight": IN_FLIGHT, "rounds": got,
            "p50_ms": round(p50, 2), "p99_ms": round(p99, 2), "goal_p50_ms": GOAL_P50_MS, "goal_p99_ms": GOAL_P99_MS,
            "floor_p50_ms": round(percentile(single["floor"], 0.5), 2),
            "floor_p99_ms": round(percentile(single["floor"], 0.99), 2),
            "fsync_samples_per_s": round(statistics.median(got["fsync"]), 1),
            "floor_is": "bytes of the same size through bare aiokafka, neither encoded nor decoded",
            "one_process": "producer and reader share one Python process, as the broker shares its machine", **ACKS,
        },
    )  # fmt: skip


if __name__ == "__main__":
    with broker() as (address, _):
        raise SystemExit(uvloop.run(measure(address)))
