"""Routers: their loss for balanced experts, and one with a fixed correction of its choice, as in DeepSeek-V3 (arXiv
2412.19437, section 2.1.2) and GLM-4.5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from turnlog.trainer import mcore


class BalancedRouter(mcore.TopKRouter):  # type: ignore[misc]
    """Megatron's router, with the gradient of a loss that is least if all experts get equally many tokens.

    Of a microbatch of T tokens it is E sum_i f_i P_i, where f_i is the share of T k choices that fall on expert i of E,
    P_i the mean score of that expert, and scores sum to 1 (arXiv 2101.03961, equations 4 to 6). transformers'
    load_balancing_loss_func is k times that. Choices are the router's own, also where recorded ones are replayed, and
    without a correction. Ranks that share the tokens of a microbatch count together.
    """

    def _apply_aux_loss(
        self,
        probs: torch.Tensor,
        scores_for_aux_loss: torch.Tensor,
        routing_map: torch.Tensor,
        with_padding_mask: bool = False,
    ) -> torch.Tensor:
        """Return `probs` [tokens, experts], whose backward pass adds the gradient of the loss times T and
        moe_aux_loss_coeff, which counts microbatches by their tokens. Padding has neither scores nor choices.

        Megatron's own weights the part of each rank by the tokens of that rank alone.
        """
        counts = routing_map.sum(0).float()
        if self.tp_cp_group.size() > 1:
            dist.all_reduce(counts, group=self.tp_cp_group)
        choices = counts.sum().clamp(min=1)
        shares = (counts * scores_for_aux_loss.sum(0)).sum() / choices
        scale = self.config.moe_aux_loss_coeff * self.config.num_moe_experts
        found: torch.Tensor = mcore.MoEAuxLossAutoScaler.apply(probs, scale * shares)
        return found


class CorrectedRouter(BalancedRouter):
    """Megatron's router, with a number per expert that is added to its score where experts are chosen, and only there.

    Pretraining moves that number by each expert's load, and it has no gradient: here it stays as it was loaded, in
    float32. Megatron's own is a buffer that it moves after every step.
    """

    expert_bias: torch.nn.Parameter

    def __init__(self, config: Any, pg_collection: Any = None) -> None:
        """Accept the arguments with which Megatron builds a router."""
        super().__init__(config, pg_collection)
        zeros = torch.zeros(config.num_moe_experts, dtype=torch.float32)
        self.expert_bias = torch.nn.Parameter(zeros, requires_grad=False)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> CorrectedRouter:
        """Move or convert the router as torch does, except for the dtype of the correction."""
        kept = self.expert_bias.data
        super()._apply(fn, recurse)
        self.expert_bias.data = kept.to(self.expert_bias.device)
        return self
