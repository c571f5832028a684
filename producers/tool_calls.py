"""Tool calls of one runner: requests go to agent.tool-calls, answers come from the co-partitioned agent.tool-results.

The runner's only reader feeds every result into the `ToolResults` of its partition task, where rollouts wait for it.

ToolUnanswered     no answer in time (runner.tool_deadline_s); the call was cancelled
└── NoWorker       no worker had even begun the call: it waited for a sandbox
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from turnlog.infra.blobs import Blobs
from turnlog.infra.environments.episodes import Message, SandboxAnswer, SandboxCall, text_of
from turnlog.infra.environments.sources import BrokenRecipe, call_recipe
from turnlog.infra.environments.tasks import Task
from turnlog.infra.environments.tools import AGENT, MCP_TOOL
from turnlog.infra.environments.workspaces import FilesUnusable, store_files
from turnlog.infra.event_log import EventSink
from turnlog.schemas import ids
from turnlog.schemas.events import (
    RolloutRequested,
    SandboxSpec,
    ToolCallCancelled,
    ToolCallCompleted,
    ToolCallRequested,
    ToolCallStarted,
    ToolStatus,
)
from turnlog.schemas.events.tools import SESSION_OVER
from turnlog.schemas.types import BlobRef, TurnId

NO_TOOL: Final = f"there is no tool {AGENT.name!r}"
"""Answer to a model that calls the runner's own tool, however it learned the name."""
UNBEGUN = "deadline_s"
"""Reason of an answer that reports that no sandbox was free in time, so that the call never ran."""


class ToolUnanswered(Exception):
    """No sandbox worker answered. Remedy: check that one is running and that it has enough slots."""


class NoWorker(ToolUnanswered):
    """No sandbox worker took the call."""


