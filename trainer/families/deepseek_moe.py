"""Mixture of experts of DeepSeek-V3 and GLM-4.5: sigmoid routing with a fixed correction, shared experts, dense first
layers.

Sources: transformers 5.12.1, modeling_deepseek_v3.py and modeling_glm4_moe.py, which route alike.
"""

from __future__ import annotations

from typing import Any

from turnlog.trainer import UnsupportedModel
from turnlog.trainer.families.family import Config, whole_number
from turnlog.trainer.families.shape import Mixture, ModelShape, SigmoidRouting

ONLY: dict[str, tuple[Any, ...]] = {
    "norm_topk_prob": (True,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
}
"""Values of keys that such a family supports; transformers has no more than the first key."""
WITHOUT = {"publish": "engines apply adapters to a mixture's attention alone: set it to merged"}
SUMMED = 2
"""Number of corrected scores whose sum ranks a group of experts."""


def read_mixture(config: Config, dense_layers: tuple[int, ...]) -> dict[str, Any]:
    """Read the mixture and the number of layers that are left out. Raises UnsupportedModel, KeyError."""
    experts, shared = config["n_routed_experts"], config["n_shared_experts"]
    layers = whole_number(config, "num_hidden_layers")
    if not experts or not shared or len(dense_layers) >= layers:
        raise UnsupportedModel(
            f"{experts or 0} experts and {shared or 0} shared ones in {layers - len(dense_layers)} of {layers} layers "
            "are not supported; supported: at least 1 of each"
        )
    experts, shared, per_token, ffn = (
        whole_number(config, key)
        for key in ("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size")
    )
    groups, chosen = whole_number(config, "n_group", 1), whole_number(config, "topk_group", 1)
    if config.get("num_local_experts") not in (None, experts):  # transformers takes it for the other key
        raise UnsupportedModel(f"num_local_experts = {config['num_local_experts']} beside n_routed_experts = {experts}")
    limits = chosen < groups
    if per_token < SUMMED or (limits and (per_token // chosen != SUMMED or experts < SUMMED * groups)):
        raise UnsupportedModel(
            f"num_experts_per_tok = {per_token} in topk_group = {chosen} of n_group = {groups} groups of {experts} "
            f"experts is not supported; supported: at least {SUMMED} experts per token, and {SUMMED} per chosen group "
            "if not all are chosen"
        )
    mixture = Mixture(
        experts=experts,
        experts_per_token=per_token,
        expert_ffn=ffn,
        dense_layers=dense_layers,
        shared_ffn=shared * ffn,
        sigmoid=SigmoidRouting(factor=float(config["routed_scaling_factor"]), groups=groups, groups_per_token=chosen),
    )
    return {"mixture": mixture, "extra_layers": config.get("num_nextn_predict_layers") or 0}


def first_layers(config: Config) -> tuple[int, ...]:
    """Return the layers that first_k_dense_replace makes dense."""
    return tuple(range(min(config["first_k_dense_replace"], whole_number(config, "num_hidden_layers"))))


def write_mixture(shape: ModelShape, values: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with the mixture."""
    mixture = shape.mixture
    assert mixture is not None
    assert mixture.sigmoid is not None
    return values | {
        "n_routed_experts": mixture.experts,
        "num_experts_per_tok": mixture.experts_per_token,
        "moe_intermediate_size": mixture.expert_ffn,
        "n_shared_experts": mixture.shared_ffn // mixture.expert_ffn,
        "routed_scaling_factor": mixture.sigmoid.factor,
        "n_group": mixture.sigmoid.groups,
        "topk_group": mixture.sigmoid.groups_per_token,
        **{key: values[0] for key, values in ONLY.items()},  # engines need them all
        "first_k_dense_replace": len(mixture.dense_layers),
        "num_nextn_predict_layers": shape.extra_layers,
    }


def options(shape: ModelShape) -> dict[str, Any]:
    """Return Megatron's arguments for the mixture. Megatron moves its own correction of the choice after each step; it
    is off, and CorrectedRouter has one that stays.
    """
    mixture = shape.mixture
    assert mixture is not None
    assert mixture.sigmoid is not None
    found: dict[str, Any] = {
        "moe_router_score_function": "sigmoid",
        "moe_router_topk_scaling_factor": mixture.sigmoid.factor,
        "moe_shared_expert_intermediate_size": mixture.shared_ffn,
    }
    if mixture.sigmoid.groups_per_token < mixture.sigmoid.groups:
        found["moe_router_num_groups"] = mixture.sigmoid.groups
        found["moe_router_group_topk"] = mixture.sigmoid.groups_per_token
    return found


def layer_spec(shape: ModelShape, layer: int) -> Any:
    """Return the spec of a layer with grouped-query attention."""
    from turnlog.trainer.models import decoder
    from turnlog.trainer.models.routing import CorrectedRouter

    spec = decoder.layer_spec(shape, layer)
    if shape.is_mixture(layer):
        spec.submodules.mlp.submodules.router = CorrectedRouter
    return spec
