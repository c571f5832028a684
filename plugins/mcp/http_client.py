"""Client of an MCP server over streamable HTTP, which a worker keeps for one session.

Protocol: Model Context Protocol 2025-11-25, base/transports: a request is a POST, answered by JSON or by a stream of
server-sent events; a session id in a header of the first answer names the session from then on."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Protocol, Self

import aiohttp

from turnlog.plugins.mcp.driver import (
    MESSAGE_BYTES,
    McpFailure,
    ServerLost,
    Tool,
    call_answer,
    check_greeting,
    hello,
    page_of,
    reply_to,
    result_of,
    select_tools,
    too_long,
)
from turnlog.sandbox_workers.egress.policy import EgressError, Reason
from turnlog.sandbox_workers.egress.policy import RequestRefused as NetworkRefusal

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
START_S = 10.0
"""Seconds for which a server that cannot be reached is tried again: it may just be starting."""
CLOSE_S = 2.0
DRAIN_S = 0.1
LOSSES = frozenset({Reason.unreachable, Reason.timeout_s})
"""Reasons of the network for which nobody knows whether the server got the request."""
Message = dict[str, Any]


class Outward(Protocol):
    """The part of `WayOut` that is used here."""

    def request(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes = b""
    ) -> contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Send a request."""
        ...

    def redact(self, text: str) -> str:
        """Return the text without credentials."""
        ...

    async def close(self) -> None:
        """Close its connections."""
        ...


