"""Model families: what config.json of a Hugging Face folder describes, and Megatron's names of its tensors.

A family is a decoder with grouped-query attention, SwiGLU (dense, or a mixture of experts), RMSNorm and rotary
positions. The families below are built in; a package adds another one by the entry point `turnlog.models`
(docs/models.md).
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from turnlog.infra.offers import find_plugins
from turnlog.names import EntryPointGroup
from turnlog.trainer import ModelDamaged, UnsupportedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Llama 3's RoPE scaling.

    Wavelengths above `original` positions / `low` are stretched by `factor`, those below `original` / `high` are not,
    and those between are interpolated.
    """

    factor: float
    """Factor by which long wavelengths are stretched."""
    low: float
    """low_freq_factor of config.json."""
    high: float
    """high_freq_factor of config.json."""
    original: int
    """original_max_position_embeddings of config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionShape:
    """Shape of Qwen2.5-VL's vision tower, which extracts features of images, and positions of images among a row's
    tokens.
    """

    layers: int
    hidden: int
    heads: int
    ffn: int
    channels: int
    """Color channels of a pixel."""
    patch: int
    """Side of a patch, in pixels."""
    frames: int
    """Number of frames in a patch; a still image is repeated that often."""
    merge: int
    """A token represents a square of this many patches per side."""
    window: int
    """Side of the window within which a layer attends, in pixels."""
    unbounded: tuple[int, ...]
    """Layers that attend to the whole image."""
    token: int
    """Id of the placeholder token of images."""
    sections: tuple[int, int, int]
    """Pairs of a head's dimensions that rotate by frame, row and column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """All values that determine tensor shapes and the computation."""

    kind: str
    """model_type, which identifies the family."""
    layers: int
    hidden: int
    heads: int
    """Number of query heads."""
    groups: int
    """Number of key-value heads."""
    head_dim: int
    """Size of a head."""
    ffn: int
    """Intermediate size of a dense layer."""
    vocabulary: int
    """Number of token ids."""
    positions: int
    """max_position_embeddings: the largest number of positions."""
    norm_epsilon: float
    rope_theta: float
    tied: bool
    """Whether the output layer shares the embedding."""
    rope_scaling: RopeScaling | None = None
    experts: int = 0
    """Number of experts per layer; 0 if the model is dense."""
    experts_per_token: int = 0
    """Number of experts that a token is routed to."""
    expert_ffn: int = 0
    """Intermediate size of an expert."""
    normalized_routing: bool = True
    """Whether the weights of a token's experts sum to 1."""
    vision: VisionShape | None = None
    """Vision tower; None if the model reads only text."""


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
"""The recipes' policy: half a megabyte; it learns one-digit arithmetic with a tool in a minute on two CPU cores."""
TINY_MIXTURE = dataclasses.replace(TINY, kind="qwen3_moe", experts=4, experts_per_token=2, expert_ffn=32)
"""TINY with four experts per layer, two of them per token."""
TINY_VISION = dataclasses.replace(
    TINY,
    kind="qwen2_5_vl",
    vision=VisionShape(
        layers=2, hidden=64, heads=4, ffn=128, channels=3, patch=14, frames=2, merge=2, window=112, unbounded=(1,),
        token=5, sections=(2, 3, 3),
    ),
)  # fmt: skip
"""TINY with vision."""

Joined = Literal["", "qkv", "gate_up", "shared"]
Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A parameter of Megatron's and the Hugging Face tensors that it contains."""

    megatron: str
    """Megatron's name; layers and experts are numbered over all ranks."""
    parts: tuple[tuple[str, Sizes], ...]
    """(Hugging Face name, shape) of each contained tensor."""
    cut: int | None = None
    """Dimension that tensor-parallel ranks share; None if each rank has all of it."""
    joined: Joined = ""
    """Arrangement of the parts. qkv: per query group [its q heads | k | v], stacked; gate_up: each part is cut, then
    they are stacked; shared: each part equals the parameter.
    """

    @property
    def size(self) -> tuple[int, ...]:
        """Shape of the parameter, over all ranks."""
        counted = self.parts[:1] if self.joined == "shared" else self.parts
        return (sum(size[0] for _, size in counted), *self.parts[0][1][1:])


EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
LAYER, EXPERT = "decoder.layers.", ".experts.local_experts."


