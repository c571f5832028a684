"""GLM-4.7-Flash: DeepSeek-V3's layers, of which mlp_layer_types names the dense ones. Defaults are those of
transformers' Glm4MoeLiteConfig.
"""

from __future__ import annotations

from typing import Any

from turnlog.trainer import UnsupportedModel
from turnlog.trainer.families import deepseek_moe, deepseek_v3
from turnlog.trainer.families.family import Config, Family, whole_number
from turnlog.trainer.families.shape import ModelShape


def read(config: Config) -> dict[str, Any]:
    """Read attention and mixture. Raises UnsupportedModel, KeyError."""
    layers = whole_number(config, "num_hidden_layers")
    types = config.get("mlp_layer_types") or ["dense"] + ["sparse"] * (layers - 1)
    dense = tuple(layer for layer, name in enumerate(types) if name == "dense")
    first = config.get("first_k_dense_replace", len(dense))  # read by engines, not by transformers
    if dense != tuple(range(first)) or len(types) != layers:
        raise UnsupportedModel(
            f"first_k_dense_replace = {first} and mlp_layer_types (by default dense, sparse, sparse, ...) with dense "
            f"layers {list(dense)} of {len(types)} are not supported; supported: the first layers, by both keys"
        )
    return deepseek_v3.read_latent(config) | deepseek_moe.read_mixture(config, dense)


def write(shape: ModelShape, values: dict[str, Any]) -> dict[str, Any]:
    """Return config.json from that of a plain decoder."""
    types = ["sparse" if shape.is_mixture(layer) else "dense" for layer in range(shape.layers)]
    return deepseek_v3.write(shape, values | {"mlp_layer_types": types})


GLM4_MOE_LITE = Family(
    model_type="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    only=deepseek_v3.ONLY,
    absent={
        "vocab_size": 154880,
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "rope_interleave": True,
        "moe_intermediate_size": 1536,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "n_routed_experts": 64,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.8,
    },
    read=read,
    write=write,
    tensors=deepseek_v3.tensors,
    options=deepseek_v3.options,
    layer_spec=deepseek_v3.layer_spec,
    for_engines={"first_k_dense_replace": "the number of dense layers in mlp_layer_types"},
    without=deepseek_moe.WITHOUT,
)
