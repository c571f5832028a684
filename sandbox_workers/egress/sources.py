"""Sources of answers: the network, the network and a recording, a recording, or one recorded call.

A source first admits or refuses a request by its head, before its body is read, then answers it. Requests to origins
use aiohttp, whose connections go only to checked addresses: a name is resolved once, every address of it is checked,
and exactly those are used. Public means globally routable unicast (IANA's special-purpose registries, RFC 6890). An
IPv6 address that carries an IPv4 one is as public as that one: mapped (RFC 4291), 6to4 (RFC 3056), NAT64 (RFC 6052).
httpcore was measured in comparison with aiohttp: four times the processor time per request, and four times as many
iterations of the event loop."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import aiohttp
import yarl
from aiohttp.abc import AbstractResolver, ResolveResult

from turnlog.infra.blobs import Blobs
from turnlog.infra.roles.tls import machine_authorities
from turnlog.sandbox_workers.egress.client import HEAD_BYTES, Client, Head
from turnlog.sandbox_workers.egress.policy import (
    Authority,
    CanonicalUrl,
    EgressError,
    EgressUnavailable,
    NetworkRuleSet,
    ProxyUnusable,
    Reason,
    RequestRefused,
    authority,
)
from turnlog.sandbox_workers.egress.recordings import (
    Entry,
    Headers,
    RecordedRequests,
    RecordedResponse,
    Recordings,
    Requests,
)
from turnlog.schemas.events import EgressRequest, EgressSource
from turnlog.schemas.types import BlobRef

IDLE_S = 2.0
"""Seconds for which an idle connection is used again; origins close theirs after five and more."""
_HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade",
     b"proxy-authenticate", b"proxy-authorization", b"proxy-authentication-info")
)  # fmt: skip
"""RFC 9110 7.6.1: headers between two neighbours only."""
_NOT_ON = frozenset((b"host", b"content-length", b"expect", b"forwarded", b"via", b"x-real-ip"))
"""Request headers that are not forwarded: written anew, answered here, or claims about the client."""
_NOT_BACK = frozenset((b"alt-svc", b"content-length", b"turnlog-egress"))
"""Response headers that are not returned: ways around this proxy; the length, which is written anew; and headers that
only our own proxies send."""
PROXY_STATUS = b"turnlog-egress"
"""Header in answers to workers: the reason of a refusal. It is dropped from an origin's answer, where it means
nothing."""
AUTO_HEADERS = ("accept", "accept-encoding", "user-agent", "content-type")
"""Headers that aiohttp would add."""

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Callback that returns the addresses of a host. Raises OSError."""

_UNICAST = ipaddress.IPv6Network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_SPECIAL = tuple(
    ipaddress.ip_network(text)
    for text in ("192.0.0.0/24", "192.88.99.0/24", "2001::/23", "2001:db8::/32", "3fff::/20", "5f00::/16")
)
"""Networks that are of no use as an origin and that not every version of `ipaddress` treats as private."""


@dataclass(frozen=True, slots=True)
class Onwards:
    """The process that connects to origins in place of a worker."""

    url: str
    """Address of the process ([egress] proxy)."""
    token: Callable[[], str]
    """Callback that makes a token, which names the call and is valid for a while."""

    def refusal(self, said: bytes) -> EgressError:
        """Return the error that a value of PROXY_STATUS stands for."""
        reason = next((reason for reason in Reason if reason.encode() == said), Reason.unreachable)
        if reason is not Reason.token:
            return RequestRefused(reason)
        return ProxyUnusable(
            f"{self.url} refuses this worker's token: workers and `turnlog role egress` must share [egress] "
            "signing_key, and their clocks must agree within a minute"
        )


class _Absolute(aiohttp.ClientRequest):
    """A request that uses absolute form for https, too (RFC 9112 3.2.2), without a tunnel, so that the proxy sees
    method and path."""

    def is_ssl(self) -> bool:
        return False


