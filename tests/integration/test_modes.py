"""Sync, partial and fully async: real feeder, assembler and batcher over the log; agents and trainer in virtual time.

Every tick each open session samples one turn with the weights that the engine serves, and the trainer works one tick on
its batch. In memory a tick begins when every role has taken all there is, so a run is the same each time.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fakes.memory_log import Died, MemoryLog
from tests.fakes.sessions import GroupName, SessionStory, Shape
from turnlog.consumers import figures
from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.event_log import EventLog
from turnlog.infra.history import partitions
from turnlog.infra.log import Reader, Transactor
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.roles.health import Health, application
from turnlog.infra.roles.role import Role, open_role
from turnlog.infra.roles.runs import configure
from turnlog.infra.topics_admin import specs
from turnlog.processors.core.books import TokenAccount
from turnlog.processors.runtime import assembler, batcher
from turnlog.producers import feeder
from turnlog.schemas import topics
from turnlog.schemas.events import (
    BatchSkipped,
    EngineWeightsLoaded,
    Event,
    Outcome,
    Purpose,
    RolloutRequested,
    SampleBatchFormed,
    StepCompleted,
    WeightVersionPublished,
)
from turnlog.settings import FeederSettings, KafkaSettings, RunSettings, Settings, load

CONFIGS = Path(__file__).parents[2] / "configs"
MODES = ("sync", "partial-async", "fully-async")
ROLES = {"feeder": feeder.main, "assembler": assembler.main, "batcher": batcher.main}
FOLLOWERS = 1
"""Readers of these roles beside their own: the assembler's of engine-status."""
KILLED = {"feeder": 40, "assembler": 60, "batcher": 12}
"""Role -> points of a life, at most, before it is killed."""
PROMPTS, GROUP, DRAWS = 3, 2, 8


@dataclass
class Pace:
    """Virtual time, in ticks."""

    turns: Callable[[int], int] = lambda _: 2
    """Turns, one per tick, of every session of a group on the n-th row."""
    step: int = 4
    """Of the trainer on a batch."""
    fails: Callable[[int], bool] = lambda _: False
    """Whether the sandboxes of a group on the n-th row break, the first time."""


@dataclass
class Session:
    """A rollout that runs."""

    story: SessionStory
    left: int
    breaks: bool


