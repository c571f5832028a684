"""Tools that run the agent's programs: python, python_session, shell."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from turnlog.sandbox_workers.protocol import Command, Execution, Kind
from turnlog.sandbox_workers.tools.tool import Call
from turnlog.schemas.events import SandboxLimits, SandboxSpec


async def python(call: Call) -> Execution:
    """A fresh interpreter."""
    return await call.exec(Command(kind=Kind.python, source=call.arguments["code"]))


async def python_session(call: Call) -> Execution:
    """The sandbox's one persistent interpreter."""
    return await call.exec(Command(kind=Kind.session, source=call.arguments["code"]))


async def shell(call: Call) -> Execution:
    """bash -c, else sh -c."""
    given = call.arguments
    wall_s = min(given.get("timeout_s", call.limits.wall_s), call.limits.wall_s)
    command = Command(
        kind=Kind.shell,
        source=given["command"],
        stdin=given.get("stdin", "").encode(),
        cwd=in_workspace(given.get("cwd", "")),
    )
    return await call.exec(command, limits=dataclasses.replace(call.limits, wall_s=wall_s))


def within_limits(arguments: Mapping[str, Any], spec: SandboxSpec, limits: SandboxLimits) -> str:
    """A time-out of its own is no longer than the call's."""
    asked = arguments.get("timeout_s", 0)
    return f'"timeout_s" must be at most {limits.wall_s:g}, got {asked}' if asked > limits.wall_s else ""


def kept_interpreter(arguments: Mapping[str, Any], spec: SandboxSpec, limits: SandboxLimits) -> str:
    """Where the sandbox is emptied after the call, an interpreter that keeps its variables would lie."""
    return "" if spec.durable_workspace else "it needs a sandbox with durable_workspace, which this session has not"


def in_workspace(path: str) -> str:
    """Models write /workspace/x as often as x."""
    return path.removeprefix("/workspace/") if path != "/workspace" else ""
