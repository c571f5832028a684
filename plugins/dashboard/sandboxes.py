"""Tool calls of a run by result, from the index; and the present state of sandbox pools with their counters since the
start, which no record holds, from the workers themselves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnlog.consumers.index.reader import AsOf, Index, Row
from turnlog.infra.roles.probe import states
from turnlog.infra.run_folder import health_of
from turnlog.plugins.dashboard import CachedQuery
from turnlog.schemas.events.tools import UNISOLATED, ToolStatus

PAGE = 50
EVERY_S = 2.0
"""Seconds for which the answers of workers are cached for all pages."""
TIMEOUT_S = 1.0
BY_STATUS = """SELECT status, reason, count(*) AS calls FROM tool_results_records WHERE counts
    GROUP BY status, reason ORDER BY calls DESC LIMIT 100"""
STARTS = """SELECT count(*) AS starts, sum(attempt > 1) AS again, sum(worker LIKE ?) AS unisolated,
    count(DISTINCT worker) AS workers FROM tool_starts_records"""


@dataclass(frozen=True, slots=True)
class Sandboxes:
    """A page of tool calls, and counts over all of them."""

    ends: Sequence[Row]
    """Rows of status, reason and calls, the most frequent first."""
    starts: Row
    """Counts of executions: starts, again (second or later attempts), unisolated, and workers."""
    failed: int
    """Calls that failed through no fault of the agent."""
    rows: Sequence[Row]
    after: str | None
    as_of: AsOf


def sandboxes(index: Index, status: str, reason: str | None, *, sort: str, after: str | None) -> Sandboxes:
    """Return a page of calls at one moment. Raises BadQuestion."""
    with index.snapshot() as as_of:
        ends = index.rows(BY_STATUS)
        (starts,) = index.rows(STARTS, f"%{UNISOLATED}")
        rows, following, _ = index.calls(status=status, reason=reason, sort=sort, after=after, limit=PAGE)
    failed = sum(row["calls"] for row in ends if row["status"] == ToolStatus.infra_error.value)
    return Sandboxes(ends, starts, failed, rows, following, as_of)


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A sandbox worker that was asked for its pools."""

    name: str
    pools: Sequence[Mapping[str, Any]] = field(default=())
    """State of each pool (Pool.snapshot of sandbox_workers)."""
    why: str = ""
    """Reason why the worker did not answer."""


class WorkerPools:
    """Pools of the sandbox workers of a run, if their addresses are known."""

    def __init__(self, directory: Path, elsewhere: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        """`directory` is that of the run, whose supervisor knows its workers. `elsewhere` are addresses of health
        servers, of any role, if no local supervisor runs them."""
        self._directory, self._elsewhere = directory, elsewhere
        self._looks = CachedQuery(lambda: asyncio.to_thread(lambda: list(self._query_workers())), clock)

    async def look(self) -> Sequence[WorkerStatus]:
        """Return every worker; an empty list if no address is known."""
        return await self._looks.within(EVERY_S)

    def _query_workers(self) -> Iterator[WorkerStatus]:
        own = health_of(self._directory, "sandbox")
        for name, said in states(own or {url: url for url in self._elsewhere}, "sandbox", TIMEOUT_S).items():
            if "pools" in said:
                yield WorkerStatus(name, said["pools"]["pools"])
            elif own or not said.get("role"):  # skip other roles in `elsewhere`
                yield WorkerStatus(name, why=said.get("unreachable", "has no pool yet"))
