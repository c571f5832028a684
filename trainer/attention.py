"""Core attention for Megatron's local layer spec by torch's scaled_dot_product_attention: a spec choice, no patch.

It runs on CPU and on CUDA without TransformerEngine, and serves grouped queries, explicit masks and packed `thd` rows,
which Megatron's own DotProductAttention refuses.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as functional

from turnlog.trainer import mcore


class SdpaAttention(mcore.MegatronModule):  # type: ignore[misc]
    """softmax(q k^T / sqrt(d)) v, causal unless a mask is given. No parameters."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        """The signature that Megatron builds a `core_attention` submodule with."""
        super().__init__(config=config)
        if config.context_parallel_size != 1:
            raise ValueError("context parallelism needs TransformerEngine's attention")
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Any = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        """[s, b, h, d] x 3 -> [s, b, h d]; packed [t, h, d] x 3 -> [t, h d]. A mask is True where masked out."""
        if packed_seq_params is not None:
            return self._packed(query, key, value, packed_seq_params.cu_seqlens_q.tolist())
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        mask = None if attention_mask is None else ~attention_mask
        out = self._attend(q, k, v, mask).permute(2, 0, 1, 3)
        return out.reshape(out.size(0), out.size(1), -1)

    def _packed(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, edges: list[int]) -> torch.Tensor:
        parts = [
            self._attend(*(x[start:end].transpose(0, 1)[None] for x in (query, key, value)))[0].transpose(0, 1)
            for start, end in itertools.pairwise(edges)
            if end > start
        ]
        if edges[-1] < query.size(0):
            parts.append(torch.zeros_like(query[edges[-1] :]))
        out = torch.cat(parts, 0)
        return out.reshape(out.size(0), -1)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[b, h, s, d] x 3 -> [b, h, s, d]"""
        return functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None and q.size(2) > 1,
            scale=self.scale,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=q.size(1) != k.size(1),
        )
