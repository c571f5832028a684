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
from turnlog.consumers.index.reader import Index
from turnlog.consumers.index.schema import place_of
from turnlog.consumers.index.search import SORTS, SessionFilter
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
PARTITIONS = 4
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
    """An index of many sessions, of each a turn with its words."""
    with opened_writer(path, "run", FOLD_VERSION, CODEC) as writer:
        writer.about(written_ms=0)
    rng = np.random.default_rng(0)
    connection = sqlite3.connect(path)
    for pragma in ("synchronous = OFF", "journal_mode = OFF", "cache_size = -1000000"):
        connection.execute(f"PRAGMA {pragma}")
    drawn = zip(rng.random(SESSIONS), rng.integers(1, 30, SESSIONS), strict=True)
    marks = ", ".join("?" * len(schema.SESSIONS.columns))
    connection.executemany(
        f"INSERT INTO sessions VALUES ({marks})",
        (_session(number, float(reward), int(turns)) for number, (reward, turns) in enumerate(drawn)),
    )
    places = [place_of(topics.TURNS.name, number % PARTITIONS, number // PARTITIONS) for number in range(SESSIONS)]
    connection.executemany(
        "INSERT INTO turns_records (place, session_id, group_id, epoch, turn_index, time_ms, counts) "
        "VALUES (?, ?, ?, ?, 0, ?, 1)",
        ((place, _name(number), "", _name(number), number) for number, place in enumerate(places)),
    )
    connection.executemany(
        "INSERT INTO search (rowid, text) VALUES (?, ?)",
        sorted((place, _words(number)) for number, place in enumerate(places)),
    )
    connection.executemany(
        "INSERT INTO positions VALUES (?, ?, ?)",
        ((topics.TURNS.name, number, SESSIONS) for number in range(PARTITIONS)),
    )
    connection.commit()
    connection.execute("PRAGMA journal_mode = WAL")
    connection.close()


def _name(number: int) -> str:
    return f"{number * 2_654_435_761 % 2**32:08x}-{number}"


def _words(number: int) -> str:
    """One that everybody says, one of each twentieth, one of each thousandth."""
    return f"hello twentieth{number % 20} thousandth{number % 1000}"


def _session(number: int, reward: float, turns: int) -> tuple[object, ...]:
    began, version = 1_700_000_000_000 + number * 10, number // 10_000
    return (
        _name(number), f"group-{number // 8}", f"{_name(number // 8)}/{number % 8}", number % 8, 0,
        f"task-{number % 5000}", ("calc", "code", "search")[number % 3], "train", "loop/1", "policy", "sandbox/1",
        "origin", 1,
        began, began + 1000, "completed" if number % 50 else "truncated", "", 1, 1, reward,
        f'{{"format": 1.0, "tests": {reward:.3f}}}', "tests/1", None, None, None, turns, turns - 1,
        number % 7 == 0, turns * 200, turns * 400, '["engine-0"]', version, version, reward - 0.5, None,
        turns * 190, number // 512,
        ("trained", "discarded", "excluded", "dropped")[number % 4] if number % 3 else "not_training",
    )  # fmt: skip


USUAL = {
    "all": SessionFilter(),
    "recipe": SessionFilter(recipe="code"),
    "rare outcome": SessionFilter(outcome="truncated"),
    "task": SessionFilter(task_id="task-77"),
    "fate": SessionFilter(fate="dropped", recipe="code"),
    "reward": SessionFilter(min_reward=0.2, max_reward=0.8),
    "versions": SessionFilter(min_version=3, max_version=40),
}
EVERYWHERE = {
    "any": SessionFilter(),
    "no outcome": SessionFilter(outcome="expired"),
    "recipe and fate that exclude each other": SessionFilter(recipe="calc", fate="trained"),
    "few rewards": SessionFilter(min_reward=0.5, max_reward=0.50001),
    "three filters": SessionFilter(outcome="truncated", recipe="code", min_reward=0.999),
    "a word of all": SessionFilter(text="hello"),
    "a word of each 20th": SessionFilter(text="twentieth7"),
    "a word of each 1,000th": SessionFilter(text="thousandth7"),
    "a word of all in few rewards": SessionFilter(text="hello", min_reward=0.5, max_reward=0.50001),
    "no word": SessionFilter(text="nobody"),
}
"""Asked in every order."""


def pages_ms(path: Path) -> dict[str, float]:
    """Question -> milliseconds of its slowest page, and of its histogram."""
    questions = {name: (wanted, "started_ms") for name, wanted in USUAL.items()}
    questions |= {f"{name} by {sort}": (wanted, sort) for name, wanted in EVERYWHERE.items() for sort in SORTS}
    questions["recipe by reward"] = (USUAL["recipe"], "reward")
    found: dict[str, float] = {}
    with Index.open(path) as index:
        for name, (wanted, sort) in questions.items():
            after, found[name] = None, 0.0
            for _ in range(PAGES):
                began = time.perf_counter()
                page = index.sessions(wanted, sort=sort, after=after, limit=100)
                found[name] = max(found[name], (time.perf_counter() - began) * 1000)
                after = page.after
                if after is None:
                    break
        for name, wanted in (USUAL | EVERYWHERE).items():
            began = time.perf_counter()
            index.rewards(wanted)
            found[f"histogram of {name}"] = (time.perf_counter() - began) * 1000
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
