"""Agents that an environment brings: a function, or a program. The built-in loop is in `tool_loop`.

A function may keep state in variables, so under another runner it begins
anew, in a session of its own. A program runs in the sandbox, whichever runner waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from prometheus_client import Counter

from turnlog.infra.environments.agents import AgentError, AgentSession, CommandAgent, FunctionAgent, TruncatedRun
from turnlog.infra.environments.episodes import (
    CommandEnd,
    FunctionVerifier,
    Judged,
    Message,
    SandboxAnswer,
    SandboxCall,
    Verdict,
)
from turnlog.infra.environments.sources import call_recipe
from turnlog.infra.environments.tasks import Opening, Task, with_opening
from turnlog.infra.environments.tools import AGENT
from turnlog.producers.gateway_client import (
    Completion,
    GatewayClient,
    GatewayFailed,
    OpenSession,
    SessionMoved,
    SessionState,
    Speaker,
)
from turnlog.producers.tool_calls import NO_TOOL, UNBEGUN, NoWorker, ToolCalls, answer_of, opening_id
from turnlog.schemas.events import Outcome, RolloutRequested, ToolCallCompleted, ToolStatus
from turnlog.schemas.ids import call_id
from turnlog.schemas.types import TurnId

log = logging.getLogger(__name__)
TURNS = Counter("turnlog_runner_turns", "Turns taken by agents")
TOOL_CALLS = Counter("turnlog_runner_tool_calls", "Tool calls answered", ["status"])
STEP_REPEATS = 4
"""Maximum number of requests for one step; its session may move between gateways."""
OBEY_S = 5.0
"""Seconds that a cancelled function has to end; after that it is left alone."""
LAST_LINES = 2000
"""Number of characters of a function's traceback, or of a program's output, that go into the reason of its session's
end."""


WAITED = "Outage"
"""Prefix of the reason of a session that our own servers prevented from continuing."""
LOST_TURN = "the last turn that it asked for came to nothing for want of an engine, a log or its gateway"
LOST_TIME = "it was cut off, and how long it had waited for its gateway nobody knows"
SLACK_S = 1.0
"""Seconds of waiting that make no difference to an agent."""


class ToolBroken(Exception):
    """A tool call ended as infra_error or was cancelled: our failure, not the agent's."""


@dataclass(frozen=True, slots=True)
class SessionEnding:
    """Outcome of a session, and the reason."""

    outcome: Outcome
    reason: str = ""


ENDINGS = {
    "context_length_exceeded": SessionEnding(Outcome.truncated, "context"),
    "turns_spent": SessionEnding(Outcome.truncated, "max_turns"),
    "stray_image_token": SessionEnding(Outcome.agent_error, "stray_image_token"),
}
"""Error code of a request that the gateway refused -> the ending of the session that follows from it."""


@dataclass(slots=True)
class Attempt:
    """A session of a rollout, and what may be used in it."""

    number: int
    request: RolloutRequested
    """The request, with the task's own limits."""
    task: Task
    gateway: GatewayClient
    session: OpenSession
    calls: ToolCalls
    patience_s: float
    """Seconds to wait for the answer of a call that must end at once."""

    async def complete(
        self, messages: list[Message], tools: Sequence[dict[str, Any]], *, step: int, speaker: Speaker | None = None
    ) -> Completion:
        """Return the next turn. A session that moved to another gateway is opened again and continues there. Raises
        GatewayClientError."""
        for _ in range(STEP_REPEATS):
            try:
                return await self.gateway.complete(self.session, messages, tools, step=step, speaker=speaker)
            except SessionMoved:
                self.session = await self.gateway.open(self.request, self.task, self.number)
        raise GatewayFailed(f"session {self.session.session_id}: no gateway keeps it for step {step}")

    async def call(self, call: SandboxCall, name: str) -> ToolCallCompleted:
        """Run a tool call, and return its answer. Raises ToolUnanswered, ToolBroken."""
        done = await self.calls.call(call, name)
        TOOL_CALLS.labels(done.status.value).inc()
        if done.reason == UNBEGUN:
            raise NoWorker(f"call {done.call_id} found no sandbox in time: see [sandbox] slots")
        if done.status in (ToolStatus.infra_error, ToolStatus.cancelled):
            raise ToolBroken(f"call {done.call_id} ended as {done.status.value}: {done.reason}")
        return done


