"""Where a connection may go: a name is resolved once, every address of it is checked, and those very ones are used.

Public means globally routable unicast (IANA's special-purpose registries, RFC 6890); an IPv6 address that carries an
IPv4 one is as public as that one: mapped (RFC 4291), 6to4 (RFC 3056), NAT64 (RFC 6052).
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence

from turnlog.sandbox_workers.egress.refusals import EgressUnavailable, Reason, Refused
from turnlog.sandbox_workers.egress.targets import Authority, authority

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Addresses of a host. Raises OSError."""

_UNICAST = ipaddress.IPv6Network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_SPECIAL = tuple(
    ipaddress.ip_network(text)
    for text in ("192.0.0.0/24", "192.88.99.0/24", "2001::/23", "2001:db8::/32", "3fff::/20", "5f00::/16")
)
"""Of no use as an origin, and not private to every version of `ipaddress`."""


class Addresses:
    """Decides for each host which addresses may be connected to."""

    def __init__(self, private_hosts: Iterable[str], resolve: Resolve | None = None) -> None:
        """`private_hosts` may have any address. Raises EgressUnavailable for one that is no host:port."""
        self._resolve = resolve or system_resolver
        try:
            self._private = frozenset(authority(text, None) for text in private_hosts)
        except Refused as refused:
            raise EgressUnavailable(f"[egress] private_hosts takes host:port: {refused.detail}") from None

    async def checked(self, host: Authority) -> tuple[str, ...]:
        """Addresses to connect to. A host with one address that is not public has none. Raises Refused
        (private_address, unreachable)."""
        try:
            found = await self._resolve(host.host, host.port)
        except OSError:
            found = ()
        if not found:
            raise Refused(Reason.unreachable)
        if host not in self._private and not all(public(address) for address in found):
            raise Refused(Reason.private_address)
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
