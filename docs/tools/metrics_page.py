"""Generate docs/metrics.md from the code: every metric of every process with its unit and labels.

The sources are parsed and not imported: metrics are module constants, and some of the modules that declare them take
seconds to import.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("producers", "processors", "consumers", "sandbox_workers", "trainer", "infra", "plugins")
KINDS = {"Counter": "_total", "Gauge": "", "Histogram": "", "Summary": ""}
"""prometheus_client class -> suffix that it adds to the name."""
UNITS = ("seconds", "bytes", "tokens", "records", "versions")
HEAD = """\
# Metrics

Every process serves the metrics of the modules that it runs, in the text format of Prometheus, at `/metrics` of its
health address (`TURNLOG_HEALTH_PORT`). The last word of a name is its unit; a name without a unit counts things.
Histograms add `_bucket`, `_sum` and `_count`, and summaries `_sum` and `_count`. No label holds a session, a group,
a call, an address or text of an agent, because their number would have no bound. [runbook.md](runbook.md) has the
alerts on these metrics. This page is generated (`make docs`).
"""
OF_EVERY_ROLE = """
## Common to all roles

`turnlog_log_unread_records` counts the records that a role has not read yet, and `turnlog_role_lag_records` those
that a role has not committed. `turnlog_log_bytes_total` counts the bytes that it reads and writes.
`turnlog_role_restarts` is set by the supervisor of `turnlog up`, or by anyone who sets `TURNLOG_RESTARTS`. On
Kubernetes it stays 0, because kube-state-metrics counts restarts (`kube_pod_container_status_restarts_total`).
`turnlog_stage_seconds` measures these stages, beside the histograms of the gateway and the sandbox worker:

"""
STAGES = "STAGE_S"
"""Name of the stage histogram in the modules."""
PHASES = "`seconds` of its records, by phase"


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric family, as declared in its module."""

    room: str
    """The top-level package that declares it."""
    name: str
    """Name as exported to Prometheus."""
    kind: str
    labels: tuple[str, ...]
    about: str

    @property
    def unit(self) -> str:
        """Unit of the values, or "" for a count."""
        last = self.name.removesuffix("_total").rpartition("_")[2]
        return last if last in UNITS else ""


def metrics() -> list[Metric]:
    """Return all metrics, sorted by package and name."""
    paths = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    return sorted(
        (metric for path in paths for metric in _declared_metrics(path)), key=lambda each: (each.room, each.name)
    )


def _declared_metrics(path: Path) -> Iterator[Metric]:
    source = path.read_text()
    tree = ast.parse(source if '"turnlog_' in source else "")  # to parse all of them takes seconds
    values = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    room = next(part for part in reversed(path.parts) if part in ROOMS)
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in KINDS:
            said = [str(each.value) for each in call.args[:2] if isinstance(each, ast.Constant)]
            if len(said) == 2 and said[0].startswith("turnlog_"):
                labels = call.args[2] if len(call.args) > 2 else ast.Tuple([])
                found = ast.literal_eval(values[labels.id] if isinstance(labels, ast.Name) else labels)
                name = f"{said[0]}{KINDS[call.func.id]}"
                yield Metric(room, name, call.func.id.lower(), tuple(found), said[1])


def stages() -> dict[str, tuple[str, ...]]:
    """Return role -> its stages, in the order of its module; empty where the records that the role writes name them."""
    found: dict[str, tuple[str, ...]] = {}
    paths = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    for path in paths:
        source = path.read_text()
        tree = ast.parse(source if STAGES in source else "")
        among = {
            id(each.elt): ast.literal_eval(each.generators[0].iter)
            for each in ast.walk(tree)
            if isinstance(each, ast.GeneratorExp) and _names_stage(each.elt)
        }
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and _names_stage(call):
                role, stage = ast.literal_eval(call.args[0]), call.args[1]
                named = (ast.literal_eval(stage),) if isinstance(stage, ast.Constant) else among.get(id(call), ())
                found[role] = (*found.get(role, ()), *named)
    return dict(sorted(found.items()))


def _names_stage(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == f"{STAGES}.labels"


def metrics_page() -> str:
    """Render the whole page."""
    parts = [HEAD, OF_EVERY_ROLE, "| role | stages |\n|---|---|\n"]
    for role, names in stages().items():
        parts.append(f"| `{role}` | {', '.join(f'`{name}`' for name in names) or PHASES} |\n")
    for room, found in groupby(metrics(), lambda each: each.room):
        rows = [
            f"| `{each.name}` | {each.kind} | {each.unit} | {', '.join(f'`{label}`' for label in each.labels)} | "
            f"{each.about.replace('|', chr(92) + '|')} |"
            for each in found
        ]
        table = ["| metric | kind | unit | labels | what |", "|---|---|---|---|---|", *rows, ""]
        parts.append("\n".join([f"\n## {room}\n", *table]))
    return "".join(parts)


if __name__ == "__main__":
    sys.stdout.write(metrics_page())
