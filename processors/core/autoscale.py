"""Target number of engines for a load: scale up at once, scale down one by one, ignore short fluctuations.

Load is the number of requests that run or wait at engines. Scale up while there are more than `requests` per engine;
scale down while one engine less would have at most LOW times that. Loads in between change nothing, so a steady load
leads to one number of engines and stays there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

LOW: Final = 0.5
PATIENCE: Final = 4.0
"""A load must stay low this many times longer than it must stay high, because starting an engine again is expensive."""


@dataclass(frozen=True, slots=True)
class AutoscaleRules:
    """Bounds and thresholds of the autoscaler."""

    least: int
    """Minimum number of hosted engines."""
    most: int
    """Maximum number of hosted engines."""
    requests: int
    """Requests per engine above which there are too few engines."""
    after_s: float
    """Seconds for which a load must stay high before engines are added."""


@dataclass(slots=True)
class Autoscale:
    """Autoscaler state: the direction in which the load points, and since when."""

    rules: AutoscaleRules
    _direction: int = 0
    _since: float = 0.0

    def look(self, now: float, *, hosted: int, serving: int, under_way: int) -> int:
        """Return how many engines to host.

        `now` is in seconds of any clock; `hosted` counts the engines requested so far, `serving` those of them that
        serve, and `under_way` the requests that run or wait at those. The number does not change while an engine is
        still starting.
        """
        rules = self.rules
        if not rules.least <= hosted <= rules.most:
            self._direction = 0
            return min(max(hosted, rules.least), rules.most)
        direction = self._wanted_change(hosted, under_way) if serving == hosted else 0
        if direction != self._direction:
            self._direction, self._since = direction, now
        lasts_s = rules.after_s * (PATIENCE if direction < 0 else 1.0)
        if not direction or now - self._since < lasts_s:
            return hosted
        self._direction = 0
        return hosted - 1 if direction < 0 else min(math.ceil(under_way / rules.requests), rules.most)

    def _wanted_change(self, hosted: int, under_way: int) -> int:
        if under_way > self.rules.requests * hosted and hosted < self.rules.most:
            return 1
        return -int(hosted > self.rules.least and under_way <= LOW * self.rules.requests * (hosted - 1))
