"""Choice of the tokens of a batch whose log-prob and advantage vary together (arXiv 2505.22617).

Training on these tokens lowers the entropy of the policy: likely ones with a high advantage, and unlikely ones with a
low one. The covariance of a token is (A - mean A) (p - mean p), with means over all trained tokens of the batch, on
whatever ranks they are. Each rank therefore computes it from the columns of the whole batch, in float64, and finds the
same tokens. Random numbers depend on the seed and the number of the batch alone, so that a step that is taken again
chooses the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTokens:
    """The tokens of a whole batch, the same on every rank; all arrays are [T]."""

    current: Floats
    """Log-probs by the weights that the step begins with."""
    old: Floats
    """Log-probs in the denominator of ratios."""
    advantages: Floats
    counted: Mask
    """True for tokens that train, except in rows that the step masks."""
    low: float
    """[trainer] clip_low."""
    high: float
    """[trainer] clip_high."""
    seed: int
    """[trainer] seed."""
    batch: int
    """Number of the batch."""


def choose_between_bounds(tokens: BatchTokens, share: float, low: float, high: float) -> Mask:
    """Return [T] the tokens whose loss clip-cov sets to 0: `share` of the batch's tokens, at least one, at random among
    those whose covariance is between `low` and `high` and whose ratio is not clipped already (all of them, if they are
    fewer).

    Each token draws a number, and those with the smallest numbers are taken: one token more between the bounds changes
    at most one choice.
    """
    ratio = np.exp((tokens.current.astype("f8") - tokens.old).clip(-20.0, 20.0))
    free, bounded = (one * tokens.advantages for one in (ratio, ratio.clip(1.0 - tokens.low, 1.0 + tokens.high)))
    covariance = _covariances(tokens)
    among = np.flatnonzero(tokens.counted & (bounded >= free) & (covariance > low) & (covariance < high))
    drawn = np.random.default_rng((tokens.seed, tokens.batch)).random(len(covariance))
    return _mask(tokens, among[np.argsort(drawn[among], kind="stable")], share)


def choose_greatest(tokens: BatchTokens, share: float, coefficient: float) -> Mask:
    """Return [T] the tokens on which kl-cov charges a divergence: `share` of the batch's tokens, at least one, those
    with the greatest covariance. `coefficient`, the loss's own argument, has no part in the choice.
    """
    covariance = np.where(tokens.counted, _covariances(tokens), -np.inf)
    return _mask(tokens, np.argsort(-covariance, kind="stable")[: int(tokens.counted.sum())], share)


def _covariances(tokens: BatchTokens) -> NDArray[np.float64]:
    """Return [T] the covariance of each token; 0 for tokens that do not count."""
    found = np.zeros(len(tokens.counted))
    if tokens.counted.any():
        columns = (one[tokens.counted].astype("f8") for one in (tokens.advantages, tokens.current))
        advantages, logprobs = (column - column.mean() for column in columns)
        found[tokens.counted] = advantages * logprobs
    return found


def _mask(tokens: BatchTokens, ordered: NDArray[np.intp], share: float) -> Mask:
    """Return [T] the first of the `ordered` tokens, as many as `share` of those that count."""
    found = np.zeros(len(tokens.counted), bool)
    found[ordered[: max(1, int(share * tokens.counted.sum()))]] = True
    return found
