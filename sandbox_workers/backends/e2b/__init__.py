"""The backend for E2B's machines: each sandbox is a microVM of that service, with the init of the local backends in it.

The init is sent over a command's input and answers over its output, so a call needs no request to start it, and limits,
files and sessions are the same as elsewhere. A machine costs money while it lives. Therefore a request for one is never
abandoned half-way; the machine lives for START_TTL_S until it is known to work, and then for TTL_S after the last
contact of its worker.

Everything that comes from the machine is treated as hostile. A line that is not base64, or does not end, ends the
stream, and a worker that does not keep up applies back-pressure instead of buffering. Errors of the SDK become errors
of ours, which never contain the key."""

from __future__ import annotations

import asyncio
import binascii
import contextlib
import hashlib
import json
import logging
import os
import shlex
import socket
from collections.abc import Awaitable, Mapping
from http import HTTPStatus
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers.backends.connection import InitSandbox
from turnlog.sandbox_workers.backends.e2b import relay as e2b_relay
from turnlog.sandbox_workers.backends.leftovers import owned_prefix
from turnlog.sandbox_workers.backends.roots import loader_command, sent_program
from turnlog.sandbox_workers.inside.loader import UNFIT
from turnlog.sandbox_workers.protocol import (
    BackendUnavailable,
    Command,
    ImageMissing,
    Kind,
    SandboxDied,
    SandboxError,
    SandboxUnavailable,
    Shape,
)
from turnlog.schemas.events import SandboxLimits, ToolStatus

if TYPE_CHECKING:
    from e2b import AsyncSandbox

log = logging.getLogger(__name__)

SHARED = ("/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue", "/run/lock")
"""Folders where a template's user may leave files, beside the home."""
CLOSE_S = 20.0
TRACES = """
import json, os
found, uid = [], os.getuid()
OURS = os.environ["HOME"], os.environ["TMPDIR"]
for root in (*ROOTS, os.path.dirname(OURS[0])):
    for parent, folders, names in os.walk(root):
        folders[:] = [name for name in folders if os.path.join(parent, name) not in OURS]
        for path in [parent, *(os.path.join(parent, name) for name in names)]:
            about = os.lstat(path)
            if about.st_uid == uid:
                found.append([path, about.st_ino, about.st_ctime_ns])
tables = [open("/proc/sysvipc/" + name).read() for name in ("shm", "sem", "msg") if os.path.exists("/proc/sysvipc")]
print(json.dumps([found, tables]))
"""
"""Source that lists everything of the user's outside the folders that a reset empties, with ctime, which nobody can set
back."""
LIMITS = SandboxLimits(cpu_s=10.0, wall_s=10.0, output_bytes=1 << 20)

PART_BYTES = 65536
LINE_BYTES = 2 * PART_BYTES
"""Maximum length of a line from the relay."""
WORDS_BYTES = 65536
"""Maximum bytes of its standard error that are retained."""

KEY = "E2B_API_KEY"
REQUEST_S = 30.0

Answer = TypeVar("Answer")

FOLDERS = ("workspace", "tmp")
"""Writable folders in the home of the template's user, the workspace first."""
PLACE = ("plain", "shared", "none")
"""Arguments of `inside.init.main`: folders in place of file systems, a user that the relay shares, no proxy."""


class E2bSandbox(InitSandbox):
    """A machine, kept alive until it is closed."""

    def __init__(self, machine: AsyncSandbox, stream: E2bStream, ttl_s: int, disk_bytes: int) -> None:
        super().__init__(stream, stream.control, lambda: None, 0.0, disk_bytes=disk_bytes)
        self.machine = machine
        self._stream = stream
        self._ttl_s = ttl_s
        self._keeping: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._as_new: bytes | None = None

    async def begin(self) -> None:
        """Wait for the init, keep the machine alive from now on, and record the files of its template in the places
        where a call could leave something. Raises SandboxDied."""
        await self.ready()
        self._keeping = asyncio.create_task(self._keep())
        self._as_new = await self._traces()
        if self._as_new is None:
            raise SandboxDied("the template's folders for temporary files cannot be looked at")

    async def reset(self) -> bool:
        """See Sandbox. The proof is a look at every other place where the user could have left a file."""
        try:
            return await super().reset() and await self._traces() == self._as_new
        except SandboxError:
            return False

    async def close(self) -> None:
        """See Sandbox. The machine is ended even if the caller is cancelled."""
        if self._keeping is not None:
            self._keeping.cancel()
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        await super().close()
        await self._stream.close()
        await end_machine(self.machine)

    async def _traces(self) -> bytes | None:
        source = f"ROOTS = {SHARED!r}\n{TRACES}"
        answer = await super().exec(Command(kind=Kind.python, source=source), LIMITS)
        if answer.status is not ToolStatus.ok:
            return None
        with contextlib.suppress(ValueError):
            return json.dumps(json.loads(answer.output)).encode()
        return None

    async def _keep(self) -> None:
        """Prolong the machine's time-out periodically. If the worker dies, the machine ends by itself."""
        while True:
            try:
                await await_answer(self.machine.set_timeout(self._ttl_s, request_timeout=REQUEST_S))
            except SandboxUnavailable as error:
                log.warning("E2B machine %s: its time-out could not be extended: %s", self.machine.sandbox_id, error)
            await asyncio.sleep(self._ttl_s / 3)


