"""G16: what one more analytics consumer costs the loop: the assembler flat out, without and with a follower.

Pairs of rounds on one broker, each on topics of its own, in the order A B B A, so that what the machine does besides
falls on both. The follower is another process under its own group; it decodes every tree, sample and score as they are
committed. `spread_percent` is how far the rounds without a follower lie apart: below it nothing can be seen. The detail
has the CPU time of the loop's own processes, assembler and broker, too: it hardly depends on who else uses the
cores, while the wall time of a full machine also misses what the follower itself computes.
"""

from __future__ import annotations

import asyncio
import resource
import statistics
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple

import psutil
from assembling import assemble, write_groups
from log_server import ACKS, LogServer, broker
from row import say, size, told

from tests.fakes.sessions import Shape
from turnlog.consumers.follow import follow_on
from turnlog.infra.event_log import EventLog
from turnlog.infra.kafka import KafkaLog
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.topics_admin import apply
from turnlog.processors.core.fold_versions import OUTPUTS
from turnlog.schemas.avsc import stored_schema
from turnlog.schemas.events import ALL
from turnlog.settings import Settings

GOAL_PERCENT = 5.0
ORDER, GROUPS = size(("ABBAABBA", 60), smallest=("AB", 2))
"""A: alone, B: with the follower."""
SIZE, TURNS, SHAPE = 8, 8, Shape(delta=512, output=512)
OUTPUT_EVENTS = GROUPS * (2 * SIZE + 1)
"""A tree and a sample of each session, a score of each group."""
SETTINGS = Settings()
UNITS = SETTINGS.kafka.groups


class Round(NamedTuple):
    """What one round cost."""

    samples_per_s: float
    cpu_s: float
    follower_cpu_s: float = 0.0


async def follow(bootstrap: str, prefix: str) -> None:
    """The follower: every tree, sample and score. Says when it has its partitions, and what it cost in the end."""
    log, registry = KafkaLog(bootstrap, prefix=prefix), MemoryRegistry()
    for name in ALL:
        await registry.register(name, stored_schema(name))
    seen = 0
    async with follow_on(log, registry, OUTPUTS, group="follower", until_end=False, commit_s=1.0) as events:
        await events.reader.poll(timeout_s=10)  # nothing is there yet: it comes back with the assignment
        print("ready", flush=True)
        async for _ in events:
            seen += 1
            if seen == OUTPUT_EVENTS:
                break
    await log.close()
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(round(used.ru_utime + used.ru_stime, 2), flush=True)


@asynccontextmanager
async def followed(server: LogServer, part: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A follower that has its partitions."""
    command = (sys.executable, __file__, server.bootstrap, server.prefix + part)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            assert await process.stdout.readline() == b"ready\n"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def loop_cpu() -> float:
    """CPU seconds so far of this process, which is the assembler, and of the broker."""
    processes = [psutil.Process(), *(child for child in psutil.Process().children() if child.name() == "java")]
    return sum(sum(process.cpu_times()[:2]) for process in processes)


async def turn(server: LogServer, kind: str, number: int) -> Round:
    """One round."""
    part = f"{kind.lower()}{number}-"
    log = server.log(part)
    await apply(log, SETTINGS)
    followers: list[float] = []
    async with EventLog.open(log, MemoryRegistry(), writer="bench") as events, AsyncExitStack() as stack:
        await write_groups(events, SETTINGS, groups=GROUPS, size=SIZE, turns=TURNS, shape=SHAPE)
        process = None if kind == "A" else await stack.enter_async_context(followed(server, part))
        before = loop_cpu()
        seconds = await assemble(log, events, SETTINGS)
        if process is not None and process.stdout is not None:
            async with asyncio.timeout(60):
                followers.append(float(await process.stdout.readline()))
        cpu = loop_cpu() - before
    await log.close()
    say(f"{kind}: {GROUPS * SIZE / seconds:,.0f} samples/s, {cpu:.2f} s of CPU")
    return Round(GROUPS * SIZE / seconds, cpu, *followers)


async def measure(server: LogServer) -> int:
    """All rounds; the exit status."""
    await turn(server, "A", -1)  # warms the broker and every import
    rounds: dict[str, list[Round]] = {"A": [], "B": []}
    for number, kind in enumerate(ORDER):
        rounds[kind].append(await turn(server, kind, number))
    alone, together = ([one.cpu_s for one in rounds[kind]] for kind in "AB")
    growth = 100 * (statistics.median(together) / statistics.median(alone) - 1)
    rates = {kind: [round(one.samples_per_s) for one in rounds[kind]] for kind in "AB"}
    rate = statistics.median(rates["A"])
    loss = 100 * (1 - statistics.median(rates["B"]) / rate)
    return told(
        id="G16",
        value=round(loss, 1),
        unit="% of throughput",
        goal=GOAL_PERCENT,
        met=loss <= GOAL_PERCENT,
        detail={
            "spread_percent": round(100 * (max(rates["A"]) - min(rates["A"])) / rate, 1),
            "cpu_s_alone": [round(seconds, 2) for seconds in alone],
            "cpu_s_followed": [round(seconds, 2) for seconds in together],
            "samples_per_s_alone": rates["A"],
            "samples_per_s_followed": rates["B"],
            "cpu_growth_percent": round(growth, 1),
            "follower_cpu_s": [one.follower_cpu_s for one in rounds["B"]],
            "events_followed": OUTPUT_EVENTS,
            "does_not_show": "a follower on a machine of its own, which takes no core from the assembler",
            **ACKS,
        },
    )


def main() -> int:
    """The follower when it is told where; else one broker and every round."""
    if len(sys.argv) == 3:
        asyncio.run(follow(*sys.argv[1:]))
        return 0
    with broker() as server:
        return asyncio.run(measure(server))


if __name__ == "__main__":
    raise SystemExit(main())
