"""Qwen3.5, dense: gated delta nets, with gated attention in every fourth layer. Defaults are those of transformers'
Qwen3_5TextConfig.

Models of the Hugging Face Hub have a vision tower and a layer that predicts several tokens, besides the decoder. The
trainer uses the decoder alone, and an export has the other tensors as they were read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from turnlog.trainer import UnsupportedModel
from turnlog.trainer.families.family import NO_BIAS, Config, Family, nest_text, whole_number
from turnlog.trainer.families.rope import rope_values
from turnlog.trainer.families.shape import LinearAttention, ModelShape
from turnlog.trainer.families.tensors import Grouped, Tensor, decoder_tensors

DECODER = "model.language_model."
"""Prefix of the decoder's tensors in models that have others."""
KINDS = ("linear_attention", "full_attention")
DEFAULTS: dict[str, Any] = {
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
FIELDS = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "kernel": "linear_conv_kernel_dim",
}
"""Field of LinearAttention -> key of config.json."""


def _kinds(layers: int, interval: int) -> list[Any]:
    return [KINDS[layer % interval == interval - 1] for layer in range(layers)]


def _interval(kinds: Sequence[str]) -> int:
    """Return the number of layers up to and including the first one with attention; one more than all without any."""
    return kinds.index("full_attention") + 1 if "full_attention" in kinds else len(kinds) + 1


def read_hybrid(config: Config) -> dict[str, Any]:
    """Read the kinds of the layers, and the shape of the gated delta nets. Raises UnsupportedModel, KeyError."""
    layers = whole_number(config, "num_hidden_layers")
    kinds = config.get("layer_types") or _kinds(layers, whole_number(config, "full_attention_interval", 4))
    if len(kinds) != layers or not set(kinds) <= set(KINDS):
        raise UnsupportedModel(f"layer_types {kinds} are not supported; supported: {layers} of {', '.join(KINDS)}")
    named = whole_number(config, "full_attention_interval", _interval(kinds))
    if list(kinds) != _kinds(layers, named):
        raise UnsupportedModel(
            f"layer_types {list(kinds)}, which transformers reads, do not have full_attention in every Nth layer for "
            f"N = full_attention_interval = {named}, which engines read: make them equal"
        )
    rope = rope_values(config, 10_000.0)
    fraction = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if rope["rope_type"] != "default" and fraction != DEFAULTS["partial_rotary_factor"]:
        raise UnsupportedModel(
            f"partial_rotary_factor = {fraction} is not supported beside scaled rotary positions, which transformers "
            f"computes for this family with {DEFAULTS['partial_rotary_factor']}"
        )
    linear = LinearAttention(**{field: whole_number(config, key) for field, key in FIELDS.items()})
    if linear.value_heads % linear.key_heads:
        raise UnsupportedModel(
            f"linear_num_value_heads = {linear.value_heads} must be a multiple of linear_num_key_heads = "
            f"{linear.key_heads}"
        )
    return {"layer_types": tuple(kinds), "linear": linear}


def write_hybrid(shape: ModelShape, values: dict[str, Any]) -> dict[str, Any]:
    """Return config.json of the decoder from that of a plain decoder.

    SGLang reads full_attention_interval alone, transformers layer_types alone.
    """
    assert shape.linear is not None
    sizes = {key: getattr(shape.linear, field) for field, key in FIELDS.items()}
    types = [shape.layer_type(layer) for layer in range(shape.layers)]
    return values | {
        "layer_types": types,
        "full_attention_interval": _interval(types),
        "attn_output_gate": True,
        **sizes,
    }


def _write_whole(shape: ModelShape, values: dict[str, Any]) -> dict[str, Any]:
    return nest_text(write_hybrid(shape, values), "qwen3_5_text")


def mixing_tensors(shape: ModelShape, layer: int, h: str, m: str) -> Iterator[Tensor]:
    """Yield the tensors of a layer's gated attention or gated delta net."""
    yield from (_delta if shape.layer_type(layer) == "linear_attention" else _attention)(
        shape, h, f"{m}self_attention."
    )


