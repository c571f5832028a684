"""gpt-oss: mixtures of experts with biases everywhere, attention with sinks and alternating windows, and a SwiGLU that
is clamped. Defaults are those of transformers' GptOssConfig; the formulas are those of its modeling_gpt_oss.

Weights in MXFP4 are read as the bfloat16 that they stand for, and exported as that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from turnlog.trainer.families.family import Config, Family, whole_number
from turnlog.trainer.families.mistral import FULL, SLIDING, read_windows, windows_json
from turnlog.trainer.families.rope import read_rope, with_rope
from turnlog.trainer.families.shape import Mixture, ModelShape
from turnlog.trainer.families.tensors import EXPERT, Tensor, attention_tensors, decoder_tensors

THETA, LIMIT = 150_000.0, 7.0
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Rotary positions where config.json gives none."""


def _read(config: Config) -> dict[str, Any]:
    layers = range(whole_number(config, "num_hidden_layers"))
    types = config.get("layer_types") or [FULL if layer % 2 else SLIDING for layer in layers]
    config = with_rope(config, YARN)
    return {
        **read_windows({**config, "layer_types": types}),
        "rope": read_rope(config, THETA),
        "mixture": Mixture(
            experts=whole_number(config, "num_local_experts"),
            experts_per_token=whole_number(config, "num_experts_per_tok"),
            expert_ffn=whole_number(config, "intermediate_size"),
        ),
    }


def _write(shape: ModelShape, values: dict[str, Any]) -> dict[str, Any]:
    experts = {"num_local_experts": shape.experts, "num_experts_per_tok": shape.experts_per_token}
    return windows_json(shape, values) | experts | {"swiglu_limit": LIMIT}


def _options(_: ModelShape) -> dict[str, Any]:
    from turnlog.trainer import mcore

    return {
        "add_bias_linear": True,
        "softmax_type": "learnable",
        "activation_func": mcore.quick_gelu,
        "activation_func_clamp_value": LIMIT,
        "glu_linear_offset": 1.0,
    }


def _layer_spec(shape: ModelShape, layer: int) -> Any:
    from turnlog.trainer.models.decoder import ExpertRowLinear, layer_spec

    spec = layer_spec(shape, layer)
    spec.submodules.mlp.submodules.experts.submodules.linear_fc2 = ExpertRowLinear
    return spec


def _attention(shape: ModelShape, layer: int, h: str, m: str) -> Iterator[Tensor]:
    yield from attention_tensors(shape, layer, h, m)
    yield Tensor(f"{m}self_attention.linear_proj.bias", ((f"{h}self_attn.o_proj.bias", (shape.hidden,)),))
    yield Tensor(f"{m}self_attention.core_attention.softmax_offset", ((f"{h}self_attn.sinks", (shape.heads,)),), 0)


def _feed_forward(shape: ModelShape, layer: int, h: str, m: str) -> Iterator[Tensor]:
    experts, hidden, ffn = shape.experts, shape.hidden, shape.ffn
    yield Tensor(f"{m}mlp.router.weight", ((f"{h}mlp.router.weight", (experts, hidden)),))
    yield Tensor(f"{m}mlp.router.bias", ((f"{h}mlp.router.bias", (experts,)),))
    for ours, theirs, rows, columns in (("fc1", "gate_up", 2 * ffn, hidden), ("fc2", "down", hidden, ffn)):
        name, place = f"{h}mlp.experts.{theirs}_proj", f"{m}mlp{EXPERT}*.linear_{ours}."
        pairs = theirs == "gate_up"
        weight, bias = ((name, (experts, columns, rows)),), ((f"{name}_bias", (experts, rows)),)
        yield Tensor(f"{place}weight", weight, experts=experts, transposed=True, interleaved=pairs)
        yield Tensor(f"{place}bias", bias, experts=experts, interleaved=pairs)


def _tensors(shape: ModelShape) -> Iterator[Tensor]:
    return decoder_tensors(shape, attention=_attention, feed_forward=_feed_forward)


def _dequantize(state: dict[str, Any]) -> dict[str, Any]:
    from turnlog.trainer.models.mxfp4 import dequantize

    return dequantize(state)


GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    qkv_bias=True,
    only={"attention_bias": (True,), "swiglu_limit": (LIMIT,)},
    absent={
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
    },
    rope_theta=THETA,
    read=_read,
    write=_write,
    tensors=_tensors,
    options=_options,
    layer_spec=_layer_spec,
    also=("num_local_experts", "layer_types"),
    quantized=("mxfp4",),
    dequantize=_dequantize,
)