class Actor(Protocol):
    """Acts in one session."""

    @property
    def judged_turn(self) -> TurnId | Sequence[TurnId] | None:
        """Last turn of what the reward judges, or that of each player; None for all that was delivered."""
        ...

    @property
    def verifier(self) -> Judged:
        """Verifier of the session."""
        ...

    async def act(self) -> SessionEnding:
        """Act until the agent ends. Raises the errors that a rollout turns into outcomes: GatewayClientError,
        ToolUnanswered, ToolBroken, BrokenRecipe."""
        ...

    async def spent_s(self) -> float:
        """Return the seconds that the session itself has spent; waiting for engines, sandboxes and gateways does not
        count. The result is too low while nobody can report the true value."""
        ...

    async def late(self) -> SessionEnding:
        """Return the ending in place of `act`, which the session's deadline cut off. Raises the same errors."""
        ...

    async def messages(self) -> list[Message]:
        """Return the messages for the verifier. Raises GatewayClientError."""
        ...

    @property
    def command_end(self) -> CommandEnd | None:
        """End of the program; None if the agent is no program."""
        ...


async def _recorded_messages(attempt: Attempt) -> list[Message]:
    """Return the messages that the gateway recorded of an agent that requests its turns itself."""
    return list((await attempt.gateway.state(attempt.session)).messages)


async def cut_off(attempt: Attempt) -> SessionEnding:
    """Cancel the pending call, and return the ending of a session that has spent its deadline."""
    await attempt.calls.cancel("deadline")
    return SessionEnding(Outcome.truncated, "deadline")


def interrupted_ending(why: str) -> SessionEnding:
    """Return the ending of a session that our own servers kept from going on."""
    return SessionEnding(Outcome.infra_failure, f"{WAITED}: {why}")


def opening_from(task: Task, done: ToolCallCompleted) -> Opening:
    """Return what the answer of the opening call adds to the session. Raises ToolBroken, BrokenRecipe."""
    if done.status is not ToolStatus.ok:
        said = done.output.decode(errors="replace")[-LAST_LINES:]
        raise ToolBroken(f"the opening call ended as {done.status.value} {done.reason}: {said}")
    return Opening() if task.opened is None else call_recipe(task.environment.name, task.opened, answer_of(done))


