"""The sandbox tool `mcp`: lists the tools of MCP servers, and calls one.

Servers with a command run in the session's sandbox, below its persistent interpreter; those with a URL are reached by
the worker itself, under [egress], and such a call takes no sandbox. Every call has a class, which says what may be done
after a loss:

read_only    changes nothing: it may run again
idempotent   has the same effects if it runs again
unsafe       everything else: it is never repeated; a lost one ends as infra_error

Reasons of an infra_error: mcp_start (a server does not start, or is out of reach), mcp_lost (it went away, and what it
knew of the session with it), mcp_protocol (it speaks something else), mcp_tools (it lists more tools than a session may
have), mcp_credential (it refuses the worker)."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from turnlog.plugins.mcp.driver import LIST_BYTES, McpFailure, McpRefusal, ServerLost
from turnlog.plugins.mcp.http_client import HttpServer
from turnlog.sandbox_workers.protocol import Command, Execution, Kind, OutputStream
from turnlog.sandbox_workers.tools import Call, Tool, ToolFailed
from turnlog.sandbox_workers.tools.tool import InfraFailed
from turnlog.schemas.events import SandboxLimits, SandboxSpec, ToolStatus

DRIVER: Final = Path(__file__).with_name("driver.py").read_text()
NAME: Final = "turnlog_mcp"
SOURCE: Final = """\
import sys as _sys
if {name!r} not in _sys.modules:
    import types as _types
    _module = _sys.modules[{name!r}] = _types.ModuleType({name!r})
    exec(compile({driver!r}, {file!r}, "exec"), _module.__dict__)
    del _types, _module
_sys.modules[{name!r}].answer({arguments!r}, _sys.modules[{name!r}].SERVERS)
del _sys
"""
MARGIN_S = 1.0
"""Seconds of a call's wall_s that are left for its end, so that a silent server ends neither the interpreter nor the
other servers in it."""
OUTPUT_BYTES = 2 * LIST_BYTES - 2**16
"""Bytes that a listing may have, and that the driver may print."""
SAFE: Final = ("read_only", "idempotent")
CLASSES: Final = (*SAFE, "unsafe")

_TEXTS = {"type": "array", "items": {"type": "string"}}
_MAP = {"type": "object", "additionalProperties": {"type": "string"}}
SERVER: Final = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,32}$"},
        "command": _TEXTS,
        "env": _MAP,
        "cwd": {"type": "string"},
        "url": {"type": "string", "maxLength": 2000},
        "headers": _MAP,
        "timeout_s": {"type": "number", "exclusiveMinimum": 0},
        "only": _TEXTS,
        "most_tools": {"type": "integer", "minimum": 1},
        "first": {"type": "boolean"},
        "stateless": {"type": "boolean"},
    },
    "required": [
        "name",
        "command",
        "env",
        "cwd",
        "url",
        "headers",
        "timeout_s",
        "only",
        "most_tools",
        "first",
        "stateless",
    ],
    "additionalProperties": False,
}
SCHEMA: Final = {
    "type": "object",
    "properties": {
        "op": {"enum": ["list", "call"]},
        "servers": {"type": "array", "items": SERVER, "minItems": 1, "maxItems": 64},
        "tool": {"type": "string", "minLength": 1, "maxLength": 256},
        "arguments": {"type": "object"},
        "class": {"enum": list(CLASSES)},
        "touched": {"type": "boolean"},
    },
    "required": ["op", "servers"],
    "additionalProperties": False,
}


def in_sandbox(arguments: Mapping[str, Any]) -> bool:
    """Return whether a server of the call runs in the sandbox."""
    return any(server["command"] for server in arguments["servers"])


def unsafe(arguments: Mapping[str, Any]) -> bool:
    """Return whether the call may not run again."""
    return arguments["op"] == "call" and arguments["class"] not in SAFE


def fault(arguments: Mapping[str, Any], spec: SandboxSpec, limits: SandboxLimits) -> str:
    """Refuse what the schema cannot express."""
    for server in arguments["servers"]:
        if bool(server["command"]) == bool(server["url"]):
            return f"MCP server {server['name']} has either a command or a url"
    if in_sandbox(arguments) and not spec.durable_workspace:
        return "an MCP server with a command needs a sandbox with durable_workspace, which keeps it from call to call"
    if arguments["op"] == "call":
        if missing := [name for name in ("tool", "arguments", "class") if name not in arguments]:
            return f"missing: {', '.join(missing)}"
        if len(arguments["servers"]) != 1:
            return "a call names one server"
    return ""


async def mcp(call: Call) -> Execution:
    """List the tools of the servers, or call a tool of one."""
    try:
        if call.arguments["op"] == "list":
            return await _list(call)
        return await _call(call)
    except McpFailure as failure:
        raise InfraFailed(failure.reason, str(failure)) from failure


async def _list(call: Call) -> Execution:
    found = []
    for server in call.arguments["servers"]:
        name, within_s = server["name"], _within_s(call, server)
        try:
            if server["command"]:
                said = await _ask_driver(call, server, {"op": "list"})
                if isinstance(said, Execution):
                    text = f"{said.status} {said.reason}: {said.output[-500:].decode(errors='replace')}"
                    raise McpFailure("mcp_start", f"MCP server {name} did not start: {text}")
                found.append(said)
            else:
                async with asyncio.timeout(within_s):
                    found.append(await (await _connection(call, server)).listing())
        except TimeoutError as error:
            raise McpFailure("mcp_start", f"MCP server {name} did not list its tools in {within_s:g} s") from error
        except McpRefusal as refused:
            raise McpFailure("mcp_start", f"MCP server {name} lists no tools: {refused}") from refused
    output = json.dumps({"servers": found}, ensure_ascii=False).encode(errors="replace")
    if len(output) > OUTPUT_BYTES:
        raise McpFailure("mcp_tools", f"the tools of all servers take {len(output)} bytes, {OUTPUT_BYTES} are allowed")
    return call.answer(output)


async def _call(call: Call) -> Execution:
    (server,) = call.arguments["servers"]
    within_s = _within_s(call, server)
    try:
        if server["command"]:
            said = await _ask_driver(call, server, _request_of(call))
            if isinstance(said, Execution):
                return said
        else:
            async with asyncio.timeout(within_s):
                said = await _call_over_http(call, server)
    except TimeoutError:
        text = f"MCP server {server['name']} did not answer in {within_s:g} s\n"
        return call.answer(text, status=ToolStatus.timeout, reason="wall_s")
    except McpRefusal as refused:
        raise ToolFailed(str(refused)) from refused
    status = ToolStatus.tool_error if said["isError"] else ToolStatus.ok
    return call.answer(json.dumps(said, ensure_ascii=False), status=status)


async def _call_over_http(call: Call, server: dict[str, Any]) -> dict[str, Any]:
    """Call a tool. A lost session is begun anew for a call that is safe, if no call before it was unsafe or the server
    keeps no state. Raises McpFailure, McpRefusal."""
    given = call.arguments
    known: HttpServer | None = call.context.connections.find(_key(server))
    touched, safe, again = given.get("touched", True) if known is None else known.touched, not unsafe(given), False
    while True:
        connection = await _connection(call, server)
        try:
            if connection is not known and touched and connection.has_session:
                raise ServerLost(
                    f"the session with MCP server {server['name']} is lost, and what earlier calls changed in it"
                )
            said = await connection.call(given["tool"], given["arguments"], safe=safe, most=call.limits.output_bytes)
            return json.loads(connection.redact(json.dumps(said)))  # type: ignore[no-any-return]
        except ServerLost as lost:
            await call.context.connections.drop(_key(server))
            if not safe or (touched and connection.has_session):
                raise
            if again:
                raise McpRefusal(f"{lost}; it did so twice under this call") from lost
            again = True


async def _connection(call: Call, server: dict[str, Any]) -> HttpServer:
    """Return the session's connection to the server. Raises McpFailure."""
    return await call.context.connections.open(_key(server), lambda: HttpServer.open(server, call.context.way_out))


