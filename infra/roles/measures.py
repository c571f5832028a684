"""What every role exports of itself, whatever else its module counts: how long its stages take, what it reads from the
log and hands to it, what it has not read yet, and how often it was started anew.

A stage is taken once for a batch of records, or for what is made of them, and never for a token. Gateway and sandbox
worker tell theirs by histograms of their own, which have labels that others lack.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import Counter, Gauge, Histogram

from turnlog.names import RESTARTS_VARIABLE
from turnlog.setting_types import SettingsError

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900)
"""From the fold of a few records to a step of a large model."""
STAGE_S = Histogram(
    "turnlog_stage_seconds", "One stage of a role's work, over the records that it took together", ["role", "stage"],
    buckets=SECONDS,
)  # fmt: skip
BYTES = Counter(
    "turnlog_log_bytes", "Keys and values of records read from the log, and handed to it", ["role", "direction"]
)
UNREAD = Gauge(
    "turnlog_log_unread_records", "Offsets between a role's readers and the ends that their fetches have seen", ["role"]
)
RESTARTS = Gauge("turnlog_role_restarts", "How often whoever watches the process has started it anew", ["role"])


def restarts(env: Mapping[str, str]) -> int:
    """Of this process, as whoever started it says; 0 where nobody counts. Raises SettingsError."""
    said = env.get(RESTARTS_VARIABLE, "0")
    if not (said.isascii() and said.isdecimal()):
        raise SettingsError(f"{RESTARTS_VARIABLE} must be a whole number, got {said!r}")
    return int(said)
