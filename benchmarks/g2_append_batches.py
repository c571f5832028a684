"""G2: durable append and delivery of 8,192-token samples in batches of 64.

A batch counts when a read_committed reader has decoded all of it. As in G1, rounds of ours and of the floor (the same
number of bytes through bare aiokafka, as many at once) alternate in the same run. Not shown: a reader in another
process.
"""

from __future__ import annotations

import itertools
import statistics

import numpy as np
import uvloop
from delivery import FLOOR_IS, ONE_PROCESS, TOKENS, alone, create_topics, encoded_size, floor, ours, rate, samples
from log_server import ACKS, LogServer, broker
from row import percentile, say, size, told

BATCH, IN_FLIGHT = 64, 8

ROUNDS, PER_ROUND, ALONE = size((5, 60, 10), smallest=(1, 2, 1))
GOAL, GOAL_SHARE = 3000, 0.8


async def measure(server: LogServer) -> int:
    """Alternate, then report."""
    rng, numbers, log = np.random.default_rng(0), itertools.count(), server.log()
    rows = samples(PER_ROUND * BATCH, rng)
    await create_topics(log)
    bytes_each = await encoded_size(log, rows[0])
    got: dict[str, list[float]] = {"floor": [], "ours": []}
    single: dict[str, list[float]] = {"floor": [], "ours": []}
    async with ours(log, rows) as here, floor(server, bytes_each, rng) as bare:
        ways = {"floor": bare, "ours": here}
        for deliver in ways.values():  # the broker compiles what it runs often
            await rate(deliver, numbers, PER_ROUND, of=BATCH, in_flight=IN_FLIGHT)
        for _ in range(ROUNDS):
            for name, deliver in ways.items():
                got[name].append(await rate(deliver, numbers, PER_ROUND, of=BATCH, in_flight=IN_FLIGHT))
                single[name] += await alone(deliver, numbers, ALONE, of=BATCH)
            say(f"samples/s: { ({name: round(values[-1]) for name, values in got.items()}) }")
    await log.close()
    value = statistics.median(got["ours"])
    return told(
        id="G2", value=value, unit="samples/s", goal=GOAL, rate=True, floor=statistics.median(got["floor"]),
        goal_share=GOAL_SHARE, met=value >= GOAL,
        detail={
            "tokens": TOKENS, "bytes_per_sample": bytes_each, "batch": BATCH, "in_flight": IN_FLIGHT, "rounds": got,
            "batch_p50_ms": round(percentile(single["ours"], 0.5), 2),
            "floor_batch_p50_ms": round(percentile(single["floor"], 0.5), 2),
            "floor_is": FLOOR_IS, "one_process": ONE_PROCESS, **ACKS,
        },
    )  # fmt: skip


if __name__ == "__main__":
    with broker() as server:
        raise SystemExit(uvloop.run(measure(server)))
