"""DeepSeek-V3 and R1, and Kimi K2: latent attention, and a mixture of experts with groups. Defaults are those of
transformers' DeepseekV3Config; Kimi K2, which has the same class, says everything in config.json.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from turnlog.trainer import UnsupportedModel
from turnlog.trainer.families import deepseek_moe
from turnlog.trainer.families.family import Config, Family, whole_number
from turnlog.trainer.families.rope import read_rope, rope_values
from turnlog.trainer.families.shape import LatentAttention, ModelShape, YarnScaling
from turnlog.trainer.families.tensors import Tensor, decoder_tensors

THETA = 10_000.0
ONLY = {**deepseek_moe.ONLY, "attention_bias": (False,)}


def read(config: Config) -> dict[str, Any]:
    """Read attention and mixture. Raises UnsupportedModel, KeyError."""
    return read_latent(config) | deepseek_moe.read_mixture(config, deepseek_moe.first_layers(config))


def read_latent(config: Config) -> dict[str, Any]:
    """Read latent attention and its rotary positions. Raises UnsupportedModel, KeyError."""
    rotated, heads = whole_number(config, "qk_rope_head_dim"), whole_number(config, "num_attention_heads")
    for key, wanted in (("head_dim", rotated), ("num_key_value_heads", heads)):
        if config.get(key) not in (None, wanted):
            raise UnsupportedModel(f"{key} = {config[key]} is not supported beside latent attention: {wanted} is")
    rope = read_rope(config, THETA)
    if rope.scaling is not None and not isinstance(rope.scaling, YarnScaling):
        raise UnsupportedModel("rotary positions of latent attention are scaled by yarn, or not at all")
    given = rope_values(config, THETA)
    if ("mscale" in given) != ("mscale_all_dim" in given):
        raise UnsupportedModel("mscale or mscale_all_dim alone is not supported: engines and transformers differ then")
    latent = LatentAttention(
        q_rank=None if config["q_lora_rank"] is None else whole_number(config, "q_lora_rank"),
        kv_rank=whole_number(config, "kv_lora_rank"),
        unrotated=whole_number(config, "qk_nope_head_dim"),
        value=whole_number(config, "v_head_dim"),
        interleaved=bool(config["rope_interleave"]),
    )
    return {"latent": latent, "rope": rope, "head_dim": rotated, "groups": heads}


def write(shape: ModelShape, values: dict[str, Any]) -> dict[str, Any]:
    """Return config.json from that of a plain decoder."""
    latent = shape.latent
    assert latent is not None
    sizes = {
        "q_lora_rank": latent.q_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_rope_head_dim": shape.head_dim,
        "qk_nope_head_dim": latent.unrotated,
        "v_head_dim": latent.value,
        "rope_interleave": latent.interleaved,
    }
    return deepseek_moe.write_mixture(shape, values | sizes)


def tensors(shape: ModelShape) -> Iterator[Tensor]:
    """Yield every tensor of the model."""
    return decoder_tensors(shape, attention=latent_tensors)


def latent_tensors(shape: ModelShape, layer: int, h: str, m: str) -> Iterator[Tensor]:
    """Yield the tensors of latent attention."""
    latent = shape.latent
    assert latent is not None
    h, m, hidden = f"{h}self_attn.", f"{m}self_attention.", shape.hidden
    queries = shape.heads * (latent.unrotated + shape.head_dim)
    if latent.q_rank is None:
        yield Tensor(f"{m}linear_q_proj.weight", ((f"{h}q_proj.weight", (queries, hidden)),), 0)
    else:
        yield Tensor(f"{m}linear_q_down_proj.weight", ((f"{h}q_a_proj.weight", (latent.q_rank, hidden)),))
        yield Tensor(f"{m}q_layernorm.weight", ((f"{h}q_a_layernorm.weight", (latent.q_rank,)),))
        yield Tensor(f"{m}linear_q_up_proj.weight", ((f"{h}q_b_proj.weight", (queries, latent.q_rank)),), 0)
    down, up = latent.kv_rank + shape.head_dim, shape.heads * (latent.unrotated + latent.value)
    yield Tensor(f"{m}linear_kv_down_proj.weight", ((f"{h}kv_a_proj_with_mqa.weight", (down, hidden)),))
    yield Tensor(f"{m}kv_layernorm.weight", ((f"{h}kv_a_layernorm.weight", (latent.kv_rank,)),))
    yield Tensor(f"{m}linear_kv_up_proj.weight", ((f"{h}kv_b_proj.weight", (up, latent.kv_rank)),), 0)
    yield Tensor(f"{m}linear_proj.weight", ((f"{h}o_proj.weight", (hidden, shape.heads * latent.value)),), 1)


def options(shape: ModelShape) -> dict[str, Any]:
    """Return Megatron's arguments for rotary positions and mixture."""
    assert shape.latent is not None
    return {**deepseek_moe.options(shape), "rotary_interleaved": shape.latent.interleaved}


def layer_spec(shape: ModelShape, layer: int) -> Any:
    """Return the spec of a layer."""
    from turnlog.trainer.models.latent import replace_attention

    spec = deepseek_moe.layer_spec(shape, layer)
    replace_attention(spec, shape)
    return spec


DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    only=ONLY,
    absent={
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "rope_interleave": True,
        "moe_intermediate_size": 2048,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
    },
    read=read,
    write=write,
    tensors=tensors,
    options=options,
    layer_spec=layer_spec,
    without=deepseek_moe.WITHOUT,
)
KIMI_K2 = dataclasses.replace(DEEPSEEK_V3, model_type="kimi_k2", absent={"rope_interleave": True})
