"""Token losses against arithmetic and against derivatives by hand."""

from __future__ import annotations

import math

import pytest
import torch

from turnlog.trainer.algorithms.tokens import Tokens
from turnlog.trainer.plan import PolicyGradient, imitation

CLIP = PolicyGradient(0.2, 0.3)


def tokens(logprobs: torch.Tensor, recorded: torch.Tensor, advantages: torch.Tensor) -> Tokens:
    """Trained tokens whose ratio is taken against the recorded log-probs."""
    return Tokens(
        logprobs=logprobs,
        old=recorded,
        recorded=recorded,
        reference=None,
        advantages=advantages,
        trained=torch.ones_like(recorded, dtype=torch.bool),
        entropy=torch.zeros_like(recorded),
    )


def one(logprob: float, recorded: float, advantage: float) -> tuple[float, bool, float]:
    """(loss, clipped, d loss / d log-prob) of one token."""
    logprobs = torch.tensor([logprob], dtype=torch.float64, requires_grad=True)
    result = CLIP(tokens(logprobs, torch.tensor([recorded], dtype=torch.float64), torch.tensor([advantage])))
    result.value.sum().backward()
    assert logprobs.grad is not None
    return float(result.value.detach()), bool(result.clipped), float(logprobs.grad)


@pytest.mark.parametrize("advantage", [1.5, -0.5])
def test_on_policy_the_gradient_is_minus_the_advantage(advantage: float) -> None:
    loss, clipped, gradient = one(-2.0, -2.0, advantage)
    assert (loss, clipped) == (-advantage, False)
    assert gradient == pytest.approx(-advantage)


def test_inside_the_bounds_the_gradient_carries_the_ratio() -> None:
    ratio = 1.1
    loss, clipped, gradient = one(-2.0 + math.log(ratio), -2.0, 2.0)
    assert loss == pytest.approx(-2.0 * ratio)
    assert gradient == pytest.approx(-2.0 * ratio)
    assert not clipped


@pytest.mark.parametrize(("ratio", "advantage", "bound"), [(1.5, 1.0, 1.3), (0.5, -1.0, 0.8)])
def test_beyond_the_bound_that_the_advantage_asks_for_there_is_no_gradient(
    ratio: float, advantage: float, bound: float
) -> None:
    loss, clipped, gradient = one(-2.0 + math.log(ratio), -2.0, advantage)
    assert loss == pytest.approx(-bound * advantage)
    assert (clipped, gradient) == (True, 0.0)


@pytest.mark.parametrize(("ratio", "advantage"), [(1.5, -1.0), (0.5, 1.0)])
def test_beyond_the_other_bound_the_gradient_pulls_back(ratio: float, advantage: float) -> None:
    loss, clipped, gradient = one(-2.0 + math.log(ratio), -2.0, advantage)
    assert loss == pytest.approx(-ratio * advantage)
    assert gradient == pytest.approx(-ratio * advantage)
    assert not clipped


def test_imitation_is_the_negative_logprob() -> None:
    logprobs = torch.tensor([-1.0, -2.0])
    assert torch.equal(imitation(tokens(logprobs, logprobs, logprobs)).value, torch.tensor([1.0, 2.0]))
