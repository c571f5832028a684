"""Charts as SVG, generated from numbers. They have no style of their own, so that the page's light or dark colours
apply. Everything that can be pointed at has a `data-tip`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from turnlog.plugins.dashboard.conversation import ConversationView, TurnView
from turnlog.plugins.dashboard.harmless import visible

WIDTH, HEIGHT = 420, 132
LEFT, RIGHT, TOP, BOTTOM = 46, 8, 8, 20
MOST = 400
"""Maximum number of points of a curve; longer series are thinned."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Values over steps; None if a step has none."""

    name: str
    values: Sequence[float | None]
    style: str = "c0"
    """CSS class of its colour."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Band behind a curve, from `low` to `high` at each step."""

    low: Sequence[float | None]
    high: Sequence[float | None]


def number(value: float | int | None) -> str:
    """Format a number for the pages: four digits, with thousands separators; a dash for None."""
    if value is None or not math.isfinite(value):
        return "–" if value is None else str(value)
    if isinstance(value, int) or (float(value).is_integer() and abs(value) < 1e6):
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1e5 else f"{value:.4g}"


def clock(ms: int | None) -> str:
    """Format a record time in UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(ms / 1000)) + " UTC" if ms else "–"


@dataclass(frozen=True, slots=True)
class _Frame:
    """Coordinates of a chart."""

    count: int
    ticks: Sequence[float]
    """Values of the horizontal lines in ascending order. The first and the last bound the frame."""

    @property
    def low(self) -> float:
        return self.ticks[0]

    @property
    def high(self) -> float:
        return self.ticks[-1]

    def x(self, at: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (at + 0.5) / max(self.count, 1)

    def y(self, value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - (value - self.low) / (self.high - self.low))

    def line(self, values: Sequence[float | None]) -> str:
        """Return an SVG path, interrupted where a number is missing."""
        parts, pen = [], "M"
        for at, value in enumerate(values):
            if value is None or not math.isfinite(value):
                pen = "M"
                continue
            parts.append(f"{pen}{self.x(at):.1f} {self.y(value):.1f}")
            pen = "L"
        if len(parts) == 1:  # a single point would be invisible
            parts.append("h.1")
        return "".join(parts)

    def area(self, low: Sequence[float | None], high: Sequence[float | None]) -> str:
        """Return the area between two series, over steps where both have numbers."""
        at = [n for n, (a, b) in enumerate(zip(low, high, strict=True)) if a is not None and b is not None]
        there = [f"{self.x(n):.1f} {self.y(high[n] or 0.0):.1f}" for n in at]
        back = [f"{self.x(n):.1f} {self.y(low[n] or 0.0):.1f}" for n in reversed(at)]
        return "M" + "L".join([*there, *back]) + "Z" if len(at) > 1 else ""


def smooth(values: Sequence[float | None], weight: float) -> list[float | None]:
    """Return the exponential moving average in which the past has `weight`. It is corrected for the bias towards the
    first value, as Adam's moments are (Kingma and Ba 2015, section 3). Gaps stay gaps."""
    found: list[float | None] = []
    mean, rest = 0.0, 1.0
    for value in values:
        if value is None or not math.isfinite(value) or weight <= 0:
            found.append(value)
            continue
        mean, rest = mean * weight + value * (1 - weight), rest * weight
        found.append(mean / (1 - rest))
    return found


def curves(
    title: str, steps: Sequence[int], drawn: Sequence[Curve], *, spread: Spread | None = None,
    floor: float | None = None, whole: bool = False,
) -> Markup:  # fmt: skip
    """Draw curves over steps in one frame; a message if no step has a number. The axis extends down to `floor` at
    least. With `whole`, its lines are at integers."""
    steps, drawn, spread = _thin_curves(steps, drawn, spread)
    shown = [*(value for curve in drawn for value in curve.values), *((*spread.low, *spread.high) if spread else ())]
    finite = [value for value in shown if value is not None and math.isfinite(value)]
    if not finite:
        return Markup('<p class="empty">no step has reported it yet</p>')
    low = min(finite) if floor is None else min(floor, *finite)
    frame = _Frame(len(steps), axis(low, max(finite), whole=whole))
    body = [_axes(frame, steps)]
    if spread is not None:
        body.append(Markup('<path class="spread" d="{}"/>').format(frame.area(spread.low, spread.high)))
    body += [Markup('<path class="curve {}" d="{}"/>').format(one.style, frame.line(one.values)) for one in drawn]

    def tip(at: int) -> str:
        said = [f"{curve.name} {number(curve.values[at])}" for curve in drawn]
        if spread is not None:
            said.append(f"from {number(spread.low[at])} to {number(spread.high[at])}")
        return f"step {steps[at]}: {', '.join(said)}"

    body.append(_columns(frame, tip))
    last = ", ".join(f"{curve.name} {number(_last(curve.values))}" for curve in drawn)
    return _svg(f"{title} over {len(steps)} steps; last {last}", body)


