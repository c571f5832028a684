"""Token losses in plain torch. Every function is elementwise over tokens; weights and sums are the learner's.

The clipped surrogate is PPO's (Schulman et al. 2017, eq. 7) with separate bounds (DAPO, Yu et al. 2025); under group
advantages it is GRPO's (Shao et al. 2024) with the ratio taken against the log-probs recorded by the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Per token, in the shape of the inputs."""

    value: torch.Tensor
    clipped: torch.Tensor
    """True where the bound decided, so that the token has no gradient."""


Objective = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], TokenLoss]
"""(log-probs, recorded log-probs, advantages) -> token losses. Picklable: rank 0 sends it to the others."""


@dataclass(frozen=True, slots=True)
class PolicyGradient:
    """-min(ratio A, clamp(ratio, 1 - clip_low, 1 + clip_high) A), ratio = exp(log-prob - recorded log-prob)."""

    clip_low: float
    clip_high: float

    def __call__(self, logprobs: torch.Tensor, recorded: torch.Tensor, advantages: torch.Tensor) -> TokenLoss:
        """An Objective."""
        ratio = (logprobs - recorded).exp()
        free = ratio * advantages
        bounded = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high) * advantages
        return TokenLoss(-torch.minimum(free, bounded), bounded.detach() < free.detach())


def imitation(logprobs: torch.Tensor, recorded: torch.Tensor, advantages: torch.Tensor) -> TokenLoss:
    """-log-prob: supervised training on demonstrations."""
    return TokenLoss(-logprobs, torch.zeros_like(logprobs, dtype=torch.bool))


def scaled_logits(
    logits: torch.Tensor, temperature: torch.Tensor, *, first_column: int, vocabulary: int
) -> torch.Tensor:
    """logits / temperature in float32 with the columns that pad the vocabulary out of every softmax.

    logits [b, s, v], this rank's columns from `first_column` on; temperature [b]. A new tensor.
    """
    scaled = logits.float() / temperature[:, None, None]
    columns = torch.arange(first_column, first_column + logits.size(-1), device=logits.device)
    padding = columns >= vocabulary
    return scaled.masked_fill(padding, torch.finfo(torch.float32).min) if bool(padding.any()) else scaled
