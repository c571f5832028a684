"""The feeder over the log: floors, weights, draws, restarts at any point, bad input."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.fakes.memory_broker import MemoryBroker, PartitionLog
from tests.fakes.memory_log import Died, MemoryLog
from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.environments.sources import task_source
from turnlog.infra.event_log import EventLog
from turnlog.infra.log import Commit, Fenced, Partition, TopicMissing, partition_of
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.role import Role, RunPhase
from turnlog.infra.roles.runs import configuration, load_configuration
from turnlog.infra.topics_admin import specs
from turnlog.processors.core.fold.settlement import figures
from turnlog.processors.core.fold_versions import FOLD_VERSION
from turnlog.producers import feeder
from turnlog.producers.tasks import (
    BadMix,
    BadSampling,
    RowWithoutPrompt,
    checked_sampling,
    provided_dataset,
    read_dataset,
    sources,
)
from turnlog.schemas import topics
from turnlog.schemas.events import (
    EngineRegistered,
    EngineWeightsLoaded,
    GroupScored,
    GroupStatus,
    Purpose,
    RolloutRequested,
    RunParent,
    RunPlace,
    SampleBatchFormed,
    StepCompleted,
    TreeBooks,
    Weighting,
    WeightVersionPublished,
)
from turnlog.schemas.events.batches import BatchSample
from turnlog.schemas.types import BlobRef
from turnlog.settings import (
    BatcherSettings,
    EvalSettings,
    FeederSettings,
    KafkaSettings,
    RunSettings,
    Settings,
    SettingsError,
)

PROMPTS, GROUP, DRAWS = 3, 2, 4


@pytest.fixture
def max_lag() -> int:
    return 0


@pytest.fixture
def settings(tmp_path: Path, max_lag: int) -> Settings:
    return Settings(
        run=RunSettings(id="r", directory=str(tmp_path)),
        kafka=KafkaSettings(groups=3, rollouts=2),
        feeder=FeederSettings(group_size=GROUP, draws=DRAWS),
        batcher=BatcherSettings(prompts_per_draw=PROMPTS, max_lag=max_lag),
    )


def scored(group: str, status: GroupStatus) -> GroupScored:
    return GroupScored(
        event_id=group,
        run_id="r",
        group_id=group,
        floor=0,
        task_id="t",
        purpose=Purpose.train,
        rollouts=(),
        baseline=None,
        std=None,
        estimator="grpo/1",
        status=status,
        reason="",
        samples=1,
        books=TreeBooks(0, 0, {}),
        fold_version="1",
        settings_sha256="",
    )


@dataclasses.dataclass
class Bench:
    """A log in memory, and what a test does to it as other roles would."""

    settings: Settings
    broker: MemoryBroker
    registry: MemoryRegistry
    events: EventLog
    fold_version: str = FOLD_VERSION

    async def role(self, log: MemoryLog, events: EventLog) -> Role:
        return Role("feeder", "feeder-1", self.settings, log, events, MemoryBlobs(), Health("feeder"))

    @asynccontextmanager
    async def feeding(self, settings: Settings | None = None) -> AsyncIterator[asyncio.Task[None]]:
        log = MemoryLog(self.broker)
        async with EventLog.open(log, self.registry, writer="feeder-1") as events:
            role = await self.role(log, events)
            role.settings = settings or self.settings
            task = asyncio.create_task(feeder.main(role))
            try:
                yield task
            finally:
                role.stopping.set()
                if not task.done():
                    await task

    async def asked(self) -> list[RolloutRequested]:
        """Every request on the log that a reader may see."""
        found = []
        for number in range(self.settings.kafka.rollouts):
            place = Partition(topics.TASKS.name, number)
            records, _ = self.broker.read(place, self.broker.log_of(place).start, 10**6)
            found += [await self.events.decode(record) for record in records]
        return found

    async def groups(self) -> dict[str, int]:
        return dict(Counter(request.group_id for request in await self.asked()))

    async def until(self, groups: int) -> list[RolloutRequested]:
        """Wait for so many groups."""
        async with asyncio.timeout(20):
            while len(await self.groups()) < groups:
                await self.broker.changed(1)
        return await self.asked()

    async def publish(self, version: int, batch: int) -> None:
        await self.events.append(
            WeightVersionPublished(
                event_id=f"w{version}",
                run_id="r",
                version=version,
                step=version,
                batch_index=batch,
                incarnation=0,
                kind="full",
                base_version=None,
                files=(),
                dtype="float32",
                checksums={},
                checkpoint=None,
            )
        )

    async def engine(self, name: str, version: int) -> None:
        """An engine says that it serves `version` (-1: none yet)."""
        about = {"event_id": f"{name}{version}", "run_id": "r", "engine_id": name, "url": "http://e"}
        if version < 0:
            await self.events.append(EngineRegistered(**about, state="starting", version=version, model="m"))
        else:
            loaded = EngineWeightsLoaded(**about, state="serving", version=version, superseded=(), seconds={})
            await self.events.append(loaded)

    async def started(self) -> None:
        """Version 0 is published and served."""
        await self.publish(0, -1)
        await self.engine("e1", 0)

    async def score(self, group: str, status: GroupStatus = GroupStatus.trained) -> None:
        score = dataclasses.replace(scored(group, status), fold_version=self.fold_version)
        for event in (score, *figures(score)):
            await self.events.append(event)

    async def train(self, draw: int, groups: list[str], *, publish: bool = True) -> None:
        """A draw of these groups is formed and trained."""
        rows = tuple(BatchSample(g, g, g, 0, 0, 1, 1, 1, 0, 0) for g in groups)
        await self.events.append(
            SampleBatchFormed(
                event_id=f"b{draw}",
                run_id="r",
                batch_index=draw,
                draw_index=draw,
                part=0,
                parts=1,
                file=BlobRef("0", 0),
                rows_sha256="",
                samples=rows,
                groups=tuple(groups),
                weighting=Weighting.prompt,
                prompts=1,
                trajectories=1,
                trained_tokens=1,
                constant_length=0,
                masked={},
                trainer_version=0,
                max_lag=0,
                dropped=(),
                whitening_mean=None,
                whitening_std=None,
                positions=(),
                settings_sha256="",
            )
        )
        await self.events.append(
            StepCompleted(
                event_id=f"s{draw}",
                run_id="r",
                batch_index=draw,
                draw_index=draw,
                incarnation=0,
                step=draw + 1,
                loss=0.0,
                grad_norm=0.0,
                learning_rate=0.0,
                lag_max=0,
                tokens=1,
                trained_tokens=1,
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
        )
        if publish:
            await self.publish(draw + 1, draw)


@pytest.fixture
async def bench(settings: Settings, request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    """Of a run that is configured with the latest fold version, or with the test's."""
    log, registry = MemoryLog(), MemoryRegistry()
    await log.create_topics(specs(settings))
    async with EventLog.open(log, registry, writer="test") as events:
        version = getattr(request, "param", FOLD_VERSION)
        await events.append(dataclasses.replace(configuration(settings), fold_version=version))
        yield Bench(settings, log.broker, registry, events, version)


