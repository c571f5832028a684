"""The way of an agent's program to the gateway, restricted to the turns of its own session.

A program in a sandbox has the proxy's address as its base URL, http://127.0.0.1:3128, and any word as its key. Requests
that name only a path go to [gateway] url with the session's token in place of that word, so that no sandbox ever holds
the token. Answers are passed on as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Self

import aiohttp
import yarl

from turnlog.infra.roles.tls import trusting
from turnlog.sandbox_workers.egress.client import HEAD_BYTES, Client, Head
from turnlog.sandbox_workers.egress.policy import EgressUnavailable, Reason, RequestRefused, readings, relative
from turnlog.sandbox_workers.egress.recordings import Headers
from turnlog.sandbox_workers.egress.sources import AUTO_HEADERS, backwards, declared_length, onwards
from turnlog.settings import GatewaySettings

DIALECTS = "/v1/"
"""Path prefix of the gateway that a program may use: below it are turns and what belongs to them, but not the end of a
session."""
CLAIMS = frozenset((b"authorization", b"x-api-key", b"cookie"))
"""Headers by which a program identifies itself; ours replace them."""
CONNECT_S = 10.0
"""Seconds for the gateway to accept a connection; the duration of a turn is for the gateway to limit."""


class GatewayRelay:
    """Access of one call to the gateway."""

    def __init__(self, settings: GatewaySettings, token: str, session: aiohttp.ClientSession) -> None:
        self._root, self._most = settings.url.rstrip("/"), settings.max_body_bytes
        self._authorization, self._session = f"Bearer {token}", session

    @classmethod
    @asynccontextmanager
    async def open(cls, settings: GatewaySettings, token: str) -> AsyncIterator[Self]:
        """Open it with connections of its own while the block runs. Raises EgressUnavailable, TlsFileUnusable."""
        if not settings.url:
            raise EgressUnavailable("[gateway] url is empty: sandbox workers need the address of a gateway for agents")
        trusted = trusting(settings.url, settings.ca_file, "gateway")
        connector = aiohttp.TCPConnector(ssl=True if trusted is None else trusted, limit=0)
        async with aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            auto_decompress=False,
            skip_auto_headers=AUTO_HEADERS,
            max_line_size=HEAD_BYTES,
            max_field_size=HEAD_BYTES,
        ) as session:
            yield cls(settings, token, session)

    async def answer(self, head: Head, client: Client) -> None:
        """Send the program's request to the gateway. Abort it when the program disconnects, since nobody should sample
        for a client that is gone. Raises RequestRefused."""
        url = self._url(head.target)
        body = await client.body(self._most)
        asking = asyncio.create_task(self._send_request(head, url, body, client))
        leaving = asyncio.create_task(client.wait_until_closed())
        try:
            await asyncio.wait({asking, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                asking.result()
        finally:
            asking.cancel()
            leaving.cancel()
            await asyncio.wait({asking, leaving})

    def _url(self, text: str) -> yarl.URL:
        target = relative(text)
        if not all(reading.startswith(DIALECTS) for reading in readings(target.path)):
            raise RequestRefused(Reason.rule, f"of the gateway a program may ask for what is below {DIALECTS}")
        return yarl.URL(f"{self._root}{target.path}{target.query}", encoded=True)

    async def _send_request(self, head: Head, url: yarl.URL, body: bytes, client: Client) -> None:
        headers = [*onwards(head, CLAIMS), ("Authorization", self._authorization)]
        request = self._session.request(head.method, url, headers=headers, data=body or None, allow_redirects=False)
        try:
            async with request as response:
                await client.stream_answer(response.status, _back(response), response.content.iter_any())
        except aiohttp.ClientError as error:
            raise RequestRefused(Reason.unreachable, f"[gateway] url: {type(error).__name__}") from error


def _back(response: aiohttp.ClientResponse) -> Headers:
    length: Iterable[tuple[bytes, bytes]] = ()
    if (declared := declared_length(response)) is not None:
        length = ((b"content-length", b"%d" % declared),)
    return (*backwards(response.raw_headers), *length)
