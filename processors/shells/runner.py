"""The transactional runner: the log is the state. Polls a consumer group's units and folds each under its own fence.

What a process may meet, and what becomes of it:
  a defect at one record, or a payload of it that the store lost    its unit stops and says where on /readyz
  an error of a transaction, of the log, of the store or of the registry    the process ends and is started again
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Mapping

from turnlog.infra.blobs import Blobs
from turnlog.infra.event_log import EventLog
from turnlog.infra.health import Health
from turnlog.infra.log import GroupReader, Log, Partition, Record
from turnlog.processors.core.fold.unit import INPUTS, SPINE
from turnlog.processors.shells import assembler_metrics as metrics
from turnlog.processors.shells.restoring import Plan, requested_skips
from turnlog.processors.shells.unit import Clock, Surprise, Unit, by_unit

log = logging.getLogger(__name__)


class Runner:
    """Folds the units that the group assigns to this process."""

    def __init__(
        self, plan: Plan, client: Log, events: EventLog, blobs: Blobs, health: Health, *, clock: Clock
    ) -> None:
        self.units: dict[int, Unit] = {}
        """Assigned and not stopped."""
        self.stopped: dict[int, str] = {}
        """Unit -> the record at which it stopped, and why."""
        self._plan = plan
        self._log = client
        self._events = events
        self._blobs = blobs
        self._health = health
        self._clock = clock
        self._unsought: set[int] = set()

    async def run(
        self, stopping: asyncio.Event, *, instance: str | None = None, max_records: int = 500, poll_s: float = 0.02
    ) -> None:
        """Until `stopping`; then commit and leave. Raises what must end the process."""
        member = self._log.group_reader(
            self._plan.group, INPUTS, assigned=self._assigned, revoked=self._revoked, instance=instance
        )
        async with member as reader:
            while not stopping.is_set():
                self._health.beat()
                await self.turn(reader, max_records=max_records, poll_s=poll_s)
            await _all(unit.commit() for unit in self.units.values())

    async def turn(self, reader: GroupReader, *, max_records: int = 500, poll_s: float = 0.02) -> int:
        """One poll and its transactions; the number of records passed.

        The reader calls back only inside poll, so no batch straddles a rebalance. A unit that came with it is sought to
        its own marks before anything of it is delivered: positions of the group protocol are never trusted.
        """
        records = await reader.poll(max_records=max_records, timeout_s=poll_s)
        found = by_unit(records)
        await _all(self._step(unit, found.get(number, [])) for number, unit in list(self.units.items()))
        for number in self._unsought:
            for topic, offset in self.units[number].start.items():
                reader.seek(Partition(topic, number), offset)
        self._unsought = set()
        return len(records)

    async def _step(self, unit: Unit, records: list[Record]) -> None:
        if unit.number in self._unsought:
            return
        try:
            if records:
                await unit.step(records)
            else:
                await unit.commit_if_due()
        except Surprise as surprise:
            await self._stop_or_skip(unit, surprise)

    async def _stop_or_skip(self, unit: Unit, surprise: Surprise) -> None:
        """Stop the unit; where an operator asked to pass over the record, fold again from its marks without it."""
        await unit.close()
        skips = await requested_skips(self._log, self._events, self._plan.run_id, unit.number, unit.start[SPINE])
        if (surprise.topic, surprise.offset) in skips:
            log.warning("unit %d: skipping on request: %s", unit.number, surprise)
            await self._open(unit.number, skips)
            return
        log.error("unit %d stopped at %s", unit.number, surprise, exc_info=surprise.__cause__)
        del self.units[unit.number]
        self._say_stopped(unit.number, str(surprise))

    def _say_stopped(self, number: int, why: str | None) -> None:
        if why is None:
            self.stopped.pop(number, None)
            self._health.holds(f"unit {number}")
        else:
            self.stopped[number] = why
            self._health.waits(
                f"unit {number}", f"{why}; mend what it names or `turnlog dead-letters skip` it, then restart"
            )
        metrics.STOPPED.set(len(self.stopped))

    async def _open(self, number: int, skips: Mapping[tuple[str, int], str]) -> None:
        unit = Unit(number, self._plan, self._log, self._events, self._blobs, clock=self._clock, skips=skips)
        self.units[number] = unit
        await unit.open()
        self._unsought.add(number)
        log.info("unit %d opened: folds from %s", number, unit.start)

    async def _assigned(self, numbers: frozenset[int]) -> None:
        await _all(self._open(number, {}) for number in sorted(numbers))
        self._health.started()

    async def _revoked(self, numbers: frozenset[int]) -> None:
        units = [self.units.pop(number) for number in numbers if number in self.units]
        self._unsought -= numbers
        for number in numbers:
            self._say_stopped(number, None)
        await _all(unit.close() for unit in units)


async def _all(work: Iterable[Coroutine[None, None, None]]) -> None:
    """Run together, wait for all, raise the first error: none is left running behind it."""
    for result in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
