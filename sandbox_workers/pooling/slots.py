"""Slots of a pool, the callers that wait for them, and the choice of which slot serves whom next. No clock, no I/O.

A slot is a place for one sandbox, with a host user of its own under root, and a state."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from turnlog.sandbox_workers.protocol import Sandbox, Shape
from turnlog.schemas.types import BlobRef


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
    have = Counter(slot.shape for slot in slots if slot.state in IDLE)
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