async def _ask_driver(call: Call, server: dict[str, Any], request: dict[str, Any]) -> dict[str, Any] | Execution:
    """Have the driver in the sandbox do it. Return its answer, or how the call ended. Raises McpFailure,
    McpRefusal, TimeoutError."""
    arguments = json.dumps({**request, "server": server, "within_s": max(0.1, _within_s(call, server) - MARGIN_S / 2)})
    source = SOURCE.format(name=NAME, driver=DRIVER, file=f"<{NAME}>", arguments=arguments)
    printed = bytearray()

    def listen(stream: OutputStream, part: bytes) -> None:
        if stream is OutputStream.stdout:
            printed.extend(part)

    most = dataclasses.replace(call.limits, output_bytes=max(call.limits.output_bytes, OUTPUT_BYTES))
    execution = await call.exec(Command(kind=Kind.session, source=source, keeps=True), limits=most, on_output=listen)
    if execution.status is not ToolStatus.ok:
        return execution
    try:
        said = json.loads(bytes(printed).strip().rpartition(b"\n")[2])
    except (ValueError, RecursionError):
        said = None
    match said:
        case {"answer": dict() as answer}:
            return answer
        case {"error": str() as text}:
            raise McpRefusal(text)
        case {"silent": _}:
            raise TimeoutError
        case {"failed": str() as reason, "text": str() as text}:
            raise McpFailure(reason, text)
    raise McpFailure("mcp_protocol", "the interpreter that keeps the MCP servers printed something else than an answer")


def _request_of(call: Call) -> dict[str, Any]:
    given = call.arguments
    request = {"op": "call", "tool": given["tool"], "arguments": given["arguments"], "safe": not unsafe(given)}
    return {**request, "most": call.limits.output_bytes}


def _within_s(call: Call, server: dict[str, Any]) -> float:
    return float(max(0.1, min(server["timeout_s"], call.limits.wall_s - MARGIN_S)))


def _key(server: dict[str, Any]) -> str:
    return f"mcp/{server['name']}"


MCP: Final = Tool(
    name="mcp",
    version="1",
    about="The runner's own: list the tools of MCP servers, or call one.",
    schema=SCHEMA,
    run=mcp,
    kinds=frozenset({Kind.session}),
    once=unsafe,
    sandboxed=in_sandbox,
    leaves_state=unsafe,
    output_bytes=OUTPUT_BYTES,
    legal=fault,
)
"""The tool, which the entry point group `turnlog.tools` offers."""
