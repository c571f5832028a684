"""Warm sandboxes in slots. A call or a durable session leases one; a doubtful sandbox is replaced, never reused.

Callers only wait for their place in the queue. Starting, resetting, checking and closing sandboxes is done by asyncio
tasks of the pool, so cancelling a caller interrupts none of it, and a caller that is done waits for none of it."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from turnlog.sandbox_workers.pooling.upkeep import (
    OPEN,
    Clock,
    Granted,
    LoopClock,
    PoolMetrics,
    Slot,
    SlotState,
    SlotWaiter,
    Upkeep,
    guesses,
    moves,
)
from turnlog.sandbox_workers.protocol import ImageMissing, Provider, Sandbox, SandboxUnavailable, Shape
from turnlog.schemas.types import BlobRef

log = logging.getLogger(__name__)
MAX_USES = 1000
"""Calls after which a sandbox is replaced, even if every reset was clean. What a reset cannot see (fragmented memory,
kernel objects) stays bounded, and starting another sandbox costs less than 0.1 % of the calls."""


class Pool:
    """A pool of at most `slots` sandboxes of one backend, each with one caller at a time."""

    def __init__(
        self, provider: Provider, *, slots: int, prewarm: int = 0, max_uses: int = MAX_USES, clock: Clock | None = None
    ) -> None:
        """Create a pool. `prewarm` is the number of sandboxes to keep ready, `max_uses` the number of leases before a
        sandbox is replaced."""
        if slots < 1:
            raise ValueError(f"[sandbox] slots must be at least 1, got {slots}")
        self.provider = provider
        self._slots = [Slot(number) for number in range(slots)]
        self._prewarm = min(prewarm, slots)
        self._clock = clock or LoopClock()
        self._metrics = PoolMetrics(provider.name, self._count, lambda: len(self._queue))
        self._upkeep = Upkeep(
            provider, self._metrics, self._clock, max_uses=max_uses,
            idle=self._idle, refuse=self._refuse, broken=self.fail, due=self._serve,
        )  # fmt: skip
        self._queue: deque[SlotWaiter] = deque()
        self._sessions: dict[str, Slot] = {}
        """Slots that belong to sessions: leased, held or checking."""
        self._asking: set[str] = set()
        """Sessions with a caller that waits or leases."""
        self._demand: Mapping[Shape, int] = {}
        self._usual: Shape | None = None
        self._uses = itertools.count(1)
        self._closer: asyncio.Task[None] | None = None
        self._defect: BaseException | None = None

    @asynccontextmanager
    async def lease(self, shape: Shape, *, session: str | None = None, fresh: bool = False) -> AsyncIterator[Lease]:
        """Lease a sandbox of the shape. It is empty unless it is the session's own (`Lease.held`).

        A `fresh` sandbox never ran anything for anyone else. Callers are served first come, first served; leaving the
        block waits for nothing. If the block raises, the sandbox is replaced. Raises SandboxUnavailable (with the
        number of failures in a row), ImageMissing; RuntimeError if the session has another call in this pool."""
        with self._alone(session):
            slot, held = await self._wait_for_slot(
                SlotWaiter(shape, session, fresh, asyncio.get_running_loop().create_future())
            )
            lease = Lease(slot.usable, held, slot.workspace if held else None, session)
            try:
                yield lease
            except BaseException:  # the cause may have left anything in the sandbox
                self._forget(slot)
                self._upkeep.replace(slot, "error")
                raise
            self._take_back(slot, lease)

    async def prefill(self, shape: Shape) -> None:
        """Start `prewarm` sandboxes of the shape, and keep that many ready as far as slots are not needed otherwise.
        Raises SandboxUnavailable, ImageMissing."""
        self._usual = shape
        starts = [self._upkeep.start(slot, shape) for slot in self._slots[: self._prewarm] if slot.state in OPEN]
        if tasks := [start for start in starts if start is not None]:
            await asyncio.wait(tasks)  # unlike gather, a cancelled wait does not cancel the tasks
        for slot in self._slots:
            if slot.error is not None:
                raise slot.error
        self._check_open()

    def expect(self, demand: Mapping[Shape, int]) -> None:
        """Prepare idle slots for the calls that wait in the worker's queue and will lease soon: `demand` is their
        number by shape."""
        self._demand = dict(demand)
        self._serve()

    def release(self, session: str) -> None:
        """Reset the session's slot, if it holds one, for others; the session will not come back here."""
        slot = self._sessions.get(session)
        if slot is not None and slot.state is SlotState.held:
            self._forget(slot)
            self._upkeep.reset(slot)

    async def check(self) -> None:
        """Check every idle sandbox, one after another, and replace dead ones before a call gets them."""
        for slot in self._slots:
            if slot.state in (SlotState.ready, SlotState.held) and (task := self._upkeep.check(slot)) is not None:
                await asyncio.wait([task])
        self._serve()

    def count_leaks(self, count: int) -> None:
        """Count leftovers that were found outside of sandboxes."""
        self._metrics.count_leaks(count)

    def snapshot(self) -> dict[str, object]:
        """Return slots by state and the counts since the start, for people."""
        return {
            "backend": self.provider.name,
            "slots": {str(state): self._count(state) for state in SlotState},
            "waiting": len(self._queue),
            **self._metrics.snapshot(),
            "errors": sorted({str(slot.error) for slot in self._slots if slot.error}),
        }

    def _count(self, state: SlotState) -> int:
        return sum(slot.state is state for slot in self._slots)

    async def close(self) -> None:
        """End every sandbox, also those that are starting or leased. All are ended when it returns, even if it was
        cancelled."""
        if self._closer is None:
            self._closer = asyncio.create_task(self._upkeep.close())
            self._turn_away(SandboxUnavailable("the pool is closed: the worker stops"))
        cancelled = False
        while not self._closer.done():
            try:
                await asyncio.shield(self._closer)
            except asyncio.CancelledError:
                cancelled = True
        self._closer.result()
        if cancelled:
            raise asyncio.CancelledError

    # -- waiting callers

    @contextmanager
    def _alone(self, session: str | None) -> Iterator[None]:
        """Ensure that the session has no other caller. Raises RuntimeError if it has."""
        self._check_open()
        if session is None:
            yield
            return
        if session in self._asking:
            raise RuntimeError(f"session {session} has a call already: calls of one session go one after the other")
        self._asking.add(session)
        try:
            yield
        finally:
            self._asking.discard(session)

    def _check_open(self) -> None:
        if self._defect is not None:
            raise self._defect
        if self._closer is not None:
            raise SandboxUnavailable("the pool is closed: the worker stops")

    async def _wait_for_slot(self, turn: SlotWaiter) -> Granted:
        began = self._clock.now()
        own = self._sessions.get(turn.session) if turn.session is not None else None
        if own is not None and own.shape != turn.shape:
            self.release(own.session or "")
            own = None
        if own is not None and own.state is SlotState.held:
            self._grant(turn, own, held=True)
        elif own is not None:
            own.owner = turn  # it is being checked
        else:
            self._queue.append(turn)
            self._serve()
        hit = turn.granted.done()
        try:
            granted = await turn.granted
        except asyncio.CancelledError:
            self._abandon(turn)
            raise
        self._metrics.count_lease(self._clock.now() - began, hit=hit)
        return granted

    def _grant(self, turn: SlotWaiter, slot: Slot, *, held: bool) -> None:
        slot.state = SlotState.leased
        slot.uses += 1
        slot.last_use = next(self._uses)
        slot.session = turn.session
        if turn.session is not None:
            self._sessions[turn.session] = slot
        turn.granted.set_result((slot, held))

    def _abandon(self, turn: SlotWaiter) -> None:
        """Take back the request of a caller that is gone; a slot that was already granted to it goes to the next
        caller, untouched."""
        if turn in self._queue:
            self._queue.remove(turn)
        for slot in self._slots:
            if slot.owner is turn:
                slot.owner = None
        if not turn.granted.cancelled() and turn.granted.exception() is None:
            slot, held = turn.granted.result()
            slot.uses -= 1
            self._idle(slot, SlotState.held if held else SlotState.ready)
        else:
            self._serve()

    def _take_back(self, slot: Slot, lease: Lease) -> None:
        slot.last_use = next(self._uses)
        if lease.kept:
            slot.workspace = lease.workspace
            self._idle(slot, SlotState.held)
        else:
            self._forget(slot)
            self._upkeep.reset(slot)

    def _serve(self) -> None:
        """Grant available slots, start the sandboxes that waiting callers lack, then prepare for expected calls."""
        if self._closer is not None or self._defect is not None:
            return
        may_start = self._upkeep.backoff.over
        for move in moves((turn for turn in self._queue if not turn.granted.done()), self._slots, may_start):
            if move.start:
                self._make(move.slot, move.turn.shape, fresh=move.turn.fresh)
            else:
                self._queue.remove(move.turn)
                self._grant(move.turn, move.slot, held=False)
        if not self._queue:
            for slot, shape in guesses(self._slots, self._demand, most=self._prewarm, may_start=may_start):
                self._make(slot, shape)
            self._refill()

    def _refill(self) -> None:
        """Bring the number of sandboxes back to `prewarm`, after starts that failed."""
        empty = [slot for slot in self._slots if slot.state in OPEN]
        lacking = self._prewarm - (len(self._slots) - len(empty))
        if self._usual is not None and self._upkeep.backoff.over(self._usual):
            for slot in empty[: max(0, lacking)]:
                self._make(slot, self._usual)

    def _make(self, slot: Slot, shape: Shape, *, fresh: bool = False) -> None:
        """Turn an idle slot into an empty sandbox of the shape, by the cheaper way."""
        held = slot.session is not None
        if held:
            log.debug(
                "%s slot %d: evicting idle session %s to free the slot", self.provider.name, slot.number, slot.session
            )
            self._forget(slot)
        if held and slot.shape == shape and not fresh:
            self._upkeep.reset(slot)
        else:
            self._upkeep.start(slot, shape)

    def _forget(self, slot: Slot) -> None:
        """Detach the slot from its session and workspace."""
        if slot.session is not None and self._sessions.get(slot.session) is slot:
            del self._sessions[slot.session]
        slot.session = slot.workspace = None

    # -- callbacks of the upkeep

    def _idle(self, slot: Slot, state: SlotState) -> None:
        owner, slot.owner, slot.state = slot.owner, None, state
        if owner is not None and owner.granted.done():  # it was cancelled, and handles that itself
            owner = None
        if state is SlotState.held and owner is not None:
            self._grant(owner, slot, held=True)
            return
        if state is not SlotState.held:
            self._forget(slot)
        if owner is not None:
            self._queue.appendleft(owner)
        self._serve()

    def _refuse(self, shape: Shape, error: Exception) -> None:
        """Report a failed start to waiting callers of the shape: to all if the image is missing, otherwise to the first
        one."""
        asked = [turn for turn in self._queue if turn.shape == shape and not turn.granted.done()]
        for turn in asked if isinstance(error, ImageMissing) else asked[:1]:
            self._queue.remove(turn)
            turn.granted.set_exception(error)

    def fail(self, error: BaseException) -> None:
        """Fail every caller, so that none waits for ever: a backend raised an error that its contract does not name."""
        self._defect = error
        self._turn_away(error)

    def _turn_away(self, error: BaseException) -> None:
        waiting = [*self._queue, *(slot.owner for slot in self._slots if slot.owner is not None)]
        self._queue.clear()
        for turn in waiting:
            if not turn.granted.done():
                turn.granted.set_exception(error)


@dataclass(slots=True, eq=False)
class Lease:
    """A sandbox leased for one call."""

    sandbox: Sandbox
    held: bool
    """True if the sandbox is this session's own, with its files, and its interpreter if one was started."""
    workspace: BlobRef | None
    """Workspace that the files correspond to, as last stored."""
    session: str | None
    kept: bool = False

    def keep(self, workspace: BlobRef | None) -> None:
        """Retain the sandbox for the session after this call, with the files of `workspace` in it. Raises ValueError if
        the lease has no session."""
        if self.session is None:
            raise ValueError("a lease without a session cannot be kept")
        self.workspace, self.kept = workspace, True
