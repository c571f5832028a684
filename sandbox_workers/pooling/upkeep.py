"""Slots of a pool: which one serves whom next, their background maintenance, and the metrics of a pool.

A slot is a place for one sandbox, with a host user of its own under root, and a state. `moves` and `guesses` choose
slots, without clock and I/O. Maintenance is start, reset, replace, check and close; each action is an asyncio task of
the pool, not of a caller. Metrics go to Prometheus, labelled by backend, and to the table of `turnlog sandbox pool`.
Failed starts of a shape are followed by pauses that double up to a limit."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import Counter as Tally
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from prometheus_client import Counter, Gauge, Histogram

from turnlog.sandbox_workers.protocol import ImageMissing, Provider, Sandbox, SandboxUnavailable, Shape
from turnlog.schemas.types import BlobRef

log = logging.getLogger(__name__)


class SlotState(StrEnum):
    """State of a slot."""

    empty = "empty"
    """No sandbox."""
    starting = "starting"
    """The old sandbox is being closed and one of `shape` started."""
    ready = "ready"
    """A sandbox in its initial state waits for a call."""
    leased = "leased"
    """A call uses the sandbox."""
    held = "held"
    """Idle, with the files of `session`."""
    resetting = "resetting"
    """The last call is over; its leftovers are being removed."""
    checking = "checking"
    """Idle, and being checked for whether it still answers."""
    failed = "failed"
    """Empty, because the last start failed."""


@dataclass(slots=True, eq=False)
class Slot:
    """A slot of a pool. Whoever sets `state` to starting, leased, resetting or checking owns the slot until the next
    change."""

    number: int
    state: SlotState = SlotState.empty
    shape: Shape | None = None
    """Shape of the sandbox that is in the slot or being started."""
    sandbox: Sandbox | None = None
    session: str | None = None
    """Session whose files are in the sandbox, by the worker's name for it."""
    workspace: BlobRef | None = None
    """Workspace that the files of `session` correspond to, as last stored."""
    uses: int = 0
    """Number of leases of this sandbox."""
    last_use: int = 0
    """Counter that grows with every use of any slot; larger means more recent."""
    owner: SlotWaiter | None = None
    """Caller of `session` that arrived while the slot was `checking`."""
    task: asyncio.Task[None] | None = None
    """Asyncio task that starts, resets or checks the sandbox."""
    error: Exception | None = None
    """Cause of the state `failed`."""

    @property
    def usable(self) -> Sandbox:
        """The sandbox of a slot that has one."""
        assert self.sandbox is not None, self
        return self.sandbox


Granted = tuple[Slot, bool]
"""The slot, and whether the session's files are in it."""


OPEN = frozenset({SlotState.empty, SlotState.failed})


COMING = frozenset({SlotState.starting, SlotState.resetting, SlotState.checking})


@dataclass(slots=True, eq=False)
class SlotWaiter:
    """A caller waiting for a sandbox: its requirements, and a future for the slot."""

    shape: Shape
    session: str | None
    fresh: bool
    granted: asyncio.Future[Granted]


@dataclass(frozen=True, slots=True)
class Move:
    """Action for a caller: lease it the slot as it is, or, with `start`, make the slot into its shape first."""

    turn: SlotWaiter
    slot: Slot
    start: bool


def moves(queue: Iterable[SlotWaiter], slots: Iterable[Slot], may_start: Callable[[Shape], bool]) -> list[Move]:
    """Return the actions that are possible now, first come, first served. Each caller reserves one slot, possibly one
    that is still coming up, so that no two sandboxes are started for one need. `may_start` returns False while a shape
    backs off."""
    free = [slot for slot in slots if slot.state is not SlotState.leased]
    free = [slot for slot in free if slot.state is not SlotState.checking or slot.session is None]
    found = []
    for turn in queue:
        if not free:
            break
        ranked = [(rank, slot) for slot in free if (rank := _rank(turn, slot, startable=may_start(turn.shape)))]
        if not ranked:
            continue
        _, slot = min(ranked, key=lambda each: each[0])
        free.remove(slot)
        if slot.state not in COMING:
            found.append(Move(turn, slot, start=not _fits(turn, slot)))
    return found


