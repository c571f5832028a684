"""Whatever of ours is away, and however long: rewards, outcomes and advantages are those of the undisturbed run.

A runner at the real gateway over HTTP; log, engine and sandbox worker are stand-ins, and time jumps (JumpingLoop), so
that an engine may be away for longer than any deadline.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.fakes.jumping_clock import JumpingLoop
from tests.fakes.memory_engine import MemoryEngine
from tests.fakes.memory_log import MemoryLog
from tests.integration.conftest import CALL, Stage, staged
from tests.unit.producers.test_admission import published
from turnlog.infra.engines.protocol import Generate, OutputChunk
from turnlog.infra.event_log import EventLog
from turnlog.infra.log import LogUnreachable, Partition
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.runs import Configured
from turnlog.processors.core.fold.group import FoldRules, GroupFold
from turnlog.processors.runtime.assembler import AssemblerRunner, assembler_plan
from turnlog.processors.runtime.reaper import EnginesServe, Reaper, RunnersServe
from turnlog.processors.runtime.watch import ReaperLimits
from turnlog.producers.gateway.prompts import TextTokens
from turnlog.producers.gateway_client import GatewayUnavailable
from turnlog.schemas import ids, topics
from turnlog.schemas.events import (
    EngineGone,
    EngineRegistered,
    EngineWeightsLoaded,
    Event,
    GroupScored,
    Outcome,
    RewardAssigned,
    SessionAdopted,
    SessionFinished,
    SessionStarted,
    TokenSnapshot,
    ToolCallCancelled,
    ToolCallCompleted,
    ToolCallRequested,
    ToolStatus,
    TurnCompleted,
)
from turnlog.settings import AssemblerSettings, RunSettings, Settings

DEADLINE_S, TURN_S, SLOW_TURN_S, CALL_S, SLOW_CALL_S = 60.0, 10.0, 45.0, 5.0, 70.0
TOOL_DEADLINE_S = 100.0
ATTEMPTS = 6
"""One more than there are outages: a worker that dies with a call in hand costs an attempt."""
SUMS = ("1 + 7", "2 + 6", "3 + 5", "4 + 4", "6 + 2")
"""One rollout each: two that answer right, one that guesses, one whose turns and one whose call take too long."""
GUESSES, SLOW_TURNS, SLOW_CALLS = SUMS[2:]
PARTS = ("runner", "sandbox", "swap", "engine", "gateway", "broker")
LONGEST_S = 300.0
"""Of an outage; a runner may be away for any time."""
SILENCE_S = 2000.0
"""Of a session before the reaper ends it: more than all that it may wait for together, but for a runner."""
PLAY_S, STOP_S = 30_000.0, 1000.0
"""In which a play and its parts have ended, with all their outages. They bound what a defect makes wait for ever: time
jumps, so that the machine would be busy with it until the end of the run."""
PLAN = assembler_plan(Configured.today(Settings(run=RunSettings(id="r"))), AssemblerSettings())
LIMITS = ReaperLimits(silence_s=SILENCE_S, deadline_s=1e6)


class Decided(NamedTuple):
    """Of a rollout."""

    outcome: Outcome
    reward: float | None
    advantage: float | None


class Outage(NamedTuple):
    """A part is away from some second on."""

    part: str
    at_s: float
    seconds: float


def policy(prompt: str) -> str:
    if "tool\n8" in prompt:
        return "8"
    sum_ = next(one for one in SUMS if one in prompt)
    return "9" if sum_ == GUESSES else CALL.replace("3+5", sum_.replace(" ", ""))


class SlowEngine(MemoryEngine):
    """Takes seconds for a turn; may be paused, killed, and come back."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(vocabulary=384, context=512, script=stage.engine.script)
        self.paused, self.serves = asyncio.Event(), asyncio.Event()
        self.serves.set()
        self.told = TextTokens(Path(stage.settings.model.path)).literal

    def revive(self) -> None:
        """As a restart."""
        self._dead = False

    def hold(self) -> None:
        """As a pause: what runs waits."""
        self.serves.clear()
        self.paused.set()

    def serve(self, version: int) -> None:
        """Go on, with those weights."""
        self.version = str(version)
        self.paused.clear()
        self.serves.set()

    async def _pieces(self, request: Generate, stop: asyncio.Event, timeout_s: float) -> AsyncIterator[OutputChunk]:
        loop = asyncio.get_running_loop()
        left_s = SLOW_TURN_S if SLOW_TURNS in self.told(request.input_ids) else TURN_S
        stopped = asyncio.ensure_future(stop.wait())
        while left_s > 1e-6 and not stop.is_set():
            serves = asyncio.ensure_future(self.serves.wait())
            await asyncio.wait({stopped, serves}, return_when=asyncio.FIRST_COMPLETED)
            serves.cancel()
            paused, began = asyncio.ensure_future(self.paused.wait()), loop.time()
            await asyncio.wait({stopped, paused}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            paused.cancel()
            left_s -= loop.time() - began
        stopped.cancel()
        async for piece in super()._pieces(request, stop, timeout_s):
            yield piece


class Play:
    """One group under a schedule of outages."""

    def __init__(self, stage: Stage, outages: list[Outage]) -> None:
        self.stage, self.outages, self.version = stage, outages, 0
        runner = dataclasses.replace(stage.settings.runner, max_attempts=ATTEMPTS, tool_deadline_s=TOOL_DEADLINE_S)
        stage.settings = dataclasses.replace(stage.settings, runner=runner)
        stage.policy, self.engine = policy, SlowEngine(stage)
        stage.engine = self.engine
        self.begun: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        """Of processes, for want of a broker."""

    async def decided(self) -> dict[int, Decided]:
        """Outcome, reward and advantage of each rollout, by the fold."""
        stage = self.stage
        for index, sum_ in enumerate(SUMS):
            task = {"prompt": f"{sum_} = ?", "answer": "8"}
            await stage.request(index=index, size=len(SUMS), task=task, deadline_s=DEADLINE_S)
        parts = [asyncio.create_task(self.reap(), name="assembler")]
        parts += [asyncio.create_task(self.play(part), name=part) for part in PARTS]
        try:
            async with asyncio.timeout(PLAY_S):
                while sum(finish.final for finish in await stage.said(SessionFinished)) < len(SUMS):
                    await stage.broker.changed(5.0)
                    for part in parts:
                        if part.done():
                            part.result()
        finally:
            stage.broker.start()
            for part in parts:  # whoever is stopped last is asked by those before
                part.cancel()
                await asyncio.wait({part}, timeout=STOP_S)
        return await self.scores()

    async def play(self, part: str) -> None:
        """The part, there but for its outages."""
        loop = asyncio.get_running_loop()
        for outage in sorted(one for one in self.outages if one.part == part):
            async with self.there(part):
                await asyncio.sleep(max(0.0, outage.at_s - loop.time()))
            await self.away(part, outage.seconds)
        async with self.there(part):
            await asyncio.Event().wait()

    @asynccontextmanager
    async def there(self, part: str) -> AsyncIterator[None]:
        """While the block runs."""
        async with AsyncExitStack() as stack:
            match part:
                case "gateway":
                    await stack.enter_async_context(beside(self.serve()))
                case "runner":
                    await stack.enter_async_context(beside(self.run()))
                case "sandbox":
                    await stack.enter_async_context(beside(self.work()))
                case "engine":
                    self.engine.revive()
                    await self.say(EngineRegistered, model="m")
                    stack.callback(self.engine.kill)
            yield

    async def away(self, part: str, seconds: float) -> None:
        """Not there; of a swap: the engine is paused for the weights that were published."""
        if part == "swap":
            self.version += 1
            await self.stage.events.append(published(self.version))
            self.engine.hold()
        if part == "engine":
            await self.say(EngineGone, state="gone", cause="killed")
        if part == "broker":
            self.stage.broker.stop()
        await asyncio.sleep(seconds)
        if part == "broker":
            self.stage.broker.start()
        if part == "swap":
            self.engine.serve(self.version)
            await self.say(EngineWeightsLoaded, seconds={"load": seconds}, superseded=())

    async def say(self, record: type[Event], **more: Any) -> None:
        await self.stage.engine_says(record, version=self.version, **more)

    async def run(self) -> None:
        """A runner, started again where it ended for want of a gateway or a broker."""
        while True:
            try:
                async with self.stage.running() as (runner, _):
                    await asyncio.wait({runner})
                    assert isinstance(runner.exception(), GatewayUnavailable | LogUnreachable), runner
            except LogUnreachable:
                if was_killed():  # while it could not commit
                    return
                raise

    async def serve(self) -> None:
        """A gateway, started again where it ended for want of a broker."""
        while True:
            try:
                async with self.stage.gateway(clock=asyncio.get_running_loop().time):
                    await asyncio.Event().wait()
            except* LogUnreachable:
                self.ends["gateway"] += 1
            if was_killed():
                return

    async def reap(self) -> None:
        """The reaper of an assembler, started again in the same way."""
        while True:
            try:
                await self._reap()
            except* LogUnreachable:
                self.ends["assembler"] += 1
            if was_killed():
                return

    async def _reap(self) -> None:
        stage, clock = self.stage, asyncio.get_running_loop().time
        log, stopping = MemoryLog(stage.broker), asyncio.Event()
        async with EventLog.open(log, stage.registry, writer="assembler") as events:
            runner = AssemblerRunner(PLAN, log, events, stage.blobs, Health("assembler"), clock=clock)
            engines, runners = EnginesServe(log, events, clock=clock), RunnersServe(log, "r", clock=clock)
            reaper = Reaper(
                runner.units, log, events, clock=clock, limits=LIMITS,
                served_since=lambda: max(engines.since(), runners.since()),
            )  # fmt: skip
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(engines.follow())
                tasks.create_task(runners.follow())
                tasks.create_task(reaper.run(stopping))
                tasks.create_task(runner.run(stopping, instance="assembler-0"))

    async def work(self) -> None:
        """A sandbox worker: what it works on when it goes is done again by the next."""
        stage, read = self.stage, dict.fromkeys(range(self.stage.settings.kafka.rollouts), 0)
        taken = {done.call_id for done in await stage.said(ToolCallCompleted, ToolCallCancelled)}
        async with asyncio.TaskGroup() as calls:
            while True:
                for number in read:
                    place = Partition(topics.TOOL_CALLS.name, number)
                    records, read[number] = stage.broker.read(place, read[number], 99)
                    for record in records:
                        event = await stage.events.decode(record)
                        if isinstance(event, ToolCallRequested) and event.call_id not in taken:
                            taken.add(event.call_id)
                            calls.create_task(self.answer(event))
                await stage.broker.changed(1.0)

    async def answer(self, call: ToolCallRequested) -> None:
        self.begun[call.call_id] += 1
        seconds = SLOW_CALL_S if SLOW_CALLS.replace(" ", "") in call.arguments.decode() else CALL_S
        await self.stage.events.append(self.stage.started(call, self.begun[call.call_id]))
        await asyncio.sleep(seconds)
        done = self.stage.completed(call, ToolStatus.ok)
        await self.stage.events.append(dataclasses.replace(done, duration_s=seconds))

    async def scores(self) -> dict[int, Decided]:
        group, scored = GroupFold("g", 0, FoldRules(run_id="r", settings_sha256="s" * 64)), list[GroupScored]()
        kinds = (SessionStarted, SessionAdopted, RewardAssigned, SessionFinished, TurnCompleted, TokenSnapshot)
        for offset, event in enumerate(await self.stage.said(*kinds)):
            outputs = group.apply(topics.TOPIC_OF[type(event).__name__].name, offset, event)
            scored += [output for output in outputs if isinstance(output, GroupScored)]
        [score] = scored
        index = {ids.rollout_id("g", number): number for number in range(len(SUMS))}
        return {index[one.rollout_id]: Decided(one.outcome, one.reward, one.advantage) for one in score.rollouts}


def was_killed() -> bool:
    """Whether the current task was cancelled, whatever else it met on its way out."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """While the block runs. An error of it ends the block."""
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(work)
        try:
            yield
        finally:
            task.cancel()


def decided(model: Path, directory: Path, outages: list[Outage]) -> dict[int, Decided]:
    """What the group comes to."""

    async def play() -> dict[int, Decided]:
        async with staged(model, directory) as stage:
            return await Play(stage, outages).decided()

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(play())


UNDISTURBED = {
    0: (Outcome.completed, 1.0),
    1: (Outcome.completed, 1.0),
    2: (Outcome.completed, 0.0),
    3: (Outcome.truncated, 0.0),
    4: (Outcome.truncated, 0.0),
}
AT = st.floats(0, 120).map(round)
OUTAGES = st.one_of(
    st.builds(Outage, st.sampled_from(PARTS), AT, st.floats(1, LONGEST_S).map(round)),
    st.builds(Outage, st.just("runner"), AT, st.floats(1, 2 * SILENCE_S).map(round)),
)


@pytest.fixture(scope="module")
def undisturbed(calc_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Decided]:
    return decided(calc_model, tmp_path_factory.mktemp("undisturbed"), [])


def test_without_an_outage_some_solve_their_task_and_some_are_too_slow(undisturbed: dict[int, Decided]) -> None:
    assert {index: (one.outcome, one.reward) for index, one in undisturbed.items()} == UNDISTURBED


@settings(
    max_examples=settings.default.max_examples // 8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(OUTAGES, min_size=1, max_size=5))
@example([Outage("engine", 5, 200)])
@example([Outage("sandbox", 12, 200)])
@example([Outage("gateway", 12, 200)])
@example([Outage("swap", 5, 200)])
@example([Outage("broker", 5, 200)])
@example([Outage("broker", 12, 200)])
@example([Outage("broker", 32, 50)])
@example([Outage("runner", 30, 200), Outage("engine", 40, 250)])
@example([Outage("runner", 12, 1.5 * SILENCE_S)])
@example([
    Outage("sandbox", 0, 2), Outage("broker", 48, 212), Outage("gateway", 67, 20), Outage("gateway", 85, 248),
    Outage("runner", 56, 2078),
])  # fmt: skip
def test_no_outage_changes_rewards_outcomes_or_advantages(
    calc_model: Path, tmp_path: Path, undisturbed: dict[int, Decided], outages: list[Outage]
) -> None:
    assert decided(calc_model, tmp_path, outages) == undisturbed
