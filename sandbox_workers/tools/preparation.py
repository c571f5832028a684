"""Check a call before anything runs, and run the one that may."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from turnlog.infra.environments.tools import AGENT
from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers.protocol import (
    Execution,
    FileRefused,
    Kind,
    OnOutput,
    QuotaExceeded,
    Sandbox,
    SandboxError,
)
from turnlog.sandbox_workers.tools.built_in import OURS, tools
from turnlog.sandbox_workers.tools.tool import (
    ArgumentsRefused,
    Call,
    CallContext,
    CallEnded,
    InfraFailed,
    Refusal,
    Tool,
    ToolEnd,
    ToolFailed,
    describe_value,
    parse_arguments,
)
from turnlog.schemas.events import SandboxLimits, SandboxSpec, ToolStatus

log = logging.getLogger(__name__)

NO_CONTEXT = CallContext()
GRACE_S = 5.0
"""Seconds beyond wall_s that a package's tool may take over all its commands together."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call that may run."""

    tool: Tool
    arguments: Mapping[str, Any]
    grace_s: float = GRACE_S

    @property
    def once(self) -> bool:
        """True if a run that ended without an answer is not repeated."""
        return self._decide(self.tool.once)

    @property
    def takes_sandbox(self) -> bool:
        """True if the call takes a sandbox."""
        return self.tool.sandboxed(self.arguments)

    @property
    def interpreter(self) -> bool:
        """True if the call uses the sandbox's persistent interpreter."""
        return Kind.session in self.tool.kinds and self.takes_sandbox

    @property
    def leaves_state(self) -> bool:
        """True if the call leaves state in the interpreter that a new one would lack."""
        return self.interpreter and self._decide(self.tool.leaves_state)

    def _decide(self, value: bool | Callable[[Mapping[str, Any]], bool]) -> bool:
        return value if isinstance(value, bool) else value(self.arguments)

    async def run(
        self,
        sandbox: Sandbox,
        limits: SandboxLimits,
        env: Mapping[str, str],
        on_output: OnOutput | None = None,
        *,
        context: CallContext = NO_CONTEXT,
    ) -> Execution:
        """Run the call and return how it ended. A refusal by the workspace or the tool is an answer that the model
        reads. Raises any SandboxError except FileRefused."""
        call = Call(
            arguments=self.arguments, sandbox=sandbox, limits=limits, env=env, on_output=on_output, context=context
        )
        most = max(limits.output_bytes, self.tool.output_bytes)
        try:
            return _limit_output(await (self.tool.run(call) if self.tool.name in OURS else self._foreign(call)), most)
        except InfraFailed as failure:
            return call.answer(f"{failure}\n", status=ToolStatus.infra_error, reason=failure.reason)
        except CallEnded as end:
            return end.execution
        except ToolFailed as failure:
            return _limit_output(call.answer(f"{failure}\n", status=ToolStatus.tool_error), most)
        except QuotaExceeded as refusal:
            return call.answer(f"{refusal}\n", status=ToolStatus.resource_limit, reason="disk_bytes")
        except FileRefused as refusal:
            return _limit_output(call.answer(f"{refusal}\n", status=ToolStatus.tool_error), most)

    async def _foreign(self, call: Call) -> Execution:
        """Run a package's tool, which may raise anything, return anything and never end."""
        running = asyncio.ensure_future(self.tool.run(call))
        try:
            await asyncio.wait([running], timeout=call.limits.wall_s + self.grace_s)
            if not running.done():
                await call.sandbox.cancel()  # ends a running command; its sandbox survives
                await asyncio.wait([running], timeout=self.grace_s)
                return call.answer(b"", status=ToolStatus.timeout, reason="wall_s")
        finally:
            while not running.done():
                running.cancel()
                await asyncio.wait([running], timeout=self.grace_s)
        raised = asyncio.CancelledError("cancelled itself") if running.cancelled() else running.exception()
        if isinstance(raised, ToolEnd | SandboxError):
            raise raised
        if raised is None and isinstance(running.result(), Execution):
            return running.result()
        said = f"{type(raised).__name__}: {raised}"[:1000] if raised else f"it returned {running.result()!r:.200}"
        log.error("tool %s is broken: %s", self.tool.name, said, exc_info=raised)
        text = f"tool {self.tool.name} broke: {said}\n"
        return call.answer(text, status=ToolStatus.infra_error, reason="tool_broken")


def prepared(
    name: str,
    arguments: bytes,
    spec: SandboxSpec,
    limits: SandboxLimits,
    *,
    argument_bytes: int = SandboxSettings().argument_bytes,
    among: Mapping[str, Tool] | None = None,
) -> Prepared | Refusal:
    """Check a call. Return it ready to run within `limits`, or the refusal; nothing has run. `argument_bytes` is the
    limit of [sandbox]; `among` has tools to use in place of `tools()`."""
    known = tools() if among is None else among
    tool = known.get(name)
    if tool is None:
        offered_ones = ", ".join(one for one in known if one != AGENT.name)
        return Refusal("tool", f"there is no tool {describe_value(name)}; tools are {offered_ones}")
    if len(arguments) > argument_bytes:
        text = f"the arguments are {len(arguments)} bytes; they may be {argument_bytes} ([sandbox] argument_bytes)"
        return Refusal("argument_bytes", text)
    try:
        values = parse_arguments(arguments, tool.validator, name)
    except ArgumentsRefused as refusal:
        return Refusal("arguments", str(refusal))
    if said := tool.legal(values, spec, limits):
        return Refusal("arguments", f"{name}: {said}")
    return Prepared(tool, values)


def _limit_output(execution: Execution, most: int) -> Execution:
    """Cut the output to `most` bytes; an execution with longer output becomes a resource_limit."""
    if len(execution.output) <= most:
        return execution
    cut = execution.output[:most]
    return dataclasses.replace(
        execution, status=ToolStatus.resource_limit, reason="output_bytes", exit_code=None, output=cut
    )
