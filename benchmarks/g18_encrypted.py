"""G18: turn ingest as in G4, with the content of sessions encrypted ([erasure] master_keys), beside G4 in the same run.

Rounds alternate. The floor is G4 itself, and the share must be 0.9 at least: encryption may cost a tenth. Both
processes pay for it, the writer and the reader; `core_ms` is the CPU of both, a turn.
"""

from __future__ import annotations

import asyncio
import statistics

import numpy as np
import uvloop
from g4_turns import (
    NEW,
    PARTITIONS,
    ROUNDS,
    SESSIONS,
    TOPICS,
    TURNS_PER_ROUND,
    WARM,
    Rates,
    Turn,
    delivered_rate,
    ingest,
    keys_of,
    turn,
)
from log_server import ACKS, LogServer, broker
from row import say, told

from turnlog.infra.event_log import EventLog
from turnlog.infra.log import Log, TopicSpec
from turnlog.infra.registry import MemoryRegistry
from turnlog.schemas.topics import MAX_MESSAGE_BYTES, SESSION_KEYS

MASTER = "a-master-key-of-a-benchmark"
GOAL_SHARE = 0.9
PARTS = {"plain": "", "encrypted": MASTER}


async def measure(server: LogServer) -> int:
    """Alternate both, then report."""
    rng = np.random.default_rng(0)
    turns = [turn(number, rng) for number in range(256)]
    found: dict[str, list[Rates]] = {part: [] for part in PARTS}
    logs = {part: server.log(f"{part}-") for part in PARTS}
    for log in logs.values():
        config = {"max.message.bytes": str(MAX_MESSAGE_BYTES)}
        await log.create_topics([TopicSpec(name, PARTITIONS, 1, config) for name in TOPICS])
        await log.create_topics([TopicSpec(SESSION_KEYS.name, 1, 1, SESSION_KEYS.config())])
    for number in range(ROUNDS + 1):  # the first one warms up
        for part, log in logs.items():
            rates = await _round(server, log, part, turns)
            if number:
                found[part].append(rates)
                say(f"{part}: {rates.delivered:.0f} turns/s, {rates.core_ms:.3f} core-ms a turn")
    for log in logs.values():
        await log.close()
    delivered = {part: statistics.median(rates.delivered for rates in each) for part, each in found.items()}
    core_ms = {part: round(statistics.median(rates.core_ms for rates in each), 4) for part, each in found.items()}
    return told(
        id="G18", value=delivered["encrypted"], unit="turns/s", goal=None, rate=True, floor=delivered["plain"],
        goal_share=GOAL_SHARE, met=True,
        detail={
            "core_ms_per_turn": core_ms, "more_core_ms_share": round(core_ms["encrypted"] / core_ms["plain"] - 1, 4),
            "turns_per_round": TURNS_PER_ROUND, "rounds": ROUNDS, "sessions": SESSIONS,
            "floor_is": "G4: the same turns in the same run, not encrypted", **ACKS,
        },
    )  # fmt: skip


async def _round(server: LogServer, log: Log, part: str, turns: list[Turn]) -> Rates:
    opened = EventLog.open(log, MemoryRegistry(), writer="gateway-0", keys=keys_of(PARTS[part]))
    async with opened as events:

        async def append(number: int) -> None:
            completed, snapshot = turns[number % len(turns)]
            await asyncio.gather(await events.submit(completed), await events.submit(snapshot, output_tokens=NEW))

        await ingest(append, WARM)
        return await delivered_rate(server, log, append, part=f"{part}-", master=PARTS[part])


if __name__ == "__main__":
    with broker() as server:
        raise SystemExit(uvloop.run(measure(server)))
