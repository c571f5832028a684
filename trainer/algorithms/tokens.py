"""Losses: functions from the tokens of a microbatch to what each of them adds to the step.

    loss(tokens, clip, *numbers) -> TokenLoss

A loss sums and divides nothing: the step is the sum over trained tokens of value / weight_divisor, whatever a loss
masks. It does not see rows, so that rows may be padded, packed or spread over ranks: every tensor has one entry per
token, and per-trajectory values are repeated at each of its tokens. A package offers its own as an Algorithm under the
entry point group `turnlog.algorithms`. docs/algorithms.md has formulas, papers and use cases of the built-in ones.
Several names share a loss: they differ in estimator, weighting and clip, which are separate settings (see
turnlog.learning_settings.WANTS).

Advantages relative to a critic are computed over a batch's columns by generalised advantage estimation (arXiv
1506.02438). Each segment is an episode of its trained tokens alone, one step per token, with its trajectory's reward at
the last one. The V of a step is read before its token. Columns are those of whole batches, on every rank alike, so that
whitening spans all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from turnlog.infra import offers
from turnlog.learning_settings import Wants
from turnlog.processors.core.batches.rows import BatchRows
from turnlog.processors.core.batches.weighting import Whitening
from turnlog.processors.core.methods.rules import split
from turnlog.settings import SettingsError
from turnlog.trainer.algorithms.covariance import choose_between_bounds, choose_greatest


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
    entropy: torch.Tensor | None
    """Entropy of the whole distribution, in nats; with a gradient if the objective trains it, None if nothing asks for
    it."""
    trajectory_gap: torch.Tensor | None = None
    """Sum of current - old log-probs over all trained tokens of the token's trajectory, on whatever rows and ranks; for
    algorithms that are `by_trajectory`.
    """
    trajectory_tokens: torch.Tensor | None = None
    """Number of those tokens, at least 1."""
    importance: torch.Tensor | None = None
    """Logarithm of the trajectory's importance weight, if [trainer] importance_level is not token."""
    importance_mean: float = 1.0
    """Mean of the batch's importance weights within their bounds, by which they are divided; 1 if they are not."""
    teacher: torch.Tensor | None = None
    """Log-probs of the teacher; None without a teacher."""
    chosen: torch.Tensor | None = None
    """Boolean mask of the tokens that the algorithm's `choose` returned; None if it has none."""


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
Choose = Callable[..., NDArray[np.bool_]]
"""(BatchTokens, one number for each of the algorithm's arguments) -> [T] tokens of the whole batch."""
Fault = Callable[..., str]
"""(one number for each of the algorithm's arguments) -> why they cannot be used; empty if they can."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A named loss. `loss` must be a module-level function, so that rank 0 can refer to it by name when calling other
    ranks.
    """

    name: str
    loss: Loss
    arguments: Mapping[str, float] = field(default_factory=dict)
    """Arguments that the setting may give after the name, with their defaults."""
    fault: Fault | None = None
    """Check of these arguments; a module-level function, like `loss`."""
    choose: Choose | None = None
    """Choice of tokens that needs the whole batch, for Tokens.chosen; a module-level function, like `loss`. It costs a
    pass without gradients before each step.
    """
    by_trajectory: bool = False
    """Whether it reads trajectory_gap and trajectory_tokens, which cost a pass without gradients before each step."""
    critic: bool = False
    """Whether its advantages come from rewards and a critic (compute_gae); it must then have
    {"fold.estimator": ("none",)} in `wants`.
    """
    zero_at_zero: bool = False
    """Whether a token of advantage 0 has zero loss and gradient. Groups of such tokens alone are then left out if
    nothing else would train them.
    """
    distils: bool = False
    """Whether its advantages come from a teacher alone; it must then have {"fold.estimator": ("none",)} in `wants`."""
    wants_entropy: bool = False
    """Whether the loss uses the entropy, which then has a gradient."""
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


def clip_cov_loss(tokens: Tokens, clip: Clip, share: float, low: float, high: float) -> TokenLoss:
    """Return PPO's surrogate, and 0 for the tokens that `choose_between_bounds` chose (clip-cov, arXiv 2505.22617)."""
    assert tokens.chosen is not None
    found = clipped_surrogate(tokens, clip)
    value = torch.where(tokens.chosen, 0.0, found.value)
    return TokenLoss(value, found.clipped | tokens.chosen, measures=_share_of(tokens.chosen, found.value))


def kl_cov_loss(tokens: Tokens, clip: Clip, share: float, coefficient: float) -> TokenLoss:
    """Return -r A, plus coefficient x |log r| for the tokens of `choose_greatest` (kl-cov, arXiv 2505.22617)."""
    assert tokens.chosen is not None
    value = -bounded_ratio(tokens.logprobs, tokens.old) * tokens.advantages
    charged = torch.where(tokens.chosen, coefficient * (tokens.logprobs - tokens.old).abs(), 0.0)
    return TokenLoss(value + charged, torch.zeros_like(tokens.trained), measures=_share_of(tokens.chosen, value))


def _share_of(chosen: torch.Tensor, like: torch.Tensor) -> dict[str, Measure]:
    return {"covariance_share": Measure(chosen.to(like.dtype))}


