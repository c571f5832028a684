"""A tenant by hand: transformers' model with PEFT's adapter, the losses as they are published, torch's AdamW."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from tests.reference.plain import _model_of, held_by_transformers
from turnlog.trainer.families.shape import ModelShape
from turnlog.trainer.tenants import Datum

SHARED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Matrices that share an A in the learner."""


class PeftTenant:
    """An adapter in training."""

    def __init__(self, shape: ModelShape, weights: Mapping[str, torch.Tensor], adapter: Path) -> None:
        """`adapter` is a folder of PEFT's files."""
        model = _model_of(shape)
        model.load_state_dict(held_by_transformers(weights, shape), strict=False)
        self._model: Any = PeftModel.from_pretrained(model, str(adapter), is_trainable=True).eval()
        for module in self._model.modules():
            for first, *others in SHARED:
                if hasattr(getattr(module, first, None), "lora_A"):
                    shared = getattr(module, first).lora_A["default"].weight
                    for other in others:
                        getattr(module, other).lora_A["default"].weight = shared
        self._trained = [one for one in self._model.parameters() if one.requires_grad]
        self._optimizer: torch.optim.AdamW | None = None

    def factors(self) -> dict[str, torch.Tensor]:
        """Return the factors by the names of PEFT's files."""
        found = {
            name.replace(".default", ""): one.detach()
            for name, one in self._model.named_parameters(remove_duplicate=False)
        }
        return {name: one for name, one in found.items() if ".lora_" in name}

    def logprobs(self, datum: Datum) -> torch.Tensor:
        """Return the log-probs [n] of the targets."""
        tokens, targets = (torch.from_numpy(one.astype("i8")) for one in (datum.tokens, datum.targets))
        logits = self._model(tokens[None]).logits[0]
        return logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]

    def forward_backward(
        self, datums: Sequence[Datum], loss_fn: str, config: Mapping[str, float]
    ) -> tuple[float, list[torch.Tensor]]:
        """Return loss and log-probs, and add to the gradients."""
        total, found = 0.0, []
        for datum in datums:
            logprobs = self.logprobs(datum)
            loss = loss_of(datum, logprobs, loss_fn, config)
            loss.backward()
            total += float(loss.detach())
            found.append(logprobs.detach())
        return total, found

    def optim_step(
        self, learning_rate: float, betas: tuple[float, float], eps: float, decay: float, clip: float
    ) -> float:
        """Take a step and return the norm of the gradients."""
        if self._optimizer is None:
            self._optimizer = torch.optim.AdamW(self._trained, foreach=False)
        for group in self._optimizer.param_groups:
            group |= {"lr": learning_rate, "betas": betas, "eps": eps, "weight_decay": decay}
        norm = torch.nn.utils.clip_grad_norm_(self._trained, clip or float("inf"))
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(norm)


def loss_of(datum: Datum, p: torch.Tensor, loss_fn: str, config: Mapping[str, float]) -> torch.Tensor:
    """Return the loss of a datum from its log-probs, as tinker-docs.thinkingmachines.ai/tinker/losses has it."""
    if loss_fn == "cross_entropy":
        return -(p * _tensor(datum.weights)).sum()
    q, advantages = _tensor(datum.logprobs), _tensor(datum.advantages)
    ratio = torch.exp(p - q)
    clipped = ratio.clamp(config.get("clip_low_threshold", 0.0), config.get("clip_high_threshold", 0.0))
    objective = {
        "importance_sampling": ratio * advantages,
        "ppo": torch.min(ratio * advantages, clipped * advantages),
        "cispo": clipped.detach() * p * advantages,
        "dro": p * advantages - 0.5 * config.get("beta", 0.0) * (p - q) ** 2,
    }[loss_fn]
    return -(objective if datum.weights is None else objective * _tensor(datum.weights)).sum()


def _tensor(values: Any) -> torch.Tensor:
    return torch.from_numpy(values)
