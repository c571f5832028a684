"""The plain decoder's layers for Megatron, with torch's attention and norms, and its rotary positions.

A family whose layers differ takes `layer_spec` and replaces modules in it (Family.layer_spec).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from turnlog.trainer import mcore
from turnlog.trainer.families.shape import LinearScaling, ModelShape, Rope, RopeScaling, YarnScaling
from turnlog.trainer.models.attention import RMSNorm, SdpaAttention


def layer_spec(shape: ModelShape, layer: int) -> Any:
    """Return the spec of a layer, counted over all pipeline stages: grouped-query attention, and a dense or a mixture's
    feed-forward layer. Each call returns a new object, which may be changed.
    """
    spec = mcore.get_gpt_layer_local_spec(
        num_experts=shape.experts if shape.is_mixture(layer) else None,
        qk_layernorm=shape.qk_norm,
        normalization="RMSNorm",
    )
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = SdpaAttention
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RMSNorm
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec


def scale_rope(model: Any, rope: Rope) -> None:
    """Apply RoPE scaling to a built model: Megatron's own arguments fix most of its values to those of one model."""
    rotary, scaling = model.rotary_pos_emb, rope.scaling
    if isinstance(scaling, RopeScaling):
        rotary.inv_freq = rotary._apply_scaling(
            rotary.inv_freq,
            factor=scaling.factor,
            low_freq_factor=scaling.low,
            high_freq_factor=scaling.high,
            original_max_position_embeddings=scaling.original,
        )
    elif isinstance(scaling, LinearScaling):
        rotary.inv_freq = rotary.inv_freq / scaling.factor
    elif isinstance(scaling, YarnScaling):
        rotary.inv_freq = yarn_frequencies(rotary.inv_freq, rope.theta, scaling)


def yarn_frequencies(plain: torch.Tensor, theta: float, scaling: YarnScaling) -> torch.Tensor:
    """Return the frequencies of YaRN from those of plain rotary positions [d / 2] (arXiv 2309.00071, 3.2)."""
    dim = 2 * len(plain)
    low, high = (
        dim * math.log(scaling.original / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (scaling.fast, scaling.slow)
    )
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.arange(len(plain), dtype=torch.float32, device=plain.device).sub(low).div(high - low).clamp(0, 1)
    kept = 1 - ramp
    powers = theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=plain.device) / dim)
    return 1.0 / (scaling.factor * powers) * (1 - kept) + plain * kept


def rope_options(rope: Rope) -> dict[str, Any]:
    """Return attributes of TransformerConfig from which Megatron computes the factor of cosines and sines.

    It is (0.1 a log(s) + 1) / (0.1 b log(s) + 1) for s = yarn_rotary_scaling_factor, a = yarn_mscale and
    b = yarn_mscale_all_dim: with log(s) = 10 and b = 0 it is a + 1.
    """
    if not isinstance(rope.scaling, YarnScaling):
        return {}
    return {
        "yarn_rotary_scaling_factor": math.exp(10.0),
        "yarn_mscale": rope.scaling.attention - 1.0,
        "yarn_mscale_all_dim": 0.0,
    }
