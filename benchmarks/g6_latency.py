"""G6: the last event of a group is on the log -> its samples can be read (read_committed).

One group after another, 8 sessions of 4 turns, 1,024 tokens each; the assembler works in the same process. Counted from
the acknowledgement of the last event to the moment when a reader holds the group's GroupScored. The floor of the same
run: one record consumed, one record written in a transaction, read by the same reader, through the bare log. All on
the event loop that roles run on. Not shown: groups that end together (G5 has them), and a reader in another process.
"""

from __future__ import annotations

import asyncio
import time

import numpy as np
import uvloop
from log_server import ACKS, LogServer, broker
from row import percentile, say, size, told

from tests.fakes.sessions import GroupName, Shape, whole_group
from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.event_log import EventLog
from turnlog.infra.log import Log, Partition, Reader, TopicSpec, partition_of
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.runs import Configured
from turnlog.infra.topics_admin import apply
from turnlog.processors.runtime.assembler import AssemblerRunner, assembler_plan
from turnlog.schemas.topics import SAMPLES
from turnlog.settings import Settings

GOAL_P50_MS, GOAL_P99_MS, GOAL_SHARE = 20.0, 200.0, 0.5
SIZE, TURNS, SHAPE = 8, 4, Shape(delta=128, output=128)
GROUPS, WARM_UP = size((200, 20), smallest=(3, 1))
SETTINGS = Settings()
UNITS = SETTINGS.kafka.groups
PLAN = assembler_plan(Configured.today(SETTINGS), SETTINGS.assembler)
QUESTION, ANSWER = "floor-question", "floor-answer"


async def until(reader: Reader, key: bytes, records: int) -> float:
    """When the reader holds so many records of the key."""
    found = 0
    while found < records:
        found += sum(record.key == key for record in await reader.poll(timeout_s=1.0))
    return time.perf_counter()


async def ours(events: EventLog, reader: Reader) -> list[float]:
    """Seconds per group."""
    rng = np.random.default_rng(0)
    ends = [0] * UNITS
    seconds: list[float] = []
    for number in range(GROUPS + WARM_UP):
        name = f"group-{number}"
        unit = partition_of(name.encode(), UNITS)
        group = GroupName(SETTINGS.run.id, name, ends[unit], SIZE)
        *most, last = whole_group(group, rng, turns=TURNS, shape=SHAPE)
        await asyncio.gather(*[await events.submit(event) for event in most])
        ends[unit] += 3 * SIZE
        await asyncio.sleep(0.02)  # what came before is folded
        arrival = asyncio.create_task(until(reader, name.encode(), SIZE + 1))
        await events.append(last)
        on_the_log = time.perf_counter()
        seconds.append(await arrival - on_the_log)
    return seconds[WARM_UP:]


async def bare(log: Log, reader: Reader) -> list[float]:
    """Seconds per question answered in a transaction."""
    seconds: list[float] = []

    async def answer() -> None:
        async with log.reader() as source, log.transactor("floor") as transactor:
            source.assign({Partition(QUESTION, 0): 0})
            while True:
                for record in await source.poll():
                    await transactor.begin()
                    await (await transactor.send(ANSWER, 0, record.key, record.value))
                    await transactor.commit()

    answering = asyncio.create_task(answer())
    async with log.appender() as appender:
        for number in range(GROUPS + WARM_UP):
            key = b"%d" % number
            arrival = asyncio.create_task(until(reader, key, 1))
            await appender.append(QUESTION, key, b"x")
            on_the_log = time.perf_counter()
            seconds.append(await arrival - on_the_log)
            await asyncio.sleep(0.02)
    answering.cancel()
    await asyncio.wait([answering])
    return seconds[WARM_UP:]


async def measure(server: LogServer) -> int:
    """The assembler and the floor; the exit status."""
    log = server.log()
    await apply(log, SETTINGS)
    await log.create_topics([TopicSpec(name, 1, 1, SAMPLES.config()) for name in (QUESTION, ANSWER)])
    async with EventLog.open(log, MemoryRegistry(), writer="bench") as events, log.reader() as reader:
        reader.assign({Partition(SAMPLES.name, unit): 0 for unit in range(UNITS)})
        stopping = asyncio.Event()
        runner = AssemblerRunner(PLAN, log, events, MemoryBlobs(), Health("assembler"), clock=time.monotonic)
        folding = asyncio.create_task(runner.run(stopping, instance="bench"))
        say(f"{GROUPS} groups, one after another")
        seconds = await ours(events, reader)
        stopping.set()
        await folding
    async with log.reader() as reader:
        reader.assign({Partition(ANSWER, 0): 0})
        floor = await bare(log, reader)
    await log.close()
    p50, p99 = percentile(seconds, 0.5) * 1000, percentile(seconds, 0.99) * 1000
    return told(
        id="G6",
        value=p50,
        unit="ms (p50)",
        goal=GOAL_P50_MS,
        floor=percentile(floor, 0.5) * 1000,
        goal_share=GOAL_SHARE,
        met=p50 <= GOAL_P50_MS and p99 <= GOAL_P99_MS,
        detail={
            "p99_ms": round(p99, 2),
            "goal_p99_ms": GOAL_P99_MS,
            "floor_p99_ms": round(percentile(floor, 0.99) * 1000, 2),
            "floor_is": "one record consumed, one written in a transaction, read committed: nothing decoded or folded",
            "groups": GROUPS,
            "samples_per_group": SIZE,
            "tokens_per_sample": TURNS * (SHAPE.delta + SHAPE.output),
            **ACKS,
        },
    )


def main() -> int:
    """One broker, one run."""
    with broker() as server:
        return uvloop.run(measure(server))


if __name__ == "__main__":
    raise SystemExit(main())
