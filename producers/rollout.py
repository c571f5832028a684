"""One white-box rollout: a loop over chat completions with tools, its verdict, and its retries.

Everything it decides follows from the log, so whoever owns the task continues it: the session's messages say which
step is next, the same step is the same turn, the same call has the same id, the same verdict the same event_id.

A verifier judges an episode; what comes of it is a RewardAssigned with evidence or a RewardFailed. One judge per kind
of verifier, found by the verifier's class (`JUDGES`); a recipe names its verifier.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import orjson
from prometheus_client import Counter

from turnlog.infra.event_log import EventLog
from turnlog.infra.recipes import (
    BrokenRecipe,
    Episode,
    FunctionVerifier,
    Message,
    Recipe,
    SandboxCall,
    Verdict,
    called,
    first_workspace,
)
from turnlog.infra.roles import log_lines
from turnlog.producers.gateway_client import (
    ContextExceeded,
    EpochLost,
    GatewayClient,
    GatewayFailed,
    GatewayUnavailable,
    RequestRejected,
    Session,
    SessionOver,
    SessionState,
)
from turnlog.producers.tool_calls import Results, ToolCalls, ToolUnanswered
from turnlog.schemas import ids
from turnlog.schemas.events import Outcome, RewardAssigned, RewardFailed, RolloutRequested, ToolStatus, Verifier
from turnlog.schemas.types import TurnId
from turnlog.settings import RunnerSettings

Judge = Callable[[Any, Episode], Awaitable[Verdict | BaseException]]


class NoVerdict(Exception):
    """What a verifier gave is no verdict; says why."""


async def judge_by_function(verifier: FunctionVerifier, episode: Episode) -> Verdict | BaseException:
    """Run the function in a thread: it is a recipe's code and may take its time."""

    def contained() -> Verdict | BaseException:
        try:
            return verifier.judge(episode)
        except BaseException as error:  # an exit would end the process, a StopIteration never leaves a thread
            return error

    return await asyncio.to_thread(contained)


JUDGES: dict[type, Judge] = {FunctionVerifier: judge_by_function}


async def verdict(
    verifier: FunctionVerifier, episode: Episode, request: RolloutRequested, session_id: str
) -> RewardAssigned | RewardFailed:
    """The record of the verdict; its event_id depends on session and verifier alone, so that judging again repeats it.

    Whatever foreign code raises, a reward that is not finite, and evidence that is no JSON become a RewardFailed.
    """
    # gather hands a foreign exception over as a value; a cancellation of this task still comes through.
    [result] = await asyncio.gather(JUDGES[type(verifier)](verifier, episode), return_exceptions=True)
    by = Verifier(verifier.name, verifier.version)
    try:
        value, components, evidence = _parts(result)
    except Exception as error:  # foreign values may do anything when they are looked at
        return RewardFailed(
            event_id=ids.digest("RewardFailed", session_id, by.name, by.version),
            run_id=request.run_id,
            group_id=request.group_id,
            session_id=session_id,
            floor=request.floor,
            verifier=by,
            cause=str(error) if isinstance(error, NoVerdict) else f"the verdict cannot be read: {type(error).__name__}",
        )
    return RewardAssigned(
        event_id=ids.digest("RewardAssigned", session_id, by.name, by.version),
        run_id=request.run_id,
        group_id=request.group_id,
        session_id=session_id,
        floor=request.floor,
        value=value,
        components=components,
        verifier=by,
        evidence=evidence,
    )


def _parts(result: Verdict | BaseException) -> tuple[float, dict[str, float], bytes]:
    """Reward, components and evidence as they are recorded. Raises NoVerdict, and whatever foreign values raise."""
    if isinstance(result, BaseException):
        raise NoVerdict(f"{type(result).__name__}: {result}")
    if not isinstance(result, Verdict):
        raise NoVerdict(f"the verifier returned {type(result).__name__}, not a Verdict")
    value, components = float(result.value), {str(name): float(part) for name, part in result.components.items()}
    if not all(math.isfinite(part) for part in (value, *components.values())):
        raise NoVerdict(f"the reward or a component of it is not finite: {value}, {components}")
    try:
        return value, components, json.dumps(result.evidence, sort_keys=True).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise NoVerdict(f"the evidence is no JSON: {error}") from error


