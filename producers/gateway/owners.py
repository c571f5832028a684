"""The other gateways of a run: whether the owner of a session is alive, and requests forwarded to it.

Behind one public address, any replica may receive a request about any session. A replica with an address of its own
([gateway] own_url) is recorded on the log by that address. Whoever receives a request can then probe the owner first,
and takes the session over only if the owner does not answer. Without such an address nobody can tell, and whoever
receives the request takes over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import aiohttp
import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from yarl import URL

from turnlog.infra.roles.http_clients import for_turns
from turnlog.infra.roles.tls import trusting
from turnlog.producers.gateway.errors import ERRORS, EpochLost, GatewayError

LOOK_S = 2.0
"""An owner that does not answer for this many seconds is gone. If it is a zombie, its turns do not count, because its
ownership term (`epoch`) is over."""
TRUSTED_S = 1.0
"""Seconds after a sign of life in which the owner is not probed again."""
FORWARDED = "turnlog-forwarded"
"""Header of a request that another gateway has forwarded; it is forwarded only once."""
OF_ONE_HOP = frozenset(
    {"host", "connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "expect", "content-length"}
)
NOT_OURS = ("accept", "accept-encoding", "content-type", "user-agent")
"""Headers that aiohttp would add to a request that does not have them."""
UNREACHED = (aiohttp.ClientError, TimeoutError)


class OwnedElsewhere(Exception):
    """A live gateway other than this one owns the session."""

    def __init__(self, url: str, epoch: str) -> None:
        super().__init__(url)
        self.url = url
        self.epoch = epoch


class Owners:
    """The other gateways, by the addresses that they wrote into sessions."""

    def __init__(self, own_url: str, *, answer_s: float, ca_file: str = "") -> None:
        """`answer_s` is the longest silence in seconds while an owner's answer is awaited; `ca_file`: see [gateway].
        Raises TlsFileUnusable."""
        self._own = own_url
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=LOOK_S, sock_read=answer_s)
        self._http = for_turns(trusting(own_url, ca_file, "gateway"))
        self._seen: dict[str, float] = {}

    async def close(self) -> None:
        """Close idle connections."""
        await self._http.close()

    async def check(self, url: str, epoch: str) -> None:
        """Raise OwnedElsewhere if `url` is another gateway that is alive. An owner that had our own address is gone."""
        if url == self._own:
            return
        if time.monotonic() - self._seen.get(url, float("-inf")) < TRUSTED_S or await self._lives(url):
            raise OwnedElsewhere(url, epoch)

    def forget(self, url: str) -> None:
        """Forget that a gateway is alive, because it did not answer."""
        self._seen.pop(url, None)

    async def _lives(self, url: str) -> bool:
        try:
            async with self._http.get(f"{url}/healthz", timeout=aiohttp.ClientTimeout(total=LOOK_S)) as answer:
                lives = answer.status == 200 and orjson.loads(await answer.read()).get("role") == "gateway"
        except (*UNREACHED, orjson.JSONDecodeError, AttributeError):
            return False
        if lives:
            self._seen[url] = time.monotonic()
        return lives

    def passed_on(
        self, other: OwnedElsewhere, request: Request, body: bytes, refusal: Callable[[GatewayError], bytes]
    ) -> Response:
        """Return a response that forwards the owner's answer byte for byte; `refusal` makes the body that reports a
        missing answer. Raises EpochLost if the request was forwarded before."""
        if FORWARDED in request.headers:
            raise EpochLost(f"the session is at {other.url} now: open it again")
        return _PassedOn(self, other.url, request, body, refusal)

    def stream(self, url: str, request: Request, body: bytes) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Send the request to another gateway; see aiohttp's `request`."""
        headers = [(name, value) for name, value in request.headers.items() if name not in OF_ONE_HOP]
        query = f"?{request.url.query}" if request.url.query else ""
        return self._http.request(
            request.method, URL(f"{url}{request.url.path}{query}", encoded=True), headers=[*headers, (FORWARDED, "1")],
            data=body or None, timeout=self._timeout, allow_redirects=False, auto_decompress=False,
            skip_auto_headers=NOT_OURS,
        )  # fmt: skip


class _PassedOn(Response):
    """Sends the owner's answer as it arrives. When our client disconnects, we disconnect from the owner."""

    def __init__(
        self, owners: Owners, url: str, request: Request, body: bytes, refusal: Callable[[GatewayError], bytes]
    ) -> None:
        super().__init__()
        self._owners, self._url, self._request, self._asked, self._refusal = owners, url, request, body, refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        passing = asyncio.create_task(self._pass(scope, receive, send))
        watch = asyncio.create_task(_wait_for_disconnect(receive))
        try:
            await asyncio.wait({passing, watch}, return_when=asyncio.FIRST_COMPLETED)
            if passing.done():
                passing.result()
        finally:
            passing.cancel()
            watch.cancel()
            await asyncio.gather(passing, watch, return_exceptions=True)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False
        try:
            async with self._owners.stream(self._url, self._request, self._asked) as answer:
                headers = [(name, value) for name, value in answer.raw_headers if _is_forwarded(name)]
                await send({"type": "http.response.start", "status": answer.status, "headers": headers})
                begun = True
                async for part in answer.content.iter_any():
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        except UNREACHED as error:
            self._owners.forget(self._url)
            if begun:  # the client sees a broken answer, as if it had asked the owner
                raise
            gone = EpochLost(f"{self._url}, which had the session, did not answer ({type(error).__name__}): ask again")
            ERRORS.labels(gone.code).inc()
            refused = Response(self._refusal(gone), gone.status, media_type="application/json")
            await refused(scope, receive, send)


def _is_forwarded(name: bytes) -> bool:
    return name.decode("latin-1").lower() not in OF_ONE_HOP - {"content-length"}


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