@dataclass
class World:
    """Everything that the three roles do not do."""

    role: Role
    reader: Reader
    trainer: Transactor
    pace: Pace
    settled: Callable[[], Awaitable[None]]
    version: int = 0
    """What the engine serves."""
    published: int = 0
    incarnation: int = 0
    requests: dict[str, list[RolloutRequested]] = field(default_factory=dict)
    """By group."""
    pending: list[RolloutRequested] = field(default_factory=list)
    running: list[Session] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    manifests: list[SampleBatchFormed] = field(default_factory=list)
    skipped: list[BatchSkipped] = field(default_factory=list)
    queue: deque[SampleBatchFormed] = field(default_factory=deque)
    busy: int = 0
    trained: int = 0
    """Draws."""
    starved: int = 0
    """Ticks without a batch after the first step."""
    idle: int = 0
    """Ticks at which no session ran."""
    bounded: int = 0
    """Those of them at which admission was at its bound."""
    lost: dict[str, int] = field(default_factory=dict)
    """Groups that broke or went stale -> draws trained by then."""
    ahead: int = 0
    """Batches formed ahead of the last step, at most."""

    died: Counter[str] = field(default_factory=Counter)
    """Role -> how often it was killed."""

    async def tick(self) -> None:
        await self.settled()
        for record in await self.reader.poll(max_records=10_000, timeout_s=0.01):
            self.take(await self.role.events.decode(record))
        self.check()
        await self.act()
        await self.train()

    def take(self, event: Event) -> None:
        if isinstance(event, RolloutRequested):
            self.pending.append(event)
            if event.purpose is Purpose.train:
                self.requests.setdefault(event.group_id, []).append(event)
        elif isinstance(event, SampleBatchFormed):
            self.manifests.append(event)
            self.queue.append(event)
        elif isinstance(event, BatchSkipped):
            self.skipped.append(event)

    def check(self) -> None:
        """The bound of admission and the batcher's, restated."""
        settings = self.role.settings
        lag, every = settings.batcher.max_lag, settings.trainer.publish_every
        taken = {group for manifest in (*self.manifests, *self.skipped) for group in manifest.groups}
        open_groups = len(self.requests.keys() - taken - self.broken)
        formed = len({manifest.draw_index for manifest in self.manifests})
        limit = min(lag * every + self.trained + 1, settings.feeder.draws)
        assert open_groups <= (limit - formed) * PROMPTS
        if not self.running and not self.pending and self.requests and self.trained < settings.feeder.draws:
            self.idle += 1
            self.bounded += open_groups == (limit - formed) * PROMPTS
        self.lost |= dict.fromkeys((self.broken | self.stale) - self.lost.keys(), self.trained)
        self.ahead = max(self.ahead, len(self.queue))
        assert len(self.queue) <= settings.batcher.ready_batches

    async def act(self) -> None:
        """One turn of every session whose engine is new enough."""
        events = self.role.events
        for request in [request for request in self.pending if request.min_weight_version <= self.version]:
            self.pending.remove(request)
            number = request.index
            group = GroupName(request.run_id, request.group_id, request.floor, request.group_size)
            rng = np.random.default_rng(number)
            story = SessionStory(group, request.rollout_index, rng, purpose=request.purpose)
            self.running.append(Session(story, self.pace.turns(number), request.draw == 0 and self.pace.fails(number)))
            await events.append(story.started())
        for session in list(self.running):
            for event in session.story.turn(Shape(), version=self.version):
                await events.append(event)
            session.left -= 1
            if session.left <= 0:
                self.running.remove(session)
                await self.finish(session)

    async def finish(self, session: Session) -> None:
        finished = session.story.finished(Outcome.infra_failure if session.breaks else Outcome.completed)
        if session.breaks:
            self.broken.add(finished.group_id)
        await self.role.events.append(session.story.rewarded(float(len(session.story.turns) % 2)))
        await self.role.events.append(finished)

    async def train(self) -> None:
        if self.version < self.published:  # loading takes the tick after the publication
            await self.load(self.published)
        if not self.queue:
            self.starved += 0 < self.trained < self.role.settings.feeder.draws
            return
        self.busy += 1
        if self.busy >= self.pace.step:
            self.busy = 0
            await self.complete(self.queue.popleft())

    async def complete(self, manifest: SampleBatchFormed) -> None:
        last = manifest.part == manifest.parts - 1
        self.trained += last
        events: list[Event] = [step(manifest, self.incarnation)]
        if last and self.trained % self.role.settings.trainer.publish_every == 0:
            self.published += 1
            events.append(weights(manifest.run_id, self.published, manifest.batch_index, self.incarnation))
        await self.role.events.transact(self.trainer, events)

    async def load(self, version: int) -> None:
        self.version = version
        loaded = EngineWeightsLoaded(
            event_id=f"loaded {version}", run_id=self.role.settings.run.id, engine_id="e", url="http://e",
            state="serving", version=version, superseded=(), seconds={},
        )  # fmt: skip
        await self.role.events.append(loaded)

    async def restarted(self, *, other: bool = False) -> None:
        """The trainer went back to its checkpoint: the same weights under a new version, or `other` ones."""
        self.incarnation += 1
        self.published += 1
        batch = max((m.batch_index for m in self.manifests), default=-1) - len(self.queue)
        again = weights(self.role.settings.run.id, self.published, batch, self.incarnation)
        again = dataclasses.replace(again, checksums={"w": "other"} if other else {})
        await self.role.events.transact(self.trainer, [again])

    async def evaluate(self, groups: int) -> None:
        """Somebody else asks for an evaluation."""
        like = next(iter(self.requests.values()))
        for number in range(groups):
            for index, request in enumerate(like):
                about = {"group_id": f"eval {number}", "rollout_id": f"eval {number} {index}"}
                again = dataclasses.replace(request, event_id=f"eval {number} {index}", purpose=Purpose.eval, **about)
                await self.role.events.append(again)

    async def until(self, done: Callable[[World], bool]) -> None:
        async with asyncio.timeout(240):
            while not done(self):
                await self.tick()

    @property
    def stale(self) -> set[str]:
        """Groups that a draw dropped whole."""
        kept = {row.group_id for manifest in self.manifests for row in manifest.samples}
        return {group for manifest in (*self.manifests, *self.skipped) for group in manifest.groups} - kept

    @property
    def max_lag(self) -> int:
        return max(manifest.max_lag for manifest in self.manifests)


def step(manifest: SampleBatchFormed, incarnation: int) -> StepCompleted:
    return StepCompleted(
        event_id=f"step {manifest.batch_index} {incarnation}", run_id=manifest.run_id,
        batch_index=manifest.batch_index, draw_index=manifest.draw_index, incarnation=incarnation,
        step=manifest.batch_index + 1, loss=0.0, grad_norm=0.0, learning_rate=0.0, lag_max=manifest.max_lag, tokens=0,
        trained_tokens=manifest.trained_tokens, masked={}, skipped=False, reward_mean=0.0, logprob_gap_max=0.0,
        logprob_gap_mean=0.0, entropy=None, clip_fraction=0.0, seconds={}, world_size=1,
    )  # fmt: skip


