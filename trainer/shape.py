"""What config.json of a Hugging Face folder says of a dense Qwen2 or Qwen3: everything that decides tensor shapes."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnlog.trainer import UnsupportedModel

ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A dense decoder with grouped-query attention, SwiGLU, RMSNorm and rotary positions."""

    kind: str
    """qwen2: bias on q, k, v; qwen3: RMSNorm on q and k."""
    layers: int
    hidden: int
    heads: int
    groups: int
    """Key-value heads."""
    head_dim: int
    ffn: int
    vocabulary: int
    positions: int
    norm_epsilon: float
    rope_theta: float
    tied: bool
    """The output layer shares the embedding."""


TINY = ModelShape(
    kind="qwen3",
    layers=2,
    hidden=64,
    heads=4,
    groups=2,
    head_dim=16,
    ffn=128,
    vocabulary=384,
    positions=512,
    norm_epsilon=1e-6,
    rope_theta=10000.0,
    tied=False,
)
"""The recipes' policy: half a megabyte, learns one-digit arithmetic with a tool in a minute of two CPU cores."""


def read_shape(folder: Path) -> ModelShape:
    """The shape of a model folder. Raises UnsupportedModel."""
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        raise UnsupportedModel(f"{folder} has no config.json; [model] path must be a Hugging Face folder") from None
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        raise UnsupportedModel(f"{folder}: model_type {kind!r}; supported: {', '.join(ARCHITECTURES)}")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise UnsupportedModel(f"{folder}: scaled rotary positions {rope} are not supported")
    if config.get("use_sliding_window") or config.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"{folder}: sliding windows and activations other than silu are not supported")
    return ModelShape(
        kind=kind,
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        groups=config["num_key_value_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        ffn=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        positions=config["max_position_embeddings"],
        norm_epsilon=config["rms_norm_eps"],
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        tied=bool(config.get("tie_word_embeddings", False)),
    )


def config_json(shape: ModelShape, *, eos_token_id: int, pad_token_id: int, dtype: str = "float32") -> dict[str, Any]:
    """config.json of `shape`, as transformers 5 and SGLang read it."""
    return {
        "architectures": [ARCHITECTURES[shape.kind]],
        "model_type": shape.kind,
        "dtype": dtype,
        "num_hidden_layers": shape.layers,
        "layer_types": ["full_attention"] * shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.groups,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.positions,
        "rms_norm_eps": shape.norm_epsilon,
        "rope_parameters": {"rope_theta": shape.rope_theta, "rope_type": "default"},
        "tie_word_embeddings": shape.tied,
        "hidden_act": "silu",
        "attention_bias": shape.kind == "qwen2",
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_sliding_window": False,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
    }


def as_dict(shape: ModelShape) -> dict[str, Any]:
    """Plain values, for checkpoints."""
    return dataclasses.asdict(shape)
