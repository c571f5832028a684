"""The built-in agent: a loop over the model's actions, in a sandbox or in a simulation.

The loop decides from the session's messages alone, so that whoever owns the task can continue it: the same step is the
same turn, and the same call has the same id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from turnlog.infra.environments.episodes import Judged, Message, SandboxCall
from turnlog.infra.environments.simulations import OVER, Played
from turnlog.infra.environments.sources import call_recipe
from turnlog.infra.environments.tasks import Opening, Task, replay_actions, with_opening
from turnlog.producers.agents import (
    TOOL_CALLS,
    TURNS,
    Attempt,
    SessionEnding,
    cut_off,
    opening_from,
)
from turnlog.producers.gateway_client import SessionState, Speaker
from turnlog.producers.tool_calls import answer_of, opening_id, task_call, text_call, text_call_id
from turnlog.schemas.events import Outcome, ToolCallCompleted
from turnlog.schemas.types import TurnId


@dataclass(slots=True)
class AgentConversation:
    """Messages so far, and the finish reason of the last assistant message."""

    messages: list[Message]
    finish_reason: str = ""
    last_turn: TurnId | None = None
    steps: int = field(init=False)

    def __post_init__(self) -> None:
        self.steps = sum(message["role"] == "assistant" for message in self.messages)


class ToolLoop:
    """The built-in agent: answer the model's tool calls and request the next turn, until the model makes no more calls
    or a limit is reached. The time that it has spent is derived from records: the seconds in which an engine sampled
    its turns, and in which a sandbox worked on its calls. So it is the same under whichever runner continues. See
    Actor."""

    command_end = None
    speaker: Speaker | None = None
    """Speaker of its turns, if others speak in its session, too."""

    def __init__(self, attempt: Attempt, state: SessionState | None) -> None:
        self._attempt, self._state = attempt, state
        self._task, self._name = attempt.task, attempt.task.environment.name
        self._conversation = AgentConversation([])
        self._tools = attempt.task.tools
        self._played: Played | None = None
        self._done = False
        """True if the environment takes no further action."""
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
        return self._attempt.task.verifier

    async def messages(self) -> list[Message]:
        return self._conversation.messages

    async def late(self) -> SessionEnding:
        return await cut_off(self._attempt)

    async def act(self) -> SessionEnding:
        await self._begin()
        conversation, limits = self._conversation, self._attempt.request.limits
        messages = conversation.messages
        while True:
            if self._spent_s >= limits.deadline_s:
                return SessionEnding(Outcome.truncated, "deadline")
            if self._done:
                return SessionEnding(Outcome.completed)
            if messages[-1]["role"] == "assistant":
                if conversation.finish_reason == "length":
                    return SessionEnding(Outcome.truncated, "max_new_tokens")
                calls, action = messages[-1].get("tool_calls") or (), text_call(self._task, messages[-1])
                if not calls and action is None:
                    reply = await self._reply()
                    if isinstance(reply, SessionEnding):
                        return reply
                    messages.append(reply)
                    continue
                if conversation.steps >= limits.max_turns and not self._task.interactive:
                    return SessionEnding(Outcome.truncated, "max_turns")
                if calls:
                    messages += [await self._answer(call) for call in calls]
                else:
                    messages.append({"role": "user", "content": await self._answer_text(action)})
            elif conversation.steps >= limits.max_turns and self._task.interactive:  # its last actions still count
                return SessionEnding(Outcome.truncated, "max_turns")
            else:
                await self._step()

    async def _begin(self) -> None:
        """Start where the session stands on the log. Calls that were answered under another runner count, so that
        call_seq continues; actions in a simulation are repeated."""
        state, opening = self._state, await self._open()
        task = self._task = with_opening(self._task, opening)
        self._tools = task.tools
        first = [*task.messages, *opening.messages]
        if state is None or not state.messages:
            self._conversation = AgentConversation(first)
        else:
            self._conversation = AgentConversation(list(state.messages), state.finish_reason, state.last_turn)
        messages = self._conversation.messages
        if task.simulation is not None:  # which may take long to create
            self._played = await asyncio.to_thread(call_recipe, self._name, replay_actions, task, messages)
            self._done = self._played is not None and self._played.done
            return
        before = [call for said in messages[len(first) : -1] for call in _actions(task, said)]
        self._attempt.calls.resume((task.opening is not None) + len(before), before)

    async def _open(self) -> Opening:
        """Return what the opening call adds. If it ran under another runner, this is its stored answer. Raises
        ToolUnanswered, ToolBroken, BrokenRecipe."""
        task = self._task
        if task.opening is None:
            return Opening()
        return opening_from(task, await self._run(task.opening, opening_id(self._attempt.session.session_id)))

    async def _step(self) -> None:
        """Take one turn."""
        conversation, self._stepping = self._conversation, True
        turn = await self._attempt.complete(
            conversation.messages, self._tools, step=conversation.steps, speaker=self.speaker
        )
        self._stepping = False
        self._spent_s += turn.own_s
        conversation.messages.append(turn.message)
        conversation.finish_reason, conversation.last_turn = turn.finish_reason, turn.turn
        conversation.steps += 1
        TURNS.inc()

    async def _reply(self) -> Message | SessionEnding:
        """Return what follows a message that is no action: the end of the session."""
        return SessionEnding(Outcome.completed)

    async def _answer(self, call: Message) -> Message:
        """Return the tool message that answers one call. Raises ToolUnanswered, ToolBroken, BrokenRecipe."""
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if self._played is not None:
            content = await self._play(self._played.call, name, arguments)
        else:
            content = await self._observe(task_call(self._task, call), call["id"])
        return {"role": "tool", "tool_call_id": call["id"], "content": content}

    async def _answer_text(self, action: SandboxCall | str | None) -> Any:
        """Return the content that answers a message that is an action itself. Raises as `_answer` does."""
        if self._played is not None and isinstance(action, SandboxCall):
            return await self._play(self._played.act, action.tool, action.arguments)
        turn = self._conversation.last_turn
        assert action is not None
        assert turn is not None
        return await self._observe(action, text_call_id(self._attempt.session.session_id, turn))

    async def _play(self, act: Callable[[str, Any], Any], name: str, arguments: Any) -> Any:
        """Act in the simulation, and return its answer."""
        assert self._played is not None
        self._playing_since = began = asyncio.get_running_loop().time()
        content = await asyncio.to_thread(call_recipe, self._name, act, name, arguments)
        self._spent_s += asyncio.get_running_loop().time() - began
        self._playing_since = None
        self._done = self._played.done
        TOOL_CALLS.labels("simulated").inc()
        return content

    async def _observe(self, call: SandboxCall | str, name: str) -> Any:
        """Run an action in the sandbox under the call id `name`, and return its answer."""
        if isinstance(call, str):
            TOOL_CALLS.labels("unparsable").inc()
            return call
        if self._done:
            return OVER
        done = await self._run(call, name)
        seen = call_recipe(self._name, self._task.observe, call, answer_of(done))
        self._done = seen.done
        return seen.content

    async def _run(self, call: SandboxCall, name: str) -> ToolCallCompleted:
        """Run a call under the call id `name`. Raises ToolUnanswered, ToolBroken."""
        calls = self._attempt.calls
        counted = calls.results.answer(calls.request.rollout_id, name) is not None  # before this loop began
        done = await self._attempt.call(call, name)
        self._spent_s += 0.0 if counted else done.duration_s
        return done


def _actions(task: Task, message: Message) -> list[SandboxCall]:
    """Return the actions of a message that reach a sandbox."""
    if message["role"] != "assistant":
        return []
    calls = message.get("tool_calls") or ()
    mapped = [task_call(task, call) for call in calls] if calls else [text_call(task, message)]
    return [call for call in mapped if isinstance(call, SandboxCall)]
