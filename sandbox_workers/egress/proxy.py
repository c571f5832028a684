"""The proxy of one call. It accepts on the sandbox's listening socket; every request is admitted, answered and noted,
or refused.

A refusal is an answer that gives the reason. RFC 9112 3.2 (forms of a target), RFC 9110 9.3.6 (CONNECT). A connection
is served by one asyncio task, a request at a time. After a granted CONNECT comes TLS that ends here (intercept), or
bytes that nobody looks at (tunnel).

A program that is an agent has the proxy's address as its base URL, http://127.0.0.1:3128, and any word as its key.
Requests that name only a path go to [gateway] url with the session's token in place of that word, so that no sandbox
ever holds the token; only the turns of its own session are let through. Answers are passed on as they come."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import ssl
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Self

import aiohttp
import anyio
import h11
import yarl
from anyio.abc import ByteStream, SocketStream
from anyio.streams.buffered import BufferedByteStream
from anyio.streams.tls import TLSStream

from turnlog.infra.blobs import BlobError
from turnlog.infra.roles.tls import trusting
from turnlog.sandbox_settings import EgressSettings
from turnlog.sandbox_workers.egress.certificates import CertificateAuthority
from turnlog.sandbox_workers.egress.client import HEAD_BYTES, READ_BYTES, Accepted, Client, Head
from turnlog.sandbox_workers.egress.mcp_relay import PathService
from turnlog.sandbox_workers.egress.policy import (
    Authority,
    CanonicalUrl,
    EgressUnavailable,
    ProxyUnusable,
    Reason,
    RequestRefused,
    absolute,
    authority,
    readings,
    relative,
    within,
)
from turnlog.sandbox_workers.egress.recordings import Entry, Headers, Requests, request_key
from turnlog.sandbox_workers.egress.sources import (
    AUTO_HEADERS,
    PROXY_STATUS,
    Addresses,
    Request,
    ResponseSource,
    backwards,
    declared_length,
    onwards,
)
from turnlog.schemas.events import EgressSource
from turnlog.settings import GatewaySettings

CONNECTIONS = 64
"""Maximum connections of one call at once; beyond it, the longest idle one is closed, or new ones wait."""
IDLE_S = 1.0
"""Seconds that a connection must be idle before it may be closed for another; a connection in use may look idle for
less."""
BREATH_S = 0.1
"""Pause in seconds before accepting again when the worker has no file descriptor left."""
LAST_WORDS_S = 5.0
"""Seconds for the sandbox to read the answer to a refused request."""
OVER_S = 0.25
"""Pause in seconds before each refusal of a call that has no request left, so that a client that goes on asking does
not slow down other calls."""
REFUSAL_HEADERS = ((b"content-type", b"text/plain; charset=utf-8"), (b"cache-control", b"no-store"))
_GONE = (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, ssl.SSLError)
_HARMLESS_UPGRADES = {b"h2c", b""}
"""Upgrades that are ignored: Java's client asks every plain server for HTTP/2 and does without."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tls:
    """Handling of a CONNECT: intercept with an authority, tunnel with addresses, or refuse."""

    authority: CertificateAuthority | None = None
    addresses: Addresses | None = None
    of_workers: bool = False
    """True if the client is a proxy of ours: it names https URLs in absolute form, and gets the reason of a refusal in
    a header."""


