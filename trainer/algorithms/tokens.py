"""What a loss is: a function from the tokens of a microbatch to what each of them adds to the step.

    loss(tokens, clip, *numbers) -> TokenLoss

It sums and divides nothing: the step is the sum over trained tokens of value / weight_divisor, whatever a loss masks.
It knows no rows, so that rows may be padded, packed or spread over ranks: every tensor has an entry a token, and what
belongs to a trajectory stands at each of its tokens. A package offers one as an Algorithm under the entry point group
`turnlog.algorithms` (docs/algorithms.md).
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
    """Log-probs are those of logits / temperature over the model's own vocabulary. Where nothing trains, old, recorded
    and reference ones equal the current ones."""

    logprobs: torch.Tensor
    """Current; with `entropy` the only one that has a gradient."""
    old: torch.Tensor
    """What a ratio is taken against: recorded, or of the weights before the draw's first update."""
    recorded: torch.Tensor
    """The engine's."""
    reference: torch.Tensor | None
    """The frozen model's; None where no divergence is asked for."""
    advantages: torch.Tensor
    """With what a teacher makes of them."""
    trained: torch.Tensor
    """bool"""
    entropy: torch.Tensor
    """Of the whole distribution, nats."""
    trajectory_gap: torch.Tensor | None = None
    """Sum of current - old over all trained tokens of the token's trajectory, whatever rows and ranks they are on; for
    algorithms that are `by_trajectory`."""
    trajectory_tokens: torch.Tensor | None = None
    """How many those are, at least 1."""
    importance: torch.Tensor | None = None
    """Logarithm of the trajectory's weight, where [trainer] importance_level is not token."""
    teacher: torch.Tensor | None = None
    """The teacher's, where there is one."""


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure of the step, from a number per token: over the trained tokens of all ranks."""

    values: torch.Tensor
    of: Literal["mean", "max", "effective"] = "mean"
    """effective: (sum)^2 / (n x sum of squares), the share of samples that weights like these are worth."""

    def figure(self, total: float, squares: float, largest: float, count: int) -> float:
        """From the sums over `count` tokens."""
        if self.of == "max":
            return largest
        return total / count if self.of == "mean" else total * total / (count * squares) if squares else 0.0


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Per token, in the shape of the inputs."""

    value: torch.Tensor
    clipped: torch.Tensor
    """True where a bound decided."""
    masked: torch.Tensor | None = None
    """True where the token is to have no part in the step: booked as `trainer_mask`; no divisor changes."""
    measures: Mapping[str, Measure] = field(default_factory=dict)
    """The same names for any tokens."""
    auxiliary: torch.Tensor | None = None
    """That of the auxiliary loss; an algorithm leaves it alone."""


@dataclass(frozen=True, slots=True)
class Clip:
    """[trainer] clip_low, clip_high, dual_clip."""

    low: float
    high: float
    dual: float = 0.0


LOG_RATIO = 20.0
"""A logarithm of a ratio counts up to this, either way: e^89 is infinite in float32, and 0 times infinity, or NaN, the
gradient of a token that a clip leaves out."""
LOG_TRAJECTORY_RATIO = 10.0
"""The same of a trajectory's mean, upwards: as verl bounds both. Beyond them a token has no gradient."""


def bounded_ratio(logprobs: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """exp(logprobs - old), finite whatever they are."""
    return (logprobs - old).clamp(-LOG_RATIO, LOG_RATIO).exp()


Loss = Callable[..., TokenLoss]
"""(Tokens, Clip, a number for each of the algorithm's arguments) -> TokenLoss."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A loss by name. `loss` is a function of a module, so that rank 0 can name it to the others."""

    name: str
    loss: Loss
    arguments: Mapping[str, float] = field(default_factory=dict)
    """Numbers that the setting may give behind the name, with their defaults."""
    by_trajectory: bool = False
    """Whether it reads trajectory_gap and trajectory_tokens: they cost a pass without gradients before each step."""
    critic: bool = False
    """Whether its advantages are those of rewards against a critic (turnlog.trainer.algorithms.gae); then it wants
    {"fold.estimator": ("none",)}."""
    zero_at_zero: bool = False
    """Whether a token of advantage 0 loses nothing and has no gradient: groups of such tokens alone are then passed
    over where nothing else would train them."""
    distils: bool = False
    """Whether its advantages are a teacher's alone; then it wants {"fold.estimator": ("none",)}."""
    wants: Wants = field(default_factory=dict)
    """Settings that it is defined with: {"batcher.weighting": ("trajectory",)}."""


Weigh = Callable[..., NDArray[np.float64]]
"""(BatchRows, a number for each of the auxiliary loss's arguments) -> [T], what a token's loss counts: 1 / the divisor
where it does, 0 elsewhere. Of the whole batch, so that the divisor is one number on whatever ranks its rows are."""


@dataclass(frozen=True, slots=True)
class Auxiliary:
    """A loss beside the algorithm's, by name, with a divisor of its own: coefficient x sum of weight x value, also over
    tokens that do not train. Its functions are those of a module, as an algorithm's is."""

    name: str
    loss: Callable[..., torch.Tensor]
    """(Tokens, the same numbers) -> value per token."""
    weigh: Weigh
    arguments: Mapping[str, float] = field(default_factory=dict)
    """Numbers that the setting may give behind the name, with their defaults."""
    wants_entropy: bool = False
    """Whether the loss is one of the entropy, which then has a gradient."""