class ToolResults:
    """Answers by rollout and call; the first on the log is the effective one."""

    def __init__(self) -> None:
        self._answers: dict[str, dict[str, ToolCallCompleted]] = {}
        self._waiting: dict[str, asyncio.Future[ToolCallCompleted]] = {}
        self._begun: dict[str, dict[str, float]] = {}
        """Event-loop time at which a worker last began a call, by rollout and call."""
        self._open: set[str] = set()
        self._settled = False

    def expect(self, rollout_id: str) -> None:
        """Keep the answers of this rollout until `forget`."""
        self._open.add(rollout_id)

    def forget(self, rollout_id: str) -> None:
        """Drop everything about a rollout that is over."""
        self._open.discard(rollout_id)
        self._answers.pop(rollout_id, None)
        self._begun.pop(rollout_id, None)

    def settle(self) -> None:
        """Drop what belongs to no open rollout, now and from now on; every open rollout is expected by now."""
        self._settled = True
        self._answers = {rollout: calls for rollout, calls in self._answers.items() if rollout in self._open}
        self._begun = {rollout: calls for rollout, calls in self._begun.items() if rollout in self._open}

    def record_start(self, event: ToolCallStarted, age_s: float) -> None:
        """Note that a worker began a call `age_s` ago. The work of an earlier attempt is lost."""
        if not self._settled or event.rollout_id in self._open:
            at = asyncio.get_running_loop().time() - max(0.0, age_s)
            self._begun.setdefault(event.rollout_id, {})[event.call_id] = at

    def running_s(self, rollout_id: str, call_id: str) -> float | None:
        """Return the seconds since a worker began the call; None if none has, and it waits for a sandbox."""
        at = self._begun.get(rollout_id, {}).get(call_id)
        return None if at is None else asyncio.get_running_loop().time() - at

    def feed(self, event: ToolCallCompleted) -> None:
        """Add an answer, in log order; later ones for the same call change nothing."""
        if event.caller or (self._settled and event.rollout_id not in self._open):
            return  # a call of another caller is no answer to one of ours
        first = self._answers.setdefault(event.rollout_id, {}).setdefault(event.call_id, event)
        waiting = self._waiting.get(event.call_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(first)

    def answer(self, rollout_id: str, call_id: str) -> ToolCallCompleted | None:
        """Return the effective answer, or None."""
        return self._answers.get(rollout_id, {}).get(call_id)

    def of(self, rollout_id: str, session_id: str) -> list[ToolCallCompleted]:
        """Return the answers of one session, in the order of its calls."""
        calls = [call for call in self._answers.get(rollout_id, {}).values() if call.session_id == session_id]
        return sorted(calls, key=lambda call: call.call_seq)

    def workspace(self, rollout_id: str, session_id: str) -> BlobRef | None:
        """Return the workspace that the last answered call of the session left behind."""
        calls = self.of(rollout_id, session_id)
        return calls[-1].workspace if calls else None

    async def wait(self, rollout_id: str, call_id: str, timeout_s: float) -> ToolCallCompleted:
        """Wait for the effective answer. Raises TimeoutError."""
        found = self.answer(rollout_id, call_id)
        if found is not None:
            return found
        waiting: asyncio.Future[ToolCallCompleted] = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = waiting
        try:
            async with asyncio.timeout(timeout_s):
                return await waiting
        finally:
            del self._waiting[call_id]


@dataclass(slots=True)
class ToolCalls:
    """The calls of one session, in order: `call_seq` counts those that reached a sandbox."""

    events: EventSink
    results: ToolResults
    request: RolloutRequested
    session_id: str
    sandbox: SandboxSpec
    deadline_s: float
    asked: dict[str, SandboxCall] = field(default_factory=dict)
    """Calls that were requested here, by call_id."""
    _next: int = 0
    _pending: ToolCallRequested | None = None
    _last: ToolCallRequested | None = None
    """The last answered call."""
    _workspace: BlobRef | None = None
    _touched: set[str] = field(default_factory=set)
    """MCP servers that took a call which is not safe to repeat."""

    def begin(self, workspace: BlobRef | None) -> None:
        """Set the workspace that the session's first call finds; None for an empty one."""
        self._workspace = workspace

    def resume(self, answered: int, calls: Iterable[SandboxCall] = ()) -> None:
        """Continue after `answered` calls that reached a sandbox under another runner, among them `calls`."""
        self._next = answered
        for call in calls:
            self._with_history(call)
        if answered:
            self._workspace = self.results.workspace(self.request.rollout_id, self.session_id)

    def answered_s(self) -> float:
        """Return the seconds that sandboxes have worked on the session's answered calls."""
        return math.fsum(done.duration_s for done in self.results.of(self.request.rollout_id, self.session_id))

    @property
    def running_s(self) -> float | None:
        """Seconds since a worker began the pending call; None if no call is pending, or it waits for a sandbox."""
        pending = self._pending
        return None if pending is None else self.results.running_s(pending.rollout_id, pending.call_id)

    async def call(self, call: SandboxCall, call_id: str, *, while_it_runs: bool = False) -> ToolCallCompleted:
        """Run a call, and return its answer. Publishing again under the same call_id is harmless, because a worker
        answers a repeated call from its stored result. `while_it_runs`: the time limit applies only until a worker
        begins the call. Raises ToolUnanswered, LogUnavailable."""
        self.asked[call_id] = call = self._with_history(call)
        request = self._pending = self._build_request(call, call_id)
        if self.results.answer(request.rollout_id, request.call_id) is None:
            await self.events.append(request)
        done = await self._wait_for_answer(request, self.deadline_s, while_it_runs=while_it_runs)
        self._pending, self._last = None, request
        self._next += 1
        self._workspace = done.workspace
        return done

    def _with_history(self, call: SandboxCall) -> SandboxCall:
        """Return a call of an MCP server with what the worker has to know if it has lost the session with that server:
        whether a call before it may have changed something there."""
        if call.tool != MCP_TOOL or call.arguments.get("op") != "call":
            return call
        servers = {server["name"] for server in call.arguments["servers"]}
        known = SandboxCall(call.tool, {**call.arguments, "touched": not servers.isdisjoint(self._touched)})
        if call.arguments["class"] == "unsafe":
            self._touched |= servers
        return known

    async def end_pending(self, reason: str, within_s: float) -> ToolCallCompleted | None:
        """End the pending call, and return its answer; None if none is pending. Raises ToolUnanswered,
        LogUnavailable."""
        pending = self._pending
        await self.cancel(reason)
        return await self._wait_for_answer(pending, within_s) if pending is not None else None

    async def _wait_for_answer(
        self, request: ToolCallRequested, within_s: float, *, while_it_runs: bool = False
    ) -> ToolCallCompleted:
        while True:
            try:
                return await self.results.wait(request.rollout_id, request.call_id, within_s)
            except TimeoutError:
                begun = self.results.running_s(request.rollout_id, request.call_id) is not None
                if while_it_runs and begun:
                    continue
                await self.cancel("unanswered")
                kind = ToolUnanswered if begun else NoWorker
                raise kind(
                    f"call {request.call_id} ({request.tool}) got no answer in {within_s:g} s: are sandbox workers "
                    "running? See [runner] tool_deadline_s"
                ) from None

    async def close(self) -> None:
        """Tell the workers that the session is over, so that what they keep for it is released. Raises
        LogUnavailable."""
        if self._last is not None:
            await self.events.append(self._build_cancellation(self._last, SESSION_OVER))

    async def cancel(self, reason: str) -> None:
        """Cancel the pending call, if there is one. Not for a session that moves to another runner, because that one
        requests the same call again."""
        if self._pending is not None:
            cancelled, self._pending = self._build_cancellation(self._pending, reason), None
            await self.events.append(cancelled)

    def _build_request(self, call: SandboxCall, call_id: str) -> ToolCallRequested:
        request = self.request
        return ToolCallRequested(
            event_id=ids.digest("ToolCallRequested", call_id),
            run_id=request.run_id,
            group_id=request.group_id,
            session_id=self.session_id,
            floor=request.floor,
            rollout_id=request.rollout_id,
            call_id=call_id,
            call_seq=self._next,
            tool=call.tool,
            arguments=json_of(call),
            sandbox=self.sandbox,
            workspace=self._workspace,
            deadline_s=self.deadline_s,
        )

    def _build_cancellation(self, requested: ToolCallRequested, reason: str) -> ToolCallCancelled:
        return ToolCallCancelled(
            event_id=ids.digest("ToolCallCancelled", requested.call_id),
            run_id=requested.run_id,
            group_id=requested.group_id,
            session_id=requested.session_id,
            floor=requested.floor,
            rollout_id=requested.rollout_id,
            call_id=requested.call_id,
            reason=reason,
        )


def opening_id(session_id: str) -> str:
    """Return the call id of a session's opening call."""
    return ids.call_id(session_id, "", 0, 0, "opening")


def text_call_id(session_id: str, turn: TurnId) -> str:
    """Return the call id of a turn whose text is an action: that of the first call of a turn."""
    return ids.call_id(session_id, turn.epoch, turn.index, 0, "agent")


def task_call(task: Task, call: Message) -> SandboxCall | str:
    """Return what a tool call of the model is in the sandbox, or an answer that needs none. Raises BrokenRecipe."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    return _without_agent_tool(call_recipe(task.environment.name, task.tool_call, name, arguments))


def text_call(task: Task, message: Message) -> SandboxCall | str | None:
    """Return what the text of a message without tool calls is in the sandbox; None if it is no action. Raises
    BrokenRecipe."""
    if task.text_action is None or message.get("tool_calls"):
        return None
    action = call_recipe(task.environment.name, task.text_action, text_of(message))
    return None if action is None else _without_agent_tool(action)


def _without_agent_tool(call: SandboxCall | str) -> SandboxCall | str:
    return NO_TOOL if isinstance(call, SandboxCall) and call.tool == AGENT.name else call


def answer_of(done: ToolCallCompleted) -> SandboxAnswer:
    """Return the answer of a call as environments receive it."""
    return SandboxAnswer(done.status is ToolStatus.ok, done.output.decode(errors="replace"), done.exit_code)


async def first_workspace(task: Task, blobs: Blobs) -> BlobRef | None:
    """Return the workspace that the first call of a session finds: the task's files, or its stored folder; None for an
    empty one. Raises BrokenRecipe, StoreUnavailable."""
    if task.files is None:
        return task.workspace
    try:
        return await store_files(task.files, blobs)
    except FilesUnusable as error:
        raise BrokenRecipe(f"recipe {task.environment.name!r}: {error}") from error


def json_of(call: SandboxCall) -> bytes:
    """Return the arguments as UTF-8 JSON. Half of a surrogate pair, which a model may write as an escape, is kept, and
    the worker refuses it. Raises BrokenRecipe if the arguments are no JSON."""
    try:
        return json.dumps(call.arguments, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return json.dumps(call.arguments).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise BrokenRecipe(f"the arguments of a call of {call.tool!r} are no JSON: {error}") from error
