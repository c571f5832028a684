"""A rollout: its sessions one after the other until one is final, each acted out, judged and finished.

All decisions follow from the log, so that whoever owns the task can continue it: the same attempt is the same session,
and the same reward has the same event_id. `agents` acts, `verdicts` judges.

The reward of a late verifier follows the end of its session. Meanwhile the rollout gives its slot back, and stays open
until the reward is on the log, so that whoever owns the task after a crash judges again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

import httpx
import orjson
from prometheus_client import Counter

from turnlog.infra.blobs import Blobs
from turnlog.infra.environments.agents import CommandAgent
from turnlog.infra.environments.episodes import Episode, FunctionVerifier, Judged, SandboxCall, TaskRow, Verdict
from turnlog.infra.environments.sources import BrokenRecipe, call_recipe
from turnlog.infra.environments.tasks import Task, TaskSource, acted_out
from turnlog.infra.environments.verifiers.kinds import is_late
from turnlog.infra.event_log import EventSink
from turnlog.infra.roles import log_lines
from turnlog.producers.agents import WAITED, Actor, Attempt, CommandActor, FunctionActor, SessionEnding, ToolBroken
from turnlog.producers.gateway_client import (
    ContextExceeded,
    EnginesBusy,
    GatewayClient,
    GatewayFailed,
    GatewayUnavailable,
    OpenSession,
    OpponentMissing,
    RequestRejected,
    SessionOver,
    SessionState,
)
from turnlog.producers.players import GameLoop, UserLoop, recorded_moves
from turnlog.producers.tool_calls import NoWorker, ToolCalls, ToolResults, ToolUnanswered, first_workspace
from turnlog.producers.tool_loop import ToolLoop
from turnlog.producers.verdicts import Bench
from turnlog.schemas import SessionIsErased
from turnlog.schemas.events import Outcome, RewardAssigned, RolloutRequested
from turnlog.schemas.events.sessions import Environment
from turnlog.settings import RunnerSettings

log = logging.getLogger(__name__)
SESSIONS = Counter("turnlog_runner_sessions", "Sessions ended", ["outcome"])
REWARDS = Counter("turnlog_runner_rewards", "Verdicts", ["verdict"])
REWARD_SUM = Counter("turnlog_runner_reward_sum", "Sum of the positive rewards assigned")
CUT = "its group was scored without it"
LOOK_S = 1.0
"""Seconds between two checks of a session that has waited; each asks its gateway for the time that it has spent."""
UNBOUNDED_S = 31536000.0
"""Wall time in seconds of a sandbox without a limit of its own; [sandbox] agent_s is below it."""
OUTAGES = frozenset({WAITED, *(error.__name__ for error in (GatewayUnavailable, EnginesBusy, NoWorker))})
"""Prefixes of the reasons of sessions that ended for lack of a server."""
LIVE = (Outcome.completed, Outcome.truncated, Outcome.agent_error)
"""Outcomes of an agent that lived; they get a reward."""


@dataclass(frozen=True, slots=True)
class Owed:
    """A reward that is due."""

    bench: Bench
    verifier: Judged
    episode: Episode


@dataclass(slots=True, eq=False)
class Rollout:
    """The sessions of one RolloutRequested, from its first attempt to its last."""

    request: RolloutRequested
    """The request; its task must be inline."""
    source: TaskSource
    settings: RunnerSettings
    gateway: GatewayClient
    events: EventSink
    results: ToolResults
    blobs: Blobs
    http: httpx.AsyncClient
    was_cut: bool = field(default=False, init=False)
    """True if a cut ended the rollout."""
    _cut: bool = field(default=False, init=False)
    _task: Task = field(init=False)
    _broken: BrokenRecipe | None = field(default=None, init=False)
    """Error of the source, if it cannot make the task: every session of the rollout ends by it."""
    _acting: asyncio.Task[SessionEnding] | None = field(default=None, init=False)

    def _make_task(self) -> None:
        """Make the task anew for each attempt, since a source may fail for a while. Its own limits replace those of the
        request if they are lower."""
        assert isinstance(self.request.task, bytes)
        row, limits = orjson.loads(self.request.task), self.request.limits
        try:
            self._task, self._broken = call_recipe(self.source.name, self.source.task, row), None
        except BrokenRecipe as error:
            self._task, self._broken = _task_without_source(self.source.name, row), error
        turns, seconds = self._task.max_turns or limits.max_turns, self._task.deadline_s or limits.deadline_s
        limits = dataclasses.replace(
            limits, max_turns=min(limits.max_turns, turns), deadline_s=min(limits.deadline_s, seconds)
        )
        self.request = dataclasses.replace(self.request, limits=limits)

    def cut(self) -> None:
        """End the rollout because its group was scored without it: cancel its actor, and begin no other attempt."""
        self._cut = True
        if self._acting is not None:
            self._acting.cancel()

    async def run(self, *, resume: bool) -> Owed | None:
        """Run until the rollout has a final session. Return the reward that is due on it, if its verifier is a late
        one. `resume`: another owner may have begun the rollout.

        Per attempt: 1. open the session; 2. act until the agent ends; 3. write the reward, unless the verifier is late;
        4. finish the session. A session that is over already, or was erased, ends the rollout. Raises
        GatewayUnavailable, GatewayRefused, LogUnavailable, StoreUnavailable."""
        log_lines.about(group_id=self.request.group_id)
        try:
            return await self._run_attempts(resume=resume)
        except (SessionOver, SessionIsErased) as over:
            log.warning("rollout %s: %s", self.request.rollout_id, over)
            return None

    async def _run_attempts(self, *, resume: bool) -> Owed | None:
        """See `run`. Raises SessionOver, SessionIsErased, and what `run` raises."""
        left = self.settings.max_attempts
        for attempt in itertools.count():
            if self._cut:
                self.was_cut = True
                return None
            self._make_task()
            session = await self.gateway.open(self.request, self._task, attempt)
            log_lines.about(session_id=session.session_id)
            state = await self.gateway.state(session) if resume else None
            if state is not None and state.finished:
                ending, owed = SessionEnding(state.outcome, state.reason), self._still_owed(session, state)
            else:
                ending, owed = await self._attempt(session, state, attempt, final=left == 1)
            left -= not _is_outage(ending)
            if ending.outcome is not Outcome.infra_failure or not left:
                return owed
        raise AssertionError("unreachable")

    async def settle(self, owed: Owed) -> None:
        """Judge, and write the reward, then those of the players; a session that was erased meanwhile gets none. Raises
        GatewayClientError, LogUnavailable."""
        try:
            await self._write_rewards(owed)
        except SessionIsErased as erased:
            log.warning("rollout %s: no reward is written: %s", self.request.rollout_id, erased)

    async def _write_rewards(self, owed: Owed) -> None:
        """See `settle`. Raises SessionIsErased, and what `settle` raises."""
        for record in await owed.bench.verdicts(owed.verifier, owed.episode):
            await self.events.append(record)
            if not record.player:
                REWARDS.labels(type(record).__name__).inc()
                if isinstance(record, RewardAssigned):
                    REWARD_SUM.inc(max(record.value, 0.0))

    def _still_owed(self, session: OpenSession, state: SessionState) -> Owed | None:
        """Return the late reward of a session that another owner finished. Whether that owner wrote it is not checked:
        of two, the first on the log counts."""
        if state.outcome not in LIVE or not is_late(self._task.verifier):
            return None
        moves, _ = recorded_moves(self._task, state.players or {})
        players = {name: tuple(messages) for name, messages in moves.items()}
        if players:
            messages = players.get(self._task.players[0].name, ())
        else:
            messages = tuple(call_recipe(self.source.name, acted_out, self._task, state.messages))
        episode = Episode(
            task=self._task.row, messages=messages, outcome=state.outcome, reason=state.reason, players=players
        )
        return Owed(self._bench(session, {}), self._task.verifier, episode)

    async def _attempt(
        self, session: OpenSession, state: SessionState | None, number: int, *, final: bool
    ) -> tuple[SessionEnding, Owed | None]:
        """Act in, judge and finish one session. `final`: this attempt is the last one if it fails other than by an
        outage."""
        actor = _actor(
            Attempt(
                number=number,
                request=self.request,
                task=self._task,
                gateway=self.gateway,
                session=session,
                calls=(calls := self._calls(session)),
                patience_s=self.settings.tool_deadline_s,
            ),
            state,
        )
        ending = await self._until_cut(actor, calls)
        failed, owed, steps = ending.outcome not in LIVE, None, 0
        final = (final and not _is_outage(ending)) or not failed or ending.outcome is Outcome.cancelled
        if failed:
            log.warning("rollout %s, attempt %d: %s", self.request.rollout_id, number, ending.outcome.value)
        else:
            episode = Episode(
                task=self._task.row,
                messages=tuple(await actor.messages()),
                outcome=ending.outcome,
                reason=ending.reason,
                ended=actor.command_end,
                players=actor.conversations if isinstance(actor, GameLoop) else {},
            )
            owed = Owed(self._bench(session, calls.asked), actor.verifier, episode)
            steps = await self._steps(owed)
            if not is_late(owed.verifier):
                # The reward comes before the end of its session, so that a finished session is settled at once.
                await self._write_rewards(owed)
                owed = None
        await self.gateway.finish(
            session,
            ending.outcome,
            ending.reason,
            final=final,
            reward=not failed,
            judged=None if failed else actor.judged_turn,
            step_rewards=steps,
            players=() if failed else self._task.trained_players,
        )
        if self._task.opening is not None:
            await calls.close()
        SESSIONS.labels(ending.outcome.value).inc()
        return ending, owed

    def _bench(self, session: OpenSession, asked: Mapping[str, SandboxCall]) -> Bench:
        return Bench(
            http=self.http,
            events=self.events,
            gateway=self.gateway,
            results=self.results,
            blobs=self.blobs,
            request=self.request,
            task=self._task,
            session=session,
            asked=asked,
        )

    async def _steps(self, owed: Owed) -> int:
        """Write the step rewards that the verifier requests, and return their number."""
        rewards = await owed.bench.step_rewards(owed.verifier, owed.episode)
        for reward in rewards:
            await self.events.append(reward)
        return len(rewards)

    def _calls(self, session: OpenSession) -> ToolCalls:
        sandbox, patience_s = self._task.call_sandbox, self.settings.tool_deadline_s
        if isinstance(self._task.agent, CommandAgent):  # one call is the session; its deadline is enforced here
            sandbox = dataclasses.replace(sandbox, limits=dataclasses.replace(sandbox.limits, wall_s=UNBOUNDED_S))
            patience_s += self.request.limits.deadline_s
        return ToolCalls(
            self.events,
            self.results,
            self.request,
            session.session_id,
            sandbox,
            patience_s,
        )

    async def _in_time(self, actor: Actor) -> SessionEnding:
        """Act until the session has spent its deadline; waiting for our servers is not spent time."""
        limit_s = self.request.limits.deadline_s
        acting = asyncio.create_task(actor.act(), name=f"agent of {self.request.rollout_id}")
        try:
            while not acting.done() and (left_s := limit_s - await actor.spent_s()) > 0:
                await asyncio.wait({acting}, timeout=max(left_s, min(LOOK_S, limit_s / 10)))
        finally:
            finished = acting.done()
            acting.cancel()
            await asyncio.wait({acting})
        return acting.result() if finished else await actor.late()

    async def _until_cut(self, actor: Actor, calls: ToolCalls) -> SessionEnding:
        """Act, unless the group is scored meanwhile."""
        self._acting = asyncio.create_task(self._run_actor(actor, calls), name=f"acting in {self.request.rollout_id}")
        try:
            return await self._acting
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._cut or (task is not None and task.cancelling()):  # the runner stops: its successor cuts
                raise
            self.was_cut = True
            await calls.cancel(CUT)
            return SessionEnding(Outcome.cancelled, CUT)
        finally:
            if not self._acting.done():
                self._acting.cancel()
            self._acting = None

    async def _run_actor(self, actor: Actor, calls: ToolCalls) -> SessionEnding:
        """Act within the deadline, and map every way to end to an outcome."""
        try:
            if self._broken is not None:
                raise self._broken
            calls.begin(await first_workspace(self._task, self.blobs))
            return await self._in_time(actor)
        except ContextExceeded:
            return SessionEnding(Outcome.truncated, "context")
        except RequestRejected as error:
            return SessionEnding(Outcome.agent_error, str(error))
        except (GatewayFailed, GatewayUnavailable, OpponentMissing, ToolUnanswered, ToolBroken, BrokenRecipe) as error:
            return SessionEnding(Outcome.infra_failure, f"{type(error).__name__}: {error}")


def _is_outage(ending: SessionEnding) -> bool:
    """Return whether lack of a server ended the session, by the reason on the log. That is no attempt at the task."""
    return ending.outcome is Outcome.infra_failure and ending.reason.partition(":")[0] in OUTAGES


def _actor(attempt: Attempt, state: SessionState | None) -> Actor:
    """Return the actor for the task's agent. `state` is that of a session that another runner may have begun."""
    agent = attempt.task.agent
    if isinstance(agent, CommandAgent):
        return CommandActor(attempt, agent)
    if attempt.task.game is not None:
        return GameLoop(attempt, state)
    if attempt.task.user is not None:
        return UserLoop(attempt, state)
    return ToolLoop(attempt, state) if agent is None else FunctionActor(attempt, agent, state)


def _task_without_source(name: str, row: TaskRow) -> Task:
    """Return a task for sessions that only record why their source could not make the real one."""
    verifier = FunctionVerifier("none", "0", lambda _: Verdict(0.0))  # never runs: the session ends as infra_failure
    return Task(id="", row=row, messages=(), verifier=verifier, environment=Environment(name=name, version=""))
