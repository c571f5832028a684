"""Engines on the trainer's devices ([engine] colocate): a step begins when none of them holds memory there.

The engines' state is in engine-status. A loader releases its engine once it has read about a batch that the published
weights do not include, and reports the newest version at that time: the trainer may use the device until it publishes
the next version. An engine that is gone is ignored; one that is silent, or drains, still holds its memory.
"""

from __future__ import annotations

from collections.abc import Callable

from turnlog.infra.history import caught_up
from turnlog.infra.log import Partition, Reader
from turnlog.infra.roles.role import Role
from turnlog.processors.core.views.fleet import Fleet
from turnlog.schemas.topics import ENGINES

PARTITION = Partition(ENGINES.name, 0)
LOOK_S = 0.2


class SharedDevice:
    """The engines that hold memory, folded from engine-status."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._reader: Reader
        self._fleet = Fleet()

    async def follow(self, reader: Reader) -> None:
        """Start to follow engine-status from the start of the log."""
        self._reader = reader
        reader.assign(await self._role.log.start_offsets([PARTITION]))

    async def free(self, published: int | None, beat: Callable[[], None]) -> bool:
        """Wait until every engine was released with version `published`, the newest one; `beat` is called meanwhile.

        Return False if the role is to stop first.
        """
        wanted = -1 if published is None else published
        ends = await self._role.log.end_offsets([PARTITION])
        while not caught_up(self._reader, ends) or (holding := self._fleet.engines_holding_memory(wanted)):
            beat()
            if self._role.stopping.is_set():
                return False
            if caught_up(self._reader, ends):
                self._role.health.unmet(
                    "device", f"{', '.join(holding)} still on the trainer's devices ([engine] colocate)"
                )
            await self._take()
        self._role.health.mark_ready("device")
        return True

    async def _take(self) -> None:
        async for _, event in self._role.run_events(await self._reader.poll(timeout_s=LOOK_S)):
            self._fleet.apply(event)
