"""Ministral 3, the decoder alone: YaRN, and queries that grow with their position; otherwise as Mistral. Defaults are
those of transformers' Ministral3Config.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from turnlog.trainer import UnsupportedModel
from turnlog.trainer.families.family import Config, whole_number
from turnlog.trainer.families.mistral import MISTRAL
from turnlog.trainer.families.rope import read_rope, rope_values, with_rope
from turnlog.trainer.families.shape import ModelShape, QueryGrowth

BETA, ORIGINAL = "llama_4_scaling_beta", "original_max_position_embeddings"
ROPE: dict[str, Any] = {
    "type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    ORIGINAL: 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    BETA: 0.1,
}
"""rope_parameters where config.json has none."""


def _read(config: Config) -> dict[str, Any]:
    config = with_rope(config, ROPE)
    values = rope_values(config, 10_000.0)
    beta = values.get(BETA)
    if not isinstance(beta, int | float) or isinstance(beta, bool):
        raise UnsupportedModel(
            f"rotary positions {values} (rope_scaling, rope_parameters) are not supported: {BETA} must be a number"
        )
    original = whole_number(values, ORIGINAL)
    if config.get(ORIGINAL, ROPE[ORIGINAL]) != original:
        raise UnsupportedModel(
            f"{ORIGINAL} is {original} in rope_parameters (rope_scaling), but engines read it at the top of "
            f"config.json, and assume {ROPE[ORIGINAL]} where it is missing: add it there with the value {original}"
        )
    growth = QueryGrowth(beta=float(beta), original=original)
    return {**MISTRAL.read(config), "rope": read_rope(config, 10_000.0), "growth": growth}


def _write(shape: ModelShape, values: dict[str, Any]) -> dict[str, Any]:
    assert shape.growth is not None
    growth = {BETA: shape.growth.beta, ORIGINAL: shape.growth.original}
    found = MISTRAL.write(shape, {**values, "rope_parameters": values["rope_parameters"] | growth})
    return {**found, ORIGINAL: shape.growth.original}


def _layer_spec(shape: ModelShape, layer: int) -> Any:
    from turnlog.trainer import mcore
    from turnlog.trainer.models import attention, decoder

    assert shape.growth is not None
    spec = decoder.layer_spec(shape, layer)
    own = mcore.ModuleSpec(attention.GrowingQueryAttention, params=dataclasses.asdict(shape.growth))
    spec.submodules.self_attention.submodules.core_attention = own
    return spec


MINISTRAL3 = dataclasses.replace(
    MISTRAL,
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    absent={
        "vocab_size": 131072,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 34,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
    },
    only={**MISTRAL.only, "sliding_window": (None,)},  # SGLang's class computes no window
    read=_read,
    write=_write,
    layer_spec=_layer_spec,
    without={
        "context_parallel": "each query is scaled by its position in the row, of which a rank has parts: use "
        "tensor_parallel"
    },
)
