"""The objective of a step: an algorithm's loss, weighted by importance, with divergence and entropy terms.

It also computes the token columns that the loss reads beside those of the rows. Columns are computed from whole
batches, on every rank alike. The sum over a trajectory is therefore the same number however its segments are spread
over microbatches and ranks, and in whatever order.
"""

from __future__ import annotations

import dataclasses
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from turnlog.processors.core.batches.rows import BatchRows
from turnlog.trainer.algorithms.covariance import BatchTokens
from turnlog.trainer.algorithms.tokens import (
    BUILT_IN,
    LOG_RATIO,
    Algorithm,
    Auxiliary,
    Clip,
    CriticRules,
    Lesson,
    Measure,
    TokenLoss,
    Tokens,
    bounded_ratio,
    compute_gae,
)
from turnlog.trainer.algorithms.trajectories import subtract_from_rewards, sum_by_trajectory

Pass = Literal["proximal", "reference", "teacher", "values"]
"""A forward pass without gradients over all rows of a rollout batch: by the weights before its first update (proximal),
by the frozen reference, by the teacher, or by the critic before its first update (values).
"""
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ForwardPassResults:
    """Results of a rollout batch's forward passes for one batch: log-probs [T] float32, 0 where nothing trains."""

    proximal: Floats | None = None
    """Log-probs by the weights before the rollout batch's first update."""
    reference: Floats | None = None
    """Log-probs by the frozen reference."""
    teacher: Floats | None = None
    """Log-probs by the teacher."""
    values: Floats | None = None
    """[T + n], the result of Critic.values."""
    truncated: NDArray[np.bool_] | None = None
    """[n] whether the row's trajectory was truncated, if the objective needs it."""
    whitening_std: float | None = None
    """Deviation by which its advantages were divided when they were whitened (SampleBatchFormed); None if they were
    not.
    """
    batch: int = 0
    """Number of the batch, from which random choices are drawn."""
    masked: NDArray[np.bool_] | None = None
    """[n] whether the step masks all tokens of the row; None: of no row."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Token columns beside those of the rows: [T] each, aligned with the rows' token columns; float32 unless stated."""

    old: torch.Tensor | None = None
    """Old log-probs. None: the recorded ones or, with `old_is_current`, the current ones."""
    old_is_current: bool = False
    reference: torch.Tensor | None = None
    """Log-probs of the reference."""
    teacher: torch.Tensor | None = None
    """Log-probs of the teacher."""
    trajectory_gap: torch.Tensor | None = None
    """Sum of current - old log-probs over the trajectory's trained tokens."""
    trajectory_tokens: torch.Tensor | None = None
    """Number of the trajectory's trained tokens, at least 1."""
    importance: torch.Tensor | None = None
    """Logarithm of the trajectory's importance weight."""
    importance_mean: float = 1.0
    """Number by which importance weights are divided."""
    chosen: torch.Tensor | None = None
    """Boolean mask of the tokens that the algorithm chose from the whole batch."""
    lesson: Lesson | None = None
    """Training data of the critic."""
    auxiliary: torch.Tensor | None = None
    """Weight of each token in the auxiliary loss."""

    def on(self, device: torch.device) -> Columns:
        """Return the same columns on another device."""
        held: dict[str, Any] = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        held |= {name: one.to(device) for name, one in held.items() if isinstance(one, torch.Tensor)}
        return Columns(**held)


class Objective(Protocol):
    """The objective of a step. It must be picklable: rank 0 sends it to the other ranks."""

    @property
    def reads_current(self) -> bool:
        """Whether `prepare` needs the current log-probs, which cost a forward pass."""

    @property
    def trains_entropy(self) -> bool:
        """Whether the loss uses the entropy, which then has a gradient."""

    @property
    def critic(self) -> CriticRules | None:
        """Settings of the critic; None if there is no critic."""

    def rows_to_compute(self, rows: BatchRows) -> BatchRows:
        """Return the rows of a batch that passes and the step must compute; the others do not change the gradient.
        Never empty.
        """

    def passes(self, parts: int) -> frozenset[Pass]:
        """Return the passes that a rollout batch of `parts` updates needs before its first update."""

    def prepare(
        self, rows: BatchRows, numbers: ForwardPassResults, current: Floats | None
    ) -> tuple[BatchRows, Columns]:
        """Return the rows to step on, and the columns beside theirs."""

    def __call__(self, tokens: Tokens) -> TokenLoss:
        """Return the loss of each token."""


