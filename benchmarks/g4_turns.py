"""G4: turn ingest. Each turn is a TurnCompleted and a TokenSnapshot: 512 new tokens on a context of 4,096, of which 256
are new to the log (the delta: what the tool or the user said). 64 sessions at once, each waits for both acks=all.

The rate counts turns that another process, as a dashboard or an assembler would be, has read and decoded. Bytes per
turn are the growth of the broker's log files. The floor of the same run: the same bytes through bare aiokafka. Not
shown: the gateway that makes the turns (T2), and compression, which is off (`zstd_of_a_batch` says what it would do).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np
import uvloop
from aiokafka import AIOKafkaProducer
from aiokafka.codec import zstd_encode
from log_server import ACKS, LogServer, broker, logprobs, token_ids
from row import say, size, told

from turnlog.infra.event_log import EventLog
from turnlog.infra.kafka import KafkaLog
from turnlog.infra.log import Log, Partition, TopicSpec
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.session_keys import MasterKeys, SessionKeys
from turnlog.schemas.events import Boundary, FinishReason, TokenSnapshot, TurnCompleted, VersionSpan
from turnlog.schemas.ids import digest
from turnlog.schemas.topics import MAX_MESSAGE_BYTES, SNAPSHOTS, TURNS
from turnlog.schemas.types import TurnId

CONTEXT, DELTA, NEW, PARTITIONS, SESSIONS = 4096, 256, 512, 4, 64
WARM, ROUNDS, TURNS_PER_ROUND = size((1000, 3, 4000), smallest=(64, 1, 64))
GOAL, GOAL_BYTES, GOAL_SHARE = 1500, 10_000, 0.65
TOPICS = (TURNS.name, SNAPSHOTS.name)
RAW = "raw"
WORDS = [
    "the",
    "of",
    "model",
    "value",
    "returns",
    "42",
    "def",
    "call",
    "result",
    "error",
    "list",
    "is",
    "0.5",
    "{",
    "}",
]

Turn = tuple[TurnCompleted, TokenSnapshot]


def turn(number: int, rng: np.random.Generator) -> Turn:
    """One turn in the middle of a conversation; text of four characters a token."""
    session, group = digest("session", number % SESSIONS), digest("group", number % SESSIONS)
    this, before = TurnId(digest("epoch", session), number), TurnId(digest("epoch", session), number - 1)
    completed = TurnCompleted(
        event_id=digest("TurnCompleted", number), run_id="bench", group_id=group, session_id=session, floor=0,
        turn=this, request_sha256="a" * 64, api="chat", base_turn=before, system_sha256="b" * 64, tools_sha256="c" * 64,
        new_messages=message("tool", DELTA, rng), response=message("assistant", NEW, rng),
        finish_reason=FinishReason.tool_calls, aborted=False, prompt_tokens=CONTEXT, output_tokens=NEW,
        cached_tokens=CONTEXT - DELTA, weight_version_first=3, weight_version_last=3, queue_s=0.01, first_token_s=0.2,
        total_s=4.0, engine_id="engine-0",
    )  # fmt: skip
    snapshot = TokenSnapshot(
        event_id=digest("TokenSnapshot", number), run_id="bench", group_id=group, session_id=session, floor=0,
        turn=this, parent_turn=before, base_len=CONTEXT - DELTA, delta_ids=token_ids(rng, DELTA),
        output_ids=token_ids(rng, NEW), output_logprobs=logprobs(rng, NEW), version_spans=(VersionSpan(3, NEW),),
        boundary=Boundary.append, boundary_reason="append", prompt_sha256="d" * 64, temperature=1.0,
        logprob_kind="at_temperature",
    )  # fmt: skip
    return completed, snapshot


def message(role: str, tokens: int, rng: np.random.Generator) -> bytes:
    """A chat message of about four characters a token."""
    words = " ".join(rng.choice(WORDS, tokens))[: 4 * tokens]
    return json.dumps({"role": role, "content": words}).encode()


async def ingest(append: Callable[[int], Awaitable[None]], count: int) -> None:
    """`count` turns, SESSIONS at once."""
    left = iter(range(count))

    async def session() -> None:
        for number in left:
            await append(number)

    await asyncio.gather(*(session() for _ in range(SESSIONS)))


async def measure(server: LogServer) -> int:
    """Alternate ours and the floor, then report."""
    rng, log = np.random.default_rng(0), server.log()
    turns = [turn(number, rng) for number in range(256)]
    config = {"max.message.bytes": str(MAX_MESSAGE_BYTES)}
    await log.create_topics([TopicSpec(name, PARTITIONS, 1, config) for name in (*TOPICS, RAW)])
    rates: dict[str, list[float]] = {"delivered": [], "acknowledged": [], "floor": []}
    bare = AIOKafkaProducer(
        bootstrap_servers=server.bootstrap, acks="all", enable_idempotence=True, max_batch_size=1 << 20
    )
    async with bare, EventLog.open(log, MemoryRegistry(), writer="gateway-0") as events:
        encoded = [tuple(events.codec.encode(event) for event in pair) for pair in turns]

        async def append(number: int) -> None:
            completed, snapshot = turns[number % len(turns)]
            await asyncio.gather(await events.submit(completed), await events.submit(snapshot, output_tokens=NEW))

        async def raw(number: int) -> None:
            key = turns[number % len(turns)][0].group_id.encode()
            sent = [await bare.send(server.prefix + RAW, value, key=key) for value in encoded[number % len(turns)]]
            await asyncio.gather(*sent)

        await ingest(append, WARM)
        await ingest(raw, WARM)
        before = server.written(TOPICS)
        for _ in range(ROUNDS):
            found = await delivered_rate(server, log, append)
            rates["acknowledged"].append(found.acknowledged)
            rates["delivered"].append(found.delivered)
            started = time.perf_counter()
            await ingest(raw, TURNS_PER_ROUND)
            rates["floor"].append(TURNS_PER_ROUND / (time.perf_counter() - started))
            say(f"turns/s: { ({name: round(values[-1]) for name, values in rates.items()}) }")
    await log.close()
    bytes_each = (server.written(TOPICS) - before) / (ROUNDS * TURNS_PER_ROUND)
    value = statistics.median(rates["delivered"])
    return told(
        id="G4", value=value, unit="turns/s", goal=GOAL, rate=True, floor=statistics.median(rates["floor"]),
        goal_share=GOAL_SHARE, met=value >= GOAL and bytes_each <= GOAL_BYTES,
        detail={
            "bytes_per_turn_on_the_log": round(bytes_each), "goal_bytes": GOAL_BYTES, "context_tokens": CONTEXT,
            "delta_tokens": DELTA, "new_tokens": NEW, "sessions": SESSIONS, "rounds": rates,
            "zstd_of_a_batch": compressed(encoded),
            "floor_is": "the same bytes through bare aiokafka, neither encoded, read nor decoded", **ACKS,
        },
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rates:
    """What one round gave."""

    acknowledged: float
    """Turns/s until all are acknowledged."""
    delivered: float
    """Turns/s until another process has read and decoded all of them."""
    core_ms: float
    """CPU of both processes, in ms a turn."""


async def delivered_rate(
    server: LogServer, log: Log, append: Callable[[int], Awaitable[None]], *, part: str = "", master: str = ""
) -> Rates:
    """Run a round. `part`: of the benchmark's topics; `master`: the key under which their content is encrypted."""
    ends = await log.end_offsets(places())
    starts = json.dumps({f"{place.topic}/{place.number}": end for place, end in ends.items()})
    reader = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--read", server.bootstrap, server.prefix + part, starts, str(TURNS_PER_ROUND),
        master, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert reader.stdout is not None
    await reader.stdout.readline()  # it is there
    started, cpu_s = time.perf_counter(), time.process_time()
    await ingest(append, TURNS_PER_ROUND)
    acknowledged = TURNS_PER_ROUND / (time.perf_counter() - started)
    theirs_s = float(await reader.stdout.readline())  # it has them all
    delivered = TURNS_PER_ROUND / (time.perf_counter() - started)
    core_ms = 1e3 * (time.process_time() - cpu_s + theirs_s) / TURNS_PER_ROUND
    await reader.wait()
    return Rates(acknowledged, delivered, core_ms)


