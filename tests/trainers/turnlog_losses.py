"""The loss of turnlog's own trainer on given log-probs, for comparison with that of other people's trainers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch
from fakes.batches import synthetic_rows

from turnlog.processors.core.batches.rows import BatchRows
from turnlog.trainer.algorithms.tokens import Clip, TokenLoss, Tokens

Loss = Callable[[Tokens, Clip], TokenLoss]


def rows_at_one_temperature(seed: int = 3) -> BatchRows:
    """Return 16 random rows in four groups, all sampled at temperature 1."""
    rows = synthetic_rows(seed, segments=2)
    return dataclasses.replace(rows, temperature=np.ones(len(rows), "<f4"))


def drifted(rows: BatchRows, by: float = 0.3) -> torch.Tensor:
    """Return [T] log-probs as a trainer computes them that has moved away from the engine's, float32."""
    moved = rows.logprobs + np.random.default_rng(11).normal(0, by, len(rows.logprobs))
    return torch.from_numpy(np.minimum(moved, -1e-3).astype("<f4"))


def step_loss(rows: BatchRows, logprobs: torch.Tensor, loss: Loss, clip: Clip) -> tuple[float, torch.Tensor]:
    """Return the loss of a step on `rows`, and [T] its gradient with respect to `logprobs`.

    The loss is the sum over trained tokens of token loss / weight_divisor.
    """
    current = logprobs.clone().requires_grad_()
    recorded = torch.from_numpy(rows.logprobs)
    tokens = Tokens(
        logprobs=current,
        old=recorded,
        recorded=recorded,
        reference=None,
        advantages=torch.from_numpy(rows.advantages),
        trained=torch.from_numpy(rows.trained).bool(),
        entropy=None,
    )
    share = torch.from_numpy(rows.trained / np.repeat(rows.weight_divisor, rows.lengths))
    total = (loss(tokens, clip).value.double() * share).sum()
    (gradient,) = torch.autograd.grad(total, current)
    return float(total), gradient


def same_gradient(theirs: torch.Tensor, ours: torch.Tensor) -> bool:
    """Return whether two gradients differ by no more than the rounding of float32 weights."""
    assert float(ours.abs().max()) > 1e-3
    return bool(torch.allclose(theirs, ours, rtol=1e-5, atol=1e-9))
