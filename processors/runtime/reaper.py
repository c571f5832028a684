"""The reaper: the role has a clock, and the fold learns about time through events.

It appends SessionFinished(expired) for silent sessions and GroupClosed for stragglers and orphans. It uses the plain
producer: agent.* topics contain no transactional records, so no open transaction holds their readers back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from prometheus_client import Counter, Gauge

from turnlog.infra.event_log import EventLog
from turnlog.infra.history import assign_from_start, caught_up
from turnlog.infra.log import GroupNotAuthorized, Log, LogUnavailable, Partition
from turnlog.names import ConsumerGroup
from turnlog.processors.core.fold_versions import INPUTS, SPINE
from turnlog.processors.core.views.fleet import SERVING, Fleet
from turnlog.processors.runtime.unit import Clock, FoldPartitionTask
from turnlog.processors.runtime.watch import GroupWatch, ReaperLimits
from turnlog.schemas.events import GroupClosed, SessionFinished
from turnlog.schemas.topics import ENGINES

log = logging.getLogger(__name__)
EXPIRED = Counter("turnlog_assembler_expired_sessions", "SessionFinished(expired) written")
CLOSED = Counter("turnlog_assembler_closed_groups", "GroupClosed written", ["reason"])
LAG = Gauge(
    "turnlog_assembler_lag_records",
    "turnlog_lag_records of this process's partition tasks, as the process sees them",
    ["unit", "topic"],
)
QUORUM_S = 0.2
"""Seconds between two checks for a quorum."""
RUNNERS_S = 2.0
"""Seconds between two checks for runners."""


@dataclass(slots=True)
class _Look:
    """An observation of a partition task: what was due at `at` is decided once the task has passed `ends`, read after
    `at`.
    """

    unit: FoldPartitionTask
    at: float
    ends: dict[str, int]
    caught_up_at: float | None = None
    """Time at which this owner first passed the ends; before that, nothing is overdue."""


class EnginesServe:
    """Tracks since when some engine has served, according to the log. Sessions must be silent while none does."""

    def __init__(self, log: Log, events: EventLog, *, clock: Clock) -> None:
        self._log, self._events, self._clock = log, events, clock
        self._fleet = Fleet()
        self._since: float | None = None
        """Time since when an engine serves; None if none does, or if the log has not been read to its end yet."""

    def since(self) -> float:
        """Return the time since when an engine serves: now while none does, minus infinity if the run has no
        engines.
        """
        return self._clock() if self._since is None else self._since

    async def follow(self) -> None:
        """Fold engine-status until cancelled."""
        places = [Partition(ENGINES.name, 0)] if ENGINES.name in await self._log.topics() else []
        async with self._log.reader(patient=True) as reader:
            ends = await assign_from_start(self._log, reader, places)
            while True:
                if caught_up(reader, ends):
                    self._look()
                for record in await reader.poll(timeout_s=1.0):
                    if (event := await self._events.decode_known(record)) is not None:
                        self._fleet.apply(event)

    def _look(self) -> None:
        engines = self._fleet.engines.values()
        if any(engine.state == SERVING for engine in engines):
            self._since = self._clock() if self._since is None else self._since
        else:
            self._since = None if engines else -math.inf


class RunnersServe:
    """Tracks since when the run has had a runner, by the members of its consumer group.

    Sessions must be silent while there is none.
    """

    def __init__(self, log: Log, run_id: str, *, clock: Clock) -> None:
        self._log, self._clock = log, clock
        self._group = ConsumerGroup.RUNNER.format(run=run_id)
        self._since: float | None = None
        """Time since when there is a runner; None if there is none, or if nobody has checked yet."""

    def since(self) -> float:
        """Return the time since when there is a runner: now while there is none, minus infinity in a run that never had
        one, whose sessions external agents run.
        """
        return self._clock() if self._since is None else self._since

    async def follow(self) -> None:
        """Check repeatedly until cancelled. While the members cannot be read, the last result remains."""
        while True:
            try:
                await self.look()
            except GroupNotAuthorized as error:
                log.warning("sessions that wait for a runner may expire: %s", error)
                self._since = -math.inf
                return
            except LogUnavailable as error:
                log.warning("cannot tell at present whether there is a runner: %s", error)
            await asyncio.sleep(RUNNERS_S)

    async def look(self) -> None:
        """Read the members of the runners' group. Raises LogUnavailable."""
        if await self._log.members(self._group):
            self._since = self._clock() if self._since is None else self._since
        else:
            self._since = None if await self._log.committed_partitions(self._group) else -math.inf


