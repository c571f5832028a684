"""Loss weights as integers: each trained token of a row weighs 1 / divisor, and the batch's weights add up to 1.

folds.md 4; prompt-equal as in DAPO-style per-prompt averaging, `constant` as in Dr. GRPO (arXiv 2503.20783).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from turnlog.schemas.events import Weighting


class WeightsDoNotAddUp(Exception):
    """Invariant I5 is broken: a bug. The batch is not published and the batcher ends."""


@dataclass(frozen=True, slots=True)
class LiveRow:
    """What weighting needs of a row: whose it is and how many of its tokens train (at least one)."""

    group_id: str
    session_id: str
    trained_tokens: int


@dataclass(frozen=True, slots=True)
class Weights:
    """The integers of the manifest, and one divisor per row."""

    prompts: int
    trajectories: int
    trained_tokens: int
    constant_length: int
    divisors: tuple[int, ...]


def weigh(rows: Sequence[LiveRow], weighting: Weighting, constant_length: int) -> Weights:
    """Divisors of `rows`: prompt P x M_p, trajectory J x M_j, token M, constant J x L.

    P, J and M count what is live in this batch. Raises WeightsDoNotAddUp when invariant I5 does not hold.
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
    divisors = tuple(by_row[weighting])
    length = constant_length if weighting is Weighting.constant else 0
    weights = Weights(prompts, trajectories, trained, length, divisors)
    _check(rows, weights, weighting)
    return weights


def _check(rows: Sequence[LiveRow], weights: Weights, weighting: Weighting) -> None:
    """I5, at every batch: sums are 1 (M / (J x L) for `constant`), and 1 / P per prompt for `prompt`."""
    per_prompt: dict[str, Fraction] = {}
    for row, divisor in zip(rows, weights.divisors, strict=True):
        share = Fraction(row.trained_tokens, divisor)
        per_prompt[row.group_id] = per_prompt.get(row.group_id, Fraction(0)) + share
    total = sum(per_prompt.values(), Fraction(0))
    wanted = Fraction(1)
    if weighting is Weighting.constant:
        wanted = Fraction(weights.trained_tokens, weights.trajectories * weights.constant_length)
    equal = weighting is not Weighting.prompt or set(per_prompt.values()) == {Fraction(1, weights.prompts)}
    if total != wanted or not equal:
        raise WeightsDoNotAddUp(f"{weighting}: loss weights add up to {total}, wanted {wanted}; nothing was published")
