"""Servers that a worker starts in sandboxes, and the sessions that they serve.

A server serves as many sessions at once as it accepts: when it answers that it is full, the next session gets another
server of the same command. When a session ends, its place is free for the next. All end with the worker."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
from aiohttp.client_proto import ResponseHandler

from turnlog.infra.embedded.ports import free_ports
from turnlog.plugins.openenv.client import (
    CONNECT_S,
    DirectNetwork,
    EnvironmentFull,
    OpenEnvError,
    OpenEnvServer,
    OpenEnvSession,
)
from turnlog.sandbox_workers.protocol import (
    Command,
    Execution,
    ImageCommand,
    Kind,
    OutputStream,
    SandboxError,
    SandboxUnavailable,
    Shape,
)
from turnlog.sandbox_workers.server_sandboxes import ImageBackend, ServerSandboxes
from turnlog.schemas.canonical import canonical_text
from turnlog.schemas.events import SandboxLimits

NAME: Final = "openenv servers"
RELAY: Final = Path(__file__).with_name("relay.py").read_text()
PORT: Final = 8000
"""Port of a server in a sandbox of its own, unless the task names another."""
SPARE: Final = 4
"""Connections that the relay keeps open for the next ones."""
READY_S: Final = 120.0
"""Seconds for a server to become healthy, unless the task names others."""
POLL_S: Final = 0.1
UNBOUNDED_S: Final = 1e9
MEMORY_BYTES, DISK_BYTES, PIDS = 2 * 2**30, 256 * 2**20, 1024
CONTAINER_FOLDER: Final = "/run/turnlog"
"""Folder of a container that the sandbox takes as its workspace. With one, its other folders can be written as the
image has them."""
OUTPUT_BYTES: Final = 16 * 2**20
"""Output of a server beyond which the init leaves out the middle."""
SAID_BYTES: Final = 4096
"""Bytes of output that an error shows."""


class ServerNotStarted(OpenEnvError):
    """The server did not become healthy; the message has its exit status and its last output."""

    reason = "environment_not_started"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlan:
    """Settings by which a server is started. Sessions with equal plans share servers."""

    command: tuple[str, ...] = ()
    """Program and arguments; {port} stands for the port. Empty: the image's own."""
    image: str | None = None
    backend: str = ""
    """Backend of the sandbox; empty: the machine's own."""
    env: Mapping[str, str] = field(default_factory=dict)
    port: int | None = None
    ready_s: float = READY_S
    memory_bytes: int = MEMORY_BYTES

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> ServerPlan:
        """Parse `server` of a reset, which its schema allows."""
        return cls(**{**given, "command": tuple(given.get("command", ()))})

    @property
    def label(self) -> str:
        """Name of the server in messages."""
        return self.command[0] if self.command else f"image {self.image}"