async def test_a_draw_is_asked_for_whole_with_the_floor_of_each_groups_partition(bench: Bench) -> None:
    await bench.started()
    for number in range(3):
        bench.broker.write(Partition(topics.SESSIONS.name, number), b"k", b"v", ())
    async with bench.feeding():
        requests = await bench.until(PROMPTS)
    assert set((await bench.groups()).values()) == {GROUP}
    assert {request.floor for request in requests} == {1}
    assert {request.min_weight_version for request in requests} == {0}
    assert len({request.rollout_id for request in requests}) == PROMPTS * GROUP
    for request in requests:
        number = partition_of(request.rollout_id.encode(), 2)
        records, _ = bench.broker.read(Partition(topics.TASKS.name, number), 0, 1000)
        assert request.rollout_id.encode() in {record.key for record in records}


async def test_nothing_is_asked_before_every_registered_engine_serves_the_first_weights(bench: Bench) -> None:
    await bench.engine("e1", -1)
    await bench.engine("e2", -1)
    async with bench.feeding():
        await bench.publish(0, -1)
        await bench.engine("e1", 0)
        for _ in range(3):
            await bench.broker.changed(0.05)
        assert await bench.asked() == []
        await bench.engine("e2", 0)
        await bench.until(PROMPTS)


async def test_the_next_draw_waits_for_the_weights_of_the_last_one(bench: Bench) -> None:
    await bench.started()
    async with bench.feeding():
        await bench.until(PROMPTS)
        first = list(await bench.groups())
        for group in first:
            await bench.score(group)
        await bench.train(0, first, publish=False)
        for _ in range(5):
            await bench.broker.changed(0.05)
        assert len(await bench.groups()) == PROMPTS
        await bench.publish(1, 0)
        requests = await bench.until(2 * PROMPTS)
    assert {request.min_weight_version for request in requests if request.group_id not in first} == {1}


