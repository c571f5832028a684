"""Rotary positions in config.json, as transformers 5 reads and writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from turnlog.trainer import UnsupportedModel
from turnlog.trainer.families.shape import LinearScaling, Rope, RopeScaling, Scaling, YarnScaling

KEYS = ("rope_scaling", "rope_parameters")
"""Keys of config.json with rotary positions, in transformers' order of precedence."""


def with_rope(config: Mapping[str, Any], default: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a decoder's config with the rotary positions `default` if it states none."""
    return config if any(config.get(key) for key in KEYS) else {**config, "rope_parameters": default}


def rope_values(text: Mapping[str, Any], theta: float) -> dict[str, Any]:
    """Return rope_theta, rope_type and related values of a decoder's config; `theta` is the default of rope_theta.

    If both keys are given, transformers uses the former and other readers the latter, so both must be equal. Raises
    UnsupportedModel if they are not.
    """
    plain = {"rope_theta": text.get("rope_theta") or theta, "rope_type": "default"}
    given = {key: text[key] for key in KEYS if text.get(key)}
    found = []
    for key, rope in given.items():
        if not isinstance(rope, dict):
            raise UnsupportedModel(f"{key} = {rope!r} is not supported; supported: an object")
        if any(isinstance(value, dict) for value in rope.values()):
            raise UnsupportedModel(f"{key} {rope}: rotary positions by layer type are not supported")
        found.append({**plain, "rope_type": rope.get("type", "default"), **rope})
        found[-1].pop("type", None)
    if len(found) > 1 and found[0] != found[1]:
        raise UnsupportedModel(
            f"rope_scaling {text['rope_scaling']} and rope_parameters {text['rope_parameters']} differ, and engines "
            "and transformers disagree on which one counts: keep one of them in config.json"
        )
    rope = found[0] if found else plain
    original = text.get("original_max_position_embeddings")
    if original is not None and rope.setdefault("original_max_position_embeddings", original) != original:
        raise UnsupportedModel(
            f"original_max_position_embeddings is {original} beside rotary positions {rope} (rope_scaling, "
            "rope_parameters): keep one of them"
        )
    return rope


def read_rope(text: Mapping[str, Any], theta: float) -> Rope:
    """Read the rotary positions of a decoder's config. Raises UnsupportedModel."""
    rope = rope_values(text, theta)
    kind = rope["rope_type"]
    if kind not in _READERS:
        raise UnsupportedModel(
            f"scaled rotary positions {dict(rope)} are not supported; supported rope_type: {', '.join(_READERS)}"
        )
    original = rope.get("original_max_position_embeddings") or text["max_position_embeddings"]
    try:
        scaling = _READERS[kind]({**rope, "original_max_position_embeddings": int(original)})
    except KeyError as error:
        raise UnsupportedModel(f"rotary positions {dict(rope)} have no {error}") from error
    fraction = rope.get("partial_rotary_factor", text.get("partial_rotary_factor"))
    return Rope(theta=float(rope["rope_theta"]), scaling=scaling, fraction=1.0 if fraction is None else float(fraction))


def rope_json(rope: Rope) -> dict[str, Any]:
    """Return rope_parameters of config.json."""
    values: dict[str, Any] = {"rope_theta": rope.theta, "rope_type": "default"}
    if rope.fraction != 1.0:
        values["partial_rotary_factor"] = rope.fraction
    match rope.scaling:
        case LinearScaling(factor=factor):
            return values | {"rope_type": "linear", "factor": factor}
        case RopeScaling() as scaling:
            return values | {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low,
                "high_freq_factor": scaling.high,
                "original_max_position_embeddings": scaling.original,
            }
        case YarnScaling() as scaling:
            return values | {
                "rope_type": "yarn",
                "factor": scaling.factor,
                "original_max_position_embeddings": scaling.original,
                "beta_fast": scaling.fast,
                "beta_slow": scaling.slow,
                "truncate": scaling.truncate,
                **(dict(zip(("mscale", "mscale_all_dim"), scaling.shares, strict=True)) if scaling.shares else {}),
            }
    return values


def _linear(rope: Mapping[str, Any]) -> LinearScaling:
    return LinearScaling(factor=float(rope["factor"]))


def _llama3(rope: Mapping[str, Any]) -> RopeScaling:
    return RopeScaling(
        factor=float(rope["factor"]),
        low=float(rope["low_freq_factor"]),
        high=float(rope["high_freq_factor"]),
        original=rope["original_max_position_embeddings"],
    )


def _yarn(rope: Mapping[str, Any]) -> YarnScaling:
    """Read YaRN. transformers and SGLang 0.5.21 agree on what passes; where they do not, a key is refused."""
    for key in ("attn_factor", "extrapolation_factor"):
        if rope.get(key, 1) != 1:
            raise UnsupportedModel(f"{key} = {rope[key]!r} of rotary positions counts for engines alone: remove it")
    for key in ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        if key in rope and not rope[key]:
            raise UnsupportedModel(f"{key} = {rope[key]!r} of rotary positions is not supported: give it a value")
    shares = rope.get("mscale"), rope.get("mscale_all_dim")
    found = YarnScaling(
        factor=float(rope["factor"]),
        original=rope["original_max_position_embeddings"],
        shares=(float(shares[0]), float(shares[1])) if shares[0] and shares[1] else None,
        fast=float(rope.get("beta_fast", 32)),
        slow=float(rope.get("beta_slow", 1)),
        truncate=bool(rope.get("truncate", True)),
    )
    given = rope.get("attention_factor")
    if given is not None and abs(given - found.attention) > 1e-6:
        raise UnsupportedModel(
            f"attention_factor = {given} of rotary positions is not supported: engines compute {found.attention} from "
            "the other values"
        )
    return found


_READERS: dict[str, Callable[[Mapping[str, Any]], Scaling | None]] = {
    "default": lambda _: None,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
"""rope_type of config.json -> function that reads its scaling."""