async def end_machine(machine: AsyncSandbox) -> None:
    """End a machine. Never raises: a machine that cannot be ended now ends by its time-out."""
    try:
        async with asyncio.timeout(CLOSE_S):
            await await_answer(machine.kill(request_timeout=REQUEST_S))
    except (SandboxUnavailable, TimeoutError) as error:
        log.warning("E2B machine %s is left to its time-out: %s", machine.sandbox_id, describe_error(error))


class E2bStream:
    """A command in place of a process. It ends when its stream does."""

    def __init__(self) -> None:
        """Create it on the event loop."""
        self.pid = 0
        """Pid in the machine."""
        self.returncode: int | None = None
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
                f"exec {relay()}",
                background=True,
                stdin=True,
                timeout=0,
                on_stdout=self._outward,
                on_stderr=self._on_stderr,
                retain_output=False,
            )
        )
        self.pid = self._handle.pid
        for work in (self._inward(reader), self._watch()):
            task = asyncio.create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        await await_answer(self._handle.send_stdin(program()))

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
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._handle is not None:
            await self._handle.disconnect()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def _inward(self, reader: asyncio.StreamReader) -> None:
        """Copy from worker to machine."""
        with contextlib.suppress(OSError, SandboxUnavailable):
            while part := await reader.read(PART_BYTES):
                await await_answer(self._handle.send_stdin(part))
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
            self.returncode = getattr(error.__cause__, "exit_code", 1)
            if not hasattr(error.__cause__, "exit_code"):
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


def key() -> str:
    """Return the key from the environment, its only source. Raises BackendUnavailable."""
    found = os.environ.get(KEY, "")
    if not found:
        raise BackendUnavailable(f'[sandbox] backends = "e2b" needs the key of an E2B account in {KEY}')
    return found


def check_installed() -> None:
    """Check that the extra is installed. Raises BackendUnavailable if it is not."""
    try:
        import e2b  # noqa: F401
    except ImportError as error:
        raise BackendUnavailable('[sandbox] backends = "e2b" needs the SDK: pip install turnlog[e2b]') from error


async def await_answer(request: Awaitable[Answer]) -> Answer:
    """Return the SDK's answer. Raises SandboxUnavailable with the SDK's own error as its cause."""
    try:
        return await request
    except Exception as error:  # the SDK's errors share no base, and it raises Exception itself for odd answers
        raise SandboxUnavailable(f"E2B: {describe_error(error)}") from error


def describe_error(error: BaseException) -> str:
    """Return an error of the SDK in one line, without the key, in case the service ever repeats it."""
    text = " ".join(str(error).split())[:500] or type(error).__name__
    return text.replace(os.environ.get(KEY) or "\0", "<key>")


def _remedy(error: SandboxUnavailable) -> str:
    """Return what to do about a service that did not list its machines; it names the key only if the key was
    refused."""
    from e2b.exceptions import AuthenticationException

    cause = error.__cause__
    if isinstance(cause, AuthenticationException) or getattr(cause, "status_code", None) == HTTPStatus.FORBIDDEN:
        return f"check the key in {KEY}"
    return "the service did not refuse the key: try again once it answers, or see E2B_DOMAIN and E2B_API_URL"


def template_missing(error: SandboxUnavailable, template: str) -> ImageMissing | None:
    """Return ImageMissing if the error means that the service has no such template for this key, else None. Valid only
    for errors of a start."""
    cause = error.__cause__
    status = getattr(cause, "status_code", None)
    # SDK 2.63.0 has a status but no type or code: only the message tells that a 403 is about another team's template.
    if status == HTTPStatus.NOT_FOUND or (status == HTTPStatus.FORBIDDEN and "template" in str(cause).lower()):
        return ImageMissing(f"E2B has no template {template!r} for this key ({error}): build it, or name another")
    return None


def relay() -> str:
    """Return the relay's command line, for a shell."""
    words = json.dumps([FOLDERS, loader_command()])
    return shlex.join(["python3", "-s", "-c", Path(e2b_relay.__file__).read_text(), words])


