"""Adam with the state layout that Megatron's checkpoints round-trip, for machines without apex or TransformerEngine.

Megatron's DistributedOptimizer stores exactly {exp_avg, exp_avg_sq} per parameter and the step count per group, as
apex's and TransformerEngine's FusedAdam do. Its own fallback, torch.optim.AdamW, keeps `step` per parameter, and a
fresh optimizer then cannot load what was saved (megatron-core 0.11 to 0.19).
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch.optim.adam import adam


class GroupStepAdam(torch.optim.Optimizer):
    """Adam (Kingma and Ba 2015), with decoupled weight decay (Loshchilov and Hutter 2019) by default."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        bias_correction: bool = True,
        **_: Any,
    ) -> None:
        """`adam_w_mode` and `bias_correction` are part of the contract that Megatron calls with."""
        if not bias_correction:
            raise ValueError("Adam without bias correction is not supported")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: None = None, **_: Any) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                self._update(group, params)

    def _update(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        for param in params:
            if not self.state[param]:
                self.state[param].update(exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
        adam(
            params,
            [param.grad for param in params if param.grad is not None],
            [self.state[param]["exp_avg"] for param in params],
            [self.state[param]["exp_avg_sq"] for param in params],
            [],
            [torch.tensor(float(group["step"] - 1)) for _ in params],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
            decoupled_weight_decay=self.adam_w_mode,
            foreach=False,
        )


def install() -> None:
    """Give Megatron this Adam where it would fall back to torch.optim.AdamW."""
    optimizer: Any = importlib.import_module("megatron.core.optimizer")
    if optimizer.USING_PYTORCH_OPTIMIZER:
        optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = GroupStepAdam, False
        distributed: Any = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
        distributed.Adam, distributed.HAVE_APEX_OR_TE, distributed.USING_APEX_OPTIMIZER = GroupStepAdam, True, True
