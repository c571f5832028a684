"""Prometheus metrics of the assembler."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

from turnlog.infra import books_metric
from turnlog.schemas.events import Event, GroupScored

RECORDS = Counter("turnlog_assembler_records", "Input records passed")
LATE = Counter("turnlog_assembler_late_records", "Records that came after their group was scored and forgotten")
EXPIRED = Counter("turnlog_assembler_expired_sessions", "SessionFinished(expired) written")
CLOSED = Counter("turnlog_assembler_closed_groups", "GroupClosed written", ["reason"])
OPEN_GROUPS = Gauge("turnlog_assembler_open_groups", "Groups that are not complete", ["unit"])
LAG = Gauge("turnlog_assembler_lag_records", "Records that wait to be folded", ["unit", "topic"])
OPEN_SPAN = Gauge("turnlog_assembler_open_span_bytes", "Bytes that a restart folds again", ["unit"])
REFOLD_SECONDS = Gauge("turnlog_assembler_refold_seconds", "From opening the unit to having folded all that was before")
STOPPED = Gauge("turnlog_assembler_stopped_units", "Units that stopped at a record")


def counted(event: Event) -> None:
    """Add the books of a group whose score was committed; other events say nothing new about tokens."""
    if isinstance(event, GroupScored):
        books = event.books
        books_metric.count("group", sampled=books.sampled, trained=books.trained, masked=books.masked)
