"""Unread records of each role according to its commits (as in `turnlog role lag`), and which roles stand still."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from turnlog.consumers.lag import STANDS_S, ConsumerStallTimes, Lag, Markers, by_role, lag_of
from turnlog.infra.log import Partition
from turnlog.infra.topics_admin import ACCESS
from turnlog.plugins.dashboard import CachedQuery
from turnlog.plugins.dashboard.records import Records

TELLS_NOTHING = ("gateway",)
"""Roles of the loop that serve requests and read no records, so that the log does not show what waits for them."""


@dataclass(frozen=True, slots=True)
class Queue:
    """Unread records of one role."""

    role: str
    records: int | None
    """Number of unread records; None if unknown."""
    topics: Mapping[str, int]
    """Topic -> number of unread records."""
    stands_s: float
    """Observed seconds for which records have waited in a partition without any being read."""
    first: tuple[Partition, int] | None
    """Partition that has waited longest, and its first offset that was not read."""
    why: str = ""
    """Reason why the number is unknown."""

    @property
    def stands(self) -> bool:
        return self.first is not None and self.stands_s > STANDS_S


class Queues:
    """Queues of a run; one query serves all pages that ask within [lag] every_s."""

    def __init__(self, records: Records, clock: Callable[[], float] = time.monotonic) -> None:
        self._records, self._clock = records, clock
        self._markers, self._standing = Markers(), ConsumerStallTimes()
        self._looks = CachedQuery(self._look, clock)

    async def look(self) -> Sequence[Queue]:
        """Return the queues of all roles. Raises LogError, ReadOnlyArchive, and what opening the log raises."""
        role = await self._records.open_role()
        return await self._looks.within(role.settings.lag.every_s)

    async def _look(self) -> Sequence[Queue]:
        role, now = await self._records.open_role(), self._clock()
        lags = await lag_of(role.log, role.settings, self._markers)
        groups = {(one.role, one.group) for one in lags}  # lags are per partition, commits per consumer group
        speak = {name for name, group in groups if await role.log.committed_partitions(group)}
        silent = {name for name, _ in groups} - speak
        return list(self._build_queues(lags, silent, now))

    def _build_queues(self, lags: Sequence[Lag], silent: Iterable[str], now: float) -> Iterable[Queue]:
        sums, standing = by_role(lags), self._standing.look(lags, now)
        for role in ACCESS:
            if role in TELLS_NOTHING:
                yield Queue(role, None, {}, 0.0, None, "takes requests, not records")
            elif role in silent:
                yield Queue(role, None, {}, 0.0, None, "has committed nothing yet")
            elif role in sums:
                seconds, where = standing.get(role, (0.0, None))
                first = None if where is None else (where.place, where.taken)
                yield Queue(role, sums[role], _topics(lags, role), seconds, first)


def _topics(lags: Iterable[Lag], role: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for one in lags:
        if one.role == role and one.records:
            found[one.place.topic] = found.get(one.place.topic, 0) + one.records
    return found
