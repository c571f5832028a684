"""A run at a glance: curves over its steps, where each step's tokens went, engines and their weights, and what somebody
should look at. From the index alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from markupsafe import Markup

from turnlog.consumers.dashboard.alarms import Alarm, alarms, behind
from turnlog.consumers.dashboard.drawing import Curve, Spread, bands, curves, number
from turnlog.consumers.index.reader import AsOf, Index, Row

STEPS = 300
"""The newest so many are looked at, unless all are asked for."""
TRAINED = "trained"


@dataclass(frozen=True, slots=True)
class Chart:
    """One picture with its legend."""

    title: str
    unit: str
    picture: Markup
    legend: Sequence[tuple[str, str]] = ()
    """(class of the colour, what it is)"""


@dataclass(frozen=True, slots=True)
class Overview:
    """All that the first page shows."""

    facts: Sequence[tuple[str, str, str]]
    """(what, value, where it leads)"""
    charts: Sequence[Chart]
    engines: Sequence[Row]
    fates: Sequence[tuple[str, int]]
    alarms: Sequence[Alarm]
    as_of: AsOf


def overview(index: Index, *, whole: bool = False) -> Overview:
    """Of one moment. `whole`: every step, not only the newest. Raises IndexFailure."""
    with index.snapshot() as as_of:
        steps, _ = index.series()
        versions, _ = index.versions()
        engines, _ = index.engines()
        shown = steps if whole else steps[-STEPS:]
        fates = index.rows("SELECT fate, count(*) AS sessions FROM sessions GROUP BY fate ORDER BY sessions DESC")
        newest = versions[-1]["version"] if versions else None
        return Overview(
            list(_facts(index, steps, newest, fates)),
            list(_charts(index, shown)),
            [_engine(row, newest) for row in engines],
            [(row["fate"], row["sessions"]) for row in fates],
            list(alarms(index, steps, versions, engines)),
            as_of,
        )


def _facts(index: Index, steps: Sequence[Row], newest: int | None, fates: Sequence[Row]) -> Any:
    plan = index.row("SELECT draws FROM runs WHERE kind = 'RunPlanned' ORDER BY place DESC LIMIT 1")
    phase = index.row("SELECT phase FROM runs WHERE kind = 'RunPlanned' AND phase != '' ORDER BY place DESC LIMIT 1")
    draws = len({row["draw_index"] for row in steps})
    yield "phase", phase["phase"] if phase else "running" if plan else "not planned", ""
    yield "draws trained", f"{number(draws)} of {number(plan['draws'])}" if plan else number(draws), "/batches"
    yield "newest weights", number(newest), "/weights"
    if steps:
        last = steps[-1]
        yield "reward", number(last["reward_mean"]), f"/batches/{last['batch_index']}"
        yield "loss", number(last["loss"]), f"/batches/{last['batch_index']}"
        yield "largest gap", f"{number(last['logprob_gap_max'])} nats", f"/batches/{last['batch_index']}"
    yield "sessions", number(sum(row["sessions"] for row in fates)), "/sessions"


def _charts(index: Index, steps: Sequence[Row]) -> Any:
    at = [row["step"] for row in steps]
    rewards = _rewards(index, steps)
    low, high = ([rewards.get(row["batch_index"], {}).get(key) for row in steps] for key in ("low", "high"))
    yield Chart(
        "Reward", "mean of trajectories, ± one deviation",
        curves("reward", at, [Curve("mean", [row["reward_mean"] for row in steps])], spread=Spread(low, high)),
    )  # fmt: skip
    yield _books(steps, at)
    yield Chart("Loss", "", curves("loss", at, [Curve("loss", [row["loss"] for row in steps])]))
    entropy = [row["entropy"] for row in steps]
    yield Chart("Entropy", "nats, mean of trained tokens", curves("entropy", at, [Curve("entropy", entropy, "c1")]))
    kl = [_measured(row, "kl") for row in steps]
    if any(value is not None for value in kl):
        yield Chart("Divergence", "nats, from the reference", curves("kl", at, [Curve("kl", kl, "c1")]))
    gaps = [Curve("largest", [row["logprob_gap_max"] for row in steps], "c2"),
            Curve("mean", [row["logprob_gap_mean"] for row in steps], "c1")]  # fmt: skip
    yield Chart("Gap of trainer and engine", "nats", curves("gap", at, gaps), [(one.style, one.name) for one in gaps])
    yield Chart(
        "Lag",
        "versions, largest among trained tokens",
        curves("lag", at, [Curve("lag", [row["lag_max"] for row in steps])]),
    )
    yield Chart(
        "Speed",
        "tokens of rows per second",
        curves("tokens/s", at, [Curve("tokens/s", [_speed(row) for row in steps], "c1")]),
    )
    yield Chart(
        "Gradient norm",
        "before clipping",
        curves("gradient norm", at, [Curve("norm", [row["grad_norm"] for row in steps])]),
    )


BESIDE = {
    "Reward": "reward_mean", "Loss": "loss", "Entropy": "entropy", "Largest gap": "logprob_gap_max",
    "Gradient norm": "grad_norm", "Trained tokens": "trained_tokens",
}  # fmt: skip


def beside(ours: Sequence[Row], theirs: Sequence[Row], name: str) -> list[Chart]:
    """Curves of two runs, the n-th step of each over the other's."""
    steps = range(1, max(len(ours), len(theirs)) + 1)
    return [
        _two(title, steps, [row[column] for row in ours], [row[column] for row in theirs], name)
        for title, column in BESIDE.items()
    ]


