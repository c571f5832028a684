"""The line that every benchmark prints, and the size at which it measures.

A line: id, value, unit, goal (the least that the value must reach), ok, floor (the same work done bare, in the same
run), share (value / floor of a rate, floor / value of times and bytes), goal_share, load (of the machine, one minute),
detail. Where no floor or no goal exists the line says null.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))  # tests.fakes is found by whatever is imported after this

T = TypeVar("T")
SIZE = "BENCH_SIZE"
SMALLEST = "smallest"
"""Value of the environment variable SIZE under which a benchmark shows that it works, and measures nothing."""


def size(usual: T, *, smallest: T) -> T:
    """How much of something this run takes."""
    return smallest if os.environ.get(SIZE) == SMALLEST else usual


def told(
    *, id: str, value: float, unit: str, goal: float | None, met: bool, detail: dict[str, Any],
    floor: float | None = None, goal_share: float | None = None, rate: bool = False,
) -> int:  # fmt: skip
    """Print the line; the exit status. `met`: whether every least figure of the goal is reached; `rate`: more is
    better. `ok` needs `met` and, where there is a goal for it, the share."""
    share = None if floor is None else value / floor if rate else floor / value
    ok = met and (goal_share is None or (share is not None and share >= goal_share))
    line = {
        "id": id, "value": figure(value), "unit": unit, "goal": goal, "ok": ok, "floor": figure(floor),
        "share": figure(share), "goal_share": goal_share, "load": round(os.getloadavg()[0], 2), "detail": detail,
    }  # fmt: skip
    print(json.dumps(line), flush=True)
    return 0 if ok else 1


def figure(value: float | None) -> float | None:
    """To four significant digits; whole numbers as they are."""
    return value if value is None or float(value).is_integer() else float(f"{value:.4g}")


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of them lie."""
    return float(np.percentile(values, share * 100))


def say(text: str) -> None:
    """To stderr."""
    print(text, file=sys.stderr, flush=True)