class Upstream:
    """Connections of one call to origins, or to the process that connects to them in our place."""

    def __init__(
        self, addresses: Addresses, trust: ssl.SSLContext, *, connections: int, onwards: Onwards | None = None
    ) -> None:
        """Create it. `trust` decides which certificates are accepted, those of origins or that of the process in our
        place."""
        self._addresses, self._way = addresses, onwards
        connector = aiohttp.TCPConnector(
            ssl=trust,
            limit=connections,
            keepalive_timeout=IDLE_S,
            resolver=CheckedResolver(addresses) if onwards is None else None,
            use_dns_cache=False,
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            request_class=aiohttp.ClientRequest if onwards is None else _Absolute,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),  # the proxy's own time-out covers the client's side too
            auto_decompress=False,
            skip_auto_headers=AUTO_HEADERS,
            max_line_size=HEAD_BYTES,
            max_field_size=HEAD_BYTES,
        )

    @asynccontextmanager
    async def send_request(
        self, head: Head, target: CanonicalUrl, body: bytes
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request and yield the origin's answer, its body still to be read. Raises RequestRefused
        (private_address, unreachable, certificate, and refusals of the process in our place), ProxyUnusable; reading
        the body may raise the same."""
        headers, way = [("Host", target.netloc), *onwards(head)], self._way
        if way is not None:
            headers.append(("Proxy-Authorization", f"Bearer {way.token()}"))
        elif _is_address(target.authority.host):  # aiohttp calls its resolver only for names
            await self._addresses.resolve_allowed(target.authority)
        request = self._session.request(
            head.method,
            _url(target),
            headers=headers,
            data=body or None,
            allow_redirects=False,
            proxy=None if way is None else way.url,
        )
        try:
            async with request as response:
                if way is not None and (said := dict(response.raw_headers).get(PROXY_STATUS)) is not None:
                    raise way.refusal(said)
                yield response
        except aiohttp.ClientError as error:
            if way is not None and isinstance(error, aiohttp.ClientConnectionError):
                raise ProxyUnusable(f"[egress] proxy at {way.url}: {error}") from error
            believed = not isinstance(error, aiohttp.ClientConnectorCertificateError)
            raise RequestRefused(Reason.unreachable if believed else Reason.certificate) from error

    async def open_websocket(
        self, target: CanonicalUrl, headers: Mapping[str, str], *, max_bytes: int, timeout_s: float
    ) -> aiohttp.ClientWebSocketResponse:
        """Open a WebSocket, whose messages may have `max_bytes` each. Raises RequestRefused (private_address,
        unreachable, certificate; upgrade, if a process connects in our place, which passes single requests only)."""
        if self._way is not None:
            raise RequestRefused(Reason.upgrade, "[egress] proxy passes single requests only")
        if _is_address(target.authority.host):
            await self._addresses.resolve_allowed(target.authority)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._session.ws_connect(_url(target), headers=headers, max_msg_size=max_bytes, compress=0)
        except aiohttp.ClientConnectorCertificateError as error:
            raise RequestRefused(Reason.certificate) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            said = str(error) or f"no WebSocket within {timeout_s:g} s"
            raise RequestRefused(Reason.unreachable, said) from error

    async def close(self) -> None:
        await self._session.close()


class CheckedResolver(AbstractResolver):
    """Gives aiohttp the addresses that `Addresses` checked, as numbers; once per connection."""

    def __init__(self, addresses: Addresses) -> None:
        self._addresses = addresses

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return the checked addresses. Raises RequestRefused."""
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for address in await self._addresses.resolve_allowed(Authority(host, port))
        ]

    async def close(self) -> None:
        """See AbstractResolver. There is nothing to release."""


def trust(upstream_ca: str) -> ssl.SSLContext:
    """Trust this machine's roots and the certificates in the PEM file `upstream_ca`. Raises EgressUnavailable."""
    context = machine_authorities()
    if upstream_ca:
        try:
            context.load_verify_locations(Path(upstream_ca))
        except OSError as error:  # ssl.SSLError is one
            raise EgressUnavailable(
                f"[egress] upstream_ca: {upstream_ca} is not a readable PEM file ({error})"
            ) from error
    return context


def backwards(headers: Iterable[tuple[bytes, bytes]]) -> tuple[tuple[bytes, bytes], ...]:
    """Return the headers of an answer that the sandbox gets, names in lower case."""
    lowered = [(name.lower(), value) for name, value in headers]
    dropped = _HOP_BY_HOP | _NOT_BACK | _connection_headers(lowered)
    return tuple((name, value) for name, value in lowered if name not in dropped)


def onwards(head: Head, without: frozenset[bytes] = frozenset()) -> list[tuple[str, str]]:
    """Return the headers of a request that are forwarded. Host, which is written anew, and those in `without` are
    not."""
    dropped = _HOP_BY_HOP | _NOT_ON | _connection_headers(head.headers) | without
    kept = [(name, value) for name, value in head.headers if name not in dropped and not _claims(name)]
    return [(name.decode("latin-1"), _text(value)) for name, value in kept]


def _claims(name: bytes) -> bool:
    return name.startswith(b"x-forwarded-")


