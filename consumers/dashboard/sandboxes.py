"""Tool calls of a run by what came of them, as far as the log tells: from the index alone. And what the pools of
sandbox workers hold now and have met since their start, which no record says: asked of the workers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnlog.consumers.dashboard import Looks
from turnlog.consumers.index.reader import AsOf, Index, Row
from turnlog.infra.roles.probe import states
from turnlog.infra.run_folder import health_of
from turnlog.schemas.events.tools import UNISOLATED, ToolStatus

PAGE = 50
EVERY_S = 2.0
"""Between two looks at workers: one serves all pages that ask meanwhile."""
TIMEOUT_S = 1.0
BY_STATUS = """SELECT status, reason, count(*) AS calls FROM tool_results_records WHERE counts
    GROUP BY status, reason ORDER BY calls DESC LIMIT 100"""
STARTS = """SELECT count(*) AS starts, sum(attempt > 1) AS again, sum(worker LIKE ?) AS unisolated,
    count(DISTINCT worker) AS workers FROM tool_starts_records"""


@dataclass(frozen=True, slots=True)
class Sandboxes:
    """A page of calls, and what all of them came to."""

    ends: Sequence[Row]
    """status, reason, calls; the most frequent first."""
    starts: Row
    """Of executions: starts, again (a second attempt or later), unisolated, workers."""
    failed: int
    """Calls that ended for no doing of the agent's."""
    rows: Sequence[Row]
    after: str | None
    as_of: AsOf


def sandboxes(index: Index, status: str, reason: str | None, *, sort: str, after: str | None) -> Sandboxes:
    """Of one moment. Raises BadQuestion."""
    with index.snapshot() as as_of:
        ends = index.rows(BY_STATUS)
        (starts,) = index.rows(STARTS, f"%{UNISOLATED}")
        rows, following, _ = index.calls(status=status, reason=reason, sort=sort, after=after, limit=PAGE)
    failed = sum(row["calls"] for row in ends if row["status"] == ToolStatus.infra_error.value)
    return Sandboxes(ends, starts, failed, rows, following, as_of)


@dataclass(frozen=True, slots=True)
class Worker:
    """One that was asked."""

    name: str
    pools: Sequence[Mapping[str, Any]] = field(default=())
    """As each pool tells of itself (sandbox_workers' Pool.snapshot)."""
    why: str = ""
    """Why it says nothing."""


class Pools:
    """Of the workers of a run, where they are known."""

    def __init__(self, directory: Path, elsewhere: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        """`directory`: of the run, whose supervisor knows its workers; `elsewhere`: addresses of health servers, of
        whatever roles, where no supervisor of ours runs them."""
        self._directory, self._elsewhere = directory, elsewhere
        self._looks = Looks(lambda: asyncio.to_thread(lambda: list(self._asked())), clock)

    async def look(self) -> Sequence[Worker]:
        """Every worker; none where nobody says where they are."""
        return await self._looks.within(EVERY_S)

    def _asked(self) -> Iterator[Worker]:
        own = health_of(self._directory, "sandbox")
        for name, said in states(own or {url: url for url in self._elsewhere}, "sandbox", TIMEOUT_S).items():
            if "pools" in said:
                yield Worker(name, said["pools"]["pools"])
            elif own or not said.get("role"):  # who is another role was asked by its address alone
                yield Worker(name, why=said.get("unreachable", "it has no pool yet"))
