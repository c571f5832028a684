"""Losses: functions from the tokens of a microbatch to what each of them adds to the step.

    loss(tokens, clip, *numbers) -> TokenLoss

A loss sums and divides nothing: the step is the sum over trained tokens of value / weight_divisor, whatever a loss
masks. It does not see rows, so that rows may be padded, packed or spread over ranks: every tensor has one entry per
token, and per-trajectory values are repeated at each of its tokens. A package offers its own as an Algorithm under the
entry point group `turnlog.algorithms` (docs/algorithms.md).

Advantages relative to a critic are computed over a batch's columns by generalised advantage estimation (arXiv
1506.02438). Each segment is an episode of its trained tokens alone, one step per token, with its trajectory's reward at
the last one. The V of a step is read before its token. Columns are those of whole batches, on every rank alike, so that
whitening spans all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from turnlog.learning_settings import Wants
from turnlog.processors.core.batches.rows import BatchRows
from turnlog.processors.core.batches.weighting import Whitening


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The tokens of a microbatch; all tensors have the same shape.

    Log-probs are those of logits / temperature over the model's own vocabulary. Where nothing trains, old, recorded and
    reference log-probs equal the current ones.
    """

    logprobs: torch.Tensor
    """Current log-probs; the only column with a gradient, besides `entropy`."""
    old: torch.Tensor
    """Log-probs in the denominator of ratios: recorded, or of the weights before the rollout batch's first update."""
    recorded: torch.Tensor
    """Log-probs that the engine recorded."""
    reference: torch.Tensor | None
    """Log-probs of the frozen reference; None if the objective has no divergence."""
    advantages: torch.Tensor
    """Advantages, including the teacher's part."""
    trained: torch.Tensor
    """Boolean mask of trained tokens."""
    entropy: torch.Tensor
    """Entropy of the whole distribution, in nats."""
    trajectory_gap: torch.Tensor | None = None
    """Sum of current - old log-probs over all trained tokens of the token's trajectory, on whatever rows and ranks; for
    algorithms that are `by_trajectory`.
    """
    trajectory_tokens: torch.Tensor | None = None
    """Number of those tokens, at least 1."""
    importance: torch.Tensor | None = None
    """Logarithm of the trajectory's importance weight, if [trainer] importance_level is not token."""
    teacher: torch.Tensor | None = None
    """Log-probs of the teacher; None without a teacher."""


@dataclass(frozen=True, slots=True)
class Measure:
    """A metric of the step, aggregated from one number per token over the trained tokens of all ranks."""

    values: torch.Tensor
    of: Literal["mean", "max", "effective"] = "mean"
    """Aggregation. effective: (sum)^2 / (n x sum of squares), the relative effective sample size of such weights."""

    def figure(self, total: float, squares: float, largest: float, count: int) -> float:
        """Return the metric from sums and maximum over `count` tokens."""
        if self.of == "max":
            return largest
        return total / count if self.of == "mean" else total * total / (count * squares) if squares else 0.0


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """The result of a loss, per token, in the shape of the inputs."""

    value: torch.Tensor
    clipped: torch.Tensor
    """True where the clip decided."""
    masked: torch.Tensor | None = None
    """True where the token must be left out of the step: accounted for as `trainer_mask`; no divisor changes."""
    measures: Mapping[str, Measure] = field(default_factory=dict)
    """Metrics; the names must be the same for any tokens."""
    auxiliary: torch.Tensor | None = None
    """Value of the auxiliary loss; an algorithm leaves it None."""


@dataclass(frozen=True, slots=True)
class Clip:
    """The settings [trainer] clip_low, clip_high, dual_clip."""

    low: float
    high: float
    dual: float = 0.0


LOG_RATIO = 20.0
"""Bound of the magnitude of a log ratio. e^89 is infinite in float32, and 0 times infinity is NaN, which would be the
gradient of a token that a clip leaves out.
"""
LOG_TRAJECTORY_RATIO = 10.0
"""Upper bound of a trajectory's mean log ratio; verl bounds both in the same way. Tokens beyond the bounds have no
gradient.
"""


def bounded_ratio(logprobs: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Return exp(logprobs - old), finite for any input."""
    return (logprobs - old).clamp(-LOG_RATIO, LOG_RATIO).exp()


Loss = Callable[..., TokenLoss]
"""(Tokens, Clip, one number for each of the algorithm's arguments) -> TokenLoss."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A named loss. `loss` must be a module-level function, so that rank 0 can refer to it by name when calling other
    ranks.
    """

    name: str
    loss: Loss
    arguments: Mapping[str, float] = field(default_factory=dict)
    """Arguments that the setting may give after the name, with their defaults."""
    by_trajectory: bool = False
    """Whether it reads trajectory_gap and trajectory_tokens, which cost a pass without gradients before each step."""
    critic: bool = False
    """Whether its advantages come from rewards and a critic (turnlog.trainer.algorithms.tokens); it must then have
    {"fold.estimator": ("none",)} in `wants`.
    """
    zero_at_zero: bool = False
    """Whether a token of advantage 0 has zero loss and gradient. Groups of such tokens alone are then left out if
    nothing else would train them.
    """
    distils: bool = False
    """Whether its advantages come from a teacher alone; it must then have {"fold.estimator": ("none",)} in `wants`."""
    wants: Wants = field(default_factory=dict)
    """Settings that its definition requires: {"batcher.weighting": ("trajectory",)}."""


Weigh = Callable[..., NDArray[np.float64]]
"""(BatchRows, one number for each of the auxiliary loss's arguments) -> [T] weight of each token's loss: 1 / the
divisor where it counts, 0 elsewhere. It receives the whole batch, so that the divisor is the same on all ranks.
"""


@dataclass(frozen=True, slots=True)
class Auxiliary:
    """A named loss beside the algorithm's, with its own divisor: coefficient x sum of weight x value, also over tokens
    that do not train.

    Its functions must be module-level functions, like an algorithm's.
    """

    name: str
    loss: Callable[..., torch.Tensor]
    """(Tokens, the same numbers) -> value per token."""
    weigh: Weigh
    arguments: Mapping[str, float] = field(default_factory=dict)
    """Arguments that the setting may give after the name, with their defaults."""
    wants_entropy: bool = False
    """Whether the loss uses the entropy, which then has a gradient."""


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
