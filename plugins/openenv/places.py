"""Places of a session's environment: a server that is reached by URL, or one that the worker starts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol

import aiohttp

from turnlog.plugins.openenv.client import (
    CONNECT_S,
    NotAllowed,
    OpenEnvError,
    OpenEnvServer,
    OpenEnvSession,
    ServerNetwork,
    ServerUnreachable,
)
from turnlog.plugins.openenv.servers import NAME, ServerNotStarted, StartedPlace, StartedServers
from turnlog.sandbox_workers.egress.policy import EgressError, Reason, RequestRefused
from turnlog.sandbox_workers.egress.way_out import WayOut
from turnlog.sandbox_workers.server_sandboxes import ServerSandboxes
from turnlog.sandbox_workers.tools.tool import CallContext, InfraFailed

AWAY = frozenset({Reason.unreachable, Reason.certificate, Reason.timeout_s})
"""Refusals that say that the server cannot be reached, not that it may not be."""


class ServerPlace(Protocol):
    """A server, as one session uses it."""

    named: Any
    """Value of `server` in the reset that named it."""

    @property
    def server(self) -> OpenEnvServer:
        """The server's HTTP endpoints, once a session has connected."""
        ...

    async def connect(self, *, timeout_s: float) -> OpenEnvSession:
        """Connect to an environment of its own. Raises OpenEnvError."""
        ...

    def note_full(self) -> None:
        """Note that the server takes no more sessions."""
        ...

    def note_disconnect(self) -> None:
        """Note that the last connection is closed."""
        ...

    def output(self) -> str:
        """Return what the server printed last; empty if that is unknown."""
        ...

    async def close(self) -> None:
        """Release it."""
        ...


class RemotePlace:
    """A server by its URL."""

    def __init__(self, url: str, network: ServerNetwork) -> None:
        """Raises ValueError if `url` is none."""
        self.named = url
        self.server = OpenEnvServer(url, network)

    async def connect(self, *, timeout_s: float) -> OpenEnvSession:
        return await OpenEnvSession.connect(self.server.url, self.server.network, timeout_s=min(timeout_s, CONNECT_S))

    def note_full(self) -> None:
        """See ServerPlace. There is no other server."""

    def note_disconnect(self) -> None:
        """See ServerPlace. Nothing is counted."""

    def output(self) -> str:
        return ""

    async def close(self) -> None:
        await self.server.network.close()


class EgressNetwork:
    """The worker's way out, under [egress]."""

    def __init__(self, way: WayOut) -> None:
        self._way = way

    async def websocket(self, url: str, *, max_bytes: int, timeout_s: float) -> aiohttp.ClientWebSocketResponse:
        try:
            return await self._way.websocket(url, max_bytes=max_bytes, timeout_s=timeout_s)
        except EgressError as error:
            raise _refusal("GET", url, error) from error

    @asynccontextmanager
    async def request(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes = b""
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            async with self._way.request(method, url, headers, body) as response:
                yield response
        except EgressError as error:
            raise _refusal(method, url, error) from error

    async def close(self) -> None:
        await self._way.close()


def _refusal(method: str, url: str, error: EgressError) -> OpenEnvError:
    if isinstance(error, RequestRefused):
        said = error.text(method, url).decode().strip()
        return ServerUnreachable(said) if error.reason in AWAY else NotAllowed(said)
    return NotAllowed(f"{method} {url}: {error}")


async def open_place(named: Any, context: CallContext) -> ServerPlace:
    """Return the place that `server` of a reset names. Raises InfraFailed."""
    if not isinstance(named, str):
        sandboxes, shared = context.server_sandboxes, context.shared
        if sandboxes is None or shared is None:
            raise InfraFailed(ServerNotStarted.reason, "servers are started by sandbox workers only")
        servers: StartedServers = await shared.open(NAME, lambda: _new_servers(sandboxes))
        return StartedPlace(named, servers)
    if context.way_out is None:
        raise InfraFailed(
            NotAllowed.reason,
            f"{named} was refused: [egress] allow of this worker names nothing. Add `GET {named.rstrip('/')}/*` there "
            "and, for a private address, its host:port to private_hosts",
        )
    try:
        return RemotePlace(named, EgressNetwork(context.way_out()))
    except ValueError as error:
        raise InfraFailed(ServerUnreachable.reason, str(error)) from error
    except EgressError as error:
        raise InfraFailed(NotAllowed.reason, f"{named} was refused: {error}") from error


async def _new_servers(sandboxes: ServerSandboxes) -> StartedServers:
    return StartedServers(sandboxes)
