"""Which idle slots should change their shape for the calls that are next in the queue. No clock, no I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from turnlog.sandbox_workers.pooling.slots import Slot, SlotState
from turnlog.sandbox_workers.pooling.turns import OPEN
from turnlog.sandbox_workers.protocol import Shape

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
