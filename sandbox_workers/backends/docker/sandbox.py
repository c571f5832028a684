"""A container as a sandbox: the init that local sandboxes have, spoken to through the daemon.

The daemon sends both output streams through one connection, each part behind eight bytes: stream, three zeros, length
(Docker Engine API, "Attach to a container", stream format). Two threads copy, since a connection may be TLS.

A socket belongs to the network namespace of the thread that made it (network_namespaces(7)), so a thread that enters
the container's (setns(2)) can make the one that the worker's egress proxy accepts on, where the worker is root on the
daemon's machine and the kernel is shared.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import errno
import logging
import os
import socket
import struct
import threading
import time
from pathlib import Path
from typing import Any

from turnlog.sandbox_workers.backends.connection import InitSandbox
from turnlog.sandbox_workers.backends.docker.daemon import asked
from turnlog.sandbox_workers.inside.observables import listener
from turnlog.sandbox_workers.protocol import (
    Command,
    Execution,
    Kind,
    OnOutput,
    SandboxDied,
    SandboxUnavailable,
)
from turnlog.schemas.events import SandboxLimits

log = logging.getLogger(__name__)

DENIED = errno.EACCES
PRYING = Command(
    kind=Kind.python,
    source=f"""
import os
try:
    os.listdir('/proc/1/fd')
except PermissionError:
    raise SystemExit({DENIED}) from None
""",
)
OOM_KILLED = "was killed for memory"
EXIT_S = 2.0
"""Time for an init to end once its input has; then the container is killed."""

HEADER = struct.Struct(">BxxxL")
STDOUT, STDERR = 1, 2
PART_BYTES = 65536
WORDS_BYTES = 4096
"""Most of its standard error that is kept."""

CLONE_NEWNET = 0x40000000
LOOPBACK_S = 5.0
"""For a loopback to come up."""
PAUSE_S = 0.01
RUNTIME = "runc"
"""The one whose containers have their sockets in the host's kernel."""


class ContainerSandbox(InitSandbox):
    """A container, removed when it is closed."""

    def __init__(self, client: Any, container: str, stream: ContainerStream, disk_bytes: int) -> None:
        super().__init__(stream, stream.control, lambda: None, EXIT_S, disk_bytes=disk_bytes)
        self.container = container
        """Its id."""
        self.guarded = True
        """No call can reach into the init, so that what it says of a reset is a proof."""
        self._client = client
        self.stream = stream
        self._removal: asyncio.Task[str] | None = None

    async def exec(self, command: Command, limits: SandboxLimits, *, on_output: OnOutput | None = None) -> Execution:
        try:
            return await super().exec(command, limits, on_output=on_output)
        except SandboxDied as error:
            said = self.stream.words.decode(errors="replace").strip().rpartition("\n")[2]
            how = f"its container {await self._removed()}" + (f": {said}" if said else "")
            raise SandboxDied(f"{error}; {how}", error.evidence) from error

    async def reset(self) -> bool:
        """See Sandbox. Never proved where a call could have answered for those that come after it."""
        return self.guarded and await super().reset()

    async def close(self) -> None:
        await super().close()
        if await self._removed() == OOM_KILLED:
            self._evidence = dataclasses.replace(self._evidence, limit="memory_bytes")

    async def _removed(self) -> str:
        """Remove the container; how it had ended."""
        if self._removal is None:
            self._removal = asyncio.create_task(removed(self._client, self.container, self.stream))
        return await asyncio.shield(self._removal)


async def guarded(sandbox: ContainerSandbox) -> bool:
    """A call is kept from the init's descriptors, as Linux does of a process that is not dumpable (proc_pid_fd(5));
    gVisor does not. Ask before any code of an agent has run. Raises SandboxDied."""
    answer = await sandbox.exec(PRYING, SandboxLimits())
    return answer.exit_code == DENIED


async def removed(client: Any, container: str, stream: ContainerStream) -> str:
    """Let go of a container and remove it; how it had ended. A daemon that is gone is said in the log: the next
    worker removes what is left."""
    from docker.errors import NotFound  # type: ignore[import-untyped]

    await stream.close()
    try:
        state = (await asked(client.inspect_container, container))["State"]
        await asked(client.remove_container, container, force=True)
    except SandboxUnavailable as error:
        if isinstance(error.__cause__, NotFound):
            return "was removed by somebody else"
        log.warning("container %s is left: %s", container[:12], error)
        return f"cannot be asked about: {error}"
    return OOM_KILLED if state["OOMKilled"] else f"ended as {state['ExitCode']} {state['Error']}".rstrip()


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
