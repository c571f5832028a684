"""A container as a sandbox: the init that local sandboxes have, spoken to through the daemon."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import logging
from typing import Any

from turnlog.sandbox_workers.backends.connection import InitSandbox
from turnlog.sandbox_workers.backends.docker.client import asked
from turnlog.sandbox_workers.backends.docker.stream import ContainerStream
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


class ContainerSandbox(InitSandbox):
    """See Sandbox."""

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