class FunctionActor:
    """A function of the environment that runs in this process and requests its turns from the gateway itself. See
    Actor."""

    judged_turn = command_end = None

    def __init__(self, attempt: Attempt, agent: FunctionAgent, state: SessionState | None) -> None:
        self._attempt, self._agent, self._state = attempt, agent, state
        self._broken: Exception | None = None
        self._calls, self._one_call = 0, asyncio.Lock()
        self._began: float | None = None
        self._queued_s = 0.0
        """Seconds in which its calls waited for a sandbox worker."""
        self._called: float | None = None
        """Time since which a call is pending; None if none is."""
        self.verifier: Judged = attempt.task.verifier

    async def messages(self) -> list[Message]:
        return await _recorded_messages(self._attempt)

    async def spent_s(self) -> float:
        if self._began is None:
            return 0.0
        state = await self._attempt.gateway.glimpse(self._attempt.session)
        if state is None:
            return 0.0
        now, queued_s = asyncio.get_running_loop().time(), self._queued_s
        if self._called is not None:
            queued_s += now - self._called - (self._attempt.calls.running_s or 0.0)
        return now - self._began - state.waited_s - queued_s

    async def late(self) -> SessionEnding:
        ending = await cut_off(self._attempt)
        state = await self._attempt.gateway.state(self._attempt.session)
        return interrupted_ending(LOST_TIME) if state.taken_over or state.failed_by_us else ending

    async def act(self) -> SessionEnding:
        if self._state is not None and self._state.messages:
            return SessionEnding(
                Outcome.infra_failure, "its runner died: a function cannot be continued, and begins anew"
            )
        attempt = self._attempt
        task, opening = attempt.task, await self._open()
        opened = with_opening(task, opening)
        session = AgentSession(
            base_url=f"{attempt.gateway.url}/v1",
            api_key=attempt.session.agent_token,
            model=attempt.gateway.model,
            task=task.row,
            messages=(*task.messages, *opening.messages),
            tools=opened.tools,
            tool_call=lambda name, text: call_recipe(task.environment.name, opened.tool_call, name, text),
            max_turns=attempt.request.limits.max_turns,
            call=self._call,
        )
        self._began = asyncio.get_running_loop().time()
        ending = await self._run_function(session)
        state = await attempt.gateway.state(attempt.session)
        TURNS.inc(state.turns)
        if self._broken is not None:  # however the function handled it: our own failure never becomes its reward
            raise self._broken
        if ending.outcome is Outcome.infra_failure and state.refused in ENDINGS:
            return ENDINGS[state.refused]
        if state.failed_by_us:
            return interrupted_ending(LOST_TURN)
        if ending.outcome is not Outcome.infra_failure and not state.turns:
            return SessionEnding(Outcome.infra_failure, f"agent {self._agent.name} ended without a turn of the policy")
        return ending

    async def _open(self) -> Opening:
        """Make the task's opening call. Its stored answer counts if another runner made it. Raises ToolUnanswered,
        ToolBroken, BrokenRecipe."""
        attempt, call = self._attempt, self._attempt.task.opening
        if call is None:
            return Opening()
        return opening_from(attempt.task, await attempt.call(call, opening_id(attempt.session.session_id)))

    async def _run_function(self, session: AgentSession) -> SessionEnding:
        """Run the function, and return its ending."""
        running = asyncio.create_task(
            _run_contained(self._agent, session), name=f"agent of {self._attempt.session.session_id}"
        )
        try:
            await asyncio.wait({running})
        finally:
            if not running.done():
                running.cancel()
                await asyncio.wait({running}, timeout=OBEY_S)
                if not running.done():
                    log.warning(
                        "agent %s still runs %g s after it was cancelled: ignoring it", self._agent.name, OBEY_S
                    )
        said = running.result()
        match said:
            case AgentError():
                return SessionEnding(Outcome.agent_error, str(said))
            case BaseException():
                lines = "".join(traceback.format_exception(said))[-LAST_LINES:]
                return SessionEnding(Outcome.infra_failure, f"agent {self._agent.name}: {lines}")
            case Verdict():
                self._judged_by(said)
                return SessionEnding(Outcome.completed)
            case TruncatedRun(reason, verdict):
                if verdict is not None:
                    self._judged_by(verdict)
                return SessionEnding(Outcome.truncated, reason)
            case None:
                return SessionEnding(Outcome.completed)
        return SessionEnding(
            Outcome.infra_failure,
            f"agent {self._agent.name} returned {type(said).__name__}: it returns a Verdict, a TruncatedRun or None",
        )

    def _judged_by(self, verdict: Verdict) -> None:
        self.verifier = FunctionVerifier(self._agent.name, self._agent.version, lambda _: verdict)

    async def _call(self, call: SandboxCall) -> SandboxAnswer:
        """Run one call at a time, however the function makes them. Raises ToolUnanswered, ToolBroken."""
        if call.tool == AGENT.name:
            return SandboxAnswer(False, NO_TOOL)
        async with self._one_call:
            self._calls += 1
            name = call_id(self._attempt.session.session_id, "", self._calls, 0, "agent")
            self._called = began = asyncio.get_running_loop().time()
            try:
                done = await self._attempt.call(call, name)
            except Exception as error:
                self._broken = error
                raise
            finally:
                self._called = None
            self._queued_s += max(0.0, asyncio.get_running_loop().time() - began - done.duration_s)
        return answer_of(done)


