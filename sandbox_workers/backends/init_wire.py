"""The worker's side of the protocol with an init. It trusts nothing, because the other side may be agents' code.

The size of every answer is limited before it is read, and its content checked before it is used; an answer that no init
would send raises SandboxDied. During a call, a heartbeat tells the init that its worker lives, since a stopped worker
keeps its sockets open."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import socket
import struct
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from turnlog.infra.environments.workspaces import FileEntry, FileKind
from turnlog.sandbox_workers.inside.frames import HEADER
from turnlog.sandbox_workers.inside.interpreter import ENDED
from turnlog.sandbox_workers.inside.workspace import LONGEST_PATH, MOST_ENTRIES, PathRefused, exact
from turnlog.sandbox_workers.protocol import (
    UNKNOWN,
    Command,
    Evidence,
    Execution,
    FileMissing,
    FileRefused,
    Kind,
    OutputStream,
    QuotaExceeded,
    SandboxDied,
)
from turnlog.schemas.events import SandboxLimits, ToolStatus

HEAD_BYTES = 65536
"""Maximum size of a head, in bytes."""
MOST_BYTES = 2**32 - 1
"""Maximum size of a body, in bytes (inside/frames.py)."""
REFUSALS = {"path": FileRefused, "missing": FileMissing, "quota": QuotaExceeded}

INDEX_BYTES = 32 << 20
"""Maximum size of an index in bytes: MOST_ENTRIES entries, and workspace.NAME_BYTES of names at six bytes each."""
OBSERVED_BYTES = 1 << 16
"""Maximum size of an answer to `parse_observables`, in bytes."""
STAMP_LENGTH = 128
SAID = frozenset({ToolStatus.ok, ToolStatus.tool_error, ToolStatus.timeout, ToolStatus.resource_limit})
"""Statuses that an init may report. A sandbox may not report that the fault was ours or that somebody cancelled the
call."""
LOST = Execution(ToolStatus.tool_error, "interpreter_ended", None, ENDED, 0.0, 0.0)
"""Nothing was run: the interpreter that the call was to use has ended between calls, which only an earlier call can
have prepared."""
TEXT_FIELDS = ("path", "kind", "target", "stamp")

SILENCE_S = 5.0
"""Seconds without a heartbeat after which a call ends with its sandbox. They are less than the 6 s after which the
worker's consumer group gives the call to another worker (infra.kafka.connection.Membership), which would run it in
parallel."""
BEAT_S = 1.0


class ControlChannel:
    """The worker's end of the control socket."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None

    async def receive_greeting(self) -> tuple[dict[str, Any], socket.socket | None]:
        """Return the init's first frame and the socket that came with it. Raises SandboxDied."""
        self._control.setblocking(False)
        passed: list[int] = []
        try:
            head = _head(await self._greeting(passed))
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
        """Send one frame; even if this is cancelled, no other frame gets in between. Raises SandboxDied."""
        if self._writer is None or self._writer.is_closing():
            raise SandboxDied("the sandbox was closed")
        text = json.dumps(head).encode()
        try:
            # asyncio of Python 3.12 and 3.13 never ends to send an empty part: it would spin, and no close would end.
            self._writer.writelines([HEADER.pack(len(text), sum(map(len, body))), text, *filter(None, body)])
            await self._writer.drain()
        except OSError as error:
            raise SandboxDied(f"the sandbox closed its socket: {error}") from error

    async def head(self, most: int) -> tuple[dict[str, Any], int]:
        """Return the head of the next frame and the length of its body, which is still to be received. Raises
        SandboxDied."""
        head_size, body_size = HEADER.unpack(await self.body(HEADER.size))
        _check_sizes(head_size, body_size, most)
        return _head(await self.body(head_size)), body_size

    async def body(self, size: int) -> bytes:
        """Receive exactly `size` bytes. Raises SandboxDied."""
        try:
            return await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise SandboxDied(f"the sandbox ended before it answered ({type(error).__name__})") from error

    async def answer(self, most: int) -> tuple[dict[str, Any], bytes]:
        """Return the next frame. Raises SandboxDied; FileRefused or a subclass if the frame is a refusal."""
        head, size = await self.head(most)
        refusal(head)
        return head, await self.body(size)

    async def close(self) -> None:
        """Close the socket. Never raises."""
        if self._writer is None:
            self._control.close()
            return
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def _greeting(self, passed: list[int]) -> bytes:
        """Receive the head of the first frame and any descriptors before the asyncio streams exist, since streams drop
        descriptors. Nothing follows it before something is requested."""
        data, size = b"", HEADER.size
        while len(data) < size:
            await _readable(self._control)
            part, descriptors, _, _ = socket.recv_fds(self._control, HEAD_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            passed += descriptors
            if not part:
                raise SandboxDied("the sandbox ended before it was ready")
            data += part
            if len(data) >= HEADER.size:
                head_size, body_size = HEADER.unpack_from(data)
                _check_sizes(head_size, body_size, 0)
                size = HEADER.size + head_size
        if len(data) > size:
            raise SandboxDied("the init began with more than it may")
        return data[HEADER.size :]


def refusal(head: dict[str, Any]) -> None:
    """Raise the refusal that a head contains, if any; SandboxDied if the init ends with it."""
    if "changed" in head:
        what = str(head["changed"])[:64]
        raise SandboxDied(f"a call has changed the sandbox itself: {what}", Evidence(changed=what))
    if "refused" in head:
        raise REFUSALS.get(str(head["refused"]), FileRefused)(str(head.get("text", ""))[:1000])


def _check_sizes(head_size: int, body_size: int, most: int) -> None:
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
    """Return the one descriptor that may be passed, a listening TCP socket. Raises SandboxDied for any other."""
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


def execution(head: dict[str, Any], output: bytes, *, cancelled: bool) -> Execution:
    """Parse the answer to `exec`. `cancelled`: whether cancelling was requested. Raises SandboxDied."""
    try:
        status, reason, code = ToolStatus(head["status"]), str(head["reason"])[:64], head["exit_code"]
        duration, cpu = float(head["duration_s"]), float(head["cpu_s"])
        if not (code is None or type(code) is int) or not math.isfinite(duration + cpu) or min(duration, cpu) < 0:
            raise ValueError(head)
        if status not in SAID and not (cancelled and status is ToolStatus.cancelled):
            raise ValueError(head)
    except (KeyError, ValueError, TypeError, OverflowError) as error:
        raise SandboxDied(f"the init answered nonsense: {str(error)[:200]}") from error
    return Execution(status, reason, code, output, duration, cpu)


def parse_observables(body: bytes) -> dict[str, Any]:
    """Parse the answer to `parse_observables`. Raises SandboxDied."""
    try:
        return dict(json.loads(body))
    except (ValueError, TypeError, RecursionError) as error:
        raise SandboxDied(f"what the init has found is no JSON object: {type(error).__name__}") from error


def join_output(parts: Mapping[OutputStream, list[bytes]]) -> bytes:
    """Return the output of a call: all of stdout, then stderr."""
    return b"".join(parts[OutputStream.stdout] + parts[OutputStream.stderr])


def parse_index(body: bytes, disk_bytes: int) -> tuple[FileEntry, ...]:
    """Parse the answer to `index`. Raises SandboxDied."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise SandboxDied(f"the init's index is no JSON: {type(error).__name__}") from error
    if not isinstance(found, list) or len(found) > MOST_ENTRIES:
        raise SandboxDied(f"the init's index is no list of at most {MOST_ENTRIES} entries")
    folders, entries = {""}, []
    before = ""
    for about in found:
        entry = _entry(about)
        if entry.path <= before or entry.path.rpartition("/")[0] not in folders:
            raise SandboxDied("the init's index is in no order of folders and what is in them")
        before = entry.path
        if entry.kind is FileKind.folder:
            folders.add(entry.path)
        entries.append(entry)
    if sum(entry.size for entry in entries) > disk_bytes:
        raise SandboxDied("the init's index holds more than the workspace can")
    return tuple(entries)


def _entry(about: object) -> FileEntry:
    if not isinstance(about, dict) or not all(type(about.get(name)) is str for name in TEXT_FIELDS):
        raise SandboxDied("the init's index holds something else than entries")
    mode, size, target, stamp = about.get("mode"), about.get("size"), about["target"], about["stamp"]
    if type(mode) is not int or not 0 <= mode <= 0o777 or type(size) is not int or size < 0:
        raise SandboxDied("the init's index holds a mode or a size that no file has")
    try:
        exact(about["path"])
        kind = FileKind(about["kind"])
    except (PathRefused, ValueError) as error:
        raise SandboxDied(f"the init's index holds a path that no file has: {error}") from error
    fits = (kind is FileKind.link) == bool(target) and (kind is FileKind.file or not size)
    if not fits or "\0" in target or len(target) > LONGEST_PATH or len(stamp) > STAMP_LENGTH:
        raise SandboxDied("the init's index holds a link or a stamp that no file has")
    return FileEntry(path=about["path"], kind=kind, mode=mode, size=size, target=target, stamp=stamp)


def names(paths: Sequence[str]) -> bytes:
    """Encode the body of `read_files`."""
    return json.dumps(list(paths)).encode()


def split_files(body: bytes, count: int) -> tuple[bytes, ...]:
    """Split the answer to `read_files` into the files' contents. Raises SandboxDied."""
    if len(body) < 4 * count:
        raise SandboxDied(f"the init answered {len(body)} bytes for {count} files")
    found, start = [], 4 * count
    for size in struct.unpack_from(f">{count}I", body):
        found.append(body[start : start + size])
        start += size
    if start != len(body):
        raise SandboxDied("the init answered files of other sizes than it said")
    return tuple(found)


def encode_restore(entries: Sequence[FileEntry], contents: Mapping[str, bytes]) -> tuple[bytes, list[bytes]]:
    """Encode the bodies of `restore`: entries as JSON, and the files' bytes in their order. Raises FileRefused."""
    if len(entries) > MOST_ENTRIES:
        raise FileRefused(f"{len(entries)} entries, more than the {MOST_ENTRIES} of a workspace")
    files = []
    for entry in entries:
        if entry.kind is FileKind.file:
            content = contents.get(entry.path)
            if content is None or len(content) != entry.size:
                raise FileRefused(f"{entry.path!r}: its {entry.size} bytes are not given")
            files.append(content)
    names = [field.name for field in dataclasses.fields(FileEntry)]
    return json.dumps([{name: getattr(entry, name) for name in names} for entry in entries]).encode(), files


def _refuse_half_pairs(source: str) -> None:
    """Raise ValueError for a shell command with half of a surrogate pair: the shell would expand a ? in its place."""
    try:
        source.encode()
    except UnicodeEncodeError as error:
        half = ascii(source[error.start])
        raise ValueError(
            f"a shell command is text, and has {half} at {error.start}: half of a surrogate pair"
        ) from None


def call(command: Command, limits: SandboxLimits, *, alive: bool, prompt: bool) -> tuple[dict[str, Any], bytes, bytes]:
    """Encode an `exec` request: head, and body in two parts. `prompt`: the output is watched while it is written.
    Raises ValueError."""
    if command.kind is Kind.program and not command.argv:
        raise ValueError("a program's argv names at least the program")
    if command.kind is Kind.shell and not command.source.isascii():
        _refuse_half_pairs(command.source)
    source = command.source.encode(errors="replace")
    head: dict[str, Any] = {
        "op": "exec",
        "kind": command.kind,
        "argv": command.argv,
        "env": dict(command.env),
        "cwd": command.cwd,
        "silence_s": SILENCE_S,
    }
    head |= {"limits": dataclasses.asdict(limits), "source": len(source), "alive": alive, "prompt": prompt}
    head["agent"], head["keeps"] = command.agent, command.keeps
    return head, source, command.stdin


@contextlib.asynccontextmanager
async def running_after(delay_s: float, work: Callable[[], Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """Run `work` as an asyncio task from `delay_s` after the block's begin to its end. Most calls end before, and an
    asyncio task that is only created and cancelled costs a tenth of their time in the worker."""
    started: list[asyncio.Task[None]] = []
    timer = asyncio.get_running_loop().call_later(delay_s, lambda: started.append(asyncio.create_task(work())))
    try:
        yield
    finally:
        timer.cancel()
        for task in started:
            task.cancel()
            await asyncio.wait([task])


class Heartbeat:
    """Heartbeats of a worker to the init that runs one call."""

    def __init__(self) -> None:
        self._clock = asyncio.get_running_loop().time
        self._began = self._last = self._clock()
        self._longest_s = 0.0

    @property
    def has_stalled(self) -> bool:
        """True if there was a silence for which the init need not have waited."""
        return self._longest_s > SILENCE_S

    @property
    def took_s(self) -> float:
        """Seconds of the call, until its end or the latest heartbeat."""
        return self._last - self._began

    @contextlib.asynccontextmanager
    async def beating(self, channel: ControlChannel) -> AsyncIterator[None]:
        """Send heartbeats while the block runs."""
        async with running_after(BEAT_S, lambda: self._beat(channel)):
            try:
                yield
            finally:
                self._note()

    async def _beat(self, channel: ControlChannel) -> None:
        with contextlib.suppress(SandboxDied):  # the call raises it
            while True:
                self._note()
                await channel.send({"op": "beat"})
                await asyncio.sleep(BEAT_S)

    def _note(self) -> None:
        now = self._clock()
        self._longest_s, self._last = max(self._longest_s, now - self._last), now


HEALTH_S = 2.0
RESET_S = 5.0
FILES_S = 60.0
"""Time limit in seconds for reading or filling a whole workspace."""
LONG_BYTES = 1 << 18
"""Answers longer than this, in bytes, are checked in a thread."""
UNBOUNDED = 1 << 62
"""`disk_bytes` of a sandbox whose size is limited by its file systems alone."""

Found = TypeVar("Found")


class InitFiles:
    """The operations of a Sandbox that send one request and get one answer."""

    def __init__(self, control: socket.socket, disk_bytes: int) -> None:
        self.interpreter = False
        self._channel = ControlChannel(control)
        self._disk_bytes = disk_bytes
        self._asked: str | None = None
        """Operation in progress, or None."""
        self._evidence = UNKNOWN
        """Evidence about its end."""

    async def close(self) -> None:
        raise NotImplementedError

    async def read(self, path: str, *, most: int) -> bytes:
        most = min(most, MOST_BYTES)
        return await self.read_part(path, offset=0, size=most, most=most)

    async def read_part(self, path: str, *, offset: int, size: int, most: int) -> bytes:
        head = {"op": "read", "path": path, "most": most, "offset": offset, "size": size}
        return (await self._ask(head, most=size))[1]

    async def read_files(self, paths: Sequence[str], *, most: int) -> tuple[bytes, ...]:
        head = {"op": "read_files", "most": min(most, MOST_BYTES)}
        _, body = await self._ask(head, names(paths), most=most + 4 * len(paths))
        return await self._parse_or_close(split_files, body, len(paths))

    async def write(self, path: str, content: bytes, *, mode: int = 0o644, follow: bool = False) -> None:
        if len(content) > min(self._disk_bytes, MOST_BYTES):
            raise QuotaExceeded(f"{path!r}: {len(content)} bytes do not fit the workspace's {self._disk_bytes}")
        head = {"op": "write", "path": path, "mode": mode, "follow": follow, "disk_bytes": self._disk_bytes}
        await self._ask(head, content)

    async def index(self) -> tuple[FileEntry, ...]:
        head = {"op": "index", "disk_bytes": self._disk_bytes}
        _, body = await self._ask(head, most=INDEX_BYTES)
        return await self._parse_or_close(parse_index, body, self._disk_bytes)

    async def restore(self, entries: Sequence[FileEntry], contents: Mapping[str, bytes]) -> None:
        about, files = await asyncio.to_thread(encode_restore, entries, contents)
        if sum(map(len, files)) > min(self._disk_bytes, MOST_BYTES):
            raise QuotaExceeded(f"a workspace of more than {self._disk_bytes} bytes does not fit")
        await self._ask({"op": "restore", "disk_bytes": self._disk_bytes}, about, then=files)
        self.interpreter = False

    async def reset(self) -> bool:
        self.interpreter = False
        try:
            head, _ = await self._ask({"op": "reset"}, timeout_s=RESET_S)
        except (SandboxDied, FileRefused):
            return False
        return head == {"clean": True}

    async def healthy(self, *, timeout_s: float = HEALTH_S) -> bool:
        if self._asked is not None:
            return True  # it is busy, and its operation has a time limit of its own
        try:
            head, _ = await self._ask({"op": "health"}, timeout_s=timeout_s)
        except (SandboxDied, FileRefused):
            return False
        return head == {"healthy": True, "interpreter": self.interpreter}

    @contextlib.contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        if self._asked is not None:
            raise RuntimeError(f"{what} while {self._asked} is under way: a sandbox does one thing at a time")
        self._asked = what
        try:
            yield
        finally:
            self._asked = None

    async def _ask(
        self,
        head: dict[str, Any],
        *body: bytes,
        most: int = 0,
        then: Sequence[bytes] | None = None,
        timeout_s: float = FILES_S,
    ) -> tuple[dict[str, Any], bytes]:
        """Send one request and return the answer. `then` is sent after the init has agreed to the first part.

        Anything that interrupts this before the answer is there ends the sandbox, since the answer would be taken for
        the next one's. Raises FileRefused, SandboxDied."""
        try:
            with self._asking(head["op"]):
                async with asyncio.timeout(timeout_s):
                    await self._channel.send(head, *body)
                    if then is not None:
                        await self._channel.answer(0)
                        await self._channel.send({}, *then)
                    return await self._channel.answer(most)
        except QuotaExceeded:
            try:
                await self._check_room(self._disk_bytes)
            except SandboxDied as error:
                raise SandboxDied(str(error), await self._close_with_evidence(error)) from error
            raise
        except (FileRefused, RuntimeError):
            raise
        except (TimeoutError, SandboxDied) as error:
            said = str(error) or f"{head['op']} took more than {timeout_s:.0f} s"
            raise SandboxDied(said, await self._close_with_evidence(error)) from error
        except BaseException:
            await self.close()
            raise

    async def _check_room(self, disk_bytes: int) -> None:
        """Raise SandboxDied if a disk that the sandbox shares with others is full."""

    async def _close_with_evidence(self, error: Exception) -> Evidence:
        if isinstance(error, SandboxDied) and error.evidence.changed:
            self._evidence = dataclasses.replace(self._evidence, changed=error.evidence.changed)
        await self.close()
        return self._evidence

    async def _parse_or_close(self, check: Callable[[bytes, int], Found], body: bytes, about: int) -> Found:
        try:
            return await asyncio.to_thread(check, body, about) if len(body) > LONG_BYTES else check(body, about)
        except SandboxDied:
            await self.close()
            raise