def _attention(shape: ModelShape, h: str, m: str) -> Iterator[Tensor]:
    """Yield the tensors of attention, whose q_proj has for each head the rows of its query, then those of its gate."""
    h, size, kv = f"{h}self_attn.", shape.head_dim, shape.groups * shape.head_dim
    rows = (("q", 2 * shape.heads * size), ("k", kv), ("v", kv))
    grouped = Grouped(shape.groups, ((shape.heads // shape.groups, 2, size), (1, 1, size), (1, 1, size)))
    parts = tuple((f"{h}{x}_proj.weight", (count, shape.hidden)) for x, count in rows)
    yield Tensor(f"{m}linear_qkv.weight", parts, 0, "grouped", grouped)
    for x in "qk":
        yield Tensor(f"{m}{x}_layernorm.weight", ((f"{h}{x}_norm.weight", (size,)),))
    yield Tensor(f"{m}linear_proj.weight", ((f"{h}o_proj.weight", (shape.hidden, shape.heads * size)),), 1)


def _delta(shape: ModelShape, h: str, m: str) -> Iterator[Tensor]:
    linear, h = shape.linear, f"{h}linear_attn."
    assert linear is not None
    each, values = linear.value_heads // linear.key_heads, linear.value_heads * linear.value_dim
    channels = 2 * linear.key_heads * linear.key_dim + values
    convolved = ((1, 1, linear.key_dim), (1, 1, linear.key_dim), (each, 1, linear.value_dim))
    others = ((each, 1, linear.value_dim), (each, 1, 1), (each, 1, 1))
    rows = (("qkv", channels), ("z", values), ("b", linear.value_heads), ("a", linear.value_heads))
    parts = tuple((f"{h}in_proj_{x}.weight", (count, shape.hidden)) for x, count in rows)
    by_head = Grouped(linear.key_heads, convolved + others)
    yield Tensor(f"{m}linear_qkv.weight", parts, 0, "grouped", by_head)
    convolution = ((f"{h}conv1d.weight", (channels, 1, linear.kernel)),)
    yield Tensor(f"{m}convolution", convolution, 0, "grouped", Grouped(linear.key_heads, convolved))
    yield Tensor(f"{m}rate_bias", ((f"{h}dt_bias", (linear.value_heads,)),), 0)
    yield Tensor(f"{m}decay_log", ((f"{h}A_log", (linear.value_heads,)),), 0)
    yield Tensor(f"{m}norm", ((f"{h}norm.weight", (linear.value_dim,)),))
    yield Tensor(f"{m}linear_proj.weight", ((f"{h}out_proj.weight", (shape.hidden, values)),), 1)


def hybrid_options(_: ModelShape) -> dict[str, Any]:
    """Return Megatron's arguments: gated attention, norms around zero, layers of several kinds in a checkpoint."""
    return {
        "attention_output_gate": True,
        "layernorm_zero_centered_gamma": True,
        "hetereogenous_dist_checkpoint": True,
    }


def hybrid_spec(shape: ModelShape, layer: int) -> Any:
    """Return the spec of a layer, with a gated delta net in the place of attention in those that have one."""
    from turnlog.trainer.models import decoder, gated_delta

    spec = decoder.layer_spec(shape, layer)
    if shape.layer_type(layer) == "linear_attention":
        assert shape.linear is not None
        spec.submodules.self_attention = gated_delta.delta_spec(**dataclasses.asdict(shape.linear))
    return spec


def _whole_tensors(shape: ModelShape) -> Iterator[Tensor]:
    return decoder_tensors(shape, prefix=DECODER, attention=mixing_tensors)


def _text_tensors(shape: ModelShape) -> Iterator[Tensor]:
    return decoder_tensors(shape, attention=mixing_tensors)


QWEN3_5_TEXT = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    qk_norm=True,
    only=NO_BIAS | {"attn_output_gate": (True,)},
    absent=DEFAULTS,
    partial_rotary=True,
    read=read_hybrid,
    write=write_hybrid,
    tensors=_text_tensors,
    options=hybrid_options,
    layer_spec=hybrid_spec,
    carried=("mtp.",),
    for_engines={"full_attention_interval": "N where every Nth layer has full_attention (4 in published models)"},
    without={
        "context_parallel": "the state of a gated delta net passes through all of a row's tokens in turn",
        "publish": "engines apply adapters only to some matrices of a gated delta net: set it to merged",
    },
)
QWEN3_5 = dataclasses.replace(
    QWEN3_5_TEXT,
    model_type="qwen3_5",
    architecture="Qwen3_5ForConditionalGeneration",
    text="text_config",
    write=_write_whole,
    tensors=_whole_tensors,
    carried=("mtp.", "model.visual."),
    blind=True,
)
