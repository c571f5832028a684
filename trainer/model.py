"""Megatron's GPTModel from a model shape: local layer spec, torch RMSNorm, SDPA core attention, on CPU and CUDA alike.

The local spec is used on every device, so that the same modules are tested and shipped; Megatron's checkpoint keys are
those of its TransformerEngine spec as well.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as functional

from turnlog.trainer import mcore
from turnlog.trainer.attention import SdpaAttention
from turnlog.trainer.shape import ModelShape

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