def weights(run_id: str, version: int, batch: int, incarnation: int) -> WeightVersionPublished:
    return WeightVersionPublished(
        event_id=f"weights {version}", run_id=run_id, version=version, step=batch + 1, batch_index=batch,
        incarnation=incarnation, kind="full", base_version=None, files=(), dtype="float32", checksums={},
        checkpoint=None,
    )  # fmt: skip


def small(settings: Settings, directory: Path, **changes: int) -> Settings:
    """The settings of a mode for a run that a test can wait for."""
    batching = {"prompts_per_draw": PROMPTS} | {k: v for k, v in changes.items() if k != "publish_every"}
    training = {k: v for k, v in changes.items() if k == "publish_every"}
    return dataclasses.replace(
        settings,
        run=RunSettings(id="r", directory=str(directory)),
        kafka=KafkaSettings(groups=2, rollouts=2),
        feeder=FeederSettings(group_size=GROUP, draws=DRAWS),
        batcher=dataclasses.replace(settings.batcher, **batching),
        trainer=dataclasses.replace(settings.trainer, **training),
    )


Make = Callable[[str, AsyncExitStack], Awaitable[Role]]


async def lives(
    make: Make, name: str, stack: AsyncExitStack, now: dict[str, Role], deaths: Sequence[int], died: Counter[str]
) -> None:
    """A role that is killed at the n-th point of its log in each life of `deaths`, and restarted."""
    for dies_at in (*deaths, None):
        role = now[name] = await make(name, stack)
        if isinstance(role.log, MemoryLog):
            role.log.dies_at = dies_at
        try:
            await ROLES[name](role)
        except Died:
            died[name] += 1


@asynccontextmanager
async def turning(make: Make, pace: Pace, settled, deaths: Mapping[str, Sequence[int]]) -> AsyncIterator[World]:
    """The roles run; the world is at version 0, served."""
    async with AsyncExitStack() as stack:
        role = await make("world", stack)
        reader = await stack.enter_async_context(role.log.reader())
        reader.assign(dict.fromkeys([*partitions(role, topics.TASKS), *partitions(role, topics.BATCHES)], 0))
        trainer = await stack.enter_async_context(role.log.transactor("r.trainer"))
        now: dict[str, Role] = {}
        world = World(role, reader, trainer, pace, settled)
        running = [lives(make, name, stack, now, deaths.get(name, ()), world.died) for name in ROLES]
        tasks = [asyncio.create_task(life) for life in running]
        await configure(role)
        await role.events.transact(trainer, [weights("r", 0, -1, 0)])
        await world.load(0)
        try:
            yield world
            for task in tasks:
                assert not task.done(), task.exception()
        finally:
            for each in now.values():
                each.stopping.set()
            await asyncio.wait(tasks)


@asynccontextmanager
async def in_memory(
    settings: Settings, pace: Pace, deaths: Mapping[str, Sequence[int]] | None = None
) -> AsyncIterator[World]:
    log, registry, blobs = MemoryLog(), MemoryRegistry(), MemoryBlobs()
    await log.create_topics(specs(settings))

    async def make(name: str, stack: AsyncExitStack) -> Role:
        connection = MemoryLog(log.broker)
        events = await stack.enter_async_context(EventLog.open(connection, registry, writer=name))
        return Role(name, name, settings, connection, events, blobs, Health(name))

    async def settled() -> None:
        while log.broker.waiting < len(ROLES) + FOLLOWERS:  # noqa: ASYNC110 - what a role has yet to do is no event
            await asyncio.sleep(0)

    async with turning(make, pace, settled, deaths or {}) as world:
        yield world


def mode(name: str, tmp_path: Path, **changes: int) -> Settings:
    return small(load(CONFIGS / f"{name}.toml", {}), tmp_path, **changes)


def done(world: World) -> bool:
    return world.trained == world.role.settings.feeder.draws


async def balanced(world: World) -> TokenAccount:
    """The run's account; the books balance on every level, and the total is what the report counts."""
    levels, total = await figures.read_levels(world.role), await figures.read_books(world.role)
    assert levels.imbalances == ()
    account = levels.levels["run"]["r"]
    assert (account.sampled, account.trained, account.masked) == (total.sampled, total.trained, total.masked)
    assert total.balance
    return account


