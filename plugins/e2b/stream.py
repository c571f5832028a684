"""The stream to the init in a machine, through a command's input and output, in place of a process.

Everything that comes from the machine is treated as hostile. A line that is not base64, or does not end, ends the
stream, and a worker that does not keep up applies back-pressure instead of buffering."""

from __future__ import annotations

import asyncio
import binascii
import contextlib
import hashlib
import json
import logging
import shlex
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnlog.plugins.e2b import relay as e2b_relay
from turnlog.plugins.e2b.relay import CERTIFICATES, INIT, MARK
from turnlog.plugins.e2b.service import await_answer
from turnlog.plugins.e2b.tunnels import Outbox, Tunnels
from turnlog.sandbox_workers.backends.roots import loader_command, sent_program
from turnlog.sandbox_workers.protocol import SandboxUnavailable

if TYPE_CHECKING:
    from e2b import AsyncSandbox

log = logging.getLogger(__name__)

PART_BYTES = 65536
LINE_BYTES = 2 * PART_BYTES
"""Maximum length of a line from the relay."""
AGAIN_S = 0.2
"""Seconds after which a task that goes on is cancelled again."""
WORDS_BYTES = 65536
"""Maximum bytes of its standard error that are retained."""

FOLDERS = ("workspace", "tmp")
"""Writable folders in the home of the template's user, the workspace first."""
PLACE = ("plain", "shared", "none")
"""Arguments of `inside.init.main`: folders in place of file systems, a user that the relay shares, and no proxy of its
own, since the relay has it."""


class E2bStream:
    """A command in place of a process. It ends when its stream does."""

    def __init__(self, network: str = "none", certificates: bytes = b"") -> None:
        """Create it on the event loop. `certificates`: content of the relay's file CA, with network "allowlist"."""
        self.network = network
        self._certificates = certificates
        self._outbox = Outbox(self._send)
        self.tunnels = Tunnels(self._outbox) if network == "allowlist" else None
        """Connections to the egress proxy; None without network."""
        self.pid = 0
        """Pid in the machine."""
        self.returncode: int | None = None
        self._reported = False
        """True if `returncode` is what the service reported."""
        self.stderr = asyncio.StreamReader()
        self.control, self._pair = socket.socketpair()
        """The worker's end of the control socket."""
        self._handle: Any = None
        self._writer: asyncio.StreamWriter
        self._line = ""
        self._words = 0
        self._ended = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, machine: AsyncSandbox) -> None:
        """Run the relay with the init in it. Raises SandboxUnavailable."""
        reader, self._writer = await asyncio.open_connection(sock=self._pair)
        self._handle = await await_answer(
            machine.commands.run(
                f"exec {relay(self.network)}",
                background=True,
                stdin=True,
                timeout=0,
                on_stdout=self._outward,
                on_stderr=self._on_stderr,
                retain_output=False,
            )
        )
        self.pid = self._handle.pid
        works = [self._inward(reader), self._watch()]
        if self.tunnels is not None:
            works.append(self._send_frames())
        for work in works:
            task = asyncio.create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        await self._send(program())
        for start in range(0, len(self._certificates), PART_BYTES):
            self._outbox.put(CERTIFICATES, body=self._certificates[start : start + PART_BYTES])

    @property
    def ended_by_signal(self) -> bool:
        """True if the service reported that the relay, or the init in it, was ended by a signal. The worker sends
        none."""
        code = self.returncode
        return self._reported and code is not None and not 0 <= code <= e2b_relay.SIGNALLED

    def kill(self) -> None:
        """Drop the stream. The machine is ended by its owner."""
        for task in self._tasks:
            task.cancel()
        self._over()

    async def wait(self) -> int:
        """Wait until the stream ends."""
        await self._ended.wait()
        return self.returncode or 0

    async def close(self) -> None:
        """End both directions."""
        self.kill()
        tasks = running = set(self._tasks)
        while running:
            # The SDK's HTTP client swallows a cancellation that arrives together with an answer.
            _, running = await asyncio.wait(running, timeout=AGAIN_S)
            for task in running:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.tunnels is not None:
            await self.tunnels.close()
        if self._handle is not None:
            await self._handle.disconnect()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def _inward(self, reader: asyncio.StreamReader) -> None:
        """Copy from worker to machine."""
        with contextlib.suppress(OSError, SandboxUnavailable):
            while part := await reader.read(PART_BYTES):
                if self.tunnels is None:
                    await self._send(part)
                else:
                    await self._outbox.put(INIT, body=part).wait()
        self._over()

    async def _send(self, data: bytes) -> None:
        await await_answer(self._handle.send_stdin(data))

    async def _send_frames(self) -> None:
        with contextlib.suppress(SandboxUnavailable):
            await self._outbox.run()
        self._over()

    async def _outward(self, text: str) -> None:
        """Copy from machine to worker."""
        if self._ended.is_set():
            return
        *lines, self._line = (self._line + text).split("\n")
        try:
            if len(self._line) > LINE_BYTES:
                raise binascii.Error(f"a line of more than {LINE_BYTES} characters")
            for line in lines:
                if self.tunnels is not None and line.startswith(MARK):
                    self.tunnels.take(line.removeprefix(MARK))
                else:
                    self._writer.write(binascii.a2b_base64(line, strict_mode=True))
            await self._writer.drain()
        except (binascii.Error, ValueError, OSError) as error:
            log.warning("giving up the stream of an E2B machine: %s", error)
            self._over()

    async def _watch(self) -> None:
        """Wait until the command ends, in whatever way."""
        try:
            await await_answer(self._handle.wait())
            self.returncode = 0
        except SandboxUnavailable as error:
            self._reported = hasattr(error.__cause__, "exit_code")
            self.returncode = getattr(error.__cause__, "exit_code", 1)
            if not self._reported:
                self._on_stderr(str(error))
        finally:
            self._over()

    def _on_stderr(self, text: str) -> None:
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


def relay(network: str = "none") -> str:
    """Return the relay's command line, for a shell."""
    words = json.dumps([FOLDERS, loader_command(), network])
    return shlex.join(["python3", "-s", "-c", Path(e2b_relay.__file__).read_text(), words])


def program() -> bytes:
    """Encode what `inside.loader` reads, without the folders' names, which the relay adds."""
    return sent_program("init", str(e2b_relay.CONTROL), *PLACE)


def fingerprint() -> str:
    """Return the sha256 of our code that runs there."""
    return hashlib.sha256(relay().encode() + program()).hexdigest()