class HttpServer:
    """A session with a server at a URL."""

    def __init__(self, spec: dict[str, Any], way_out: Outward) -> None:
        self.name: str = spec["name"]
        self.touched = False
        """True if a call that is not safe was sent in this session."""
        self.about: dict[str, Any] = {}
        self._spec, self._way_out = spec, way_out
        self._session = ""
        self._protocol = ""
        self._count = 0

    @classmethod
    async def open(cls, spec: dict[str, Any], way_out: Callable[[], Outward] | None) -> Self:
        """Begin a session. A server that cannot be reached is tried for START_S. Raises McpFailure."""
        if way_out is None:
            raise McpFailure(
                "mcp_start",
                f"MCP server {spec['name']}: [egress] allow of the worker is empty, so {spec['url']} is out of reach",
            )
        server, loop, pause = cls(spec, way_out()), asyncio.get_running_loop(), FIRST_PAUSE_S
        until = loop.time() + START_S
        try:
            while True:
                try:
                    await server._greet()
                    return server
                except ServerLost as lost:
                    if loop.time() + pause > until:
                        raise McpFailure("mcp_start", f"MCP server {server.name} did not start: {lost}") from lost
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
        except BaseException:
            await server._way_out.close()
            raise

    @property
    def has_session(self) -> bool:
        """True if the server keeps a session, which may have state that a new one lacks."""
        return bool(self._session) and not self._spec["stateless"]

    async def listing(self) -> dict[str, Any]:
        """Return what is recorded of the server: who it is, and its tools. Raises McpFailure, McpRefusal."""
        found: list[Tool] = []
        cursor = page_of(await self._request("tools/list", {}), self.name, found)
        while cursor:
            cursor = page_of(await self._request("tools/list", {"cursor": cursor}), self.name, found)
        return {"name": self.name, **self.about, "tools": select_tools(found, self._spec)}

    async def call(self, tool: str, arguments: Any, *, safe: bool, most: int) -> dict[str, Any]:
        """Call a tool. Raises ServerLost, McpFailure, McpRefusal."""
        self.touched = self.touched or not safe
        return call_answer(await self._request("tools/call", {"name": tool, "arguments": arguments}), self.name, most)

    async def close(self) -> None:
        """End the session. Never raises."""
        with contextlib.suppress(EgressError, aiohttp.ClientError, TimeoutError):
            if self._session:
                async with (
                    asyncio.timeout(CLOSE_S),
                    self._way_out.request("DELETE", self._spec["url"], self._headers()),
                ):
                    pass
        await self._way_out.close()

    def redact(self, text: str) -> str:
        """Return the text without the credentials of this server."""
        return self._way_out.redact(text)

    async def _greet(self) -> None:
        self._session = self._protocol = ""
        self.about = check_greeting(await self._request("initialize", hello()), self.name)
        self._protocol = self.about["protocol"]
        await self._send({"jsonrpc": "2.0", "method": "notifications/initialized"})

    async def _request(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        self._count += 1
        number = self._count
        async with self._post({"jsonrpc": "2.0", "id": number, "method": method, "params": params}) as response:
            if method == "initialize":
                self._session = response.headers.get("Mcp-Session-Id", "")
            async for message in self._messages(response):
                if "method" not in message and message.get("id") == number:
                    await _drain(response)
                    return result_of(message, self.name, method)
                if (reply := reply_to(message)) is not None:
                    await self._send(reply)
        raise ServerLost(f"MCP server {self.name} ended its answer to {method} early")

    async def _send(self, message: Message) -> None:
        """Send a notification or a reply, which has no answer."""
        async with self._post(message):
            pass

    @contextlib.asynccontextmanager
    async def _post(self, message: Message) -> AsyncIterator[aiohttp.ClientResponse]:
        """Post a message. Raises ServerLost if nobody knows whether it arrived, McpFailure for other refusals."""
        body = json.dumps(message).encode()
        headers = {
            **self._spec["headers"], **self._headers(),
            "Content-Type": "application/json", "Accept": "application/json, text/event-stream",
        }  # fmt: skip
        try:
            async with self._way_out.request("POST", self._spec["url"], headers, body) as response:
                if response.status >= 400:
                    await self._raise_refusal(response)
                yield response
        except NetworkRefusal as refused:
            if refused.reason in LOSSES:
                raise ServerLost(f"MCP server {self.name} at {self._spec['url']}: {refused.reason}") from refused
            text = f"MCP server {self.name}: {refused.text('POST', self._spec['url']).decode()}"
            raise McpFailure("mcp_start", text) from refused
        except EgressError as error:
            raise McpFailure("mcp_start", f"MCP server {self.name}: {error}") from error
        except aiohttp.ClientError as error:
            raise ServerLost(f"MCP server {self.name}: {type(error).__name__}: {error}") from error

    async def _raise_refusal(self, response: aiohttp.ClientResponse) -> None:
        """Raise for an answer with an error status."""
        said = (await _whole(response, self.name))[:500].decode(errors="replace")
        text = self.redact(f"MCP server {self.name} answers {response.status}: {said}")
        if response.status in (401, 403):
            raise McpFailure(
                "mcp_credential", f"{text}; [egress] credentials_file of the worker has the headers of a server"
            )
        if response.status == 404 and self._session:
            raise ServerLost(f"MCP server {self.name} does not know the session any more")
        if response.status >= 500 or response.status in (408, 429):
            raise ServerLost(text)
        raise McpFailure("mcp_protocol", text)

    def _headers(self) -> dict[str, str]:
        headers = {"Accept-Encoding": "identity", "User-Agent": "turnlog"}
        if self._session:
            headers["Mcp-Session-Id"] = self._session
        if self._protocol:
            headers["MCP-Protocol-Version"] = self._protocol
        return headers

    async def _messages(self, response: aiohttp.ClientResponse) -> AsyncIterator[Message]:
        kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if kind == "text/event-stream":
            async for data in _events(response, self.name):
                yield self._parse(data)
        elif kind == "application/json":
            yield self._parse(await _whole(response, self.name))
        else:
            raise McpFailure(
                "mcp_protocol",
                f"MCP server {self.name} answers {kind or 'nothing'!r:.80}, which is neither JSON nor events",
            )

    def _parse(self, data: bytes) -> Message:
        try:
            message = json.loads(data)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise McpFailure("mcp_protocol", f"MCP server {self.name} sends no JSON-RPC: {data[:200]!r}")
        return message


async def _drain(response: aiohttp.ClientResponse) -> None:
    """Read the end of a stream, so that its connection serves the next request."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_S):
            while await response.content.readany():
                pass


async def _whole(response: aiohttp.ClientResponse, name: str) -> bytes:
    parts, size = [], 0
    async for part in response.content.iter_any():
        parts.append(part)
        if (size := size + len(part)) > MESSAGE_BYTES:
            raise too_long(name)
    return b"".join(parts)


async def _events(response: aiohttp.ClientResponse, name: str) -> AsyncIterator[bytes]:
    """Yield the data of each event that has some (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""
    buffer, data = bytearray(), bytearray()
    seen = 0
    async for part in response.content.iter_any():
        buffer += part
        while (end := buffer.find(b"\n", seen)) >= 0:
            line = bytes(buffer[:end]).rstrip(b"\r")
            del buffer[: end + 1]
            seen = 0
            if line.startswith(b"data:"):
                data += (b"\n" if data else b"") + line[5:].removeprefix(b" ")
            elif not line and data:
                yield bytes(data)
                data.clear()
        seen = len(buffer)
        if len(buffer) + len(data) > MESSAGE_BYTES:
            raise too_long(name)
