"""Requests that a worker itself makes for a call: to servers that tools speak to without a sandbox.

They are granted by the same rules as those of sandboxes ([egress] allow, and the task's own), go to checked addresses
only, and through [egress] proxy where there is one. Credentials are added here, so that no tool, sandbox or record has
them."""

from __future__ import annotations

import ssl
import tomllib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from turnlog.sandbox_workers.egress.client import Head
from turnlog.sandbox_workers.egress.policy import (
    EgressUnavailable,
    NetworkRuleSet,
    Reason,
    RequestRefused,
    absolute,
)
from turnlog.sandbox_workers.egress.sources import Addresses, Onwards, Upstream

Credentials = Mapping[str, Mapping[str, str]]
"""Headers by URL."""
LEAST_SECRET = 8
"""Minimum number of characters of a credential that is removed from answers."""
CONNECTIONS = 8
"""Maximum connections of one way out at a time."""


def read_credentials(path: str) -> Credentials:
    """Return the headers that servers demand of the worker, by URL, from the TOML file of [egress] credentials_file.
    Raises EgressUnavailable."""
    if not path:
        return {}
    try:
        tables = tomllib.loads(Path(path).read_text())
        found = {url: {name.lower(): value for name, value in headers.items()} for url, headers in tables.items()}
        if not all(isinstance(value, str) for headers in found.values() for value in headers.values()):
            raise ValueError("the value of a header is no string")
        for url in found:
            absolute(url)
    except (OSError, ValueError, AttributeError, RequestRefused) as error:
        raise EgressUnavailable(
            f'[egress] credentials_file {path}: {error}; it has tables ["https://HOST/PATH"] of header = "value"'
        ) from None
    return found


def credentials_for(url: str, credentials: Credentials) -> Mapping[str, str]:
    """Return the headers of the longest URL that `url` is, or is below."""
    target, fit = absolute(url).url, []
    for key in credentials:
        base = absolute(key).url
        if target == base or target.startswith(base.rstrip("/") + "/"):
            fit.append(key)
    return credentials[max(fit, key=len)] if fit else {}


class WayOut:
    """A session's way to servers outside, for the worker's own requests."""

    def __init__(
        self,
        policy: NetworkRuleSet,
        addresses: Addresses,
        trust: ssl.SSLContext,
        *,
        onwards: Onwards | None,
        live: bool,
        credentials: Credentials,
    ) -> None:
        """Create it. `live`: requests go out; in mode `replay` none does. `credentials` has the headers that servers
        demand of the worker."""
        self._policy, self._live, self._credentials = policy, live, credentials
        self._upstream = Upstream(addresses, trust, connections=CONNECTIONS, onwards=onwards)

    @asynccontextmanager
    async def request(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes = b""
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request and yield the answer, its body still to be read (not decompressed). Redirects are not
        followed. Raises RequestRefused with the reason (rule, private_address, unreachable, certificate),
        ProxyUnusable; reading the body raises the same."""
        target = absolute(url)
        if not self._policy.grants(method, target):
            raise RequestRefused(Reason.rule)
        if not self._live:
            raise RequestRefused(Reason.not_recorded)
        every = {name.lower(): value for name, value in headers.items()} | dict(credentials_for(url, self._credentials))
        pairs = tuple((name.encode(), value.encode()) for name, value in every.items())
        async with self._upstream.send_request(Head(method, url, pairs), target, body) as response:
            yield response

    def redact(self, text: str) -> str:
        """Return the text without the credentials, which a server might echo."""
        for headers in self._credentials.values():
            for value in headers.values():
                for secret in (value, value.rpartition(" ")[2]):
                    if len(secret) >= LEAST_SECRET:
                        text = text.replace(secret, "[credential]")
        return text

    async def close(self) -> None:
        """Close its connections. Never raises."""
        await self._upstream.close()

    async def websocket(self, url: str, *, max_bytes: int, timeout_s: float) -> aiohttp.ClientWebSocketResponse:
        """Open a WebSocket to a URL of scheme http or https, which is granted as a GET is. Messages may have
        `max_bytes` each. Raises as `request` does, and RequestRefused(upgrade) where [egress] proxy connects for the
        worker."""
        target = absolute(url)
        if not self._policy.grants("GET", target):
            raise RequestRefused(Reason.rule)
        if not self._live:
            raise RequestRefused(Reason.not_recorded)
        return await self._upstream.open_websocket(
            target, credentials_for(url, self._credentials), max_bytes=max_bytes, timeout_s=timeout_s
        )
