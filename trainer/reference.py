"""The same step in plain transformers and torch: the oracle of tests and of benchmarks/l2_reference.py.

Nothing is shared with the Learner but the formula: no Megatron, no microbatches, no padding; autograd over the log
softmax of each row, torch.optim.AdamW and clip_grad_norm_.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from turnlog.processors.core.batches.rows import BatchRows
from turnlog.trainer.learner import LearnerOptions
from turnlog.trainer.loss import PolicyGradient
from turnlog.trainer.shape import ModelShape, config_json


@dataclass(frozen=True, slots=True)
class PlainStep:
    """What a step did."""

    loss: float
    grad_norm: float


class PlainLearner:
    """transformers' eager attention with torch's AdamW."""

    def __init__(self, shape: ModelShape, weights: Mapping[str, torch.Tensor], options: LearnerOptions) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        values = config_json(shape, eos_token_id=0, pad_token_id=0)
        values["pad_token_id"] = None  # transformers gives that row of the embedding no gradient
        config = AutoConfig.for_model(values.pop("model_type"), **values)
        of_config: Any = AutoModelForCausalLM.from_config
        self._model: Any = of_config(config, attn_implementation="eager").float()
        self._model.load_state_dict(dict(weights), strict=not shape.tied)
        self._clip = options.clip_grad
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            betas=(options.beta1, options.beta2),
            weight_decay=options.weight_decay,
            foreach=False,
        )

    def step(self, rows: BatchRows, objective: PolicyGradient, learning_rate: float) -> PlainStep:
        """One step, row by row."""
        self._optimizer.zero_grad()
        total = torch.zeros(())
        for row, (start, length) in enumerate(zip(rows.starts.tolist(), rows.lengths.tolist(), strict=True)):
            part = slice(start, start + length)
            tokens = torch.from_numpy(rows.token_ids[part].astype("int64"))
            logits = self._model(tokens[None, :-1]).logits[0] / float(rows.temperature[row])
            logprobs = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
            recorded, advantages = (torch.from_numpy(x[part][1:].copy()) for x in (rows.logprobs, rows.advantages))
            ratio = (logprobs - recorded).exp()
            bounded = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high)
            surrogate = torch.minimum(ratio * advantages, bounded * advantages)
            mask = torch.from_numpy(rows.trained[part][1:].astype("float32"))
            loss = -(surrogate * mask).sum() / float(rows.weight_divisor[row])
            torch.autograd.backward(loss)
            total = total + loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._clip)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        return PlainStep(float(total), float(norm))

    def export(self) -> dict[str, torch.Tensor]:
        """The weights."""
        return {name: tensor.detach().clone() for name, tensor in self._model.state_dict().items()}
