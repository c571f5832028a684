"""Alerts that can be computed from the index alone: rules that two plugins share, the dashboard's first page and
`turnlog role alerts`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import orjson

from turnlog.consumers.index.reader import Index, Row
from turnlog.schemas.events.batches import same_weights_gap, same_weights_gaps_of_kinds

GAP: Final = 0.01
"""Log-prob gap in nats above which trainer and engine disagree about what was sampled; as in the alert TurnlogGap."""
Line = tuple[str, str]
"""Section of docs/operations.md, and the fault that its line names."""
STANDS: Final[Line] = ("Lag and admission", "a role stands still")
FAILED: Final[Line] = ("Settings and start", "restarts of a role do not help")
LINES: Final[Mapping[str, Line]] = {
    "dead_letters": ("Folds", "a writer is broken"),
    "unread": ("Folds", "records of a newer release"),
    "skipped": ("Trainer and engines", "gradient not finite"),
    "gap": ("Trainer and engines", "trainer and engine differ with the same weights"),
    "refused": ("Trainer and engines", "truncated or wrong weight file"),
    "late": ("Trainer and engines", "an engine serves an old version"),
    "flagged": ("Folds", "sessions are flagged as cheating"),
}
LOOKED_AT: Final = 1000
"""Number of newest rewarded sessions among which flagged ones raise an alert."""
FLAGGED: Final = """SELECT f.detector, count(DISTINCT f.session_id) AS n FROM flags f JOIN sessions s
    ON s.session_id = f.session_id WHERE s.excluded IS NOT 'flagged' AND f.session_id IN
    (SELECT session_id FROM solutions ORDER BY ended_ms DESC, session_id DESC LIMIT ?) GROUP BY f.detector ORDER BY 1"""


@dataclass(frozen=True, slots=True)
class Alarm:
    """An alert."""

    name: str
    """Name of the rule, with its subject if the rule has several. Equal names mean the same alert."""
    said: str
    """Description of what is wrong."""
    leads: str
    """Dashboard page that shows the evidence."""
    line: Line
    """Line of docs/operations.md that says what to do."""


def alarms(index: Index, steps: Sequence[Row], versions: Sequence[Row], engines: Sequence[Row]) -> Iterator[Alarm]:
    """Yield the alerts of one moment. The rows are those of `series`, `versions` and `engines` of the index."""

    def alarm(name: str, said: str, leads: str) -> Alarm:
        return Alarm(name, said, leads, LINES[name])

    for table, said in (
        ("dead_letters", "records were refused and dead-lettered"),
        ("unread", "records are on the log but in no table: from a newer turnlog, or broken"),
    ):
        found = index.row(f"SELECT count(*) AS n FROM {table}")
        if found and found["n"]:
            yield alarm(table, f"{found['n']:,} {said}", "/dead-letters")
    if skipped := [row["step"] for row in steps if row["skipped"]]:
        said = f"the gradient was not finite in step {', '.join(map(str, skipped[-5:]))}: nothing was learned"
        yield alarm("skipped", said, "/batches")
    for step in steps[-1:]:
        metrics = orjson.loads(step["metrics"] or "{}")
        gap = same_weights_gap(step["lag_max"], step["logprob_gap_max"], metrics)
        if gap is not None and gap > GAP:
            said = f"trainer and engine differ by {gap:.4g} nats in step {step['step']}, with the same weights"
            of_kinds = same_weights_gaps_of_kinds(step["lag_max"], metrics)
            said += "".join(f"; {kind} engines by {one:.4g}" for kind, one in sorted(of_kinds.items()))
            yield alarm("gap", said, f"/batches/{step['batch_index']}")
    refused = sum(len(orjson.loads(row["refused"] or "[]")) for row in versions[-5:])
    if refused:
        yield alarm("refused", f"{refused} refusals among the last five weight versions", "/weights")
    newest = versions[-1]["version"] if versions else None
    late = [row["engine_id"] for row in engines if row["state"] == "serving" and (behind(row, newest) or 0) > 1]
    if late:
        said = f"{', '.join(late)}: serving, and two or more versions behind the newest weights"
        yield alarm("late", said, "/weights")
    if flagged := index.rows(FLAGGED, LOOKED_AT):
        by = ", ".join(f"{row['detector']} {row['n']:,}" for row in flagged)
        said = f"of the newest {LOOKED_AT:,} rewarded sessions, detectors of cheating flag and nothing excludes: {by}"
        yield alarm("flagged", said, "/cheating")


def behind(engine: Row, newest: int | None) -> int | None:
    """Return by how many versions an engine is behind the newest weights, or None if either is unknown."""
    return None if newest is None or engine["version"] is None else newest - engine["version"]
