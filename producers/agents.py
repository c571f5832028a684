"""Agents of a session: the built-in loop over tools, or a function or a program that an environment (`Recipe`) brings.

The loop decides from the session's messages alone, so that whoever owns the task can continue it: the same step is the
same turn, and the same call has the same id. A function may keep state in variables, so under another runner it begins
anew, in a session of its own. A program runs in the sandbox, whichever runner waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from dataclasses import dataclass, field
from typing import Any, Protocol

from prometheus_client import Counter

from turnlog.infra.environments.recipes import (
    AgentError,
    AgentSession,
    CommandAgent,
    CommandEnd,
    FunctionAgent,
    FunctionVerifier,
    Judged,
    Message,
    Played,
    Recipe,
    SandboxAnswer,
    SandboxCall,
    TaskRow,
    Verdict,
    agent_of,
    call_recipe,
    played,
)
from turnlog.infra.environments.tools import AGENT
from turnlog.producers.gateway_client import GatewayClient, GatewayFailed, OpenSession, SessionMoved, SessionState
from turnlog.producers.tool_calls import UNBEGUN, NoWorker, ToolCalls
from turnlog.schemas.events import Outcome, RolloutRequested, ToolCallCompleted, ToolStatus
from turnlog.schemas.ids import call_id
from turnlog.schemas.types import TurnId

log = logging.getLogger(__name__)
TURNS = Counter("turnlog_runner_turns", "Turns taken by agents")
TOOL_CALLS = Counter("turnlog_runner_tool_calls", "Tool calls answered", ["status"])
STEP_REPEATS = 4
"""Maximum number of requests for one step; its session may move between gateways."""
NO_TOOL = f"there is no tool {AGENT.name!r}"
"""Answer to a model that calls the runner's own tool, however it learned the name."""
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
class AgentConversation:
    """Messages so far, and the finish reason of the last assistant message."""

    messages: list[Message]
    finish_reason: str = ""
    last_turn: TurnId | None = None
    steps: int = field(init=False)

    def __post_init__(self) -> None:
        self.steps = sum(message["role"] == "assistant" for message in self.messages)


@dataclass(slots=True)
class Attempt:
    """A session of a rollout, and what may be used in it."""

    number: int
    request: RolloutRequested
    task: TaskRow
    recipe: Recipe
    gateway: GatewayClient
    session: OpenSession
    calls: ToolCalls
    patience_s: float
    """Seconds to wait for the answer of a call that must end at once."""

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
    def judged_turn(self) -> TurnId | None:
        """Last turn of what the reward judges; None for all that was delivered."""
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


def acting(attempt: Attempt, state: SessionState | None) -> Actor:
    """Return the actor for the environment's agent. `state` is that of a session that another runner may have begun."""
    agent = agent_of(attempt.recipe)
    if isinstance(agent, CommandAgent):
        return CommandActor(attempt, agent)
    return ToolLoop(attempt, state) if agent is None else FunctionActor(attempt, agent, state)


async def _recorded_messages(attempt: Attempt) -> list[Message]:
    """Return the messages that the gateway recorded of an agent that requests its turns itself."""
    return list((await attempt.gateway.state(attempt.session)).messages)


async def _cut_off(attempt: Attempt) -> SessionEnding:
    await attempt.calls.cancel("deadline")
    return SessionEnding(Outcome.truncated, "deadline")


def _interrupted_ending(why: str) -> SessionEnding:
    return SessionEnding(Outcome.infra_failure, f"{WAITED}: {why}")


