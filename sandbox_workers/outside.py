"""Calls that take no sandbox: the worker itself speaks to a server outside.

They are announced and answered as all calls are. The files of their session are not touched."""

from __future__ import annotations

import asyncio
from typing import NoReturn

from turnlog.sandbox_workers.protocol import SandboxUnavailable
from turnlog.schemas.ids import environment_digest

ENVIRONMENT = environment_digest({"backend": "none"})
"""Hash of the execution environment of such calls."""


class NoSandbox:
    """Place of a call that takes no sandbox: it can be cancelled, and serves nothing else."""

    proxy = None
    interpreter = False

    def __init__(self) -> None:
        self._task = asyncio.current_task()
        self.cancelled = False
        """True if the call was cancelled by the one that waits for its answer."""

    async def cancel(self) -> None:
        """Cancel the call."""
        self.cancelled = True
        if self._task is not None:
            self._task.cancel()

    async def exec(self, *_: object, **__: object) -> NoReturn:
        """Raise SandboxUnavailable, as every other method does."""
        raise SandboxUnavailable("this call takes no sandbox")

    read = read_part = write = index = read_files = restore = exec

    async def reset(self) -> bool:
        """Return False: there is nothing to reset."""
        return False

    async def healthy(self) -> bool:
        """Return False."""
        return False

    async def close(self) -> None:
        """See Sandbox."""
