"""The plain decoder's layers for Megatron, with torch's attention and norms, and its rotary positions.

A family whose layers differ takes `layer_spec` and replaces modules in it (Family.layer_spec).
"""

from __future__ import annotations

import functools
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
    if shape.sliding is not None and shape.sliding.rope is not None:
        spec.submodules.self_attention.module = TwoRopesAttention
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RMSNorm
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec


class PostNormLayer(mcore.TransformerLayer):  # type: ignore[misc]
    """Layer that also normalises what attention and the feed-forward layer add to the residual stream."""

    def __init__(self, config: Any, submodules: Any, *arguments: Any, **named: Any) -> None:
        """Accept the arguments with which Megatron builds a layer."""
        super().__init__(config, submodules, *arguments, **named)
        self.post_attention_norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.post_mlp_norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.self_attn_bda = lambda *_: functools.partial(_add_normalised, self.post_attention_norm)
        self.mlp_bda = lambda *_: functools.partial(_add_normalised, self.post_mlp_norm)


def _add_normalised(
    norm: RMSNorm, added: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, _: float
) -> torch.Tensor:
    """Return residual + norm(x + bias), as Megatron calls what adds (x, bias) to the residual stream."""
    x, bias = added
    found: torch.Tensor = residual + norm(x if bias is None else x + bias)
    return found


class ExpertRowLinear(mcore.RowParallelLinear):  # type: ignore[misc]
    """Second matrix of an expert, with a bias that Megatron weights by the router."""

    def __init__(self, *sizes: int, **named: Any) -> None:
        super().__init__(*sizes, **named)
        # Tensor-parallel ranks have different experts, so that its gradient is not summed and each counts in the norm.
        self.bias.sequence_parallel = False
        mcore.tensor_parallel.set_tensor_model_parallel_attributes(self.bias, True, 0, 1)

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map [tokens, in] to [tokens, out]. Megatron adds the bias in place, which autograd forbids for views."""
        output, bias = super().forward(input_)
        return output.clone(), bias


class TwoRopesAttention(mcore.SelfAttention):  # type: ignore[misc]
    """Self-attention of a model whose layers with a sliding window have rotary positions of their own."""

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: Any, *, rotary_pos_emb: torch.Tensor, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Map [s, b, h] to [s, b, h] by this layer's half of the angles that `scale_rope` joins, [s, 1, 1, 2 d]."""
        halves = rotary_pos_emb.reshape(*rotary_pos_emb.shape[:-1], 2, 2, -1)
        own = halves[..., int(self.core_attention.window > 0), :].flatten(-2)
        found: tuple[torch.Tensor, torch.Tensor | None] = super().forward(
            hidden_states, attention_mask, rotary_pos_emb=own, **named
        )
        return found


def window_options(shape: ModelShape) -> dict[str, Any]:
    """Return the arguments of TransformerConfig from which attention takes the window of its layer."""
    if shape.sliding is None:
        return {}
    sliding = [int(shape.layer_type(layer) == "sliding_attention") for layer in range(shape.layers)]
    return {"window_size": (shape.sliding.size - 1, 0), "window_attn_skip_freq": sliding}


def scale_rope(model: Any, shape: ModelShape) -> None:
    """Apply RoPE scaling to a built model: Megatron's own arguments fix most of its values to those of one model.

    Rotary positions of layers with a sliding window are joined to the others': one tensor reaches all layers.
    """
    rotary = model.rotary_pos_emb
    _scale(rotary, shape.rope)
    if shape.sliding is not None and shape.sliding.rope is not None:
        others, local = rotary.inv_freq, shape.sliding.rope
        dim = 2 * len(others)
        powers = torch.arange(0, dim, 2, dtype=torch.float32, device=others.device) / dim
        rotary.inv_freq = 1.0 / local.theta**powers
        _scale(rotary, local)
        rotary.inv_freq = torch.cat([others, rotary.inv_freq])


def _scale(rotary: Any, rope: Rope) -> None:
    scaling = rope.scaling
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