async def _run_contained(agent: FunctionAgent, session: AgentSession) -> object:
    """Return what the function returned or raised; foreign code must not end the process by an exit."""
    try:
        return await agent.run(session)
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return error


class CommandActor:
    """A program that runs as one call in the session's sandbox, and requests its turns from the gateway from there. See
    Actor.

    Another runner waits for the same call: the program does not depend on a runner, and its call_id is the session's,
    so that it does not run twice. A call whose sandbox or worker disappears is never repeated in its session."""

    judged_turn = None

    def __init__(self, attempt: Attempt, agent: CommandAgent) -> None:
        self._attempt, self._agent = attempt, agent
        self.verifier: Judged = attempt.task.verifier
        self.command_end: CommandEnd | None = None

    async def messages(self) -> list[Message]:
        return await _recorded_messages(self._attempt)

    async def act(self) -> SessionEnding:
        attempt = self._attempt
        name = call_id(attempt.session.session_id, "", 1, 0, AGENT.name)
        given = {part: self._resolve_part(getattr(self._agent, part)) for part in ("argv", "env", "files")}
        sealed = attempt.gateway.seal_token(attempt.session, name)
        arguments = {"argv": list(given["argv"]), "env": dict(given["env"]), "files": dict(given["files"])}
        if self._agent.mcp:
            arguments["mcp"] = [dict(server) for server in self._agent.mcp]
        call = SandboxCall(AGENT.name, {**arguments, "credential": sealed})
        return await self._ending(await attempt.calls.call(call, name, while_it_runs=True))

    async def spent_s(self) -> float:
        running_s = self._attempt.calls.running_s
        state = None if running_s is None else await self._attempt.gateway.glimpse(self._attempt.session)
        return 0.0 if running_s is None or state is None else running_s - state.waited_s

    async def late(self) -> SessionEnding:
        done = await self._attempt.calls.end_pending("deadline", self._attempt.patience_s)
        if done is None:  # it had ended just before
            return SessionEnding(Outcome.truncated, "deadline")
        return await self._ending(done)

    def _resolve_part(self, part: Any) -> Any:
        task = self._attempt.task
        return call_recipe(task.environment.name, part, task.row) if callable(part) else part

    async def _ending(self, done: ToolCallCompleted) -> SessionEnding:
        """Return the program's ending. Its exit status is evidence of neither success nor failure. Raises ToolBroken,
        GatewayClientError."""
        TOOL_CALLS.labels(done.status.value).inc()
        said = done.output.decode(errors="replace")
        if done.status in (ToolStatus.infra_error, ToolStatus.refused):
            raise ToolBroken(f"agent {self._agent.name} ended as {done.status.value}: {done.reason}: {said}")
        self.command_end = CommandEnd(done.exit_code, said, done.workspace)
        state = await self._attempt.gateway.state(self._attempt.session)
        TURNS.inc(state.turns)
        how = done.reason or f"exit {done.exit_code}"
        if not state.turns:
            last = said[-LAST_LINES:]
            return SessionEnding(
                Outcome.infra_failure, f"agent {self._agent.name} ended without a turn of the policy ({how}): {last}"
            )
        if state.refused in ENDINGS:
            return ENDINGS[state.refused]
        if done.status in (ToolStatus.timeout, ToolStatus.cancelled):
            own_s, limit_s = done.duration_s - state.waited_s, self._attempt.request.limits.deadline_s
            if state.taken_over or state.failed_by_us or (state.waited_s > SLACK_S and own_s < limit_s - SLACK_S):
                return interrupted_ending(LOST_TIME)
            return SessionEnding(Outcome.truncated, "deadline")
        if state.failed_by_us:
            return interrupted_ending(LOST_TURN)
        if done.reason:  # it hit a limit of its sandbox, or the sandbox ended
            return SessionEnding(Outcome.agent_error, how)
        return SessionEnding(Outcome.completed, "" if not done.exit_code else how)
