"""The way out: requests to origins over aiohttp, whose connections go to checked addresses and nowhere else.

A name is resolved once, every address of it is checked, and those very ones are used. Public means globally routable
unicast (IANA's special-purpose registries, RFC 6890); an IPv6 address that carries an IPv4 one is as public as that
one: mapped (RFC 4291), 6to4 (RFC 3056), NAT64 (RFC 6052). httpcore was measured beside aiohttp: four times the
processor time per request, and as many more turns of the event loop.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import yarl
from aiohttp.abc import AbstractResolver, ResolveResult

from turnlog.sandbox_workers.egress.client import HEAD_BYTES, Head
from turnlog.sandbox_workers.egress.policy import (
    Authority,
    EgressUnavailable,
    Reason,
    RequestRefused,
    Target,
    authority,
)
from turnlog.sandbox_workers.egress.recordings import Headers

IDLE_S = 2.0
"""An idle connection is used again for so long; origins close theirs after five and more."""
_HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade",
     b"proxy-authenticate", b"proxy-authorization", b"proxy-authentication-info")
)  # fmt: skip
"""RFC 9110 7.6.1: between two neighbours only."""
_NOT_ON = frozenset((b"host", b"content-length", b"expect", b"forwarded", b"via", b"x-real-ip"))
"""Of requests: written anew, answered here, or claims about who asks."""
_NOT_BACK = frozenset((b"alt-svc", b"content-length"))
"""Of answers: ways around this proxy; the length is written anew."""
_AUTO = ("accept", "accept-encoding", "user-agent", "content-type")
"""aiohttp would add these."""

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Addresses of a host. Raises OSError."""

_UNICAST = ipaddress.IPv6Network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_SPECIAL = tuple(
    ipaddress.ip_network(text)
    for text in ("192.0.0.0/24", "192.88.99.0/24", "2001::/23", "2001:db8::/32", "3fff::/20", "5f00::/16")
)
"""Of no use as an origin, and not private to every version of `ipaddress`."""


class Upstream:
    """Connections of one call to origins."""

    def __init__(self, addresses: Addresses, trust: ssl.SSLContext, *, connections: int) -> None:
        """`trust` decides which origins' certificates are believed."""
        self._addresses = addresses
        connector = aiohttp.TCPConnector(
            ssl=trust,
            limit=connections,
            keepalive_timeout=IDLE_S,
            resolver=CheckedResolver(addresses),
            use_dns_cache=False,
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),  # the proxy's own covers the client's side too
            auto_decompress=False,
            skip_auto_headers=_AUTO,
            max_line_size=HEAD_BYTES,
            max_field_size=HEAD_BYTES,
        )

    @asynccontextmanager
    async def asked(self, head: Head, target: Target, body: bytes) -> AsyncIterator[aiohttp.ClientResponse]:
        """The origin's answer, its body still to be read. Raises RequestRefused (private_address, unreachable,
        certificate); so does reading the body."""
        if _is_address(target.authority.host):  # aiohttp asks its resolver for names alone
            await self._addresses.checked(target.authority)
        request = self._session.request(
            head.method,
            _url(target),
            headers=_onwards(head, target),
            data=body or None,
            allow_redirects=False,
        )
        try:
            async with request as response:
                yield response
        except aiohttp.ClientConnectorCertificateError as error:
            raise RequestRefused(Reason.certificate) from error
        except aiohttp.ClientError as error:
            raise RequestRefused(Reason.unreachable) from error

    async def close(self) -> None:
        """Drop every connection."""
        await self._session.close()


class CheckedResolver(AbstractResolver):
    """Gives aiohttp the addresses that `Addresses` checked, as numbers; once per connection."""

    def __init__(self, addresses: Addresses) -> None:
        self._addresses = addresses

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Raises RequestRefused."""
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for address in await self._addresses.checked(Authority(host, port))
        ]

    async def close(self) -> None:
        """Nothing to release."""


def trust(upstream_ca: str) -> ssl.SSLContext:
    """What this machine trusts, and the certificates in the PEM file `upstream_ca`. Raises EgressUnavailable."""
    context = ssl.create_default_context()
    if upstream_ca:
        try:
            context.load_verify_locations(Path(upstream_ca))
        except OSError as error:  # ssl.SSLError is one
            raise EgressUnavailable(f"[egress] upstream_ca: {upstream_ca} is no readable PEM file ({error})") from error
    return context


def backwards(headers: Iterable[tuple[bytes, bytes]]) -> tuple[tuple[bytes, bytes], ...]:
    """What of an answer's headers the sandbox gets, names in lower case."""
    lowered = [(name.lower(), value) for name, value in headers]
    dropped = _HOP_BY_HOP | _NOT_BACK | _named(lowered)
    return tuple((name, value) for name, value in lowered if name not in dropped)


def _onwards(head: Head, target: Target) -> list[tuple[str, str]]:
    dropped = _HOP_BY_HOP | _NOT_ON | _named(head.headers)
    kept = [(name, value) for name, value in head.headers if name not in dropped and not _claims(name)]
    return [("Host", target.netloc), *((name.decode("latin-1"), _text(value)) for name, value in kept)]


def _claims(name: bytes) -> bool:
    return name.startswith(b"x-forwarded-")


def _text(value: bytes) -> str:
    """aiohttp writes UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _url(target: Target) -> yarl.URL:
    """Of the same spelling: nothing is quoted or taken apart again."""
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


def _named(headers: Headers) -> set[bytes]:
    """Headers that Connection declares hop-by-hop."""
    values = b",".join(value for name, value in headers if name == b"connection")
    return {name.strip().lower() for name in values.split(b",")}


class Addresses:
    """Decides for each host which addresses may be connected to."""

    def __init__(self, private_hosts: Iterable[str], resolve: Resolve | None = None) -> None:
        """`private_hosts` may have any address. Raises EgressUnavailable for one that is no host:port."""
        self._resolve = resolve or system_resolver
        try:
            self._private = frozenset(authority(text, None) for text in private_hosts)
        except RequestRefused as refused:
            raise EgressUnavailable(f"[egress] private_hosts takes host:port: {refused.detail}") from None

    async def checked(self, host: Authority) -> tuple[str, ...]:
        """Addresses to connect to. A host with one address that is not public has none. Raises RequestRefused
        (private_address, unreachable)."""
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
    """Anybody on the internet would be connected to the same host; False also for what is no address."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.scope_id is not None:
            return False
        if (inner := _carried(parsed)) is not None:
            return public(str(inner))
        if parsed not in _UNICAST:
            return False
    special = any(parsed.version == network.version and parsed in network for network in _SPECIAL)
    return parsed.is_global and not (parsed.is_multicast or parsed.is_reserved or special)


async def system_resolver(host: str, port: int) -> Sequence[str]:
    """The worker's own resolver."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


def _carried(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour
