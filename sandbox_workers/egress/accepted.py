"""A connection that a sandbox opened to its proxy.

Every one is ended by a reset (SO_LINGER 0, socket(7)): a closed one would stand in the sandbox's network namespace as
TIME_WAIT for a minute, and a sandbox with such a trace of a call cannot be proved to be as new.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct

import anyio
from anyio.abc import ByteStream

_RESET = struct.pack("ii", 1, 0)


class Accepted(ByteStream):
    """See ByteStream. A plain socket, since a transport would say goodbye before its reset."""

    def __init__(self, connection: socket.socket) -> None:
        """Takes the socket over."""
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._loop = connection, asyncio.get_running_loop()

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """See ByteStream."""
        try:
            data = await self._loop.sock_recv(self._socket, max_bytes)
        except OSError as error:
            raise anyio.BrokenResourceError from error
        if not data:
            raise anyio.EndOfStream
        return data

    async def send(self, item: bytes) -> None:
        try:
            await self._loop.sock_sendall(self._socket, item)
        except OSError as error:
            raise anyio.BrokenResourceError from error

    async def send_eof(self) -> None:
        """See ByteStream."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    async def aclose(self) -> None:
        """End it now."""
        reset(self._socket)


def reset(connection: socket.socket) -> None:
    """Close without a trace; may be called twice."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    connection.close()


def forget_waiting(listener: socket.socket) -> None:
    """End connections that nobody accepted yet: they are another call's."""
    listener.setblocking(False)
    with contextlib.suppress(OSError):
        while True:
            reset(listener.accept()[0])