class StartedServer:
    """A server in a sandbox."""

    def __init__(self, plan: ServerPlan, sandboxes: ServerSandboxes) -> None:
        self.sessions = 0
        self.capacity: int | None = None
        """Number of sessions that it accepts; None until it has refused one."""
        self._plan, self._sandboxes = plan, sandboxes
        self._said = bytearray()
        self._idle: asyncio.Queue[socket.socket] = asyncio.Queue()
        self._network = DirectNetwork(RelayConnector(self._idle))
        self.server = OpenEnvServer(f"http://localhost:{plan.port or PORT}", self._network)
        self.ended = ""
        """Description of its end; empty while it runs."""
        self._running = asyncio.create_task(self._run())
        self._healthy = asyncio.create_task(self._become_healthy())

    @property
    def has_room(self) -> bool:
        """True if one more session may be served, as far as is known."""
        return not self.ended and (self.capacity is None or self.sessions < self.capacity)

    def output(self) -> str:
        """Return what it printed last."""
        return bytes(self._said[-SAID_BYTES:]).decode(errors="replace").strip()

    async def ready(self, *, timeout_s: float) -> None:
        """Wait until it is healthy. Raises ServerNotStarted."""
        await asyncio.wait([self._healthy], timeout=timeout_s)
        if not self._healthy.done():
            raise ServerNotStarted(
                f"{self._plan.label} is not healthy after {timeout_s:.1f} s and goes on starting: raise wall_s of "
                "the task and of [sandbox]"
            )
        self._healthy.result()

    async def connect(self, *, timeout_s: float) -> OpenEnvSession:
        """Connect to an environment. Raises OpenEnvError."""
        return await OpenEnvSession.connect(self.server.url, self._network, timeout_s=min(timeout_s, CONNECT_S))

    async def close(self) -> None:
        """End it, with everything in its sandbox."""
        for task in (self._healthy, self._running):
            task.cancel()
        await asyncio.wait([self._healthy, self._running])
        await self._network.close()

    async def _run(self) -> None:
        """Run the server to its end."""
        plan = self._plan
        try:
            image = await self._image_command()
            shape = Shape(
                image=plan.image, network="allowlist", disk_bytes=DISK_BYTES, memory_bytes=plan.memory_bytes, pids=PIDS,
                folders=(CONTAINER_FOLDER,) if image else (),
            )  # fmt: skip
            async with self._sandboxes.start(shape, plan.backend) as sandbox:
                assert sandbox.proxy is not None  # the shape's network has one
                with sandbox.proxy.dup() as listener:
                    accepting = asyncio.create_task(self._accept(listener))
                    try:
                        done = await sandbox.exec(
                            self._command(listener.getsockname()[:2], image), self._limits(), on_output=self._on_output
                        )
                    finally:
                        accepting.cancel()
                        await asyncio.wait([accepting])
            self.ended = _describe_end(done)
        except (SandboxError, OSError) as error:
            self.ended = f"{type(error).__name__}: {error}"
        finally:
            self.ended = self.ended or "it was stopped"
            while not self._idle.empty():
                self._idle.get_nowait().close()

    async def _image_command(self) -> ImageCommand | None:
        """Return the image's own command; None if the backend's images name none. Raises SandboxError."""
        provider, named = self._sandboxes.provider(self._plan.backend), self._plan.image
        found = await provider.image_command(named) if named and isinstance(provider, ImageBackend) else None
        if not self._plan.command and not (found and found.argv):
            why = f"image {named!r} names no command" if found else f"images of {provider.name} name no command"
            raise SandboxUnavailable(f"{why}: give one")
        return found

    def _command(self, outside: tuple[str, int], image: ImageCommand | None) -> Command:
        shared_ports = self._sandboxes.provider(self._plan.backend).name == "subprocess"
        port = self._plan.port or (free_ports(1)[0] if shared_ports else PORT)
        words = self._plan.command or (image.argv if image else ())
        settings = {
            "command": [word.replace("{port}", str(port)) for word in words],
            "env": {"PORT": str(port), **self._plan.env}, "outside": outside, "port": port, "spare": SPARE,
            "cwd": image.cwd if image else "", "user": image.user if image else "",
        }  # fmt: skip
        return Command(kind=Kind.python, source=RELAY, env={"RELAY": json.dumps(settings)}, agent=True)

    def _limits(self) -> SandboxLimits:
        return SandboxLimits(
            cpu_s=UNBOUNDED_S, wall_s=UNBOUNDED_S, memory_bytes=self._plan.memory_bytes, pids=PIDS,
            disk_bytes=DISK_BYTES, output_bytes=OUTPUT_BYTES,
        )  # fmt: skip

    def _on_output(self, stream: OutputStream, part: bytes) -> None:
        self._said += part
        if len(self._said) > 2 * SAID_BYTES:
            del self._said[:-SAID_BYTES]

    async def _accept(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(listener)
            connection.setblocking(False)
            self._idle.put_nowait(connection)

    async def _become_healthy(self) -> None:
        loop = asyncio.get_running_loop()
        until, last = loop.time() + self._plan.ready_s, ""
        while True:
            left_s = max(POLL_S, min(CONNECT_S, until - loop.time()))
            asking = asyncio.create_task(self.server.health(timeout_s=left_s))
            try:
                await asyncio.wait([asking, self._running], return_when=asyncio.FIRST_COMPLETED)
                if not self.ended:
                    return await asking
            except OpenEnvError as error:
                last = str(error)
            finally:
                asking.cancel()
            await asyncio.wait([self._running], timeout=POLL_S)
            if self.ended or loop.time() > until:
                why = f"ended: {self.ended}" if self.ended else f"is not healthy after {self._plan.ready_s:g} s: {last}"
                self._running.cancel()
                raise ServerNotStarted(f"the server {self._plan.label} {why}")


class RelayConnector(aiohttp.BaseConnector):
    """Takes connections that a relay has opened from within its sandbox."""

    def __init__(self, idle: asyncio.Queue[socket.socket]) -> None:
        super().__init__(limit=0, force_close=True)
        self._idle = idle

    async def _create_connection(
        self, req: aiohttp.ClientRequest, traces: Any, timeout: aiohttp.ClientTimeout
    ) -> ResponseHandler:
        connection = await self._idle.get()
        _, protocol = await self._loop.create_connection(self._factory, sock=connection)
        return protocol


class StartedServers:
    """The servers of one worker, by their plans. See Connection."""

    def __init__(self, sandboxes: ServerSandboxes) -> None:
        self._sandboxes = sandboxes
        self._servers: dict[str, list[StartedServer]] = {}

    async def with_room(self, plan: ServerPlan) -> StartedServer:
        """Return a server that may take one more session, started if there is none. Raises EnvironmentFull."""
        servers = self._servers.setdefault(canonical_text(dataclasses.asdict(plan), ascii_only=False), [])
        for over in [server for server in servers if server.ended and not server.sessions]:
            servers.remove(over)
            await over.close()
        found = next((server for server in servers if server.has_room), None)
        if found is None:
            if len(servers) >= self._sandboxes.most:
                raise EnvironmentFull(
                    f"all {len(servers)} servers of {plan.label} that this worker may start are in use: raise "
                    "[sandbox] slots, or max_concurrent_envs of the server"
                )
            found = StartedServer(plan, self._sandboxes)
            servers.append(found)
        return found

    async def close(self) -> None:
        servers = [server for group in self._servers.values() for server in group]
        self._servers.clear()
        await asyncio.gather(*(server.close() for server in servers))


class StartedPlace:
    """A place at a server that the worker starts. See ServerPlace."""

    def __init__(self, named: Mapping[str, Any], servers: StartedServers) -> None:
        self.named = named
        self._plan, self._servers = ServerPlan.parse(named), servers
        self._started: StartedServer | None = None

    @property
    def server(self) -> OpenEnvServer:
        assert self._started is not None  # there is one once a session has connected
        return self._started.server

    async def connect(self, *, timeout_s: float) -> OpenEnvSession:
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        started = self._started = await self._servers.with_room(self._plan)
        started.sessions += 1  # before anything is awaited, so that no other session takes the place
        try:
            await started.ready(timeout_s=timeout_s)
            return await started.connect(timeout_s=max(0.1, until - loop.time()))
        except BaseException:
            started.sessions -= 1
            raise

    def note_full(self) -> None:
        if self._started is not None:
            self._started.capacity = max(1, self._started.sessions - 1)

    def note_disconnect(self) -> None:
        if self._started is not None:
            self._started.sessions -= 1

    def output(self) -> str:
        if self._started is None:
            return ""
        ended = f"[it ended: {self._started.ended}]" if self._started.ended else ""
        return "\n".join(text for text in (self._started.output(), ended) if text)

    async def close(self) -> None:
        """See ServerPlace. The server goes on, for other sessions."""


def _describe_end(done: Execution) -> str:
    return done.reason or f"exit status {done.exit_code}"
