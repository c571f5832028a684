"""Qwen2 and Qwen2.5: biases on q, k and v. Defaults are those of transformers' Qwen2Config."""

from __future__ import annotations

from typing import Any

from turnlog.trainer.families.family import NO_WINDOW, Family
from turnlog.trainer.families.shape import ModelShape

DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def with_layer_types(shape: ModelShape, values: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with the kind of each layer, which the classes of transformers for Qwen2 and Qwen3 write."""
    return {**values, "layer_types": ["full_attention"] * shape.layers}


QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    qkv_bias=True,
    only=NO_WINDOW,
    absent=DEFAULTS,
    write=with_layer_types,
)
