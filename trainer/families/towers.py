"""Vision towers of Qwen-VL models: their keys in config.json, the tensors that all have, and transformers' modules.

A tower extracts features of patches; a merger makes those of a square of patches the feature of a token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from turnlog.trainer import UnsupportedModel
from turnlog.trainer.families.family import Config, nest_text, whole_number
from turnlog.trainer.families.rope import rope_values
from turnlog.trainer.families.shape import ModelShape, Rope, VisionShape
from turnlog.trainer.families.tensors import VISION, Sizes, Tensor

IMAGE_TOKEN = 151655
"""image_token_id where config.json lacks it."""
WITHOUT = {"context_parallel": "tokens of images have positions in three dimensions: use tensor_parallel"}
"""Settings that no model with a vision tower supports."""
FIELDS = {
    "layers": "depth",
    "hidden": "hidden_size",
    "heads": "num_heads",
    "ffn": "intermediate_size",
    "channels": "in_channels",
    "patch": "patch_size",
    "frames": "temporal_patch_size",
    "merge": "spatial_merge_size",
}
"""Field of VisionShape -> key of vision_config, in every family."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerConfig:
    """A family's vision_config, and the rotary positions of its decoder."""

    defaults: Config
    """vision_config where config.json lacks its keys. Its hidden_act is the only one that is supported."""
    fields: Mapping[str, str]
    """Field of VisionShape -> key of vision_config, in addition to FIELDS."""
    theta: float
    """Default of rope_theta."""
    rope: Config
    """Further keys of rotary positions, with the only values that are supported; `type` may also be "default"."""

    def read(self, config: Config) -> dict[str, Any]:
        """Return the fields `vision` and `rope` of ModelShape. Raises UnsupportedModel, KeyError."""
        tower = {**self.defaults, **_object(config, "vision_config")}
        rope = rope_values(config, self.theta)
        known = rope["rope_type"] in ("default", self.rope.get("type"))
        wanted = {key: value for key, value in self.rope.items() if key != "type"}
        hidden, heads = whole_number(config, "hidden_size"), whole_number(config, "num_attention_heads")
        pairs = whole_number(config, "head_dim", hidden // heads) // 2
        sections: Any = rope.get("mrope_section")
        counted = isinstance(sections, list) and len(sections) == 3 and all(isinstance(one, int) for one in sections)
        if (
            not known
            or not counted
            or sum(sections) != pairs
            or any(rope.get(key) != value for key, value in wanted.items())
        ):
            needed = "".join(f", {key} = {json.dumps(value)}" for key, value in wanted.items())
            raise UnsupportedModel(
                f"rotary positions {dict(rope)} (rope_scaling, rope_parameters) are not supported; they must have "
                f"rope_type default{needed}, and as mrope_section three numbers that sum to half of head_dim ({pairs})"
            )
        act = self.defaults["hidden_act"]
        if tower["hidden_act"] != act or tower["out_hidden_size"] != config["hidden_size"]:
            raise UnsupportedModel(
                f"vision_config must have hidden_act {act!r} and the decoder's hidden_size as its out_hidden_size"
            )
        fields: dict[str, Any] = {
            field: _numbers(tower, key) if isinstance(self.defaults[key], tuple) else whole_number(tower, key)
            for field, key in {**FIELDS, **self.fields}.items()
        }
        token, interleaved = config.get("image_token_id", IMAGE_TOKEN), "mrope_interleaved" in wanted
        vision = VisionShape(**fields, token=token, sections=tuple(sections), interleaved=interleaved)
        return {"vision": vision, "rope": Rope(theta=float(rope["rope_theta"]))}

    def write(self, shape: ModelShape, text: dict[str, Any], model_type: str = "") -> dict[str, Any]:
        """Return config.json from that of the decoder, of `model_type` if that is given."""
        assert shape.vision is not None
        text["rope_parameters"] |= {**self.rope, "mrope_section": list(shape.vision.sections)}
        whole = nest_text(text, model_type)
        return {**whole, "image_token_id": shape.vision.token, "vision_config": self.tower_json(shape)}

    def tower_json(self, shape: ModelShape) -> dict[str, Any]:
        """Return vision_config of config.json."""
        values = {key: getattr(shape.vision, field) for field, key in {**FIELDS, **self.fields}.items()}
        lists = {key: list(value) for key, value in values.items() if isinstance(value, tuple)}
        return values | lists | {"out_hidden_size": shape.hidden, "hidden_act": self.defaults["hidden_act"]}

    def build(self, network: Any, shape: ModelShape, dtype: Any) -> Any:
        """Return a tower of transformers' class `network` with meaningless weights; it takes no gradient."""
        config = network.config_class(**self.tower_json(shape))
        return network._from_config(config, dtype=dtype, attn_implementation="sdpa").requires_grad_(False).eval()


def _object(config: Config, key: str) -> Mapping[str, Any]:
    found = config[key]
    if not isinstance(found, Mapping):
        raise UnsupportedModel(f"{key} = {found!r} is not supported; supported: an object")
    return found


def _numbers(config: Config, key: str) -> tuple[int, ...]:
    found = config[key]
    if not isinstance(found, list | tuple) or not all(isinstance(one, int) for one in found):
        raise UnsupportedModel(f"{key} = {found!r} is not supported; supported: a list of whole numbers")
    return tuple(found)


def tower_tensors(prefix: str, sizes: Mapping[str, Sizes]) -> Iterator[Tensor]:
    """Yield the tensors of a tower, which is whole on every rank that has it, by their Hugging Face names after
    `prefix`.
    """
    for name, size in sizes.items():
        yield Tensor(f"{VISION}{name}", ((f"{prefix}{name}", size),))


def patch_sizes(vision: VisionShape) -> dict[str, Sizes]:
    """Return name -> shape of the kernel that makes a hidden state of a patch."""
    kernel = (vision.hidden, vision.channels, vision.frames, vision.patch, vision.patch)
    return {"patch_embed.proj.weight": kernel}


def linear(name: str, rows: int, columns: int) -> dict[str, Sizes]:
    """Return name -> shape of a matrix and its bias."""
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def attention_sizes(name: str, hidden: int) -> dict[str, Sizes]:
    """Return name -> shape of a layer's attention."""
    return linear(f"{name}.qkv", 3 * hidden, hidden) | linear(f"{name}.proj", hidden, hidden)
