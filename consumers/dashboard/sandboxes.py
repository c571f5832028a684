"""Tool calls of a run by what came of them, as far as the log tells: from the index alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from turnlog.consumers.index.reader import AsOf, Index, Row
from turnlog.schemas.events.tools import UNISOLATED, ToolStatus

PAGE = 50
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
