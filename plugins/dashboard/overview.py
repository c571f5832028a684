"""Overview of a run: curves over its steps, token dispositions by step, engines with their weights, and alerts.
Everything comes from the index."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from markupsafe import Markup

from turnlog.consumers.index.reader import AsOf, Index, Row
from turnlog.infra.roles.role import RunPhase
from turnlog.infra.run_folder import is_live, read_state
from turnlog.plugins.alarms import Alarm, alarms, behind
from turnlog.plugins.dashboard.drawing import Curve, Spread, bands, clock, curves, number, smooth
from turnlog.schemas.events.batches import LOGPROB_GAP_MAX, gaps_of_kinds

QUIET_S = 600
"""Maximum age in seconds of the newest record for a run to count as running if its processes cannot be seen from
here."""
STEPS = 300
"""Number of newest steps to show, unless all are requested."""
TRAINED = "trained"


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart with its legend."""

    title: str
    unit: str
    picture: Markup
    legend: Sequence[tuple[str, str]] = ()
    """(class of the colour, label)"""


@dataclass(frozen=True, slots=True)
class Overview:
    """Content of the first page."""

    facts: Sequence[tuple[str, str, str]]
    """(name, value, link)"""
    charts: Sequence[Chart]
    engines: Sequence[Row]
    fates: Sequence[tuple[str, int]]
    alarms: Sequence[Alarm]
    as_of: AsOf


def is_supervised(directory: Path) -> bool | None:
    """Return whether the supervisor of a run's folder is alive. Return None if `turnlog up` never ran for that folder,
    so that any processes of the run are elsewhere."""
    return is_live(directory) if read_state(directory) else None


@dataclass(frozen=True, slots=True)
class StepWindow:
    """Steps that the curves show, and their smoothing."""

    first: int | None = None
    """First optimizer step. None shows the newest STEPS steps, or all of them if `last` or `whole` is given."""
    last: int | None = None
    smoothing: float = 0.0
    """Weight of the past in an exponential moving average, from 0 (none) to less than 1, as in TensorBoard."""
    whole: bool = False

    def of(self, steps: Sequence[Row]) -> Sequence[Row]:
        """Return the steps that the window shows."""
        if self.first is None and self.last is None:
            return steps if self.whole else steps[-STEPS:]
        first, last = self.first or 0, math.inf if self.last is None else self.last
        return [row for row in steps if first <= row["step"] <= last]


NEWEST = StepWindow()


def overview(
    index: Index, window: StepWindow = NEWEST, *, alive: bool | None = None, now_s: float | None = None
) -> Overview:
    """Return the first page at one moment of the index.

    `alive` is the result of `is_supervised`; `now_s` is the time in seconds since 1970 (default: the clock). Raises
    IndexFailure.
    """
    with index.snapshot() as as_of:
        steps, _ = index.series()
        versions, _ = index.versions()
        shown = window.of(steps)
        found = engines(index, alive=alive, now_s=now_s)
        fates = index.rows("SELECT fate, count(*) AS sessions FROM sessions GROUP BY fate ORDER BY sessions DESC")
        newest = versions[-1]["version"] if versions else None
        phase = _phase(index, steps, alive=alive, now_s=now_s)
        return Overview(
            list(_facts(index, phase, steps, newest, fates)),
            list(_charts(index, shown, window.smoothing)),
            [{**row, "behind": behind(row, newest)} for row in found],
            [(row["fate"], row["sessions"]) for row in fates],
            list(alarms(index, steps, versions, found)),
            as_of,
        )


def engines(index: Index, *, alive: bool | None, now_s: float | None = None) -> list[Row]:
    """Return the last event of each engine. An engine may have stopped if the run is not known to be running: its state
    is then shown as unknown, with the last one reported. Arguments are those of `overview`."""
    rows, _ = index.engines()
    heard = alive is True or (alive is None and not _quiet(index, now_s))
    return [
        row if heard or row["state"] == "gone" else {**row, "state": f"unknown, {row['state']} before"} for row in rows
    ]


def _newest_record_ms(index: Index) -> int | None:
    """Return the time of the newest record about sessions, steps, weights or engines, in milliseconds since 1970."""
    tables = ("steps", "versions", "engine_events")
    times = [index.row(f"SELECT time_ms FROM {table} ORDER BY place DESC LIMIT 1") for table in tables]
    times += [index.row(f"SELECT max({name}) FROM sessions") for name in ("started_ms", "finished_ms")]
    return max((ms for row in times if row for ms in row.values() if ms is not None), default=None)


def _quiet(index: Index, now_s: float | None) -> bool:
    newest = _newest_record_ms(index)
    return newest is None or (time.time() if now_s is None else now_s) - newest / 1000 > QUIET_S


def _latest_plan(index: Index) -> Row | None:
    return index.row("SELECT draws FROM runs WHERE kind = 'RunPlanned' ORDER BY place DESC LIMIT 1")


