"""Generator of infra/deploy/monitoring/dashboards/*.json, with Grafana's own library (`make docs`; extra `dev`).

A query uses a recording rule (rules.yaml) where there is one. Every name and label in it is checked against the metrics
that the code declares (tests/unit/house/test_metrics.py).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.builders.timeseries import Panel
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import DataSourceRef

SOURCE = DataSourceRef("prometheus", "prometheus")
WIDTH, HEIGHT = 8, 7
Query = tuple[str, str]
"""PromQL and legend."""
Shown = tuple[str, str, Sequence[Query]]
"""Title, unit ("none": may be negative) and queries of a panel."""


def stage(role: str, name: str, shares: Sequence[float] = (0.5, 0.99)) -> list[Query]:
    """Return queries of quantiles of one stage."""
    series = f'role_stage_le:turnlog_stage_seconds:rate5m{{role="{role}", stage="{name}"}}'
    return [(f"histogram_quantile({share}, {series})", f"p{share * 100:.0f}") for share in shares]


LOOP: Sequence[Shown] = (
    ("Mean reward", "none", [("turnlog_trainer_reward", "last batch")]),
    ("Optimizer steps", "short", [("turnlog_trainer_steps_total", "steps")]),
    (
        "Weight version",
        "short",
        [("turnlog_trainer_weight_version", "published"), ("turnlog_loader_version", "{{instance}}")],
    ),
    ("Turns per second", "short", [("finish_reason:turnlog_gateway_turns:rate5m", "{{finish_reason}}")]),
    (
        "Tokens per second",
        "short",
        [
            ("sum by (kind) (rate(turnlog_gateway_tokens_total[1m]))", "{{kind}}"),
            ("sum (rate(turnlog_trainer_tokens_total[1m]))", "trained"),
        ],
    ),
    ("Engine call, p50 and p99", "s", stage("gateway", "engine")),
    ("Tool calls per second", "short", [("status:turnlog_sandbox_calls:rate5m", "{{status}}")]),
    ("Tool call, p50 and p99", "s", stage("sandbox", "call")),
    (
        "Tool calls that failed",
        "percentunit",
        [('status:turnlog_sandbox_calls:share5m{status!~"ok|cancelled"}', "{{status}}")],
    ),
    (
        "Sessions finished per second",
        "short",
        [("sum by (outcome) (rate(turnlog_runner_sessions_total[1m]))", "{{outcome}}")],
    ),
    (
        "Where sampled tokens went (by step)",
        "short",
        [('sum by (entry) (rate(turnlog_books_tokens_total{level="step"}[5m]))', "{{entry}}")],
    ),
    (
        "Samples that no batch trains",
        "short",
        [("sum by (reason) (rate(turnlog_samples_dropped_total[1m]))", "{{reason}}")],
    ),
    ("Trainer waits for data", "percentunit", [("rate(turnlog_trainer_wait_seconds_total[5m])", "share of time")]),
    (
        "Phases of a step, p95",
        "s",
        [('role_stage:turnlog_stage_seconds:p95{role="trainer"}', "{{stage}}")],
    ),
    (
        "Phases of a weight update, p95",
        "s",
        [('role_stage:turnlog_stage_seconds:p95{role="loader"}', "{{stage}}")],
    ),
)
PROCESSORS: Sequence[Shown] = (
    ("Lag by role", "short", [("role:turnlog_role_lag_records:max", "{{role}}")]),
    ("Age of waiting records, by role", "s", [("role:turnlog_role_lag_seconds:max", "{{role}}")]),
    ("Unread records, by role", "short", [("sum by (role) (turnlog_log_unread_records)", "{{role}}")]),
    ("Stages, p95", "s", [("role_stage:turnlog_stage_seconds:p95", "{{role}} {{stage}}")]),
    (
        "Bytes read from the log per second",
        "Bps",
        [('role_direction:turnlog_log_bytes:rate5m{direction="read"}', "{{role}}")],
    ),
    (
        "Bytes written to the log per second",
        "Bps",
        [('role_direction:turnlog_log_bytes:rate5m{direction="written"}', "{{role}}")],
    ),
    ("Restarts within an hour", "short", [("role:turnlog_role_restarts:increase1h", "{{role}}")]),
    ("Processes that answer, by role", "short", [('sum by (component) (up{job="turnlog"})', "{{component}}")]),
    ("Stopped partition tasks", "short", [("sum(turnlog_assembler_stopped_units)", "units")]),
    (
        "Records folded per second",
        "short",
        [("sum by (instance) (rate(turnlog_assembler_records_total[1m]))", "{{instance}}")],
    ),
    (
        "Open groups",
        "short",
        [
            ("sum(turnlog_assembler_open_groups)", "assembler"),
            ("sum(turnlog_groups_waiting)", "waiting for a rollout batch"),
            ("sum(turnlog_feeder_groups_open)", "admitted"),
        ],
    ),
    (
        "Bytes that a restart would fold again",
        "bytes",
        [("sum by (instance) (turnlog_assembler_open_span_bytes)", "{{instance}}")],
    ),
    (
        "Dead letters",
        "short",
        [("sum by (role, cause) (increase(turnlog_dead_letters_total[5m]))", "{{role}}: {{cause}}")],
    ),
    ("Append of a turn's records (acks=all), p99", "s", stage("gateway", "record", (0.99,))),
    ("Gateway errors per second", "short", [("sum by (code) (rate(turnlog_gateway_errors_total[1m]))", "{{code}}")]),
    ("Archived bytes per second", "Bps", [("sum (rate(turnlog_archived_bytes_total[1m]))", "written")]),
    ("Archive held in memory", "bytes", [("sum(turnlog_archive_held_bytes)", "open ranges")]),
    ("Sandbox slots", "short", [("sum by (state) (turnlog_sandbox_pool_slots)", "{{state}}")]),
    (
        "Calls waiting for a sandbox",
        "short",
        [("sum by (backend) (turnlog_sandbox_pool_waiting)", "{{backend}}")],
    ),
    ("Wait for a sandbox, p50 and p99", "s", stage("sandbox", "wait")),
    (
        "Sandboxes: leaks and failed starts",
        "short",
        [
            ("sum by (backend) (increase(turnlog_sandbox_pool_leaks_total[5m]))", "{{backend}}: left in a sandbox"),
            ("sum by (kind) (increase(turnlog_sandbox_leaks_total[5m]))", "left by a dead worker: {{kind}}"),
            ("sum by (backend) (increase(turnlog_sandbox_pool_failures_total[5m]))", "{{backend}}: failed start"),
        ],
    ),
)
BOARDS = {"loop": ("turnlog: the loop", LOOP), "processors": ("turnlog: the log and its processors", PROCESSORS)}


def dashboards() -> dict[str, str]:
    """Return the dashboards as file name -> contents."""
    return {f"{name}.json": _board(f"turnlog-{name}", *of) for name, of in BOARDS.items()}


def _board(uid: str, title: str, shown: Sequence[Shown]) -> str:
    board = Dashboard(title).uid(uid).tags(["turnlog"]).refresh("10s").time("now-1h", "now").timezone("browser")
    for number, each in enumerate(shown, 1):
        board.with_panel(_panel(number, *each))
    return JSONEncoder(indent=1).encode(board.build()) + "\n"


def _panel(number: int, title: str, unit: str, queries: Sequence[Query]) -> Panel:
    panel = Panel().id(number).title(title).datasource(SOURCE).unit(unit).span(WIDTH).height(HEIGHT)
    if unit != "none":
        panel.min(0)
    for letter, (query, legend) in zip("ABCDEFGH", queries, strict=False):
        panel.with_target(Dataquery().ref_id(letter).expr(query).legend_format(legend).datasource(SOURCE))
    return panel


if __name__ == "__main__":
    for name, text in dashboards().items():
        (Path(sys.argv[1]) / name).write_text(text)
