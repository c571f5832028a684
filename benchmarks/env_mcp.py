"""The MCP half of ENV: the tool `mcp`, at a server of the reference implementation over streamable HTTP."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import row  # noqa: F401 - by which `tests` is found

from tests.mcp_servers.upstream import environment, http_server
from turnlog.infra.embedded.ports import free_ports
from turnlog.plugins.mcp import McpServer, list_call
from turnlog.plugins.mcp.http_client import HttpServer


class McpAdapter:
    """See Adapter in env.py."""

    name = "mcp"

    def __init__(self, port: int, pid: int, http: aiohttp.ClientSession) -> None:
        self.url, self.pid = f"http://127.0.0.1:{port}", pid
        self._server, self._http = McpServer(name="ref", url=f"{self.url}/mcp"), http

    @classmethod
    @asynccontextmanager
    async def open(cls) -> AsyncIterator[McpAdapter]:
        """Start the server."""
        (port,) = free_ports(1)
        async with http_server(environment(), port) as process, aiohttp.ClientSession(auto_decompress=False) as http:
            yield cls(port, process.pid, http)

    def opening(self, session: int) -> dict[str, Any]:
        return list_call([self._server]).arguments

    def step(self, session: int, number: int) -> dict[str, Any]:
        spec, given = self._server.spec(), {"a": session, "b": number}
        return {"op": "call", "servers": [spec], "tool": "add", "arguments": given, "class": "read_only"}

    async def connect(self, session: int) -> BareMcp:
        connection = await HttpServer.open(self._server.spec(), lambda: DirectHttp(self._http))
        await connection.listing()
        return BareMcp(session, connection)


class BareMcp:
    """See BareSession in env.py."""

    def __init__(self, session: int, connection: HttpServer) -> None:
        self._session, self._connection = session, connection

    async def step(self, number: int) -> None:
        await self._connection.call("add", {"a": self._session, "b": number}, safe=True, most=65536)

    async def close(self) -> None:
        await self._connection.close()


class DirectHttp:
    """The network without rules; see Outward."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self._http = http

    @contextlib.asynccontextmanager
    async def request(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes = b""
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request."""
        async with self._http.request(method, url, headers=headers, data=body or None) as response:
            yield response

    def redact(self, text: str) -> str:
        """Return the text."""
        return text

    async def close(self) -> None:
        """Leave the connections to their owner."""
