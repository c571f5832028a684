"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

Keys and values of all heads are expanded from one short vector per token, and so are queries. A head's key has two
parts: its own, without positions, and a rotated one that all heads share.

Tensor-parallel ranks share the heads. Each of them has the matrices that make the short vectors, whole: with sequence
parallelism it applies them to its own tokens. Megatron's own attention of this kind cuts these matrices, and takes no
adapters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional

from turnlog.trainer import mcore
from turnlog.trainer.families.shape import ModelShape, YarnScaling, yarn_magnitude
from turnlog.trainer.models import fused
from turnlog.trainer.models.attention import RMSNorm, SdpaAttention

NORM_EPSILON = 1e-6
"""Epsilon of the norms of the short vectors (transformers 5.12.1, DeepseekV3RMSNorm); engines take rms_norm_eps."""


@dataclass
class LatentParts:
    """Modules of a latent attention; without a rank of queries, `linear_q_proj` makes queries directly."""

    linear_q_proj: Any
    linear_q_down_proj: Any
    linear_q_up_proj: Any
    linear_kv_down_proj: Any
    linear_kv_up_proj: Any
    linear_proj: Any
    q_layernorm: Any
    kv_layernorm: Any
    core_attention: Any


class WholeLinear(torch.nn.Module):
    """Matrix that every tensor-parallel rank has whole and applies to its own tokens."""

    def __init__(self, inputs: int, outputs: int, *, config: Any) -> None:
        super().__init__()
        self.input_size, self.output_size, self.sequence_parallel = inputs, outputs, config.sequence_parallel
        self.weight = torch.nn.Parameter(torch.zeros((outputs, inputs), dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """Map [s, b, in] to [s, b, out]."""
        return functional.linear(input_, self.weight)


class LatentSelfAttention(mcore.MegatronModule):  # type: ignore[misc]
    """Attention whose keys and values are expanded from one short vector per token."""

    def __init__(
        self,
        config: Any,
        submodules: LatentParts,
        layer_number: int,
        *,
        shape: ModelShape,
        attn_mask_type: Any = None,
        **_: Any,
    ) -> None:
        """Accept the arguments with which Megatron builds an attention, and the model's shape."""
        super().__init__(config=config)
        latent, scaling = shape.latent, shape.rope.scaling
        assert latent is not None
        q_rank, kv_rank, unrotated, value = latent.q_rank, latent.kv_rank, latent.unrotated, latent.value
        self._query, self._expanded = [unrotated, shape.head_dim], [unrotated, value]
        self._kv = [kv_rank, shape.head_dim]
        scale = sum(self._query) ** -0.5
        if isinstance(scaling, YarnScaling):
            scale *= yarn_magnitude(scaling.factor, scaling.shares[1] if scaling.shares else 0.0) ** 2
        heads = config.num_attention_heads
        shared = {"config": config, "init_method": config.init_method, "bias": False, "is_expert": False}
        cut = {**shared, "gather_output": False, "skip_bias_add": False}
        build = mcore.build_module
        self._low_rank = q_rank is not None
        if q_rank is None:
            self.linear_q_proj = build(submodules.linear_q_proj, config.hidden_size, heads * sum(self._query), **cut)
        else:
            self.linear_q_down_proj = build(submodules.linear_q_down_proj, config.hidden_size, q_rank, config=config)
            self.q_layernorm = build(submodules.q_layernorm, config=config, hidden_size=q_rank, eps=NORM_EPSILON)
            self.linear_q_up_proj = build(submodules.linear_q_up_proj, q_rank, heads * sum(self._query), **cut)
        self.linear_kv_down_proj = build(
            submodules.linear_kv_down_proj, config.hidden_size, sum(self._kv), config=config
        )
        self.kv_layernorm = build(submodules.kv_layernorm, config=config, hidden_size=kv_rank, eps=NORM_EPSILON)
        self.linear_kv_up_proj = build(submodules.linear_kv_up_proj, kv_rank, heads * sum(self._expanded), **cut)
        self.core_attention = build(
            submodules.core_attention,
            config=config,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            attention_type="self",
            softmax_scale=scale,
        )
        self.linear_proj = build(
            submodules.linear_proj,
            heads * value,
            config.hidden_size,
            input_is_parallel=True,
            skip_bias_add=True,
            **shared,
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *_: Any,
        rotary_pos_emb: torch.Tensor,
        packed_seq_params: Any = None,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Map [s, b, hidden] to the same, as Megatron calls an attention; packed rows have b = 1."""
        unrotated, rotated, key, shared, value = self._project(hidden_states)
        rules = {"interleaved": self.config.rotary_interleaved, "compiled": fused.is_compiled(self.config, "heads")}
        rotated, shared = (fused.rotate(x, rotary_pos_emb, **rules) for x in (rotated, shared))
        if packed_seq_params is not None:
            unrotated, rotated, key, shared, value = (x.squeeze(1) for x in (unrotated, rotated, key, shared, value))
        query = torch.cat([unrotated, rotated], -1)
        key = torch.cat([key, shared.expand(*key.shape[:-1], -1)], -1)
        found = self.core_attention(query, key, value, attention_mask, packed_seq_params=packed_seq_params)
        output: tuple[torch.Tensor, torch.Tensor | None] = self.linear_proj(
            found if packed_seq_params is None else found.unsqueeze(1)
        )
        return output

    def _project(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return [s, b, heads of this rank, size]: queries without and with positions, keys without, the shared key
        with positions (1 head), values.
        """
        if self._low_rank:
            queries, _ = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden)))
        else:
            queries, _ = self.linear_q_proj(hidden)
        unrotated, rotated = queries.unflatten(-1, (-1, sum(self._query))).split(self._query, -1)
        compressed, shared = self.linear_kv_down_proj(hidden).split(self._kv, -1)
        if self.config.sequence_parallel:
            shared = mcore.gather_from_sequence_parallel_region(shared)
        else:
            shared = mcore.tensor_parallel.copy_to_tensor_model_parallel_region(shared)
        expanded, _ = self.linear_kv_up_proj(self.kv_layernorm(compressed))
        key, value = expanded.unflatten(-1, (-1, sum(self._expanded))).split(self._expanded, -1)
        return unrotated, rotated, key, shared.unsqueeze(-2), value


def replace_attention(spec: Any, shape: ModelShape) -> None:
    """Replace the attention in a layer's spec."""
    cut, cut_input = mcore.ColumnParallelLinear, mcore.RowParallelLinear
    parts = LatentParts(
        linear_q_proj=cut,
        linear_q_down_proj=WholeLinear,
        linear_q_up_proj=cut,
        linear_kv_down_proj=WholeLinear,
        linear_kv_up_proj=cut,
        linear_proj=cut_input,
        q_layernorm=RMSNorm,
        kv_layernorm=RMSNorm,
        core_attention=SdpaAttention,
    )
    arguments = {**spec.submodules.self_attention.params, "shape": shape}
    spec.submodules.self_attention = mcore.ModuleSpec(LatentSelfAttention, params=arguments, submodules=parts)
