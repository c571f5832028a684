"""G9: a killed role writes its first new output, whatever the length of the run behind it.

Per size of history (past.py: sessions that ended, were scored, drawn, trained and published, appended directly, one run
a size on one broker), each role is started as a process of its own on a log that asks something of it (restarts.py),
and killed when a read_committed reader holds its first answer: Python's own start is in the figure. The sizes take
turns. The value is the slowest role's p50 at the largest size, the floor the same role's p50 at the smallest: a longer
history may cost a fifth of it and half a second. The loader works in this process, on an engine in memory; of the
trainer only what it reads of the past is timed. The broker is killed, too: until an append is acknowledged. Beside it:
bytes of the control topics per session, and the assembler's restart under a group that is open since the run began.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import statistics
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from chaos.servers import servers
from past import PROMPTS, SESSIONS_PER_DRAW, Past
from restarts import Restarts
from row import say, size, told

from tests.fakes.weights import version
from tests.tiny_model import make_tiny_model
from turnlog.infra.embedded.broker import Broker
from turnlog.infra.embedded.broker_cluster import Brokers
from turnlog.infra.environments.sources import task_source
from turnlog.infra.history import partitions
from turnlog.infra.kafka import KafkaLog
from turnlog.infra.log import LogError
from turnlog.infra.roles.role import Role, open_role
from turnlog.infra.topics_admin import apply
from turnlog.producers.tasks import DATASET_FILE, provided_dataset, read_dataset
from turnlog.schemas import topics
from turnlog.schemas.events import WeightVersionPublished
from turnlog.schemas.topics import CONTROL, SESSIONS, SNAPSHOTS, TURNS, Topic
from turnlog.settings import Settings
from turnlog.trainer.weights import read_weights

SIZES = size((1_000, 10_000, 100_000), smallest=(20, 200))
RESTARTS = size(5, smallest=1)
ALL = ("feeder", "gateway", "runner", "sandbox", "assembler", "batcher", "trainer", "loader", "archive", "views")
ROLES = tuple(filter(None, os.environ.get("BENCH_ROLES", "").split(","))) or size(ALL, smallest=("assembler",))
PINNED = "assembler, one group open since the run began"
GOAL_S, GROWTH, MARGIN_S, BROKER_GOAL_S = 5.0, 1.2, 0.5, 15.0


@asynccontextmanager
async def a_past(server: Settings, model: Path, sessions: int) -> AsyncIterator[Past]:
    """A run of its own, with so many sessions behind it."""
    settings = dataclasses.replace(
        server,
        run=dataclasses.replace(server.run, id=f"past-{sessions}", directory=f"{server.run.directory}/{sessions}"),
        kafka=dataclasses.replace(server.kafka, prefix=f"past-{sessions}-"),
        model=dataclasses.replace(server.model, path=str(model)),
        batcher=dataclasses.replace(server.batcher, prompts_per_draw=PROMPTS),
        feeder=dataclasses.replace(server.feeder, draws=SIZES[-1] // SESSIONS_PER_DRAW + 200, group_size=8),
    )
    async with open_role("bench", settings) as role:
        await apply(role.log, settings)
        began = time.monotonic()
        past = Past(role, await dataset(role), await weights(role, model))
        await past.begin()
        await past.append(sessions)
        say(f"{past.draws * SESSIONS_PER_DRAW} sessions appended in {time.monotonic() - began:.0f} s")
        yield past


async def dataset(role: Role) -> str:
    """The name of the tasks that the feeder will find."""
    feeder = role.settings.feeder
    count, path = feeder.draws * PROMPTS, Path(role.settings.run.directory) / DATASET_FILE
    return read_dataset(provided_dataset(task_source(feeder.recipe), path, count=count, seed=feeder.seed)).name


async def weights(role: Role, model: Path) -> WeightVersionPublished:
    """Version 0: the model's own, in the store."""
    return await version(read_weights(model), 0, role.blobs, model, run_id=role.settings.run.id)