@pytest.mark.parametrize("name", MODES)
async def test_with_fast_rollouts_a_mode_shows_its_lag_and_admission_is_the_only_brake(
    name: str, tmp_path: Path
) -> None:
    async with in_memory(mode(name, tmp_path), Pace()) as world:
        await world.until(lambda world: bool(world.requests))
        await world.evaluate(groups=3 * PROMPTS)
        await world.until(done)
        settings = world.role.settings
        assert world.max_lag <= settings.batcher.max_lag
        assert (world.max_lag > 0) is (name != "sync")
        assert world.stale == set()
        assert world.idle == world.bounded > 0
        assert world.ahead == settings.batcher.ready_batches
        assert (world.starved > 0) is (name == "sync")
        found = await balanced(world)
        assert found.masked["discarded_group"] > 0  # the evaluation's tokens


@pytest.mark.parametrize("name", MODES)
async def test_on_bad_days_no_mode_exceeds_its_lag_and_what_fails_is_drawn_again_whole(
    name: str, tmp_path: Path
) -> None:
    """Every fifth group takes three times as long as a draw, every seventh one loses its sandboxes; rollouts are slower
    than the trainer."""
    pace = Pace(turns=lambda n: 20 if n % 5 == 1 else 4 + n % 3, step=2, fails=lambda n: n % 7 == 3)
    async with in_memory(mode(name, tmp_path), pace) as world:
        await world.until(done)
        settings = world.role.settings
        assert world.max_lag <= settings.batcher.max_lag
        assert (world.max_lag > 0) is (name != "sync")
        assert world.broken
        last = DRAWS - settings.batcher.max_lag * settings.trainer.publish_every - 1
        again = {group for group, trained in world.lost.items() if trained < last}  # later on the run needs no more
        assert again
        assert all(redrawn(world, group) for group in again)
        assert {len(requests) for requests in world.requests.values()} == {GROUP}
        trained = [row.group_id for manifest in world.manifests for row in manifest.samples]
        assert not set(trained) & (world.broken | world.stale)
        found = await balanced(world)
        assert set(found.masked) >= {"discarded_group"}


def redrawn(world: World, group: str) -> bool:
    """A later group of the same task, at the same place of the dataset, was asked for."""
    failed = world.requests[group][0]
    return any(
        (first.task_id, first.dataset_epoch) == (failed.task_id, failed.dataset_epoch) and first.draw > failed.draw
        for first, *_ in world.requests.values()
    )


