"""What a worker asks of an init beside running commands: files, health, a reset."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from turnlog.sandbox_workers.attribution import UNKNOWN, Evidence
from turnlog.sandbox_workers.backends import init_wire
from turnlog.sandbox_workers.backends.init_wire import MOST_BYTES, Channel
from turnlog.sandbox_workers.protocol import FileEntry, FileRefused, QuotaExceeded, SandboxDied

HEALTH_S = 2.0
RESET_S = 5.0
FILES_S = 60.0
"""For reading or filling a whole workspace."""
LONG_BYTES = 1 << 18
"""A longer answer is looked through in a thread."""
UNBOUNDED = 1 << 62
"""disk_bytes of a sandbox whose file systems alone know their size."""

Found = TypeVar("Found")


class InitFiles:
    """The part of a Sandbox that asks and gets one answer."""

    def __init__(self, control: socket.socket, disk_bytes: int) -> None:
        self.interpreter = False
        self._channel = Channel(control)
        self._disk_bytes = disk_bytes
        self._asked: str | None = None
        """What it is busy with."""
        self._evidence = UNKNOWN
        """Of its end."""

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
        _, body = await self._ask(head, init_wire.names(paths), most=most + 4 * len(paths))
        return await self._checked(init_wire.divided, body, len(paths))

    async def write(self, path: str, content: bytes, *, mode: int = 0o644, follow: bool = False) -> None:
        if len(content) > min(self._disk_bytes, MOST_BYTES):
            raise QuotaExceeded(f"{path!r}: {len(content)} bytes do not fit the workspace's {self._disk_bytes}")
        head = {"op": "write", "path": path, "mode": mode, "follow": follow, "disk_bytes": self._disk_bytes}
        await self._ask(head, content)

    async def index(self) -> tuple[FileEntry, ...]:
        head = {"op": "index", "disk_bytes": self._disk_bytes}
        _, body = await self._ask(head, most=init_wire.INDEX_BYTES)
        return await self._checked(init_wire.listed, body, self._disk_bytes)

    async def restore(self, entries: Sequence[FileEntry], contents: Mapping[str, bytes]) -> None:
        about, files = await asyncio.to_thread(init_wire.described, entries, contents)
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

    async def healthy(self) -> bool:
        if self._asked is not None:
            return True  # it is at work, which has a time limit of its own
        try:
            head, _ = await self._ask({"op": "health"}, timeout_s=HEALTH_S)
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
        """One question; `then` is sent when the init has agreed to it. Whatever ends it before its answer is there
        ends the sandbox, since the answer would be taken for that to the next one. Raises FileRefused, SandboxDied."""
        try:
            with self._asking(head["op"]):
                async with asyncio.timeout(timeout_s):
                    await self._channel.send(head, *body)
                    if then is not None:
                        await self._channel.answer(0)
                        await self._channel.send({}, *then)
                    return await self._channel.answer(most)
        except (FileRefused, RuntimeError):
            raise
        except (TimeoutError, SandboxDied) as error:
            said = str(error) or f"{head['op']} took more than {timeout_s:.0f} s"
            raise SandboxDied(said, await self._ended(error)) from error
        except BaseException:
            await self.close()
            raise

    async def _ended(self, error: Exception) -> Evidence:
        """Close it; what is known of its end."""
        if isinstance(error, SandboxDied) and error.evidence.changed:
            self._evidence = dataclasses.replace(self._evidence, changed=error.evidence.changed)
        await self.close()
        return self._evidence

    async def _checked(self, check: Callable[[bytes, int], Found], body: bytes, about: int) -> Found:
        try:
            return await asyncio.to_thread(check, body, about) if len(body) > LONG_BYTES else check(body, about)
        except SandboxDied:
            await self.close()
            raise