def _draws(steps: Sequence[Row]) -> int:
    return len({row["draw_index"] for row in steps})


def _phase(index: Index, steps: Sequence[Row], *, alive: bool | None, now_s: float | None) -> str:
    """Return the phase of the run, as far as it can be known. The log holds what was requested and what was done, but
    not whether a process still exists."""
    plan = _latest_plan(index)
    if plan is None:
        return "not planned"
    if _draws(steps) >= plan["draws"]:
        return "finished"
    if alive is False:
        return "down"
    asked = index.row("SELECT phase FROM runs WHERE kind = 'RunPlanned' AND phase != '' ORDER BY place DESC LIMIT 1")
    if asked is not None and asked["phase"] != RunPhase.RUNNING:
        return str(asked["phase"])
    return "running" if alive or not _quiet(index, now_s) else "unknown: no record for a while"


def _facts(index: Index, phase: str, steps: Sequence[Row], newest: int | None, fates: Sequence[Row]) -> Any:
    plan, draws = _latest_plan(index), _draws(steps)
    yield "phase", phase, ""
    yield "newest record", clock(_newest_record_ms(index)), ""
    yield "draws trained", f"{number(draws)} of {number(plan['draws'])}" if plan else number(draws), "/batches"
    yield "newest weights", number(newest), "/weights"
    if steps:
        last = steps[-1]
        yield "reward", number(last["reward_mean"]), f"/batches/{last['batch_index']}"
        yield "loss", number(last["loss"]), f"/batches/{last['batch_index']}"
        yield "largest gap", f"{number(last['logprob_gap_max'])} nats", f"/batches/{last['batch_index']}"
    masked = index.rows(
        "SELECT kind.key AS kind, sum(kind.value) AS places FROM turns, json_each(turns.redacted) AS kind "
        "WHERE turns.redacted IS NOT NULL GROUP BY kind.key ORDER BY kind.key"
    )
    if masked:
        yield "masked places", ", ".join(f"{number(row['places'])} {row['kind']}" for row in masked), ""
    yield "sessions", number(sum(row["sessions"] for row in fates)), "/sessions"


def _charts(index: Index, steps: Sequence[Row], smoothing: float) -> Any:
    at = [row["step"] for row in steps]
    sessions = _sessions_of_batches(index, steps)

    def chart(title: str, unit: str, values: Sequence[float | None], **frame: Any) -> Chart:
        return Chart(title, unit, curves(title.lower(), at, [Curve(title.lower(), smooth(values, smoothing))], **frame))

    def of_sessions(column: str) -> list[float | None]:
        return [sessions.get(row["batch_index"], {}).get(column) for row in steps]

    yield Chart(
        "Reward", "mean over trajectories, ± one standard deviation",
        curves("reward", at, [Curve("mean", smooth([row["reward_mean"] for row in steps], smoothing))],
               spread=Spread(of_sessions("low"), of_sessions("high"))),
    )  # fmt: skip
    yield _books(steps, at)
    yield chart("Loss", "", [row["loss"] for row in steps])
    yield chart("Entropy", "nats, mean over trained tokens", [row["entropy"] for row in steps], floor=0)
    kl = [_find_metric(row, "kl") for row in steps]
    if any(value is not None for value in kl):
        yield chart("KL divergence", "nats, from the reference", kl)
    yield chart("Clipped tokens", "share of trained tokens", [row["clip_fraction"] for row in steps], floor=0)
    gaps = [
        Curve(name, smooth([row[f"logprob_gap_{column}"] for row in steps], smoothing), style)
        for name, column, style in (("largest", "max", "c2"), ("mean", "mean", "c1"))
    ]
    of_kinds = [gaps_of_kinds(step_metrics(row), LOGPROB_GAP_MAX) for row in steps]
    gaps += [
        Curve(f"largest, {kind}", smooth([one.get(kind) for one in of_kinds], smoothing), style)
        for kind, style in zip(sorted(set().union(*of_kinds)), itertools.cycle(OVERLAID[3:]))
    ]
    yield Chart(
        "Log-prob gap of trainer and engine", "nats", curves("gap", at, gaps, floor=0),
        [(one.style, one.name) for one in gaps],
    )  # fmt: skip
    yield chart(
        "Lag", "weight versions, maximum over trained tokens", [row["lag_max"] for row in steps], floor=0, whole=True
    )
    yield chart("Response length", "mean sampled tokens per session", of_sessions("output_tokens"), floor=0)
    yield chart("Turns", "mean per session", of_sessions("turns"), floor=0)
    yield chart("Step time", "seconds, including waiting for data", [_seconds(row) for row in steps], floor=0)
    yield chart("Training throughput", "tokens of batch rows per second", [_speed(row) for row in steps], floor=0)
    yield chart("Gradient norm", "before clipping", [row["grad_norm"] for row in steps], floor=0)