def within_total_variation(tokens: Tokens, clip: Clip, low: float, high: float, most: float) -> TokenLoss:
    """Return DPPO's loss (arXiv 2602.04879) by the total variation of "this token or another one", |exp p - exp o|."""
    moved = tokens.logprobs.detach().exp() - tokens.old.clamp(max=0.0).exp()
    return _within_divergence(tokens, moved.abs(), low, high, most)


def within_binary_divergence(tokens: Tokens, clip: Clip, low: float, high: float, most: float) -> TokenLoss:
    """Return DPPO's loss (arXiv 2602.04879) by the KL divergence of "this token or another one", old from current."""
    current, old = tokens.logprobs.detach(), tokens.old.clamp(max=0.0)
    other, other_old = ((-torch.expm1(one)).clamp(min=LEAST_OTHER) for one in (current, old))
    # The quotient of the other tokens' probabilities is near 1, where its logarithm would lose what it is compared for.
    quotient = torch.log1p(((current.exp() - old.exp()) / other).clamp(min=-1.0)).clamp(min=math.log(LEAST_OTHER))
    divergence = old.exp() * (old - current) + other_old * quotient
    return _within_divergence(tokens, divergence, low, high, most)


LEAST_OTHER = 1e-8
"""Least probability of all other tokens together: that of a certain token is 0, which has no logarithm."""


def _within_divergence(tokens: Tokens, divergence: torch.Tensor, low: float, high: float, most: float) -> TokenLoss:
    """Return -min(r, most) A log p, without a gradient through r, and 0 for a token whose `divergence` is beyond its
    bound and that a step would move further: likelier with A > 0 (`high`), less likely with A < 0 (`low`).
    """
    current = tokens.logprobs.detach()
    ratio = bounded_ratio(current, tokens.old)
    further_up = (tokens.advantages > 0) & (current > tokens.old) & (divergence > high)
    further_down = (tokens.advantages < 0) & (current < tokens.old) & (divergence > low)
    beyond = further_up | further_down
    value = torch.where(beyond, 0.0, -ratio.clamp(max=most) * tokens.advantages * tokens.logprobs)
    measures = {"divergence": Measure(divergence), "divergence_max": Measure(divergence, "max")}
    return TokenLoss(value, beyond, measures=measures)


def fault_of_sharpness(positive: float, negative: float) -> str:
    """Return why sapo cannot use its arguments."""
    return "" if min(positive, negative) > 0 else "POSITIVE and NEGATIVE must be above 0"


def fault_of_clip_cov(share: float, low: float, high: float) -> str:
    """Return why clip_cov cannot use its arguments."""
    if not 0 < share <= 1:
        return "SHARE must be above 0 and at most 1"
    return "" if low < high else "LOW must be below HIGH"


def fault_of_kl_cov(share: float, coefficient: float) -> str:
    """Return why kl_cov cannot use its arguments."""
    if not 0 < share <= 1:
        return "SHARE must be above 0 and at most 1"
    return "" if coefficient >= 0 else "COEFFICIENT must not be negative"


def fault_of_divergence(low: float, high: float, most: float) -> str:
    """Return why dppo_tv and dppo_kl cannot use their arguments."""
    if min(low, high) <= 0:
        return "LOW and HIGH must be above 0"
    return "" if most >= 1 else "MOST must be at least 1"


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


CLIP_COV = {"share": 0.0002, "low": 1.0, "high": 5.0}
"""verl's defaults of clip-cov."""
TOTAL_VARIATION = {"low": 0.2, "high": 0.2, "most": 20.0}
"""prime-rl's bounds of DPPO, and verl's of its ratio."""
BINARY_DIVERGENCE = TOTAL_VARIATION | {"low": 0.05, "high": 0.05}
"""A divergence of 0.05 nats is a total variation of at most 0.16 (Pinsker's inequality)."""
BUILT_IN = {
    one.name: one
    for one in (
        *(
            Algorithm(name, clipped_surrogate, zero_at_zero=True)
            for name in ("grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp")
        ),
        Algorithm("gspo", by_sequence, by_trajectory=True, zero_at_zero=True),
        Algorithm("sapo", soft, {"positive": 1.0, "negative": 1.05}, fault_of_sharpness, zero_at_zero=True),
        Algorithm("cispo", cispo_loss, zero_at_zero=True),
        Algorithm("clip_cov", clip_cov_loss, CLIP_COV, fault_of_clip_cov, choose_between_bounds, zero_at_zero=True),
        Algorithm("kl_cov", kl_cov_loss, {"share": 0.0002, "coefficient": 1.0}, fault_of_kl_cov, choose_greatest),
        Algorithm("dppo_tv", within_total_variation, TOTAL_VARIATION, fault_of_divergence, zero_at_zero=True),
        Algorithm("dppo_kl", within_binary_divergence, BINARY_DIVERGENCE, fault_of_divergence, zero_at_zero=True),
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
    if isinstance(found, Algorithm) and found.fault and (fault := found.fault(*numbers or found.arguments.values())):
        raise SettingsError(f"{key}: {spec!r}: {fault} ({':'.join([name, *map(str.upper, found.arguments)])})")
    return found, numbers or tuple(found.arguments.values())
