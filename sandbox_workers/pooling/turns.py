"""Callers of a pool that wait for a sandbox, and which slot should serve the next of them. No clock, no I/O."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from turnlog.sandbox_workers.pooling.slots import Slot, SlotState
from turnlog.sandbox_workers.protocol import Shape

Granted = tuple[Slot, bool]
"""The slot, and whether the session's files are in it."""

OPEN = frozenset({SlotState.empty, SlotState.failed})
COMING = frozenset({SlotState.starting, SlotState.resetting, SlotState.checking})


@dataclass(slots=True, eq=False)
class Turn:
    """One caller: what it needs, and the promise of it."""

    shape: Shape
    session: str | None
    fresh: bool
    granted: asyncio.Future[Granted]


@dataclass(frozen=True, slots=True)
class Move:
    """What to do for a turn: lease it the slot as it is, or (`start`) make the slot into its shape first."""

    turn: Turn
    slot: Slot
    start: bool


def moves(queue: Iterable[Turn], slots: Iterable[Slot], may_start: Callable[[Shape], bool]) -> list[Move]:
    """What can be done now, first come first served. Every turn counts on one slot, be it one that still comes, so
    that no two sandboxes are started for one need. `may_start` is False while a shape backs off."""
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


def _rank(turn: Turn, slot: Slot, *, startable: bool) -> tuple[int, int] | None:
    """How well the slot serves the turn, the smaller the better; None: not at all, now. A held slot comes last, the
    one that was idle longest first; an interpreter last of all, since nothing but its sandbox keeps it."""
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


def _fits(turn: Turn, slot: Slot) -> bool:
    """It is, or comes up as, an empty sandbox of the shape; one that never ran anything if that was asked for."""
    if slot.shape != turn.shape:
        return False
    if slot.state is SlotState.starting:
        return True
    if slot.state is SlotState.ready or (slot.state is SlotState.checking and slot.session is None):
        return not (turn.fresh and slot.uses)
    return slot.state is SlotState.resetting and not turn.fresh
