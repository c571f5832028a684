"""Address of a role's health endpoint, and its clients: `turnlog health ROLE`, for probes in images without curl, and
pages that show the internal state of roles.

A probe runs every few seconds beside its role, so nothing heavy is imported: it sends one GET over a socket without an
HTTP client.
"""

from __future__ import annotations

import ipaddress
import json
import re
import socket
import sys
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from turnlog.infra.roles.log_lines import escape_controls
from turnlog.names import ExitStatus
from turnlog.setting_types import SettingsError, is_service_link
from turnlog.settings import Settings

LOOPBACK = "127.0.0.1"
EVERY = "::"
"""Listens on every address of both families."""
EVERY_IPV4 = "0.0.0.0"
LONGEST = 1 << 20
"""Maximum number of bytes read of a response."""


class NoHealthServed(SettingsError):
    """The role serves no health endpoint. Remedy: TURNLOG_HEALTH_PORT."""


def health_address(env: Mapping[str, str]) -> tuple[str, int] | None:
    """Return host and port of the health endpoint, or None if it is not served. Raises SettingsError."""
    port = env.get("TURNLOG_HEALTH_PORT", "")
    if is_service_link(port) or port in ("", "0"):
        return None
    if not (port.isascii() and port.isdecimal() and int(port) <= 65535):
        raise SettingsError(f"TURNLOG_HEALTH_PORT must be a whole number from 0 to 65535, got {port!r}")
    return health_host(env), int(port)


def health_host(env: Mapping[str, str]) -> str:
    """Return the address that health endpoints listen on."""
    return env.get("TURNLOG_HEALTH_HOST") or LOOPBACK


def bindable(host: str) -> str:
    """Return the address to bind: EVERY_IPV4 in place of EVERY on a machine without IPv6, else `host` itself."""
    if host != EVERY:
        return host
    try:
        with socket.socket(socket.AF_INET6) as tried:
            tried.bind((EVERY, 0))
    except OSError:
        return EVERY_IPV4
    return host


def at_home(host: str) -> str:
    """Return the address at which this machine reaches a server that listens on `host`."""
    return LOOPBACK if host in ("", EVERY, EVERY_IPV4) else host


def client_url(host: str, port: int, scheme: str = "http") -> str:
    """Return the URL at which this machine's own clients reach a server that listens on `host`."""
    return bracket_ipv6(f"{scheme}://{at_home(host)}:{port}")


LOOPBACK_NAMES = frozenset({"localhost", "localhost."})
HOST = re.compile(r"(\[[^\s/?#\\@\[\]]+\]|[^\s/?#\\@\[\]:]+)(:[0-9]*)?")
"""A name or an address, and a port. Any other characters in the address of a page could turn it into another
address."""


def parse_host(host: str) -> str:
    """Return the name or address of a Host header in lower case without brackets; empty if the header is malformed."""
    found = HOST.fullmatch(host)
    return found[1].strip("[]").lower() if found else ""


def leads_nowhere_else(name: str) -> bool:
    """Whether `name` is safe from DNS rebinding: a numeric address or the loopback's name, which is not resolved, so
    that no page of another site can make it lead to a server of this machine."""
    return name in LOOPBACK_NAMES or _address(name) is not None


def is_loopback(host: str) -> bool:
    """Whether a bound address can be reached from this machine only."""
    address = _address(host)
    return host in LOOPBACK_NAMES if address is None else address.is_loopback


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def bracket_ipv6(url: str) -> str:
    """Put brackets around the IPv6 address in a URL: Kubernetes expands http://$(POD_IP):port without them."""
    scheme, mark, place = url.partition("://")
    host, colon, rest = place.rpartition(":")
    try:
        socket.inet_pton(socket.AF_INET6, host)
    except OSError:
        return url
    return f"{scheme}{mark}[{host}]{colon}{rest}"


def served_at(role: str, settings: Settings, env: Mapping[str, str]) -> tuple[str, int] | None:
    """Return host and port that serve the role's health: its own pages if it has some, else the health endpoint. Raises
    SettingsError."""
    pages = {"views": (settings.views.host, settings.views.port), "lag": (settings.lag.host, settings.lag.port)}
    own = pages.get(role)
    return own if own is not None and own[1] else health_address(env)