def bands(title: str, steps: Sequence[int], parts: Mapping[str, Sequence[float]], styles: Mapping[str, str]) -> Markup:
    """Draw the parts of a whole over steps as stacked bars."""
    stride = -(-len(steps) // MOST) or 1
    steps = steps[::stride]
    parts = {name: values[::stride] for name, values in parts.items()}
    totals = [sum(values[at] for values in parts.values()) for at in range(len(steps))]
    if not any(totals):
        return Markup('<p class="empty">no step has reported it yet</p>')
    frame = _Frame(len(steps), axis(0.0, max(totals), whole=True))
    width = (WIDTH - LEFT - RIGHT) / len(steps)
    bar = max(width - 0.4, 0.4)
    body, below = [_axes(frame, steps)], [0.0] * len(steps)
    for name, values in parts.items():
        path = ""
        for at, value in enumerate(values):
            if value:
                left, bottom, top = frame.x(at) - width / 2, frame.y(below[at]), frame.y(below[at] + value)
                path += f"M{left:.2f} {bottom:.1f}h{bar:.2f}V{top:.1f}h-{bar:.2f}Z"
                below[at] += value
        body.append(Markup('<path class="band {}" d="{}"/>').format(styles.get(name, "k-other"), path))

    def tip(at: int) -> str:
        return f"step {steps[at]}: " + ", ".join(f"{name} {number(values[at])}" for name, values in parts.items())

    return _svg(f"{title} over {len(steps)} steps", [*body, _columns(frame, tip)])


def histogram(
    bins: Sequence[Mapping[str, float]], href: Callable[[float, float], str], chosen: bool, *, sample: bool = False
) -> Markup:
    """Draw the number of sessions by reward, from all sessions or a `sample`. Each bar links to its range."""
    if not bins:
        return Markup('<p class="empty">no sessions with a reward</p>')
    width, height, base = 300, 56, 42
    least, most = min(one["least"] for one in bins), max(one["most"] for one in bins)
    span, tallest = (most - least) or 1.0, max(one["sessions"] for one in bins)
    body = []
    for one in bins:
        left, right = ((one[key] - least) / span * (width - 4) + 2 for key in ("least", "most"))
        tall = max(2.0, one["sessions"] / tallest * (base - 4))
        said = f"reward {number(one['least'])} to {number(one['most'])}: {number(one['sessions'])} sessions"
        body.append(
            _BAR.format(
                href(one["least"], one["most"]), said, said, left, max(right - left, 3), base,
                " chosen" if chosen else "", left + 0.5, base - tall, max(right - left - 1, 2), tall,
            )
        )  # fmt: skip
    body += [
        Markup('<text class="tick{}" x="{}" y="{}">{}</text>').format(style, x, height - 2, said)
        for style, x, said in (
            ("", 2, number(least)), (" middle", width / 2, "sample of the matching sessions" if sample else ""),
            (" end", width - 2, number(most)),
        )
    ]  # fmt: skip
    return Markup(
        '<svg class="histogram" viewBox="0 0 {} {}" role="group" aria-label="sessions by reward">{}</svg>'
    ).format(width, height, Markup("").join(body))


_BAR = Markup(
    '<a href="{}" aria-label="{}" data-tip="{}"><rect class="hit" x="{:.1f}" y="0" width="{:.1f}" height="{}"/>'
    '<rect class="bar{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/></a>'
)
STEP_X, LANE_Y = 22, 26
_NODE = Markup(
    '<a href="#turn-{}" aria-label="{}" data-tip="{}" data-turn="{}"><rect class="hit" x="{}" y="{}" width="{}" '
    'height="{}"/>{}</a>'
)


def tree(of: ConversationView) -> Markup:
    """Draw turns from left to right in log order, each on the lane of the turn that it continues. A circle is a turn, a
    diamond a turn whose prompt was rewritten, a square a root. Areas are proportional to the output."""
    width, height = 24 + STEP_X * len(of.turns), 14 + LANE_Y * of.lanes
    body = []
    for turn in of.turns:
        if turn.base is not None:
            body.append(
                Markup('<path class="branch lane-{}" d="{}"/>').format(turn.kind, _edge(of.turns[turn.base], turn))
            )
    for turn in of.turns:
        x, y = _at(turn)
        why = f" ({turn.why})" if turn.why else ""
        who = f", by {turn.row['agent_path']}" if turn.row["agent_path"] else ""
        tokens = f"{number(turn.row['prompt_tokens'])} + {number(turn.row['output_tokens'])} tokens"
        said = visible(f"turn {turn.number}: {turn.kind}{why}, {tokens}, {turn.row['finish_reason']}{who}")
        left, top = x - STEP_X / 2, y - LANE_Y / 2
        body.append(_NODE.format(turn.number, said, said, turn.number, left, top, STEP_X, LANE_Y, _mark(turn, x, y)))
    return Markup(
        '<svg class="tree" width="{}" height="{}" viewBox="0 0 {} {}" role="group" aria-label="{} turns">{}</svg>'
    ).format(width, height, width, height, len(of.turns), Markup("").join(body))


def _at(turn: TurnView) -> tuple[float, float]:
    return 18 + STEP_X * turn.number, 18 + LANE_Y * turn.lane


def _edge(base: TurnView, turn: TurnView) -> str:
    (x0, y0), (x1, y1) = _at(base), _at(turn)
    if y0 == y1:
        return f"M{x0} {y0}H{x1}"
    return f"M{x0} {y0}C{x0 + STEP_X * 0.7} {y0} {x0 + STEP_X * 0.3} {y1} {x0 + STEP_X} {y1}H{x1}"


def _mark(turn: TurnView, x: float, y: float) -> Markup:
    size = min(3.5 + math.sqrt(max(turn.row["output_tokens"], 1)) / 5, 8.5)
    kind = f"node n-{turn.kind}"
    if turn.kind == "root":
        return Markup('<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" rx="1.5"/>').format(
            kind, x - size, y - size, 2 * size, 2 * size
        )
    if turn.kind == "branch":
        d = f"M{x} {y - size - 1.5:.1f}L{x + size + 1.5:.1f} {y}L{x} {y + size + 1.5:.1f}L{x - size - 1.5:.1f} {y}Z"
        return Markup('<path class="{}" d="{}"/>').format(kind, d)
    return Markup('<circle class="{}" cx="{}" cy="{}" r="{:.1f}"/>').format(kind, x, y, size)


def _axes(frame: _Frame, steps: Sequence[int]) -> Markup:
    parts = []
    for value in frame.ticks:
        y = frame.y(value)
        parts.append(
            Markup('<path class="grid" d="M{} {:.1f}H{}"/><text class="tick end" x="{}" y="{:.1f}">{}</text>').format(
                LEFT, y, WIDTH - RIGHT, LEFT - 5, y + 3.5, _short(value)
            )
        )
    parts.append(
        Markup('<text class="tick" x="{}" y="{}">step {}</text><text class="tick end" x="{}" y="{}">{}</text>').format(
            LEFT, HEIGHT - 5, steps[0], WIDTH - RIGHT, HEIGHT - 5, steps[-1] if len(steps) > 1 else ""
        )
    )
    return Markup("").join(parts)


def _short(value: float) -> str:
    """Format a number for an axis, with at most six characters."""
    for size, mark in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{mark}"
    return f"{value:.3g}" if value == 0 or abs(value) >= 1e-2 else f"{value:.1e}".replace("e-0", "e-")


def _columns(frame: _Frame, tip: Callable[[int], str]) -> Markup:
    """Draw an invisible column over each step, as the target of its tip."""
    width = (WIDTH - LEFT - RIGHT) / frame.count
    column = Markup('<rect class="hit" x="{:.1f}" y="{}" width="{:.1f}" height="{}" data-tip="{}"/>')
    return Markup("").join(
        column.format(frame.x(at) - width / 2, TOP, width, HEIGHT - TOP - BOTTOM, tip(at)) for at in range(frame.count)
    )


def _svg(label: str, body: Sequence[Markup]) -> Markup:
    return Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        WIDTH, HEIGHT, label, Markup("").join(body)
    )