@pytest.mark.parametrize("max_lag", [1])
async def test_with_a_lag_a_group_goes_ahead_on_older_weights_and_none_on_weights_that_will_be_stale(
    bench: Bench,
) -> None:
    bench.settings = dataclasses.replace(bench.settings, batcher=dataclasses.replace(bench.settings.batcher, max_lag=1))
    await bench.started()
    async with bench.feeding():
        await bench.until(2 * PROMPTS)
        asked = list(await bench.groups())
        for group in asked[:PROMPTS]:
            await bench.score(group)
        await bench.train(0, asked[:PROMPTS], publish=False)
        await bench.score(asked[-1], GroupStatus.discarded)
        again = [one for one in await bench.until(2 * PROMPTS + 1) if one.group_id not in asked]
        for _ in range(5):
            await bench.broker.changed(0.05)
        assert len(await bench.groups()) == 2 * PROMPTS + 1
        await bench.publish(1, 0)
        later = [one for one in await bench.until(3 * PROMPTS + 1) if one not in again and one.group_id not in asked]
    assert {one.min_weight_version for one in again} == {0}
    assert {one.min_weight_version for one in later} == {1}


async def test_a_discarded_group_is_drawn_again_whole_as_a_new_group_behind_fresh_ones(
    bench: Bench, tmp_path: Path
) -> None:
    tasks = provided_dataset(task_source("calc"), tmp_path / "few.jsonl", count=PROMPTS + 1, seed=0)
    feeder_settings = dataclasses.replace(bench.settings.feeder, dataset=str(tasks))
    bench.settings = dataclasses.replace(bench.settings, feeder=feeder_settings)
    await bench.started()
    async with bench.feeding():
        requests = await bench.until(PROMPTS)
        failed = requests[0]
        await bench.score(failed.group_id, GroupStatus.discarded)
        fresh = [one for one in await bench.until(PROMPTS + 1) if one.index == PROMPTS]
        await bench.score(fresh[0].group_id, GroupStatus.discarded)
        again = [request for request in await bench.until(PROMPTS + 2) if request.task_id == failed.task_id]
    assert Counter((request.group_id == failed.group_id, request.draw) for request in again) == {
        (True, 0): GROUP,
        (False, 1): GROUP,
    }


async def test_a_run_asks_for_exactly_its_draws_and_then_rests(bench: Bench) -> None:
    await bench.started()
    seen: set[str] = set()
    async with bench.feeding() as task:
        for draw in range(DRAWS):
            await bench.until((draw + 1) * PROMPTS)
            fresh = [group for group in await bench.groups() if group not in seen]
            seen.update(fresh)
            for group in fresh:
                await bench.score(group)
            await bench.train(draw, fresh)
        for _ in range(5):
            await bench.broker.changed(0.05)
        assert not task.done()
    assert len(await bench.groups()) == DRAWS * PROMPTS


