"""Differences between a trainer's log-probs and those of the engines, for trainers that report log-probs of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from turnlog.processors.core.batches.rows import ENGINE_KINDS, BatchRows
from turnlog.schemas.events.batches import (
    HELD_GAP_MAX,
    HELD_OLD_CACHE_GAP_MAX,
    LOGPROB_GAP_MAX,
    LOGPROB_GAP_MEAN,
    gap_of_kind,
)


@dataclass(frozen=True, slots=True)
class LogprobGaps:
    """Gaps in nats, named as in StepCompleted; 0 if there are no such tokens."""

    logprob_gap_max: float
    logprob_gap_mean: float
    old_cache_gap_max: float
    old_cache_gap_mean: float
    metrics: Mapping[str, float]
    """Gaps of single kinds of engines, and those over the tokens that the current weights sampled. Only those that
    exist.
    """


def logprob_gaps(rows: BatchRows, logprobs: NDArray[np.floating], held: int | None) -> LogprobGaps:
    """Compare a trainer's log-probs [T] with those of the rows, over trained tokens. NaN: the trainer did not compute
    the token, so it is left out. `held` is the version of the weights that computed them, None if it has no number.
    Raises ValueError if there is not one log-prob per token.
    """
    if logprobs.shape != rows.logprobs.shape:
        raise ValueError(
            f"log-probs of shape {logprobs.shape} for {len(rows.logprobs)} tokens: one per token is needed"
        )
    gap = np.abs(logprobs.astype(np.float64) - rows.logprobs)
    counted = (rows.trained == 1) & ~np.isnan(gap)
    on_old = counted & (False if rows.old_cache is None else rows.old_cache > 0)
    fresh = counted & ~on_old
    known = np.zeros_like(counted) if held is None else rows.known_of(held)
    maxima = {HELD_GAP_MAX: fresh & known, HELD_OLD_CACHE_GAP_MAX: on_old & known}
    means: dict[str, NDArray[np.bool_]] = {}
    for number, kind in enumerate(ENGINE_KINDS):
        if kind and rows.engine_kind is not None:
            own = fresh & (rows.engine_kind == number)
            maxima |= {gap_of_kind(LOGPROB_GAP_MAX, kind): own, gap_of_kind(HELD_GAP_MAX, kind): own & known}
            means[gap_of_kind(LOGPROB_GAP_MEAN, kind)] = own
    metrics = {name: float(gap[where].max()) for name, where in maxima.items() if where.any()}
    metrics |= {name: float(gap[where].mean()) for name, where in means.items() if where.any()}
    return LogprobGaps(*_of(gap[fresh]), *_of(gap[on_old]), metrics)


def _of(gap: NDArray[np.float64]) -> tuple[float, float]:
    """Return maximum and mean."""
    return (float(gap.max()), float(gap.mean())) if len(gap) else (0.0, 0.0)
