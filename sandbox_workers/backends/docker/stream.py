"""An attached container's standard streams as a socket pair, so that its worker speaks to it as to a local sandbox.

The daemon sends both output streams through one connection, each part behind eight bytes: stream, three zeros, length
(Docker Engine API, "Attach to a container", stream format). Two threads copy, since a connection may be TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from typing import Any

HEADER = struct.Struct(">BxxxL")
STDOUT, STDERR = 1, 2
PART_BYTES = 65536
WORDS_BYTES = 4096
"""Most of its standard error that is kept."""


class ContainerStream:
    """A container in place of a process: it ends when its streams do."""

    def __init__(self, attached: Any, pid: int) -> None:
        """`attached` is what the SDK's attach_socket gave. Call on the loop."""
        self.pid = pid
        """On the daemon's machine."""
        self.returncode: int | None = None
        """Set when it has ended; what it was is for the daemon to tell."""
        self._stderr = asyncio.StreamReader()
        self.stderr: asyncio.StreamReader | None = self._stderr
        self.control, self._pair = socket.socketpair()
        """The worker's end."""
        self._attached = attached
        self._socket: socket.socket = getattr(attached, "_sock", attached)
        self._socket.settimeout(None)
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self.words = b""
        """The last that it wrote on its standard error."""
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._outward, self._inward)]
        for thread in self._threads:
            thread.start()

    def sendall(self, data: bytes) -> None:
        """To the container's input, before its worker's end is used. Blocks; raises OSError."""
        self._socket.sendall(data)

    def kill(self) -> None:
        """Let go of the connection: the container's input ends, and so does its init."""
        for end in (self._socket, self._pair):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    async def wait(self) -> int:
        """Until its output ends."""
        await self._ended.wait()
        return 0

    async def close(self) -> None:
        """End both directions and the threads that served them."""
        self.kill()
        for thread in self._threads:
            await asyncio.to_thread(thread.join)
        self._pair.close()
        detach(self._attached)

    def _inward(self) -> None:
        """Worker to container."""
        with contextlib.suppress(OSError):
            while part := self._pair.recv(PART_BYTES):
                self._socket.sendall(part)
        with contextlib.suppress(OSError):  # TLS has no half of a connection to close: then all of it ends
            self._socket.shutdown(socket.SHUT_WR)

    def _outward(self) -> None:
        """Container to worker."""
        with contextlib.suppress(OSError, EOFError):
            while True:
                stream, size = HEADER.unpack(self._exactly(HEADER.size))
                while size:
                    size -= len(part := self._part(size))
                    if stream == STDOUT:
                        self._pair.sendall(part)
                    else:
                        self._loop.call_soon_threadsafe(self._said, part)
        with contextlib.suppress(OSError):
            self._pair.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._over)

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            data += self._part(size - len(data))
        return data

    def _part(self, most: int) -> bytes:
        part = self._socket.recv(min(most, PART_BYTES))
        if not part:
            raise EOFError
        return part

    def _said(self, part: bytes) -> None:
        self.words = (self.words + part)[-WORDS_BYTES:]

    def _over(self) -> None:
        self.returncode = 0
        self._stderr.feed_data(self.words)
        self._stderr.feed_eof()
        self._ended.set()


def detach(attached: Any) -> None:
    """Close the connection of an attach_socket of the SDK, its HTTP response included."""
    response = getattr(attached, "_response", None)
    if response is not None:
        response.close()
    with contextlib.suppress(OSError):
        attached.close()
