"""The archive role on the log in memory: killed at any point, fenced, restarted; never a gap, never an overlap."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
from contextlib import AsyncExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.memory_broker import MemoryBroker
from tests.fakes.memory_log import Died, MemoryLog
from tests.fakes.sessions import bad_days
from turnlog.consumers import archiver
from turnlog.consumers.archiver import Archiver, GapInArchive, RangeLimits
from turnlog.infra.archive import ArchiveDamaged, ArchiveLog, NoArchive
from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.event_log import EventLog
from turnlog.infra.log import Fenced, Partition, Record, TopicSpec
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.role import Role
from turnlog.schemas.codec import Codec
from turnlog.schemas.events import ALL
from turnlog.schemas.topics import CATALOGUE, SAMPLES, SESSION_KEYS, SESSIONS, STEPS, TOPIC_OF
from turnlog.settings import ArchiveSettings, RunSettings, Settings

CODEC = Codec({name: number for number, name in enumerate(ALL)})
SETTINGS = Settings(run=RunSettings(id="run"))
LIMITS = RangeLimits(file_records=9)
flush = functools.partial(archiver.flush, limits=LIMITS)
UNITS = 2


class World:
    """One log and one store, and the processes that come and go."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.broker.create(
            TopicSpec(topic.name, UNITS if topic.partitions == "groups" else 1, 1, {}) for topic in CATALOGUE
        )
        self.named: dict[str, bytes] = {}

    def role(self, settings: Settings = SETTINGS, *, dies_at: int | None = None) -> Role:
        log, blobs = MemoryLog(self.broker), MemoryBlobs()
        log.dies_at, blobs.named, blobs.point = dies_at, self.named, log.point
        return Role("archive", "archive", settings, log, self.events(log), blobs, Health("archive"))

    @staticmethod
    def events(log: MemoryLog) -> EventLog:
        return EventLog(log, _Registry(), CODEC, "test")

    async def write(self, seed: int, groups: int = 3) -> None:
        """A history of the agent topics, poison, and transactions that leave markers and aborted records."""
        rng = random.Random(seed)
        log = MemoryLog(self.broker)
        async with log.appender() as appender, log.transactor("w") as transactor:
            for event in bad_days(rng, groups=groups, partitions=UNITS, name=f"group-{seed}"):
                topic = TOPIC_OF[type(event).__name__]
                await appender.append(topic.name, topic.key_of(event), CODEC.encode(event), headers=[("a", b"b")])
                if rng.random() < 0.1:
                    await appender.append(SESSIONS.name, b"poison", b"\x00poison")
                if rng.random() < 0.2:
                    await transactor.begin()
                    await transactor.send(SAMPLES.name, rng.randrange(UNITS), b"k", CODEC.encode(event))
                    await (transactor.commit if rng.random() < 0.7 else transactor.abort)()

    async def read(self, log: MemoryLog | ArchiveLog) -> dict[Partition, list[Record]]:
        places = [
            Partition(name, number)
            for name, spec in self.broker.specs.items()
            if name != SESSION_KEYS.name  # archived keys could not be erased
            for number in range(spec.partitions)
        ]
        ends = await log.end_offsets(places)
        found: dict[Partition, list[Record]] = {place: [] for place in places}
        async with log.reader() as reader:
            reader.assign(await log.start_offsets(places))
            while any(reader.position(place) < ends[place] for place in places):
                for record in await reader.poll(max_records=13):
                    found[Partition(record.topic, record.partition)].append(record)
        return found

    async def archive(self) -> ArchiveLog:
        blobs = MemoryBlobs()
        blobs.named = self.named
        return await ArchiveLog.open(blobs, "run")


