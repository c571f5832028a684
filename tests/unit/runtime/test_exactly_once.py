"""The rule of the transactional runner, tortured on the log in memory with the real fold and the real runner.

Histories as `bad_days` leaves them; every poll in another order of partitions; processes that die at any point between
fold, send, offsets and commit, zombies that lose their membership in the middle of a transaction, rebalances.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.memory_broker import MemoryBroker
from tests.fakes.memory_log import Died, MemoryLog
from tests.fakes.sessions import bad_days, with_players
from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.event_log import EventLog
from turnlog.infra.log import Fenced, GroupReader, Partition, Record, TopicSpec
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.roles.health import Health
from turnlog.processors.core.errors import FoldError
from turnlog.processors.core.fold.group import GroupFold
from turnlog.processors.core.fold.settlement import figures
from turnlog.processors.core.fold.unit import FoldName
from turnlog.processors.core.fold_versions import FOLD_VERSION, INPUTS
from turnlog.processors.core.methods.rules import FoldRules
from turnlog.processors.runtime.assembler import AssemblerRunner
from turnlog.processors.runtime.unit import AssemblerPlan, FoldPartitionTask, records_between
from turnlog.schemas.codec import Codec
from turnlog.schemas.events import ALL, Event, GroupScored, SegmentSample, TurnTreeAssembled
from turnlog.schemas.topics import CATALOGUE, TOPIC_OF, TREES

CODEC = Codec({name: number for number, name in enumerate(ALL)})
RULES = FoldRules(run_id="run", settings_sha256="0" * 64)
PLAN = AssemblerPlan(
    run_id="run",
    fold=FoldName(FOLD_VERSION, RULES.settings_sha256),
    factory=lambda group_id, floor: GroupFold(group_id, floor, RULES),
    horizon_records=60,
    commit_interval_s=0.0,
)


def events_of(log: MemoryLog) -> EventLog:
    return EventLog(log, MemoryRegistry(), CODEC, "test")


class Watched(AssemblerRunner):
    """Notes the state of each unit whenever everything of it is committed."""

    def __init__(self, world: World, log: MemoryLog) -> None:
        super().__init__(PLAN, log, events_of(log), MemoryBlobs(), Health("assembler"), clock=lambda: 0.0)
        self.world = world

    async def turn(self, reader: GroupReader, *, max_records: int = 500, poll_s: float = 0.02) -> int:
        count = await super().turn(reader, max_records=self.world.rng.randrange(1, 12), poll_s=0.001)
        for number, unit in self.units.items():
            if unit.opened and not unit.refolding:
                self.world.live[number] = (self.world.commits(number), unit.state())
        return count


class World:
    """One log, its writer, the processes that fold it."""

    def __init__(self, rng: random.Random, partitions: int) -> None:
        self.rng = rng
        self.partitions = partitions
        self.broker = MemoryBroker()
        self.broker.create(
            TopicSpec(topic.name, partitions if topic.partitions == "groups" else 1, 1, {}) for topic in CATALOGUE
        )
        self.live: dict[int, tuple[object, object]] = {}
        self.crashes = 0
        self.fenced = 0
        self.probed = 0
        self.written = False

    def commits(self, unit: int) -> dict[str, object]:
        held = self.broker.group(PLAN.group).commits
        return {topic: held.get(Partition(topic, unit)) for topic in INPUTS}

    def folded(self) -> bool:
        """Every record of every input was folded by a committed transaction."""
        ends = {Partition(t, p): self.broker.logs[Partition(t, p)].end for t in INPUTS for p in range(self.partitions)}
        held = self.broker.group(PLAN.group).commits
        return self.written and all(
            end == 0 or (name in held and f'"high":{end},' in held[name].metadata) for name, end in ends.items()
        )

    async def write(self, history: Iterable[Event]) -> None:
        events = events_of(MemoryLog(self.broker))
        async with events.log.appender() as appender:
            for event in history:
                topic = TOPIC_OF[type(event).__name__]
                await appender.append(
                    topic.name, topic.key_of(event), CODEC.encode(event), headers=events.headers(event)
                )
                if self.rng.random() < 0.3:
                    await asyncio.sleep(0)
        self.written = True

    async def process(self, stopping: asyncio.Event, *, mortal: bool) -> None:
        """A process and its successors."""
        while not stopping.is_set():
            log = MemoryLog(self.broker, order=self.rng)
            if mortal:
                log.dies_at = self.rng.randrange(1, 120)
                log.stalls_at = self.rng.randrange(1, 80) if self.partitions > 1 else None
            try:
                await Watched(self, log).run(stopping)
            except Died:
                self.crashes += 1
                await self.probe()
            except Fenced:
                self.fenced += 1
            await log.close()

    async def probe(self) -> None:
        """Fold again what was committed, in another order: the state must be the one that the live process had."""
        for number, (commits, state) in list(self.live.items()):
            if self.partitions > 1 or commits != self.commits(number):
                continue
            log = MemoryLog(self.broker)
            unit = FoldPartitionTask(number, PLAN, log, events_of(log), MemoryBlobs(), clock=lambda: 0.0, skips={})
            await unit.open()
            parts = [await self.chunks(log, number, topic, unit) for topic in INPUTS]
            while any(parts):
                part = self.rng.choice([part for part in parts if part])
                await unit.step(part.pop(0))
            await unit.close()
            assert not unit.refolding
            assert unit.state() == state
            assert self.commits(number) == commits, "a refold committed something"
            self.probed += 1

    async def chunks(self, log: MemoryLog, number: int, topic: str, unit: FoldPartitionTask) -> list[list[Record]]:
        high = unit._fold.low_water.high[topic]
        found = [r async for r in records_between(log, Partition(topic, number), unit.start[topic], high)]
        cut = self.rng.randrange(1, 9)
        return [found[at : at + cut] for at in range(0, len(found), cut)]

    async def numbered(self, topic: str) -> list[tuple[int, Event]]:
        """(offset, event) of every committed record, partition after partition."""
        log = MemoryLog(self.broker)
        names = [Partition(topic, p) for p in range(self.partitions)]
        ends = await log.end_offsets(names)
        return [
            (record.offset, CODEC.decode(record.value))
            for name in names
            async for record in records_between(log, name, 0, ends[name])
        ]

    async def read(self, topic: str) -> list[tuple[int, Event]]:
        """(partition, event) of every committed record."""
        log = MemoryLog(self.broker)
        names = [Partition(topic, p) for p in range(self.broker.partitions(topic))]
        ends = await log.end_offsets(names)
        return [
            (name.number, CODEC.decode(record.value))
            for name in names
            async for record in records_between(log, name, 0, ends[name])
        ]


def offline(records: Iterable[tuple[str, int, Event]]) -> list[Event]:
    """Outputs of folding whole topics one after the other."""
    groups: dict[str, GroupFold] = {}
    outputs: list[Event] = []
    for topic, offset, event in records:
        group = groups.setdefault(event.group_id, GroupFold(event.group_id, event.floor, RULES))
        try:
            outputs += group.apply(topic, offset, event)
        except FoldError as refusal:
            outputs += refusal.outputs
    return outputs


async def check(world: World) -> int:
    """Outputs against the offline fold in two orders of topics; the number of scores."""
    trees = [event for _, event in await world.read("turn-trees")]
    samples = [event for _, event in await world.read("segment-samples")]
    found = {event.event_id: event for event in [*trees, *samples]}
    assert len(found) == len(trees) + len(samples), "an output came out twice"
    for order in (INPUTS, INPUTS[::-1]):
        records = [(topic, offset, event) for topic in order for offset, event in await world.numbered(topic)]
        assert {event.event_id: event for event in offline(records)} == found
    emitted = [event for _, event in await world.read("group-scores")]
    assert sorted(event.event_id for event in emitted) == sorted(
        each.event_id for event in samples if isinstance(event, GroupScored) for each in figures(event)
    )
    before: list[Event] = []
    for event in samples:
        if isinstance(event, GroupScored):
            assert [s.group_id for s in before] == [event.group_id] * event.samples, "a group is readable at its score"
            before = []
        else:
            assert isinstance(event, SegmentSample)
            before.append(event)
    assert not before
    assert {type(event) for event in trees} <= {TurnTreeAssembled}
    return sum(isinstance(event, GroupScored) for event in samples)


async def tell(seed: int, *, partitions: int, processes: int, groups: int) -> World:
    rng = random.Random(seed)
    world = World(rng, partitions)
    stopping = asyncio.Event()
    events = bad_days(rng, groups=groups, partitions=partitions)
    async with asyncio.timeout(100), asyncio.TaskGroup() as tasks:
        tasks.create_task(world.write(with_players(events) if seed % 2 else events))
        for _ in range(processes):
            tasks.create_task(world.process(stopping, mortal=True))
        while not world.folded():
            await world.broker.changed(0.01)
        stopping.set()
    assert await check(world) == groups
    return world


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_every_output_comes_out_once_whatever_dies_between_fold_and_commit(seed: int) -> None:
    asyncio.run(tell(seed, partitions=1, processes=1, groups=20))


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_two_processes_that_die_and_rebalance_write_every_output_once(seed: int) -> None:
    asyncio.run(tell(seed, partitions=3, processes=2, groups=20))


def test_the_torture_really_tortures() -> None:
    alone = [asyncio.run(tell(seed, partitions=1, processes=1, groups=20)) for seed in range(3)]
    assert sum(world.crashes for world in alone) >= 6
    assert sum(world.probed for world in alone) >= 3
    together = [asyncio.run(tell(seed, partitions=3, processes=2, groups=20)) for seed in range(3)]
    assert sum(world.fenced for world in together) >= 1


async def test_a_unit_opens_once_nothing_of_what_its_owner_before_wrote_is_hidden() -> None:
    log = MemoryLog(World(random.Random(0), 1).broker)
    unit = FoldPartitionTask(0, PLAN, log, events_of(log), MemoryBlobs(), clock=lambda: 0.0, skips={})
    async with log.transactor("whose markers are missing") as before:
        await before.begin()
        await (await before.send(TREES.name, 0, b"g", b"a tree"))
        opening = asyncio.create_task(unit.open())
        await asyncio.wait({opening}, timeout=0.3)
        assert not unit.opened
        await before.abort()
    await opening
    assert unit.opened
    await unit.close()
