"""Slots of a pool, callers that wait for one, and which slot should serve whom next. No clock, no I/O.

A slot is a place for one sandbox, with a host user of its own under root, and what it is doing.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from turnlog.sandbox_workers.protocol import Sandbox, Shape
from turnlog.schemas.types import BlobRef


class SlotState(StrEnum):
    """What a slot is doing."""

    empty = "empty"
    """Nothing is in it."""
    starting = "starting"
    """What was in it is closed and a sandbox of `shape` comes up."""
    ready = "ready"
    """A sandbox as new waits."""
    leased = "leased"
    """A call has it."""
    held = "held"
    """Idle, with the files of `session`."""
    resetting = "resetting"
    """Its last call is over; what it left is removed."""
    checking = "checking"
    """Idle, and asked whether it still answers."""
    failed = "failed"
    """Empty, since the last start failed."""


@dataclass(slots=True, eq=False)
class Slot:
    """One of a pool's. Whoever sets `state` to starting, leased, resetting or checking has it until the next change."""

    number: int
    state: SlotState = SlotState.empty
    shape: Shape | None = None
    """Of the sandbox that is in it or starts."""
    sandbox: Sandbox | None = None
    session: str | None = None
    """Whose files are in it."""
    workspace: BlobRef | None = None
    """What the files of `session` are, as last kept."""
    uses: int = 0
    """Leases of this sandbox."""
    last_use: int = 0
    """Grows with every use of any slot."""
    owner: Turn | None = None
    """A caller of `session` that came while the slot was `checking`."""
    task: asyncio.Task[None] | None = None
    """Starts, resets or checks it."""
    error: Exception | None = None
    """Why it is `failed`."""

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


IDLE = frozenset({SlotState.ready, SlotState.starting, SlotState.resetting})


def guesses(
    slots: Sequence[Slot], demand: Mapping[Shape, int], *, most: int, may_start: Callable[[Shape], bool]
) -> list[tuple[Slot, Shape]]:
    """Slots to start anew, and as what: the shape that lacks most gets an empty slot (as long as fewer than `most`
    sandboxes are idle), else one whose shape has more than is asked for. Never a held one."""
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