def keys_of(master: str) -> SessionKeys | None:
    """Keys of sessions under a master key; None without one."""
    return SessionKeys(MasterKeys(master), "bench") if master else None


async def read(bootstrap: str, prefix: str, starts: dict[str, int], turns: int, master: str) -> None:
    """The other process: decode every record of both topics; a line when ready, and its CPU seconds when done."""
    log = KafkaLog(bootstrap, prefix=prefix)
    opened = EventLog.open(log, MemoryRegistry(), writer="reader", keys=keys_of(master))
    async with opened as events, log.reader() as reader:
        reader.assign({Partition(*_place(name)): offset for name, offset in starts.items()})
        await reader.poll(timeout_s=0.05)
        print("ready", flush=True)
        left, cpu_s = 2 * turns, time.process_time()
        while left:
            for record in await reader.poll(max_records=2000, timeout_s=1.0):
                assert (await events.decode(record)).turn
                left -= 1
        print(time.process_time() - cpu_s, flush=True)
    await log.close()


def places() -> list[Partition]:
    """Both topics' partitions."""
    return [Partition(topic, number) for topic in TOPICS for number in range(PARTITIONS)]


def _place(name: str) -> tuple[str, int]:
    topic, _, number = name.rpartition("/")
    return topic, int(number)


def compressed(encoded: list[tuple[bytes, ...]]) -> dict[str, float]:
    """What zstd would save on the bytes of one broker batch, and how fast one core does it."""
    batch = b"".join(itertools.chain.from_iterable(encoded))[: 1 << 20]
    started = time.process_time()
    size = len(zstd_encode(batch))
    return {
        "ratio": round(len(batch) / size, 2),
        "mb_per_cpu_s": round(len(batch) / (time.process_time() - started) / 1e6, 1),
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--read"]:
        uvloop.run(read(sys.argv[2], sys.argv[3], json.loads(sys.argv[4]), int(sys.argv[5]), sys.argv[6]))
    else:
        with broker() as server:
            raise SystemExit(uvloop.run(measure(server)))
