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
from turnlog.trainer.models.attention import RMSNorm, SdpaAttention
from turnlog.trainer.plan import LearnerOptions
from turnlog.trainer.shape import ModelShape, family

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def padded_vocabulary(shape: ModelShape, tensor_parallel: int, multiple: int = 1) -> int:
    """Embedding rows: the vocabulary rounded up so that the tensor-parallel ranks share it equally."""
    unit = math.lcm(tensor_parallel, multiple)
    return -(-shape.vocabulary // unit) * unit


def model_config(shape: ModelShape, options: LearnerOptions) -> Any:
    """Megatron's TransformerConfig. Kernel fusions that need apex or TransformerEngine are off."""
    params = DTYPES[options.dtype]
    own = family(shape.kind)
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
        add_qkv_bias=own.qkv_bias,
        qk_layernorm=own.qk_norm,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=options.tensor_parallel,
        pipeline_model_parallel_size=options.pipeline_parallel,
        context_parallel_size=options.context_parallel,
        expert_model_parallel_size=options.expert_parallel,
        expert_tensor_parallel_size=1,
        sequence_parallel=options.sequence_parallel,
        **_recompute(options),
        # Microbatches differ in length, so pipeline stages tell each other shapes; Megatron then asks for `alltoall`.
        variable_seq_lengths=options.pipeline_parallel > 1,
        moe_token_dispatcher_type="alltoall",
        **(_mixture(shape) if shape.experts else {}),
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


def _recompute(options: LearnerOptions) -> dict[str, Any]:
    if options.recompute == "none":
        return {}
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _mixture(shape: ModelShape) -> dict[str, Any]:
    """Without a load-balancing loss: what trains is the batch's objective alone. A softmax over all experts whose
    chosen ones are made to sum to 1 is a softmax over the chosen ones."""
    return {
        "num_moe_experts": shape.experts,
        "moe_router_topk": shape.experts_per_token,
        "moe_ffn_hidden_size": shape.expert_ffn,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_pre_softmax": not shape.normalized_routing,
        "moe_router_dtype": "fp32",
        "moe_enable_routing_replay": True,
    }


def build_model(shape: ModelShape, config: Any, *, vocabulary_multiple: int = 1) -> Any:
    """This rank's part of the model, with Megatron's initial weights. Call after the process groups exist."""
    model = mcore.GPTModel(
        config,
        _layers(config),
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
    _scale_rope(model.rotary_pos_emb, shape)
    model = model.to(mcore.DEVICE)
    return model.bfloat16() if config.bf16 else model


def _layers(config: Any) -> Any:
    """The specs of this pipeline stage's layers and of the norm behind the last."""
    layer = mcore.get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = SdpaAttention
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    layers = mcore.get_num_layers_to_build(config)
    return mcore.TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=RMSNorm)


def _scale_rope(rotary: Any, shape: ModelShape) -> None:
    """Megatron's own arguments for this leave all but the factor at Llama 3.1's."""
    scaling = shape.rope_scaling
    if scaling is not None:
        rotary.inv_freq = rotary._apply_scaling(
            rotary.inv_freq,
            factor=scaling.factor,
            low_freq_factor=scaling.low,
            high_freq_factor=scaling.high,
            original_max_position_embeddings=scaling.original,
        )
