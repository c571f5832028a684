"""The result of a soak as one page: a file that loads nothing. Needs the `demo` extra (matplotlib)."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from soak_looks import Looks
from trends import Look

COLUMNS, WIDTH, HEIGHT = 4, 3.6, 2.0
STYLE = "body{font:15px sans-serif;margin:2em;max-width:95em}pre{white-space:pre-wrap}svg{max-width:100%;height:auto}"
VERDICT = {True: "passed", False: "did not pass"}


def page(line: Mapping[str, Any], looks: Looks) -> str:
    """The whole page."""
    detail = line["detail"]
    rows = "".join(
        f"<tr><td>{escape(str(name))}</td><td><pre>{escape(json.dumps(value, indent=1))}</pre></td></tr>"
        for name, value in {**{key: line[key] for key in line if key not in ("id", "detail")}, **detail}.items()
    )
    memory = {name: list(lives.values()) for name, lives in sorted(looks.memory.items())}
    charts = (
        ("Memory that each process holds alone, MB", memory),
        ("Records that wait for each role", {role: [seen] for role, seen in looks.lag.items()}),
        ("Disk, MB", {what: [seen] for what, seen in looks.disk.items()}),
        ("Turns per second", {"taken": [rates(looks.turns)]}),
    )
    drawn = "".join(f"<h2>{escape(title)}</h2>{chart(series, looks)}" for title, series in charts if series)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>turnlog soak</title><style>{STYLE}</style>'
        f"<h1>Soak of {detail['minutes']:g} minutes: {VERDICT[bool(line['ok'])]}</h1>"
        f"<p>{detail['offered_turns_per_s']} turns/s were offered, of {detail['capacity_turns_per_s']} that the run "
        "takes. "
        f"Dotted lines are kills: those of the process in its own chart, all in the others. Grey is the ramp.</p>"
        f"{drawn}<h2>Figures</h2><table>{rows}</table></html>\n"
    )


def rates(counts: Sequence[Look]) -> list[Look]:
    """Of a count that rises, per second between two looks."""
    pairs = itertools.pairwise(counts)
    return [(at, (count - before) / (at - since)) for (since, before), (at, count) in pairs]


def chart(series: Mapping[str, Sequence[Sequence[Look]]], looks: Looks) -> str:
    """Small multiples of the same width as SVG: one picture a name, one line a life."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = -(-len(series) // COLUMNS)
    figure, axes = pyplot.subplots(rows, COLUMNS, figsize=(COLUMNS * WIDTH, rows * HEIGHT), squeeze=False)
    for place, (name, lives) in zip(axes.flat, series.items(), strict=False):
        for life in lives:
            place.plot([at / 60 for at, _ in life], [value for _, value in life], linewidth=1)
        own = (
            [at for at, victim in looks.kills if victim == name]
            if name in looks.memory
            else [at for at, _ in looks.kills]
        )
        for at in own:
            place.axvline(at / 60, color="tab:red", linewidth=0.5, linestyle=":")
        place.axvspan(0, min(looks.load_at, looks.ended_at) / 60, color="0.92")
        place.set_title(name, fontsize=9)
        place.set_ylim(bottom=0)
        place.tick_params(labelsize=7)
    for place in list(axes.flat)[len(series) :]:
        place.set_axis_off()
    figure.tight_layout()
    picture = io.StringIO()
    figure.savefig(picture, format="svg")
    pyplot.close(figure)
    return picture.getvalue().partition("<svg")[1] + picture.getvalue().partition("<svg")[2]
