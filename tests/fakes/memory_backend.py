"""A backend for tests that need no processes: workspaces are dictionaries, and a handful of commands act on them.

It keeps the contract of protocol.py for files, limits of time, output and disk, cancelling, reset and death. It
isolates nothing, since it runs nothing; no settings name it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import posixpath
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

from turnlog.infra.environments.workspaces import FileEntry, FileKind
from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers.protocol import (
    Command,
    Execution,
    FileMissing,
    FileRefused,
    Kind,
    OnOutput,
    OutputStream,
    QuotaExceeded,
    SandboxDied,
    SandboxError,
    Shape,
)
from turnlog.schemas.events import SandboxLimits, ToolStatus

Result = tuple[int, bytes, bytes]
"""Exit code, stdout, stderr; -1: cancelled."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Node:
    entry: FileEntry
    content: bytes


class Memory:
    """See Provider."""

    name = "memory"
    costly = False
    places = False
    sessions = False
    networks = frozenset({"none"})

    def __init__(self) -> None:
        self.started: list[tuple[int, Shape]] = []
        """Slot and shape of every sandbox that came up."""
        self.alive: set[MemorySandbox] = set()
        self.refuses: SandboxError | None = None
        """What `start` raises instead."""

    @classmethod
    async def open(cls, settings: SandboxSettings, *, ca: Path | None = None, cache: Path | None = None) -> Self:
        """See Provider; needs nothing of what it is given."""
        del settings, ca, cache
        return cls()

    async def start(self, slot: int, shape: Shape) -> MemorySandbox:
        await asyncio.sleep(0)
        if self.refuses is not None:
            raise self.refuses
        sandbox = MemorySandbox(self, shape)
        self.alive.add(sandbox)
        try:
            await asyncio.sleep(0)
        except BaseException:
            self.alive.discard(sandbox)
            raise
        self.started.append((slot, shape))
        return sandbox

    async def environment(self, shape: Shape) -> Mapping[str, str]:
        return {"backend": self.name, "image": shape.image or ""}

    async def close(self) -> None:
        """See Provider."""


