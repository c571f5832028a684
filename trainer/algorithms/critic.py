"""PPO's critic: a separate model that predicts, before each trained token, the reward that its episode still earns.

It starts as a copy of the policy and has its own parameters instead of a head on the policy: what it learns in its
warm-up and in further updates of a batch changes no token's probability, its gradient does not enter the policy's norm,
and the policy's step is that of the algorithms without a critic. The price is a second model with its optimizer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from turnlog.processors.core.batches.rows import BatchRows
from turnlog.trainer import mcore
from turnlog.trainer.algorithms.logprobs import keep_scored
from turnlog.trainer.algorithms.tokens import CriticRules, Lesson, value_loss
from turnlog.trainer.families.shape import ModelShape
from turnlog.trainer.microbatches import PaddedRows
from turnlog.trainer.models.experts import without_experts
from turnlog.trainer.network import TrainedNetwork, over_ranks
from turnlog.trainer.plan import LearnerOptions


class Critic:
    """The critic. Its methods are collective, like those of Learner."""

    def __init__(self, shape: ModelShape, weights: Mapping[str, torch.Tensor], options: LearnerOptions) -> None:
        options = dataclasses.replace(options, moe_aux_loss_coeff=0.0)
        self.network = TrainedNetwork(shape, weights, options, values=True)

    def values(self, rows: BatchRows) -> NDArray[np.float32]:
        """Return values [T + n] float32, the same on every rank.

        Each row has V before each of its trained tokens, 0 at the others, and then V after its last trained token.
        """
        longer = _with_an_end(rows)
        forward = _Values(len(longer.token_ids))
        self.network.run(longer, forward, forward_only=True)
        found: NDArray[np.float32] = over_ranks(forward.found).numpy()
        edges = longer.starts + longer.lengths - 1
        marks = np.flatnonzero(longer.trained)
        counts = longer.trained_per_row()
        lasts = marks[np.cumsum(counts)[counts > 0] - 1]
        behind = found[lasts]
        found[lasts] = 0.0
        found[edges[counts > 0]] = behind
        return found

    def learn(
        self, rows: BatchRows, lesson: Lesson, rules: CriticRules, *, beside: bool
    ) -> tuple[bool, dict[str, float]]:
        """Update the critic on a batch and return whether it moved, and its metrics before the first update.

        No update is made if the first gradient is not finite or if `beside` is false, i.e. the policy's gradient is not
        finite.
        """
        first = self._gradient(rows, lesson, rules)
        updates = 0
        if beside and first.finite:
            found = first
            while found.finite and updates < rules.updates:
                self.network.step(rules.rate)
                updates += 1
                if updates < rules.updates:
                    found = self._gradient(rows, lesson, rules)
        return updates > 0, {**first.metrics(), "value_updates": float(updates), **_fit(rows, lesson)}

    def _gradient(self, rows: BatchRows, lesson: Lesson, rules: CriticRules) -> _GradientResult:
        self.network.forget_gradients()
        forward = _ValueLoss(rows, lesson, rules.clip)
        self.network.run(without_experts(rows), forward, forward_only=False)
        loss, trained, clipped = over_ranks(forward.sums).tolist()
        return _GradientResult(loss, trained, clipped, self.network.gradient_norm())


@dataclass(frozen=True, slots=True)
class _GradientResult:
    loss: float
    trained: float
    clipped: float
    norm: float

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm)

    def metrics(self) -> dict[str, float]:
        return {
            "value_loss": self.loss,
            "value_grad_norm": self.norm,
            "value_clip_fraction": self.clipped / max(1.0, self.trained),
        }


def _fit(rows: BatchRows, lesson: Lesson) -> dict[str, float]:
    """Return the means of values and returns, and the share of the returns' variance that the values explained
    beforehand.
    """
    trained = rows.trained == 1
    values, returns = (column.numpy().astype("f8")[trained] for column in (lesson.values, lesson.returns))
    if not len(returns):
        return {"value_mean": 0.0, "return_mean": 0.0, "explained_variance": 0.0}
    spread = float(returns.var())
    told = 1.0 - float((returns - values).var()) / spread if spread else 0.0
    return {"value_mean": float(values.mean()), "return_mean": float(returns.mean()), "explained_variance": told}


def _with_an_end(rows: BatchRows) -> BatchRows:
    """Return each row with one more token, and mark as trained also the token after its last trained one."""
    ends, counts = rows.starts + rows.lengths, rows.trained_per_row()
    longer: dict[str, Any] = {
        name: np.insert(getattr(rows, name), ends, 0) for name in ("token_ids", "trained", "logprobs", "advantages")
    } | {"old_cache": None, "engine_kind": None}
    marks = np.flatnonzero(longer["trained"])
    longer["trained"][marks[np.cumsum(counts)[counts > 0] - 1] + 1] = 1
    return dataclasses.replace(without_experts(rows), lengths=rows.lengths + np.int32(1), **longer)


class _Values:
    """Megatron's forward_step_func for a forward-only pass that records V before each trained token."""

    def __init__(self, tokens: int) -> None:
        self.found = torch.zeros(tokens, device=mcore.DEVICE)
        """[T], this rank's share."""

    def __call__(self, batches: Iterator[PaddedRows], model: Any) -> tuple[torch.Tensor, Any]:
        batch = next(batches)
        return model(batch.inputs, batch.positions, None), lambda output: self._keep(
            batch.by_row(output[..., 0]), batch
        )

    def _keep(self, values: torch.Tensor, batch: PaddedRows) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        keep_scored(self.found, values, batch)
        return values.sum(), batch.trained.sum().to(torch.int), {}


class _ValueLoss:
    """Megatron's forward_step_func for the value loss, weighted by the rows' divisors."""

    def __init__(self, rows: BatchRows, lesson: Lesson, clip: float) -> None:
        self._trained_total, self._clip = int(rows.trained.sum()), clip
        self._values, self._returns = (column.to(mcore.DEVICE) for column in (lesson.values, lesson.returns))
        self.sums = torch.zeros(3, dtype=torch.float64, device=mcore.DEVICE)
        """Sums of loss, trained tokens, and tokens at which the clip decided."""

    def __call__(self, batches: Iterator[PaddedRows], model: Any) -> tuple[torch.Tensor, Any]:
        batch = next(batches)
        return model(batch.inputs, batch.positions, None), lambda output: self._loss(
            batch.by_row(output[..., 0]), batch
        )

    def _loss(self, values: torch.Tensor, batch: PaddedRows) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        before, returns = self._values[batch.places], self._returns[batch.places]
        each, decided = value_loss(values, before, returns, self._clip)
        loss = (batch.weights * torch.where(batch.trained, each, 0.0)).sum()
        shares = (loss.detach(), batch.trained.sum(), (batch.trained & decided).sum())
        self.sums += torch.stack([share.double() for share in shares])
        return loss * self._trained_total, batch.trained.sum().to(torch.int), {}
