"""Losses: functions from the tokens of a microbatch to what each of them adds to the step.

    loss(tokens, clip, *numbers) -> TokenLoss

A loss sums and divides nothing: the step is the sum over trained tokens of value / weight_divisor, whatever a loss
masks. It does not see rows, so that rows may be padded, packed or spread over ranks: every tensor has one entry per
token, and per-trajectory values are repeated at each of its tokens. A package offers its own as an Algorithm under the
entry point group `turnlog.algorithms` (docs/algorithms.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from turnlog.learning_settings import Wants


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
    """Whether its advantages come from rewards and a critic (turnlog.trainer.algorithms.gae); it must then have
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
