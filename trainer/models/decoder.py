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
from turnlog.trainer.models import fused
from turnlog.trainer.models.attention import RMSNorm, SdpaAttention
from turnlog.trainer.models.routing import BalancedRouter


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
    two_ropes = shape.sliding is not None and shape.sliding.rope is not None
    spec.submodules.self_attention.module = TwoRopesAttention if two_ropes else RotatedAttention
    if shape.is_mixture(layer):
        spec.submodules.mlp.submodules.router = BalancedRouter
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


class RotatedAttention(mcore.SelfAttention):  # type: ignore[misc]
    """Self-attention whose queries and keys are normalised and rotated as soon as they are projected, by a table that
    `RotaryTables` makes once per microbatch. Megatron's own reads from the device where packed rows end, in each layer.
    """

    _table: torch.Tensor | None = None

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: Any, *, rotary_pos_emb: torch.Tensor, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Map [s, b, h] to [s, b, h]."""
        self._table = rotary_pos_emb
        found: tuple[torch.Tensor, torch.Tensor | None] = super().forward(hidden_states, attention_mask, **named)
        return found

    def get_query_key_value_tensors(
        self, hidden_states: torch.Tensor, key_value_states: None = None, output_gate: bool = False, **named: Any
    ) -> tuple[torch.Tensor, ...]:
        """Return rotated queries and keys, values, and gates if there are any: [s, b, heads of this rank, d]."""
        table, self._table = self._table, None
        assert table is not None
        if not fused.is_fused(self.config, "heads", hidden_states.dtype):
            query, key, *others = super().get_query_key_value_tensors(
                hidden_states, key_value_states, output_gate=output_gate, **named
            )
            table = table.to(query.dtype)
            return fused.turn(query, table), fused.turn(key, table), *others
        mixed, _ = self.linear_qkv(hidden_states)
        groups, norms = self.num_query_groups_per_partition, (self.q_layernorm, self.k_layernorm)
        q_scale, k_scale = (norm(None) if isinstance(norm, RMSNorm) else None for norm in norms)
        return fused.heads(
            mixed.unflatten(-1, (groups, -1, self.hidden_size_per_attention_head)),
            table,
            q_scale,
            k_scale,
            fused.HeadRules(
                each=self.num_attention_heads_per_partition // groups,
                gated=output_gate,
                epsilon=self.config.layernorm_epsilon,
                offset=float(self.config.layernorm_zero_centered_gamma),
                compiled=fused.is_compiled(self.config, "heads"),
            ),
        )


class TwoRopesAttention(RotatedAttention):
    """Self-attention of a model whose layers with a sliding window have rotary positions of their own."""

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: Any, *, rotary_pos_emb: torch.Tensor, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Map [s, b, h] to [s, b, h] by this layer's half of the joined tables."""
        own = rotary_pos_emb.chunk(2, -1)[int(self.core_attention.window > 0)]
        return super().forward(hidden_states, attention_mask, rotary_pos_emb=own, **named)


class GatedMLP(mcore.MLP):  # type: ignore[misc]
    """Feed-forward layer with SwiGLU and no biases."""

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """Map [s, b, h] to [s, b, h], as a layer calls it."""
        if not fused.is_fused(self.config, "swiglu", hidden_states.dtype):
            return super().forward(hidden_states)  # type: ignore[no-any-return]
        gates, _ = self.linear_fc1(hidden_states)
        found: tuple[torch.Tensor, None] = self.linear_fc2(
            fused.swiglu(gates, compiled=fused.is_compiled(self.config, "swiglu"))
        )
        return found

    @classmethod
    def put_on(cls, model: Any) -> None:
        """Turn the dense feed-forward layers of a model into this class if they are such ones."""
        config = model.config
        plain = config.activation_func_clamp_value is None and not config.glu_linear_offset
        swiglu = config.gated_linear_unit and config.activation_func is torch.nn.functional.silu
        if swiglu and plain and not config.add_bias_linear:
            for layer in model.decoder.layers:
                if type(layer.mlp) is mcore.MLP:
                    layer.mlp.__class__ = cls


class RotaryTables:
    """Forward hook of a model's rotary positions. It replaces the angles by the table that layers multiply by
    (fused.rotary_table), [s, b, 1, ...] for padded and [t, 1, 1, ...] for packed rows: computed once per microbatch.
    """

    def __init__(self, model: Any, shape: ModelShape) -> None:
        scaling = shape.rope.scaling
        self._factor = scaling.attention if isinstance(scaling, YarnScaling) else 1.0
        self._interleaved = model.config.rotary_interleaved
        self._joined = shape.sliding is not None and shape.sliding.rope is not None
        self._rows = 1
        self._positions: torch.Tensor | None = None
        self._by_axes = shape.vision is not None
        model.rotary_pos_emb.register_forward_hook(self._make)

    def expect(self, rows: int, positions: torch.Tensor | None) -> None:
        """Say of the next forward pass how many rows it has and, if they are packed, the positions [t] in their
        rows."""
        self._rows, self._positions = rows, positions

    def _make(self, _: Any, __: Any, angles: torch.Tensor) -> torch.Tensor:
        if self._positions is not None and not self._by_axes:
            angles = angles.index_select(0, self._positions)
        parts = [angles]
        if self._joined:
            halves = angles.view(*angles.shape[:-1], 2, 2, -1)
            parts = [halves[..., which, :].flatten(-2) for which in (0, 1)]
        tables = [fused.rotary_table(part, self._factor, interleaved=self._interleaved) for part in parts]
        table = torch.cat(tables, -1)
        if table.size(1) == 1:  # the positions of images have a table for each row
            table = table.expand(-1, self._rows, -1, -1)
        return table.contiguous()


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
