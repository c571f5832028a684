"""A socket on a container's own loopback, for the worker's egress proxy to accept on.

A socket belongs to the network namespace of the thread that made it (network_namespaces(7)), so a thread that enters
the container's (setns(2)) can make it, where the worker is root on the daemon's machine and the kernel is shared.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import threading
import time
from pathlib import Path

from turnlog.sandbox_workers.inside.observables import listener
from turnlog.sandbox_workers.protocol import SandboxUnavailable

CLONE_NEWNET = 0x40000000
LOOPBACK_S = 5.0
"""For a loopback to come up."""
PAUSE_S = 0.01
RUNTIME = "runc"
"""The one whose containers have their sockets in the host's kernel."""


def reachable(address: str, runtime: str) -> bool:
    """Containers of the daemon at `address` have network namespaces that we may enter."""
    return runtime == RUNTIME and address.startswith("http+docker://localhost") and os.geteuid() == 0


def listening_in(pid: int, name: str) -> socket.socket:
    """A listening socket in the namespace of process `pid`, which must be the first of the container `name`.
    Blocks. Raises SandboxUnavailable."""
    found: list[socket.socket | OSError] = []

    def enter() -> None:
        try:
            found.append(_made(pid, name))
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=enter)  # it never leaves that namespace
    thread.start()
    thread.join()
    if isinstance(found[0], OSError):
        raise SandboxUnavailable(
            f'cannot listen in the network of container {name}: {found[0]}; network = "allowlist" needs a worker '
            "that is root on the daemon's own machine, in its pid namespace"
        ) from found[0]
    return found[0]


def _made(pid: int, name: str) -> socket.socket:
    if name.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
        raise ProcessLookupError(errno.ESRCH, "its first process is not a process of this machine")
    with open(f"/proc/{pid}/ns/net", "rb") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    deadline = time.monotonic() + LOOPBACK_S
    while True:
        try:
            return listener(namespace=True)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL or time.monotonic() > deadline:
                raise
            time.sleep(PAUSE_S)
