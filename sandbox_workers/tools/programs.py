"""Tools that are one command in the sandbox: python, python_session, shell; and a step of an environment that lives in
the persistent interpreter."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from turnlog.sandbox_workers.protocol import Command, Execution, Kind, Stream
from turnlog.sandbox_workers.tools.tool import Call, ToolFailed
from turnlog.schemas.events import SandboxLimits, SandboxSpec, ToolStatus

DRIVER: Final = Path(__file__).with_name("environment_driver.py").read_text()
NAME: Final = "turnlog_environment"
CALL: Final = """\
import sys as _sys
if {name!r} not in _sys.modules:
    import types as _types
    _module = _sys.modules[{name!r}] = _types.ModuleType({name!r})
    exec(compile({driver!r}, {file!r}, "exec"), _module.__dict__)
    del _types, _module
_sys.modules[{name!r}].answer({arguments!r}, _sys.modules[{name!r}].STAGE)
del _sys
"""


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


async def env_step(call: Call) -> Execution:
    """One JSON object of observation, reward, terminated, truncated, info."""
    arguments = json.dumps(dict(call.arguments))
    source = CALL.format(name=NAME, driver=DRIVER, file=f"<{NAME}>", arguments=arguments)
    printed = bytearray()

    def listen(stream: Stream, part: bytes) -> None:
        if stream is Stream.stdout:
            printed.extend(part)
        if call.on_output is not None:
            call.on_output(stream, part)

    execution = await call.exec(Command(kind=Kind.session, source=source), on_output=listen)
    if execution.status is not ToolStatus.ok:
        return execution
    text = _answer(bytes(printed).strip().rpartition(b"\n")[2])
    return dataclasses.replace(execution, output=text.encode(errors="replace") + b"\n")


def needs(arguments: Mapping[str, Any], spec: SandboxSpec, limits: SandboxLimits) -> str:
    """An action or a reset, in a sandbox that keeps the environment."""
    reset = arguments.get("reset", False)
    if reset and "action" in arguments:
        return '"reset" begins an episode and takes no "action"'
    if not reset and "action" not in arguments:
        return 'missing: "action", or "reset": true'
    if not reset and (spare := [name for name in ("seed", "options") if name in arguments]):
        return f'"{spare[0]}" goes with "reset": true alone'
    return kept_interpreter(arguments, spec, limits)


def _answer(line: bytes) -> str:
    """What the driver said last. Code of the environment may have printed before it, past Python's own stdout, and the
    agent's may have taken its place, so it is trusted in nothing. Raises ToolFailed: what the environment raised."""
    try:
        said = json.loads(line)
        error = said.get("error")
        answer = json.dumps(said["answer"], ensure_ascii=False, allow_nan=False) if error is None else ""
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ToolFailed("the environment's process ended its answer early or printed behind it") from None
    if error is not None:
        raise ToolFailed(str(error).rstrip("\n"))
    return answer