async def restarted(pasts: Mapping[int, Past]) -> dict[int, dict[str, float]]:
    """p50 of each role at each size, seconds; and once, the assembler's under a group that is open since the run began.
    Sizes take turns, so that other work on the machine slows all of them alike."""
    restarts = {count: Restarts(past) for count, past in pasts.items()}
    found: dict[int, dict[str, float]] = {count: {} for count in pasts}
    for name in ROLES:
        seconds: dict[int, list[float]] = {count: [] for count in pasts}
        for of_size in restarts.values():
            await of_size.ready(name)
        for _ in range(RESTARTS):
            for count, of_size in restarts.items():
                seconds[count].append(await getattr(of_size, name)())
        for count, each in seconds.items():
            found[count][name] = statistics.median(each)
            say(f"{name} after {count}: {', '.join(f'{one:.2f}' for one in each)} s")
    for count, of_size in restarts.items():
        found[count][PINNED] = await of_size.pinned()
        say(f"{PINNED}, after {count}: {found[count][PINNED]:.2f} s")
    return found


def written(past: Past, data: Path, topic: Topic) -> int:
    """Bytes in the log files of a topic."""
    folders = [data / f"{past.settings.kafka.prefix}{place.topic}-{place.number}" for place in
               partitions(past.role, topic)]  # fmt: skip
    return sum(path.stat().st_size for folder in folders for path in folder.glob("*.log"))


async def broker_restarts(broker: Broker, settings: Settings) -> float:
    """p50, seconds from the start of a killed broker until an append is acknowledged."""
    seconds = []
    for _ in range(RESTARTS):
        broker.kill()
        started = time.perf_counter()
        starting = asyncio.create_task(asyncio.to_thread(broker.start))
        while True:
            log = KafkaLog(settings.kafka.bootstrap, prefix=settings.kafka.prefix)
            try:
                async with log.appender() as appender:
                    await appender.append(topics.RUNS.name, b"another", b"x")
                break
            except LogError:
                await asyncio.sleep(0.05)
            finally:
                await log.close()
        seconds.append(time.perf_counter() - started)
        await starting
    say(f"broker: {', '.join(f'{each:.2f}' for each in seconds)} s")
    return statistics.median(seconds)


async def measure(server: Settings, broker: Broker) -> int:
    """Every size, then the broker; the exit status."""
    model = make_tiny_model(Path(server.run.directory) / "model")
    async with AsyncExitStack() as stack:
        pasts = {count: await stack.enter_async_context(a_past(server, model, count)) for count in SIZES}
        largest, data = pasts[SIZES[-1]], broker.directory / "data"
        count = largest.draws * SESSIONS_PER_DRAW
        kept = {topic.name: round(written(largest, data, topic) / count, 1) for topic in CONTROL}
        span_bytes = sum(written(largest, data, topic) for topic in (SESSIONS, TURNS, SNAPSHOTS))
        seconds = await restarted(pasts)
    span = {"bytes": span_bytes, "s": [round(seconds[each].pop(PINNED), 2) for each in SIZES]}
    first, last = seconds[SIZES[0]], seconds[SIZES[-1]]
    slowest = max(last, key=last.__getitem__)
    of_broker = await broker_restarts(broker, server)
    flat = {name: last[name] <= GROWTH * first[name] + MARGIN_S for name in ROLES}
    return told(
        id="G9", value=last[slowest], unit="s", goal=GOAL_S, floor=first[slowest],
        met=all(flat.values()) and last[slowest] <= GOAL_S and of_broker <= BROKER_GOAL_S,
        detail={
            "slowest": slowest, "sessions": list(SIZES), "restarts": RESTARTS,
            "p50_s": {name: [round(seconds[each][name], 2) for each in SIZES] for name in ROLES},
            "grows": [name for name in ROLES if not flat[name]],
            "broker_s": round(of_broker, 2), "broker_goal_s": BROKER_GOAL_S,
            "control_bytes_per_session": kept, "open_span": span,
            "floor_is": f"the same restart at {SIZES[0]} sessions: {GROWTH} of it and {MARGIN_S} s are the goal",
        },
    )  # fmt: skip


def main() -> int:
    """Servers of its own: the broker is killed."""
    found: list[Brokers] = []
    with servers("restarts", started=found.append) as settings:
        return asyncio.run(measure(settings, found[0].all[0]))


if __name__ == "__main__":
    raise SystemExit(main())
