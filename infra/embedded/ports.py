"""Free ports for embedded servers, below the range that the kernel assigns to outgoing connections.

A port in that range would be unsafe across a restart: a client that keeps connecting to a dead server's port may be
assigned that very port as its own, connect to itself and occupy it.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

from turnlog.infra.embedded import PortTaken
from turnlog.infra.roles.probe import bindable

HOST = "127.0.0.1"
ONE_HOST = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Environment of ranks that are all on this machine, so that Gloo and NCCL listen on loopback."""
FIRST = 15000
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int, host: str = HOST) -> list[int]:
    """Return `count` distinct ports of the address on which nothing listens now."""
    candidates = list(range(FIRST, max(_first_ephemeral(), FIRST + 1000)))
    random.SystemRandom().shuffle(candidates)
    found: list[int] = []
    for port in candidates:
        if len(found) == count:
            return found
        if is_free(port, host):
            found.append(port)
    raise PortTaken(f"{host} does not have {count} free ports between {candidates and FIRST} and {_first_ephemeral()}")


def is_free(port: int, host: str = HOST) -> bool:
    """Whether a server could listen on the port now."""
    host = bindable(host)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def listens(port: int) -> bool:
    """Whether something accepts connections on the port."""
    try:
        socket.create_connection((HOST, port), 0.2).close()
    except OSError:
        return False
    return True


def claim(port: int, setting: str, host: str = HOST) -> int:
    """Return the port if it is free, or a free one for 0. Raises PortTaken, which names `setting` and the process that
    holds the port."""
    if port == 0:
        return free_ports(1, host)[0]
    if not is_free(port, host):
        raise PortTaken(
            f"port {port} of {host} is taken{_holder(port)}: end that process, or set {setting} to another port "
            "or to 0 for a free one"
        )
    return port


def _first_ephemeral() -> int:
    try:
        return int(EPHEMERAL.read_text().split()[0])
    except OSError:
        return 32768


def _holder(port: int) -> str:
    import psutil  # type: ignore[import-untyped]

    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
            return f" by process {connection.pid} ({psutil.Process(connection.pid).name()})"
    return ""