def axis(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Return the positions of axis lines for values from `low` to `high`: two to six multiples of 1, 2 or 5 times a
    power of ten; with `whole`, at least 1 apart. A range of one value is widened, so that its line is not on the edge
    of the frame."""
    if low == high:
        away = max(abs(low) * 0.1, 1.0 if whole or not low else 0.0)
        low, high = (low if low == 0 else low - away), high + away
    rough = (high - low) / 4
    unit = 10.0 ** math.floor(math.log10(rough))
    pitch = next(size * unit for size in (1, 2, 5, 10) if size * unit >= rough * (1 - 1e-9))
    pitch = max(1.0, pitch) if whole else pitch
    first, last = math.floor(low / pitch + 1e-9), math.ceil(high / pitch - 1e-9)
    return [at * pitch for at in range(first, max(last, first + 1) + 1)]


def _last(values: Sequence[float | None]) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)


def _thin_curves(
    steps: Sequence[int], drawn: Sequence[Curve], spread: Spread | None
) -> tuple[Sequence[int], Sequence[Curve], Spread | None]:
    """Keep every n-th step, so that no curve has more than MOST points."""
    stride = -(-len(steps) // MOST) or 1
    if stride == 1:
        return steps, drawn, spread
    thin = [Curve(one.name, one.values[::stride], one.style) for one in drawn]
    return steps[::stride], thin, spread and Spread(spread.low[::stride], spread.high[::stride])
