"""What a tool is: arguments that a JSON schema allows, and a coroutine that does it in a sandbox.

A package offers its own as `name = "module:TOOL"` under the entry point group `turnlog.tools`.

ToolEnd               raised by a tool to end its call
├── ToolFailed        the tool says no: a tool_error whose text the model reads
└── CallEnded         a command of the call met a limit or was cancelled: that is how the call ended
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from turnlog.infra.tool_schemas import Schema
from turnlog.sandbox_workers.protocol import Command, Execution, Kind, OnOutput, Sandbox
from turnlog.sandbox_workers.tools.arguments import Validator, checked_schema
from turnlog.schemas.events import SandboxLimits, SandboxSpec, ToolStatus


class ToolEnd(Exception):
    """Base of the tree above."""


class ToolFailed(ToolEnd):
    """Its message goes to the model."""


class CallEnded(ToolEnd):
    """Carries the execution that ended the call."""

    def __init__(self, execution: Execution) -> None:
        super().__init__(f"{execution.status}: {execution.reason}")
        self.execution = execution


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call, as a tool gets it."""

    arguments: Mapping[str, Any]
    """As the tool's schema allows them."""
    sandbox: Sandbox
    limits: SandboxLimits
    env: Mapping[str, str] = field(default_factory=dict)
    """Of the recipe and of the egress proxy, added to every command's environment."""
    on_output: OnOutput | None = None
    began: float = field(default_factory=time.perf_counter)

    async def exec(
        self, command: Command, *, limits: SandboxLimits | None = None, on_output: OnOutput | None = None
    ) -> Execution:
        """Run a command within the call's limits, or stricter ones; answers one that ended by itself (ok or
        tool_error). Raises CallEnded for any other end, FileRefused, SandboxDied."""
        command = dataclasses.replace(command, env={**self.env, **command.env})
        execution = await self.sandbox.exec(command, limits or self.limits, on_output=on_output or self.on_output)
        if execution.status not in (ToolStatus.ok, ToolStatus.tool_error):
            raise CallEnded(execution)
        return execution

    def answer(self, output: str | bytes, *, status: ToolStatus = ToolStatus.ok, reason: str = "") -> Execution:
        """The end of a call that ran no program, or whose program's output is not the answer."""
        content = output.encode(errors="replace") if isinstance(output, str) else output
        code = {ToolStatus.ok: 0, ToolStatus.tool_error: 1}.get(status)
        return Execution(status, reason, code, content, time.perf_counter() - self.began, 0.0)


def always(arguments: Mapping[str, Any], spec: SandboxSpec, limits: SandboxLimits) -> str:
    """What the schema allows is legal."""
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool. `run` may use `call.sandbox` as it likes; what it raises beyond ToolEnd, SandboxError ends the call as
    infra_error `tool_broken`."""

    name: str
    version: str
    """Recorded on SessionStarted; changes when the same call may answer otherwise."""
    about: str
    schema: Schema
    """Of the arguments: JSON Schema draft 2020-12, type object, no references to elsewhere."""
    run: Callable[[Call], Awaitable[Execution]]
    kinds: frozenset[Kind] = frozenset()
    """Of the commands that it runs: a backend that does not serve one of them does not serve the tool."""
    legal: Callable[[Mapping[str, Any], SandboxSpec, SandboxLimits], str] = always
    """What the schema cannot say: the text of a refusal, else empty. Called before anything runs."""
    validator: Validator = field(init=False, repr=False, compare=False)
    """Of `schema`, made once."""

    def __post_init__(self) -> None:
        """Raises ValueError for a schema that is none."""
        object.__setattr__(self, "validator", checked_schema(self.schema))


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a call is not run: reason for machines, text for the model."""

    reason: str
    """tool | arguments | argument_bytes | backend | network | image | sandbox"""
    text: str
