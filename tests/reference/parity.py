"""Models of transformers whose parameters are all random, and Megatron's models with the same weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig

from turnlog.trainer import mcore, weights
from turnlog.trainer.export import export_weights
from turnlog.trainer.families.family import config_json, family, read_shape
from turnlog.trainer.families.shape import ModelShape
from turnlog.trainer.families.tensors import ByExpert
from turnlog.trainer.network import build_model, model_config
from turnlog.trainer.plan import LearnerOptions

CORRECTION = "e_score_correction_bias"
"""Name of the buffer by which DeepSeek-V3's routers correct their choice."""


@torch.no_grad()
def save_random(model: Any, folder: Path, scale: float = 0.1, seed: int = 3) -> None:
    """Move all parameters and corrections of a model of transformers at random, so that no norm or bias is trivial, and
    save it."""
    generator = torch.Generator().manual_seed(seed)
    corrections = [buffer for name, buffer in model.named_buffers() if name.endswith(CORRECTION)]
    for values in (*model.parameters(), *corrections):
        values.add_(scale * torch.randn(values.shape, generator=generator))
    model.save_pretrained(folder)


class ClosestChoice(TorchFunctionMode):
    """The least difference, over all routers of a block of code, between the last expert chosen and the first left out.

    Two correct implementations may choose differently where this is as small as their rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.margin = float("inf")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in (torch.topk, torch.Tensor.topk):
            scores, chosen = args[0].detach(), found.values.detach()
            count = chosen.size(-1)
            if count < scores.size(-1):
                ranked = scores.sort(-1, descending=True).values
                self.margin = min(self.margin, float((ranked[..., count - 1] - ranked[..., count]).min()))
        return found


def loaded_model(shape: ModelShape, state: Mapping[str, torch.Tensor], options: LearnerOptions) -> Any:
    """Return Megatron's model with these weights."""
    with mcore.quiet():
        model = build_model(shape, model_config(shape, options), options)
    weights.load_weights(model, state, shape)
    return model


def check_export(model: Any, shape: ModelShape, state: Mapping[str, torch.Tensor]) -> None:
    """Check that an export of Megatron's model is what was loaded, bit for bit, under the names of the family."""
    exported, state = export_weights(model, shape), family(shape.kind).dequantize(dict(state))
    assert exported.keys() == state.keys()
    assert all(torch.equal(tensor, _whole(state[name])) for name, tensor in exported.items())


def _whole(tensor: Any) -> torch.Tensor:
    if isinstance(tensor, ByExpert):
        return torch.stack([tensor[expert] for expert in range(tensor.shape[0])])
    found: torch.Tensor = tensor
    return found


def check_written(folder: Path, config: PreTrainedConfig) -> None:
    """Check that transformers reads the config.json that the trainer writes for this model as the same model."""
    config.save_pretrained(folder)
    shape = read_shape(folder)
    values = config_json(shape, eos_token_id=0, pad_token_id=0)
    assert values["model_type"] == config.model_type
    type(config)(**{key: value for key, value in values.items() if key != "model_type"}).save_pretrained(folder)
    assert read_shape(folder) == shape


def nontrivial_weights(shape: ModelShape, seed: int) -> weights.Tensors:
    """Return random weights of which no norm, bias, sink or correction is trivial."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(size, generator=generator) * (0.05 if len(size) > 1 else 0.3)
        for name, size in weights.expected_shapes(shape).items()
    }
