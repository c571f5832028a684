"""The worker's end of a slot's zygote (inside/zygote.py): each order makes an init, and ends the one before."""

from __future__ import annotations

import contextlib
import socket

COMPARED_EVERY = 64
"""Inits. Their namespaces are new, so that looking finds a fault of ours or of the kernel's; it takes 2 core-ms."""


class Zygote:
    """Holds the socket that orders go by; a zygote whose orders are closed ends with all that it made."""

    def __init__(self, orders: socket.socket) -> None:
        self._orders = orders
        self._forks = 0
        orders.setblocking(False)

    def fork(self) -> socket.socket:
        """The control socket of a new init, in namespaces of its own; at its end when the zygote is gone."""
        self._forks += 1
        ours, theirs = socket.socketpair()
        with theirs, contextlib.suppress(OSError):
            socket.send_fds(self._orders, [b"!"], [theirs.fileno()])
        return ours

    @property
    def to_be_compared(self) -> bool:
        """The latest init is to say what it finds around it, as the first was."""
        return self._forks % COMPARED_EVERY == 0

    def close(self) -> None:
        """No more orders."""
        self._orders.close()
