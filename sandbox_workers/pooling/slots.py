"""A slot of a pool: a place for one sandbox, with a host user of its own under root, and what it is doing."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from turnlog.sandbox_workers.protocol import Sandbox, Shape
from turnlog.schemas.types import BlobRef

if TYPE_CHECKING:
    from turnlog.sandbox_workers.pooling.turns import Turn


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