class Clock:
    """Stands still until it is told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class _Registry(MemoryRegistry):
    """Knows the ids of CODEC, as the registry that gave them does."""

    async def schema(self, schema_id: int) -> object:  # type: ignore[override]
        from turnlog.schemas.avsc import stored_schema

        if schema_id >= len(ALL):
            raise KeyError(schema_id)
        return stored_schema(list(ALL)[schema_id])


async def test_the_archive_reads_as_the_topics_do() -> None:
    world = World()
    await world.write(0)
    assert await flush(world.role()) > 4
    archive = await world.archive()
    assert await world.read(archive) == await world.read(MemoryLog(world.broker))
    sessions = [found for unit in range(UNITS) for found in (await world.read(archive))[Partition(SESSIONS.name, unit)]]
    assert {found.value for found in sessions if found.key == b"poison"} == {b"\x00poison"}


async def test_a_flush_waits_for_what_is_committed_and_not_readable_yet() -> None:
    world = World()
    await world.write(0)
    async with MemoryLog(world.broker).transactor("trainer") as transactor:
        await transactor.begin()
        await transactor.send(STEPS.name, 0, b"run", b"\x00late")
        flushing = asyncio.create_task(flush(world.role()))
        await asyncio.wait({flushing}, timeout=0.3)
        await transactor.commit()
        await flushing
    assert len((await world.read(await world.archive()))[Partition(STEPS.name, 0)]) == 1


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), deaths=st.lists(st.integers(1, 60), max_size=12))
async def test_a_killed_archiver_gives_the_same_files_as_one_that_never_died(seed: int, deaths: list[int]) -> None:
    world = World()
    await world.write(seed)
    for dies_at in deaths:
        with contextlib.suppress(Died):
            await flush(world.role(dies_at=dies_at))
    await flush(world.role())
    other = World()
    await other.write(seed)
    await flush(other.role())
    assert world.named == other.named
    assert await world.read(await world.archive()) == await world.read(MemoryLog(world.broker))


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10_000), deaths=st.lists(st.integers(1, 80), min_size=1, max_size=6))
async def test_a_log_that_grows_between_deaths_is_archived_without_gap_or_overlap(seed: int, deaths: list[int]) -> None:
    world = World()
    for number, dies_at in enumerate(deaths):
        await world.write(seed + number, groups=1)
        try:
            await flush(world.role(dies_at=dies_at))
        except Died:
            continue
    await flush(world.role())
    archive = await world.archive()  # refuses a gap or an overlap
    assert await world.read(archive) == await world.read(MemoryLog(world.broker))
    named = {name for name in world.named if name.endswith(".avro")}
    indexed = {
        (await archive.index.range(place, span)).key for place, spans in archive.index.spans.items() for span in spans
    }
    assert named == indexed


async def test_a_zombie_writes_nothing_after_another_archiver_took_over() -> None:
    world = World()
    await world.write(1)
    async with AsyncExitStack() as stack:
        role = world.role()
        transactor = await stack.enter_async_context(role.log.transactor("run.archive"))
        reader = await stack.enter_async_context(role.log.reader())
        zombie = Archiver(role, transactor, reader, limits=LIMITS)
        await zombie.open()
        await world.write(2)
        await flush(world.role())
        before = dict(world.named)
        with pytest.raises(Fenced):
            await zombie.flush()
        assert world.named == before


async def test_a_range_is_closed_when_it_is_old_and_all_together_when_they_hold_too_much() -> None:
    world, clock = World(), Clock()
    await world.write(3)
    old, much = RangeLimits(), RangeLimits(buffer_bytes=1)
    for rules, limits in ((ArchiveSettings(max_age_s=5.0), old), (ArchiveSettings(), much)):
        world.named = {}
        role = world.role(Settings(run=RunSettings(id=f"run-{limits.buffer_bytes}"), archive=rules))
        async with role.log.transactor("t") as transactor, role.log.reader() as reader:
            watched = Archiver(role, transactor, reader, clock=clock, limits=limits)
            await watched.open()
            await watched.turn()
            assert bool(watched.index.spans) == (limits is much)
            clock.now += 5.0
            await watched.turn()
            assert watched.index.spans


async def test_records_that_were_deleted_before_they_were_archived_end_the_archiver() -> None:
    world = World()
    await world.write(4)
    await flush(world.role())
    await world.write(5)
    place = Partition(SESSIONS.name, 0)
    log = world.broker.log_of(place)
    world.broker.truncate(place, log.end - 1)
    with pytest.raises(GapInArchive, match=r"agent\.sessions\[0\]"):
        await flush(world.role())


async def test_another_log_under_the_same_name_is_refused() -> None:
    world, other = World(), World()
    await world.write(6)
    await flush(world.role())
    other.named = world.named
    with pytest.raises(GapInArchive, match="another log"):
        await flush(other.role())


async def test_a_missing_index_object_or_a_changed_file_is_refused_and_named() -> None:
    world = World()
    await world.write(7, groups=16)
    await flush(world.role())
    files = sorted(name for name in world.named if name.endswith(".avro") and "agent.turns" in name)
    whole = dict(world.named)
    world.named[files[0]] = world.named[files[0]][:-1]
    with pytest.raises(ArchiveDamaged, match=r"topic=agent\.turns"):
        await world.read(await world.archive())
    entries = sorted(name for name in whole if "/index/agent.turns/00000/" in name)
    assert len(entries) > 2
    world.named = {name: body for name, body in whole.items() if name != entries[1]}
    with pytest.raises(ArchiveDamaged, match="leave a gap"):
        await world.archive()
    world.named = {}
    with pytest.raises(NoArchive, match=r"\[archive\] name"):
        await world.archive()


async def test_events_of_the_archive_decode_without_a_registry() -> None:
    world = World()
    await world.write(8)
    await flush(world.role())
    archive = await world.archive()
    events = archive.events(writer="test")
    records = [found for found in (await world.read(archive))[Partition(SESSIONS.name, 1)] if found.key != b"poison"]
    assert [await events.decode(found) for found in records] == [CODEC.decode(found.value) for found in records]
    assert [events.codec.encode(CODEC.decode(found.value)) for found in records] == [found.value for found in records]
