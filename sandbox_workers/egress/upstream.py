"""The way out: requests to origins over aiohttp, whose connections go to checked addresses and nowhere else.

httpcore was measured beside it: four times the processor time per request, and as many more turns of the event loop.
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import yarl
from aiohttp.abc import AbstractResolver, ResolveResult

from turnlog.sandbox_workers.egress.addresses import Addresses
from turnlog.sandbox_workers.egress.client import HEAD_BYTES, Head
from turnlog.sandbox_workers.egress.recordings import Headers
from turnlog.sandbox_workers.egress.refusals import EgressUnavailable, Reason, Refused
from turnlog.sandbox_workers.egress.targets import Authority, Target

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
        """The origin's answer, its body still to be read. Raises Refused (private_address, unreachable, certificate);
        so does reading the body."""
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
            raise Refused(Reason.certificate) from error
        except aiohttp.ClientError as error:
            raise Refused(Reason.unreachable) from error

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
        """Raises Refused."""
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
