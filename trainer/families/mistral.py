"""Mistral and Ministral: sliding windows in all layers, or in those that layer_types names. Defaults are those of
transformers' MistralConfig and MinistralConfig, among them a window of 4096 positions where the key is missing.
"""

from __future__ import annotations

from typing import Any

from turnlog.trainer import UnsupportedModel
from turnlog.trainer.families.family import NO_BIAS, Config, Family, whole_number
from turnlog.trainer.families.shape import LayerType, ModelShape, SlidingWindow

FULL: LayerType = "full_attention"
SLIDING: LayerType = "sliding_attention"
DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
}


def read_windows(config: Config) -> dict[str, Any]:
    """Read the window of each layer of a config whose `layer_types` is complete. Raises UnsupportedModel."""
    types, size = tuple(config["layer_types"]), config["sliding_window"]
    if len(types) != config["num_hidden_layers"] or not {*types} <= {FULL, SLIDING}:
        raise UnsupportedModel(f"layer_types = {list(types)} is not supported; supported: {FULL}, {SLIDING}, per layer")
    if SLIDING not in types:
        return {}
    if not isinstance(size, int) or size < 1:
        raise UnsupportedModel(f"sliding_window = {size!r} is not supported; supported: a number of positions")
    return {"layer_types": types, "sliding": SlidingWindow(size=size)}


def windows_json(shape: ModelShape, values: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with the window of each layer."""
    values.pop("use_sliding_window")
    types = [shape.layer_type(layer) for layer in range(shape.layers)]
    return {**values, "sliding_window": shape.sliding and shape.sliding.size, "layer_types": types}


def _everywhere(config: Config) -> dict[str, Any]:
    kind = FULL if config["sliding_window"] is None else SLIDING
    return read_windows({**config, "layer_types": [kind] * whole_number(config, "num_hidden_layers")})


def _where_named(config: Config) -> dict[str, Any]:
    return read_windows(config) if config.get("layer_types") else _everywhere(config)


def _without_types(shape: ModelShape, values: dict[str, Any]) -> dict[str, Any]:
    found = windows_json(shape, values)
    del found["layer_types"]  # Mistral's classes of transformers do not read it
    return found


MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    only=NO_BIAS,
    absent=DEFAULTS,
    read=_everywhere,
    write=_without_types,
    also=("sliding_window",),
)
MINISTRAL = Family(
    model_type="ministral",
    architecture="MinistralForCausalLM",
    only=NO_BIAS,
    absent=DEFAULTS,
    read=_where_named,
    write=windows_json,
    also=("sliding_window", "layer_types"),
)