def decoder_tensors(shape: ModelShape) -> Iterator[Tensor]:
    """Yield every tensor of a decoder, by the names that Llama and Qwen use. Random weights are generated in this
    order.
    """
    yield Tensor(EMBEDDING, (("model.embed_tokens.weight", (shape.vocabulary, shape.hidden)),), 0)
    yield Tensor("decoder.final_layernorm.weight", (("model.norm.weight", (shape.hidden,)),))
    if not shape.tied:
        yield Tensor(OUTPUT, (("lm_head.weight", (shape.vocabulary, shape.hidden)),), 0)
    for layer in range(shape.layers):
        h, m = f"model.layers.{layer}.", f"{LAYER}{layer}."
        for theirs, ours in (("input", "input"), ("post_attention", "pre_mlp")):
            yield Tensor(f"{m}{ours}_layernorm.weight", ((f"{h}{theirs}_layernorm.weight", (shape.hidden,)),))
        yield from _attention(shape, f"{h}self_attn.", f"{m}self_attention.")
        if not shape.experts:
            yield from _feed_forward(f"{h}mlp.", f"{m}mlp.", shape.hidden, shape.ffn, cut=True)
            continue
        yield Tensor(f"{m}mlp.router.weight", ((f"{h}mlp.gate.weight", (shape.experts, shape.hidden)),))
        for expert in range(shape.experts):
            names = f"{h}mlp.experts.{expert}.", f"{m}mlp{EXPERT}{expert}."
            yield from _feed_forward(*names, shape.hidden, shape.expert_ffn, cut=False)


def _attention(shape: ModelShape, h: str, m: str) -> Iterator[Tensor]:
    q, kv = shape.heads * shape.head_dim, shape.groups * shape.head_dim
    rows = (("q", q), ("k", kv), ("v", kv))
    own = family(shape.kind)
    weights = tuple((f"{h}{x}_proj.weight", (size, shape.hidden)) for x, size in rows)
    yield Tensor(f"{m}linear_qkv.weight", weights, 0, "qkv")
    if own.qkv_bias:
        yield Tensor(f"{m}linear_qkv.bias", tuple((f"{h}{x}_proj.bias", (size,)) for x, size in rows), 0, "qkv")
    if own.qk_norm:
        for x in "qk":
            yield Tensor(f"{m}{x}_layernorm.weight", ((f"{h}{x}_norm.weight", (shape.head_dim,)),))
    yield Tensor(f"{m}linear_proj.weight", ((f"{h}o_proj.weight", (shape.hidden, q)),), 1)


def _feed_forward(h: str, m: str, hidden: int, ffn: int, *, cut: bool) -> Iterator[Tensor]:
    gate_up = tuple((f"{h}{x}_proj.weight", (ffn, hidden)) for x in ("gate", "up"))
    yield Tensor(f"{m}linear_fc1.weight", gate_up, 0 if cut else None, "gate_up")
    yield Tensor(f"{m}linear_fc2.weight", ((f"{h}down_proj.weight", (hidden, ffn)),), 1 if cut else None)


VISION = "vision."
"""Prefix of Megatron's names of the vision tower's tensors."""


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


Config = Mapping[str, Any]
"""Content of config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The common properties of models of one model_type."""

    model_type: str
    architecture: str
    """Class of transformers that an exported config.json names."""
    qkv_bias: bool = False
    """Whether the projections of q, k and v have biases."""
    qk_norm: bool = False
    """Whether RMSNorm is applied to each head of q and k."""
    mixture: bool = False
    """Whether every layer is a mixture of experts."""
    vision: bool = False
    """Whether it takes images, with a tower like Qwen2.5-VL's."""
    only: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    """Key of config.json -> supported values, which are those that the Megatron model computes."""
    absent: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Key of `only` -> transformers' default if config.json lacks the key, where that is not the first value."""
    rope_theta: float = 10_000.0
    """Default if config.json has no rope_theta."""
    tensors: Callable[[ModelShape], Iterator[Tensor]] = decoder_tensors
    """Yields the tensors of a model."""


