"""G5: agent events that lie on Kafka -> tree -> segments -> advantage -> samples, in one process, broker included.

Samples of 8 turns and 8,192 tokens, half of them sampled. Measured from the assignment of the units to the commit of
the last group, on the event loop that the role runs on; the median of rounds, after one in which the broker compiles
what it runs often. The floor of the same round: the same bytes consumed and the same outputs produced, in transactions
of the same units, through the bare log: nothing decoded, nothing folded.
Not shown: agents that write at the same time, and a broker on another machine (this one shares ours).
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence

import uvloop
from assembling import assemble, write_groups
from log_server import ACKS, LogServer, broker
from row import say, size, told

from tests.fakes.sessions import Shape
from turnlog.infra.event_log import EventLog
from turnlog.infra.log import Log, Partition, Record, TopicSpec
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.topics_admin import apply
from turnlog.processors.core.fold_versions import INPUTS, OUTPUTS
from turnlog.processors.runtime.unit import records_between
from turnlog.schemas.topics import SAMPLES
from turnlog.settings import Settings

GOAL_SAMPLES, GOAL_TOKENS, GOAL_SHARE = 300, 2_000_000, 0.6
SIZE, TURNS, SHAPE = 8, 8, Shape(delta=512, output=512)
GROUPS, ROUNDS = size((100, 3), smallest=(2, 1))
TOKENS = TURNS * (SHAPE.delta + SHAPE.output)
SETTINGS = Settings()
UNITS = SETTINGS.kafka.groups
FLOOR = "floor"
PER_TRANSACTION = 18
"""Outputs per transaction of the floor: two groups, about what the runner commits at once."""


async def read_all(log: Log, topics: Sequence[str]) -> list[Record]:
    """Every committed record. The ends are those of uncommitted reads: the broker answers a commit before its marker
    is written, and a reader waits for the marker."""
    names = [Partition(topic, unit) for topic in topics for unit in range(UNITS)]
    ends = await log.end_offsets(names, committed=False)
    return [record for name in names async for record in records_between(log, name, 0, ends[name])]


async def bare(log: Log, outputs: list[Record]) -> float:
    """Seconds of the floor: poll all inputs once, write all outputs once."""
    names = [Partition(topic, unit) for topic in INPUTS for unit in range(UNITS)]
    ends = await log.end_offsets(names)
    started = time.perf_counter()
    async with log.reader() as reader:
        reader.assign(dict.fromkeys(names, 0))
        while any(reader.position(name) < end for name, end in ends.items()):
            await reader.poll()
    reading = time.perf_counter() - started

    async def unit(number: int) -> None:
        mine = [record for record in outputs if record.partition == number]
        async with log.transactor(f"floor.{number}") as transactor:
            for at in range(0, len(mine), PER_TRANSACTION):
                await transactor.begin()
                part = mine[at : at + PER_TRANSACTION]
                await asyncio.gather(*[await transactor.send(FLOOR, number, r.key, r.value) for r in part])
                await transactor.commit()

    started = time.perf_counter()
    await asyncio.gather(*(unit(number) for number in range(UNITS)))
    return reading + time.perf_counter() - started


async def one_round(server: LogServer, part: str) -> tuple[float, float, float, int]:
    """On topics of its own: seconds of ours, of our process's CPU, of the floor; bytes of the outputs."""
    log = server.log(part)
    await apply(log, SETTINGS)
    await log.create_topics([TopicSpec(FLOOR, UNITS, 1, SAMPLES.config())])
    async with EventLog.open(log, MemoryRegistry(), writer="bench") as events:
        await write_groups(events, SETTINGS, groups=GROUPS, size=SIZE, turns=TURNS, shape=SHAPE)
        cpu = time.process_time()
        seconds = await assemble(log, events, SETTINGS)
        cpu = time.process_time() - cpu
    outputs = await read_all(log, OUTPUTS)
    assert len(outputs) == 2 * GROUPS * SIZE + GROUPS, "a tree and a sample per session, a score per group"
    floor_seconds = await bare(log, outputs)
    await log.close()
    say(f"{part}: {GROUPS * SIZE / seconds:.0f} samples/s, floor {GROUPS * SIZE / floor_seconds:.0f}")
    return seconds, cpu, floor_seconds, sum(len(record.value) for record in outputs)


async def measure(server: LogServer) -> int:
    """Warm up, then the rounds; the exit status."""
    say(f"rounds of {GROUPS * SIZE} sessions of {TOKENS} tokens")
    await one_round(server, "warm-up-")
    rounds = [await one_round(server, f"round-{number}-") for number in range(ROUNDS)]
    samples = GROUPS * SIZE
    rates = [samples / seconds for seconds, _, _, _ in rounds]
    rate = statistics.median(rates)
    return told(
        id="G5",
        value=rate,
        unit="samples/s",
        goal=GOAL_SAMPLES,
        rate=True,
        floor=statistics.median(samples / seconds for _, _, seconds, _ in rounds),
        goal_share=GOAL_SHARE,
        met=rate >= GOAL_SAMPLES and rate * TOKENS >= GOAL_TOKENS,
        detail={
            "tokens_per_s": round(rate * TOKENS),
            "goal_tokens_per_s": GOAL_TOKENS,
            "rounds": [round(each, 1) for each in rates],
            "cpu_us_per_sample": round(statistics.median(cpu for _, cpu, _, _ in rounds) / samples * 1e6),
            "samples": samples,
            "tokens_per_sample": TOKENS,
            "turns_per_sample": TURNS,
            "output_bytes_per_token": round(rounds[0][3] / samples / TOKENS, 2),
            "floor_is": "the same bytes read and written in transactions, nothing decoded or folded",
            **ACKS,
        },
    )


def main() -> int:
    """One broker."""
    with broker() as server:
        return uvloop.run(measure(server))


if __name__ == "__main__":
    raise SystemExit(main())
