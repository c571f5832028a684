"""How many engines a load asks for: more at once, fewer one by one, and neither for what soon passes.

Load is counted in requests that run or wait at engines. More are wanted while there are more than `requests` for each
engine, fewer while one engine less would have at most LOW of that: what lies between changes nothing, so a steady load
leads to one number and stays there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

LOW: Final = 0.5
PATIENCE: Final = 4.0
"""How many times longer a load must be low than high: an engine costs a start to get back."""


@dataclass(frozen=True, slots=True)
class AutoscaleRules:
    """Bounds and thresholds."""

    least: int
    most: int
    requests: int
    """Per engine, above which there are too few engines."""
    after_s: float
    """Seconds for which that must last."""


@dataclass(slots=True)
class Autoscale:
    """The looks taken so far, as far as they count."""

    rules: AutoscaleRules
    _direction: int = 0
    _since: float = 0.0

    def look(self, now: float, *, hosted: int, serving: int, under_way: int) -> int:
        """How many engines are to be hosted. `now`: seconds of any clock; `hosted`: asked for so far; `serving`: of
        them; `under_way`: requests that run or wait at those. While one is on its way nothing is decided."""
        rules = self.rules
        if not rules.least <= hosted <= rules.most:
            self._direction = 0
            return min(max(hosted, rules.least), rules.most)
        direction = self._wanted(hosted, under_way) if serving == hosted else 0
        if direction != self._direction:
            self._direction, self._since = direction, now
        lasts_s = rules.after_s * (PATIENCE if direction < 0 else 1.0)
        if not direction or now - self._since < lasts_s:
            return hosted
        self._direction = 0
        return hosted - 1 if direction < 0 else min(math.ceil(under_way / rules.requests), rules.most)

    def _wanted(self, hosted: int, under_way: int) -> int:
        if under_way > self.rules.requests * hosted and hosted < self.rules.most:
            return 1
        return -int(hosted > self.rules.least and under_way <= LOW * self.rules.requests * (hosted - 1))
