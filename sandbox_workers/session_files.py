"""Files of a session: put into the sandbox of its next call, and stored after the call."""

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
"""Seconds that the store may be unavailable before the worker ends. Meanwhile the session's files exist nowhere but
here."""
FIRST_PAUSE_S = 0.1
T = TypeVar("T")


class SessionFiles:
    """Puts a session's files into the sandbox of its next call, and stores them after the call."""

    def __init__(self, workspaces: Workspaces) -> None:
        self._workspaces = workspaces

    async def before(self, request: ToolCallRequested) -> BlobRef | None:
        """Return the session's workspace if this call does not run: the one that the request names; for a durable
        session that has not begun, the empty one. None if it is unknown, or if the session is not durable. Raises
        StoreUnavailable."""
        if request.workspace is not None or not request.sandbox.durable_workspace or request.call_seq > 0:
            return request.workspace
        return await self._patiently(self._workspaces.empty)

    async def without(self, request: ToolCallRequested, *, lost: bool) -> BlobRef | None:
        """Return the session's workspace if this call's files are not stored: the one from before it.

        The interpreter ended with the call, whose answer reports it, so the workspace is marked as having none and a
        later call starts a new one. With `lost` the interpreter was gone before the call, and the mark that there was
        one stays. Raises WorkspaceLost, WorkspaceCorrupt, StoreUnavailable."""
        before = await self.before(request)
        if before is None or lost:
            return before
        return await self._patiently(lambda: self._workspaces.without_interpreter(before))

    async def place(self, lease: Lease, request: ToolCallRequested, *, disk_bytes: int, interpreter: bool) -> bool:
        """Put exactly the files that the request names into the leased sandbox. Return True if a persistent interpreter
        belonged to them that is gone. `interpreter`: whether the call needs it. Raises WorkspaceLost, WorkspaceCorrupt,
        InterpreterLost, QuotaExceeded, SandboxDied, StoreUnavailable."""
        wanted = request.workspace
        if wanted is None:
            if request.sandbox.durable_workspace and request.call_seq > 0:
                raise WorkspaceLost(f"call {request.call_seq} of session {request.session_id} names no workspace")
            if lease.held:  # an earlier attempt at this call has left files there
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

    async def stateful(self, lease: Lease, request: ToolCallRequested, *, leaves_state: bool) -> bool:
        """Return whether the sandbox's interpreter has state that a new one would lack: of earlier calls, or of this
        one (`leaves_state`). Raises WorkspaceLost, WorkspaceCorrupt, StoreUnavailable."""
        if not lease.sandbox.interpreter:
            return False
        before = request.workspace
        return leaves_state or (
            before is not None and (await self._patiently(lambda: self._workspaces.open(before))).interpreter
        )

    async def keep(
        self, lease: Lease, request: ToolCallRequested, *, disk_bytes: int, lost: bool, leaves_state: bool
    ) -> BlobRef | None:
        """Store the files that the call left. `lost`: an interpreter was gone before the call, and its mark in the
        workspace stays. Raises QuotaExceeded, FileRefused, SandboxDied, StoreUnavailable."""
        if not request.sandbox.durable_workspace:
            return request.workspace
        alive = lost or await self.stateful(lease, request, leaves_state=leaves_state)
        return await self._patiently(
            lambda: self._workspaces.snapshot(lease.sandbox, request.workspace, most=disk_bytes, interpreter=alive)
        )

    async def _patiently(self, act: Callable[[], Awaitable[T]]) -> T:
        """Repeat `act` while the store is unavailable, for PATIENCE_S at most. Raises StoreUnavailable after
        that."""
        loop = asyncio.get_running_loop()
        gives_up, pause = loop.time() + PATIENCE_S, FIRST_PAUSE_S
        while True:
            try:
                return await act()
            except StoreUnavailable as error:
                if loop.time() + pause > gives_up:
                    raise
                log.warning("waiting for the store to save or load a workspace: %s", error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, 5.0)
