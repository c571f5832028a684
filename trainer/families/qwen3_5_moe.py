"""Qwen3.5's mixtures of experts: the layers of Qwen3.5, where beside the experts that a token is routed to stands one
that every token passes, scaled by a gate. Defaults are those of transformers' Qwen3_5MoeTextConfig.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from turnlog.trainer import WeightsMismatch
from turnlog.trainer.families import qwen3_5
from turnlog.trainer.families.family import Config, nest_text, whole_number
from turnlog.trainer.families.shape import Mixture, ModelShape
from turnlog.trainer.families.tensors import ByExpert, Tensor, decoder_tensors, feed_forward_tensors

SINGLE = re.compile(r"(?P<layer>(?!mtp\.).*\.mlp\.experts\.)(?P<expert>\d+)\.(?P<part>gate|up|down)_proj\.weight")
"""Names of tensors that hold a matrix of one expert, as transformers writes them. In folders of the Hugging Face Hub,
two tensors hold all experts of a layer.
"""


def read_mixture(config: Config) -> dict[str, Any]:
    """Read the layers and their experts. Raises UnsupportedModel, KeyError."""
    mixture = Mixture(
        experts=whole_number(config, "num_experts"),
        experts_per_token=whole_number(config, "num_experts_per_tok"),
        expert_ffn=whole_number(config, "moe_intermediate_size"),
        shared_ffn=whole_number(config, "shared_expert_intermediate_size"),
    )
    return {**qwen3_5.read_hybrid(config), "mixture": mixture, "ffn": mixture.shared_ffn}


def _text(shape: ModelShape, values: dict[str, Any]) -> dict[str, Any]:
    assert shape.mixture is not None
    return qwen3_5.write_hybrid(shape, values) | {
        "num_experts": shape.mixture.experts,
        "num_experts_per_tok": shape.mixture.experts_per_token,
        "moe_intermediate_size": shape.mixture.expert_ffn,
        "shared_expert_intermediate_size": shape.mixture.shared_ffn,
    }


def _whole(shape: ModelShape, values: dict[str, Any]) -> dict[str, Any]:
    return nest_text(_text(shape, values), "qwen3_5_moe_text")


def _feed_forward(shape: ModelShape, layer: int, h: str, m: str) -> Iterator[Tensor]:
    yield from feed_forward_tensors(shape, layer, h, m, shared="shared_expert", stacked=True)
    gate = (f"{h}mlp.shared_expert_gate.weight", (1, shape.hidden))
    yield Tensor(f"{m}mlp.shared_experts.gate_weight", (gate,))


def _tensors(shape: ModelShape, prefix: str = "model.") -> Iterator[Tensor]:
    return decoder_tensors(shape, prefix=prefix, attention=qwen3_5.mixing_tensors, feed_forward=_feed_forward)


def _whole_tensors(shape: ModelShape) -> Iterator[Tensor]:
    return _tensors(shape, qwen3_5.DECODER)


def stack_experts(state: dict[str, Any]) -> dict[str, Any]:
    """Return two tensors per layer, as folders of the Hugging Face Hub have them, for those that hold a matrix each.

    Each expert's are joined as they are taken. Raises WeightsMismatch.
    """
    found, layers = dict(state), dict[str, dict[int, dict[str, Any]]]()
    for name in state:
        if place := SINGLE.fullmatch(name):
            experts = layers.setdefault(place["layer"], {})
            experts.setdefault(int(place["expert"]), {})[place["part"]] = found.pop(name)
    for layer, experts in layers.items():
        if lacking := [
            f"{layer}{expert}.{part}_proj.weight"
            for expert in range(max(experts) + 1)
            for part in ("gate", "up", "down")
            if part not in experts.get(expert, {})
        ]:
            raise WeightsMismatch(f"the weights have no {lacking[0]}, but other matrices of that layer's experts")
        shapes = {tuple(tuple(one[part].shape) for part in ("gate", "up", "down")) for one in experts.values()}
        if len(shapes) > 1 or any(len(size) != 2 for size in next(iter(shapes))):
            raise WeightsMismatch(f"the experts {layer}* differ in shape: {sorted(shapes)}")
        ((gate, up, down),) = shapes
        count, dtype = len(experts), experts[0]["gate"].dtype
        found[f"{layer}gate_up_proj"] = ByExpert(
            (count, gate[0] + up[0], gate[1]), dtype, functools.partial(_gate_up, experts)
        )
        found[f"{layer}down_proj"] = ByExpert((count, *down), dtype, functools.partial(_down, experts))
    return found


def _gate_up(experts: Mapping[int, Mapping[str, Any]], expert: int) -> Any:
    import torch

    return torch.cat([experts[expert]["gate"], experts[expert]["up"]])


def _down(experts: Mapping[int, Mapping[str, Any]], expert: int) -> Any:
    return experts[expert]["down"]


def _options(shape: ModelShape) -> dict[str, Any]:
    assert shape.mixture is not None
    shared = {
        "moe_shared_expert_intermediate_size": shape.mixture.shared_ffn,
        "moe_shared_expert_gate": True,
    }
    return qwen3_5.hybrid_options(shape) | shared


QWEN3_5_MOE_TEXT = dataclasses.replace(
    qwen3_5.QWEN3_5_TEXT,
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    absent=qwen3_5.DEFAULTS
    | {
        "hidden_size": 2048,
        "intermediate_size": 512,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    read=read_mixture,
    write=_text,
    tensors=_tensors,
    options=_options,
    dequantize=stack_experts,
)
QWEN3_5_MOE = dataclasses.replace(
    QWEN3_5_MOE_TEXT,
    model_type="qwen3_5_moe",
    architecture="Qwen3_5MoeForConditionalGeneration",
    text=qwen3_5.QWEN3_5.text,
    write=_whole,
    tensors=_whole_tensors,
    carried=qwen3_5.QWEN3_5.carried,
    blind=True,
)
