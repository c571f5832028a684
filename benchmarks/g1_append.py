"""G1: durable append and delivery of 8,192-token samples, one SegmentSample per request.

A sample counts when a read_committed reader has decoded it. Rounds of ours and of the floor (the same number of bytes
through bare aiokafka, neither encoded nor decoded) alternate in the same run, on the same broker and event loop. Not
shown: a reader in another process, which would have a core of its own.
"""

from __future__ import annotations

import itertools
import statistics

import numpy as np
import uvloop
from delivery import FLOOR_IS, ONE_PROCESS, TOKENS, alone, create_topics, encoded_size, floor, ours, rate, samples
from log_server import ACKS, LogServer, broker
from row import percentile, say, size, told

IN_FLIGHT = 8
ROUNDS, PER_ROUND, ALONE = size((3, 1500, 400), smallest=(1, 16, 4))
GOAL, GOAL_P50_MS, GOAL_P99_MS, GOAL_SHARE = 1000, 3.0, 15.0, 0.9


async def measure(server: LogServer) -> int:
    """Alternate, then report."""
    rng, numbers = np.random.default_rng(0), itertools.count()
    rows = samples(PER_ROUND, rng)
    log, synced = server.log(), server.log("fsync-")
    await create_topics(log)
    await create_topics(synced, fsync=True)
    bytes_each = await encoded_size(log, rows[0])
    got: dict[str, list[float]] = {"ours": [], "floor": [], "fsync": []}
    single: dict[str, list[float]] = {"ours": [], "floor": []}
    async with ours(log, rows) as here, floor(server, bytes_each, rng) as bare, ours(synced, rows) as flushed:
        ways = {"floor": bare, "ours": here, "fsync": flushed}
        for deliver in ways.values():  # the broker compiles what it runs often
            await rate(deliver, numbers, PER_ROUND, of=1, in_flight=IN_FLIGHT)
        for _ in range(ROUNDS):
            for name, deliver in ways.items():
                got[name].append(await rate(deliver, numbers, PER_ROUND, of=1, in_flight=IN_FLIGHT))
            for name in single:
                single[name] += await alone(ways[name], numbers, ALONE, of=1)
            say(f"samples/s: { ({name: round(values[-1]) for name, values in got.items()}) }")
    await log.close()
    await synced.close()
    value, p50, p99 = statistics.median(got["ours"]), percentile(single["ours"], 0.5), percentile(single["ours"], 0.99)
    return told(
        id="G1", value=value, unit="samples/s", goal=GOAL, rate=True, floor=statistics.median(got["floor"]),
        goal_share=GOAL_SHARE, met=value >= GOAL and p50 <= GOAL_P50_MS and p99 <= GOAL_P99_MS,
        detail={
            "tokens": TOKENS, "bytes_per_sample": bytes_each, "in_flight": IN_FLIGHT, "rounds": got,
            "p50_ms": round(p50, 2), "p99_ms": round(p99, 2), "goal_p50_ms": GOAL_P50_MS, "goal_p99_ms": GOAL_P99_MS,
            "floor_p50_ms": round(percentile(single["floor"], 0.5), 2),
            "floor_p99_ms": round(percentile(single["floor"], 0.99), 2),
            "fsync_samples_per_s": round(statistics.median(got["fsync"]), 1),
            "floor_is": FLOOR_IS, "one_process": ONE_PROCESS, **ACKS,
        },
    )  # fmt: skip


if __name__ == "__main__":
    with broker() as server:
        raise SystemExit(uvloop.run(measure(server)))
