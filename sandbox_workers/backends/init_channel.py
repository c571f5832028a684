"""Frames between a worker and an init as the worker sees them: it believes nothing, the speaker may be agents' code.

What an init says is bounded before it is read and checked before it is used; whatever no init would say is SandboxDied.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from typing import Any

from turnlog.sandbox_workers.attribution import Evidence
from turnlog.sandbox_workers.inside.frames import HEADER
from turnlog.sandbox_workers.protocol import FileMissing, FileRefused, QuotaExceeded, SandboxDied

HEAD_BYTES = 65536
"""No head is longer."""
MOST_BYTES = 2**32 - 1
"""Of a body (inside/frames.py)."""
REFUSALS = {"path": FileRefused, "missing": FileMissing, "quota": QuotaExceeded}


class Channel:
    """The worker's end of the control socket."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None

    async def greeted(self) -> tuple[dict[str, Any], socket.socket | None]:
        """The init's first frame and the socket that came with it. Raises SandboxDied."""
        self._control.setblocking(False)
        passed: list[int] = []
        try:
            head_size, body_size = HEADER.unpack(await self._exactly(HEADER.size, passed))
            _bounded(head_size, body_size, 0)
            head = _head(await self._exactly(head_size, passed))
            listener = _listener(passed)
        except BaseException as error:
            for descriptor in passed:
                socket.close(descriptor)
            if isinstance(error, OSError):
                raise SandboxDied(f"the sandbox ended before it was ready: {error}") from error
            raise
        self._reader, self._writer = await asyncio.open_connection(sock=self._control)
        return head, listener

    async def send(self, head: dict[str, Any], *body: bytes) -> None:
        """One frame; cancelled or not, nothing of another comes between. Raises SandboxDied."""
        if self._writer is None or self._writer.is_closing():
            raise SandboxDied("the sandbox was closed")
        text = json.dumps(head).encode()
        try:
            self._writer.writelines([HEADER.pack(len(text), sum(map(len, body))), text, *body])
            await self._writer.drain()
        except OSError as error:
            raise SandboxDied(f"the sandbox closed its socket: {error}") from error

    async def head(self, most: int) -> tuple[dict[str, Any], int]:
        """Next frame's head and the length of its body, which is still to be taken. Raises SandboxDied."""
        head_size, body_size = HEADER.unpack(await self.body(HEADER.size))
        _bounded(head_size, body_size, most)
        return _head(await self.body(head_size)), body_size

    async def body(self, size: int) -> bytes:
        """That many bytes. Raises SandboxDied."""
        try:
            return await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise SandboxDied(f"the sandbox ended before it answered ({type(error).__name__})") from error

    async def answer(self, most: int) -> tuple[dict[str, Any], bytes]:
        """Next frame. Raises FileRefused and its kind when that is what it says, SandboxDied."""
        head, size = await self.head(most)
        refusal(head)
        return head, await self.body(size)

    async def close(self) -> None:
        """Never raises."""
        if self._writer is None:
            self._control.close()
            return
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def _exactly(self, size: int, passed: list[int]) -> bytes:
        """Before there are streams, which drop descriptors."""
        data = b""
        while len(data) < size:
            try:
                part, descriptors, _, _ = socket.recv_fds(self._control, size - len(data), 1, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                await _readable(self._control)
                continue
            passed += descriptors
            if not part:
                raise SandboxDied("the sandbox ended before it was ready")
            data += part
        return data


def refusal(head: dict[str, Any]) -> None:
    """Raise what a head refuses, if it does; SandboxDied when the init ends with it."""
    if "changed" in head:
        what = str(head["changed"])[:64]
        raise SandboxDied(f"a call has changed the sandbox itself: {what}", Evidence(changed=what))
    if "refused" in head:
        raise REFUSALS.get(str(head["refused"]), FileRefused)(str(head.get("text", ""))[:1000])


def _bounded(head_size: int, body_size: int, most: int) -> None:
    if head_size > HEAD_BYTES or body_size > most:
        raise SandboxDied(f"the init announced {head_size} + {body_size} bytes")


def _head(text: bytes) -> dict[str, Any]:
    try:
        head = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SandboxDied(f"the init answered with something else than JSON: {type(error).__name__}") from error
    if not isinstance(head, dict):
        raise SandboxDied("the init answered with something else than an object")
    return head


def _listener(passed: list[int]) -> socket.socket | None:
    """The one descriptor that may come: a listening TCP socket."""
    if not passed:
        return None
    found = socket.socket(fileno=passed[0])
    passed.clear()
    if found.family != socket.AF_INET or not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        found.close()
        raise SandboxDied("the init passed something else than a listening socket")
    found.setblocking(False)
    return found


async def _readable(control: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(control, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(control)
