"""GLM-4.5, 4.6 and 4.7: partial rotary positions, biases on q, k and v, and DeepSeek-V3's mixture of experts. Defaults
are those of transformers' Glm4MoeConfig.
"""

from __future__ import annotations

from typing import Any

from turnlog.trainer.families import deepseek_moe
from turnlog.trainer.families.family import Config, Family
from turnlog.trainer.families.shape import ModelShape


def read(config: Config) -> dict[str, Any]:
    """Read the mixture, and what projections and heads have in addition. Raises UnsupportedModel, KeyError."""
    found = deepseek_moe.read_mixture(config, deepseek_moe.first_layers(config))
    return found | {"qkv_bias": bool(config["attention_bias"]), "qk_norm": bool(config["use_qk_norm"])}


def write(shape: ModelShape, values: dict[str, Any]) -> dict[str, Any]:
    """Return config.json from that of a plain decoder."""
    both = {"use_qk_norm": shape.qk_norm, "partial_rotary_factor": shape.rope.fraction}
    return deepseek_moe.write_mixture(shape, values | both)


GLM4_MOE = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    only=deepseek_moe.ONLY,
    absent={
        "vocab_size": 151552,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "use_qk_norm": False,
        "partial_rotary_factor": 0.5,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    partial_rotary=True,
    read=read,
    write=write,
    options=deepseek_moe.options,
    layer_spec=deepseek_moe.layer_spec,
    without=deepseek_moe.WITHOUT,
)
