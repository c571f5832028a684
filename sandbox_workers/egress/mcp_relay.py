"""MCP servers for an agent that is a program: http://127.0.0.1:3128/mcp/SERVER is a server to it.

The worker's proxy answers there by streamable HTTP (Model Context Protocol 2025-11-25), and lists and calls the real
server in the program's place. Each list and each call is a pair of records of the session, ToolCallRequested and
ToolCallCompleted, whose `caller` is this proxy; the request is on the log before the server gets it, and the answer
before the program does. The program has neither the server's address nor its credentials."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final, Protocol

from turnlog.infra.environments.tools import MCP_INSIDE, idempotency_class
from turnlog.sandbox_workers.egress.client import Client, Head
from turnlog.sandbox_workers.egress.policy import relative
from turnlog.sandbox_workers.protocol import Execution
from turnlog.schemas.events import ToolCallRequested, ToolStatus

log = logging.getLogger(__name__)
VERSIONS: Final = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
BODY_BYTES: Final = 4 << 20
"""Maximum size of one message of the program, in bytes."""
END_S: Final = 5.0
"""Seconds that calls under way get after the end of the program."""
PARSE, METHOD, PARAMETERS, INTERNAL = -32700, -32601, -32602, -32603
"""Error codes of JSON-RPC 2.0."""
JSON_HEADERS: Final = ((b"content-type", b"application/json"), (b"cache-control", b"no-store"))

RECORD: Final = "/record"
"""Path below a server's own, at which the stand-in of a server in the sandbox reports its calls
(turnlog.plugins.mcp.shim)."""


class CallRecorder(Protocol):
    """Makes and records calls of the tool `mcp` (sandbox_workers.agent_calls)."""

    async def call(self, arguments: dict[str, Any]) -> Execution:
        """Make a call, recorded."""
        ...

    async def begin(self, arguments: dict[str, Any]) -> ToolCallRequested:
        """Record the begin of a call that the program makes itself."""
        ...

    async def complete(self, request: ToolCallRequested, execution: Execution) -> None:
        """Record the end of such a call."""
        ...


class PathService(Protocol):
    """Answers requests of an agent's program that name only a path."""

    async def answer(self, head: Head, client: Client) -> None:
        """Answer a request. Raises RequestRefused."""
        ...


class AgentPaths:
    """The paths of an agent's program: MCP servers, and the gateway for all others."""

    def __init__(self, gateway: PathService, servers: McpRelay) -> None:
        self._gateway, self._servers = gateway, servers

    async def answer(self, head: Head, client: Client) -> None:
        service = self._servers if relative(head.target).path.startswith(MCP_INSIDE) else self._gateway
        await service.answer(head, client)