def _rank(turn: SlotWaiter, slot: Slot, *, startable: bool) -> tuple[int, int] | None:
    """Rank how well the slot serves the caller, smaller is better; None if it cannot now. Held slots come last, the
    longest idle first; those with an interpreter last of all, because only their sandbox holds its state."""
    coming = slot.state in COMING
    if _fits(turn, slot):
        return (1, 0) if coming else (0, -slot.last_use)
    if not startable:
        return None
    if slot.state is SlotState.held:
        return 6 if slot.usable.interpreter else 5, slot.last_use
    if coming:
        return 4, 0
    return 2 if slot.state in OPEN else 3, slot.last_use


def _fits(turn: SlotWaiter, slot: Slot) -> bool:
    """Return whether the slot is, or is becoming, an empty sandbox of the shape; for `fresh` callers, one that never
    ran anything."""
    if slot.shape != turn.shape:
        return False
    if slot.state is SlotState.starting:
        return True
    if slot.state is SlotState.ready or (slot.state is SlotState.checking and slot.session is None):
        return not (turn.fresh and slot.uses)
    return slot.state is SlotState.resetting and not turn.fresh


IDLE = frozenset({SlotState.ready, SlotState.starting, SlotState.resetting})


def guesses(
    slots: Sequence[Slot], demand: Mapping[Shape, int], *, most: int, may_start: Callable[[Shape], bool]
) -> list[tuple[Slot, Shape]]:
    """Choose slots to start anew, and their shapes. The shape with the largest deficit gets an empty slot (while fewer
    than `most` sandboxes are idle), else a ready slot whose shape has a surplus. Held slots are never chosen."""
    have = Tally(slot.shape for slot in slots if slot.state in IDLE)
    empty = [slot for slot in slots if slot.state in OPEN]
    ready = sorted((slot for slot in slots if slot.state is SlotState.ready), key=lambda slot: slot.last_use)
    found: list[tuple[Slot, Shape]] = []
    while lacking := [shape for shape, count in demand.items() if count > have[shape] and may_start(shape)]:
        shape = max(lacking, key=lambda each: demand[each] - have[each])
        spare = [slot for slot in ready if slot.shape is None or have[slot.shape] > demand.get(slot.shape, 0)]
        if empty and sum(have.values()) < most:
            slot = empty.pop(0)
        elif spare:
            slot = spare[0]
            ready.remove(slot)
            have[slot.shape] -= 1
        else:
            break
        have[shape] += 1
        found.append((slot, shape))
    return found


HITS = Counter("turnlog_sandbox_pool_hits", "Leases that found their sandbox ready", ["backend"])
MISSES = Counter("turnlog_sandbox_pool_misses", "Leases that waited for a slot or a start", ["backend"])
WAIT = Histogram(
    "turnlog_sandbox_pool_wait_seconds", "Time from requesting a sandbox to having it", ["backend"],
    buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)  # fmt: skip
WAITING = Gauge("turnlog_sandbox_pool_waiting", "Callers waiting for a sandbox", ["backend"])
RENEWALS = Counter(
    "turnlog_sandbox_pool_renewals",
    "Sandboxes replaced: died | unclean | error | max_uses | shape",
    ["backend", "reason"],
)
FAILURES = Counter("turnlog_sandbox_pool_failures", "Sandbox starts that failed", ["backend"])
LEAKS = Counter("turnlog_sandbox_pool_leaks", "Leftovers found by a reset or by the sweep", ["backend"])
SLOTS = Gauge("turnlog_sandbox_pool_slots", "Slots by state", ["backend", "state"])
REASONS = ("died", "unclean", "error", "max_uses", "shape")
"""Reasons for replacing a sandbox: it was gone; its reset was not proved clean; its call ended in an exception; it
reached `max_uses`; its slot was needed for another shape."""
KEPT = 1000
"""Number of waits from which the table's percentiles are computed."""