class MemorySandbox:
    """See Sandbox."""

    def __init__(self, provider: Memory, shape: Shape) -> None:
        self.provider = provider
        self.number = len(provider.started)
        """Of the provider's, in order of their start."""
        self._shape = shape
        self._nodes: dict[str, _Node] = {}
        self.running: asyncio.Future[Result | None] | None = None
        self._closed = False
        self.proxy = None
        self.interpreter = False
        self.sticky = False
        """Its reset cannot prove that it is clean."""

    def die(self) -> None:
        """As if somebody had killed it."""
        self.provider.alive.discard(self)
        if self.running is not None and not self.running.done():
            self.running.set_exception(SandboxDied("it was killed"))

    async def exec(self, command: Command, limits: SandboxLimits, *, on_output: OnOutput | None = None) -> Execution:
        """See Sandbox. Knows true, false, echo, cat, touch, rm, ls, wc -c and sleep; anything else is not found."""
        self._check_alive()
        words = shlex.split(command.source) if command.kind is Kind.shell else list(command.argv)
        loop = asyncio.get_running_loop()
        began = loop.time()
        self.running = loop.create_future()
        timers = []
        try:
            if words[:1] == ["sleep"]:
                timers.append(loop.call_later(float(words[1]), _finish, self.running, (0, b"", b"")))
                timers.append(loop.call_later(limits.wall_s, _finish, self.running, None))
            else:
                loop.call_soon(_finish, self.running, self._done(words, command.stdin))
            result = await self.running
        except asyncio.CancelledError:
            await self.close()
            raise
        finally:
            self.running = None
            for timer in timers:
                timer.cancel()
        return _execution(result, limits, loop.time() - began, on_output)

    async def cancel(self) -> None:
        if self.running is not None:
            _finish(self.running, (-1, b"", b""))

    async def read(self, path: str, *, most: int) -> bytes:
        self._check_alive()
        node = self._nodes.get(_checked(path))
        if node is None or node.entry.kind is not FileKind.file:
            raise FileMissing(f"there is no file {path!r}")
        if len(node.content) > most:
            raise FileRefused(f"{path!r} has {len(node.content)} bytes, at most {most} are read")
        return node.content

    async def read_part(self, path: str, *, offset: int, size: int, most: int) -> bytes:
        return (await self.read(path, most=most))[offset : offset + size]

    async def write(self, path: str, content: bytes, *, mode: int = 0o644, follow: bool = False) -> None:
        self._check_alive()
        path, links = _checked(path), 0
        while follow and (there := self._nodes.get(path)) is not None:
            if there.entry.kind is not FileKind.link:
                mode = there.entry.mode
                break
            links += 1
            if links > len(self._nodes):
                raise FileRefused(f"{path!r}: too many links")
            path = _checked(posixpath.normpath(posixpath.join(posixpath.dirname(path), there.entry.target)))
        self._put({path: _file(path, content, mode)})

    async def index(self) -> tuple[FileEntry, ...]:
        self._check_alive()
        return tuple(self._nodes[path].entry for path in sorted(self._nodes))

    async def read_files(self, paths: Sequence[str], *, most: int) -> tuple[bytes, ...]:
        found = [await self.read(path, most=most) for path in paths]
        if sum(map(len, found)) > most:
            raise FileRefused(f"{len(found)} files have more than {most} bytes together")
        return tuple(found)

    async def restore(self, entries: Sequence[FileEntry], contents: Mapping[str, bytes]) -> None:
        self._check_alive()
        nodes = {}
        for entry in entries:
            content = contents[entry.path] if entry.kind is FileKind.file else b""
            nodes[_checked(entry.path)] = _Node(dataclasses.replace(entry, size=len(content)), content)
        before, self._nodes = self._nodes, {}
        try:
            self._put(nodes)
        except QuotaExceeded:
            self._nodes = before
            raise

    async def reset(self) -> bool:
        await asyncio.sleep(0)
        self._nodes.clear()
        return self in self.provider.alive and not self.sticky

    async def healthy(self) -> bool:
        await asyncio.sleep(0)
        return self in self.provider.alive

    async def close(self) -> None:
        """See Sandbox. Like a real one, it takes its time, and a second close does not look at what became of the
        first."""
        if not self._closed:
            self._closed = True
            await asyncio.sleep(0)
            self.die()

    def _check_alive(self) -> None:
        if self not in self.provider.alive:
            raise SandboxDied("it is closed")

    def _put(self, nodes: Mapping[str, _Node]) -> None:
        parents = {str(above): _folder(str(above)) for path in nodes for above in list(Path(path).parents)[:-1]}
        whole = {**parents, **self._nodes, **nodes}
        size = sum(len(node.content) for node in whole.values())
        if size > self._shape.disk_bytes:
            raise QuotaExceeded(f"{size} bytes do not fit: disk_bytes is {self._shape.disk_bytes}")
        self._nodes = whole

    def _done(self, words: Sequence[str], stdin: bytes) -> Result:
        name, arguments = (words[0], words[1:]) if words else ("", [])
        match name:
            case "true" | "false":
                return int(name == "false"), b"", b""
            case "echo":
                return 0, " ".join(arguments).encode() + b"\n", b""
            case "touch":
                self._put({_checked(path): _file(path, b"", 0o644) for path in arguments if path not in self._nodes})
                return 0, b"", b""
            case "rm":
                self._nodes = {path: node for path, node in self._nodes.items() if path not in arguments}
                return 0, b"", b""
            case "ls":
                return 0, "".join(f"{path}\n" for path in sorted(self._nodes)).encode(), b""
            case "cat" | "wc":
                return self._shown(name, [word for word in arguments if word != "-c"], stdin)
        return 127, b"", f"{name}: not found\n".encode()

    def _shown(self, name: str, paths: Iterable[str], stdin: bytes) -> Result:
        text = b""
        for path in paths:
            if path not in self._nodes:
                return 1, b"", f"{name}: {path}: no such file\n".encode()
            text += self._nodes[path].content
        text = text or stdin
        return 0, text if name == "cat" else f"{len(text)}\n".encode(), b""


def _finish(running: asyncio.Future[Result | None], result: Result | None) -> None:
    if not running.done():
        running.set_result(result)


def _execution(
    result: Result | None, limits: SandboxLimits, duration_s: float, on_output: OnOutput | None
) -> Execution:
    if result is None:
        return Execution(ToolStatus.timeout, "wall_s", None, b"", duration_s, 0.0)
    code, out, err = result
    for stream, chunk in ((OutputStream.stdout, out), (OutputStream.stderr, err)):
        if chunk and on_output is not None:
            on_output(stream, chunk[: limits.output_bytes])
    output = out + err
    if code < 0:
        return Execution(ToolStatus.cancelled, "cancelled", None, b"", duration_s, 0.0)
    if len(output) > limits.output_bytes:
        cut = output[: limits.output_bytes]
        return Execution(ToolStatus.resource_limit, "output_bytes", None, cut, duration_s, 0.0)
    return Execution(ToolStatus.tool_error if code else ToolStatus.ok, "", code, output, duration_s, 0.0)


def _checked(path: str) -> str:
    """Raises FileRefused."""
    parts = path.split("/")
    if path.startswith("/") or not path or "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise FileRefused(f"{path!r} is no path of the workspace")
    return path


def _file(path: str, content: bytes, mode: int) -> _Node:
    return _Node(FileEntry(path=path, kind=FileKind.file, mode=mode, size=len(content)), content)


def _folder(path: str) -> _Node:
    return _Node(FileEntry(path=path, kind=FileKind.folder, mode=0o755), b"")