async def scraped() -> dict[tuple[str, str], int]:
    """The books as a Prometheus server reads them: (level, entry) -> tokens."""
    transport = httpx.ASGITransport(application(Health("all")))
    async with httpx.AsyncClient(transport=transport, base_url="http://role") as client:
        text = (await client.get("/metrics")).text
    return {
        (sample.labels["level"], sample.labels["entry"]): int(sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "turnlog_books_tokens_total"
    }


async def test_the_books_are_a_metric_whose_imbalance_an_alert_can_see(tmp_path: Path) -> None:
    before = await scraped()
    settings = mode("partial-async", tmp_path, max_tokens=20)
    pace = Pace(turns=lambda n: 20 if n % 5 == 1 else 4 + n % 3, step=2, fails=lambda n: n % 7 == 3)
    async with in_memory(settings, pace) as world:
        await world.until(done)
        account = await balanced(world)
        found = {key: tokens - before.get(key, 0) for key, tokens in (await scraped()).items()}
    for level in ("group", "draw"):
        entries = {entry: tokens for (at, entry), tokens in found.items() if at == level}
        assert entries.pop("sampled") == sum(entries.values()) > 0
    assert found["draw", "trained"] == sum(manifest.trained_tokens for manifest in world.manifests) == account.trained
    assert found["group", "trained"] >= found["draw", "sampled"]  # the rest waits for a draw
    for reason in ("length_cut", "stale"):
        assert found["draw", reason] == account.masked[reason] > 0
    assert found["group", "discarded_group"] == account.masked["discarded_group"] > 0


@pytest.mark.parametrize(
    ("max_lag", "publish_every", "updates", "seen"), [(0, 2, 1, 0), (1, 2, 1, 1), (1, 1, 3, 1), (2, 3, 1, 2)]
)
async def test_weights_that_go_out_rarely_let_draws_run_ahead_and_nothing_goes_stale(
    max_lag: int, publish_every: int, updates: int, seen: int, tmp_path: Path
) -> None:
    changes = {"publish_every": publish_every, "updates_per_draw": updates, "ready_batches": 2 * updates}
    settings = mode("sync", tmp_path, max_lag=max_lag, **changes)
    async with in_memory(settings, Pace()) as world:
        await world.until(done)
        assert world.max_lag == seen
        assert world.stale == set()
        for draw in range(DRAWS):
            parts = [manifest for manifest in world.manifests if manifest.draw_index == draw]
            assert len(parts) == updates
            assert len({row.group_id for part in parts for row in part.samples}) == PROMPTS


async def test_the_freshest_first_is_less_lag_paid_with_groups_that_were_sampled_for_nothing(tmp_path: Path) -> None:
    settings = mode("fully-async", tmp_path)
    freshest = dataclasses.replace(settings, batcher=dataclasses.replace(settings.batcher, order="freshest"))
    lags, stale = [], []
    for each in (settings, freshest):
        async with in_memory(each, Pace()) as world:
            await world.until(done)
            lags.append(sum(manifest.max_lag for manifest in world.manifests))
            stale.append(len(world.stale))
    assert lags[0] > lags[1]
    assert 0 == stale[0] < stale[1]


async def test_a_draw_that_went_stale_whole_is_skipped_drawn_again_and_the_run_goes_on(tmp_path: Path) -> None:
    """The trainer goes back to its checkpoint while a draw is sampled, and what it has there are other weights."""
    async with in_memory(mode("sync", tmp_path), Pace()) as world:
        await world.until(lambda world: world.trained == 2 and len(world.running) == PROMPTS * GROUP)
        lost = {session.story.finished().group_id for session in world.running}
        await world.restarted(other=True)
        await world.until(done)
        (skipped,) = world.skipped
        assert set(skipped.groups) == lost
        assert {row.reason for row in skipped.dropped} == {"stale"}
        assert (skipped.batch_index, skipped.draw_index) == (2, 2)
        assert [manifest.batch_index for manifest in world.manifests] == [0, 1, *range(3, DRAWS + 1)]
        assert all(redrawn(world, group) for group in lost)
        assert world.max_lag == 0
        found = await balanced(world)
        assert found.masked == {"stale": sum(row.sampled_tokens for row in skipped.dropped)}


async def test_a_draw_under_way_when_the_trainer_died_trains_where_the_same_weights_come_out(tmp_path: Path) -> None:
    """Only their number is another."""
    async with in_memory(mode("sync", tmp_path), Pace()) as world:
        await world.until(lambda world: world.trained == 2 and len(world.running) == PROMPTS * GROUP)
        await world.restarted()
        await world.until(done)
        assert world.skipped == []
        assert [manifest.batch_index for manifest in world.manifests] == list(range(DRAWS))
        assert (world.manifests[2].lags, world.max_lag) == ({"2": 0}, 0)
        assert (await balanced(world)).masked == {}


@pytest.mark.parametrize("seed", range(3))
async def test_roles_that_are_killed_again_and_again_keep_to_the_lag_and_take_every_group_once(
    seed: int, tmp_path: Path
) -> None:
    """What admission and draws rest on is on the log."""
    rng = random.Random(seed)
    deaths = {name: [rng.randrange(1, most) for _ in range(4)] for name, most in KILLED.items()}
    pace = Pace(turns=lambda n: 9 if n % 5 == 1 else 2, fails=lambda n: n % 7 == 3)
    async with in_memory(mode("fully-async", tmp_path), pace, deaths) as world:
        await world.until(done)
        assert min(world.died[name] for name in ROLES) >= 2
        assert 0 < world.max_lag <= world.role.settings.batcher.max_lag
        assert {len(requests) for requests in world.requests.values()} == {GROUP}
        drawn = [(manifest.draw_index, group) for manifest in world.manifests for group in manifest.groups]
        assert len({group for _, group in drawn}) == len(set(drawn))
        await balanced(world)


@pytest.mark.kafka
async def test_on_a_real_log_a_run_stays_within_its_lag(live_settings: Settings, tmp_path: Path) -> None:
    settings = dataclasses.replace(
        mode("fully-async", tmp_path),
        **{section: getattr(live_settings, section) for section in ("kafka", "registry", "store")},
    )

    async def make(name: str, stack: AsyncExitStack) -> Role:
        return await stack.enter_async_context(open_role(name, settings))

    async def settled() -> None:
        """Nothing tells: a tick is one poll."""

    async with turning(make, Pace(turns=lambda n: 2 + 7 * (n % 5 == 1)), settled, {}) as world:
        await world.until(done)
        assert 0 < world.max_lag <= settings.batcher.max_lag
        await balanced(world)