class ToolLoop:
    """The built-in agent: answer the model's tool calls and request the next turn, until the model makes no more calls
    or a limit is reached. The time that it has spent is derived from records: the seconds in which an engine sampled
    its turns, and in which a sandbox worked on its calls. So it is the same under whichever runner continues. See
    Actor."""

    command_end = None

    def __init__(self, attempt: Attempt, state: SessionState | None) -> None:
        self._attempt, self._state = attempt, state
        self._conversation = AgentConversation([])
        self._played: Played | None = None
        self._spent_s = (state.own_s if state else 0.0) + attempt.calls.answered_s()
        self._stepping = False
        self._playing_since: float | None = None

    async def spent_s(self) -> float:
        spent_s = self._spent_s
        if self._playing_since is not None:
            return spent_s + asyncio.get_running_loop().time() - self._playing_since
        if (running_s := self._attempt.calls.running_s) is not None:
            return spent_s + running_s
        state = await self._attempt.gateway.glimpse(self._attempt.session) if self._stepping else None
        return spent_s + (state.running_s if state else 0.0)

    @property
    def judged_turn(self) -> TurnId | None:
        return self._conversation.last_turn

    @property
    def verifier(self) -> Judged:
        return self._attempt.recipe.verifier

    async def messages(self) -> list[Message]:
        return self._conversation.messages

    async def late(self) -> SessionEnding:
        return await _cut_off(self._attempt)

    async def act(self) -> SessionEnding:
        await self._begin()
        conversation, limits = self._conversation, self._attempt.request.limits
        messages = conversation.messages
        while True:
            if self._spent_s >= limits.deadline_s:
                return SessionEnding(Outcome.truncated, "deadline")
            if self._played is not None and self._played.done:
                return SessionEnding(Outcome.completed)
            if messages[-1]["role"] == "assistant":
                if conversation.finish_reason == "length":
                    return SessionEnding(Outcome.truncated, "max_new_tokens")
                if not messages[-1].get("tool_calls"):
                    return SessionEnding(Outcome.completed)
                if conversation.steps >= limits.max_turns and self._played is None:
                    return SessionEnding(Outcome.truncated, "max_turns")
                messages += [await self._answer(call) for call in messages[-1]["tool_calls"]]
            elif conversation.steps >= limits.max_turns and self._played is not None:  # its last actions still count
                return SessionEnding(Outcome.truncated, "max_turns")
            else:
                await self._step()

    async def _begin(self) -> None:
        """Start where the session stands on the log. Calls that were answered under another runner count, so that
        call_seq continues; actions in a simulation are repeated."""
        recipe, state = self._attempt.recipe, self._state
        if state is None or not state.messages:
            self._conversation = AgentConversation(call_recipe(recipe, recipe.messages, self._attempt.task))
        else:
            self._conversation = AgentConversation(list(state.messages), state.finish_reason, state.last_turn)
        task, messages = self._attempt.task, self._conversation.messages
        if call_recipe(recipe, getattr, recipe, "simulation", None) is not None:  # which may take long to create
            self._played = await asyncio.to_thread(call_recipe, recipe, played, recipe, task, messages)
        before = [call for said in messages[:-1] for call in said.get("tool_calls") or ()]
        if self._played is None:
            self._attempt.calls.resume(sum(isinstance(self._map_call(call), SandboxCall) for call in before))

    async def _step(self) -> None:
        """Take one turn. A session that moved to another gateway is opened again and continues there."""
        attempt, conversation, self._stepping = self._attempt, self._conversation, True
        for _ in range(STEP_REPEATS):
            try:
                turn = await attempt.gateway.complete(
                    attempt.session, conversation.messages, attempt.recipe.tools, step=conversation.steps
                )
                break
            except SessionMoved:
                attempt.session = await attempt.gateway.open(attempt.request, attempt.recipe, attempt.number)
        else:
            raise GatewayFailed(
                f"session {attempt.session.session_id}: no gateway keeps it for step {conversation.steps}"
            )
        self._stepping = False
        self._spent_s += turn.own_s
        conversation.messages.append(turn.message)
        conversation.finish_reason, conversation.last_turn = turn.finish_reason, turn.turn
        conversation.steps += 1
        TURNS.inc()

    async def _answer(self, call: Message) -> Message:
        """Return the tool message that answers one call. Raises ToolUnanswered, ToolBroken, BrokenRecipe."""
        recipe, name, arguments = self._attempt.recipe, call["function"]["name"], call["function"]["arguments"]
        if self._played is not None:
            self._playing_since = began = asyncio.get_running_loop().time()
            content = await asyncio.to_thread(call_recipe, recipe, self._played.call, name, arguments)
            self._spent_s += asyncio.get_running_loop().time() - began
            self._playing_since = None
            TOOL_CALLS.labels("simulated").inc()
        elif isinstance(mapped := self._map_call(call), str):
            content = mapped
            TOOL_CALLS.labels("unparsable").inc()
        else:
            done = await self._attempt.call(mapped, call["id"])
            self._spent_s += done.duration_s
            content = call_recipe(recipe, recipe.tool_answer, done.status is ToolStatus.ok, done.output)
        return {"role": "tool", "tool_call_id": call["id"], "content": content}

    def _map_call(self, call: Message) -> SandboxCall | str:
        function, recipe = call["function"], self._attempt.recipe
        mapped = call_recipe(recipe, recipe.tool_call, function["name"], function["arguments"])
        return NO_TOOL if isinstance(mapped, SandboxCall) and mapped.tool == AGENT.name else mapped


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
        self.verifier: Judged = attempt.recipe.verifier

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
        ending = await _cut_off(self._attempt)
        state = await self._attempt.gateway.state(self._attempt.session)
        return _interrupted_ending(LOST_TIME) if state.taken_over or state.failed_by_us else ending

    async def act(self) -> SessionEnding:
        if self._state is not None and self._state.messages:
            return SessionEnding(
                Outcome.infra_failure, "its runner died: a function cannot be continued, and begins anew"
            )
        attempt = self._attempt
        session = AgentSession(
            base_url=f"{attempt.gateway.url}/v1",
            api_key=attempt.session.agent_token,
            model=attempt.gateway.model,
            task=attempt.task,
            tools=attempt.recipe.tools,
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
            return _interrupted_ending(LOST_TURN)
        if ending.outcome is not Outcome.infra_failure and not state.turns:
            return SessionEnding(Outcome.infra_failure, f"agent {self._agent.name} ended without a turn of the policy")
        return ending

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
                self.verifier = FunctionVerifier(self._agent.name, self._agent.version, lambda _: said)
                return SessionEnding(Outcome.completed)
            case None:
                return SessionEnding(Outcome.completed)
        return SessionEnding(
            Outcome.infra_failure,
            f"agent {self._agent.name} returned {type(said).__name__}: it returns a Verdict or None",
        )

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
        return SandboxAnswer(done.status is ToolStatus.ok, done.output.decode(errors="replace"), done.exit_code)


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
        self.verifier: Judged = attempt.recipe.verifier
        self.command_end: CommandEnd | None = None

    async def messages(self) -> list[Message]:
        return await _recorded_messages(self._attempt)

    async def act(self) -> SessionEnding:
        attempt = self._attempt
        name = call_id(attempt.session.session_id, "", 1, 0, AGENT.name)
        given = {part: self._resolve_part(getattr(self._agent, part)) for part in ("argv", "env", "files")}
        sealed = attempt.gateway.seal_token(attempt.session, name)
        arguments = {"argv": list(given["argv"]), "env": dict(given["env"]), "files": dict(given["files"])}
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
        return call_recipe(self._attempt.recipe, part, self._attempt.task) if callable(part) else part

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
                return _interrupted_ending(LOST_TIME)
            return SessionEnding(Outcome.truncated, "deadline")
        if state.failed_by_us:
            return _interrupted_ending(LOST_TURN)
        if done.reason:  # it hit a limit of its sandbox, or the sandbox ended
            return SessionEnding(Outcome.agent_error, how)
        return SessionEnding(Outcome.completed, "" if not done.exit_code else how)
