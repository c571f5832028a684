"""G10: the dataset of a run rebuilt from its topics: everything folded again and held against what was emitted.

Samples of 8 turns and 8,192 tokens, half of them sampled, as in G5. Measured: `turnlog replay --verify` from opening
its readers to its verdict, in one process. The floor of the same run: the same records of the same topics polled once,
with nothing decoded, folded or hashed. Beside it, the same replay from an archive in memory.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import uvloop
from assembling import assemble, write_groups
from log_server import ACKS, LogServer, broker
from row import say, size, told

from tests.fakes.sessions import Shape
from turnlog.consumers.archiver import flush
from turnlog.consumers.replay.verify import ReplayResult, run
from turnlog.infra.archive import ArchiveLog
from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.event_log import EventLog
from turnlog.infra.log import Log, Partition
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.role import Role
from turnlog.infra.roles.runs import configuration
from turnlog.infra.topics_admin import apply
from turnlog.processors.core.fold_versions import INPUTS, OUTPUTS
from turnlog.settings import Settings

GOAL_TOKENS, GOAL_SHARE = 2_000_000, 0.35
SIZE, TURNS, SHAPE = 8, 8, Shape(delta=512, output=512)
GROUPS, ROUNDS = size((100, 3), smallest=(2, 1))
"""The best round counts: the machine is shared."""
TOKENS = TURNS * (SHAPE.delta + SHAPE.output)
SETTINGS = Settings()
UNITS = SETTINGS.kafka.groups


async def write(events: EventLog) -> None:
    """The run's settings, then every group, session after session."""
    await events.append(configuration(SETTINGS))
    await write_groups(events, SETTINGS, groups=GROUPS, size=SIZE, turns=TURNS, shape=SHAPE)


async def bare(log: Log) -> tuple[float, int]:
    """Seconds to poll every input and output once, and their bytes."""
    size = 0
    started = time.perf_counter()
    for unit in range(UNITS):
        names = [Partition(topic, unit) for topic in (*INPUTS, *OUTPUTS)]
        ends = await log.end_offsets(names)
        async with log.reader() as reader:
            reader.assign(dict.fromkeys(names, 0))
            while any(reader.position(name) < end for name, end in ends.items()):
                size += sum(len(record.key) + len(record.value) for record in await reader.poll())
    return time.perf_counter() - started, size


async def timed(role: Role) -> tuple[float, float, ReplayResult]:
    """Seconds of one replay, by the clock and of this process's processor time."""
    started, busy = time.perf_counter(), time.process_time()
    verdict = await run(role)
    return time.perf_counter() - started, time.process_time() - busy, verdict


async def measure(server: LogServer) -> int:
    """Write, assemble, replay, floor; the exit status."""
    log, blobs = server.log(), MemoryBlobs()
    await apply(log, SETTINGS)
    async with EventLog.open(log, MemoryRegistry(), writer="bench") as events:
        say(f"writing {GROUPS * SIZE} sessions of {TOKENS} tokens")
        await write(events)
        await assemble(log, events, SETTINGS)
        role = Role("replay", "bench", SETTINGS, log, events, blobs, Health("replay"))
        rounds = [await timed(role) for _ in range(ROUNDS)]
        floor, bytes_read = min([await bare(log) for _ in range(ROUNDS)])
        say("archiving")
        await flush(dataclasses.replace(role, name="archive"))
    archive = await ArchiveLog.open(blobs, SETTINGS.run.id)
    reader = Role("replay", "bench", SETTINGS, archive, archive.events(writer="bench"), blobs, Health("replay"))
    archived, _, again = await timed(reader)
    await log.close()
    seconds, busy, verdict = min(rounds, key=lambda each: each[0])
    tokens = GROUPS * SIZE * TOKENS
    whole = verdict.identical and again.identical and verdict.samples_compared == GROUPS * SIZE
    stored = sum(len(body) for name, body in blobs.named.items() if Path(name).suffix == ".avro")
    return told(
        id="G10",
        value=round(tokens / seconds),
        unit="tokens/s",
        goal=GOAL_TOKENS,
        rate=True,
        floor=round(tokens / floor),
        goal_share=GOAL_SHARE,
        met=whole and tokens / seconds >= GOAL_TOKENS,
        detail={
            "hashes_equal": whole,
            "samples": verdict.samples_compared,
            "records_compared": verdict.records_compared,
            "tokens_per_sample": TOKENS,
            "seconds": round(seconds, 2),
            "seconds_of_rounds": [round(each[0], 2) for each in rounds],
            "tokens_per_processor_second": round(tokens / busy),
            "floor_seconds": round(floor, 2),
            "floor_is": "the same records of inputs and outputs polled once, nothing decoded, folded or hashed",
            "bytes_read": bytes_read,
            "from_archive_tokens_per_s": round(tokens / archived),
            "archive_bytes": stored,
            **ACKS,
        },
    )


def main() -> int:
    """One broker, one run."""
    with broker() as server:
        return uvloop.run(measure(server))


if __name__ == "__main__":
    raise SystemExit(main())
