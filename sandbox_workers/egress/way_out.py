"""Requests that a worker itself makes for a call: to servers that tools speak to without a sandbox.

They are granted by the same rules as those of sandboxes ([egress] allow, and the task's own), go to checked addresses
only, and through [egress] proxy where there is one."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import aiohttp

from turnlog.sandbox_workers.egress.client import Head
from turnlog.sandbox_workers.egress.policy import NetworkRuleSet, Reason, RequestRefused, absolute
from turnlog.sandbox_workers.egress.sources import Addresses, Onwards, Upstream

CONNECTIONS = 8
"""Maximum connections of one way out at a time."""


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
    ) -> None:
        """Create it. `live`: requests go out; in mode `replay` none does."""
        self._policy, self._live = policy, live
        self._upstream = Upstream(addresses, trust, connections=CONNECTIONS, onwards=onwards)

    @asynccontextmanager
    async def request(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes = b""
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request and yield the answer, its body still to be read (not decompressed). Redirects are not
        followed. Raises RequestRefused with the reason (rule, private_address, unreachable, certificate),
        ProxyUnusable; reading the body raises aiohttp.ClientError."""
        target = absolute(url)
        if not self._policy.grants(method, target):
            raise RequestRefused(Reason.rule)
        if not self._live:
            raise RequestRefused(Reason.not_recorded)
        pairs = tuple((name.lower().encode(), value.encode()) for name, value in headers.items())
        async with self._upstream.send_request(Head(method, url, pairs), target, body) as response:
            yield response

    async def close(self) -> None:
        """Close its connections. Never raises."""
        await self._upstream.close()