def _text(value: bytes) -> str:
    """Decode a header value; aiohttp writes UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _url(target: CanonicalUrl) -> yarl.URL:
    """Return the URL with the same spelling: nothing is quoted or parsed again."""
    return yarl.URL.build(
        scheme=target.scheme,
        host=target.authority.host,
        port=target.authority.port,
        path=target.path,
        query_string=target.query[1:],
        encoded=True,
    )


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _connection_headers(headers: Headers) -> set[bytes]:
    """Return the headers that Connection declares hop-by-hop."""
    values = b",".join(value for name, value in headers if name == b"connection")
    return {name.strip().lower() for name in values.split(b",")}


class Addresses:
    """Decides for each host which addresses may be connected to."""

    def __init__(self, private_hosts: Iterable[str], resolve: Resolve | None = None) -> None:
        """Create it. `private_hosts` may have any address. Raises EgressUnavailable for an entry that is not
        host:port."""
        self._resolve = resolve or system_resolver
        try:
            self._private = frozenset(authority(text, None) for text in private_hosts)
        except RequestRefused as refused:
            raise EgressUnavailable(f"[egress] private_hosts must list host:port: {refused.detail}") from None

    async def resolve_allowed(self, host: Authority) -> tuple[str, ...]:
        """Return the addresses to connect to. A host with one address that is not public is refused. Raises
        RequestRefused (private_address, unreachable)."""
        try:
            found = await self._resolve(host.host, host.port)
        except OSError:
            found = ()
        if not found:
            raise RequestRefused(Reason.unreachable)
        if host not in self._private and not all(public(address) for address in found):
            raise RequestRefused(Reason.private_address)
        return tuple(dict.fromkeys(found))


def public(address: str) -> bool:
    """Return whether anybody on the internet would be connected to the same host; False also for text that is no
    address."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.scope_id is not None:
            return False
        if (inner := _embedded_ipv4(parsed)) is not None:
            return public(str(inner))
        if parsed not in _UNICAST:
            return False
    special = any(parsed.version == network.version and parsed in network for network in _SPECIAL)
    return parsed.is_global and not (parsed.is_multicast or parsed.is_reserved or special)


