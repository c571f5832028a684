"""How fast something grows, told from looks at it over several lives: memory of a process that is killed now and then.

Every life, from a start to its end, has a level of its own, so only looks of the same life are compared: the slope is
the median of the slopes of all such pairs (Sen 1968, "Estimates of the regression coefficient based on Kendall's tau"),
taken within strata as Hirsch, Slack and Smith 1982, "Techniques of trend analysis for monthly water quality data", do
with months. Neither restarts nor bursts move it. Its bounds are those of Gilbert 1987, "Statistical methods for
environmental pollution monitoring", 16.5.2 and 17.3: of N sorted slopes those at (N -+ z sqrt(V)) / 2, with V the sum
of n (n - 1) (2 n + 5) / 18 over lives of n looks. Looks close to each other are not independent, which that asks for:
those of a window count once, by their median, and V grows by (1 + r) / (1 - r) for what these still remember, r the
correlation of what the slope leaves with itself one window before (Yue and Wang 2004, "The Mann-Kendall test modified
by effective sample size").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Look = tuple[float, float]
"""(seconds, value)"""
Z = 1.6449
"""95 % of a normal distribution lie below: each bound is one-sided."""
MOST = 0.9
"""What a window may remember of the one before."""
TINY = 1e-9
"""A sum of squares that is rounding."""


@dataclass(frozen=True, slots=True)
class Trend:
    """Units of the values per minute."""

    slope: float
    low: float
    """95 % lower bound; -inf where there are too few looks to tell."""
    high: float
    """95 % upper bound; inf where there are too few."""
    looks: int
    """Windows that counted."""
    lives: int
    """That had at least two of them."""


def trend(lives: Sequence[Sequence[Look]], *, warm_s: float, window_s: float) -> Trend:
    """Of looks in order of time, by life. The first `warm_s` of each life are left out."""
    series = [windows(life, warm_s=warm_s, window_s=window_s) for life in lives]
    series = [each for each in series if len(each[0]) > 1]
    if not series:
        return Trend(0.0, -math.inf, math.inf, 0, 0)
    ordered = np.sort(np.concatenate([slopes(times, values) for times, values in series]))
    slope, count = float(np.median(ordered)), len(ordered)
    variance = sum((n := len(times)) * (n - 1) * (2 * n + 5) / 18 for times, _ in series)
    spread = Z * math.sqrt(variance * memory([values - slope * times for times, values in series]))
    below, above = (count - spread) / 2, (count + spread) / 2
    low = float(ordered[math.floor(below)]) if below >= 0 else -math.inf
    high = float(ordered[math.ceil(above)]) if above <= count - 1 else math.inf
    return Trend(60 * slope, 60 * low, 60 * high, sum(len(times) for times, _ in series), len(series))


def slopes(times: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Of every pair."""
    first, second = np.triu_indices(len(times), 1)
    return (values[second] - values[first]) / (times[second] - times[first])


def memory(left: Sequence[np.ndarray]) -> float:
    """(1 + r) / (1 - r) of what is left of each life; at least 1."""
    centred = [each - each.mean() for each in left]
    all_of_it = sum(float(each @ each) for each in centred)
    r = sum(float(each[1:] @ each[:-1]) for each in centred) / all_of_it if all_of_it > TINY else 0.0
    r = min(max(r, 0.0), MOST)
    return (1 + r) / (1 - r)


def windows(life: Sequence[Look], *, warm_s: float, window_s: float) -> tuple[np.ndarray, np.ndarray]:
    """Medians of time and value in each window behind the warm-up."""
    if not life:
        return np.empty(0), np.empty(0)
    found: dict[int, list[Look]] = {}
    begin = life[0][0] + warm_s
    for at, value in life:
        if at >= begin:
            found.setdefault(int((at - begin) // window_s), []).append((at, value))
    medians = np.array([np.median(np.array(looks), axis=0) for looks in found.values()])
    return (medians[:, 0], medians[:, 1]) if len(medians) else (np.empty(0), np.empty(0))
