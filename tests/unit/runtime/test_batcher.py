"""The batcher on the fake log: killed at every point, it puts every group into exactly one draw."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine

import pytest
from prometheus_client import REGISTRY

from tests.fakes.memory_log import Died, MemoryLog
from tests.fakes.memory_readers import MemoryReader
from turnlog.consumers.lag import by_role, lag_of
from turnlog.infra.batch_files import read_rows
from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.event_log import EventLog
from turnlog.infra.log import Partition, Reader, Record, partition_of
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.role import Role
from turnlog.infra.roles.runs import configuration, load_configuration
from turnlog.infra.topics_admin import specs
from turnlog.names import RECORD_HEADER, ConsumerGroup
from turnlog.processors.core.batches.rows import rows_sha256
from turnlog.processors.runtime.batcher import ROLE, Batcher, control_places, main
from turnlog.schemas import topics
from turnlog.schemas.events import (
    BatchSkipped,
    Event,
    GroupScored,
    GroupStatus,
    Outcome,
    Purpose,
    SampleBatchFormed,
    SampleSpan,
    SegmentSample,
    StepCompleted,
    TreeBooks,
    WeightVersionPublished,
)
from turnlog.schemas.ids import digest
from turnlog.schemas.types import TurnId, pack_float32s, pack_int32s
from turnlog.settings import BatcherSettings, FeederSettings, FoldSettings, KafkaSettings, Settings

GROUPS = 7
SETTINGS = Settings(
    kafka=KafkaSettings(groups=1, rollouts=1),
    fold=FoldSettings(min_valid=1),
    batcher=BatcherSettings(prompts_per_draw=2, updates_per_draw=2, ready_batches=100),
    feeder=FeederSettings(draws=100),
)


def sample(group: str, index: int, version: int = 0) -> SegmentSample:
    return SegmentSample(
        event_id=f"{group}/{index}",
        run_id="local",
        group_id=group,
        session_id=f"{group}s{index}",
        rollout_id=f"{group}r{index}",
        rollout_index=index,
        task_id="t",
        sample_id=f"{group}/{index}",
        purpose=Purpose.train,
        segment_index=0,
        segment_count=1,
        is_anchor=True,
        token_ids=pack_int32s([1, 2, 3]),
        spans=(SampleSpan(1, 2, TurnId("e", 0), version, True),),
        logprobs=pack_float32s([-0.5, -0.25]),
        temperature=1.0,
        logprob_kind="at_temperature",
        advantage=0.5,
        reward=1.0,
        outcome=Outcome.completed,
        recipe="calc",
        weight_version_min=version,
        weight_version_max=version,
    )


def score(group: str) -> GroupScored:
    return GroupScored(
        event_id=f"{group}/score",
        run_id="local",
        group_id=group,
        floor=0,
        task_id="t",
        purpose=Purpose.train,
        rollouts=(),
        baseline=0.5,
        std=None,
        estimator="grpo/1",
        status=GroupStatus.trained,
        reason="",
        samples=2,
        books=TreeBooks(4, 4, {}),
        fold_version="1",
        settings_sha256="",
    )


def weights(version: int, batch: int) -> WeightVersionPublished:
    return WeightVersionPublished(
        event_id=f"v{version}",
        run_id="local",
        version=version,
        step=batch + 1,
        batch_index=batch,
        incarnation=0,
        kind="full",
        base_version=None,
        files=(),
        dtype="float32",
        checksums={},
        checkpoint=None,
    )


def step(batch: int, draw: int) -> StepCompleted:
    return StepCompleted(
        event_id=f"step{batch}",
        run_id="local",
        batch_index=batch,
        draw_index=draw,
        incarnation=0,
        step=batch + 1,
        loss=0.0,
        grad_norm=0.0,
        learning_rate=0.0,
        lag_max=0,
        tokens=0,
        trained_tokens=0,
        masked={},
        skipped=False,
        reward_mean=0.0,
        logprob_gap_max=0.0,
        logprob_gap_mean=0.0,
        entropy=None,
        clip_fraction=0.0,
        seconds={},
        world_size=1,
    )


class World:
    """One broker, one store; each life of the batcher is a connection of its own."""

    def __init__(self, settings: Settings = SETTINGS) -> None:
        self.log = MemoryLog()
        self.registry = MemoryRegistry()
        self.blobs = MemoryBlobs()
        self.settings = settings

    async def write(self, *events: Event) -> None:
        async with EventLog.open(self.log, self.registry, writer="test") as log:
            for event in events:
                await log.append(event)

    async def live(
        self,
        *,
        dies_at: int | None = None,
        draws: int,
        timeout_s: float = 60.0,
        log: type[MemoryLog] = MemoryLog,
        life: Callable[[Role], Coroutine[None, None, None]] = main,
    ) -> None:
        """Run a batcher until the log holds `draws` draws, or it dies at its chosen point."""
        connection = log(self.log.broker)
        async with EventLog.open(connection, self.registry, writer="batcher") as events:
            role = Role("batcher", "b", self.settings, connection, events, self.blobs, Health("batcher"))
            connection.dies_at = dies_at
            running = asyncio.create_task(life(role))
            async with asyncio.timeout(timeout_s):
                while not running.done() and len({m.draw_index for m in await self.manifests()}) < draws:
                    await self.log.broker.changed(0.02)
            role.stopping.set()
            try:
                await running
            finally:
                connection.dies_at = None

    async def manifests(self) -> list[SampleBatchFormed]:
        async with EventLog.open(self.log, self.registry, writer="reader") as events:
            partition = topics.BATCHES.name
            where = Partition(partition, 0)
            end = (await self.log.end_offsets([where]))[where]
            found: list[SampleBatchFormed] = []
            async with self.log.reader() as reader:
                reader.assign({where: 0})
                while reader.position(where) < end:
                    known = [await events.decode_known(record) for record in await reader.poll(timeout_s=0.01)]
                    found += [event for event in known if event is not None]
            return found


class OneByOne(MemoryLog):
    """Every poll ends after a record, as a poll of Kafka may end after any."""

    @contextlib.asynccontextmanager
    async def reader(self, *, patient: bool = False) -> AsyncIterator[Reader]:
        class Short(MemoryReader):
            async def poll(self, *, max_records: int = 500, timeout_s: float = 0.1) -> list[Record]:
                return await super().poll(max_records=1, timeout_s=timeout_s)

        yield Short(self)


async def world(settings: Settings = SETTINGS, groups: int = GROUPS) -> World:
    world = World(settings)
    await world.log.create_topics(specs(settings))
    await world.write(configuration(settings), weights(0, -1))
    for number in range(groups):
        await world.write(sample(f"g{number}", 0), sample(f"g{number}", 1), score(f"g{number}"))
    return world


def stages() -> Counter[str]:
    """How often each stage of a draw was timed."""
    return Counter({
        stage: int(REGISTRY.get_sample_value("turnlog_stage_seconds_count", {"role": "batcher", "stage": stage}) or 0)
        for stage in ("draw", "seal", "commit")
    })  # fmt: skip


async def test_each_draw_is_cut_into_parts_and_its_files_hold_the_rows(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    settings = dataclasses.replace(SETTINGS, batcher=dataclasses.replace(SETTINGS.batcher, max_lag=9))
    here = await world(settings)
    before = stages()
    await here.live(draws=3)
    assert (stages() - before).total() == 9
    manifests = await here.manifests()
    assert [(m.batch_index, m.draw_index, m.part, m.parts) for m in manifests] == [
        (0, 0, 0, 2), (1, 0, 1, 2), (2, 1, 0, 2), (3, 1, 1, 2), (4, 2, 0, 2), (5, 2, 1, 2),
    ]  # fmt: skip
    assert [m.trainer_version for m in manifests] == [0, 0, 1, 1, 2, 2]
    assert [m.event_id for m in manifests] == [digest("SampleBatchFormed", "local", index) for index in range(6)]
    assert "draw 1: 4 rows, 0 dropped, lag 1 at version 1" in caplog.messages
    for manifest in manifests:
        rows = read_rows(await here.blobs.get(manifest.file))
        assert rows_sha256(rows) == manifest.rows_sha256
        assert rows.sample_ids == tuple(row.sample_id for row in manifest.samples)


async def test_records_that_anybody_wrote_end_nobody_and_those_of_its_own_topic_are_parked() -> None:
    """A header that says another kind than the id, bytes that are none, and kinds of other topics."""
    here = await world()
    async with EventLog.open(here.log, here.registry, writer="anybody") as events, here.log.appender() as appender:
        value, named = events.codec.encode(score("g0")), [(RECORD_HEADER, b"StepCompleted")]
        for topic in (topics.SAMPLES, topics.BATCHES, topics.STEPS, topics.WEIGHTS):
            await appender.append(topic.name, b"k", value, headers=named)
            await appender.append(topic.name, b"k", b"garbage")
        await appender.append(topics.SAMPLES.name, b"k", events.codec.encode(weights(7, 7)))
    await here.live(draws=1)
    async with EventLog.open(here.log, here.registry, writer="reader") as events:
        parked, _ = here.log.broker.read(Partition(topics.DEAD_LETTERS.name, 0), 0, 9)
        letters = [await events.decode(record) for record in parked]
    assert [(letter.topic, letter.cause, letter.role) for letter in letters] == [
        (topics.SAMPLES.name, cause, "batcher") for cause in ("OtherRegistry", "UndecodableRecord", "WrongTopic")
    ]


@pytest.mark.parametrize("dies_at", range(1, 12))
async def test_killed_at_any_point_it_draws_every_group_once(dies_at: int) -> None:
    settings = dataclasses.replace(SETTINGS, batcher=dataclasses.replace(SETTINGS.batcher, max_lag=9))
    here = await world(settings)
    with contextlib.suppress(Died):
        await here.live(dies_at=dies_at, draws=3)
    await here.live(draws=3)
    manifests = await here.manifests()
    assert [m.batch_index for m in manifests] == list(range(6))
    drawn = Counter(group for manifest in manifests for group in manifest.groups)
    assert len(drawn) == 6
    assert set(drawn.values()) == {1}


def named(partition: int, count: int) -> list[str]:
    """Groups of one of two partitions."""
    found = (f"g{number}" for number in itertools.count())
    return list(itertools.islice((name for name in found if partition_of(name.encode(), 2) == partition), count))


@pytest.mark.parametrize("rows", range(1, 4))
async def test_a_drawn_group_is_not_drawn_again_when_a_draw_is_formed_while_it_is_read_again(rows: int) -> None:
    """Of one partition the second life has read a part of what the first life drew, when the other completes a draw."""
    batcher = dataclasses.replace(SETTINGS.batcher, order="freshest", updates_per_draw=1, ready_batches=1, max_lag=9)
    settings = dataclasses.replace(SETTINGS, kafka=KafkaSettings(groups=2, rollouts=1), batcher=batcher)
    here = await world(settings, groups=0)
    waits, *drawn = named(0, 3)
    later, *last = named(1, 3)
    for name in (waits, *drawn):
        await here.write(sample(name, 0), sample(name, 1), score(name))
    await here.live(draws=1)
    await here.write(step(0, 0), weights(1, 0), *(sample(later, row) for row in range(rows)), score(later))
    await here.live(draws=2, log=OneByOne)
    await here.write(step(1, 1), weights(2, 1), *(row for name in last for row in (sample(name, 0), score(name))))
    await here.live(draws=3, log=OneByOne)
    taken = [set(manifest.groups) for manifest in await here.manifests()]
    assert taken == [set(drawn), {waits, later}, set(last)]


async def test_a_group_without_samples_waits_over_a_restart_like_any_other() -> None:
    """Fold version 1 scores it as trained: if it were lost, its place in a draw would stay taken for ever."""
    batcher = dataclasses.replace(SETTINGS.batcher, order="freshest", updates_per_draw=1, ready_batches=1, max_lag=9)
    here = await world(dataclasses.replace(SETTINGS, batcher=batcher), groups=0)
    await here.write(score("empty"), *(row for name in ("g0", "g1") for row in (sample(name, 0), score(name))))
    await here.live(draws=1)
    await here.write(step(0, 0), weights(1, 0), sample("g2", 0), score("g2"))
    await here.live(draws=2)
    assert [set(manifest.groups) for manifest in await here.manifests()] == [{"g0", "g1"}, {"empty", "g2"}]


async def test_a_group_without_samples_that_was_drawn_is_forgotten_once_its_score_was_passed_again() -> None:
    """Of a group with samples, the manifest says where they stand; this one would be remembered for ever."""
    made: list[Batcher] = []

    async def life(role: Role) -> None:
        run = await load_configuration(role)
        assert run is not None
        async with role.log.transactor("local.batcher") as transactor:
            made.append(Batcher(role, run, transactor))
            await ROLE.serve(role, await control_places(run), made[-1], transactor)

    here = await world(
        dataclasses.replace(SETTINGS, batcher=dataclasses.replace(SETTINGS.batcher, max_lag=9, updates_per_draw=1)),
        groups=0,
    )
    await here.write(score("empty"), sample("g0", 0), score("g0"))
    await here.live(draws=1)
    await here.write(step(0, 0), *(row for name in ("g1", "g2") for row in (sample(name, 0), score(name))))
    await here.live(draws=2, log=OneByOne, life=life)
    assert [set(manifest.groups) for manifest in await here.manifests()] == [{"empty", "g0"}, {"g1", "g2"}]
    assert not made[-1].progress.is_taken("empty")


def lags() -> tuple[float, float]:
    """Rows of the recipe that draws took so far, and the sum of their lags."""
    name, labels = "turnlog_recipe_lag_versions", {"recipe": "calc"}
    count, total = (REGISTRY.get_sample_value(f"{name}_{of}", labels) for of in ("count", "sum"))
    return count or 0.0, total or 0.0


async def test_on_policy_it_waits_for_the_step_and_drops_what_became_stale() -> None:
    rows, behind = lags()
    settings = dataclasses.replace(SETTINGS, batcher=dataclasses.replace(SETTINGS.batcher, ready_batches=1))
    here = await world(settings)
    await here.live(draws=1)
    assert {m.draw_index for m in await here.manifests()} == {0}
    await here.write(step(0, 0), step(1, 0), weights(1, 1), sample("h0", 0, 1), sample("h0", 1, 1), score("h0"))
    await here.write(sample("h1", 0, 1), sample("h1", 1, 1), score("h1"))
    await here.live(draws=4)
    manifests = [m for m in await here.manifests() if isinstance(m, SampleBatchFormed)]
    skipped = [m for m in await here.manifests() if not isinstance(m, SampleBatchFormed)]
    assert {m.max_lag for m in manifests} == {0}
    assert {row.reason for m in skipped for row in m.dropped} == {"stale"}
    stale = sum(len(m.dropped) for m in (*manifests, *skipped))
    trained = sum(len(m.samples) for m in manifests)
    assert lags() == (rows + trained + stale, behind + stale), "each of those that fell out was one version behind"
    assert {"h0"} <= {group for m in manifests for group in m.groups}


async def test_under_freshest_a_group_that_is_overtaken_falls_out_and_pins_no_position() -> None:
    batcher = dataclasses.replace(SETTINGS.batcher, order="freshest", updates_per_draw=1)
    here = await world(dataclasses.replace(SETTINGS, batcher=batcher), groups=3)
    await here.live(draws=1)
    await here.write(step(0, 0), weights(1, 0))
    for name in ("h0", "h1"):
        await here.write(sample(name, 0, 1), sample(name, 1, 1), score(name))
    await here.live(draws=2)
    first, second = await here.manifests()
    assert (first.groups, second.groups) == (("g1", "g2"), ("g0", "h0", "h1"))
    assert {(row.group_id, row.reason) for row in second.dropped} == {("g0", "stale")}
    assert {row.group_id for row in second.samples} == {"h0", "h1"}
    (end,) = (await here.log.end_offsets([Partition(topics.SAMPLES.name, 0)])).values()
    assert [place.offset for one in (first, second) for place in one.positions] == [0, end]


def announced(version: int, batch: int, bytes_of: str = "") -> WeightVersionPublished:
    """Weights that engines have from the training ranks alone."""
    digests = {"w": f"{batch}{bytes_of}:2"}
    return dataclasses.replace(weights(version, batch), state="announced", transport="direct", digests=digests)


async def drawn_after_a_death(first: Event, again: Event) -> SampleBatchFormed | BatchSkipped:
    """The trainer dies after step 1 and goes on from step 0: versions 0 and 1 come out again as 2 and 3. Return what
    becomes of groups that version 1 sampled."""
    batcher = dataclasses.replace(SETTINGS.batcher, updates_per_draw=1, ready_batches=1)
    here = await world(dataclasses.replace(SETTINGS, batcher=batcher), groups=2)
    await here.live(draws=1)
    await here.write(step(0, 0), first)
    restarted = dataclasses.replace(weights(2, -1), incarnation=1)
    await here.write(restarted, *(row for name in ("h0", "h1") for row in (sample(name, 0, 1), score(name))))
    connection = MemoryLog(here.log.broker)
    async with EventLog.open(connection, here.registry, writer="batcher") as events:
        role = Role("batcher", "b", here.settings, connection, events, here.blobs, Health("batcher"))
        running = asyncio.create_task(main(role))
        await here.write(dataclasses.replace(step(0, 0), incarnation=1))
        await here.write(dataclasses.replace(again, incarnation=1))
        async with asyncio.timeout(60):
            while len(await here.manifests()) < 2:
                assert not running.done(), running.exception()
                await here.log.broker.changed(0.02)
        role.stopping.set()
        await running
    second: SampleBatchFormed | BatchSkipped = (await here.manifests())[1]
    if isinstance(second, SampleBatchFormed):
        assert set(read_rows(await here.blobs.get(second.file)).version_min.tolist()) == {1}
    return second


@pytest.mark.parametrize("made", [weights, announced], ids=["stored", "announced"])
async def test_what_a_killed_trainer_had_sampled_is_as_fresh_once_the_same_weights_are_out_again(
    made: Callable[[int, int], WeightVersionPublished],
) -> None:
    second = await drawn_after_a_death(made(1, 0), made(3, 0))
    assert isinstance(second, SampleBatchFormed)
    assert (second.groups, second.dropped) == (("h0", "h1"), ())
    assert (second.trainer_version, second.max_lag, second.lags) == (3, 0, {"1": 0})


@pytest.mark.parametrize("again", [announced(3, 0, "other"), weights(3, 0)], ids=["other digests", "no digests"])
async def test_what_an_announced_version_sampled_falls_out_when_its_weights_do_not_come_out_again(
    again: WeightVersionPublished,
) -> None:
    second = await drawn_after_a_death(announced(1, 0), again)
    assert isinstance(second, BatchSkipped)
    assert {(row.group_id, row.reason) for row in second.dropped} == {("h0", "stale"), ("h1", "stale")}


async def test_what_a_version_sampled_that_no_file_holds_trains() -> None:
    settings = dataclasses.replace(SETTINGS, batcher=dataclasses.replace(SETTINGS.batcher, ready_batches=1))
    here = await world(settings, groups=2)
    await here.live(draws=1)
    await here.write(step(0, 0), step(1, 0), announced(1, 1))
    await here.write(*(row for name in ("h0", "h1") for row in (sample(name, 0, 1), score(name))))
    await here.live(draws=2)
    second = (await here.manifests())[2]
    assert isinstance(second, SampleBatchFormed)
    assert (second.trainer_version, second.max_lag, second.dropped) == (1, 0, ())


async def test_what_a_batcher_has_read_is_no_lag_also_when_it_was_not_drawn_and_when_it_has_ended() -> None:
    here = await world(groups=1)
    assert await waiting(here) == 3
    await idle(here)
    assert await waiting(here) == 0
    (commit,) = here.log.broker.group(ConsumerGroup.BATCHER.format(run="local")).commits.values()
    assert commit.offset == 0, "a restart needs the group again that was not drawn"
    await here.write(sample("later", 0), score("later"))
    assert await waiting(here) == 2


async def idle(here: World) -> None:
    """Run a batcher that has too few groups for a draw until it has read them."""
    connection = MemoryLog(here.log.broker)
    async with EventLog.open(connection, here.registry, writer="batcher") as events:
        role = Role("batcher", "b", here.settings, connection, events, here.blobs, Health("batcher"))
        running = asyncio.create_task(main(role))
        async with asyncio.timeout(60):
            while await waiting(here):
                assert not running.done(), running.exception()
                await here.log.broker.changed(0.02)
        role.stopping.set()
        await running


async def waiting(here: World) -> int:
    """Records that wait for the batcher."""
    return by_role(await lag_of(here.log, here.settings))["batcher"]
