"""The worker's end of a slot's zygote (inside/zygote.py): each order makes an init, and ends the one before."""

from __future__ import annotations

import contextlib
import socket


class Zygote:
    """Holds the socket that orders go by; a zygote whose orders are closed ends with all that it made."""

    def __init__(self, orders: socket.socket) -> None:
        self._orders = orders
        orders.setblocking(False)

    def fork(self) -> socket.socket:
        """The control socket of a new init, in namespaces of its own; at its end when the zygote is gone."""
        ours, theirs = socket.socketpair()
        with theirs, contextlib.suppress(OSError):
            socket.send_fds(self._orders, [b"!"], [theirs.fileno()])
        return ours

    def close(self) -> None:
        """No more orders."""
        self._orders.close()