def of_batches(batches: Mapping[int, Sequence[float]], name: str) -> list[Chart]:
    """Of samples that two have: what they come to in each batch of the run (comparison.Differences.batches)."""
    rows = [batches[number] for number in sorted(batches)]
    steps = [number + 1 for number in sorted(batches)]
    return [
        _two(
            "Size of the advantage", steps, [row[1] / row[0] for row in rows], [row[2] / row[0] for row in rows], name
        ),
        _two("Tokens that may train", steps, [row[3] for row in rows], [row[4] for row in rows], name),
    ]


def _two(
    title: str, steps: Sequence[int], ours: Sequence[float | None], theirs: Sequence[float | None], name: str
) -> Chart:
    more = [None] * len(steps)
    both = [Curve("here", [*ours, *more][: len(steps)]), Curve(name, [*theirs, *more][: len(steps)], "c2")]
    return Chart(title, "", curves(title, steps, both), [(one.style, one.name) for one in both])


def _rewards(index: Index, steps: Sequence[Row]) -> Mapping[int, Mapping[str, float]]:
    """Of each batch one standard deviation below and above the mean of its sessions."""
    if not steps:
        return {}
    rows = index.rows(
        "SELECT batch_index, avg(reward) AS mean, avg(reward * reward) AS square FROM sessions "
        "WHERE batch_index >= ? AND reward IS NOT NULL GROUP BY batch_index",
        steps[0]["batch_index"],
    )
    found = {}
    for row in rows:
        away = math.sqrt(max(row["square"] - row["mean"] ** 2, 0.0))
        found[row["batch_index"]] = {"low": row["mean"] - away, "high": row["mean"] + away}
    return found


def _books(steps: Sequence[Row], at: Sequence[int]) -> Chart:
    """What became of the tokens that each step's draw took: trained, masked by batcher or step, or dropped."""
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


def _measured(row: Row, name: str) -> float | None:
    """What the algorithm measured under a name that begins so."""
    metrics = orjson.loads(row["metrics"] or "{}")
    return next((value for key, value in metrics.items() if key.startswith(name)), None)


def _speed(row: Row) -> float | None:
    """Tokens of a step's rows over all of its seconds, those in which it waited for them included."""
    seconds = sum(orjson.loads(row["seconds"] or "{}").values())
    return row["tokens"] / seconds if seconds else None


def _engine(row: Row, newest: int | None) -> Row:
    return {**row, "behind": behind(row, newest)}
