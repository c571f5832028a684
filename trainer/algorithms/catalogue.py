"""The built-in losses, and the lookup of [trainer] algorithm, including losses from other packages.

docs/algorithms.md has formulas, papers and use cases. Several names share a loss: they differ in estimator, weighting
and clip, which are separate settings (see turnlog.learning_settings.WANTS).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from turnlog.infra import offers
from turnlog.processors.core.batches.rows import BatchRows
from turnlog.processors.core.methods.rules import split
from turnlog.settings import SettingsError
from turnlog.trainer.algorithms.tokens import (
    LOG_TRAJECTORY_RATIO,
    Algorithm,
    Auxiliary,
    Clip,
    Measure,
    TokenLoss,
    Tokens,
    bounded_ratio,
)

KEY, AUXILIARY_KEY = "trainer.algorithm", "trainer.auxiliary"


def clipped_surrogate(tokens: Tokens, clip: Clip) -> TokenLoss:
    """Return -min(r A, clamp(r) A) per token, with r = exp(current - old).

    This is PPO's surrogate (arXiv 1707.06347, eq. 7) with separate bounds (DAPO, arXiv 2503.14476) and dual clip (arXiv
    1912.09729).
    """
    return _surrogate(bounded_ratio(tokens.logprobs, tokens.old), tokens.advantages, clip)


def by_sequence(tokens: Tokens, clip: Clip) -> TokenLoss:
    """Return PPO's surrogate with one ratio per trajectory, the geometric mean of its tokens' (GSPO, arXiv 2507.18071,
    eq. 5).

    The value of the ratio is the trajectory's, but its gradient goes to each token individually (eq. 14).
    """
    assert tokens.trajectory_gap is not None
    assert tokens.trajectory_tokens is not None
    mean = tokens.trajectory_gap / tokens.trajectory_tokens + tokens.logprobs - tokens.logprobs.detach()
    ratio = mean.clamp(max=LOG_TRAJECTORY_RATIO).exp()
    found, whole = _surrogate(ratio, tokens.advantages, clip), ratio.detach()
    measures = {"trajectory_ratio": Measure(whole), "trajectory_ratio_max": Measure(whole, "max")}
    return TokenLoss(found.value, found.clipped, measures=measures)


def soft(tokens: Tokens, clip: Clip, positive: float, negative: float) -> TokenLoss:
    """Return -4 / t sigmoid(t (r - 1)) A, with t by the sign of A: a soft gate instead of a clip (SAPO, arXiv
    2511.20347).
    """
    sharpness = torch.full_like(tokens.advantages, negative).masked_fill(tokens.advantages > 0, positive)
    gate = torch.sigmoid(sharpness * (bounded_ratio(tokens.logprobs, tokens.old) - 1.0))
    value = -4.0 / sharpness * gate * tokens.advantages
    openness = (4.0 * gate * (1.0 - gate)).detach()
    return TokenLoss(value, torch.zeros_like(tokens.trained), measures={"gate": Measure(openness)})


def cispo_loss(tokens: Tokens, clip: Clip) -> TokenLoss:
    """Return -clamp(r) A log p (CISPO, arXiv 2506.13585, eq. 4).

    The ratio has no gradient, so that every token keeps its own gradient.
    """
    ratio = bounded_ratio(tokens.logprobs, tokens.old).detach()
    weight = ratio.clamp(1.0 - clip.low, 1.0 + clip.high)
    return TokenLoss(-weight * tokens.advantages * tokens.logprobs, weight != ratio)


def _surrogate(ratio: torch.Tensor, advantages: torch.Tensor, clip: Clip) -> TokenLoss:
    free = ratio * advantages
    bounded = ratio.clamp(1.0 - clip.low, 1.0 + clip.high) * advantages
    least = torch.minimum(free, bounded)
    decided = bounded.detach() < free.detach()
    if clip.dual:
        floor = torch.where(advantages < 0, clip.dual * advantages, -torch.inf)
        decided = decided | (floor > least.detach())
        least = torch.maximum(least, floor)
    return TokenLoss(-least, decided)


BUILT_IN = {
    one.name: one
    for one in (
        *(
            Algorithm(name, clipped_surrogate, zero_at_zero=True)
            for name in ("grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp")
        ),
        Algorithm("gspo", by_sequence, by_trajectory=True, zero_at_zero=True),
        Algorithm("sapo", soft, {"positive": 1.0, "negative": 1.05}, zero_at_zero=True),
        Algorithm("cispo", cispo_loss, zero_at_zero=True),
        Algorithm("ppo", clipped_surrogate, critic=True),
        Algorithm("opd", clipped_surrogate, distils=True),
    )
}


def imitation_of_good(tokens: Tokens, reward: float) -> torch.Tensor:
    """Return -log p (the positive examples of VAPO, arXiv 2504.05118)."""
    return -tokens.logprobs


def among_good(rows: BatchRows, reward: float) -> NDArray[np.float64]:
    """Return weights [T]: 1 / the number of trained tokens of all trajectories with at least this reward, for those
    tokens; else 0.
    """
    good = (rows.trained == 1) & np.repeat(rows.rewards >= reward, rows.lengths)
    weights: NDArray[np.float64] = good / max(1, int(good.sum()))
    return weights


AUXILIARY = {"imitate": Auxiliary("imitate", imitation_of_good, among_good, {"reward": 1.0})}


def choose_algorithm(spec: str) -> tuple[Algorithm, tuple[float, ...]]:
    """Return the algorithm of [trainer] algorithm and its arguments. Raises SettingsError if it is unknown or
    malformed.
    """
    return _choose_by_spec(spec, KEY, BUILT_IN, Algorithm)


def chosen_auxiliary(spec: str) -> tuple[Auxiliary | None, tuple[float, ...]]:
    """Return the loss of [trainer] auxiliary and its arguments; (None, ()) for "none". Raises SettingsError."""
    return (None, ()) if spec == "none" else _choose_by_spec(spec, AUXILIARY_KEY, AUXILIARY, Auxiliary)


Kind = TypeVar("Kind", Algorithm, Auxiliary)


def _choose_by_spec(
    spec: str, key: str, built_in: Mapping[str, Kind], kind: type[Kind]
) -> tuple[Kind, tuple[float, ...]]:
    name, numbers = split(spec, key)
    found: Kind = offers.one(name, built_in, key, kind)
    if numbers and len(numbers) != len(found.arguments):
        wanted = ":".join([name, *map(str.upper, found.arguments)])
        raise SettingsError(f"{key}: {spec!r} must be {name} or {wanted}, numbers in place of the capitals")
    return found, numbers or tuple(found.arguments.values())
