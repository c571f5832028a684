"""The reaper: what time decides, and what our own outages must not."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
from prometheus_client import REGISTRY

from tests.fakes.memory_log import MemoryLog
from tests.fakes.sessions import GroupName, SessionStory, Shape
from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.event_log import EventLog
from turnlog.infra.log import Commit, GroupReader, Partition, TopicSpec
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.runs import Configured
from turnlog.names import ConsumerGroup
from turnlog.processors.runtime.assembler import AssemblerRunner, assembler_plan
from turnlog.processors.runtime.reaper import EnginesServe, Reaper, RunnersServe
from turnlog.processors.runtime.unit import records_between
from turnlog.processors.runtime.watch import GroupWatch, ReaperLimits
from turnlog.schemas.events import (
    EngineGone,
    EngineRegistered,
    Event,
    GroupClosed,
    GroupScored,
    GroupStatus,
    Outcome,
    SessionFinished,
)
from turnlog.schemas.ids import digest
from turnlog.schemas.topics import CATALOGUE, TASKS
from turnlog.schemas.types import TurnId
from turnlog.settings import AssemblerSettings, Settings

PLAN = assembler_plan(Configured.today(Settings()), AssemblerSettings(commit_interval_s=0.0))
SILENCE_S, DEADLINE_S = 10.0, 100.0
LIMITS = ReaperLimits(silence_s=SILENCE_S, deadline_s=DEADLINE_S)


class Assembler:
    """One process on one partition, whose time is a number."""

    def __init__(self, log: MemoryLog, events: EventLog, limits: ReaperLimits) -> None:
        self.log = log
        self.events = events
        self.now = 1000.0
        self.runner = AssemblerRunner(PLAN, log, events, MemoryBlobs(), Health("assembler"), clock=self.clock)
        self.reaper = Reaper(self.runner.units, log, events, clock=self.clock, limits=limits)
        self.reader: GroupReader

    def clock(self) -> float:
        return self.now

    async def fold(self) -> None:
        for _ in range(3):
            await self.runner.turn(self.reader, poll_s=0.001)

    async def append(self, *events: Event) -> None:
        for event in events:
            await self.events.append(event)

    async def after(self, seconds: float) -> list[SessionFinished | GroupClosed]:
        """What the reaper appends when it looks, catches up, and looks again after `seconds`."""
        appended = await self.reaper.look()
        self.now += seconds
        for _ in range(2):
            await self.fold()
            appended += await self.reaper.look()
        await self.fold()
        return appended

    async def scores(self) -> list[GroupScored]:
        name = Partition("segment-samples", 0)
        end = (await self.log.end_offsets([name]))[name]
        found = [await self.events.decode(r) async for r in records_between(self.log, name, 0, end)]
        return [event for event in found if isinstance(event, GroupScored)]


@pytest.fixture
async def assembler(request: pytest.FixtureRequest) -> AsyncIterator[Assembler]:
    log = MemoryLog()
    await log.create_topics([TopicSpec(topic.name, 1, 1, {}) for topic in CATALOGUE])
    async with EventLog.open(log, MemoryRegistry(), writer="test") as events:
        process = Assembler(log, events, request.param if hasattr(request, "param") else LIMITS)
        async with process.runner.join_group() as process.reader:
            yield process


def story(group: str, *, size: int = 1, index: int = 0) -> SessionStory:
    return SessionStory(GroupName("local", group, 0, size), index, np.random.default_rng(0))


async def test_a_silent_session_is_expired_with_the_turns_that_are_on_the_log(assembler: Assembler) -> None:
    silent = story("g")
    await assembler.append(silent.started(), *silent.turn(Shape()), silent.turn(Shape())[0])
    await assembler.fold()
    assert await assembler.after(SILENCE_S - 1) == []
    (finish,) = await assembler.after(2)
    assert isinstance(finish, SessionFinished)
    assert (finish.outcome, finish.final, finish.epoch) == (Outcome.expired, True, silent.epoch)
    assert finish.turns == (silent.turns[0],), "its second turn has no snapshot"
    assert finish.event_id == digest("SessionFinished", silent.session_id, silent.epoch, "expired"), "in every release"
    (score,) = await assembler.scores()
    assert score.rollouts[0].excluded_reason == "expired"


async def test_a_session_is_not_silent_while_no_engine_serves(assembler: Assembler) -> None:
    engines = EnginesServe(assembler.log, assembler.events, clock=assembler.clock)
    assembler.reaper = Reaper(
        assembler.runner.units, assembler.log, assembler.events, clock=assembler.clock, limits=LIMITS,
        served_since=engines.since,
    )  # fmt: skip
    engine = {"run_id": "local", "engine_id": "e", "url": "http://e", "version": 0}
    came = EngineRegistered(event_id="came", state="serving", model="m", **engine)
    went = EngineGone(event_id="went", state="gone", cause="killed", **engine)

    async def heard(serves: bool) -> None:
        while (engines._since is not None) is not serves:
            await assembler.log.broker.changed(1.0)

    following = asyncio.create_task(engines.follow())
    await assembler.append(came, story("g").started())
    await heard(True)
    await assembler.fold()
    await assembler.append(went)
    await heard(False)
    assert await assembler.after(10 * DEADLINE_S) == []
    await assembler.append(dataclasses.replace(came, event_id="came back"))
    await heard(True)
    assert await assembler.after(SILENCE_S - 1) == []
    (finish,) = await assembler.after(2)
    assert (finish.session_id, finish.outcome) == (story("g").session_id, Outcome.expired)
    following.cancel()


async def test_a_session_is_not_silent_while_its_runner_is_away(assembler: Assembler) -> None:
    runners = RunnersServe(assembler.log, "local", clock=assembler.clock)
    assembler.reaper = Reaper(
        assembler.runner.units, assembler.log, assembler.events, clock=assembler.clock, limits=LIMITS,
        served_since=runners.since,
    )  # fmt: skip

    async def units(_: frozenset[int]) -> None:
        """Whatever they are."""

    @asynccontextmanager
    async def runner() -> AsyncIterator[None]:
        process = MemoryLog(assembler.log.broker)
        group, tasks = ConsumerGroup.RUNNER.format(run="local"), TASKS.name
        async with process.group_reader(group, [tasks], assigned=units, revoked=units, instance="runner-0") as reader:
            await reader.poll()
            await reader.commit({Partition(tasks, 0): Commit(0)})
            yield
        await process.close()

    async with runner():
        await assembler.append(story("g").started())
        await assembler.fold()
        await runners.look()
        assert await assembler.after(SILENCE_S - 1) == []
    await runners.look()
    assert await assembler.after(10 * DEADLINE_S) == []
    async with runner():
        await runners.look()
        assert await assembler.after(SILENCE_S - 1) == [], "it has all of its time to take its sessions up again"
        (finish,) = await assembler.after(2)
        assert (finish.session_id, finish.outcome) == (story("g").session_id, Outcome.expired)


async def test_sessions_that_no_runner_of_ours_ever_kept_expire(assembler: Assembler) -> None:
    runners = RunnersServe(assembler.log, "local", clock=assembler.clock)
    await runners.look()
    assert runners.since() < assembler.now - DEADLINE_S


async def test_a_unit_that_went_has_no_gauge_of_its_lag_here(assembler: Assembler) -> None:
    def gauge() -> float | None:
        return REGISTRY.get_sample_value("turnlog_assembler_lag_records", {"unit": "0", "topic": "agent.sessions"})

    await assembler.append(story("g").started())
    await assembler.fold()
    await assembler.reaper.look()
    assert gauge() == 0
    await assembler.runner._on_revoked(frozenset({0}))
    await assembler.reaper.look()
    assert gauge() is None


async def test_a_sign_of_life_starts_the_silence_anew(assembler: Assembler) -> None:
    alive = story("g")
    await assembler.append(alive.started())
    await assembler.fold()
    await assembler.after(SILENCE_S - 1)
    await assembler.append(*alive.turn(Shape()))
    assert await assembler.after(SILENCE_S - 1) == []
    assert await assembler.after(1) == []


async def test_an_outage_of_ours_expires_nobody(assembler: Assembler) -> None:
    waiting = story("g")
    await assembler.append(waiting.started())
    assembler.now += 10 * DEADLINE_S
    await assembler.fold()
    assert await assembler.after(SILENCE_S - 1) == []
    assert await assembler.scores() == []


async def test_nothing_is_decided_before_what_came_in_meanwhile_was_read(assembler: Assembler) -> None:
    busy = story("g")
    await assembler.append(busy.started())
    await assembler.fold()
    await assembler.reaper.look()
    await assembler.reaper.look()
    assembler.now += SILENCE_S + 1
    await assembler.append(*busy.turn(Shape()))
    assert await assembler.reaper.look() == []
    assert await assembler.reaper.look() == [], "the unit has not passed the end that was read after the limit"
    await assembler.fold()
    assert await assembler.reaper.look() == []


async def test_a_session_is_expired_once_while_its_finish_is_on_the_way(assembler: Assembler) -> None:
    silent = story("g")
    await assembler.append(silent.started())
    await assembler.fold()
    assert len(await assembler.after(SILENCE_S + 1)) == 1
    assert await assembler.after(SILENCE_S + 1) == []


async def test_a_straggling_group_is_closed_at_its_deadline_with_who_is_done(assembler: Assembler) -> None:
    done, never = story("g", size=2), story("g", size=2, index=1)
    await assembler.append(done.started(), *done.turn(Shape()), done.finished(), done.rewarded(1.0))
    await assembler.append(never.started(), never.finished())
    await assembler.fold()
    assert await assembler.after(DEADLINE_S - 1) == []
    (closed,) = await assembler.after(2)
    assert isinstance(closed, GroupClosed)
    assert closed.reason == "deadline"
    assert set(closed.members) == {done.session_id, never.session_id}, "the fold keeps those that are settled"
    assert closed.seen == 5
    assert closed.event_id == digest("GroupClosed", closed.group_id, "deadline", 5), "in every release"
    (score,) = await assembler.scores()
    assert [rollout.session_id for rollout in score.rollouts] == [done.session_id], "the other has no verdict"
    assert score.status is GroupStatus.discarded


async def test_of_a_group_that_was_scored_time_decides_nothing(assembler: Assembler) -> None:
    done = story("g")
    await assembler.append(done.started(), *done.turn(Shape()), done.finished(), done.rewarded(1.0))
    await assembler.fold()
    assert len(await assembler.scores()) == 1
    assert await assembler.after(DEADLINE_S + 1) == []


async def test_a_session_whose_finish_was_refused_waits_for_none_of_the_turns_that_it_names(
    assembler: Assembler,
) -> None:
    refused, never = story("g", size=2), story("g", size=2, index=1)
    await assembler.append(refused.started(), never.started(), never.finished())
    await assembler.append(dataclasses.replace(refused.finished(), turns=(TurnId("nowhere", 0),)))
    await assembler.fold()
    (closed,) = await assembler.after(DEADLINE_S + 1)
    assert isinstance(closed, GroupClosed)
    assert set(closed.members) == {refused.session_id, never.session_id}


async def test_turns_of_nobody_are_closed_as_an_orphan(assembler: Assembler) -> None:
    orphan = story("g")
    orphan.epoch = "nobody"
    await assembler.append(*orphan.turn(Shape()))
    await assembler.fold()
    (closed,) = await assembler.after(SILENCE_S + 1)
    assert isinstance(closed, GroupClosed)
    assert closed.reason == "orphan"
    assert not assembler.runner.units[0].state()


async def test_a_close_that_lost_a_race_is_void_and_is_asked_for_again(assembler: Assembler) -> None:
    late, other = story("g", size=2), story("g", size=2, index=1)
    await assembler.append(late.started(), late.finished())
    await assembler.fold()
    await assembler.reaper.look()
    await assembler.reaper.look()
    assembler.now += DEADLINE_S + 1
    await assembler.fold()
    await assembler.reaper.look()
    await assembler.append(other.started())
    (closed,) = await assembler.reaper.look()
    await assembler.fold()
    assert await assembler.scores() == [], "a record of the group lies between what it had seen and the close"
    again = await assembler.after(SILENCE_S + 1)
    assert [type(event) for event in again].count(GroupClosed) >= 1
    assert dataclasses.replace(closed, event_id="", seen=0).reason == "deadline"
    assert len(await assembler.scores()) == 1


def test_a_close_waits_for_the_turns_of_a_session_that_finished_a_moment_ago() -> None:
    done = story("g", size=2)
    watch = GroupWatch()
    watch.saw(done.started(), 0.0)
    completed, _ = done.turn(Shape())
    watch.saw(completed, 0.0)
    watch.saw(done.finished(), 50.0)

    def closed(now: float) -> list[tuple[str, ...]]:
        due = watch.overdue(now, caught_up_at=0.0, limits=ReaperLimits(silence_s=99.0, deadline_s=10.0), seen=2)
        return [event.members for event in due if isinstance(event, GroupClosed)]

    assert closed(49.0) == [], "its snapshot is on the log, maybe not folded yet"
    assert closed(50.0) == [()], "the finish was on the log by then, and all that stands before it was folded"
    assert closed(51.0) == [()], "the snapshot is not on the log"


async def test_a_settled_group_whose_turn_was_lost_is_freed_at_its_deadline(assembler: Assembler) -> None:
    whole, torn = story("g", size=2), story("g", size=2, index=1)
    for session in (whole, torn):
        completed, *snapshot = (session.started(), *session.turn(Shape()))[:: 1 if session is whole else 2]
        await assembler.append(completed, *snapshot, session.finished(), session.rewarded(1.0))
    await assembler.fold()
    assert await assembler.scores() == []
    await assembler.after(DEADLINE_S + 1)
    (score,) = await assembler.scores()
    assert [rollout.session_id for rollout in score.rollouts] == [whole.session_id]


waits = pytest.mark.parametrize("assembler", [dataclasses.replace(LIMITS, stragglers="wait")], indirect=True)
cuts = pytest.mark.parametrize("assembler", [dataclasses.replace(LIMITS, stragglers="cut", quorum=2)], indirect=True)


def whole(session: SessionStory, reward: float) -> list[Event]:
    """A session from its start to its reward."""
    return [session.started(), *session.turn(Shape()), session.rewarded(reward), session.finished()]


@waits
async def test_a_group_waits_for_a_straggler_that_goes_on_and_not_for_one_that_has_gone(assembler: Assembler) -> None:
    done, slow = story("g", size=3), story("g", size=3, index=1)
    await assembler.append(*whole(done, 1.0), slow.started())
    await assembler.fold()
    await assembler.after(0.0)
    for _ in range(int(2 * DEADLINE_S / SILENCE_S)):
        assert await assembler.after(SILENCE_S - 1) == []
        await assembler.append(*slow.turn(Shape()))
    await assembler.append(slow.rewarded(0.0), slow.finished())
    await assembler.fold()
    assert await assembler.scores() == [], "its third rollout has said nothing yet"
    (closed,) = await assembler.after(DEADLINE_S + 1)
    assert isinstance(closed, GroupClosed)
    (score,) = await assembler.scores()
    assert (score.status, len(score.rollouts)) == (GroupStatus.trained, 2)


@cuts
async def test_a_group_is_closed_once_enough_of_its_rollouts_can_be_trained_on(assembler: Assembler) -> None:
    first, failed, slow, last = (story("g", size=4, index=index) for index in range(4))
    await assembler.append(*whole(first, 1.0), slow.started(), *slow.turn(Shape()))
    await assembler.append(failed.started(), *failed.turn(Shape()))
    await assembler.append(dataclasses.replace(failed.finished(), outcome=Outcome.infra_failure))
    await assembler.append(last.started(), *last.turn(Shape()), last.finished())
    await assembler.fold()
    assert await assembler.after(1.0) == [], "one that failed is no use, one without its reward not yet"
    await assembler.append(last.rewarded(0.0))
    await assembler.fold()
    (closed,) = await assembler.after(1.0)
    assert isinstance(closed, GroupClosed)
    assert (closed.reason, slow.session_id in closed.members) == ("quorum", False)
    (score,) = await assembler.scores()
    valid = [rollout.session_id for rollout in score.rollouts if rollout.excluded_reason is None]
    assert (score.status, valid) == (GroupStatus.trained, [first.session_id, last.session_id])
    assert score.books.masked["late"] > 0, "what the one that was cut has sampled"
    books = score.books
    assert books.sampled == books.trained + sum(books.masked.values())


@cuts
async def test_a_close_for_a_quorum_that_lost_a_race_is_asked_for_again_at_once(assembler: Assembler) -> None:
    first, second, slow = (story("g", size=3, index=index) for index in range(3))
    *most, finish = (*whole(first, 1.0), *whole(second, 0.0))
    await assembler.append(*most)
    await assembler.fold()
    assert await assembler.reaper.look() == []
    await assembler.append(finish)
    await assembler.fold()
    await assembler.append(slow.started())
    (void,) = await assembler.reaper.look()
    assert await assembler.reaper.look() == [], "it is on its way"
    await assembler.fold()
    assert await assembler.scores() == [], "a record of the group lies between what it had seen and the close"
    (closed,) = await assembler.after(0.1)
    assert void.event_id != closed.event_id
    assert len(await assembler.scores()) == 1


@cuts
async def test_a_group_of_no_more_than_the_quorum_settles_by_itself(assembler: Assembler) -> None:
    first, second = story("g", size=2), story("g", size=2, index=1)
    await assembler.append(*whole(first, 1.0), second.started())
    await assembler.fold()
    assert await assembler.after(1.0) == []
    await assembler.append(*second.turn(Shape()), second.rewarded(0.0), second.finished())
    await assembler.fold()
    assert await assembler.after(1.0) == []
    assert len(await assembler.scores()) == 1


@cuts
async def test_no_quorum_closes_a_group_of_which_a_finished_session_lacks_a_turn(assembler: Assembler) -> None:
    first, second, torn = (story("g", size=4, index=index) for index in range(3))
    await assembler.append(*whole(first, 1.0), *whole(second, 0.0))
    await assembler.append(torn.started(), torn.turn(Shape())[0], torn.rewarded(1.0), torn.finished())
    await assembler.fold()
    assert await assembler.after(1.0) == [], "the fold would wait for its turn"
    (closed,) = await assembler.after(DEADLINE_S)
    assert isinstance(closed, GroupClosed)
    assert closed.reason == "deadline"
    (score,) = await assembler.scores()
    assert len(score.rollouts) == 2