async def system_resolver(host: str, port: int) -> Sequence[str]:
    """Resolve a host by the worker's own resolver."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


def _embedded_ipv4(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour


@dataclass(frozen=True, slots=True)
class Request:
    """A request that was read completely."""

    head: Head
    target: CanonicalUrl
    body: bytes
    entry: Entry


class ResponseSource(Protocol):
    """Source of answers: admits a request by its head or refuses it, and answers it."""

    def admit(self, head: Head, target: CanonicalUrl, entry: Entry) -> None:
        """Raise RequestRefused for a request that must not be answered."""
        ...

    def admit_tunnel(self, host: Authority, entry: Entry, *, blind: bool) -> None:
        """Raise RequestRefused for a CONNECT in which no request would be admitted. With `blind`, raise it unless every
        request would be, since nobody will look at them."""
        ...

    async def answer(self, request: Request, client: Client) -> None:
        """Answer the request and note the outcome. Raises RequestRefused, BlobError."""
        ...


class Ruled:
    """Admits what the network rules grant."""

    def __init__(self, policy: NetworkRuleSet) -> None:
        self.policy = policy

    def admit(self, head: Head, target: CanonicalUrl, entry: Entry) -> None:
        if not self.policy.grants(head.method, target):
            raise RequestRefused(Reason.rule)

    def admit_tunnel(self, host: Authority, entry: Entry, *, blind: bool) -> None:
        if not self.policy.reaches(host):
            raise RequestRefused(Reason.rule)
        if blind and not self.policy.whole(host):
            raise RequestRefused(Reason.tls)


class Live(Ruled):
    """Passes answers on as they come."""

    def __init__(self, policy: NetworkRuleSet, upstream: Upstream, *, most: int) -> None:
        """Create the source. `most` is response_bytes."""
        super().__init__(policy)
        self._upstream, self._most = upstream, most

    async def answer(self, request: Request, client: Client) -> None:
        async with self._upstream.send_request(request.head, request.target, request.body) as response:
            headers = backwards(response.raw_headers)
            if (declared := declared_length(response)) is not None:
                if declared > self._most and request.head.method != "HEAD":
                    raise RequestRefused(Reason.response_bytes)
                headers = (*headers, (b"content-length", b"%d" % declared))
            entry = request.entry
            entry.status, entry.source, entry.reason = response.status, EgressSource.live, ""
            await client.stream_answer(response.status, headers, _limited_chunks(response, self._most))


HELD = 4
"""Maximum number of recorded answers of one call in memory at once; more wait."""


class Recording(Ruled):
    """Stores each answer before it is passed on, so that everything a sandbox saw can be given again."""

    def __init__(
        self,
        policy: NetworkRuleSet,
        upstream: Upstream,
        recordings: Recordings,
        requests: Requests,
        *,
        call_seq: int,
        most: int,
    ) -> None:
        """Create the source for one call. `most` is response_bytes."""
        super().__init__(policy)
        self._upstream, self._recordings, self._requests = upstream, recordings, requests
        self._call_seq, self._most = call_seq, most
        self._room = asyncio.Semaphore(HELD)

    async def answer(self, request: Request, client: Client) -> None:
        async with self._room:
            await self._answer(request, client)

    async def _answer(self, request: Request, client: Client) -> None:
        entry, head = request.entry, request.head
        async with self._upstream.send_request(head, request.target, request.body) as response:
            status, headers = response.status, backwards(response.raw_headers)
            if (declared := declared_length(response)) is not None and head.method == "HEAD":
                headers = (*headers, (b"content-length", b"%d" % declared))
            content = b"".join([chunk async for chunk in _limited_chunks(response, self._most)])
        place = self._call_seq, self._requests.ordinal(entry.key)
        entry.answer, entry.response = await self._recordings.keep(
            entry.key, place, (head.method, request.target.url), status=status, headers=headers, content=content
        )
        entry.status, entry.source, entry.reason = status, EgressSource.recorded, ""
        await client.answer(status, headers, content)


class Replaying(Ruled):
    """Gives recorded answers; nothing goes out, names are not resolved."""

    def __init__(
        self, policy: NetworkRuleSet, blobs: Blobs, recordings: Recordings, requests: Requests, *, call_seq: int
    ) -> None:
        super().__init__(policy)
        self._blobs, self._recordings, self._requests, self._call_seq = blobs, recordings, requests, call_seq
        self._room = asyncio.Semaphore(HELD)

    async def answer(self, request: Request, client: Client) -> None:
        entry = request.entry
        found = await self._recordings.find(entry.key, (self._call_seq, self._requests.ordinal(entry.key)))
        if found is None:
            raise RequestRefused(Reason.not_recorded)
        async with self._room:
            await _replay(*found, self._blobs, entry, client)


class Repeating:
    """Gives the outcomes of one recorded call, including refusals. Rules are not applied, since nothing goes out."""

    def __init__(self, blobs: Blobs, repeats: RecordedRequests) -> None:
        self._blobs, self._repeats = blobs, repeats
        self._room = asyncio.Semaphore(HELD)

    def admit(self, head: Head, target: CanonicalUrl, entry: Entry) -> None:
        self._refuse_again(entry)

    def admit_tunnel(self, host: Authority, entry: Entry, *, blind: bool) -> None:
        self._refuse_again(entry)
        if blind:
            raise RequestRefused(Reason.not_recorded)

    async def answer(self, request: Request, client: Client) -> None:
        then = self._refuse_again(request.entry)
        if then is None or then.answer is None:
            raise RequestRefused(Reason.not_recorded)
        answer = RecordedResponse.parse(await self._blobs.get(then.answer), then.answer.sha256)
        async with self._room:
            await _replay(answer, then.answer, self._blobs, request.entry, client)

    def _refuse_again(self, entry: Entry) -> EgressRequest | None:
        then = self._repeats.next(entry.key)
        if then is not None and then.source is EgressSource.refused:
            raise RequestRefused(Reason(then.reason))
        return then


async def _replay(answer: RecordedResponse, ref: BlobRef, blobs: Blobs, entry: Entry, client: Client) -> None:
    content = await blobs.get(answer.body)
    entry.status, entry.source, entry.reason = answer.status, EgressSource.replayed, ""
    entry.answer, entry.response = ref, answer.body
    await client.answer(answer.status, answer.headers, content)


def declared_length(response: aiohttp.ClientResponse) -> int | None:
    """Return the length of the body in bytes, or None if the head does not declare it."""
    lengths = [value for name, value in response.raw_headers if name.lower() == b"content-length"]
    return int(lengths[0]) if lengths else None


async def _limited_chunks(response: aiohttp.ClientResponse, most: int) -> AsyncIterator[bytes]:
    """Yield the body as it comes. Raises RequestRefused(response_bytes)."""
    size = 0
    async for chunk in response.content.iter_any():
        if (size := size + len(chunk)) > most:
            raise RequestRefused(Reason.response_bytes)
        yield chunk
