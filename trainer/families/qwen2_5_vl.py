"""Qwen2.5-VL: images, by a vision tower; otherwise as Qwen2. Defaults are those of transformers' Qwen2_5_VLConfig."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from turnlog.trainer import UnsupportedModel
from turnlog.trainer.families.family import NO_WINDOW, Config, Family
from turnlog.trainer.families.rope import rope_values
from turnlog.trainer.families.shape import ModelShape, Rope, VisionShape
from turnlog.trainer.families.tensors import VISION, Sizes, Tensor, decoder_tensors

THETA = 1_000_000.0
IMAGE_TOKEN = 151655
"""image_token_id where config.json lacks it."""
TOWER: dict[str, Any] = {
    "depth": 32,
    "hidden_size": 3584,
    "num_heads": 16,
    "intermediate_size": 3420,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": (7, 15, 23, 31),
    "hidden_act": "silu",
}
"""vision_config where config.json lacks its keys."""


def read_vision(config: Config) -> dict[str, Any]:
    """Read the shape of the vision tower, and rotary positions of three axes. Raises UnsupportedModel."""
    tower = {**TOWER, **config["vision_config"]}
    rope = rope_values(config, THETA)
    if "mrope_section" not in rope or rope["rope_type"] not in ("default", "mrope"):
        raise UnsupportedModel(f"rotary positions {dict(rope)} are not supported; supported: mrope_section")
    if tower["hidden_act"] != "silu" or tower["out_hidden_size"] != config["hidden_size"]:
        raise UnsupportedModel(
            "vision_config must have hidden_act 'silu' and the decoder's hidden_size as its out_hidden_size"
        )
    vision = VisionShape(
        layers=tower["depth"],
        hidden=tower["hidden_size"],
        heads=tower["num_heads"],
        ffn=tower["intermediate_size"],
        channels=tower["in_channels"],
        patch=tower["patch_size"],
        frames=tower["temporal_patch_size"],
        merge=tower["spatial_merge_size"],
        window=tower["window_size"],
        unbounded=tuple(tower["fullatt_block_indexes"]),
        token=config.get("image_token_id", IMAGE_TOKEN),
        sections=tuple(rope["mrope_section"]),
    )
    return {"vision": vision, "rope": Rope(theta=float(rope["rope_theta"]))}


def write_vision(shape: ModelShape, text: dict[str, Any]) -> dict[str, Any]:
    """Return config.json from that of the decoder."""
    assert shape.vision is not None
    whole = {name: text.pop(name) for name in ("architectures", "model_type", "dtype", "tie_word_embeddings")}
    text["rope_parameters"] |= {"type": "mrope", "mrope_section": list(shape.vision.sections)}
    tower = tower_json(shape.vision, shape.hidden)
    return {**whole, "image_token_id": shape.vision.token, "text_config": text, "vision_config": tower}


def tower_json(vision: VisionShape, features: int) -> dict[str, Any]:
    """Return vision_config of config.json; `features` is the size of an output feature, the decoder's hidden size."""
    return {
        "depth": vision.layers,
        "hidden_size": vision.hidden,
        "num_heads": vision.heads,
        "intermediate_size": vision.ffn,
        "out_hidden_size": features,
        "in_channels": vision.channels,
        "patch_size": vision.patch,
        "temporal_patch_size": vision.frames,
        "spatial_merge_size": vision.merge,
        "window_size": vision.window,
        "fullatt_block_indexes": list(vision.unbounded),
        "hidden_act": "silu",
    }


def seeing_tensors(shape: ModelShape) -> Iterator[Tensor]:
    """Yield the tensors of the decoder, and of the tower, which is whole on every rank that has it."""
    yield from decoder_tensors(shape)
    vision = shape.vision
    assert vision is not None
    hidden, merged = vision.hidden, vision.hidden * vision.merge**2
    sizes: dict[str, Sizes] = {
        "patch_embed.proj.weight": (hidden, vision.channels, vision.frames, vision.patch, vision.patch)
    }
    for layer in range(vision.layers):
        at = f"blocks.{layer}."
        sizes |= {f"{at}norm1.weight": (hidden,), f"{at}norm2.weight": (hidden,)}
        sizes |= _linear(f"{at}attn.qkv", 3 * hidden, hidden) | _linear(f"{at}attn.proj", hidden, hidden)
        for name in ("gate_proj", "up_proj"):
            sizes |= _linear(f"{at}mlp.{name}", vision.ffn, hidden)
        sizes |= _linear(f"{at}mlp.down_proj", hidden, vision.ffn)
    sizes |= {"merger.ln_q.weight": (hidden,)} | _linear("merger.mlp.0", merged, merged)
    sizes |= _linear("merger.mlp.2", shape.hidden, merged)
    for name, size in sizes.items():
        yield Tensor(f"{VISION}{name}", ((f"visual.{name}", size),))


def _linear(name: str, rows: int, columns: int) -> dict[str, Sizes]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def tower(shape: ModelShape, dtype: Any) -> Any:
    """Return transformers' module of the tower with meaningless weights; it takes no gradient."""
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    assert shape.vision is not None
    config = Qwen2_5_VLVisionConfig(**tower_json(shape.vision, shape.hidden))
    made: Any = Qwen2_5_VisionTransformerPretrainedModel
    return made._from_config(config, dtype=dtype, attn_implementation="sdpa").requires_grad_(False).eval()


QWEN2_5_VL = Family(
    model_type="qwen2_5_vl",
    architecture="Qwen2_5_VLForConditionalGeneration",
    qkv_bias=True,
    only=NO_WINDOW,
    absent={
        "vocab_size": 152064,
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "max_window_layers": 80,
    },
    rope_theta=THETA,
    text="text_config",
    also=("vision_config", "image_token_id"),
    read=read_vision,
    write=write_vision,
    tensors=seeing_tensors,
    tower=tower,
    without={"context_parallel": "its tokens do not have linear positions: use tensor_parallel and sequence_parallel"},
)
