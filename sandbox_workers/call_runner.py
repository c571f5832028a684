"""Calls become answers: leased, announced, run, published; and run again when their sandbox went away."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Awaitable, Callable

from prometheus_client import Counter, Histogram

from turnlog.infra.log import Record
from turnlog.infra.role import Role
from turnlog.sandbox_workers import answers
from turnlog.sandbox_workers.calls import Pending, Unit
from turnlog.sandbox_workers.pool import Pool
from turnlog.sandbox_workers.protocol import Execution, Sandbox, SandboxDied, SandboxUnavailable, WorkspaceLost, at_most
from turnlog.schemas.events import SandboxLimits, ToolCallCompleted, ToolStatus

log = logging.getLogger(__name__)

CALLS = Counter("turnlog_sandbox_calls", "Tool calls answered, by status", ["status"])
SECONDS = Histogram("turnlog_sandbox_call_seconds", "Duration of tool calls in their sandbox")
Park = Callable[[Record, Exception], Awaitable[None]]
"""Takes a record and why to the dead letters."""

Sent = tuple[ToolCallCompleted, Awaitable[tuple[int, int]]]


class CallRunner:
    """Answers one call at a time per session; as many sessions at once as the pool has slots."""

    def __init__(self, role: Role, pool: Pool, park: Park, clock: Callable[[], float]) -> None:
        settings = role.settings.sandbox
        names = [field.name for field in dataclasses.fields(SandboxLimits)]
        self._events = role.events
        self._pool = pool
        self._park = park
        self._clock = clock
        self._most = SandboxLimits(**{name: getattr(settings, name) for name in names})
        self._max_attempts = settings.max_attempts
        self._name = role.instance + (f"+{pool.provider.name}" if pool.fallback else "")

    async def answer(self, unit: Unit, pending: Pending) -> None:
        """Publish the call's answer and tell the unit where it stands. Raises LogError."""
        execution = self._unrunnable(unit, pending)
        while execution is None:
            try:
                await self._attempt(unit, pending)
                return
            except WorkspaceLost as error:
                execution = answers.unrun(ToolStatus.infra_error, "workspace_lost", str(error))
            except (SandboxDied, SandboxUnavailable) as error:
                unit.attempts[pending.request.call_id] = self._attempts(unit, pending) + (not pending.begun)
                pending.begun = False
                log.warning("call %s ended without an answer: %s", pending.request.call_id, error)
                execution = self._unrunnable(unit, pending)
        if execution.reason == "attempts":
            await self._park(pending.record, answers.AttemptsExhausted(execution.output.decode()))
        event, place = await self._publish(unit, pending, execution, self._age(pending))
        unit.answered(event, (await place)[1])

    def _unrunnable(self, unit: Unit, pending: Pending) -> Execution | None:
        """The answer of a call that must not run (again)."""
        source = answers.source_of(pending.request)
        attempts = self._attempts(unit, pending)
        if pending.cancelled:
            return answers.unrun(ToolStatus.cancelled, "cancelled")
        if isinstance(source, answers.Refusal):
            return answers.unrun(ToolStatus.refused, source.reason, source.text)
        if attempts >= self._max_attempts:
            text = f"the sandbox went away {attempts} times; [sandbox] max_attempts is {self._max_attempts}"
            return answers.unrun(ToolStatus.infra_error, "attempts", text)
        if self._age(pending) > pending.request.deadline_s:
            return answers.unrun(ToolStatus.timeout, "deadline_s", "nobody waits for the answer any more")
        return None

    async def _attempt(self, unit: Unit, pending: Pending) -> None:
        """One attempt, answered. Raises SandboxDied, SandboxUnavailable, WorkspaceLost."""
        request = pending.request
        limits = at_most(request.sandbox.limits, self._most)
        durable = request.sandbox.durable_workspace
        async with self._pool.lease(
            disk_bytes=limits.disk_bytes,
            session=request.session_id if durable else None,
            begun=durable and request.call_seq > 0,
            fresh=request.sandbox.fresh,
        ) as sandbox:
            queue_s = self._age(pending)
            await self._announce(unit, pending)
            execution = await self._run(sandbox, pending, limits)
            SECONDS.observe(execution.duration_s)
            event, place = await self._publish(unit, pending, execution, queue_s)
        unit.answered(event, (await place)[1])  # the slot is free already

    async def _announce(self, unit: Unit, pending: Pending) -> None:
        pending.begun = True
        beginning = answers.started(pending.request, attempt=self._attempts(unit, pending) + 1, worker=self._name)
        unit.began(beginning, (await self._events.append(beginning))[1])

    async def _run(self, sandbox: Sandbox, pending: Pending, limits: SandboxLimits) -> Execution:
        source = answers.source_of(pending.request)
        assert isinstance(source, str)
        if pending.cancelled:
            return answers.unrun(ToolStatus.cancelled, "cancelled")
        pending.sandbox = sandbox
        try:
            return await sandbox.run(pending.request.tool, source, limits)
        finally:
            pending.sandbox = None

    async def _publish(self, unit: Unit, pending: Pending, execution: Execution, queue_s: float) -> Sent:
        """Hand the answer over: it, and what to await for its place in the log."""
        attempt = self._attempts(unit, pending)
        event = answers.completed(pending.request, execution, attempt=attempt, queue_s=queue_s, worker=self._name)
        CALLS.labels(execution.status).inc()
        pending.sent = True
        return event, await self._events.submit(event)

    def _attempts(self, unit: Unit, pending: Pending) -> int:
        return unit.attempts.get(pending.request.call_id, 0)

    def _age(self, pending: Pending) -> float:
        return max(0.0, self._clock() - pending.record.timestamp_ms / 1000)
