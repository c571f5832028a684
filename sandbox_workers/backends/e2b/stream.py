"""A command in an E2B machine as a socket pair, so that its worker speaks to it as to a local sandbox.

Everything that comes from there is taken for hostile: a line that is no base64 or does not end is the end of it, and a
worker that does not keep up holds the stream back instead of storing it.
"""

from __future__ import annotations

import asyncio
import binascii
import contextlib
import logging
import socket
from typing import TYPE_CHECKING, Any

from turnlog.sandbox_workers.backends.e2b import program as e2b_program
from turnlog.sandbox_workers.backends.e2b.client import asked
from turnlog.sandbox_workers.protocol import SandboxUnavailable

if TYPE_CHECKING:
    from e2b import AsyncSandbox

log = logging.getLogger(__name__)

PART_BYTES = 65536
LINE_BYTES = 2 * PART_BYTES
"""No line of the relay's is longer."""
WORDS_BYTES = 65536
"""Most of its standard error that is kept."""


class E2bStream:
    """A command in place of a process: it ends when its stream does."""

    def __init__(self) -> None:
        """Call on the loop."""
        self.pid = 0
        """In the machine."""
        self.returncode: int | None = None
        self.stderr = asyncio.StreamReader()
        self.control, self._pair = socket.socketpair()
        """The worker's end."""
        self._handle: Any = None
        self._writer: asyncio.StreamWriter
        self._line = ""
        self._words = 0
        self._ended = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, machine: AsyncSandbox) -> None:
        """Run the relay, and the init in it. Raises SandboxUnavailable."""
        reader, self._writer = await asyncio.open_connection(sock=self._pair)
        self._handle = await asked(
            machine.commands.run(
                f"exec {e2b_program.relay()}",
                background=True,
                stdin=True,
                timeout=0,
                on_stdout=self._outward,
                on_stderr=self._said,
                retain_output=False,
            )
        )
        self.pid = self._handle.pid
        for work in (self._inward(reader), self._watch()):
            task = asyncio.create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        await asked(self._handle.send_stdin(e2b_program.program()))

    def kill(self) -> None:
        """Let go of the stream. The machine is ended by whoever made it."""
        for task in self._tasks:
            task.cancel()
        self._over()

    async def wait(self) -> int:
        """Until its stream ends."""
        await self._ended.wait()
        return self.returncode or 0

    async def close(self) -> None:
        """End both directions."""
        self.kill()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._handle is not None:
            await self._handle.disconnect()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def _inward(self, reader: asyncio.StreamReader) -> None:
        """Worker to machine."""
        with contextlib.suppress(OSError, SandboxUnavailable):
            while part := await reader.read(PART_BYTES):
                await asked(self._handle.send_stdin(part))
        self._over()

    async def _outward(self, text: str) -> None:
        """Machine to worker."""
        if self._ended.is_set():
            return
        *lines, self._line = (self._line + text).split("\n")
        try:
            if len(self._line) > LINE_BYTES:
                raise binascii.Error(f"a line of more than {LINE_BYTES} characters")
            for line in lines:
                self._writer.write(binascii.a2b_base64(line, strict_mode=True))
            await self._writer.drain()
        except (binascii.Error, ValueError, OSError) as error:
            log.warning("the stream of an E2B machine is given up: %s", error)
            self._over()

    async def _watch(self) -> None:
        """Until the command ends, in whatever way."""
        try:
            await asked(self._handle.wait())
            self.returncode = 0
        except SandboxUnavailable as error:
            self.returncode = getattr(error.__cause__, "exit_code", 1)
            if not hasattr(error.__cause__, "exit_code"):
                self._said(str(error))
        finally:
            self._over()

    def _said(self, text: str) -> None:
        part = text.encode(errors="replace")[: max(0, WORDS_BYTES - self._words)]
        self._words += len(part)
        if not self._ended.is_set():
            self.stderr.feed_data(part)

    def _over(self) -> None:
        if self._ended.is_set():
            return
        self._ended.set()
        if self.returncode is None:
            self.returncode = 1
        self.stderr.feed_eof()
        self._writer.close()