async def test_evaluation_is_asked_for_every_few_draws_of_the_newest_weights_and_once(bench: Bench) -> None:
    tasks, samples = 5, 3
    bench.settings = dataclasses.replace(
        bench.settings, eval=EvalSettings(every=2, tasks=tasks, samples=samples, recipe="household")
    )
    await bench.started()
    seen: set[str] = set()
    for draw in range(3):
        async with bench.feeding():  # each draw has a feeder of its own
            await bench.until((draw + 1) * PROMPTS + (1 + draw // 2) * tasks)
        fresh = {one.group_id for one in await bench.asked() if one.purpose is Purpose.train} - seen
        assert len(fresh) == PROMPTS
        seen |= fresh
        await bench.train(draw, sorted(fresh))
    evaluated = [request for request in await bench.asked() if request.purpose is Purpose.eval]
    assert Counter((one.dataset_epoch, one.min_weight_version, one.recipe) for one in evaluated) == {
        (0, 0, "household"): tasks * samples,
        (1, 2, "household"): tasks * samples,
    }
    assert {one.group_size for one in evaluated} == {samples}
    assert len({one.group_id for one in evaluated}) == 2 * tasks
    assert len({one.task for one in evaluated}) == tasks


@pytest.mark.parametrize("bench", ["1"], indirect=True)
async def test_a_run_of_a_fold_without_group_scores_is_not_evaluated(bench: Bench) -> None:
    bench.settings = dataclasses.replace(bench.settings, eval=EvalSettings(every=2))
    async with bench.feeding() as task:
        with pytest.raises(SettingsError, match=r"eval\.every = 2: this run began under fold version 1"):
            await task


@pytest.mark.parametrize("point", range(1, 24, 2))
async def test_a_feeder_killed_at_any_point_is_followed_by_one_that_asks_for_nothing_twice(
    bench: Bench, point: int
) -> None:
    await bench.started()
    log = MemoryLog(bench.broker)
    async with EventLog.open(log, bench.registry, writer="feeder-0") as events:
        log.dies_at = log.points + point
        role = await bench.role(log, events)
        task = asyncio.create_task(feeder.main(role))
        discarded: set[str] = set()
        while not task.done():  # every group is discarded, so that there is always another to ask for
            for group in set(await bench.groups()) - discarded:
                await bench.score(group, GroupStatus.discarded)
                discarded.add(group)
            await bench.broker.changed(0.05)
        with pytest.raises(Died):
            await task
    survived = set(await bench.groups())
    async with bench.feeding():
        await bench.until(max(PROMPTS, len(survived)))
        for _ in range(3):
            await bench.broker.changed(0.05)
    requests = await bench.asked()
    assert len({request.rollout_id for request in requests}) == len(requests)
    assert set(Counter(request.group_id for request in requests).values()) == {GROUP}
    assert len({(request.index, request.draw) for request in requests}) * GROUP == len(requests)


async def test_a_feeder_that_was_replaced_is_fenced_when_it_asks_again(bench: Bench) -> None:
    await bench.started()
    log = MemoryLog(bench.broker)
    async with EventLog.open(log, bench.registry, writer="feeder-0") as events:
        old = asyncio.create_task(feeder.main(await bench.role(log, events)))
        requests = await bench.until(PROMPTS)
        async with log.transactor("r.feeder"):  # a newer feeder came, and is gone again
            pass
        await bench.score(requests[0].group_id, GroupStatus.discarded)
        with pytest.raises(Fenced):
            await old
    assert len(await bench.groups()) == PROMPTS
    async with bench.feeding():
        await bench.until(PROMPTS + 1)
    assert set((await bench.groups()).values()) == {GROUP}


async def test_a_restarted_feeder_with_another_dataset_refuses_to_go_on(bench: Bench, tmp_path: Path) -> None:
    await bench.started()
    async with bench.feeding():
        await bench.until(PROMPTS)
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "else"}\n')
    changed = dataclasses.replace(bench.settings, feeder=dataclasses.replace(bench.settings.feeder, dataset=str(other)))
    async with bench.feeding(changed) as task:
        with pytest.raises(feeder.DatasetChanged, match=r"from tasks.jsonl@\w+, but \[feeder\] dataset is now other"):
            await task


async def test_bad_input_ends_the_feeder_with_a_typed_error_before_anything_is_asked(
    bench: Bench, tmp_path: Path
) -> None:
    await bench.started()
    (tmp_path / "bad.jsonl").write_text('{"question": "?"}\n')
    feeder_settings = bench.settings.feeder
    for change, error in (
        ({"dataset": str(tmp_path / "bad.jsonl")}, RowWithoutPrompt),
        ({"group_size": 1}, BadSampling),
        ({"mix": ("calc",)}, BadMix),
    ):
        bad = dataclasses.replace(bench.settings, feeder=dataclasses.replace(feeder_settings, **change))
        async with bench.feeding(bad) as task:
            with pytest.raises(error):
                await task
    assert await bench.asked() == []


async def test_a_restarted_feeder_goes_on_with_the_shares_of_its_recipes(bench: Bench) -> None:
    mixed = dataclasses.replace(bench.settings.feeder, mix=("calc:2", "household:1"))
    bench.settings = dataclasses.replace(bench.settings, feeder=mixed)
    await bench.started()
    async with bench.feeding():
        first = {request.group_id: request for request in await bench.until(PROMPTS)}
    assert Counter(request.recipe for request in first.values()) == {"calc": 2, "household": 1}
    (other,) = (request for request in first.values() if request.recipe == "household")
    await bench.score(other.group_id, GroupStatus.discarded)
    await bench.train(0, [group for group in first if group != other.group_id])
    async with bench.feeding():
        later = {request.group_id: request for request in await bench.until(2 * PROMPTS)}
    assert Counter(request.recipe for request in later.values()) == {"calc": 4, "household": 2}
    assert not any(request.draw for request in later.values())
    assert {request.dataset for request in later.values() if request.recipe == "calc"} == {
        request.dataset for request in first.values() if request.recipe == "calc"
    }


async def test_more_rollouts_are_asked_for_than_a_group_needs(bench: Bench) -> None:
    bench.settings = dataclasses.replace(
        bench.settings,
        feeder=dataclasses.replace(bench.settings.feeder, oversample=3),
        assembler=dataclasses.replace(bench.settings.assembler, stragglers="cut"),
    )
    await bench.started()
    async with bench.feeding():
        requests = await bench.until(PROMPTS)
    assert set((await bench.groups()).values()) == {GROUP + 3}
    assert {request.group_size for request in requests} == {GROUP + 3}


async def test_a_restarted_feeder_needs_neither_tasks_nor_samples(bench: Bench) -> None:
    await bench.started()
    async with bench.feeding():
        failed = (await bench.until(PROMPTS))[0]
        await bench.score(failed.group_id, GroupStatus.discarded)
        before = await bench.until(PROMPTS + 1)
    log = MemoryLog(bench.broker)
    gone = [Partition(topic.name, number) for topic, count in ((topics.TASKS, 2), (topics.SAMPLES, 3))
            for number in range(count)]  # fmt: skip
    await log.delete_before(await log.end_offsets(gone))
    groups = sorted({request.group_id for request in before if request.group_id != failed.group_id})
    async with bench.feeding():
        await bench.train(0, groups)
        async with asyncio.timeout(20):
            while len(await bench.groups()) < PROMPTS:  # all that tasks still holds: the next draw
                await bench.broker.changed(1)
    assert not set(await bench.groups()) & {request.group_id for request in before}
    assert {request.index for request in await bench.asked()} == {PROMPTS + 1, PROMPTS + 2, PROMPTS + 3}


@pytest.mark.parametrize("bench", ["1"], indirect=True)
async def test_a_run_that_was_fed_before_there_was_group_requests_goes_on_and_is_noted_once(bench: Bench) -> None:
    await bench.started()
    async with bench.feeding():
        old = await bench.until(PROMPTS)
    past = Partition(topics.GROUP_REQUESTS.name, 0)
    bench.broker.logs[past] = PartitionLog()  # the topic was created just now
    for _ in range(2):
        async with bench.feeding():
            for _ in range(3):
                await bench.broker.changed(0.05)
        assert await bench.asked() == old
        noted, _ = bench.broker.read(past, 0, 100)
        assert len(noted) == PROMPTS
    async with bench.feeding():
        await bench.score(old[0].group_id, GroupStatus.discarded)
        indices = [request.index for request in await bench.until(PROMPTS + 1)]
    assert set(indices) == set(range(PROMPTS + 1))


async def test_what_a_newer_release_says_in_a_commit_stays_there(bench: Bench) -> None:
    """As it does where batcher, trainer and loader say how far they came."""
    commits = bench.broker.group("r.feeder").commits
    await bench.started()
    async with bench.feeding():
        asked = await bench.until(PROMPTS)
    before = {place: commit.offset for place, commit in commits.items()}
    for place, commit in commits.items():
        commits[place] = Commit(commit.offset, json.dumps({"later": place.topic}))
    async with bench.feeding():
        await bench.train(0, list({request.group_id for request in asked}))
        await bench.publish(1, 0)
        await bench.until(2 * PROMPTS)
    assert {json.loads(commit.metadata)["later"] for commit in commits.values()} == {place.topic for place in before}
    assert any(commit.offset > before[place] for place, commit in commits.items())


@pytest.mark.parametrize("bench", ["1"], indirect=True)
@pytest.mark.parametrize("size", [GROUP, feeder.LOOK_BACK])
async def test_what_an_older_feeder_asked_for_after_a_step_back_is_noted_and_not_asked_for_again(
    bench: Bench, size: int
) -> None:
    """Also where it asked for so much that no noted group is near the end of tasks."""
    bench.settings = dataclasses.replace(bench.settings, feeder=FeederSettings(group_size=size, draws=DRAWS))
    await bench.started()
    async with bench.feeding():
        before = await bench.until(PROMPTS)
        noted = bench.broker.logs[Partition(topics.GROUP_REQUESTS.name, 0)]
        first_half = noted.end
        await bench.train(0, list({request.group_id for request in before}))
        await bench.publish(1, 0)
        both = await bench.until(2 * PROMPTS)
    del noted.entries[first_half:]  # the second came of a feeder that keeps none
    for _ in range(2):
        async with bench.feeding():
            for _ in range(3):
                await bench.broker.changed(0.05)
        assert await bench.asked() == both
        keys = Counter(entry.record.value for entry in noted.entries if entry.record is not None)
        assert len(keys) == keys.total() == 2 * PROMPTS


@pytest.mark.parametrize("bench", ["1"], indirect=True)
async def test_a_look_at_a_long_past_is_work_and_no_hang(bench: Bench) -> None:
    await bench.started()
    async with bench.feeding():
        asked = await bench.until(PROMPTS)
    bench.broker.logs[Partition(topics.GROUP_REQUESTS.name, 0)] = PartitionLog()
    log = MemoryLog(bench.broker)
    async with EventLog.open(log, bench.registry, writer="feeder-2") as events, log.transactor("r.feeder") as own:
        role = await bench.role(log, events)
        run = await load_configuration(role)
        assert run is not None
        reading = feeder.Feeder(role, run, own, sources(bench.settings), *checked_sampling(bench.settings))
        await reading.remember()
    assert reading.admission.requested_count == PROMPTS
    loops = role.health.living()[1]["loops"]
    assert loops["work"]["rounds"] >= len(asked)


async def test_missing_topics_are_named_with_the_remedy(settings: Settings) -> None:
    registry = MemoryRegistry()
    log = MemoryLog()
    async with EventLog.open(log, registry, writer="test") as events:
        bench = Bench(settings, log.broker, registry, events)
        async with bench.feeding() as task:
            with pytest.raises(TopicMissing, match=r"group-requests, .*turnlog topics apply"):
                await task


async def test_a_feeder_waits_until_somebody_has_configured_the_run(settings: Settings) -> None:
    log, registry = MemoryLog(), MemoryRegistry()
    await log.create_topics(specs(settings))
    async with EventLog.open(log, registry, writer="test") as events:
        bench = Bench(settings, log.broker, registry, events)
        async with bench.feeding() as task:
            await bench.started()
            for _ in range(3):
                await bench.broker.changed(0.05)
            assert (task.done(), await bench.asked()) == (False, [])
            await events.append(configuration(settings))
            await bench.until(PROMPTS)


async def test_a_poison_record_is_parked_and_the_feeder_goes_on(bench: Bench) -> None:
    await bench.started()
    bench.broker.write(Partition(topics.STEPS.name, 0), b"r", b"not avro", ())
    async with bench.feeding():
        await bench.until(PROMPTS)
    records, _ = bench.broker.read(Partition(topics.DEAD_LETTERS.name, 0), 0, 10)
    letters = [await bench.events.decode(record) for record in records]
    assert [(letter.topic, letter.offset, letter.cause) for letter in letters] == [
        ("train-steps", 0, "UndecodableRecord")
    ]


class Held(Health):
    """Tells when the phase stands in the way."""

    def __init__(self, role: str) -> None:
        super().__init__(role)
        self.held = asyncio.Event()

    def unmet(self, condition: str, why: str) -> None:
        super().unmet(condition, why)
        if condition == "phase":
            self.held.set()


async def test_a_paused_feeder_asks_for_nothing_and_says_why_until_the_run_is_resumed(bench: Bench) -> None:
    await bench.started()
    log = MemoryLog(bench.broker)
    async with EventLog.open(log, bench.registry, writer="feeder-1") as events:
        role = await bench.role(log, events)
        role.phase, role.health = RunPhase.PAUSED, (health := Held("feeder"))
        feeding = asyncio.create_task(feeder.main(role))
        async with asyncio.timeout(20):
            await health.held.wait()
        assert role.health.waiting["phase"] == "the run is paused: continue it with `turnlog run resume`"
        assert await bench.asked() == []
        role.phase = RunPhase.RUNNING
        await bench.until(PROMPTS)
        assert "phase" not in role.health.waiting
        role.stopping.set()
        await feeding


async def test_a_forked_run_is_fed_from_where_the_checkpoint_is_in_the_dataset(settings: Settings) -> None:
    registry = MemoryRegistry()
    path = provided_dataset(task_source("calc"), Path(settings.run.directory) / "tasks.jsonl", count=12, seed=0)
    parent = RunParent(
        run_id="p", checkpoint="c", step=2, draws=2, dataset=read_dataset(path).name, places=4, left=(RunPlace(0, 1),)
    )
    farther = dataclasses.replace(parent, last=RunPlace(0, 6))
    cases = (
        (parent, {1, 4, 5}),
        (farther, {1, 7, 8}),  # its parent passed tasks over
        (dataclasses.replace(parent, dataset="another"), {0, 1, 2}),
    )
    for said, rows in cases:
        log = MemoryLog()
        await log.create_topics(specs(settings))
        async with EventLog.open(log, registry, writer="test") as events:
            await events.append(dataclasses.replace(configuration(settings), parent=said))
            bench = Bench(settings, log.broker, registry, events)
            await bench.started()
            async with bench.feeding():
                assert {request.index for request in await bench.until(PROMPTS)} == rows


def choosy(settings: Settings) -> Settings:
    return dataclasses.replace(settings, feeder=dataclasses.replace(settings.feeder, pass_rate_low=0.1))


async def test_a_task_that_nobody_passed_gives_way_to_a_fresh_one_and_a_new_feeder_goes_on_alike(bench: Bench) -> None:
    await bench.started()
    async with bench.feeding(choosy(bench.settings)):
        first = await bench.until(PROMPTS)
        emitted = figures(dataclasses.replace(scored(first[0].group_id, GroupStatus.discarded), fold_version="3"))
        await bench.events.append(*(dataclasses.replace(one, rewards=(0.0, 0.0)) for one in emitted))
        after = await bench.until(PROMPTS + 1)
    fresh = {request.index for request in after} - {request.index for request in first}
    assert fresh == {PROMPTS}
    async with bench.feeding(choosy(bench.settings)) as feeding:
        assert {request.group_id for request in await bench.until(PROMPTS + 1)} == {one.group_id for one in after}
        assert not feeding.done()


@pytest.mark.parametrize("bench", ["2"], indirect=True)
async def test_pass_rates_are_refused_where_scores_do_not_say_what_passed(bench: Bench) -> None:
    await bench.started()
    with pytest.raises(SettingsError, match=r"feeder.pass_rate_low = 0.1 .* began under fold version 2"):
        async with bench.feeding(choosy(bench.settings)) as feeding:
            await feeding
