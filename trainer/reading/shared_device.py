"""Engines on the trainer's devices ([engine] colocate): a step begins when none of them holds memory there.

What they hold stands in engine-status. A loader releases its engine once it has read of a batch that the published
weights have not seen, and says which version was the newest then: the trainer has its turn until it publishes the next.
An engine that is gone is not waited for; one that is silent, or drains, holds what it held.
"""

from __future__ import annotations

from collections.abc import Callable

from turnlog.infra.log import Partition, Reader
from turnlog.infra.roles.role import Role
from turnlog.processors.core.fleet import RELEASED
from turnlog.schemas.events import (
    EngineDraining,
    EngineGone,
    EngineRegistered,
    EngineWeightsLoaded,
    EngineWeightsRefused,
)
from turnlog.schemas.topics import ENGINES

PARTITION = Partition(ENGINES.name, 0)
LOOK_S = 0.2


class SharedDevice:
    """Who holds memory, folded from engine-status."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._reader: Reader
        self._released: dict[str, int] = {}
        """Engine -> version that it was released behind; -1: it holds memory."""

    async def follow(self, reader: Reader) -> None:
        """From the start of the log on."""
        self._reader = reader
        reader.assign(await self._role.log.start_offsets([PARTITION]))

    async def free(self, published: int | None, beat: Callable[[], None]) -> bool:
        """Once every engine is released behind that version, the newest there is; False where the role is to stop
        first. `beat` is called meanwhile."""
        wanted = -1 if published is None else published
        end = (await self._role.log.end_offsets([PARTITION]))[PARTITION]
        while self._reader.position(PARTITION) < end or (holding := self._holding(wanted)):
            beat()
            if self._role.stopping.is_set():
                return False
            if self._reader.position(PARTITION) >= end:
                self._role.health.unmet(
                    "device", f"{', '.join(holding)} still on the trainer's devices ([engine] colocate)"
                )
            await self._take()
        self._role.health.met("device")
        return True

    def _holding(self, wanted: int) -> list[str]:
        return sorted(engine for engine, behind in self._released.items() if behind < wanted)

    async def _take(self) -> None:
        for record in await self._reader.poll(timeout_s=LOOK_S):
            event = await self._role.events.known(record)
            if event is None or event.run_id != self._role.settings.run.id:
                continue
            match event:
                case EngineDraining() if event.state == RELEASED:
                    self._released[event.engine_id] = event.published
                case EngineGone():
                    self._released.pop(event.engine_id, None)
                case EngineRegistered() | EngineWeightsLoaded() | EngineWeightsRefused():
                    self._released[event.engine_id] = -1
