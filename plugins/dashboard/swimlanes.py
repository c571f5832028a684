"""A run over wall time: a lane each for the trainer, the weights, every engine and every sandbox worker.

Times are those of the records. The index sums large numbers of records into columns, so that the chart of a day is as
large as that of a minute.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from urllib.parse import urlencode

import orjson
from markupsafe import Markup

from turnlog.consumers.index import BadQuestion
from turnlog.consumers.index.reader import AsOf, Index, Row
from turnlog.plugins.dashboard.drawing import number
from turnlog.plugins.dashboard.harmless import visible
from turnlog.plugins.dashboard.timeline import (
    BAR,
    LEFT,
    OTHER,
    PHASES,
    VERSIONS,
    WIDTH,
    LaneSpan,
    draw_phase_bar,
    phases_of,
)

COLUMNS = 240
"""Number of columns into which running items are summed, and that limit the spans drawn in a lane."""
LONGEST_MS = 3_600_000
"""Records of turns and calls are written at their end, so they are read up to this many milliseconds after the
window."""
NEWEST_MS = 600_000
"""Default length of the window in milliseconds: the end of the run."""
PARTS = 12
"""Number of parts of a window. Each is a link that shows it alone."""
MOST = 16
"""Maximum number of lanes of one kind. The others share one more lane."""
LANE, TOP = 24, 22
RUNNING = """WITH known AS (SELECT {lane} AS lane, time_ms - 1000.0 * ({seconds}) AS start, time_ms AS stop
    FROM {table} WHERE counts AND time_ms BETWEEN ?1 AND ?2 + ?3)
    SELECT lane, CAST(at AS INTEGER) AS bin, sum(sign) AS count, sum(sign * at) AS places FROM (
    SELECT lane, 1 AS sign, max(start - ?1, 0) * ?4 AS at FROM known WHERE start < ?2 UNION ALL
    SELECT lane, -1, min(stop - ?1, ?2 - ?1) * ?4 FROM known WHERE start < ?2)
    GROUP BY lane, bin"""
"""SQL for the starts (1) and ends (-1) in each column of a window from ?1 to ?2. ?3 is LONGEST_MS; ?4 is the number of
columns per millisecond."""
TIMED = ("turns_records", "tool_results_records", "steps_records", "engine_events_records")
ENDS = f"""SELECT min(first) AS first, max(last) AS last FROM (
    SELECT (SELECT min(started_ms) FROM sessions WHERE started_ms > 0) AS first, NULL AS last {
    " ".join(f"UNION ALL SELECT (SELECT min(time_ms) FROM {each}), (SELECT max(time_ms) FROM {each})" for each in TIMED)
})"""
STEPS = "SELECT * FROM steps WHERE time_ms BETWEEN ? AND ? ORDER BY time_ms"
PUBLISHED = """SELECT time_ms, version, kind, bytes, iif(transport = 'direct', 'announced', 'published') AS what
    FROM versions WHERE time_ms BETWEEN ?1 AND ?2
    UNION ALL SELECT stored_ms, version, kind, bytes, 'stored' FROM versions WHERE stored_ms BETWEEN ?1 AND ?2
    ORDER BY 1"""
SERVED = "SELECT * FROM engine_events WHERE time_ms <= ? ORDER BY engine_id, time_ms, place"


@dataclass(frozen=True, slots=True)
class TimeWindow:
    """A window of time in milliseconds since 1970."""

    first: int
    last: int

    @property
    def ms(self) -> int:
        return self.last - self.first

    def cut(self, spans: Iterable[LaneSpan]) -> Iterator[LaneSpan]:
        """Yield the parts of spans that lie within the window."""
        for one in spans:
            if one.end >= self.first and one.start <= self.last:
                yield LaneSpan(max(one.start, self.first), min(one.end, self.last), one.style, one.says)

    def part(self, number: int) -> TimeWindow:
        """Return the n-th of PARTS parts."""
        edges = [self.first + self.ms * at // PARTS for at in (number, number + 1)]
        return TimeWindow(edges[0], max(edges[1], edges[0] + 1))

    @property
    def query_string(self) -> str:
        """Query string of the page that shows this window."""
        return urlencode({"from": self.first, "to": self.last})


@dataclass(frozen=True, slots=True)
class ChartLane:
    """A lane of the chart."""

    name: str
    leads: str
    """Link to the page with details."""
    says: str
    spans: Sequence[LaneSpan] = ()
    running: Sequence[float] = ()
    """Mean number of items running at once, by column."""


@dataclass(frozen=True, slots=True)
class Swimlanes:
    """A window of a run as a chart."""

    picture: Markup
    window: TimeWindow
    links: Sequence[tuple[str, str]]
    """(name, query) of other windows."""
    steps: int
    """Number of steps that ended in the window."""
    seconds: Markup
    """Bar that shows where their time went."""
    phases: Sequence[tuple[str, str, float]]
    """(class of the colour, phase, seconds)"""
    as_of: AsOf


def swimlanes(index: Index, first: int | None = None, last: int | None = None) -> Swimlanes | None:
    """Draw the run from `first` to `last`, in milliseconds since 1970; by default the newest NEWEST_MS. Return None if
    nothing has happened yet. Raises BadQuestion."""
    with index.snapshot() as as_of:
        ends = index.row(ENDS)
        if ends is None or ends["first"] is None:
            return None
        whole = TimeWindow(ends["first"], max(ends["last"], ends["first"] + 1))
        window = _resolve_window(whole, first, last)
        steps = index.rows(STEPS, window.first, window.last + LONGEST_MS)
        lanes = [_trainer(window, steps), _weights(window, index), *_engines(window, index), *_sandboxes(window, index)]
    ended = [row for row in steps if row["time_ms"] <= window.last]
    seconds: dict[str, float] = {}
    for row in ended:
        for phase, each in phases_of(row):
            seconds[phase] = seconds.get(phase, 0.0) + each
    bar = draw_phase_bar(list(seconds.items()), f"seconds of {len(ended)} steps")
    phases = [(PHASES.get(phase, OTHER), phase, each) for phase, each in seconds.items()]
    return Swimlanes(_draw_lanes(window, lanes), window, _links(whole, window), len(ended), bar, phases, as_of)


def _resolve_window(whole: TimeWindow, first: int | None, last: int | None) -> TimeWindow:
    last = whole.last if last is None else last
    first = max(whole.first, last - NEWEST_MS) if first is None else first
    if not 0 <= first < last < 1 << 50:
        raise BadQuestion(f"from {first} to {last} is not a period: write milliseconds since 1970, the earlier first")
    return TimeWindow(first, last)


def _links(whole: TimeWindow, at: TimeWindow) -> list[tuple[str, str]]:
    """Return links to windows beside, inside and around this one, within the run."""
    half = at.ms // 2
    found = []
    if at.first > whole.first:
        found.append(("earlier", TimeWindow(max(at.first - half, 0), at.last - half).query_string))
    if at.last < whole.last:
        found.append(("later", TimeWindow(at.first + half, at.last + half).query_string))
    if at.first > whole.first or at.last < whole.last:
        found.append(("wider", TimeWindow(max(at.first - half, 0), at.last + half).query_string))
        found.append(("whole run", whole.query_string))
    if at.ms > 4:
        found.append(("closer", TimeWindow(at.first + at.ms // 4, at.last - at.ms // 4).query_string))
    return found


def _trainer(window: TimeWindow, steps: Sequence[Row]) -> ChartLane:
    """Return the lane of the trainer. The phases of a step are drawn one after another, ending at its record."""
    spans = []
    for row in steps:
        parts = phases_of(row)
        ends = accumulate((1000 * seconds for _, seconds in parts), initial=row["time_ms"] - _total_ms(parts))
        for (phase, seconds), (start, end) in zip(parts, pairwise(ends), strict=True):
            said = f"step {row['step']}, batch {row['batch_index']}: {phase} {number(round(seconds, 3))} s"
            spans.append(LaneSpan(start, end, PHASES.get(phase, OTHER), said))
    ended = sum(row["time_ms"] <= window.last for row in steps)
    return ChartLane("trainer", "/batches", f"{ended} steps", spans)


def _total_ms(parts: Sequence[tuple[str, float]]) -> float:
    return 1000 * sum(seconds for _, seconds in parts)


def _weights(window: TimeWindow, index: Index) -> ChartLane:
    rows = index.rows(PUBLISHED, window.first, window.last)
    spans = [
        LaneSpan(row["time_ms"], row["time_ms"], "mark", f"version {row['version']} {row['what']}"
             + ("" if row["what"] == "announced" else f": {row['kind']}, {number(row['bytes'])} bytes"))
        for row in rows
    ]  # fmt: skip
    published = sum(row["what"] != "stored" for row in rows)
    return ChartLane("weights", "/weights", f"{published} versions published", spans)


def _engines(window: TimeWindow, index: Index) -> Iterator[ChartLane]:
    running = running_by(window, index, "turns_records", "engine_id", "total_s - queue_s")
    said: dict[str, list[Row]] = {}
    for row in index.rows(SERVED, window.last + LONGEST_MS):
        said.setdefault(row["engine_id"], []).append(row)
    for name, columns in busiest(running, said):
        spans = list(_engine_spans(window, said.get(name, ())))
        versions = [row["version"] for row in said.get(name, ()) if window.first <= row["time_ms"] <= window.last]
        swaps = sum(one.style == "swap" for one in spans)
        loaded = f"; {swaps} swaps, versions {min(versions)} to {max(versions)}" if versions else ""
        yield ChartLane(name, "/weights", f"{_load(columns)} open requests{loaded}", spans, columns)


def _engine_spans(window: TimeWindow, said: Sequence[Row]) -> Iterator[LaneSpan]:
    """Yield the versions that an engine served and, over them, the weight update that brought each."""
    for row, following in zip(said, [*said[1:], None], strict=True):
        end = window.last if following is None else following["time_ms"]
        if row["state"] == "serving" and row["version"] is not None:
            style = f"v{row['version'] % VERSIONS}"
            yield LaneSpan(row["time_ms"], end, style, f"serves version {row['version']}")
        seconds = sum(orjson.loads(row["seconds"] or "{}").values())
        if seconds:
            swapped = f"swapped version {row['version']} in, in {number(round(seconds, 3))} s"
            yield LaneSpan(row["time_ms"] - 1000 * seconds, row["time_ms"], "swap", swapped)
        elif row["refused_version"] is not None:
            yield LaneSpan(row["time_ms"], row["time_ms"], "failed", f"refused version {row['refused_version']}")


def _sandboxes(window: TimeWindow, index: Index) -> Iterator[ChartLane]:
    running = running_by(window, index, "tool_results_records", "worker", "duration_s")
    running.pop("", None)  # answers without an execution name no worker
    for name, columns in busiest(running, ()):
        yield ChartLane(name, "/sandboxes", f"{_load(columns)} calls running", (), columns)


def _load(columns: Sequence[float]) -> str:
    return f"{number(round(sum(columns) / COLUMNS, 2))} on average and at most {number(round(max(columns), 1))}"


def busiest(running: Mapping[str, Sequence[float]], known: Iterable[str]) -> Iterator[tuple[str, Sequence[float]]]:
    """Yield lanes by name: the busiest ones, then all others as one."""
    loads = {name: running.get(name, [0.0] * COLUMNS) for name in {*running, *known}}
    ranked = sorted(loads, key=lambda name: (-sum(loads[name]), name))
    yield from ((name, loads[name]) for name in sorted(ranked[:MOST]))
    if others := ranked[MOST:]:
        yield f"{len(others)} others", [sum(at) for at in zip(*(loads[name] for name in others), strict=True)]


def running_by(window: TimeWindow, index: Index, table: str, lane: str, seconds: str) -> dict[str, list[float]]:
    """Return the mean number of items running in each column, by lane.

    Positions are in columns. Up to the end c of a column, the items that began at positions b and ended at positions e
    have filled sum(c - b) - sum(c - e) columns.
    """
    sql = RUNNING.format(table=table, lane=lane, seconds=seconds)
    begun: dict[str, list[tuple[float, float]]] = {}
    for row in index.rows(sql, window.first, window.last, LONGEST_MS, COLUMNS / window.ms):
        columns = begun.setdefault(row["lane"], [(0.0, 0.0)] * (COLUMNS + 1))
        columns[row["bin"]] = row["count"], row["places"]
    found = {}
    for name, columns in begun.items():
        sums = accumulate(columns[:COLUMNS], lambda one, other: (one[0] + other[0], one[1] + other[1]))
        until = [0.0, *(count * column - places for column, (count, places) in enumerate(sums, 1))]
        found[name] = [max(0.0, after - before) for before, after in pairwise(until)]
    return found


def _draw_lanes(window: TimeWindow, lanes: Sequence[ChartLane]) -> Markup:
    height = TOP + LANE * len(lanes) + 4
    body = [_axis(window, height)]
    body += [_lane(window, lane, TOP + LANE * at) for at, lane in enumerate(lanes)]
    label = f"{len(lanes)} lanes over {number(round(window.ms / 1000, 1))} seconds"
    return Markup('<svg class="timeline" viewBox="0 0 {} {}" role="group" aria-label="{}">{}</svg>').format(
        WIDTH, height, label, Markup("").join(body)
    )


_PART = Markup(
    '<a href="/timeline?{}" aria-label="{}" data-tip="{}"><rect class="hit" x="{:.1f}" y="0" width="{:.1f}" '
    'height="{}"/><text class="tick" x="{:.1f}" y="11">{}</text></a><path class="grid" d="M{:.1f} {}V{}"/>'
)
_NAME = Markup(
    '<a href="{}" aria-label="{}" data-tip="{}"><text class="tick name" x="2" y="{}">{}</text></a>'
    '<path class="grid" d="M{} {}H{}"/>'
)


def _axis(window: TimeWindow, height: int) -> Markup:
    """Draw the parts of the window, each with the time of day at which it begins."""
    found = []
    for at in range(PARTS):
        part = window.part(at)
        x, wide = _x(window, part.first), (WIDTH - LEFT - 6) / PARTS
        clock = _clock(part.first, fine=window.ms < 30_000)
        said = f"{clock} UTC: zoom in"
        found.append(_PART.format(part.query_string, said, said, x, wide, height, x + 2, clock, x, TOP - 8, height - 4))
    return Markup("").join(found)


def _clock(ms: int, *, fine: bool) -> str:
    """Format the time of day in UTC."""
    shown = time.strftime("%H:%M:%S", time.gmtime(ms / 1000))
    return f"{shown}.{ms % 1000:03d}" if fine else shown


def _x(window: TimeWindow, ms: float) -> float:
    return LEFT + (WIDTH - LEFT - 6) * (ms - window.first) / window.ms


def _lane(window: TimeWindow, lane: ChartLane, y: int) -> Markup:
    name, says = visible(lane.name), visible(f"{lane.name}: {lane.says}")
    found = [_NAME.format(lane.leads, says, says, y + 15, name[:17], LEFT, y + LANE - 2, WIDTH - 6)]
    tall = LANE - 5
    if lane.running:
        tall, most = 5, max(*lane.running, 1e-9)
        wide = (WIDTH - LEFT - 6) / COLUMNS
        path = "".join(f"V{y + LANE - 2 - (LANE - 9) * each / most:.1f}h{wide:.3f}" for each in lane.running)
        area = f"M{LEFT} {y + LANE - 2}{path}V{y + LANE - 2}Z"
        found.append(Markup('<path class="running" d="{}" data-tip="{}"/>').format(area, says))
    for one in merge_spans(window, lane.spans):
        start, end = _x(window, one.start), _x(window, one.end)
        found.append(BAR.format(f"span {one.style}", start, y + 1, max(end - start, 1.5), tall, visible(one.says)))
    return Markup("").join(found)


def merge_spans(window: TimeWindow, spans: Iterable[LaneSpan]) -> Iterator[LaneSpan]:
    """Yield the spans in order, weight updates and failures last (on top). Neighbours within one column are merged, so
    there are at most twice as many spans as columns."""
    column = window.ms / COLUMNS
    layers: dict[bool, list[tuple[LaneSpan, int]]] = {}
    for one in window.cut(spans):
        over = layers.setdefault(one.style in ("swap", "failed"), [])
        if over and one.end - over[-1][0].start < column:
            last, count = over[-1]
            longer = max(last, one, key=lambda each: each.end - each.start)
            over[-1] = LaneSpan(last.start, one.end, longer.style, one.says), count + 1
        else:
            over.append((one, 1))
    for _, layer in sorted(layers.items()):
        for one, count in layer:
            says = one.says if count == 1 else f"{count} events, the last: {one.says}"
            yield LaneSpan(one.start, one.end, one.style, says)