class Proxy:
    """The proxy of one call. `failed` is the object store's error if a recording could not be read or written, or the
    reason why nothing goes out."""

    def __init__(
        self,
        settings: EgressSettings,
        source: ResponseSource,
        requests: Requests,
        tls: Tls,
        gateway: PathService | None = None,
    ) -> None:
        """Create it. `requests` gets an entry for every request, except those to `gateway`, which answers requests that
        name no host."""
        self._settings, self._source, self._requests, self._tls = settings, source, requests, tls
        self._gateway = gateway
        self._connections: set[asyncio.Task[None]] = set()
        self._idle: dict[asyncio.Task[None], float] = {}
        """Time since which each kept-alive connection has been idle; the longest idle first."""
        self._moved = asyncio.Event()
        self.failed: BlobError | ProxyUnusable | None = None

    async def accept(self, listener: socket.socket) -> None:
        """Accept connections until cancelled."""
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        while True:
            await self._room()
            try:
                connection, _ = await loop.sock_accept(listener)
            except ConnectionAbortedError:
                continue
            except OSError as error:
                _log.warning("egress proxy cannot accept connections: %s", error)
                await asyncio.sleep(BREATH_S)
                continue
            task = asyncio.create_task(self._serve(connection))
            self._connections.add(task)
            task.add_done_callback(self._on_connection_end)

    async def close(self) -> None:
        while self._connections:
            for task in self._connections:
                task.cancel()
            await asyncio.wait(self._connections)

    async def _room(self) -> None:
        """Wait until one more connection may be accepted."""
        while len(self._connections) >= CONNECTIONS:
            self._moved.clear()
            task, since = next(iter(self._idle.items()), (None, math.inf))
            left = since + IDLE_S - asyncio.get_running_loop().time()
            if task is not None and left <= 0:
                task.cancel()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left if 0 < left < math.inf else None):
                    await self._moved.wait()

    def _on_connection_end(self, task: asyncio.Task[None]) -> None:
        self._connections.discard(task)
        self._idle.pop(task, None)
        self._moved.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a bug in the egress proxy closed a connection", exc_info=error)

    async def _serve(self, connection: socket.socket) -> None:
        async with Accepted(connection) as stream:
            await self.serve(stream)

    async def serve(self, stream: ByteStream) -> None:
        """Serve every request of a connection, which stays the caller's."""
        with contextlib.suppress(*_GONE):
            await self._exchanges(Client(stream), None)

    async def _exchanges(self, client: Client, inside: Authority | None) -> None:
        """Serve every request of a connection. `inside` is the host of the intercepted tunnel, if the connection is
        one."""
        while await self._wait_for_request(client):
            entry = self._requests.begin()
            try:
                if (tunnel := await self._exchange(client, inside, entry)) is not None:
                    return await self._through(client, tunnel, entry)
            except asyncio.CancelledError:
                entry.reason = Reason.call_ended
                raise
            finally:
                entry.note_end(client.sent)
            if not client.has_finished_answer:
                return None
            if not client.reusable or entry.over:
                return await client.linger()
        return None

    async def _wait_for_request(self, client: Client) -> bool:
        task = asyncio.current_task()
        assert task is not None
        if client.used:
            self._idle[task] = asyncio.get_running_loop().time()
            self._moved.set()
        try:
            async with asyncio.timeout(self._settings.timeout_s if self._tls.of_workers else None):
                return await client.wait_for_request()
        except TimeoutError:
            return False
        finally:
            self._idle.pop(task, None)

    async def _exchange(self, client: Client, inside: Authority | None, entry: Entry) -> _Tunnel | None:
        """Serve one request to the end of its answer. Return the tunnel that a granted CONNECT opened, or None."""
        try:
            async with asyncio.timeout(self._settings.timeout_s) as within:
                head = await client.head()
                entry.method = head.method
                if self._gateway is not None and inside is None and head.target.startswith("/"):
                    self._requests.disregard(entry)
                    within.reschedule(None)
                    await self._gateway.answer(head, client)
                    return None
                if head.method == "CONNECT":
                    return await self._connect(client, head, inside, entry)
                await self._request(client, head, inside, entry)
                return None
        except TimeoutError:
            refused = RequestRefused(Reason.timeout_s)
        except RequestRefused as error:
            refused = error
        except h11.LocalProtocolError:  # the origin's answer is not valid HTTP to pass on
            refused = RequestRefused(Reason.unreachable)
        except (BlobError, ProxyUnusable) as error:
            self.failed = self.failed or error
            return None
        entry.reason = refused.reason
        if not client.has_begun_answer:
            entry.note_refusal(refused)
            await self._say(client, refused, entry)
        return None

    async def _say(self, client: Client, refused: RequestRefused, entry: Entry) -> None:
        if entry.over:
            await asyncio.sleep(OVER_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                if refused.reason not in (
                    Reason.timeout_s,
                    Reason.malformed,
                    Reason.requests,
                ):  # these end the connection
                    await client.drain_body(self._settings.request_bytes)
                text = refused.text(entry.method, entry.url)
                phrase = f"{HTTPStatus(refused.status).phrase} (turnlog egress: {refused.reason})"
                told = ((PROXY_STATUS, refused.reason.encode()),) if self._tls.of_workers else ()
                await client.answer(refused.status, (*REFUSAL_HEADERS, *told), text, phrase=phrase.encode())

    async def _request(self, client: Client, head: Head, inside: Authority | None, entry: Entry) -> None:
        target = _target(head, inside)
        entry.url = target.url
        entry.key = request_key(head.method, target.url, head.headers, None)
        if entry.over:
            raise RequestRefused(Reason.requests)
        if _upgrades(head):
            raise RequestRefused(Reason.upgrade)
        self._source.admit(head, target, entry)
        if target.scheme == "https" and self._tls.authority is None and not self._tls.of_workers:
            raise RequestRefused(Reason.tls)
        body = await client.body(self._settings.request_bytes)
        entry.request_bytes = len(body)
        entry.key = request_key(head.method, target.url, head.headers, body)
        await self._source.answer(Request(head, target, body, entry), client)

    async def _connect(self, client: Client, head: Head, inside: Authority | None, entry: Entry) -> _Tunnel:
        if inside is not None:
            raise RequestRefused(Reason.malformed, "a CONNECT inside a tunnel")
        host = authority(head.target, None)
        entry.url = host.text
        entry.key = request_key(head.method, host.text, (), None)
        if entry.over:
            raise RequestRefused(Reason.requests)
        self._source.admit_tunnel(host, entry, blind=self._tls.addresses is not None)
        if self._tls.addresses is not None:
            far = await connect_to_host(host, self._tls.addresses)
            return _Tunnel(host, await client.open_tunnel(), far)
        if self._tls.authority is None:
            raise RequestRefused(Reason.tls)
        return _Tunnel(host, await client.open_tunnel(), None)

    async def _through(self, client: Client, tunnel: _Tunnel, entry: Entry) -> None:
        entry.status, entry.source = HTTPStatus.OK, EgressSource.live
        if tunnel.far is not None:
            return await self._relay_tunnel(client.stream, tunnel.far, tunnel.early, entry)
        assert self._tls.authority is not None
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                context = self._tls.authority.context(tunnel.host.host)
                secure = await intercept_tls(client.stream, tunnel.early, context)
        except (RequestRefused, TimeoutError):
            entry.source, entry.reason = EgressSource.refused, Reason.tls
            return None
        self._requests.drop(entry)
        return await self._exchanges(Client(secure), tunnel.host)

    async def _relay_tunnel(self, near: ByteStream, far: ByteStream, early: bytes, entry: Entry) -> None:
        entry.reason = ""
        limits = self._settings
        try:
            await relay(
                near, far, early, entry, idle_s=limits.timeout_s,
                request_bytes=limits.request_bytes, response_bytes=limits.response_bytes,
            )  # fmt: skip
        except RequestRefused as refused:
            entry.reason = refused.reason
        except TimeoutError:
            _log.debug("tunnel to %s ended: idle", entry.host)
        finally:
            await anyio.aclose_forcefully(far)


@dataclass(frozen=True, slots=True)
class _Tunnel:
    host: Authority
    early: bytes
    """Bytes that the sandbox has already sent into the tunnel."""
    far: ByteStream | None
    """Connection to the host; None if the tunnel ends here."""


def _target(head: Head, inside: Authority | None) -> CanonicalUrl:
    """Parse the target of a request. Raises RequestRefused(malformed). In absolute form a Host header is ignored (RFC
    9112 3.2.2); in a tunnel it must name the tunnel's host, or rules for one host would open another behind the same
    front."""
    if inside is None:
        return absolute(head.target)
    target = within(head.target, inside)
    for host in head.values(b"host"):
        if authority(host.decode("latin-1"), 443) not in (inside, Authority(inside.host, 443)):
            raise RequestRefused(Reason.malformed, f"Host is another than the tunnel's {inside.text}")
    return target


def _upgrades(head: Head) -> bool:
    asked = {word.strip().lower() for value in head.values(b"upgrade") for word in value.split(b",")}
    return bool(asked - _HARMLESS_UPGRADES)


async def intercept_tls(stream: ByteStream, early: bytes, context: ssl.SSLContext) -> ByteStream:
    """Start TLS on the sandbox's side. `early` has the bytes that came before it. Raises RequestRefused(tls) if the
    sandbox does not speak TLS or does not trust us."""
    behind = BufferedByteStream(stream)
    behind.feed_data(early)
    try:
        return await TLSStream.wrap(behind, server_side=True, ssl_context=context, standard_compatible=False)
    except (ssl.SSLError, anyio.BrokenResourceError, anyio.EndOfStream, anyio.ClosedResourceError) as error:
        raise RequestRefused(Reason.tls) from error


async def connect_to_host(host: Authority, addresses: Addresses) -> SocketStream:
    """Connect to one of the host's checked addresses. Raises RequestRefused (private_address, unreachable)."""
    for address in await addresses.resolve_allowed(host):
        with contextlib.suppress(OSError):
            return await anyio.connect_tcp(address, host.port)
    raise RequestRefused(Reason.unreachable)


async def relay(
    near: ByteStream,
    far: ByteStream,
    early: bytes,
    entry: Entry,
    *,
    request_bytes: int,
    response_bytes: int,
    idle_s: float,
) -> None:
    """Copy bytes in both directions until both have ended. Raises RequestRefused (request_bytes, response_bytes),
    TimeoutError if nothing came for `idle_s`."""
    entry.request_bytes = len(early)
    await far.send(early)
    async with asyncio.timeout(idle_s) as idle:

        def check_limits() -> None:
            idle.reschedule(asyncio.get_running_loop().time() + idle_s)
            if entry.request_bytes > request_bytes:
                raise RequestRefused(Reason.request_bytes)
            if entry.response_bytes > response_bytes:
                raise RequestRefused(Reason.response_bytes)

        async def out() -> None:
            async for data in _receive_chunks(near):
                entry.request_bytes += len(data)
                check_limits()
                await far.send(data)
            await far.send_eof()

        async def back() -> None:
            async for data in _receive_chunks(far):
                entry.response_bytes += len(data)
                check_limits()
                await near.send(data)
            await near.send_eof()

        await _both(out(), back())


async def _both(*directions: Coroutine[None, None, None]) -> None:
    tasks = [asyncio.create_task(direction) for direction in directions]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _receive_chunks(stream: ByteStream) -> AsyncIterator[bytes]:
    with contextlib.suppress(anyio.EndOfStream):
        while True:
            yield await stream.receive(READ_BYTES)


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
