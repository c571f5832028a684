"""The sockets of our network namespace."""

from __future__ import annotations

import contextlib
import socket

PROXY_PORT = 3128
"""Where a sandbox finds the worker's egress proxy on its own loopback."""
TABLES = ("sockstat", "sockstat6")
OURS = ("inuse", "tw")
"""Counters of these tables that belong to a network namespace; the others are the machine's (net/ipv4/proc.c)."""


def listener(*, namespace: bool) -> socket.socket:
    """For the egress proxy to accept on: a socket belongs to the network namespace that it was made in, whoever holds
    it. On the host's loopback any free port, since all sandboxes share it."""
    return socket.create_server(("127.0.0.1", PROXY_PORT if namespace else 0), backlog=64)


def sockets() -> list[str]:
    """How many of each protocol there are, those in TIME_WAIT included. The tables that list TCP's one by one take
    5 ms each, since the kernel walks a hash of the whole machine."""
    found = []
    for table in TABLES:
        with contextlib.suppress(FileNotFoundError), open(f"/proc/net/{table}") as file:
            for line in file:
                protocol, *fields = line.split()
                found += [f"{protocol} {key} {n}" for key, n in zip(fields[::2], fields[1::2]) if key in OURS]  # noqa: B905
    with contextlib.suppress(FileNotFoundError), open("/proc/net/unix") as file:
        found.append(f"unix {len(file.readlines()) - 1}")
    return found
