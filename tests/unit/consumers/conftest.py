"""A run on the log in memory: histories invented, folded by the real assembler, drawn by the real batcher."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import pytest

from tests.fakes.memory_broker import MemoryBroker
from tests.fakes.memory_log import MemoryLog
from tests.fakes.sessions import GroupName, Shape, bad_days, whole_group, with_players
from turnlog.consumers.archiver import RangeLimits, flush
from turnlog.infra.archive import ArchiveLog, live_cut
from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.event_log import EventLog
from turnlog.infra.log import Appender, Partition, partition_of
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.role import Role
from turnlog.infra.roles.runs import configuration
from turnlog.infra.topics_admin import specs
from turnlog.processors.core.fold_versions import INPUTS
from turnlog.processors.runtime import assembler, batcher
from turnlog.schemas import topics
from turnlog.schemas.avsc import stored_schema
from turnlog.schemas.codec import Codec
from turnlog.schemas.events import ALL, Event, RunConfigured, SampleBatchFormed, StepCompleted, WeightVersionPublished
from turnlog.settings import (
    AssemblerSettings,
    BatcherSettings,
    FeederSettings,
    FoldSettings,
    KafkaSettings,
    RunSettings,
    Settings,
)

CODEC = Codec({name: number for number, name in enumerate(ALL, start=1)})
SETTINGS = Settings(
    run=RunSettings(id="run"),
    kafka=KafkaSettings(groups=2, rollouts=1),
    fold=FoldSettings(min_valid=1),
    assembler=AssemblerSettings(commit_interval_s=0.0),
    batcher=BatcherSettings(prompts_per_draw=2, ready_batches=1000, max_lag=1000),
    feeder=FeederSettings(draws=1000),
)


class Registry(MemoryRegistry):
    """Knows the ids of CODEC."""

    async def schema(self, schema_id: int) -> object:  # type: ignore[override]
        names = dict(enumerate(ALL, start=1))
        return stored_schema(names[schema_id])


@dataclass
class TrainedRun:
    """A log, a store, and whoever connects to them."""

    settings: Settings = SETTINGS
    broker: MemoryBroker = field(default_factory=MemoryBroker)
    objects: MemoryBlobs = field(default_factory=MemoryBlobs)

    def __post_init__(self) -> None:
        self.broker.create(specs(self.settings))

    def role(self, name: str = "test", log: MemoryLog | None = None, appender: Appender | None = None) -> Role:
        """A process on the topics; by the appender it writes."""
        log = log or MemoryLog(self.broker)
        events = EventLog(log, Registry(), CODEC, name, appender=appender)
        return Role(name, name, self.settings, log, events, self.objects, Health(name))

    async def archived(self) -> Role:
        """A process on the archive alone, as `opened(..., archive=True)` gives it."""
        log = await ArchiveLog.open(self.objects, self.settings.run.id)
        return Role("test", "test", self.settings, log, log.events(writer="test"), self.objects, Health("test"))

    async def archive(self) -> None:
        """Copy what is there."""
        await flush(self.role("archive"), limits=RangeLimits(file_records=50))

    async def append(self, events: Iterable[Event]) -> None:
        """As their writers do."""
        role = self.role("writer")
        async with role.log.appender() as appender:
            for event in events:
                topic = topics.TOPIC_OF[type(event).__name__]
                headers = role.events.headers(event)
                await appender.append(topic.name, topic.key_of(event), CODEC.encode(event), headers=headers)

    async def configure(self, configured: RunConfigured | None = None) -> None:
        """What `turnlog run` writes first, or another release's wrote, and the first weights."""
        await self.append(
            [
                configured or configuration(self.settings),
                WeightVersionPublished(
                    event_id="v0", run_id="run", version=0, step=0, batch_index=-1, incarnation=0, kind="full",
                    base_version=None, files=(), dtype="float32", checksums={}, checkpoint="",
                ),
            ]
        )  # fmt: skip

    async def fold(self) -> None:
        """The assembler, until everything is folded."""
        role = self.role("assembler")
        inputs = [Partition(topic, unit) for topic in INPUTS for unit in range(self.settings.kafka.groups)]

        async def folded() -> bool:
            ends = await role.log.end_offsets(inputs)
            cuts = [await live_cut(role.log, self.settings.run.id, unit) for unit in range(self.settings.kafka.groups)]
            return all(
                cut is not None and cut.high[topic] >= ends[Partition(topic, unit)]
                for unit, cut in enumerate(cuts)
                for topic in INPUTS
            )

        await self._until(assembler.main(role), role, folded)

    async def draw(self) -> int:
        """The batcher, until no draw is left; the number of manifests."""
        role = self.role("batcher")
        scored = [event for event in await self.read(topics.SAMPLES) if type(event).__name__ == "GroupScored"]
        wanted = sum(event.status.value == "trained" for event in scored) // self.settings.batcher.prompts_per_draw

        async def drawn() -> bool:
            place = Partition(topics.BATCHES.name, 0)
            return len(self.broker.read(place, 0, 10**9)[0]) >= wanted

        await self._until(batcher.main(role), role, drawn)
        return len([event for event in await self.read(topics.BATCHES) if isinstance(event, SampleBatchFormed)])

    async def read(self, topic: topics.Topic) -> list[Event]:
        """Every committed event of a topic."""
        found = []
        for number in range(self.broker.partitions(topic.name)):
            place = Partition(topic.name, number)
            records, _ = self.broker.read(place, self.broker.log_of(place).start, 10**9)
            found += [CODEC.decode(record.value) for record in records]
        return found

    async def bad_days(self, seed: int = 0, *, groups: int = 12, players: bool = False) -> None:
        """A whole run of unlucky sessions: configured, folded, drawn. `players`: they are games of several players."""
        await self.configure()
        rng = random.Random(seed)
        events = bad_days(rng, groups=groups, partitions=self.settings.kafka.groups)
        await self.append(with_players(events) if players else events)
        await self.fold()
        await self.draw()

    async def good_days(self, *, groups: int, size: int = 2, turns: int = 2, shape: Shape | None = None) -> None:
        """A whole run without accidents."""
        await self.configure()
        await self.good_groups(groups=groups, size=size, turns=turns, shape=shape)
        await self.fold()
        await self.draw()

    async def good_groups(
        self, *, groups: int, first: int = 0, size: int = 2, turns: int = 2, shape: Shape | None = None
    ) -> None:
        """Groups without accidents, from the `first` on."""
        rng = np.random.default_rng(first)
        for number in range(first, first + groups):
            unit = partition_of(f"group-{number}".encode(), self.settings.kafka.groups)
            floor = self.broker.log_of(Partition(topics.SESSIONS.name, unit)).end
            group = GroupName("run", f"group-{number}", floor, size)
            await self.append(whole_group(group, rng, turns=turns, shape=shape or Shape()))

    async def steps(self) -> None:
        """A step for every batch, as a trainer would complete it."""
        for number, manifest in enumerate(await self.read(topics.BATCHES), start=1):
            await self.append(
                [
                    StepCompleted(
                        event_id=f"step-{number}", run_id="run", batch_index=manifest.batch_index,
                        draw_index=manifest.draw_index, incarnation=0, step=number, loss=0.0, grad_norm=0.0,
                        learning_rate=0.0, lag_max=0, tokens=0, trained_tokens=0, masked={}, skipped=False,
                        reward_mean=0.0, logprob_gap_max=0.0, logprob_gap_mean=0.0, entropy=None, clip_fraction=0.0,
                        seconds={}, world_size=1,
                    )
                ]
            )  # fmt: skip

    async def _until(self, work: Awaitable[None], role: Role, done: Callable[[], Awaitable[bool]]) -> None:
        running = asyncio.ensure_future(work)
        try:
            async with asyncio.timeout(60):
                while not await done():
                    assert not running.done(), running.exception()
                    await self.broker.changed(0.02)
        finally:
            role.stopping.set()
            await running
            await role.log.close()


@pytest.fixture
def trained_run() -> Callable[..., TrainedRun]:
    """Makes an empty run."""
    return TrainedRun
