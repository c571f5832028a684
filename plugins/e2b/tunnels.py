"""The worker's end of the connections that programs in a machine make to the egress proxy (`RelayLoop` has theirs).

A machine has no network. Its relay accepts on the machine's own loopback and carries each connection over the stream
that also carries the init's frames. Here each becomes a connection to a socket of the worker, on which the proxy
accepts as it does in every other sandbox. The socket lies in a folder that only the worker's user may enter, since
whoever connects acts with the rights of the running call.

Everything that comes from the machine is treated as hostile: frames that no relay sends end the stream, and a
connection that was accepted before the running call is refused."""

from __future__ import annotations

import asyncio
import binascii
import contextlib
import os
import shutil
import socket
import tempfile
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path

from turnlog.plugins.e2b.relay import (
    CHUNK_BYTES,
    CLOSE,
    CONNECTIONS,
    CREDIT,
    DATA,
    END,
    EPOCH,
    FRAME,
    INIT,
    NUMBER,
    OPEN,
    WINDOW,
)
from turnlog.sandbox_workers.backends.roots import owned_prefix

BATCH_BYTES = 65536
"""Bytes of frames after which a request to the service takes no more."""


class Outbox:
    """Frames on their way to the machine. Each request to the service takes as many as wait, the init's first, so that
    its heartbeats wait for one request at most."""

    def __init__(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        self._send = send
        self._first: deque[tuple[bytes, asyncio.Event]] = deque()
        self._others: deque[tuple[bytes, asyncio.Event]] = deque()
        self._filled = asyncio.Event()

    def put(self, kind: int, number: int = 0, body: bytes = b"") -> asyncio.Event:
        """Add a frame. The event is set when the service has taken it."""
        taken = asyncio.Event()
        queue = self._first if kind in (INIT, EPOCH) else self._others
        queue.append((FRAME.pack(kind, number, len(body)) + body, taken))
        self._filled.set()
        return taken

    async def run(self) -> None:
        """Send until cancelled. Raises the errors of `send`."""
        while True:
            await self._filled.wait()
            frames, size = [], 0
            while (queue := self._first or self._others) and size < BATCH_BYTES:
                frames.append(queue.popleft())
                size += len(frames[-1][0])
            self._filled.clear()
            if self._first or self._others:
                self._filled.set()
            await self._send(b"".join(frame for frame, _ in frames))
            for _, taken in frames:
                taken.set()


class Tunnels:
    """Connections of one machine. `listener` is what the proxy accepts on."""

    def __init__(self, outbox: Outbox, within: Path | None = None) -> None:
        """Create it, its socket in a new folder in `within`, or in that for temporary files. Raises OSError."""
        self._outbox = outbox
        self._folder = Path(tempfile.mkdtemp(prefix=owned_prefix(), dir=within))
        self._descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        # An address of a socket has at most 107 bytes, and a folder for temporary files may have a longer path.
        self._path = f"/proc/self/fd/{self._descriptor}/proxy"
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self._path)
        self.listener.listen(CONNECTIONS)
        self.listener.setblocking(False)
        self._epoch = 0
        """Number of the running call; 0 for none."""
        self._calls = 0
        self._open: dict[int, _Connection] = {}

    def begin_call(self) -> None:
        """Accept what programs open from now on. To be called before the call is sent to the init."""
        self._calls += 1
        self._epoch = self._calls
        self._outbox.put(EPOCH, self._epoch)

    def end_call(self) -> None:
        """End all connections, and refuse those that come."""
        self._epoch = 0
        for connection in self._open.values():
            connection.end()
        self._open.clear()

    def take(self, line: str) -> None:
        """Act on a line of the relay, without its mark. Raises ValueError for what no relay sends."""
        frame = binascii.a2b_base64(line, strict_mode=True)
        if len(frame) < FRAME.size:
            raise ValueError("a frame of a connection without a head")
        kind, number, size = FRAME.unpack_from(frame)
        body = frame[FRAME.size :]
        if size != len(body) or kind not in (OPEN, DATA, END, CLOSE, CREDIT):
            raise ValueError("a frame of a connection that is none")
        if kind == OPEN:
            self._accept(number, _number(body))
        elif connection := self._open.get(number):
            connection.take(kind, body)

    async def close(self) -> None:
        """End everything. Never raises."""
        ending = [connection.task for connection in self._open.values()]
        self.end_call()
        await asyncio.gather(*ending, return_exceptions=True)
        self.listener.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    def _accept(self, number: int, epoch: int) -> None:
        if not self._epoch or epoch != self._epoch:
            self._outbox.put(CLOSE, number)
            return
        if number in self._open or len(self._open) >= CONNECTIONS:
            raise ValueError("more connections than a relay keeps")
        connection = self._open[number] = _Connection(number, self._path, self._outbox)
        connection.task.add_done_callback(lambda _: self._forget(number, connection))

    def _forget(self, number: int, connection: _Connection) -> None:
        if self._open.get(number) is connection:
            del self._open[number]


class _Connection:
    """A connection between the machine and the proxy."""

    def __init__(self, number: int, path: str, outbox: Outbox) -> None:
        self._number, self._outbox = number, outbox
        self._came: asyncio.Queue[bytes | None] = asyncio.Queue()
        """Bytes from the program; None for their end."""
        self._owed = 0
        """Bytes that came and were not yet passed on."""
        self._credit = WINDOW
        self._credited = asyncio.Event()
        self.task = asyncio.create_task(self._run(path))

    def take(self, kind: int, body: bytes) -> None:
        """Act on a frame. Raises ValueError for more than the window allows."""
        if kind == CLOSE:
            self.task.cancel()
        elif kind == CREDIT:
            self._credit = min(WINDOW, self._credit + _number(body))
            self._credited.set()
        else:
            self._owed += len(body)
            if self._owed > WINDOW:
                raise ValueError("more bytes of a connection than its window")
            self._came.put_nowait(body if kind == DATA and body else None)

    def end(self) -> None:
        """End it; the relay ends its own at the next call."""
        self.task.cancel()

    async def _run(self, path: str) -> None:
        try:
            reader, writer = await asyncio.open_unix_connection(path)
            directions = [asyncio.create_task(work) for work in (self._to_proxy(writer), self._from_proxy(reader))]
            try:
                await asyncio.gather(*directions)
            finally:
                for direction in directions:
                    direction.cancel()
                writer.transport.abort()
        except OSError:
            self._outbox.put(CLOSE, self._number)

    async def _to_proxy(self, writer: asyncio.StreamWriter) -> None:
        while (data := await self._came.get()) is not None:
            writer.write(data)
            await writer.drain()
            self._owed -= len(data)
            self._outbox.put(CREDIT, self._number, NUMBER.pack(len(data)))
        with contextlib.suppress(OSError):
            writer.write_eof()

    async def _from_proxy(self, reader: asyncio.StreamReader) -> None:
        while True:
            while not self._credit:
                self._credited.clear()
                await self._credited.wait()
            data = await reader.read(min(CHUNK_BYTES, self._credit))
            if not data:
                break
            self._credit -= len(data)
            await self._outbox.put(DATA, self._number, data).wait()
        self._outbox.put(END, self._number)


def _number(body: bytes) -> int:
    if len(body) != NUMBER.size:
        raise ValueError("a number of other than four bytes")
    return int(NUMBER.unpack(body)[0])