class PoolMetrics:
    """Metrics of one pool."""

    def __init__(self, backend: str, slots: Callable[[SlotState], int], waiting: Callable[[], int]) -> None:
        """Register the metrics. `slots` returns the number of slots in a state, `waiting` the number of callers; both
        are called at each scrape."""
        self._renewal = {reason: RENEWALS.labels(backend, reason) for reason in REASONS}
        self._wait = WAIT.labels(backend)
        self._counters = {
            name: counter.labels(backend)
            for name, counter in (("hits", HITS), ("misses", MISSES), ("leaks", LEAKS), ("failures", FAILURES))
        }
        for state in SlotState:
            SLOTS.labels(backend, state).set_function(functools.partial(slots, state))
        WAITING.labels(backend).set_function(waiting)
        self._counts: Tally[str] = Tally()
        self._renewals: Tally[str] = Tally()
        self._waits: deque[float] = deque(maxlen=KEPT)

    def count_lease(self, wait_s: float, *, hit: bool) -> None:
        """Count a lease that a caller waited `wait_s` seconds for."""
        self._add("hits" if hit else "misses", 1)
        self._wait.observe(wait_s)
        self._waits.append(wait_s)

    def count_renewal(self, reason: str) -> None:
        """Count a replaced sandbox, for one of REASONS. `unclean` is also counted as a leak, one that was caught."""
        self._renewal[reason].inc()
        self._renewals[reason] += 1
        if reason == "unclean":
            self.count_leaks(1)

    def count_leaks(self, count: int) -> None:
        """Count leftovers."""
        self._add("leaks", count)

    def count_failure(self) -> None:
        """Count a failed start."""
        self._add("failures", 1)

    def snapshot(self) -> dict[str, object]:
        """Return the counts and wait percentiles, for people."""
        waits = sorted(self._waits)
        shares = {"p50": 0.5, "p99": 0.99}
        return {
            **{name: self._counts[name] for name in self._counters},
            "renewals": dict(self._renewals),
            "wait_ms": {name: round(_at(waits, share) * 1e3, 3) for name, share in shares.items()},
        }

    def _add(self, name: str, count: int) -> None:
        self._counters[name].inc(count)
        self._counts[name] += count


def _at(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


HEALTHY_S = 5.0
"""Seconds that a sandbox gets to answer a health check."""
Work = Callable[[], Coroutine[Any, Any, None]]

FIRST_S = 0.25
LONGEST_S = 30.0


class Upkeep:
    """Owner of every slot in a state of slots.COMING, and of every live sandbox."""

    def __init__(
        self,
        provider: Provider,
        metrics: PoolMetrics,
        clock: Clock,
        *,
        max_uses: int,
        idle: Callable[[Slot, SlotState], None],
        refuse: Callable[[Shape, Exception], None],
        broken: Callable[[BaseException], None],
        due: Callable[[], None],
    ) -> None:
        """Create it with its callbacks: `idle` when it is done with a slot, which is in the given state then; `refuse`
        when a shape did not start; `broken` when a backend raised an error that its contract does not name; `due` when
        a failed shape may be tried again."""
        self._provider = provider
        self._metrics = metrics
        self._max_uses = max_uses
        self._idle = idle
        self._refuse = refuse
        self._broken = broken
        self._live: set[Sandbox] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._endings: set[asyncio.Task[None]] = set()
        self._closing = False
        self.backoff = Backoff(clock, due)

    def start(self, slot: Slot, shape: Shape) -> asyncio.Task[None] | None:
        """Close the sandbox in the slot and start one of the shape. Return None while closing."""
        if slot.sandbox is not None:
            self._metrics.count_renewal("shape")
        slot.shape = shape
        return self._begin(slot, SlotState.starting, lambda: self._renew(slot, shape))

    def reset(self, slot: Slot) -> None:
        """Empty the slot's sandbox for anyone. Replace it if that is not proved, or if it reached `max_uses`."""
        self._begin(slot, SlotState.resetting, lambda: self._reset_slot(slot))

    def replace(self, slot: Slot, reason: str) -> None:
        """Replace the slot's sandbox by another of the same shape."""
        self._begin(slot, SlotState.resetting, lambda: self._replace_sandbox(slot, reason))

    def check(self, slot: Slot) -> asyncio.Task[None] | None:
        """Check an idle sandbox and replace it if it does not answer. Return None while closing."""
        state = slot.state
        return self._begin(slot, SlotState.checking, lambda: self._check_slot(slot, state))

    async def close(self) -> None:
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(self._end(sandbox) for sandbox in tuple(self._live)), *self._endings)
        await self.backoff.close()

    def _begin(self, slot: Slot, state: SlotState, work: Work) -> asyncio.Task[None] | None:
        if self._closing:
            return None
        slot.state = state
        task = asyncio.create_task(work())
        self._tasks.add(task)
        task.add_done_callback(self._on_task_end)
        return task

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broken(error)

    async def _reset_slot(self, slot: Slot) -> None:
        if not await slot.usable.reset():
            await self._replace_sandbox(slot, "unclean" if await self._well(slot.usable) else "died")
        elif slot.uses >= self._max_uses:
            await self._replace_sandbox(slot, "max_uses")
        else:
            self._idle(slot, SlotState.ready)

    async def _check_slot(self, slot: Slot, state: SlotState) -> None:
        if await self._well(slot.usable):
            self._idle(slot, state)
        else:
            await self._replace_sandbox(slot, "died")

    async def _well(self, sandbox: Sandbox) -> bool:
        try:
            async with asyncio.timeout(HEALTHY_S):
                return await sandbox.healthy()
        except TimeoutError:
            return False

    async def _replace_sandbox(self, slot: Slot, reason: str) -> None:
        assert slot.shape is not None
        log.info("%s slot %d: replacing its sandbox: %s", self._provider.name, slot.number, reason)
        self._metrics.count_renewal(reason)
        await self._renew(slot, slot.shape)

    async def _renew(self, slot: Slot, shape: Shape) -> None:
        slot.state, slot.error, slot.uses = SlotState.starting, None, 0
        sandbox, slot.sandbox = slot.sandbox, None
        if sandbox is not None:
            await self._end(sandbox)
        try:
            slot.sandbox = await self._provider.start(slot.number, shape)
        except ImageMissing as error:
            slot.shape = None
            self._refuse(shape, error)
            self._idle(slot, SlotState.empty)
        except SandboxUnavailable as error:
            self._handle_start_failure(slot, shape, error)
        else:
            self._live.add(slot.sandbox)
            self.backoff.note_success(shape)
            self._idle(slot, SlotState.ready)

    def _handle_start_failure(self, slot: Slot, shape: Shape, error: SandboxUnavailable) -> None:
        failures, pause_s = self.backoff.note_failure(shape)
        said = f"{error} (failure {failures} in a row; next attempt for this kind in {pause_s:g} s)"
        log.warning("%s slot %d: no sandbox started: %s", self._provider.name, slot.number, said)
        self._metrics.count_failure()
        slot.shape, slot.error = None, error
        self._refuse(shape, type(error)(said))
        self._idle(slot, SlotState.failed)

    async def _end(self, sandbox: Sandbox) -> None:
        """Close the sandbox, shielded from cancellation: a second close would skip what an interrupted one had left."""
        ending = asyncio.create_task(sandbox.close())
        self._live.discard(sandbox)
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)
        await asyncio.shield(ending)


