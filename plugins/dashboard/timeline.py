"""A batch over wall time: a lane for each of its sessions, with waits, generation and tool calls, and the moments at
which it was scored and folded; then the batch, the step, and where the step's seconds went. Times are those of the
records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import orjson
from markupsafe import Markup

from turnlog.consumers.index.reader import BatchView, Index, Row
from turnlog.plugins.dashboard.drawing import number
from turnlog.plugins.dashboard.harmless import visible

MOST = 48
"""Maximum number of lanes, for the sessions that began first."""
WIDTH, LEFT, LANE, TOP = 1100, 112, 15, 22
VERSIONS = 6
"""Number of colours for weight versions; they repeat."""
PHASES = {"wait": "wait", "checkpoint": "v1", "publish": "v2", "read": "v3", "step": "v0", "export": "v4"}
"""Phases of a step in their order, with their colours."""
OTHER = "v5"
"""Colour of phases that only a later release knows."""


@dataclass(frozen=True, slots=True)
class LaneSpan:
    """A stretch of a lane, in milliseconds since 1970."""

    start: float
    end: float
    style: str
    says: str


@dataclass(frozen=True, slots=True)
class SessionLane:
    """The lane of a session."""

    session: str
    spans: Sequence[LaneSpan]
    marks: Sequence[LaneSpan]
    """Moments, as spans of length 0."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """The chart of a batch."""

    picture: Markup
    seconds: Markup
    phases: Sequence[tuple[str, str, float]]
    """(class of the colour, phase, seconds) of the step."""
    legend: Sequence[tuple[str, str]]
    left_out: int
    """Number of sessions without a lane."""


def timeline(index: Index, of: BatchView, *, whole: bool = False) -> Timeline:
    """Draw a batch of the index: all its sessions if `whole`, else the first MOST."""
    most = len(of.rows) if whole else MOST
    names = list(dict.fromkeys(row["session_id"] for row in of.rows))
    marks = ",".join("?" * len(names))
    began = index.rows(f"SELECT session_id FROM sessions WHERE session_id IN ({marks}) ORDER BY started_ms", *names)
    lanes = [lane for row in began[:most] if (lane := _lane(index, row["session_id"])).spans]
    seconds = phases_of(of.step)
    sampled = index.rows(
        f"SELECT DISTINCT version_first AS n FROM turns WHERE session_id IN ({marks}) ORDER BY n", *names
    )
    versions = [(f"v{row['n'] % VERSIONS}", f"generation, version {row['n']}") for row in sampled]
    if len(versions) > VERSIONS:
        versions = [("v0", "generation, by weight version")]
    legend = [("wait", "queue"), *versions, ("called", "tool call"), ("failed", "failed call"),
              ("mark", "judged, folded")]  # fmt: skip
    phases = [(PHASES.get(phase, OTHER), phase, each) for phase, each in seconds]
    return Timeline(
        _draw_lanes(lanes, of),
        draw_phase_bar(seconds, "seconds of the step by phase"),
        phases,
        legend,
        max(len(began) - most, 0),
    )


def _lane(index: Index, session: str) -> SessionLane:
    turns = index.rows("SELECT * FROM turns WHERE session_id = ? ORDER BY place", session)
    calls = index.rows("SELECT * FROM tool_calls WHERE session_id = ? ORDER BY call_seq", session)
    spans = [*(span for row in turns for span in _turn(row)), *(span for row in calls for span in _call(row))]
    judged = index.rows(
        "SELECT kind, time_ms FROM session_events_records WHERE session_id = ? AND kind LIKE 'Reward%' "
        "UNION ALL SELECT 'folded', min(time_ms) FROM samples WHERE session_id = ?",
        session, session,
    )  # fmt: skip
    marks = [LaneSpan(row["time_ms"], row["time_ms"], "mark", row["kind"]) for row in judged if row["time_ms"]]
    return SessionLane(session, spans, marks)


def _turn(row: Row) -> Iterator[LaneSpan]:
    start = row["time_ms"] - 1000 * row["total_s"]
    asked = start + 1000 * row["queue_s"]
    said = f"turn {row['turn_index']}: {row['output_tokens']} tokens of version {row['version_first']}"
    if row["queue_s"]:
        yield LaneSpan(start, asked, "wait", f"turn {row['turn_index']}: {row['queue_s']:.2f} s in the queue")
    yield LaneSpan(asked, row["time_ms"], f"v{row['version_first'] % VERSIONS}", f"{said} in {row['total_s']:.2f} s")


def _call(row: Row) -> Iterator[LaneSpan]:
    if row["answered_ms"] is None or row["duration_s"] is None:
        return
    style = "called" if row["status"] == "ok" else "failed"
    said = f"{row['tool']}: {row['status']} in {row['duration_s']:.2f} s"
    yield LaneSpan(row["answered_ms"] - 1000 * row["duration_s"], row["answered_ms"], style, said)


def phases_of(step: Row | None) -> list[tuple[str, float]]:
    """Return the phases of a step that took time, in their order, with their seconds."""
    found: dict[str, float] = orjson.loads(step["seconds"]) if step is not None and step["seconds"] else {}
    ordered = [phase for phase in PHASES if phase in found] + [phase for phase in found if phase not in PHASES]
    return [(phase, found[phase]) for phase in ordered if found[phase] > 0]


def _draw_lanes(lanes: Sequence[SessionLane], of: BatchView) -> Markup:
    if not lanes:
        return Markup('<p class="empty">none of its sessions has a turn in the index</p>')
    step = of.step["time_ms"] if of.step is not None else None
    first: float = min(span.start for lane in lanes for span in lane.spans)
    last = max([of.row["time_ms"], *([step] if step else []), *(span.end for lane in lanes for span in lane.spans)])
    span_ms = float(max(last - first, 1))
    height = TOP + LANE * len(lanes) + 16

    def x(ms: float) -> float:
        return LEFT + (WIDTH - LEFT - 6) * (ms - first) / span_ms

    body = [_lane_drawn(lane, TOP + LANE * at, x(0), (x(1e6) - x(0)) / 1e6) for at, lane in enumerate(lanes)]
    for ms, name in ((of.row["time_ms"], "drawn"), *(((step, "step"),) if step else ())):
        tip = f"{name} after {number(round((ms - first) / 1000, 1))} s"
        body.append(
            Markup('<path class="moment" d="M{:.1f} {}V{}"/><text class="tick end" x="{:.1f}" y="{}">{}</text>').format(
                x(ms), TOP - 4, height - 14, x(ms) - 2, TOP - 8 if name == "step" else height - 3, tip
            )
        )
    return Markup('<svg class="timeline" viewBox="0 0 {} {}" role="group" aria-label="{}">{}</svg>').format(
        WIDTH, height, f"{len(lanes)} sessions over {number(round((last - first) / 1000, 1))} seconds",
        Markup("").join(body),
    )  # fmt: skip


BAR = Markup('<rect class="{}" x="{:.1f}" y="{}" width="{:.1f}" height="{}" data-tip="{}"/>')


_NAME = Markup(
    '<a href="/sessions/{}" aria-label="{}" data-tip="{}"><text class="tick name" x="2" y="{}">{}</text></a>'
)
KINDS = {"wait": "queue", "called": "calls", "failed": "failed calls"}


def _describe_seconds(spans: Sequence[LaneSpan]) -> str:
    """Describe the seconds of a lane by kind."""
    found: dict[str, float] = {}
    for one in spans:
        kind = KINDS.get(one.style, "generation")
        found[kind] = found.get(kind, 0.0) + (one.end - one.start) / 1000
    return ", ".join(f"{kind} {seconds:.2f} s" for kind, seconds in found.items())


def _lane_drawn(lane: SessionLane, y: int, zero: float, per_ms: float) -> Markup:
    """Draw a lane. `zero` is the x position of time 0, `per_ms` the width of a millisecond."""
    says = f"session {lane.session[:12]}: {_describe_seconds(lane.spans)}"
    found = [_NAME.format(lane.session, says, says, y + 10, lane.session[:12])]
    for span in lane.spans:
        start, wide = zero + span.start * per_ms, max((span.end - span.start) * per_ms, 1.2)
        found.append(BAR.format(f"span {span.style}", start, y + 1, wide, LANE - 4, visible(span.says)))
    for mark in lane.marks:
        found.append(BAR.format("span mark", zero + mark.start * per_ms - 1, y, 2, LANE - 2, mark.says))
    return Markup("").join(found)


def draw_phase_bar(phases: Sequence[tuple[str, float]], label: str) -> Markup:
    """Draw the seconds of phases as one bar."""
    total, left, found = sum(seconds for _, seconds in phases), 0.0, []
    for phase, seconds in phases:
        wide, tip = seconds / total * WIDTH, f"{phase}: {number(round(seconds, 3))} s, {seconds / total:.0%}"
        found.append(BAR.format(f"span {PHASES.get(phase, OTHER)}", left, 0, wide, 14, tip))
        left += wide
    return Markup('<svg class="timeline" viewBox="0 0 {} 14" role="img" aria-label="{}">{}</svg>').format(
        WIDTH, label, Markup("").join(found)
    )