class Reaper:
    """Watches the partition tasks of one process and closes what is overdue."""

    def __init__(
        self, units: Mapping[int, FoldPartitionTask], client: Log, events: EventLog, *, clock: Clock,
        limits: ReaperLimits,
        beat: Callable[[], None] = lambda: None, served_since: Callable[[], float] = lambda: -math.inf,
    ) -> None:  # fmt: skip
        """`beat` is called at every check; `served_since` returns since when sessions could proceed, and now while they
        cannot.
        """
        self._beat, self._served_since = beat, served_since
        self._units = units
        self._log = client
        self._events = events
        self._clock = clock
        self._limits = limits
        self._looks: dict[int, _Look] = {}
        self._written: dict[str, float] = {}
        """Subject -> time at which we wrote about it: the record takes a moment to come back, and a GroupClosed may be
        void.
        """

    async def run(self, stopping: asyncio.Event) -> None:
        """Check several times per limit, until `stopping` is set."""
        limits = self._limits
        longest_s = QUORUM_S if limits.stragglers == "cut" else 5.0
        pause_s = min(max(min(limits.silence_s, limits.deadline_s) / 10, 0.05), longest_s)
        while not stopping.is_set():
            self._beat()
            await self.look()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await stopping.wait()

    async def look(self) -> list[SessionFinished | GroupClosed]:
        """Decide what the last observation found due, then observe again; return the appended events."""
        for number in self._looks.keys() - self._units.keys():
            for topic in self._looks.pop(number).ends:
                LAG.remove(str(number), topic)  # another process reports it now
        appended: list[SessionFinished | GroupClosed] = []
        for number, unit in list(self._units.items()):
            if unit.opened:
                appended += await self._decide(number, unit)
        return appended

    async def _decide(self, number: int, unit: FoldPartitionTask) -> list[SessionFinished | GroupClosed]:
        look = self._looks.get(number)
        if look is None or look.unit is not unit:  # a new owner catches up from the start
            look = self._looks[number] = _Look(unit, self._clock(), await self._ends(number))
        due: list[SessionFinished | GroupClosed] = []
        if all(unit.position[topic] >= end for topic, end in look.ends.items()):
            if look.caught_up_at is None:
                look.caught_up_at = self._clock()
            due = self._due(look, max(look.caught_up_at, self._served_since()))
            look.at = self._clock()
            look.ends = await self._ends(number)
        for topic, end in look.ends.items():
            LAG.labels(str(number), topic).set(max(0, end - unit.position[topic]))
        for event in due:
            await self._events.append(event)
            self._count(event)
        return due

    def _due(self, look: _Look, caught_up_at: float) -> list[SessionFinished | GroupClosed]:
        overdue = look.unit.watch.overdue(
            look.at,
            caught_up_at=caught_up_at,
            limits=self._limits,
            seen=look.unit.position[SPINE],
        )
        now = self._clock()
        self._written = {name: at for name, at in self._written.items() if now - at <= self._limits.silence_s}
        named = [(event, _subject(event, look.unit.watch)) for event in overdue]
        fresh = [event for event, subject in named if subject not in self._written]
        self._written |= {subject: now for _, subject in named if subject not in self._written}
        return fresh

    async def _ends(self, number: int) -> dict[str, int]:
        ends = await self._log.end_offsets([Partition(topic, number) for topic in INPUTS])
        return {name.topic: end for name, end in ends.items()}

    def _count(self, event: SessionFinished | GroupClosed) -> None:
        if isinstance(event, SessionFinished):
            EXPIRED.inc()
        else:
            CLOSED.labels(event.reason).inc()


def _subject(event: SessionFinished | GroupClosed, watch: GroupWatch) -> str:
    """Return the key under which an event is written once: a close that came back void may be written again."""
    if isinstance(event, SessionFinished):
        return event.event_id
    return f"{event.group_id} {event.reason} {watch.groups[event.group_id].closes}"
