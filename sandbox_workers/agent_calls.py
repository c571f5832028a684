"""Calls that an agent's program makes through the worker's proxy: written as records of its session, and run here."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from turnlog.infra.environments.tools import MCP_TOOL
from turnlog.sandbox_workers.calls import CallOutcome, make_completed_event, unrun
from turnlog.sandbox_workers.outside import NoSandbox
from turnlog.sandbox_workers.protocol import Execution, SandboxUnavailable
from turnlog.sandbox_workers.tools import Prepared, Refusal, prepared
from turnlog.sandbox_workers.tools.tool import CallContext
from turnlog.schemas.events import SandboxLimits, ToolCallCompleted, ToolCallRequested, ToolStatus
from turnlog.schemas.events.tools import MCP_PROXY
from turnlog.schemas.ids import digest

log = logging.getLogger(__name__)
Write = Callable[[ToolCallRequested | ToolCallCompleted], Awaitable[None]]
"""Callback that appends a record, and returns once the broker has acknowledged it."""


def blamed_on_servers(execution: Execution, failed: Execution | None) -> Execution:
    """Return the end of a program whose MCP server failed during it: our failure, whatever the program made of it."""
    if failed is None:
        return execution
    output = failed.output + b"\n" + execution.output
    reason = failed.reason or failed.status.value
    return dataclasses.replace(execution, status=ToolStatus.infra_error, reason=reason, exit_code=None, output=output)


class RecordedCalls:
    """Calls of MCP servers during one agent's program."""

    def __init__(
        self, agent: ToolCallRequested, write: Write, context: CallContext, limits: SandboxLimits, *, worker: str
    ) -> None:
        """Create it for the call `agent` that is the program. `limits` bound each call."""
        self._agent, self._write, self._context, self._limits = agent, write, context, limits
        self._worker = worker
        self._made = 0

    async def call(self, arguments: dict[str, Any]) -> Execution:
        """Run a call of the tool `mcp`, with a record before it and one after. Raises LogError."""
        request = await self.begin(arguments)
        try:
            execution = await self._run(request)
        except asyncio.CancelledError:  # the program has ended
            await self.complete(request, unrun(ToolStatus.cancelled, "call_ended"))
            raise
        await self.complete(request, execution)
        return execution

    async def begin(self, arguments: dict[str, Any]) -> ToolCallRequested:
        """Write the record of a call of the tool `mcp` that begins now. Raises LogError."""
        request = self._request(arguments)
        await self._write(request)
        return request

    async def _run(self, request: ToolCallRequested) -> Execution:
        call: Prepared | Refusal = prepared(MCP_TOOL, request.arguments, request.sandbox, self._limits)
        if isinstance(call, Refusal):
            return unrun(ToolStatus.refused, call.reason, call.text)
        try:
            return await call.run(NoSandbox(), self._limits, {}, context=self._context)
        except SandboxUnavailable:
            text = "an MCP server with a command runs in the program's own sandbox: see turnlog.plugins.mcp.mcp_config"
            return unrun(ToolStatus.refused, "sandbox", text)

    async def complete(self, request: ToolCallRequested, execution: Execution) -> None:
        """Write the record of a call that has ended. Raises LogError."""
        outcome = CallOutcome(execution=execution, workspace=None)
        await self._write(make_completed_event(request, outcome, attempt=1, queue_s=0.0, worker=self._worker))

    def _request(self, arguments: dict[str, Any]) -> ToolCallRequested:
        agent, self._made = self._agent, self._made + 1
        call_id = digest("mcp-proxy", agent.call_id, self._made)
        return ToolCallRequested(
            event_id=digest("ToolCallRequested", call_id),
            run_id=agent.run_id,
            group_id=agent.group_id,
            session_id=agent.session_id,
            floor=agent.floor,
            rollout_id=agent.rollout_id,
            call_id=call_id,
            call_seq=agent.call_seq + self._made,
            tool=MCP_TOOL,
            arguments=json.dumps(arguments, ensure_ascii=False).encode(errors="replace"),
            sandbox=agent.sandbox,
            workspace=None,
            deadline_s=agent.deadline_s,
            caller=MCP_PROXY,
        )