class Clock(Protocol):
    """A clock that tests can control."""

    def now(self) -> float:
        """Return seconds since an arbitrary moment."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait for that many seconds."""
        ...


class LoopClock:
    """The clock of the event loop."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


@dataclass(slots=True)
class _Pause:
    failures: int
    timer: asyncio.Task[None]


class Backoff:
    """Pauses before shapes are started again after failures. `due` is called when a pause is over."""

    def __init__(self, clock: Clock, due: Callable[[], None]) -> None:
        self._clock = clock
        self._due = due
        self._pauses: dict[Shape, _Pause] = {}

    def note_failure(self, shape: Shape) -> tuple[int, float]:
        """Note a failed start. Return the number of failures in a row and the pause in seconds that begins."""
        before = self._pauses.get(shape)
        failures = 1 if before is None else before.failures + 1
        if before is not None:
            before.timer.cancel()
        pause_s = min(LONGEST_S, FIRST_S * 2.0 ** min(failures - 1, 20))
        self._pauses[shape] = _Pause(failures, asyncio.create_task(self._sleep(pause_s)))
        return failures, pause_s

    def note_success(self, shape: Shape) -> None:
        """Forget the failures of the shape."""
        if (pause := self._pauses.pop(shape, None)) is not None:
            pause.timer.cancel()

    def over(self, shape: Shape) -> bool:
        """Return whether no pause runs for the shape."""
        pause = self._pauses.get(shape)
        return pause is None or pause.timer.done()

    async def close(self) -> None:
        timers = [pause.timer for pause in self._pauses.values()]
        self._pauses.clear()
        for timer in timers:
            timer.cancel()
        await asyncio.gather(*timers, return_exceptions=True)

    async def _sleep(self, pause_s: float) -> None:
        await self._clock.sleep(pause_s)
        asyncio.get_running_loop().call_soon(self._due)  # called after this task is done, so that `over` is True
