"""Whitening: advantages shifted and scaled to mean 0 and deviation 1 over the trained tokens of one batch.

Every trained token counts once, whatever its loss weight (REINFORCE++, arXiv 2501.03262). Mean and variance are exact
rationals, rounded once: the same bits in any order of the rows and however trajectories were cut into segments.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

EPSILON = 1e-6
"""Added to the deviation, as in grpo: a batch of equal advantages becomes 0, not noise."""


@dataclass(frozen=True, slots=True)
class Whitening:
    """What a batch was whitened with; stands in its manifest."""

    mean: float
    std: float
    """Population deviation; 0 when all advantages are equal."""

    def apply(self, advantages: NDArray[np.float64]) -> NDArray[np.float64]:
        """(a - mean) / (std + 1e-6), elementwise; 0 where std is 0."""
        if self.std == 0.0:
            return np.zeros_like(advantages)
        whitened: NDArray[np.float64] = (advantages - self.mean) / (self.std + EPSILON)
        return whitened


def whitening(advantages: Iterable[NDArray[np.float64]]) -> Whitening:
    """Over all values of all arrays. Raises ValueError without any."""
    counts: Counter[float] = Counter()
    for one in advantages:
        values, repeats = np.unique(one, return_counts=True)
        counts.update(dict(zip(values.tolist(), repeats.tolist(), strict=True)))
    if not counts:
        raise ValueError("no trained token to whiten over")
    ratios = {value: value.as_integer_ratio() for value in counts}
    scale = max(denominator for _, denominator in ratios.values())  # powers of two: the others divide it
    scaled = {value: numerator * (scale // denominator) for value, (numerator, denominator) in ratios.items()}
    tokens = counts.total()
    total = sum(count * scaled[value] for value, count in counts.items())
    squares = sum(count * scaled[value] ** 2 for value, count in counts.items())
    variance = Fraction(tokens * squares - total**2, (tokens * scale) ** 2)
    return Whitening(float(Fraction(total, tokens * scale)), math.sqrt(variance))
