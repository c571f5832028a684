"""Qwen2.5-VL: images, by a vision tower; otherwise as Qwen2. Defaults are those of transformers' Qwen2_5_VLConfig."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from turnlog.trainer.families import towers
from turnlog.trainer.families.family import NO_WINDOW, Family
from turnlog.trainer.families.shape import ModelShape
from turnlog.trainer.families.tensors import Sizes, Tensor, decoder_tensors

TOWER = towers.TowerConfig(
    defaults={
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
    },
    fields={"window": "window_size", "unbounded": "fullatt_block_indexes"},
    theta=1_000_000.0,
    rope={"type": "mrope"},
)


def _tensors(shape: ModelShape) -> Iterator[Tensor]:
    yield from decoder_tensors(shape)
    vision = shape.vision
    assert vision is not None
    hidden, merged = vision.hidden, vision.hidden * vision.merge**2
    sizes: dict[str, Sizes] = towers.patch_sizes(vision)
    for layer in range(vision.layers):
        at = f"blocks.{layer}."
        sizes |= {f"{at}norm1.weight": (hidden,), f"{at}norm2.weight": (hidden,)}
        sizes |= towers.attention_sizes(f"{at}attn", hidden)
        for name in ("gate_proj", "up_proj"):
            sizes |= towers.linear(f"{at}mlp.{name}", vision.ffn, hidden)
        sizes |= towers.linear(f"{at}mlp.down_proj", hidden, vision.ffn)
    sizes |= {"merger.ln_q.weight": (hidden,)} | towers.linear("merger.mlp.0", merged, merged)
    sizes |= towers.linear("merger.mlp.2", shape.hidden, merged)
    yield from towers.tower_tensors("visual.", sizes)


def _tower(shape: ModelShape, dtype: Any) -> Any:
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    return TOWER.build(Qwen2_5_VisionTransformerPretrainedModel, shape, dtype)


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
    rope_theta=TOWER.theta,
    text="text_config",
    also=("vision_config", "image_token_id"),
    read=TOWER.read,
    write=TOWER.write,
    tensors=_tensors,
    tower=_tower,
    without=towers.WITHOUT,
)
