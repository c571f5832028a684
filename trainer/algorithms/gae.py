"""Advantages relative to a critic: generalised advantage estimation (arXiv 1506.02438) over a batch's columns.

Each segment is an episode of its trained tokens alone, one step per token, with its trajectory's reward at the last
one. The V of a step is read before its token. Columns are those of whole batches, on every rank alike, so that
whitening spans all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from turnlog.processors.core.batches.rows import BatchRows
from turnlog.processors.core.batches.weighting import Whitening

Column = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticRules:
    """The critic's settings of [trainer] (turnlog.learning_settings)."""

    discount: float = 1.0
    """Gamma, per token."""
    smoothing: float = 1.0
    """Lambda of generalised advantage estimation."""
    whiten: bool = True
    """Whether advantages are whitened over the trained tokens of the batch."""
    bootstrap: bool = False
    """Whether the value after a truncated trajectory is the critic's prediction instead of 0."""
    rate: float = 1e-5
    """Learning rate of the critic."""
    clip: float = 0.2
    """Clip range of values around their previous ones; 0: no clipping."""
    updates: int = 1
    """Updates of the critic per batch."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """Training data of the critic: [T] float32 each, 0 where nothing trains."""

    values: torch.Tensor
    """Predictions of the critic before the first update of the rollout batch."""
    returns: torch.Tensor
    """Targets of the critic."""


def compute_gae(
    rows: BatchRows, values: NDArray[np.float32], truncated: NDArray[np.bool_], penalty: Column, rules: CriticRules
) -> tuple[NDArray[np.float32], Lesson]:
    """Return (advantages [T] float32, training data of the critic).

    `values` [T + n] is the result of Critic.values, `truncated` [n] flags truncated trajectories, and `penalty` [T] is
    subtracted from the reward at each token. The reward is read from the last trained token's advantage, which is its
    trajectory's reward under an estimator without a baseline.
    """
    edges = rows.starts + rows.lengths + np.arange(len(rows))
    behind = np.where(truncated & rules.bootstrap, values[edges].astype("f8"), 0.0)
    before = np.delete(values, edges).astype("f8")
    at, counts = np.flatnonzero(rows.trained), rows.trained_per_row()
    ends = np.cumsum(counts)
    rewards = -penalty
    lasts = at[ends[counts > 0] - 1]
    rewards[lasts] += rows.advantages[lasts]
    advantages, running = np.zeros(len(before)), np.zeros(len(rows))
    for back in range(1, int(counts.max(initial=0)) + 1):
        live = counts >= back
        here = at[ends[live] - back]
        surprise = rewards[here] + rules.discount * behind[live] - before[here]
        running[live] = surprise + rules.discount * rules.smoothing * running[live]
        advantages[here], behind[live] = running[live], before[here]
    returns = advantages + before
    if rules.whiten and len(at):
        chosen = advantages[at]
        advantages[at] = Whitening(float(chosen.mean()), float(chosen.std())).apply(chosen)
    lesson = Lesson(*(torch.from_numpy(column.astype("f4")) for column in (before, returns)))
    return advantages.astype("<f4"), lesson


def value_loss(
    values: torch.Tensor, before: torch.Tensor, returns: torch.Tensor, clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (max((V - R)^2, (V clipped to within `clip` of its previous value - R)^2) / 2, where the clip decided).

    A `clip` of 0 disables clipping.
    """
    free = (values - returns).square()
    if not clip:
        return free / 2, torch.zeros_like(free, dtype=torch.bool)
    bounded = (before + (values - before).clamp(-clip, clip) - returns).square()
    return torch.maximum(free, bounded) / 2, bounded.detach() > free.detach()
