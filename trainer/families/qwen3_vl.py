"""Qwen3-VL, dense: images, by a vision tower some of whose layers reach the decoder's first layers directly (DeepStack,
arXiv 2406.04334); otherwise as Qwen3. Defaults are those of transformers' Qwen3VLConfig.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from turnlog.trainer import UnsupportedModel
from turnlog.trainer.families import towers
from turnlog.trainer.families.family import NO_BIAS, NO_WINDOW, Config, Family
from turnlog.trainer.families.shape import ModelShape
from turnlog.trainer.families.tensors import Sizes, Tensor, decoder_tensors

TOWER = towers.TowerConfig(
    defaults={
        "depth": 27,
        "hidden_size": 1152,
        "num_heads": 16,
        "intermediate_size": 4304,
        "in_channels": 3,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 3584,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": (8, 16, 24),
        "hidden_act": "gelu_pytorch_tanh",
    },
    fields={"positions": "num_position_embeddings", "deep": "deepstack_visual_indexes"},
    theta=500_000.0,
    rope={"mrope_interleaved": True},  # transformers assumes it; other readers take its absence for false
)


def _read(config: Config) -> dict[str, Any]:
    found = TOWER.read(config)
    deep, layers = found["vision"].deep, found["vision"].layers
    if len(set(deep) & {*range(layers)}) != len(deep):
        raise UnsupportedModel(
            f"deepstack_visual_indexes = {list(deep)} must be different layers of the tower's {layers}"
        )
    return found


def _write(shape: ModelShape, values: dict[str, Any]) -> dict[str, Any]:
    return TOWER.write(shape, values, "qwen3_vl_text")


def _tensors(shape: ModelShape) -> Iterator[Tensor]:
    yield from decoder_tensors(shape, prefix="model.language_model.")
    vision = shape.vision
    assert vision is not None
    hidden, merged = vision.hidden, vision.hidden * vision.merge**2
    sizes: dict[str, Sizes] = towers.patch_sizes(vision) | {"patch_embed.proj.bias": (hidden,)}
    sizes |= {"pos_embed.weight": (vision.positions, hidden)}
    for layer in range(vision.layers):
        at = f"blocks.{layer}."
        sizes |= _norm(f"{at}norm1", hidden) | _norm(f"{at}norm2", hidden)
        sizes |= towers.attention_sizes(f"{at}attn", hidden)
        sizes |= towers.linear(f"{at}mlp.linear_fc1", vision.ffn, hidden)
        sizes |= towers.linear(f"{at}mlp.linear_fc2", hidden, vision.ffn)
    mergers = [("merger", hidden), *((f"deepstack_merger_list.{number}", merged) for number in range(len(vision.deep)))]
    for name, normed in mergers:
        sizes |= _norm(f"{name}.norm", normed)
        sizes |= towers.linear(f"{name}.linear_fc1", merged, merged)
        sizes |= towers.linear(f"{name}.linear_fc2", shape.hidden, merged)
    yield from towers.tower_tensors("model.visual.", sizes)


def _norm(name: str, size: int) -> dict[str, Sizes]:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


def _tower(shape: ModelShape, dtype: Any) -> Any:
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    return TOWER.build(Qwen3VLVisionModel, shape, dtype)


QWEN3_VL = Family(
    model_type="qwen3_vl",
    architecture="Qwen3VLForConditionalGeneration",
    qk_norm=True,
    only=NO_WINDOW | NO_BIAS,
    absent={
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-6,
    },
    rope_theta=TOWER.theta,
    text="text_config",
    also=("vision_config", "image_token_id"),
    read=_read,
    write=_write,
    tensors=_tensors,
    tower=_tower,
    without=towers.WITHOUT,
)
