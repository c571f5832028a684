"""A sandbox in a machine: kept alive, reset with proof, and ended."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
from typing import TYPE_CHECKING

from turnlog.plugins.e2b.service import REQUEST_S, await_answer, describe_error
from turnlog.plugins.e2b.stream import E2bStream
from turnlog.sandbox_workers.backends.connection import InitSandbox
from turnlog.sandbox_workers.protocol import (
    Command,
    Execution,
    Kind,
    OnOutput,
    SandboxDied,
    SandboxError,
    SandboxUnavailable,
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
        self.proxy = self._stream.tunnels.listener if self._stream.tunnels else None
        self._keeping = asyncio.create_task(self._keep())
        self._as_new = await self._traces()
        if self._as_new is None:
            raise SandboxDied("the template's folders for temporary files cannot be looked at")

    async def exec(self, command: Command, limits: SandboxLimits, *, on_output: OnOutput | None = None) -> Execution:
        if (tunnels := self._stream.tunnels) is None:
            return await super().exec(command, limits, on_output=on_output)
        tunnels.begin_call()
        try:
            return await super().exec(command, limits, on_output=on_output)
        finally:
            tunnels.end_call()

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
        if self._stream.ended_by_signal and await self._machine_runs():
            self._evidence = dataclasses.replace(self._evidence, killed=True)
        await super().close()
        await self._stream.close()
        await end_machine(self.machine)

    async def _machine_runs(self) -> bool:
        try:
            return await await_answer(self.machine.is_running(request_timeout=CLOSE_S))
        except SandboxUnavailable:
            return False

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
