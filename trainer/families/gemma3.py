"""Gemma 3, text only: alternating windows with rotary positions of their own, norms around zero before and after each
part of a layer, and an embedding that is scaled by sqrt(hidden_size). Defaults are those of transformers'
Gemma3TextConfig; the formulas are those of its modeling_gemma3.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from turnlog.trainer import UnsupportedModel
from turnlog.trainer.families.family import NO_BIAS, Config, Family, whole_number
from turnlog.trainer.families.mistral import FULL, SLIDING, read_windows, windows_json
from turnlog.trainer.families.rope import read_rope, rope_json
from turnlog.trainer.families.shape import LayerType, ModelShape, Rope, YarnScaling
from turnlog.trainer.families.tensors import Tensor, decoder_tensors

NORMS = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "pre_mlp_layernorm",
    "post_feedforward_layernorm": "post_mlp_norm",
}
THETAS = {FULL: 1_000_000.0, SLIDING: 10_000.0}
FLAT = {FULL: "rope_theta", SLIDING: "rope_local_base_freq"}
"""Kind of layer -> key with its theta where config.json has no rotary positions by kind."""


def _read(config: Config) -> dict[str, Any]:
    pattern = config.get("sliding_window_pattern") or 6
    layers = range(1, whole_number(config, "num_hidden_layers") + 1)
    types = config.get("layer_types") or [SLIDING if layer % pattern else FULL for layer in layers]
    found = read_windows({**config, "layer_types": types})
    if "sliding" in found:
        found["sliding"] = replace(found["sliding"], rope=_rope(config, SLIDING))
    scale = float(config["query_pre_attn_scalar"]) ** -0.5
    return {**found, "rope": _rope(config, FULL), "attention_scale": scale}


def _rope(config: Config, kind: LayerType) -> Rope:
    """Read the rotary positions of a kind of layer; rope_scaling is that of layers without a window."""
    by_kind, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling")
    if by_kind and not by_kind.keys() & THETAS.keys():
        raise UnsupportedModel(f"rope_parameters {by_kind} are not supported; supported: objects by kind of layer")
    own = dict(by_kind.get(kind) or {})
    if kind == FULL and scaling:
        own |= scaling
    own.setdefault("rope_theta", config.get(FLAT[kind]) or THETAS[kind])
    rope = read_rope({**config, "rope_scaling": None, "rope_parameters": own}, THETAS[kind])
    if isinstance(rope.scaling, YarnScaling):
        raise UnsupportedModel(f"rotary positions {own} are not supported for gemma3_text; supported: default, linear")
    return rope


def _write(shape: ModelShape, values: dict[str, Any]) -> dict[str, Any]:
    assert shape.attention_scale is not None
    values.pop("hidden_act")
    ropes = {FULL: rope_json(shape.rope)}
    if shape.sliding is not None and shape.sliding.rope is not None:
        ropes[SLIDING] = rope_json(shape.sliding.rope)
    return windows_json(shape, values) | {
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": ropes,
        "query_pre_attn_scalar": round(shape.attention_scale**-2),
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "use_bidirectional_attention": False,
    }


def _options(_: ModelShape) -> dict[str, Any]:
    import torch.nn.functional as functional

    gelu = functools.partial(functional.gelu, approximate="tanh")
    return {"layernorm_zero_centered_gamma": True, "activation_func": gelu}


def _layer_spec(shape: ModelShape, layer: int) -> Any:
    from turnlog.trainer.models.decoder import PostNormLayer, layer_spec

    spec = layer_spec(shape, layer)
    spec.module = PostNormLayer
    return spec


def _finish(shape: ModelShape, model: Any) -> None:
    """Scale what the embedding returns by sqrt(hidden_size), rounded to its dtype; its weight is the output layer's."""
    import torch

    def scale(_module: Any, _arguments: Any, output: Any) -> Any:
        return output * torch.tensor(math.sqrt(shape.hidden), dtype=output.dtype)

    if model.pre_process:
        model.embedding.register_forward_hook(scale)


def _tensors(shape: ModelShape) -> Iterator[Tensor]:
    return decoder_tensors(shape, norms=NORMS)


GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    qk_norm=True,
    only=NO_BIAS
    | {
        "hidden_act": ("gelu_pytorch_tanh", None),
        "hidden_activation": ("gelu_pytorch_tanh",),
        "final_logit_softcapping": (None,),
        "attn_logit_softcapping": (None,),
        "use_bidirectional_attention": (False, None),
    },
    absent={
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
    },
    read=_read,
    write=_write,
    tensors=_tensors,
    options=_options,
    layer_spec=_layer_spec,
    finish=_finish,
    also=("query_pre_attn_scalar", "layer_types"),
)
