"""Warm sandboxes in slots: a call or a durable session leases one; whatever is in doubt is replaced, never reused."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers.backends.bubblewrap import Bubblewrap
from turnlog.sandbox_workers.backends.subprocess_backend import Subprocess
from turnlog.sandbox_workers.protocol import NoBubblewrap, Provider, Sandbox, SandboxUnavailable, WorkspaceLost

log = logging.getLogger(__name__)

Lease = AbstractAsyncContextManager[Sandbox]


@dataclass(slots=True)
class Slot:
    """A place for one sandbox, with a host user of its own under root."""

    number: int
    sandbox: Sandbox | None = None
    disk_bytes: int = 0
    session: str | None = None
    """Whose files are in it; None: it is empty."""
    busy: bool = False
    last_use: int = 0


class Pool:
    """At most `slots` sandboxes; one caller at a time in each."""

    def __init__(self, provider: Provider, *, slots: int, fallback: bool = False) -> None:
        if slots < 1:
            raise ValueError(f"[sandbox] slots must be at least 1, got {slots}")
        self.provider = provider
        self.fallback = fallback
        """True when bubblewrap was asked for and this is not it."""
        self._slots = [Slot(number) for number in range(slots)]
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._uses = itertools.count(1)

    async def warm(self, count: int, disk_bytes: int) -> None:
        """Start sandboxes in the first `count` slots. Raises SandboxUnavailable."""
        for slot in self._slots[:count]:
            await self._renew(slot, disk_bytes)

    @asynccontextmanager
    async def lease(self, *, disk_bytes: int, session: str | None, begun: bool, fresh: bool) -> AsyncIterator[Sandbox]:
        """A sandbox for one call. `session` keeps its files for that session's next call; `begun` says that this
        session has files already; `fresh` asks for one that never ran anything. Waits for a free slot.
        Raises WorkspaceLost (begun, but its files are gone), SandboxUnavailable."""
        slot = await self._take(disk_bytes, session, begun)
        try:
            if slot.sandbox is None or slot.disk_bytes != disk_bytes or (fresh and slot.session is None):
                await self._renew(slot, disk_bytes)
            assert slot.sandbox is not None
            slot.session = session
            yield slot.sandbox
        except BaseException:
            await self._empty(slot)  # what ended the call may have left anything
            raise
        finally:
            try:
                if slot.session is None and slot.sandbox is not None:
                    await self._reset(slot)
            finally:
                self._give(slot)

    async def close(self) -> None:
        """End every sandbox."""
        await asyncio.gather(*(self._empty(slot) for slot in self._slots))

    async def _take(self, disk_bytes: int, session: str | None, begun: bool) -> Slot:
        while (slot := self._choose(disk_bytes, session, begun)) is None:
            await self._wait()
        slot.busy = True
        if slot.session is not None and slot.session != session:
            log.warning("slot %d: the files of idle session %s make room", slot.number, slot.session)
            await self._reset(slot)
        return slot

    def _choose(self, disk_bytes: int, session: str | None, begun: bool) -> Slot | None:
        held = [slot for slot in self._slots if session is not None and slot.session == session]
        if held and held[0].busy:
            raise RuntimeError(f"session {session} runs a call already: calls of one session go one after the other")
        if held:
            return held[0]
        if begun and session is not None:
            raise WorkspaceLost(f"session {session} has no sandbox in this worker any more")
        idle = [slot for slot in self._slots if not slot.busy]

        def preference(slot: Slot) -> tuple[bool, bool, int]:
            warm = slot.sandbox is not None and slot.disk_bytes == disk_bytes
            return slot.session is not None, not warm, slot.last_use if slot.session is not None else -slot.last_use

        return min(idle, key=preference, default=None)

    async def _wait(self) -> None:
        """Until a slot may be free; first come, first served."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._wake()  # the turn was ours already: pass it on
            raise

    def _wake(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    def _give(self, slot: Slot) -> None:
        slot.busy = False
        slot.last_use = next(self._uses)
        self._wake()

    async def _reset(self, slot: Slot) -> None:
        """Empty the slot's sandbox for anyone; replace it when it cannot be as new."""
        slot.session = None
        if slot.sandbox is None or await slot.sandbox.reset():
            return
        log.info("slot %d: the sandbox is not as new after its reset and is replaced", slot.number)
        try:
            await self._renew(slot, slot.disk_bytes)
        except SandboxUnavailable as error:
            log.warning("slot %d is empty until its next call: %s", slot.number, error)

    async def _renew(self, slot: Slot, disk_bytes: int) -> None:
        await self._empty(slot)
        slot.sandbox = await self.provider.start(slot.number, disk_bytes)
        slot.disk_bytes = disk_bytes

    async def _empty(self, slot: Slot) -> None:
        sandbox, slot.sandbox, slot.session = slot.sandbox, None, None
        if sandbox is not None:
            await sandbox.close()


@asynccontextmanager
async def opened(settings: SandboxSettings) -> AsyncIterator[Pool]:
    """A warm pool of the backend that the settings name; `subprocess` where bubblewrap cannot run, said loudly.
    Raises SandboxUnavailable."""
    provider, fallback = await choose(settings)
    pool = Pool(provider, slots=settings.slots, fallback=fallback)
    try:
        await pool.warm(settings.prewarm, settings.disk_bytes)
        yield pool
    finally:
        await pool.close()


async def choose(settings: SandboxSettings) -> tuple[Provider, bool]:
    """The backend, and whether it stands in for bubblewrap."""
    if settings.backend == "subprocess":
        return await Subprocess.open(first_uid=settings.first_uid), False
    try:
        return await Bubblewrap.open(first_uid=settings.first_uid), False
    except NoBubblewrap as error:
        log.warning("TOOLS RUN WITHOUT ISOLATION: subprocess and rlimits stand in for bubblewrap. %s", error)
        return await Subprocess.open(first_uid=settings.first_uid), True