ELSEWHERE = ("quantization_config", "compression_config", "transformers_weights")
"""Keys of config.json that mean that the weights are quantized, or not in the files that the trainer reads."""
_NO_WINDOW = {"use_sliding_window": (False, None)}
_NO_BIAS: dict[str, tuple[Any, ...]] = {"attention_bias": (False,), "mlp_bias": (False,)}
FAMILIES = {
    each.model_type: each
    for each in (
        Family(model_type="qwen2", architecture="Qwen2ForCausalLM", qkv_bias=True, only=_NO_WINDOW),
        Family(model_type="qwen3", architecture="Qwen3ForCausalLM", qk_norm=True, only=_NO_WINDOW | _NO_BIAS),
        Family(model_type="llama", architecture="LlamaForCausalLM", only=_NO_BIAS),
        Family(
            model_type="qwen3_moe",
            architecture="Qwen3MoeForCausalLM",
            qk_norm=True,
            mixture=True,
            only=_NO_WINDOW | _NO_BIAS | {"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
        ),
        Family(
            model_type="qwen2_5_vl",
            architecture="Qwen2_5_VLForConditionalGeneration",
            qkv_bias=True,
            vision=True,
            only=_NO_WINDOW,
            rope_theta=1_000_000.0,
            tensors=seeing_tensors,
        ),
    )
}
"""Built-in families: Qwen2 and Qwen2.5, Qwen3, Llama 3, Qwen3's mixtures of experts, and Qwen2.5-VL."""


@functools.cache
def family(model_type: str) -> Family:
    """Return a built-in family, or the one that a package offers as `model_type`. Raises UnsupportedModel if there is
    none.
    """
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    points = find_plugins(EntryPointGroup.MODELS, "model family", UnsupportedModel)
    if model_type not in points:
        known = ", ".join(sorted({*FAMILIES, *points}))
        raise UnsupportedModel(f"model_type {model_type!r}; known: {known}; docs/models.md says how to add one")
    found = points[model_type].load()
    if not isinstance(found, Family) or found.model_type != model_type:
        raise UnsupportedModel(f"entry point {points[model_type].value} must be a Family of model_type {model_type!r}")
    return found


def read_shape(folder: Path) -> ModelShape:
    """Read the shape of a model folder. Raises UnsupportedModel, ModelDamaged."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except FileNotFoundError:
        raise UnsupportedModel(f"{folder} has no config.json; [model] path must be a Hugging Face folder") from None
    except ValueError as error:
        raise ModelDamaged(f"{folder / 'config.json'} is not JSON ({error}): fetch the file again") from error
    if not isinstance(config, dict):
        raise ModelDamaged(f"{folder / 'config.json'} is not a JSON object: fetch the file again")
    try:
        return _shape(config)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{folder}: {error}") from error
    except KeyError as error:
        raise UnsupportedModel(f"{folder}: config.json has no {error}") from error


def _shape(config: dict[str, Any]) -> ModelShape:
    own = family(str(config.get("model_type")))
    text = config.get("text_config") or config if own.vision else config  # flat in models of the Hugging Face Hub
    config = {**config, **text}
    for key in ELSEWHERE:
        if config.get(key):
            raise UnsupportedModel(f"{key} is not supported: use the model's weights from before it was applied")
    for key, values in {"hidden_act": ("silu",), **own.only}.items():
        value = config.get(key, own.absent.get(key, values[0]))
        if value not in values:
            given = "" if key in config else " (what transformers takes where config.json does not give it)"
            raise UnsupportedModel(f"{key} = {value!r}{given} is not supported; supported: {values[0]!r}")
    rope = _rope(text, own)
    heads = config["num_attention_heads"]
    return ModelShape(
        kind=own.model_type,
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=heads,
        groups=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        ffn=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        positions=config["max_position_embeddings"],
        norm_epsilon=config["rms_norm_eps"],
        rope_theta=float(rope["rope_theta"]),
        tied=bool(config.get("tie_word_embeddings", False)),
        rope_scaling=None if own.vision else _rope_scaling(rope),
        vision=_vision(config, rope) if own.vision else None,
        **(_mixture(config) if own.mixture else {}),
    )


def _vision(config: Config, rope: Config) -> VisionShape:
    """Read the shape of the vision tower. Raises UnsupportedModel."""
    tower = config["vision_config"]
    if "mrope_section" not in rope or rope["rope_type"] not in ("default", "mrope"):
        raise UnsupportedModel(f"rotary positions {dict(rope)} are not supported; supported: mrope_section")
    if tower.get("hidden_act", "silu") != "silu" or tower["out_hidden_size"] != config["hidden_size"]:
        raise UnsupportedModel(
            "vision_config must have hidden_act 'silu' and the decoder's hidden_size as its output's"
        )
    return VisionShape(
        layers=tower["depth"],
        hidden=tower["hidden_size"],
        heads=tower["num_heads"],
        ffn=tower["intermediate_size"],
        channels=tower.get("in_channels", 3),
        patch=tower["patch_size"],
        frames=tower["temporal_patch_size"],
        merge=tower["spatial_merge_size"],
        window=tower["window_size"],
        unbounded=tuple(tower["fullatt_block_indexes"]),
        token=config["image_token_id"],
        sections=tuple(rope["mrope_section"]),
    )


def _mixture(config: Config) -> dict[str, Any]:
    return {
        "experts": config.get("num_experts") or config["num_local_experts"],
        "experts_per_token": config["num_experts_per_tok"],
        "expert_ffn": config["moe_intermediate_size"],
        "normalized_routing": bool(config.get("norm_topk_prob", False)),
    }


def _rope(text: Config, own: Family) -> dict[str, Any]:
    """Return rope_theta, rope_type and related values, as transformers 5 reads them.

    If both rope_scaling and rope_parameters are given, transformers uses the former and other readers the latter, so
    both must be equal. Raises UnsupportedModel if they are not.
    """
    plain = {"rope_theta": text.get("rope_theta") or own.rope_theta, "rope_type": "default"}
    given = [text[key] for key in ("rope_scaling", "rope_parameters") if text.get(key)]
    found = [{**plain, "rope_type": rope.get("type", "default"), **rope} for rope in given]
    for rope in found:
        rope.pop("type", None)
        if any(isinstance(value, dict) for value in rope.values()):
            raise UnsupportedModel(f"rotary positions by layer type {rope} are not supported")
    if len(found) > 1 and found[0] != found[1]:
        raise UnsupportedModel(
            f"rope_scaling {text['rope_scaling']} and rope_parameters {text['rope_parameters']} differ, and engines "
            "and transformers disagree on which one counts: keep one of them in config.json"
        )
    rope = found[0] if found else plain
    original = text.get("original_max_position_embeddings")
    if original is not None and rope.setdefault("original_max_position_embeddings", original) != original:
        raise UnsupportedModel(
            f"original_max_position_embeddings is {original} beside rotary positions {rope}: keep one of them"
        )
    return rope


def _rope_scaling(rope: Config) -> RopeScaling | None:
    if rope["rope_type"] == "default":
        return None
    if rope["rope_type"] != "llama3":
        raise UnsupportedModel(f"scaled rotary positions {dict(rope)} are not supported; supported: llama3")
    return RopeScaling(
        factor=float(rope["factor"]),
        low=float(rope["low_freq_factor"]),
        high=float(rope["high_freq_factor"]),
        original=int(rope["original_max_position_embeddings"]),
    )


def config_json(shape: ModelShape, *, eos_token_id: int, pad_token_id: int) -> dict[str, Any]:
    """Return the config.json of `shape`, as transformers 5 and SGLang read it."""
    own = family(shape.kind)
    values = {
        "architectures": [own.architecture],
        "model_type": shape.kind,
        "dtype": "float32",
        "num_hidden_layers": shape.layers,
        **({"layer_types": ["full_attention"] * shape.layers} if shape.kind in ("qwen2", "qwen3") else {}),
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.groups,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.positions,
        "rms_norm_eps": shape.norm_epsilon,
        "rope_parameters": _rope_json(shape),
        "tie_word_embeddings": shape.tied,
        "hidden_act": "silu",
        "attention_bias": own.qkv_bias,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_sliding_window": False,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        **(_mixture_json(shape) if shape.experts else {}),
    }
    return values if shape.vision is None else _seeing_json(values, shape.vision)


def _seeing_json(text: dict[str, Any], vision: VisionShape) -> dict[str, Any]:
    whole = {name: text.pop(name) for name in ("architectures", "model_type", "dtype", "tie_word_embeddings")}
    text["rope_parameters"] |= {"type": "mrope", "mrope_section": list(vision.sections)}
    tower = tower_json(vision, text["hidden_size"])
    return {**whole, "image_token_id": vision.token, "text_config": text, "vision_config": tower}


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


def _rope_json(shape: ModelShape) -> dict[str, Any]:
    scaling = shape.rope_scaling
    if scaling is None:
        return {"rope_theta": shape.rope_theta, "rope_type": "default"}
    return {
        "rope_theta": shape.rope_theta,
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low,
        "high_freq_factor": scaling.high,
        "original_max_position_embeddings": scaling.original,
    }


def _mixture_json(shape: ModelShape) -> dict[str, Any]:
    return {
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "moe_intermediate_size": shape.expert_ffn,
        "norm_topk_prob": shape.normalized_routing,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def row_flops(shape: ModelShape, tokens: int) -> int:
    """Return the FLOPs of a row's forward pass: two per parameter and token, without the embedding, and causal
    attention's two products.
    """
    q, kv = shape.heads * shape.head_dim, shape.groups * shape.head_dim
    feed_forward = shape.experts_per_token * shape.expert_ffn if shape.experts else shape.ffn
    layer = shape.hidden * (2 * q + 2 * kv + 3 * feed_forward)
    parameters = shape.layers * layer + shape.hidden * shape.vocabulary
    return 2 * tokens * parameters + 2 * shape.layers * q * tokens * tokens


def as_dict(shape: ModelShape) -> dict[str, Any]:
    """Return plain values for checkpoints. Values equal to their defaults are left out, so that new fields do not
    change earlier checkpoints.
    """
    values = dataclasses.asdict(shape)
    defaults = {field.name: field.default for field in dataclasses.fields(shape)}
    return {name: value for name, value in values.items() if value != defaults[name]}
