"""The assembler: agent events to turn trees, samples and group scores, exactly once. The log is its only state.

It polls the partition tasks that its consumer group assigns and folds each under its own producer fence. Failures:

  a bug met at one record, or a payload of it that the store lost    its task stops and reports the record on /readyz
  an error of a transaction, the log, the store or the registry      the process ends and is restarted
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager

from prometheus_client import Gauge

from turnlog.infra.blobs import Blobs
from turnlog.infra.event_log import EventLog
from turnlog.infra.log import GroupReader, Log, Partition, Record
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.role import Role
from turnlog.infra.roles.runs import Configured, load_configuration
from turnlog.processors.core.fold.group import GroupFold
from turnlog.processors.core.fold_versions import INPUTS, SPINE
from turnlog.processors.runtime.reaper import EnginesServe, Reaper, RunnersServe
from turnlog.processors.runtime.unit import (
    AssemblerPlan,
    Clock,
    FoldPartitionTask,
    UnitFailed,
    by_unit,
    requested_skips,
)
from turnlog.processors.runtime.watch import ReaperLimits
from turnlog.settings import AssemblerSettings

log = logging.getLogger(__name__)
MAX_RECORDS = 500
"""Maximum records folded in one transaction. Its round trips to the broker are spread over them, and the scores of a
group wait for its end."""
POLL_S = 0.1
"""Longest wait of one poll for records. It bounds how much later than due a partition task commits trees and mere
progress; a score is committed with the poll that brings its last record."""
PAUSE_S = 0.005
"""Seconds between two fetches under load. Records of sessions arrive at any time, and with a fetch for each of them the
assembler would be the broker's busiest reader. With 20 ms, samples of a finished group come 5 ms later (G6)."""
STOPPED = Gauge("turnlog_assembler_stopped_units", "Partition tasks that stopped at a record")


async def main(role: Role) -> None:
    """Wait until the run is configured, then fold until `role.stopping` is set.

    Raises OtherRun, OtherSettings, UnknownFoldVersion, LowWaterError, LogError, BlobError, RegistryError.
    """
    run = await load_configuration(role)
    if run is None:
        return
    settings = role.settings.assembler
    plan = assembler_plan(run, settings)
    runner = AssemblerRunner(plan, role.log, role.events, role.blobs, role.health, clock=time.monotonic)
    engines = EnginesServe(role.log, role.events, clock=time.monotonic)
    runners = RunnersServe(role.log, run.run_id, clock=time.monotonic)
    reaper = Reaper(
        runner.units,
        role.log,
        role.events,
        clock=time.monotonic,
        limits=ReaperLimits(
            silence_s=settings.reaper_silence_s,
            deadline_s=settings.group_deadline_s,
            stragglers=settings.stragglers,
            quorum=role.settings.feeder.group_size,
            truncated=run.fold.truncated != "exclude",
        ),
        beat=functools.partial(role.health.beat, "reaper"),
        served_since=lambda: max(engines.since(), runners.since()),
    )
    following = [asyncio.create_task(one.follow()) for one in (engines, runners)]
    reaping = asyncio.create_task(reaper.run(role.stopping))
    folding = asyncio.create_task(runner.run(role.stopping, instance=role.instance))
    try:
        await _first_error_or_all(folding, reaping, beside=following)
    finally:
        tasks = (reaping, folding, *following)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _first_error_or_all(*tasks: asyncio.Task[None], beside: Sequence[asyncio.Task[None]]) -> None:
    """Wait until `tasks` have ended. Raises the first error of any task, including those of `beside`, which run
    forever.
    """
    waiting: set[asyncio.Task[None]] = {*tasks, *beside}
    while waiting - {*beside}:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()


def assembler_plan(run: Configured, settings: AssemblerSettings) -> AssemblerPlan:
    """Return what the partition tasks of a run share. Raises UnknownFoldVersion, SettingsError."""
    rules = run.rules()
    return AssemblerPlan(
        run_id=run.run_id,
        fold=run.name,
        factory=lambda group_id, floor: GroupFold(group_id, floor, rules),
        with_erasures=lambda erasures: lambda group_id, floor: GroupFold(group_id, floor, rules, erasures),
        messages=rules.needs_messages,
        horizon_records=rules.horizon_records,
        commit_interval_s=settings.commit_interval_s,
    )


