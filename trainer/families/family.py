"""A family: models of one model_type, described by what they add to the plain decoder.

The plain decoder has grouped-query attention, SwiGLU (dense, or a mixture of experts), RMSNorm and rotary positions.
The modules that BUILT_IN names are built in; a package adds another family by the entry point `turnlog.models`
(docs/models.md).
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from turnlog.infra.offers import find_plugins
from turnlog.names import EntryPointGroup
from turnlog.trainer import ModelDamaged, UnsupportedModel
from turnlog.trainer.families.rope import KEYS, read_rope, rope_json
from turnlog.trainer.families.shape import Mixture, ModelShape
from turnlog.trainer.families.tensors import Tensor, decoder_tensors

Config = Mapping[str, Any]
"""Content of config.json; where a family has `text`, with the decoder's keys among those of the whole."""
BUILT_IN = {
    "deepseek_v3": "deepseek_v3:DEEPSEEK_V3",
    "gemma3_text": "gemma3:GEMMA3",
    "glm4_moe": "glm4_moe:GLM4_MOE",
    "glm4_moe_lite": "glm4_moe_lite:GLM4_MOE_LITE",
    "gpt_oss": "gpt_oss:GPT_OSS",
    "kimi_k2": "deepseek_v3:KIMI_K2",
    "llama": "llama:LLAMA",
    "ministral": "mistral:MINISTRAL",
    "ministral3": "ministral3:MINISTRAL3",
    "mistral": "mistral:MISTRAL",
    "qwen2": "qwen2:QWEN2",
    "qwen2_5_vl": "qwen2_5_vl:QWEN2_5_VL",
    "qwen3": "qwen3:QWEN3",
    "qwen3_5": "qwen3_5:QWEN3_5",
    "qwen3_5_moe": "qwen3_5_moe:QWEN3_5_MOE",
    "qwen3_5_moe_text": "qwen3_5_moe:QWEN3_5_MOE_TEXT",
    "qwen3_5_text": "qwen3_5:QWEN3_5_TEXT",
    "qwen3_moe": "qwen3_moe:QWEN3_MOE",
    "qwen3_vl": "qwen3_vl:QWEN3_VL",
}
"""model_type -> module of this package and its Family."""
QUANTIZED = "quantization_config"
"""Key of config.json that says how weights are quantized."""
ELSEWHERE = (QUANTIZED, "compression_config", "transformers_weights")
"""Keys of config.json that mean that the weights are quantized, or not in the files that the trainer reads."""
COMMON = frozenset(
    {*KEYS, *ELSEWHERE, "model_type", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version"}
    | {"bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "initializer_range", "attention_dropout"}
    | {"tie_word_embeddings", "rope_theta", "head_dim", "num_key_value_heads", "pretraining_tp"}
    | {"_name_or_path", "return_dict", "id2label", "label2id", "router_aux_loss_coef", "output_router_logits"}
)
"""Keys of config.json that every family may have."""
NO_WINDOW: dict[str, tuple[Any, ...]] = {"use_sliding_window": (False, None)}
NO_BIAS: dict[str, tuple[Any, ...]] = {"attention_bias": (False,), "mlp_bias": (False,)}


def _nothing(_: Config) -> dict[str, Any]:
    return {}


def _as_is(_: ModelShape, values: dict[str, Any]) -> dict[str, Any]:
    return values


def _as_read(state: dict[str, Any]) -> dict[str, Any]:
    return state


def _no_options(_: ModelShape) -> dict[str, Any]:
    return {}


def _keep_model(*_: Any) -> None:
    return None


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
    """Whether layers are mixtures of experts, with the keys of Qwen3's mixtures."""
    only: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    """Key of config.json -> supported values, which are those that the Megatron model computes."""
    absent: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Key of config.json -> the value that transformers gives it where config.json lacks it. A key of `only` that is
    not here has its first value.
    """
    rope_theta: float = 10_000.0
    """Default if config.json has no rope_theta."""
    partial_rotary: bool = False
    """Whether partial_rotary_factor of config.json counts."""
    text: str = ""
    """Key of config.json with the decoder's keys, if they are not at the top; some folders have them at the top
    nevertheless.
    """
    read: Callable[[Config], dict[str, Any]] = _nothing
    """Returns fields of ModelShape that the plain decoder lacks or has otherwise. Raises UnsupportedModel, KeyError."""
    write: Callable[[ModelShape, dict[str, Any]], dict[str, Any]] = _as_is
    """Returns config.json from that of a plain decoder with the same shape."""
    tensors: Callable[[ModelShape], Iterator[Tensor]] = decoder_tensors
    """Yields the tensors of a model."""
    options: Callable[[ModelShape], dict[str, Any]] = _no_options
    """Returns arguments of Megatron's TransformerConfig in addition to, or in place of, the plain decoder's."""
    layer_spec: Callable[[ModelShape, int], Any] | None = None
    """Returns the ModuleSpec of layer `int`, counted over all pipeline stages; None: models.decoder.layer_spec. Imports
    torch modules only when called.
    """
    finish: Callable[[ModelShape, Any], None] = _keep_model
    """Changes a built GPTModel, or the part of one pipeline stage, before it has weights."""
    quantized: tuple[str, ...] = ()
    """quant_method values of quantization_config whose weights are read; `dequantize` says how."""
    dequantize: Callable[[dict[str, Any]], dict[str, Any]] = _as_read
    """Returns the tensors that `tensors` names, from those of a folder. Raises WeightsMismatch."""
    carried: tuple[str, ...] = ()
    """Prefixes of Hugging Face names whose tensors the trainer does not use: an export has them as they were read."""
    blind: bool = False
    """Whether the models take images but the trainer does not: it refuses samples with images."""
    tower: Callable[[ModelShape, Any], Any] | None = None
    """Returns the vision tower as a torch module of a dtype, with meaningless weights."""
    also: tuple[str, ...] = ()
    """Further keys of config.json that count; an unknown model that lacks them is less like this family."""
    for_engines: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Key of config.json that engines need and transformers does not write -> what to set it to."""
    without: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """[trainer] setting that the family does not support (context_parallel, packing, lora_rank, ...) -> reason, which
    completes "is not supported for KIND, because ...".
    """

    @property
    def supported_values(self) -> dict[str, tuple[Any, ...]]:
        """`only`, with the activation of every family."""
        return {"hidden_act": ("silu",), **self.only}


@functools.cache
def family(model_type: str) -> Family:
    """Return a built-in family, or the one that a package offers as `model_type`. Raises UnsupportedModel if there is
    none.
    """
    if model_type in BUILT_IN:
        found: Any = EntryPoint(model_type, f"{__package__}.{BUILT_IN[model_type]}", EntryPointGroup.MODELS).load()
        return found  # type: ignore[no-any-return]
    points = find_plugins(EntryPointGroup.MODELS, "model family", UnsupportedModel)
    if model_type not in points:
        known = ", ".join(sorted({*BUILT_IN, *points}))
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
    kind = str(config.get("model_type"))
    try:
        own = family(kind)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{error}{_nearest(config)}") from error
    given = _decoder_keys(config, own)
    for key in ELSEWHERE:
        found = given.get(key) or config.get(key)
        readable = key == QUANTIZED and isinstance(found, dict) and found.get("quant_method") in own.quantized
        if found and not readable:
            raise UnsupportedModel(
                f"{key} is not supported: use weights in plain safetensors files, and their config.json"
            )
    config = {**own.absent, **given}
    for key, values in own.supported_values.items():
        value = config.get(key, values[0])
        if value not in values:
            assumed = "" if key in given else " (what transformers takes where config.json does not give it)"
            raise UnsupportedModel(f"{key} = {value!r}{assumed} is not supported; supported: {values[0]!r}")
    read = own.read(config)
    if "layer_types" not in read and set(config.get("layer_types") or ()) - {"full_attention"}:
        raise UnsupportedModel(f"layer_types = {config['layer_types']} is not supported; supported: full_attention")
    heads = whole_number(config, "num_attention_heads")
    hidden = whole_number(config, "hidden_size")
    fields = {
        "kind": own.model_type,
        "layers": whole_number(config, "num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "groups": whole_number(config, "num_key_value_heads", heads),
        "head_dim": whole_number(config, "head_dim", hidden // heads),
        "ffn": whole_number(config, "intermediate_size"),
        "vocabulary": whole_number(config, "vocab_size"),
        "positions": whole_number(config, "max_position_embeddings"),
        "norm_epsilon": config["rms_norm_eps"],
        "tied": bool(config.get("tie_word_embeddings", False)),
        "qkv_bias": own.qkv_bias,
        "qk_norm": own.qk_norm,
        "mixture": _mixture(config) if own.mixture else None,
        "rope": read.get("rope") or read_rope(config, own.rope_theta),
        **read,
    }
    shape = ModelShape(**fields)
    if shape.rope.fraction != 1.0 and not own.partial_rotary:
        raise UnsupportedModel(f"partial_rotary_factor = {shape.rope.fraction} is not supported for {shape.kind}")
    return shape


def whole_number(config: Config, key: str, default: int | None = None) -> int:
    """Return a positive value of config.json; `default` replaces a missing one and null. Raises KeyError,
    UnsupportedModel.
    """
    value = config[key] if default is None else config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedModel(f"{key} = {value!r} is not supported; supported: a whole number above 0")
    return value


def _decoder_keys(config: dict[str, Any], own: Family) -> dict[str, Any]:
    """Return config.json with the decoder's keys at the top, where transformers finds the same values.

    If the decoder has an object of its own, transformers reads only there what belongs to the decoder, but
    tie_word_embeddings at the top. Raises UnsupportedModel if other readers could take another value.
    """
    text = config.get(own.text) if own.text else None
    if not text:
        return config
    tied = bool(config.get("tie_word_embeddings", False))
    if text.get("tie_word_embeddings", tied) != tied:
        raise UnsupportedModel(f"tie_word_embeddings is {tied} at the top and another in {own.text}: make them equal")
    for key in ("head_dim", "rope_theta", *KEYS, *own.absent, *own.supported_values):
        default = own.absent.get(key, own.supported_values.get(key, (None,))[0])
        if key in config and config[key] != (inner := text.get(key, default)):
            raise UnsupportedModel(
                f"{key} is {config[key]!r} at the top and {inner!r} in {own.text}: transformers reads the latter; "
                "remove the former"
            )
    return {**config, **text, "tie_word_embeddings": tied}


def _nearest(config: Config) -> str:
    """Describe how a config of an unknown family differs from that of the built-in family that is nearest to it."""
    nested = {one.text for one in _built_in() if isinstance(config.get(one.text), dict)}
    text = {key: value for name in nested for key, value in config[name].items()} | dict(config)
    found: list[tuple[int, int, str, list[str]]] = []
    for one in _built_in():
        known = {*COMMON, *one.absent, *one.supported_values, *one.also}
        other = sorted(
            f"{key} = {value!r}"
            for key, value in text.items()
            if key not in nested
            if (key not in known and value) or value not in one.supported_values.get(key, (value,))
        )
        lacking = sorted(f"no {key}" for key in one.also if key not in text)
        defaulted = sum(key not in text for key in one.absent)
        found.append((len(other) + len(lacking), defaulted, one.model_type, other + lacking))
    *_, kind, differences = min(found)
    alone = [f"its {name} is {found}, which is supported alone" for name in sorted(nested)
             if (found := config[name].get("model_type")) in BUILT_IN]  # fmt: skip
    near = f"the nearest is {kind}, from which it differs by {', '.join(differences) or 'model_type alone'}"
    return "; " + "; ".join([*alone, near])


def _built_in() -> list[Family]:
    return [family(name) for name in BUILT_IN]


def _mixture(config: Config) -> Mixture:
    counts = {config[key] for key in ("num_experts", "num_local_experts") if config.get(key)}
    if len(counts) > 1:
        raise UnsupportedModel(f"num_experts and num_local_experts differ ({counts}): keep one of them")
    return Mixture(
        experts=whole_number({"num_experts": next(iter(counts), 128)}, "num_experts"),
        experts_per_token=whole_number(config, "num_experts_per_tok"),
        expert_ffn=whole_number(config, "moe_intermediate_size"),
        normalized_routing=bool(config.get("norm_topk_prob", False)),
    )


def config_json(shape: ModelShape, *, eos_token_id: int, pad_token_id: int) -> dict[str, Any]:
    """Return the config.json of `shape`, as transformers 5 and SGLang read it."""
    own = family(shape.kind)
    values = {
        "architectures": [own.architecture],
        "model_type": shape.kind,
        "dtype": "float32",
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.groups,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.positions,
        "rms_norm_eps": shape.norm_epsilon,
        "rope_parameters": rope_json(shape.rope),
        "tie_word_embeddings": shape.tied,
        "hidden_act": "silu",
        "attention_bias": shape.qkv_bias,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_sliding_window": False,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        **(_mixture_json(shape.mixture) if own.mixture and shape.mixture else {}),
    }
    return own.write(shape, values)


def nest_text(text: dict[str, Any], model_type: str = "") -> dict[str, Any]:
    """Return config.json of a model of which the decoder `text`, of `model_type` if that is given, is a part."""
    whole = {name: text.pop(name) for name in ("architectures", "model_type", "dtype", "tie_word_embeddings")}
    return {**whole, "text_config": {**text, **({"model_type": model_type} if model_type else {})}}


def _mixture_json(mixture: Mixture) -> dict[str, Any]:
    return {
        "num_experts": mixture.experts,
        "num_experts_per_tok": mixture.experts_per_token,
        "moe_intermediate_size": mixture.expert_ffn,
        "norm_topk_prob": mixture.normalized_routing,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def as_dict(shape: ModelShape) -> dict[str, Any]:
    """Return plain values for checkpoints. Values equal to their defaults are left out, so that new fields do not
    change earlier checkpoints.
    """
    own = family(shape.kind)
    values: dict[str, Any] = _plain_values(shape)
    for name in ("qkv_bias", "qk_norm"):
        if values.get(name, False) == getattr(own, name):
            values.pop(name, None)
        else:
            values[name] = getattr(shape, name)
    rope = values.pop("rope")
    values["rope_theta"] = rope.pop("theta")
    if "scaling" in rope:
        values["rope_scaling"] = rope.pop("scaling")
    mixture: dict[str, Any] = values.pop("mixture", {})
    return values | mixture | ({"rope": rope} if rope else {})


def _plain_values(value: Any) -> Any:
    """Return a dataclass as a dictionary without the fields that have their defaults."""
    if not dataclasses.is_dataclass(value):
        return value
    fields = [(field.name, getattr(value, field.name), field.default) for field in dataclasses.fields(value)]
    return {name: _plain_values(held) for name, held, default in fields if held != default}
