"""A session's files: put into the sandbox that its next call got, stored again after the call."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from turnlog.infra.blobs import StoreUnavailable
from turnlog.sandbox_workers.pooling.pool import Lease
from turnlog.sandbox_workers.protocol import InterpreterLost, WorkspaceLost
from turnlog.sandbox_workers.workspaces.store import Workspaces
from turnlog.schemas.events import ToolCallRequested
from turnlog.schemas.types import BlobRef

log = logging.getLogger(__name__)

PATIENCE_S = 60.0
"""How long a store may be away before the worker ends: the session's files are nowhere but here meanwhile."""
FIRST_PAUSE_S = 0.1
T = TypeVar("T")


class SessionFiles:
    """Of one worker's sessions."""

    def __init__(self, workspaces: Workspaces, *, patience_s: float = PATIENCE_S) -> None:
        self._workspaces = workspaces
        self._patience_s = patience_s

    async def before(self, request: ToolCallRequested) -> BlobRef | None:
        """What the session's files are when this call does not run: those that it names; of a durable session that
        has not begun, none. None: nobody knows, or nobody asks. Raises StoreUnavailable."""
        if request.workspace is not None or not request.sandbox.durable_workspace or request.call_seq > 0:
            return request.workspace
        return await self._patiently(self._workspaces.empty)

    async def without(self, request: ToolCallRequested, *, lost: bool) -> BlobRef | None:
        """What the session's files are when this call's are not kept: those from before it. The interpreter ended with
        the call, whose answer says so: a later call starts a new one; `lost`: it was gone before, which stays noted.
        Raises WorkspaceLost, WorkspaceCorrupt, StoreUnavailable."""
        before = await self.before(request)
        if before is None or lost:
            return before
        return await self._patiently(lambda: self._workspaces.without_interpreter(before))

    async def place(self, lease: Lease, request: ToolCallRequested, *, disk_bytes: int, interpreter: bool) -> bool:
        """Have the files that the request names, and no others, in the leased sandbox; True when a persistent
        interpreter belonged to them that is gone. `interpreter`: the call needs it.
        Raises WorkspaceLost, WorkspaceCorrupt, InterpreterLost, QuotaExceeded, SandboxDied, StoreUnavailable."""
        wanted = request.workspace
        if wanted is None:
            if request.sandbox.durable_workspace and request.call_seq > 0:
                raise WorkspaceLost(f"call {request.call_seq} of session {request.session_id} names no workspace")
            if lease.held:  # by an attempt at this very call, which has left something there
                await lease.sandbox.restore((), {})
            return False
        if not lease.held or lease.workspace != wanted:
            await self._patiently(lambda: self._workspaces.restore(lease.sandbox, wanted, disk_bytes=disk_bytes))
            lease.workspace = wanted
        if lease.sandbox.interpreter or not (await self._patiently(lambda: self._workspaces.open(wanted))).interpreter:
            return False
        if interpreter:
            raise InterpreterLost(
                f"the interpreter of session {request.session_id} went with its sandbox; its files are here"
            )
        return True

    async def keep(self, lease: Lease, request: ToolCallRequested, *, disk_bytes: int, lost: bool) -> BlobRef | None:
        """Store what the call has left. `lost`: an interpreter that was gone before stays noted.
        Raises QuotaExceeded, FileRefused, SandboxDied, StoreUnavailable."""
        if not request.sandbox.durable_workspace:
            return request.workspace
        alive = lease.sandbox.interpreter or lost
        return await self._patiently(
            lambda: self._workspaces.snapshot(lease.sandbox, request.workspace, most=disk_bytes, interpreter=alive)
        )

    async def _patiently(self, act: Callable[[], Awaitable[T]]) -> T:
        """Again and again while the store is away."""
        loop = asyncio.get_running_loop()
        gives_up, pause = loop.time() + self._patience_s, FIRST_PAUSE_S
        while True:
            try:
                return await act()
            except StoreUnavailable as error:
                if loop.time() + pause > gives_up:
                    raise
                log.warning("a workspace waits for the store: %s", error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, 5.0)
