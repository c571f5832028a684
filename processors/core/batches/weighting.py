"""Loss weights as integers: each trained token of a row weighs 1 / divisor, and the batch's weights add up to 1.

docs/folds.md describes the weightings: prompt-equal as in DAPO-style per-prompt averaging, `constant` as in Dr. GRPO
(arXiv 2503.20783).

Whitening shifts and scales advantages to mean 0 and deviation 1 over the trained tokens of one batch. Every trained
token has the same influence, whatever its loss weight (REINFORCE++, arXiv 2501.03262). Mean and variance are exact
rationals, rounded once: the bits are the same in any order of the rows and however trajectories were cut into segments.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from turnlog.processors.core.batches.rows import BatchRows
from turnlog.schemas.events import Weighting


class WeightsDoNotAddUp(Exception):
    """Invariant I5 is violated: a bug. The batch is not published and the batcher ends."""


@dataclass(frozen=True, slots=True)
class LiveRow:
    """A row as weighting sees it: its group and session, and its number of trained tokens (at least one)."""

    group_id: str
    session_id: str
    trained_tokens: int


@dataclass(frozen=True, slots=True)
class Weights:
    """The integers of the manifest, and one divisor per row."""

    prompts: int
    """P, the number of groups."""
    trajectories: int
    """J, the number of sessions."""
    trained_tokens: int
    """M, the number of trained tokens."""
    constant_length: int
    """L of the weighting `constant`; 0 for the others."""
    divisors: tuple[int, ...]
    """Inverse weight of each trained token, by row."""


def weigh(rows: Sequence[LiveRow], weighting: Weighting, constant_length: int) -> Weights:
    """Return the divisors of `rows`: prompt P x M_p, trajectory J x M_j, token M, constant J x L.

    P, J and M are the numbers of prompts, trajectories and trained tokens in this batch; M_p and M_j count the trained
    tokens of one prompt or trajectory; L is `constant_length`.
    """
    per_prompt: Counter[str] = Counter()
    per_trajectory: Counter[str] = Counter()
    for row in rows:
        per_prompt[row.group_id] += row.trained_tokens
        per_trajectory[row.session_id] += row.trained_tokens
    prompts, trajectories, trained = len(per_prompt), len(per_trajectory), sum(per_prompt.values())
    by_row = {
        Weighting.prompt: [prompts * per_prompt[row.group_id] for row in rows],
        Weighting.trajectory: [trajectories * per_trajectory[row.session_id] for row in rows],
        Weighting.token: [trained] * len(rows),
        Weighting.constant: [trajectories * constant_length] * len(rows),
    }
    length = constant_length if weighting is Weighting.constant else 0
    return Weights(prompts, trajectories, trained, length, tuple(by_row[weighting]))


def check_rows(rows: BatchRows, weights: Weights, weighting: Weighting) -> None:
    """Check invariants I5 and I7 on the columns themselves, independently of the input of `weigh`.

    Trained tokens are counted in the trained flags, weights are read from weight_divisor. The tokens of one prompt
    (trajectory; the batch) weigh the same and together 1 / P (1 / J; 1); under `constant` each weighs 1 / (J x L), in
    total M / (J x L). P, J and M of `weights` must match the columns. Raises WeightsDoNotAddUp if an invariant does not
    hold.
    """
    counts = rows.trained_per_row().tolist()
    if not counts or min(counts) < 1 or int(rows.trained.max()) > 1:
        raise _weighting_error(weighting, "a row without a trained token, or a trained flag that is neither 0 nor 1")
    if bool(rows.trained[rows.starts].any()):
        raise _weighting_error(weighting, "a row trains its first token, which nothing predicts")
    if int(rows.version_min.min()) < 0:
        raise _weighting_error(weighting, "a trained token without a weight version")
    held = (len(set(rows.group_ids)), len(set(rows.session_ids)), sum(counts))
    told = (weights.prompts, weights.trajectories, weights.trained_tokens)
    if held != told:
        raise _weighting_error(weighting, f"the rows hold (P, J, M) = {held}, the manifest would say {told}")
    owners = {Weighting.prompt: rows.group_ids, Weighting.trajectory: rows.session_ids}.get(weighting)
    shares: Counter[str] = Counter()
    divisors: defaultdict[str, set[int]] = defaultdict(set)
    for owner, count, divisor in zip(owners or [""] * len(rows), counts, rows.weight_divisor.tolist(), strict=True):
        shares[owner] += count
        divisors[owner].add(divisor)
    for owner, count in shares.items():
        wanted = count * len(shares)
        if weighting is Weighting.constant:
            wanted = weights.trajectories * weights.constant_length
        if divisors[owner] != {wanted}:
            raise _weighting_error(weighting, f"{owner or 'the batch'} has divisors {divisors[owner]}, wanted {wanted}")


def _weighting_error(weighting: Weighting, what: str) -> WeightsDoNotAddUp:
    return WeightsDoNotAddUp(f"weighting {weighting}: {what}; nothing was published, report this bug")


EPSILON = 1e-6
"""Added to the deviation, as in GRPO: a batch of equal advantages becomes 0 instead of noise."""


@dataclass(frozen=True, slots=True)
class Whitening:
    """Mean and deviation that whitened a batch; both are recorded in its manifest."""

    mean: float
    """Mean of the advantages of all trained tokens."""
    std: float
    """Population deviation; 0 if all advantages are equal."""

    def apply(self, advantages: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return (a - mean) / (std + 1e-6) elementwise; 0 if std is 0."""
        if self.std == 0.0:
            return np.zeros_like(advantages)
        whitened: NDArray[np.float64] = (advantages - self.mean) / (self.std + EPSILON)
        return whitened


def whitening(advantages: Iterable[NDArray[np.float64]]) -> Whitening:
    """Return mean and deviation over all values of all arrays. Raises ValueError if there are no values."""
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
