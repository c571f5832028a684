"""Prometheus metrics of the assembler."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

RECORDS = Counter("turnlog_assembler_records", "Input records passed")
LATE = Counter("turnlog_assembler_late_records", "Records that came after their group was scored and forgotten")
DEAD_LETTERS = Counter("turnlog_assembler_dead_letters", "Records parked in dead-letters")
EXPIRED = Counter("turnlog_assembler_expired_sessions", "SessionFinished(expired) written")
CLOSED = Counter("turnlog_assembler_closed_groups", "GroupClosed written", ["reason"])
OPEN_GROUPS = Gauge("turnlog_assembler_open_groups", "Groups that are not complete", ["unit"])
LAG = Gauge("turnlog_assembler_lag_records", "Records that wait to be folded", ["unit", "topic"])
OPEN_SPAN = Gauge("turnlog_assembler_open_span_bytes", "Bytes that a restart folds again", ["unit"])
REFOLD_SECONDS = Gauge("turnlog_assembler_refold_seconds", "From opening the unit to having folded all that was before")
STOPPED = Gauge("turnlog_assembler_stopped_units", "Units that stopped at a record")
