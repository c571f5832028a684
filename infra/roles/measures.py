"""Prometheus metrics common to all roles: stage latency, bytes read from the log and handed to it, unread records,
restarts.

A stage is observed once for a batch of records, or for what is made of them, never for a token. The gateway and the
sandbox worker use histograms of their own with additional labels.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import Counter, Gauge, Histogram

from turnlog.names import RESTARTS_VARIABLE
from turnlog.setting_types import SettingsError

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900)
"""Histogram buckets, from the fold of a few records to a step of a large model."""
STAGE_S = Histogram(
    "turnlog_stage_seconds", "Duration of one stage of a role's work, for the records that it handled together",
    ["role", "stage"], buckets=SECONDS,
)  # fmt: skip
BYTES = Counter(
    "turnlog_log_bytes",
    "Bytes of keys and values of records read from the log and written to it",
    ["role", "direction"],
)
UNREAD = Gauge(
    "turnlog_log_unread_records",
    "Offsets between a role's readers and the ends of the log seen by their fetches",
    ["role"],
)
RESTARTS = Gauge("turnlog_role_restarts", "How often the process was restarted by its supervisor", ["role"])


def restarts(env: Mapping[str, str]) -> int:
    """Return how often this process was restarted according to its starter; 0 if nobody counts. Raises
    SettingsError."""
    said = env.get(RESTARTS_VARIABLE, "0")
    if not (said.isascii() and said.isdecimal()):
        raise SettingsError(f"{RESTARTS_VARIABLE} must be a whole number, got {said!r}")
    return int(said)