@dataclass(frozen=True, slots=True)
class Imitation:
    """The objective of supervised training on demonstrations: -log-prob."""

    reads_current: bool = False
    trains_entropy: bool = False
    critic: CriticRules | None = None

    def rows_to_compute(self, rows: BatchRows) -> BatchRows:
        return rows

    def passes(self, parts: int) -> frozenset[Pass]:
        return frozenset()

    def prepare(
        self, rows: BatchRows, numbers: ForwardPassResults, current: Floats | None
    ) -> tuple[BatchRows, Columns]:
        return rows, Columns()

    def __call__(self, tokens: Tokens) -> TokenLoss:
        return TokenLoss(-tokens.logprobs, torch.zeros_like(tokens.trained))


imitation = Imitation()


@dataclass(frozen=True, slots=True)
class PolicyGradient:
    """The objective that the [trainer] settings describe (turnlog.learning_settings, which also checks them)."""

    clip_low: float = 0.2
    """Ratios are clipped to at least 1 - clip_low."""
    clip_high: float = 0.2
    """Ratios are clipped to at most 1 + clip_high."""
    _: KW_ONLY
    dual_clip: float = 0.0
    """Factor of the dual clip for negative advantages (arXiv 1912.09729); 0: off."""
    algorithm: Algorithm = BUILT_IN["grpo"]
    numbers: tuple[float, ...] = ()
    """Arguments of the algorithm."""
    logprobs: str = "recorded"
    """recorded | recomputed: which log-probs ratios are taken against."""
    importance: str = "none"
    """Weighting of old against recorded log-probs: none | truncated | masked."""
    importance_level: str = "token"
    """token | product | geometric: the weight of each token, or the product or geometric mean over its trajectory."""
    importance_low: float = 0.0
    importance_high: float = 2.0
    normalize_importance: bool = False
    """Whether weights are divided by their mean over the batch."""
    kl: str = "none"
    """Estimator of the divergence from the reference: none | k1 | k2 | k3."""
    kl_coefficient: float = 0.0
    kl_in: str = "loss"
    """loss | reward: where the divergence is charged."""
    estimator: str = ""
    """[fold] estimator, which decides how a divergence in the reward changes advantages; "" for one that compares no
    trajectories.
    """
    std_ddof: int = 1
    """[fold] std_ddof."""
    entropy_coefficient: float = 0.0
    critic: CriticRules | None = None
    teacher: float | None = None
    """Coefficient of the teacher's part of the advantages; None without a teacher."""
    auxiliary: Auxiliary | None = None
    auxiliary_numbers: tuple[float, ...] = ()
    auxiliary_coefficient: float = 0.0
    seed: int = 0
    """Seed of random choices among a batch's tokens."""
    routers_train: bool = False
    """Whether the routers have a loss of their own, which every token of the batch enters."""

    @property
    def reads_current(self) -> bool:
        return self.algorithm.by_trajectory or self.algorithm.choose is not None

    @property
    def trains_entropy(self) -> bool:
        wanted = self.algorithm.wants_entropy or (self.auxiliary is not None and self.auxiliary.wants_entropy)
        return self.entropy_coefficient != 0.0 or wanted

    @property
    def _has_reward_penalty(self) -> bool:
        """Whether the divergence changes advantages."""
        return self.kl != "none" and self.kl_in == "reward" and self.kl_coefficient != 0.0

    @property
    def _advantages_alone(self) -> bool:
        """Whether the batch's advantages are the only source of gradient, and no mean over the batch enters it."""
        others = self.critic is None and self.teacher is None and self.auxiliary is None and not self.routers_train
        means = self.normalize_importance or self.algorithm.choose is not None
        return (
            self.algorithm.zero_at_zero and others and not means and self.kl == "none" and not self.entropy_coefficient
        )

    def rows_to_compute(self, rows: BatchRows) -> BatchRows:
        """Leave out groups whose advantages are all 0 if nothing else trains.

        If a batch consists of such groups only, the first one stays, so that its step is reported like others. Greedy
        rows stay too; the step masks them.
        """
        if not self._advantages_alone:
            return rows
        _, group = np.unique(np.asarray(rows.group_ids), return_inverse=True)
        moves = np.add.reduceat(rows.advantages != 0, rows.starts) > 0
        kept = (np.bincount(group, weights=moves | (rows.temperature <= 0)) > 0)[group]
        if not kept.any():
            kept = group == group[0]
        return rows if kept.all() else rows.among(kept)

    def passes(self, parts: int) -> frozenset[Pass]:
        found: set[Pass] = set()
        # The only update of a rollout batch reads its own forward pass, unless a sum over rows is needed before it.
        summed = parts > 1 or self.reads_current or self.importance_level != "token" or self.normalize_importance
        if self._has_reward_penalty or self.teacher is not None or (self.logprobs == "recomputed" and summed):
            found.add("proximal")
        if self.kl != "none":
            found.add("reference")
        if self.teacher is not None:
            found.add("teacher")
        if self.critic is not None:
            found.add("values")
        return frozenset(found)

    def prepare(
        self, rows: BatchRows, numbers: ForwardPassResults, current: Floats | None
    ) -> tuple[BatchRows, Columns]:
        recomputed = self.logprobs == "recomputed"
        proximal = numbers.proximal if recomputed else None
        gap = counts = importance = None
        old = rows.logprobs if proximal is None else proximal
        if current is not None and self.algorithm.by_trajectory:
            counts = sum_by_trajectory(rows, np.ones_like(current))
            gap = sum_by_trajectory(rows, current - old)
        if proximal is not None and self.importance != "none" and self.importance_level != "token":
            importance = sum_by_trajectory(rows, proximal - rows.logprobs)
            if self.importance_level == "geometric":
                importance = importance / np.maximum(1.0, sum_by_trajectory(rows, np.ones_like(proximal)))
        counted = rows.trained == 1
        if numbers.masked is not None:
            counted &= ~np.repeat(numbers.masked, rows.lengths)
        mean = self._importance_mean(rows, counted, proximal, importance)
        lesson = None
        if self.critic is not None:
            rows, lesson = self._apply_critic(rows, numbers, self.critic)
        elif self._has_reward_penalty:
            rows = self._with_penalty(rows, numbers)
        if self.teacher is not None:
            rows = self._apply_teacher(rows, numbers, self.teacher)
        columns = Columns(
            old=_column(proximal),
            old_is_current=recomputed and proximal is None,
            reference=_column(numbers.reference),
            teacher=_column(numbers.teacher),
            trajectory_gap=_column(gap),
            trajectory_tokens=None if counts is None else _column(np.maximum(1.0, counts)),
            importance=_column(importance),
            importance_mean=mean,
            chosen=self._choose_tokens(rows, counted, current, old, numbers.batch),
            lesson=lesson,
            auxiliary=_column(self._auxiliary_weights(rows)),
        )
        return rows, columns

    def __call__(self, tokens: Tokens) -> TokenLoss:
        found = self.algorithm.loss(tokens, Clip(self.clip_low, self.clip_high, self.dual_clip), *self.numbers)
        value, masked = found.value, found.masked
        current = tokens.logprobs.detach()
        ratio = bounded_ratio(current, tokens.old)
        measures = {
            "ratio": Measure(ratio),
            "ratio_max": Measure(ratio, "max"),
            "effective_sample_size": Measure(bounded_ratio(current, tokens.recorded), "effective"),
            **found.measures,
        }
        if self.importance != "none":
            gap = tokens.old - tokens.recorded if tokens.importance is None else tokens.importance
            weight = gap.clamp(-LOG_RATIO, LOG_RATIO).exp()
            measures |= {"importance": Measure(weight), "importance_max": Measure(weight, "max")}
            within = weight.clamp(self.importance_low, self.importance_high)
            value = value * within / tokens.importance_mean
            if self.importance == "masked":
                beyond = within != weight
                masked = beyond if masked is None else masked | beyond
        if tokens.reference is not None:
            divergence = estimate(self.kl, tokens.logprobs, tokens.reference)
            measures["kl"] = Measure(divergence.detach())
            if self.kl_coefficient and self.kl_in == "loss":
                value = value + self.kl_coefficient * divergence
        if tokens.teacher is not None:
            measures["teacher_kl"] = Measure(current - tokens.teacher)
        if self.entropy_coefficient:
            assert tokens.entropy is not None
            value = value - self.entropy_coefficient * tokens.entropy
        beside = None if self.auxiliary is None else self.auxiliary.loss(tokens, *self.auxiliary_numbers)
        return TokenLoss(value, found.clipped, masked, measures, beside)

    def _importance_mean(
        self,
        rows: BatchRows,
        counted: NDArray[np.bool_],
        proximal: Floats | None,
        importance: NDArray[np.float64] | None,
    ) -> float:
        """Return the mean over the batch of the importance weights within their bounds, or 1.

        The mean is over the `counted` tokens [T] or, for weights of a trajectory, over trajectories that have one.
        Tokens that are masked for their weight do not count.
        """
        if not self.normalize_importance or self.importance == "none" or proximal is None:
            return 1.0
        gaps = proximal.astype("f8") - rows.logprobs if importance is None else importance
        raw = np.exp(gaps.clip(-LOG_RATIO, LOG_RATIO))
        weights = raw.clip(self.importance_low, self.importance_high)
        if self.importance == "masked":
            counted = counted & (weights == raw)
        found = weights[counted]
        if importance is not None:
            _, first = np.unique(np.repeat(rows.session_ids, rows.lengths)[counted], return_index=True)
            found = found[first]
        mean = float(found.mean()) if len(found) else 0.0
        return mean if mean > LEAST_MEAN else 1.0

    def _choose_tokens(
        self, rows: BatchRows, counted: NDArray[np.bool_], current: Floats | None, old: Floats, batch: int
    ) -> torch.Tensor | None:
        """Return the tokens that the algorithm chooses from the whole batch."""
        if self.algorithm.choose is None:
            return None
        assert current is not None
        tokens = BatchTokens(
            current=current,
            old=old,
            advantages=rows.advantages,
            counted=counted,
            low=self.clip_low,
            high=self.clip_high,
            seed=self.seed,
            batch=batch,
        )
        return torch.from_numpy(self.algorithm.choose(tokens, *self.numbers))

    def _auxiliary_weights(self, rows: BatchRows) -> NDArray[np.float64] | None:
        """Return the weights of the auxiliary loss [T]; 0 at each row's first token, which nothing predicts."""
        if self.auxiliary is None:
            return None
        weights = self.auxiliary_coefficient * self.auxiliary.weigh(rows, *self.auxiliary_numbers)
        weights[rows.starts] = 0.0
        return weights

    def _with_penalty(self, rows: BatchRows, numbers: ForwardPassResults) -> BatchRows:
        """Return the rows with the advantages of rewards less their divergence. Raises SettingsError."""
        advantages = subtract_from_rewards(
            rows, self._penalty(rows, numbers), numbers.whitening_std, self.estimator, self.std_ddof
        )
        return dataclasses.replace(rows, advantages=(advantages * rows.trained).astype("<f4"))

    def _apply_critic(
        self, rows: BatchRows, numbers: ForwardPassResults, rules: CriticRules
    ) -> tuple[BatchRows, Lesson]:
        """Compute advantages relative to the critic, from rewards less the divergence of each token."""
        assert numbers.values is not None
        penalty = self._penalty(rows, numbers) if self._has_reward_penalty else np.zeros(len(rows.token_ids))
        truncated = np.zeros(len(rows), bool) if numbers.truncated is None else numbers.truncated
        advantages, lesson = compute_gae(rows, numbers.values, truncated, penalty, rules)
        return dataclasses.replace(rows, advantages=advantages), lesson

    def _apply_teacher(self, rows: BatchRows, numbers: ForwardPassResults, coefficient: float) -> BatchRows:
        """Subtract from each advantage the divergence from the teacher at that token, by the weights before the rollout
        batch's first update.

        For an algorithm that distils, the divergence is the only part of the advantage.
        """
        assert numbers.proximal is not None
        assert numbers.teacher is not None
        kept = 0.0 if self.algorithm.distils else rows.advantages.astype("f8")
        divergence = numbers.proximal.astype("f8") - numbers.teacher
        return dataclasses.replace(rows, advantages=((kept - coefficient * divergence) * rows.trained).astype("<f4"))

    def _penalty(self, rows: BatchRows, numbers: ForwardPassResults) -> NDArray[np.float64]:
        """Return [T] the divergence that is subtracted from rewards, by the weights before the rollout batch's first
        update.
        """
        assert numbers.proximal is not None
        assert numbers.reference is not None
        proximal, reference = (torch.from_numpy(one.astype("f8")) for one in (numbers.proximal, numbers.reference))
        found: NDArray[np.float64] = self.kl_coefficient * estimate(self.kl, proximal, reference).numpy() * rows.trained
        return found


def estimate(kind: str, logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Estimate KL(policy | reference) at a token that the policy sampled, with g = log p - log q.

    k1 is g, k2 is g^2 / 2, k3 is exp(-g) - 1 + g with g bounded as ratios are (Schulman 2020, Approximating KL
    divergence).
    """
    gap = logprobs - reference
    if kind == "k1":
        return gap
    if kind == "k2":
        return gap.square() / 2
    gap = gap.clamp(-LOG_RATIO, LOG_RATIO)
    return (-gap).exp() - 1.0 + gap


LEAST_MEAN = 1e-8
"""Mean of importance weights up to which they are not divided by it; verl has the same bound."""


def _column(values: NDArray[np.floating] | None) -> torch.Tensor | None:
    return None if values is None else torch.from_numpy(values.astype("f4"))