def probe(role: str, settings: Settings, env: Mapping[str, str], *, url: str, live: bool, timeout_s: float) -> int:
    """Check whether the role is ready, or alive (`live`), and print the result. Return 0 if it is, 1 if it is not or
    does not answer.

    `url` is the health endpoint's, if it is not in this container. Raises SettingsError; NoHealthServed if there is no
    endpoint to check."""
    if url:
        parts = urlsplit(url)
        address: tuple[str, int] | None = (parts.hostname or LOOPBACK, parts.port or 80)
    else:
        address = served_at(role, settings, env)
    if address is None:
        raise NoHealthServed(
            f"{role} has no health endpoint here: TURNLOG_HEALTH_PORT is not set; set it, or pass --url"
        )
    host, port = at_home(address[0]), address[1]
    path = "/healthz" if live else "/readyz"
    try:
        status, said = _get(host, port, path, timeout_s)
    except (OSError, ValueError) as error:
        why = f"no answer within {timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)
        return _print_status(ExitStatus.DIFFERS, f"{role} at {host}:{port}{path}: {why}")
    other = said.get("role", role)
    if other != role:
        return _print_status(ExitStatus.DIFFERS, f"{host}:{port} is {other}, not {role}")
    if status == 200:
        return _print_status(ExitStatus.DONE, f"{role} is {'alive' if live else 'ready'}")
    return _print_status(
        ExitStatus.DIFFERS, f"{role} is not {'alive' if live else 'ready'}: {_reasons(said) or status}"
    )


def states(addresses: Mapping[str, str], role: str, timeout_s: float) -> dict[str, dict[str, Any]]:
    """Return the state (/state) of processes of the role, by name. For one that does not answer it has the cause under
    `unreachable`, and, if another role answers there, that role under `role`."""
    from concurrent.futures import ThreadPoolExecutor  # which a probe does not need

    def ask(url: str) -> dict[str, Any]:
        parts = urlsplit(url)
        try:
            status, said = _get(parts.hostname or LOOPBACK, parts.port or 80, "/state", timeout_s)
        except (OSError, ValueError) as error:
            return {"unreachable": f"{url}: {error}"}
        if (other := said.get("role")) == role:
            return said
        return {"unreachable": f"{url} is {other or f'no role: it answered {status}'}, not {role}", "role": other}

    with ThreadPoolExecutor(max(1, min(32, len(addresses)))) as threads:
        return dict(zip(addresses, threads.map(ask, addresses.values()), strict=True))


def _reasons(said: Mapping[str, Any]) -> str:
    """Return the failing readiness conditions of a role, or its stale loops, in words."""
    waiting: Mapping[str, Any] = said.get("waiting") or {}
    loops: Mapping[str, Any] = said.get("loops") or {}
    stale = [
        f"its loop {name!r} has made no progress for over {loop['within_s']:g} s"
        for name, loop in loops.items()
        if loop.get("stale")
    ]
    return "; ".join([*map(str, waiting.values()), *stale])


def _get(host: str, port: int, path: str, timeout_s: float) -> tuple[int, dict[str, Any]]:
    """Send a GET; return status and JSON object of the response. With HTTP/1.0 it ends with the connection. Raises
    OSError, ValueError."""
    shown = f"[{host}]" if ":" in host else host
    with socket.create_connection((host, port), timeout_s) as server:
        server.sendall(f"GET {path} HTTP/1.0\r\nHost: {shown}:{port}\r\n\r\n".encode())
        answer = b""
        while len(answer) < LONGEST and (part := server.recv(1 << 16)):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    version, _, rest = head.partition(b" ")
    if not version.startswith(b"HTTP/") or not rest[:3].isdigit():
        raise ValueError("the server there does not speak HTTP")
    status = int(rest[:3])
    try:
        said = json.loads(body)
    except ValueError:
        said = {}
    return status, said if isinstance(said, dict) else {}


def _print_status(status: ExitStatus, line: str) -> int:
    sys.stdout.write(escape_controls(line) + "\n")  # terminal.say would import rich
    return status