def program() -> bytes:
    """Encode what `inside.loader` reads, without the folders' names, which the relay adds."""
    return sent_program("init", str(e2b_relay.CONTROL), *PLACE)


def fingerprint() -> str:
    """Return the sha256 of our code that runs there."""
    return hashlib.sha256(relay().encode() + program()).hexdigest()


START_S = 60.0
START_TTL_S = 90
TTL_S = 300
NO_PYTHON = "python3: not found", "python3: command not found", "exec: python3"


class E2b:
    """The backend of an account at E2B, or of a server of one's own."""

    name = "e2b"
    costly = True
    sessions = True
    networks: ClassVar[frozenset[str]] = frozenset({"none"})
    """Networks served. "none" is enforced by allow_internet_access=False in the request for a machine; the worker's
    egress proxy cannot be reached from there."""

    def __init__(self, settings: SandboxSettings, connection: Mapping[str, str] | None = None) -> None:
        """Create the backend. `connection` has arguments for the SDK's calls that take precedence over its environment,
        for a server of one's own."""
        self._settings = settings
        self._connection: Any = dict(connection or {})
        self.ttl_s = TTL_S
        """Seconds that a machine lives after the last contact of its worker."""
        self._known: dict[str, Mapping[str, str]] = {}
        self._starting: set[asyncio.Task[AsyncSandbox]] = set()
        self._ending: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(cls, settings: SandboxSettings, *, ca: Path | None = None, cache: Path | None = None) -> Self:
        """Check that the SDK is installed and that the service accepts the key. `ca` and `cache` are not used. Raises
        BackendUnavailable."""
        check_installed()
        key()
        from e2b import AsyncSandbox

        try:
            await await_answer(AsyncSandbox.list(limit=1, request_timeout=REQUEST_S).next_items())
        except SandboxUnavailable as error:
            raise BackendUnavailable(f"{error}; {_remedy(error)}") from error
        return cls(settings)

    async def start(self, slot: int, shape: Shape) -> E2bSandbox:
        if shape.network not in self.networks:
            raise SandboxUnavailable(f"network {shape.network!r}: the e2b backend has machines without network alone")
        template = shape.image or self._settings.e2b_template
        machine = await self._create_machine(template)
        stream = E2bStream()
        sandbox = E2bSandbox(machine, stream, self.ttl_s, shape.disk_bytes)
        try:
            async with asyncio.timeout(START_S):
                await stream.open(machine)
                await sandbox.begin()
        except (TimeoutError, SandboxDied, SandboxUnavailable) as error:
            words = " ".join((await sandbox.last_words()).split())
            await sandbox.close()
            if UNFIT in words or any(no in words for no in NO_PYTHON):
                raise ImageMissing(f"template {template!r} has no python3 that sandboxes can use: {words}") from error
            why = words or describe_error(error)
            raise SandboxUnavailable(f"template {template!r}, not ready within {START_S:.0f} s: {why}") from error
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def environment(self, shape: Shape) -> Mapping[str, str]:
        """See Provider. Starts a machine to ask, once per template."""
        template = shape.image or self._settings.e2b_template
        if template not in self._known:
            machine = await self._create_machine(template)
            try:
                about = await await_answer(machine.get_info(request_timeout=REQUEST_S))
            finally:
                await end_machine(machine)
            self._known[template] = {
                "template": about.template_id,
                "envd": about.envd_version,
                "cpus": str(about.cpu_count),
                "memory_mb": str(about.memory_mb),
                "init": fingerprint(),
                "sdk": version("e2b"),
            }
        return self._known[template]

    async def close(self) -> None:
        """See Provider. Waits for machines whose start was abandoned."""
        while waiting := [*self._starting, *self._ending]:
            await asyncio.wait(waiting)
            await asyncio.sleep(0)  # let the callbacks of finished tasks start their work

    async def _create_machine(self, template: str) -> AsyncSandbox:
        """Create a machine. If this is cancelled, the machine is ended as soon as it exists. Raises SandboxUnavailable,
        ImageMissing."""
        from e2b import AsyncSandbox

        request = AsyncSandbox.create(
            template=template,
            timeout=START_TTL_S,
            metadata={"turnlog": owned_prefix()},
            allow_internet_access=False,
            request_timeout=REQUEST_S,
            **self._connection,
        )
        starting = asyncio.create_task(await_answer(request))
        self._starting.add(starting)
        starting.add_done_callback(self._starting.discard)
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(self._given_up)
            raise
        except SandboxUnavailable as error:
            raise template_missing(error, template) or error from None

    def _given_up(self, starting: asyncio.Task[AsyncSandbox]) -> None:
        if starting.cancelled() or starting.exception() is not None:
            return
        ending = asyncio.create_task(end_machine(starting.result()))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
