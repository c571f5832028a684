"""Router with a fixed correction of its choice, as in DeepSeek-V3 (arXiv 2412.19437, section 2.1.2) and GLM-4.5."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from turnlog.trainer import mcore


class CorrectedRouter(mcore.TopKRouter):  # type: ignore[misc]
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
