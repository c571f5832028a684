"""Slopes over several lives: a leak is found whoever is restarted, noise is not one."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.chaos.trends import Look, Trend, trend

LIMIT, LEAK = 1.0, 2.0
RULES = {"warm_s": 90.0, "window_s": 30.0}


def lives(seed: int, *, leak: float, minutes: float, life_min: float = 8.0, noise: float = 0.2) -> list[list[Look]]:
    """Memory of a process that is killed at random: a level and a warm-up of each life's own, a saw of its garbage
    collector, noise that remembers itself."""
    rng, found, now = np.random.default_rng(seed), list[list[Look]](), 0.0
    while now < 60 * minutes:
        begin, end = now, min(60 * minutes, now + 60 * rng.exponential(life_min))
        level, period, drift, life = rng.uniform(50, 300), rng.uniform(20, 70), 0.0, list[Look]()
        while now < end:
            age, drift = now - begin, 0.9 * drift + rng.normal(0, noise)
            life.append(
                (now, level + 30 * (1 - math.exp(-age / 10)) + 3 * (age % period / period) + drift + leak * age / 60)
            )
            now += 5.0
        found.append(life)
        now += 10.0
    return found


def told(seeds: int, **of: float) -> list[Trend]:
    return [trend(lives(seed, **of), **RULES) for seed in range(seeds)]


def test_a_line_is_its_slope_with_no_doubt() -> None:
    found = trend([[(float(at), 7.0 + at / 30) for at in range(0, 900, 5)]], **RULES)
    assert (found.slope, found.low, found.high) == pytest.approx((2.0, 2.0, 2.0))
    assert (found.looks, found.lives) == (27, 1)


def test_a_leak_is_found_in_half_an_hour_of_kills() -> None:
    assert all(found.low >= LIMIT for found in told(20, leak=LEAK, minutes=30.0))


def test_noise_is_no_leak_and_passes() -> None:
    assert all(found.high < LIMIT for found in told(20, leak=0.0, minutes=30.0))


def test_the_bounds_hold_what_they_promise_nine_times_in_ten() -> None:
    """Of noise that remembers itself longer than a window, too."""
    found = told(150, leak=0.0, minutes=30.0, noise=0.6)
    assert sum(each.high >= 0 for each in found) >= 0.9 * len(found)
    assert sum(each.low <= 0 for each in found) >= 0.9 * len(found)


def test_a_restart_at_another_level_is_no_slope() -> None:
    steps = [
        [(base + at, level) for at in range(0, 300, 5)] for base, level in ((0.0, 10.0), (310.0, 90.0), (620.0, 400.0))
    ]
    found = trend(steps, **RULES)
    assert (found.slope, found.low, found.high, found.lives) == (0.0, 0.0, 0.0, 3)


@pytest.mark.parametrize("short", [[], [[]], [[(0.0, 1.0)]], [[(at, 9.0 * at) for at in range(0, 100, 5)]]])
def test_of_too_little_nothing_is_said(short: list[list[Look]]) -> None:
    found = trend(short, **RULES)
    assert (found.low, found.high, found.lives) == (-math.inf, math.inf, 0)


def test_few_looks_leave_both_bounds_open() -> None:
    found = trend([[(at, 1.0 * at) for at in range(0, 160, 5)]], **RULES)
    assert found.slope == pytest.approx(60.0)
    assert (found.low, found.high) == (-math.inf, math.inf)