OVERLAID = ("c0", "c2", "c1", "c3", "c4", "c5")
"""Classes of the colours of curves in one chart; a seventh curve takes the first colour again."""
BESIDE = {
    "Reward": "reward_mean", "Loss": "loss", "Entropy": "entropy", "Largest gap": "logprob_gap_max",
    "Gradient norm": "grad_norm", "Trained tokens": "trained_tokens",
}  # fmt: skip


def beside(ours: Sequence[Row], others: Mapping[str, Sequence[Row]]) -> list[Chart]:
    """Draw curves of this run and of others, overlaid by the number of the step."""
    steps = range(1, max(len(ours), *map(len, others.values())) + 1)
    return [
        _overlaid(
            title, steps, {"here": [row[column] for row in ours]}
            | {name: [row[column] for row in rows] for name, rows in others.items()},
        )
        for title, column in BESIDE.items()
    ]  # fmt: skip


def of_batches(batches: Mapping[int, Sequence[float]], name: str) -> list[Chart]:
    """Draw figures of the samples that both sides have, by batch of the run (comparison.Differences.batches)."""
    rows = [batches[number] for number in sorted(batches)]
    steps = [number + 1 for number in sorted(batches)]
    sizes = {"here": [row[1] / row[0] for row in rows], name: [row[2] / row[0] for row in rows]}
    tokens = {"here": [row[3] for row in rows], name: [row[4] for row in rows]}
    return [_overlaid("Magnitude of the advantage", steps, sizes), _overlaid("Tokens that may train", steps, tokens)]


def _overlaid(title: str, steps: Sequence[int], named: Mapping[str, Sequence[float | None]]) -> Chart:
    drawn = [
        Curve(name, [*values, *[None] * (len(steps) - len(values))], OVERLAID[at % len(OVERLAID)])
        for at, (name, values) in enumerate(named.items())
    ]
    return Chart(title, "", curves(title, steps, drawn), [(one.style, one.name) for one in drawn])


def _sessions_of_batches(index: Index, steps: Sequence[Row]) -> Mapping[int, Mapping[str, float]]:
    """Return figures over the sessions of each batch: means, and one standard deviation below and above the mean
    reward. The band is cut to the rewards that occurred, so that it never shows an impossible reward."""
    if not steps:
        return {}
    rows = index.rows(
        "SELECT batch_index, avg(reward) AS mean, avg(reward * reward) AS square, min(reward) AS least, "
        "max(reward) AS most, avg(output_tokens) AS output_tokens, avg(turns) AS turns FROM sessions "
        "WHERE batch_index >= ? AND reward IS NOT NULL GROUP BY batch_index",
        steps[0]["batch_index"],
    )
    found = {}
    for row in rows:
        away = math.sqrt(max(row["square"] - row["mean"] ** 2, 0.0))
        band = {"low": max(row["mean"] - away, row["least"]), "high": min(row["mean"] + away, row["most"])}
        found[row["batch_index"]] = {**band, "output_tokens": row["output_tokens"], "turns": row["turns"]}
    return found


def _books(steps: Sequence[Row], at: Sequence[int]) -> Chart:
    """Draw the disposition of the tokens of each step's rollout batch: trained, masked by the batcher or the step, or
    dropped."""
    columns: dict[str, list[float]] = {TRAINED: []}
    for position, row in enumerate(steps):
        counts: Counter[str] = Counter({TRAINED: row["trained_tokens"]})
        for column in ("masked", "batch_masked", "dropped"):
            counts.update(orjson.loads(row[column] or "{}"))
        counts[TRAINED] -= sum(orjson.loads(row["masked"] or "{}").values())
        for reason in counts:
            columns.setdefault(reason, [0.0] * position)
        for reason, values in columns.items():
            values.append(float(max(counts[reason], 0)))
    styles = {reason: f"k-{reason}" for reason in columns}
    title = "Where the tokens of each draw went"
    return Chart(title, "sampled tokens", bands(title, at, columns, styles), [(styles[one], one) for one in columns])


def _find_metric(row: Row, name: str) -> float | None:
    """Return the first metric of the algorithm whose name begins with `name`."""
    return next((value for key, value in step_metrics(row).items() if key.startswith(name)), None)


def step_metrics(row: Row) -> dict[str, float]:
    """Return the metrics of a step by name."""
    found: dict[str, float] = orjson.loads(row["metrics"] or "{}")
    return found


def _seconds(row: Row) -> float | None:
    """Return the seconds of a step, including the wait for its rows; None if they were not recorded."""
    return sum(orjson.loads(row["seconds"] or "{}").values()) or None


def _speed(row: Row) -> float | None:
    seconds = _seconds(row)
    return row["tokens"] / seconds if seconds else None
