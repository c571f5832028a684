"""Megatron's GPTModel from a model shape: local layer spec, torch RMSNorm, SDPA core attention, on CPU and CUDA alike.

The local spec is used on every device, so that the same modules are tested and shipped; Megatron's checkpoint keys are
those of its TransformerEngine spec as well.

Core attention is torch's scaled_dot_product_attention, by a choice of spec: it runs on CPU and on CUDA without
TransformerEngine, and serves grouped queries, explicit masks and packed `thd` rows, which Megatron's own refuses.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as functional

from turnlog.trainer import mcore
from turnlog.trainer.shape import ModelShape


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


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def padded_vocabulary(shape: ModelShape, tensor_parallel: int, multiple: int = 1) -> int:
    """Embedding rows: the vocabulary rounded up so that the tensor-parallel ranks share it equally."""
    unit = math.lcm(tensor_parallel, multiple)
    return -(-shape.vocabulary // unit) * unit


def model_config(shape: ModelShape, *, tensor_parallel: int, pipeline_parallel: int, dtype: str) -> Any:
    """Megatron's TransformerConfig. Kernel fusions that need apex or TransformerEngine are off."""
    params = DTYPES[dtype]
    return mcore.TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.groups,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_epsilon,
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.kind == "qwen2",
        qk_layernorm=shape.kind == "qwen3",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=tensor_parallel,
        pipeline_model_parallel_size=pipeline_parallel,
        # Microbatches differ in length, so pipeline stages tell each other shapes; Megatron then asks for `alltoall`.
        variable_seq_lengths=pipeline_parallel > 1,
        moe_token_dispatcher_type="alltoall",
        params_dtype=params,
        pipeline_dtype=params,
        bf16=params == torch.bfloat16,
        calculate_per_token_loss=True,
        use_cpu_initialization=mcore.ON_CPU,
        attention_softmax_in_fp32=True,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        cross_entropy_loss_fusion=False,
    )


def build_model(shape: ModelShape, config: Any, *, vocabulary_multiple: int = 1) -> Any:
    """This rank's part of the model, with Megatron's initial weights. Call after the process groups exist."""
    spec = mcore.get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = SdpaAttention
    model = mcore.GPTModel(
        config,
        spec,
        vocab_size=padded_vocabulary(shape, config.tensor_model_parallel_size, vocabulary_multiple),
        max_sequence_length=shape.positions,
        pre_process=mcore.parallel_state.is_pipeline_first_stage(),
        post_process=mcore.parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        share_embeddings_and_output_weights=shape.tied,
    )
    model.model_type = mcore.ModelType.encoder_or_decoder
    model = model.to(mcore.DEVICE)
    return model.bfloat16() if config.bf16 else model