class AssemblerRunner:
    """Folds the partition tasks that the consumer group assigns to this process."""

    def __init__(
        self, plan: AssemblerPlan, client: Log, events: EventLog, blobs: Blobs, health: Health, *, clock: Clock
    ) -> None:
        self.units: dict[int, FoldPartitionTask] = {}
        """Partition -> task, for tasks that are assigned and not stopped."""
        self.stopped: dict[int, str] = {}
        """Partition -> the record at which its task stopped, and the reason."""
        self._plan = plan
        self._log = client
        self._events = events
        self._blobs = blobs
        self._health = health
        self._clock = clock
        self._unsought: set[int] = set()

    async def run(self, stopping: asyncio.Event, *, instance: str | None = None) -> None:
        """Fold until `stopping` is set, then commit and leave the group. Raises errors that must end the process."""
        async with self.join_group(instance) as reader:
            while not stopping.is_set():
                self._health.beat()
                await self.turn(reader)
            await _all([unit.commit() for unit in self.units.values()])

    def join_group(self, instance: str | None = None) -> AbstractAsyncContextManager[GroupReader]:
        """Join the consumer group as a member."""
        return self._log.group_reader(
            self._plan.group, INPUTS, assigned=self._on_assigned, revoked=self._on_revoked, instance=instance,
            pause_s=PAUSE_S,
        )  # fmt: skip

    async def turn(self, reader: GroupReader, *, max_records: int = MAX_RECORDS, poll_s: float = POLL_S) -> int:
        """Poll once and run the transactions; return the number of records processed.

        The reader calls back only inside poll, so no batch straddles a rebalance. A partition that was assigned in a
        poll is sought to its own marks before any of its records is delivered: the positions of the group protocol are
        never trusted.
        """
        records = await reader.poll(max_records=max_records, timeout_s=poll_s)
        found = by_unit(records)
        busy = [unit for number, unit in self.units.items() if number in found or unit.commit_is_due]
        await _all([self._step(unit, found.get(unit.number, [])) for unit in busy])
        for number in self._unsought:
            for topic, offset in self.units[number].start.items():
                reader.seek(Partition(topic, number), offset)
        self._unsought = set()
        return len(records)

    async def _step(self, unit: FoldPartitionTask, records: list[Record]) -> None:
        if unit.number in self._unsought:
            return
        try:
            if records:
                await unit.step(records)
            elif unit.commit_is_due:
                await unit.commit()
        except UnitFailed as failure:
            await self._stop_or_skip(unit, failure)

    async def _stop_or_skip(self, unit: FoldPartitionTask, failure: UnitFailed) -> None:
        """Stop the partition task; if an operator requested to skip the record, fold again from its marks without
        it. Fold again, too, if a session was erased since it was opened.
        """
        await unit.close()
        skips = await requested_skips(self._log, self._events, self._plan.run_id, unit.number, unit.start[SPINE])
        if (failure.topic, failure.offset) in skips:
            log.warning("unit %d: skipping on request: %s", unit.number, failure)
            await self._open(unit.number, skips)
            return
        if await unit.is_outdated(failure):
            log.warning("unit %d: folding again, since a session was erased: %s", unit.number, failure)
            await self._open(unit.number, skips)
            return
        log.error("unit %d stopped at %s", unit.number, failure, exc_info=failure.__cause__)
        del self.units[unit.number]
        self._say_stopped(unit.number, str(failure))

    def _say_stopped(self, number: int, why: str | None) -> None:
        if why is None:
            self.stopped.pop(number, None)
            self._health.mark_ready(f"unit {number}")
        else:
            self.stopped[number] = why
            self._health.unmet(
                f"unit {number}",
                f"{why}; fix the cause, or skip the record with `turnlog log dead-letters skip`, then restart",
            )
        STOPPED.set(len(self.stopped))

    async def _open(self, number: int, skips: Mapping[tuple[str, int], str]) -> None:
        unit = FoldPartitionTask(
            number, self._plan, self._log, self._events, self._blobs, clock=self._clock, skips=skips
        )
        self.units[number] = unit
        await unit.open()
        self._unsought.add(number)
        log.info("unit %d opened: folds from %s", number, unit.start)

    async def _on_assigned(self, numbers: frozenset[int]) -> None:
        await _all([self._open(number, {}) for number in sorted(numbers)])
        self._health.mark_started()

    async def _on_revoked(self, numbers: frozenset[int]) -> None:
        units = [self.units.pop(number) for number in numbers if number in self.units]
        self._unsought -= numbers
        for number in numbers:
            self._say_stopped(number, None)
        await _all([unit.close() for unit in units])


async def _all(work: Sequence[Coroutine[None, None, None]]) -> None:
    """Run all, wait for all, then raise the first error: none is left running."""
    if len(work) == 1:  # as after most polls; tasks would cost as much as folding a turn
        await work[0]
        return
    for result in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
