"""I1: events into the index, one process, the log in memory; and a page of sessions of a large one.

Floor in the same run: the same records read from the same log and decoded, and nothing kept. Not shown: the broker.
Pages: the slowest of first pages by every sort, filters, and pages in the middle, over sessions that were written as
rows (`make bench ONLY=I1`; BENCH_SESSIONS for another number of them).
usage: python benchmarks/i1_index.py
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import tempfile
import time
from pathlib import Path

import numpy as np
from row import percentile, say, size, told

from tests.fakes.memory_broker import MemoryBroker
from tests.fakes.memory_log import MemoryLog
from tests.fakes.sessions import GroupName, Shape, whole_group
from turnlog.consumers.index import schema
from turnlog.consumers.index.indexer import indexing, opened_writer
from turnlog.consumers.index.reader import SORTS, Index, SessionFilter
from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.event_log import EventLog
from turnlog.infra.log import Partition, partition_of
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.role import Role
from turnlog.infra.topics_admin import specs
from turnlog.processors.core.fold_versions import FOLD_VERSION
from turnlog.schemas import topics
from turnlog.schemas.codec import Codec
from turnlog.schemas.events import ALL
from turnlog.settings import KafkaSettings, RunSettings, Settings

GROUPS, REPEATS = size((400, 3), smallest=(4, 1))
SESSIONS = int(os.environ.get("BENCH_SESSIONS", size(1_000_000, smallest=2_000)))
PAGES = size(5, smallest=1)
GOAL_EVENTS, GOAL_PAGE_MS = 20_000, 200.0
SETTINGS = Settings(run=RunSettings(id="run"), kafka=KafkaSettings(groups=2, rollouts=1))
CODEC = Codec({name: number for number, name in enumerate(ALL, start=1)})


def role_on(broker: MemoryBroker) -> Role:
    """A process on the log."""
    log = MemoryLog(broker)
    events = EventLog(log, MemoryRegistry(), CODEC, "bench")
    return Role("index", "index", SETTINGS, log, events, MemoryBlobs(), Health("index"))


async def history() -> tuple[MemoryBroker, int]:
    """A log of agent topics, and how many records it holds."""
    broker, count = MemoryBroker(), 0
    broker.create(specs(SETTINGS))
    for number in range(GROUPS):
        unit = partition_of(f"group-{number}".encode(), 2)
        floor = broker.log_of(Partition(topics.SESSIONS.name, unit)).end
        group = GroupName("run", f"group-{number}", floor, 4)
        for event in whole_group(group, np.random.default_rng(number), turns=4, shape=Shape()):
            topic = topics.TOPIC_OF[type(event).__name__]
            broker.write(Partition(topic.name, unit), topic.key_of(event), CODEC.encode(event), ())
            count += 1
    return broker, count


async def indexed_s(broker: MemoryBroker, path: Path) -> float:
    """Seconds to index the log."""
    began = time.perf_counter()
    async with indexing(role_on(broker), path, FOLD_VERSION) as indexer:
        await indexer.catch_up()
    return time.perf_counter() - began


async def read_s(broker: MemoryBroker) -> float:
    """Seconds to read and decode it."""
    role, began = role_on(broker), time.perf_counter()
    places = [place for place in broker.logs if broker.logs[place].end]
    ends = await role.log.end_offsets(places)
    async with role.log.reader() as reader:
        reader.assign(dict.fromkeys(places, 0))
        while any(reader.position(place) < end for place, end in ends.items()):
            for record in await reader.poll(max_records=2000):
                await role.events.decode(record)
    return time.perf_counter() - began


def filled(path: Path) -> None:
    """An index of many sessions."""
    with opened_writer(path, "run", FOLD_VERSION, CODEC) as writer:
        writer.about(written_ms=0)
    rng = np.random.default_rng(0)
    names = [column.name for column in schema.SESSIONS.columns]
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA synchronous = OFF")
    drawn = zip(rng.random(SESSIONS), rng.integers(1, 30, SESSIONS), strict=True)
    connection.executemany(
        f"INSERT INTO sessions ({', '.join(FILLED)}) VALUES ({', '.join('?' * len(FILLED))})",
        (_session(number, float(reward), int(turns)) for number, (reward, turns) in enumerate(drawn)),
    )
    assert set(FILLED) <= set(names)
    connection.commit()
    connection.close()


def _session(number: int, reward: float, turns: int) -> tuple[object, ...]:
    name = f"{number * 2_654_435_761 % 2**32:08x}-{number}"
    began, version = 1_700_000_000_000 + number * 10, number // 10_000
    return (
        name, f"group-{number // 8}", f"task-{number % 5000}", ("calc", "code", "search")[number % 3], "train",
        "completed" if number % 50 else "truncated", began, began + 1000, reward, turns, turns * 200, turns - 1,
        number % 7 == 0, version, version, ("trained", "discarded", "excluded", "dropped")[number % 4], 1,
    )  # fmt: skip


FILLED = (
    "session_id", "group_id", "task_id", "recipe", "purpose", "outcome", "started_ms", "finished_ms", "reward", "turns",
    "output_tokens", "calls", "failed_calls", "version_min", "version_max", "fate", "settled",
)  # fmt: skip


def pages_ms(path: Path) -> dict[str, float]:
    """Question -> milliseconds of its slowest page."""
    filters = {
        "all": SessionFilter(),
        "recipe": SessionFilter(recipe="code"),
        "rare outcome": SessionFilter(outcome="truncated"),
        "task": SessionFilter(task_id="task-77"),
        "fate": SessionFilter(fate="dropped", recipe="search"),
        "reward": SessionFilter(min_reward=0.2, max_reward=0.8),
        "versions": SessionFilter(min_version=3, max_version=40),
    }
    found: dict[str, float] = {}
    with Index.open(path) as index:
        questions = [(name, wanted, "started_ms") for name, wanted in filters.items()]
        questions += [(f"by {sort}", SessionFilter(), sort) for sort in SORTS]
        questions += [("recipe by reward", SessionFilter(recipe="code"), "reward")]
        for name, wanted, sort in questions:
            after, slowest = None, 0.0
            for _ in range(PAGES):
                began = time.perf_counter()
                page = index.sessions(wanted, sort=sort, after=after, limit=100)
                slowest = max(slowest, (time.perf_counter() - began) * 1000)
                after = page.after
            found[name] = slowest
    return found


async def main() -> int:
    """Measure; the exit status."""
    broker, count = await history()
    with tempfile.TemporaryDirectory() as folder:
        rates, floors = [], []
        for number in range(REPEATS):
            floors.append(count / await read_s(broker))
            rates.append(count / await indexed_s(broker, Path(folder) / f"{number}.sqlite"))
            say(f"I1: {rates[-1]:,.0f} events/s of {count:,}; read alone {floors[-1]:,.0f}/s")
        large = Path(folder) / "large.sqlite"
        filled(large)
        pages = pages_ms(large)
    slowest = max(pages, key=pages.__getitem__)
    say(f"I1: pages of {SESSIONS:,} sessions: " + ", ".join(f"{name} {ms:.1f} ms" for name, ms in pages.items()))
    rate = percentile(rates, 0.5)
    return told(
        id="I1", value=round(rate), unit="events/s", goal=GOAL_EVENTS, floor=percentile(floors, 0.5), rate=True,
        met=rate >= GOAL_EVENTS and pages[slowest] <= GOAL_PAGE_MS,
        detail={
            "floor_is": "the same records read from the same log and decoded", "events": count, "sessions": SESSIONS,
            "slowest_page": slowest, "slowest_page_ms": round(pages[slowest], 1), "goal_page_ms": GOAL_PAGE_MS,
            "pages_ms": {name: round(ms, 1) for name, ms in pages.items()},
        },
    )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main()))