log = logging.getLogger(__name__)
SESSIONS = Counter("turnlog_runner_sessions", "Sessions ended", ["outcome"])
TURNS = Counter("turnlog_runner_turns", "Turns taken by agents")
TOOL_CALLS = Counter("turnlog_runner_tool_calls", "Tool calls answered", ["status"])
REWARDS = Counter("turnlog_runner_rewards", "Verdicts", ["verdict"])
REWARD_SUM = Counter("turnlog_runner_reward_sum", "Sum of the positive rewards assigned")
LIVE = (Outcome.completed, Outcome.truncated, Outcome.agent_error)
"""Outcomes of an agent that lived: they get a verdict."""
STEP_REPEATS = 4
"""Times that one step may be asked for: its session may move between gateways."""


class ToolBroken(Exception):
    """A tool call ended as infra_error or was cancelled: our failure, not the agent's."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a session ended, and why."""

    outcome: Outcome
    reason: str = ""


@dataclass(slots=True)
class Conversation:
    """What was said so far, and why the last assistant message ended."""

    messages: list[Message]
    finish_reason: str = ""
    last_turn: TurnId | None = None
    steps: int = field(init=False)

    def __post_init__(self) -> None:
        self.steps = sum(message["role"] == "assistant" for message in self.messages)


class Rollout:
    """One RolloutRequested, from its first attempt to its last."""

    def __init__(
        self,
        request: RolloutRequested,
        recipe: Recipe,
        settings: RunnerSettings,
        gateway: GatewayClient,
        events: EventLog,
        results: Results,
    ) -> None:
        """`request.task` holds its bytes inline."""
        assert isinstance(request.task, bytes)
        self._request = request
        self._task = orjson.loads(request.task)
        self._recipe = recipe
        self._settings = settings
        self._gateway = gateway
        self._events = events
        self._results = results

    async def run(self, *, resume: bool) -> None:
        """Until the rollout has a final session. `resume`: another owner may have begun it.

        Per attempt: 1. open the session; 2. act until the agent ends; 3. write the verdict; 4. finish the session.
        Raises GatewayUnavailable, GatewayRefused, LogUnavailable.
        """
        log_lines.about(group_id=self._request.group_id)
        for attempt in range(self._settings.max_attempts):
            final = attempt + 1 == self._settings.max_attempts
            session = await self._gateway.open(self._request, self._recipe, attempt)
            log_lines.about(session_id=session.session_id)
            state = await self._gateway.state(session) if resume else None
            if state is not None and state.finished:
                ending = Ending(state.outcome)
            else:
                try:
                    ending = await self._attempt(session, state, attempt, final)
                except SessionOver as over:
                    log.warning("rollout %s: %s", self._request.rollout_id, over)
                    return
            if ending.outcome is not Outcome.infra_failure:
                return

    async def _attempt(self, session: Session, state: SessionState | None, attempt: int, final: bool) -> Ending:
        conversation = Conversation([])
        try:
            conversation = self._conversation(state)
            ending = await self._guarded(session, conversation, self._calls(session, conversation), attempt)
        except BrokenRecipe as error:
            ending = Ending(Outcome.infra_failure, f"BrokenRecipe: {error}")
        if ending.outcome in LIVE:
            await self._judge(session, conversation, ending)
        else:
            log.warning("rollout %s, attempt %d: %s", self._request.rollout_id, attempt, ending.reason)
        failed = ending.outcome not in LIVE
        await self._gateway.finish(
            session,
            ending.outcome,
            ending.reason,
            final=final or not failed,
            reward=not failed,
            judged=None if failed else conversation.last_turn,
        )
        SESSIONS.labels(ending.outcome.value).inc()
        return ending

    def _conversation(self, state: SessionState | None) -> Conversation:
        if state is None or not state.messages:
            return Conversation(called(self._recipe, self._recipe.messages, self._task))
        return Conversation(list(state.messages), state.finish_reason, state.last_turn)

    async def _guarded(self, session: Session, conversation: Conversation, calls: ToolCalls, attempt: int) -> Ending:
        """Act within the deadline; every way to end has its outcome, but for a recipe's own. Raises BrokenRecipe."""
        try:
            async with asyncio.timeout(self._request.limits.deadline_s) as deadline:
                return await self._act(session, conversation, calls, attempt)
        except TimeoutError:
            if not deadline.expired():
                raise
            await calls.cancel("deadline")
            return Ending(Outcome.truncated, "deadline")
        except ContextExceeded:
            return Ending(Outcome.truncated, "context")
        except RequestRejected as error:
            return Ending(Outcome.agent_error, str(error))
        except (GatewayFailed, GatewayUnavailable, ToolUnanswered, ToolBroken) as error:
            return Ending(Outcome.infra_failure, f"{type(error).__name__}: {error}")

    def _calls(self, session: Session, conversation: Conversation) -> ToolCalls:
        """The session's calls; those answered under another runner count, so that call_seq goes on."""
        calls = ToolCalls(
            self._events,
            self._results,
            self._request,
            session.session_id,
            self._recipe.sandbox,
            self._settings.tool_deadline_s,
            first_workspace(self._recipe),
        )
        before = [call for message in conversation.messages[:-1] for call in message.get("tool_calls") or ()]
        calls.resume(sum(isinstance(self._mapped(call), SandboxCall) for call in before))
        return calls

    async def _act(self, session: Session, conversation: Conversation, calls: ToolCalls, attempt: int) -> Ending:
        """The agent: answer its tool calls, ask for the next turn, until it calls no more or a limit is reached."""
        limits, messages = self._request.limits, conversation.messages
        while True:
            if messages[-1]["role"] == "assistant":
                if conversation.finish_reason == "length":
                    return Ending(Outcome.truncated, "max_new_tokens")
                if not messages[-1].get("tool_calls"):
                    return Ending(Outcome.completed)
                if conversation.steps >= limits.max_turns:
                    return Ending(Outcome.truncated, "max_turns")
                messages += await self._answers(messages[-1], calls)
            await self._step(session, conversation, attempt)

    async def _step(self, session: Session, conversation: Conversation, attempt: int) -> None:
        """One turn. A session that moved to another gateway is opened again and goes on there."""
        for _ in range(STEP_REPEATS):
            try:
                turn = await self._gateway.complete(
                    session, conversation.messages, self._recipe.tools, step=conversation.steps
                )
                break
            except EpochLost:
                session = await self._gateway.open(self._request, self._recipe, attempt)
        else:
            raise GatewayFailed(f"session {session.session_id}: no gateway keeps it for step {conversation.steps}")
        conversation.messages.append(turn.message)
        conversation.finish_reason, conversation.last_turn = turn.finish_reason, turn.turn
        conversation.steps += 1
        TURNS.inc()

    async def _answers(self, message: Message, calls: ToolCalls) -> list[Message]:
        """Tool messages for the calls of one turn, in order. Raises ToolUnanswered, ToolBroken."""
        answers: list[Message] = []
        for call in message["tool_calls"]:
            mapped = self._mapped(call)
            if isinstance(mapped, str):
                content = mapped
                TOOL_CALLS.labels("unparsable").inc()
            else:
                done = await calls.call(mapped, call["id"])
                TOOL_CALLS.labels(done.status.value).inc()
                if done.status in (ToolStatus.infra_error, ToolStatus.cancelled):
                    raise ToolBroken(f"call {done.call_id} ended as {done.status.value}: {done.reason}")
                content = called(self._recipe, self._recipe.tool_answer, done.status is ToolStatus.ok, done.output)
            answers.append({"role": "tool", "tool_call_id": call["id"], "content": content})
        return answers

    async def _judge(self, session: Session, conversation: Conversation, ending: Ending) -> None:
        """The verdict goes to the log before the session is finished: a finished live session always has one."""
        episode = Episode(
            task=self._task, messages=tuple(conversation.messages), outcome=ending.outcome, reason=ending.reason
        )
        record = await verdict(self._recipe.verifier, episode, self._request, session.session_id)
        await self._events.append(record)
        REWARDS.labels(type(record).__name__).inc()
        if isinstance(record, RewardAssigned):
            REWARD_SUM.inc(max(record.value, 0.0))

    def _mapped(self, call: Message) -> SandboxCall | str:
        function = call["function"]
        return called(self._recipe, self._recipe.tool_call, function["name"], function["arguments"])