class McpRelay:
    """The servers of one session's agent."""

    def __init__(self, servers: Sequence[Mapping[str, Any]], calls: CallRecorder) -> None:
        """Create it. `servers` are as the tool `mcp` takes them."""
        self._servers = {str(server["name"]): dict(server) for server in servers}
        self._calls = calls
        self._reported: dict[int, tuple[ToolCallRequested, float]] = {}
        self._tools: dict[str, list[dict[str, Any]]] = {}
        self._about: dict[str, dict[str, Any]] = {}
        self._one_call = asyncio.Lock()
        self._running: set[asyncio.Task[dict[str, Any]]] = set()
        self.failed: Execution | None = None
        """The first call that failed by the server's or our own doing. What the program made of that failure is no
        evidence about the agent."""

    async def answer(self, head: Head, client: Client) -> None:
        """Answer one message. Raises RequestRefused."""
        path = relative(head.target).path.removeprefix(MCP_INSIDE)
        name = path.removesuffix(RECORD)
        body = await client.body(BODY_BYTES)
        if name not in self._servers:
            names = ", ".join(self._servers) or "none"
            return await self._say(client, HTTPStatus.NOT_FOUND, f"no MCP server {name[:80]!r}: they are {names}\n")
        if head.method == "DELETE":
            return await client.answer(HTTPStatus.NO_CONTENT, (), b"")
        if head.method != "POST":
            return await self._say(client, HTTPStatus.METHOD_NOT_ALLOWED, "messages are posted here\n")
        try:
            message = json.loads(body)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            return await self._reply(client, error(None, PARSE, "one JSON-RPC message is expected"))
        if path != name:
            return await self._reply(client, await self._report(name, message))
        if "id" not in message or "method" not in message:
            return await client.answer(HTTPStatus.ACCEPTED, (), b"")
        # What was sent to the server is recorded to its end, whether or not the program waits for it.
        task = asyncio.create_task(self._response(name, message))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await self._reply(client, await asyncio.shield(task))

    async def _report(self, name: str, about: dict[str, Any]) -> dict[str, Any]:
        """Record what the stand-in of a server in the sandbox reports: the begin of a call, or its end."""
        clock = asyncio.get_running_loop().time
        match about:
            case {"request": {"method": "tools/list"}}:
                request = await self._calls.begin({"op": "list", "servers": [self._servers[name]]})
            case {"request": {"method": "tools/call", "params": {"name": str() as tool, **given}}}:
                arguments = {
                    "op": "call", "servers": [self._servers[name]], "tool": tool,
                    "arguments": given.get("arguments") or {}, "class": self._class(name, tool),
                }  # fmt: skip
                request = await self._calls.begin(arguments)
            case {"number": int() as number, "response": dict() as response} if number in self._reported:
                request, began = self._reported.pop(number)
                await self._calls.complete(request, self._execution(name, response, clock() - began))
                return {}
            case _:
                return error(None, PARAMETERS, "no report of a call")
        self._reported[request.call_seq] = request, clock()
        return {"number": request.call_seq}

    def _execution(self, name: str, response: dict[str, Any], took_s: float) -> Execution:
        found = response.get("result")
        if isinstance(found, dict) and "tools" in found:
            self._tools.setdefault(name, []).extend(tool for tool in found["tools"] if isinstance(tool, dict))
            output = json.dumps({"servers": [{"name": name, "tools": found["tools"]}]})
            return Execution(ToolStatus.ok, "", 0, output.encode(), took_s, 0.0)
        failed = not isinstance(found, dict) or found.get("isError") is True
        output = json.dumps(found if isinstance(found, dict) else response.get("error"))
        status = ToolStatus.tool_error if failed else ToolStatus.ok
        return Execution(status, "", int(failed), output.encode(errors="replace"), took_s, 0.0)

    def _class(self, name: str, tool: str) -> str:
        known = {one.get("name"): one for one in self._tools.get(name, ())}
        return idempotency_class(known.get(tool, {}))

    async def close(self) -> None:
        """End the calls that are under way."""
        if self._running:
            _, late = await asyncio.wait(self._running, timeout=END_S)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)

    async def _response(self, name: str, message: dict[str, Any]) -> dict[str, Any]:
        number, method, given = message["id"], message["method"], message.get("params")
        params = given if isinstance(given, dict) else {}
        try:
            match method:
                case "initialize":
                    return result(number, await self._greeting(name, params))
                case "ping":
                    return result(number, {})
                case "tools/list":
                    return result(number, {"tools": await self._list_tools(name)})
                case "tools/call":
                    return result(number, await self._call_tool(name, params))
        except _Failed as failed:
            return error(number, failed.code, str(failed))
        return error(number, METHOD, f"there is no method {method!r:.80} here")

    async def _greeting(self, name: str, params: dict[str, Any]) -> dict[str, Any]:
        await self._list_tools(name)
        version = params.get("protocolVersion")
        greeting: dict[str, Any] = {
            "protocolVersion": version if version in VERSIONS else VERSIONS[-1],
            "capabilities": {"tools": {"listChanged": False}},
            "serverInfo": {"name": name, "version": self._about[name].get("server", {}).get("version", "")},
        }
        if instructions := self._about[name].get("instructions"):
            greeting["instructions"] = instructions
        return greeting

    async def _list_tools(self, name: str) -> list[dict[str, Any]]:
        """Return the server's tools, as they were listed first. Raises _Failed."""
        async with self._one_call:
            if name not in self._tools:
                execution = await self._run({"op": "list", "servers": [self._servers[name]]})
                (self._about[name],) = json.loads(execution.output)["servers"]
                self._tools[name] = self._about[name]["tools"]
            return self._tools[name]

    async def _call_tool(self, name: str, params: dict[str, Any]) -> dict[str, Any]:
        tools = {tool["name"]: tool for tool in await self._list_tools(name)}
        tool, given = params.get("name"), params.get("arguments")
        if tool not in tools:
            raise _Failed(PARAMETERS, f"there is no tool {tool!r:.80}")
        arguments = {
            "op": "call", "servers": [self._servers[name]], "tool": tool,
            "arguments": given if isinstance(given, dict) else {}, "class": idempotency_class(tools[tool]),
        }  # fmt: skip
        async with self._one_call:
            execution = await self._run(arguments)
        try:
            said = json.loads(execution.output)
        except ValueError:
            said = None
        if isinstance(said, dict) and "content" in said:
            return said
        text = execution.output.decode(errors="replace")
        return {"content": [{"type": "text", "text": text}], "isError": execution.status is not ToolStatus.ok}

    async def _run(self, arguments: dict[str, Any]) -> Execution:
        """Make a recorded call. Raises _Failed if it failed by the server's or our own doing."""
        execution = await self._calls.call(arguments)
        listing = arguments["op"] == "list" and execution.status is not ToolStatus.ok
        if listing or execution.status in (ToolStatus.infra_error, ToolStatus.cancelled, ToolStatus.refused):
            self.failed = self.failed or execution
            raise _Failed(INTERNAL, execution.output.decode(errors="replace").strip() or execution.reason)
        return execution

    @staticmethod
    async def _reply(client: Client, message: dict[str, Any]) -> None:
        await client.answer(HTTPStatus.OK, JSON_HEADERS, json.dumps(message).encode())

    @staticmethod
    async def _say(client: Client, status: HTTPStatus, text: str) -> None:
        await client.answer(status, ((b"content-type", b"text/plain; charset=utf-8"),), text.encode())


class _Failed(Exception):
    """A request that is answered by an error."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def result(number: object, value: dict[str, Any]) -> dict[str, Any]:
    """Build a response."""
    return {"jsonrpc": "2.0", "id": number, "result": value}


def error(number: object, code: int, text: str) -> dict[str, Any]:
    """Build the response to a request that failed."""
    return {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": text}}
