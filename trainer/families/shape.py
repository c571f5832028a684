"""The shape of a model: all values that determine its tensors and its computation.

Whatever only some families have is a small dataclass of its own, and its field is None in all others.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

LayerType = Literal["full_attention", "sliding_attention", "linear_attention"]
"""Kinds of token mixing, as layer_types of config.json names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Positions divided by a factor."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Llama 3's RoPE scaling.

    Wavelengths above `original` positions / `low` are stretched by `factor`, those below `original` / `high` are not,
    and those between are interpolated.
    """

    factor: float
    """Factor by which long wavelengths are stretched."""
    low: float
    """low_freq_factor of config.json."""
    high: float
    """high_freq_factor of config.json."""
    original: int
    """original_max_position_embeddings of config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN (Peng et al., arXiv 2309.00071, 3.2 and 3.4).

    Dimensions that rotate less than `slow` times within `original` positions are stretched by `factor`, those that
    rotate more than `fast` times are not, and those between are interpolated.
    """

    factor: float
    original: int
    """original_max_position_embeddings of config.json."""
    shares: tuple[float, float] | None = None
    """mscale and mscale_all_dim of config.json, if it has both."""
    fast: float = 32.0
    """beta_fast of config.json."""
    slow: float = 1.0
    """beta_slow of config.json."""
    truncate: bool = True
    """Whether the limits of the interpolated dimensions are whole numbers."""

    @property
    def attention(self) -> float:
        """Factor of cosines and sines."""
        if self.shares is None:
            return yarn_magnitude(self.factor)
        above, below = self.shares
        return yarn_magnitude(self.factor, above) / yarn_magnitude(self.factor, below)


def yarn_magnitude(factor: float, share: float = 1.0) -> float:
    """Return the factor by which YaRN scales attention to `factor` times as many positions (arXiv 2309.00071, 22)."""
    return 0.1 * share * math.log(factor) + 1.0 if factor > 1 else 1.0


Scaling = LinearScaling | RopeScaling | YarnScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary positions."""

    theta: float
    scaling: Scaling | None = None
    fraction: float = 1.0
    """Share of a head's dimensions that rotate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SigmoidRouting:
    """Routing by a sigmoid per expert, as in DeepSeek-V3 (arXiv 2412.19437, 2.1.2).

    A fixed correction is added to the score where experts are chosen; the weights of the chosen ones, which sum to
    `factor`, follow from the score alone.
    """

    factor: float
    """routed_scaling_factor of config.json."""
    groups: int = 1
    """Number of groups of neighbouring experts. Those with the largest sums of two corrected scores are chosen
    first.
    """
    groups_per_token: int = 1
    """Number of groups in which a token's experts are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention in place of grouped-query attention (DeepSeek-V2, arXiv 2405.04434, 2.1).

    head_dim of the model is the size of the rotated part of queries and keys, and every head has its own keys.
    """

    q_rank: int | None
    """Size of the vector from which queries are made; None if they are made from the hidden state."""
    kv_rank: int
    """Size of the vector from which keys and values are made."""
    unrotated: int
    """Size of the part of a query or key without positions."""
    value: int
    """Size of a value."""
    interleaved: bool = True
    """Whether neighbouring dimensions rotate together, not those half a vector apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """A mixture of experts in place of the dense feed-forward layer."""

    experts: int
    """Number of experts per layer."""
    experts_per_token: int
    """Number of experts that a token is routed to."""
    expert_ffn: int
    """Intermediate size of an expert."""
    normalized_routing: bool = True
    """Whether the weights of a token's experts sum to 1."""
    dense_layers: tuple[int, ...] = ()
    """Layers that are dense nevertheless."""
    shared_ffn: int = 0
    """Intermediate size of the feed-forward layer that every token passes beside its experts; 0 if there is none."""
    sigmoid: SigmoidRouting | None = None
    """Routing by sigmoids; None if a softmax routes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindow:
    """Attention of the layers of kind sliding_attention."""

    size: int
    """Number of positions that a token attends to, its own among them."""
    rope: Rope | None = None
    """Rotary positions of these layers, if they have other ones than the layers of kind full_attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryGrowth:
    """Factor 1 + beta log(1 + floor(position / original)) of queries, as Llama 4 has it in place of longer training."""

    beta: float
    original: int
    """original_max_position_embeddings of config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention:
    """Gated delta nets of the layers of kind linear_attention (models.gated_delta)."""

    key_heads: int
    """Number of heads of queries and keys."""
    value_heads: int
    """Number of heads of values and states, a multiple of key_heads."""
    key_dim: int
    """Size of a query or key."""
    value_dim: int
    """Size of a value."""
    kernel: int
    """Number of positions of the convolution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionShape:
    """Shape of a Qwen-VL's vision tower, which extracts features of images, and positions of images among a row's
    tokens.
    """

    layers: int
    hidden: int
    heads: int
    ffn: int
    channels: int
    """Color channels of a pixel."""
    patch: int
    """Side of a patch, in pixels."""
    frames: int
    """Number of frames in a patch; a still image is repeated that often."""
    merge: int
    """A token represents a square of this many patches per side."""
    window: int = 0
    """Side of the window within which a layer attends, in pixels; 0: every layer attends to the whole image."""
    unbounded: tuple[int, ...] = ()
    """Layers that attend to the whole image nevertheless."""
    positions: int = 0
    """Number of learned positions, a square that is interpolated for the patches of an image; 0 if there are none."""
    deep: tuple[int, ...] = ()
    """Layers whose features are added to the hidden states behind as many layers of the decoder, from its first on."""
    token: int
    """Id of the placeholder token of images."""
    sections: tuple[int, int, int]
    """Numbers of pairs of a head's dimensions that rotate by frame, row and column."""
    interleaved: bool = False
    """Whether pairs that rotate by frame, row and column alternate; those that are left rotate by frame."""

    def axis_sizes(self, pairs: int) -> list[int]:
        """Return how many of `pairs` neighbouring pairs rotate by frame, row, column, frame and so on in turn."""
        if not self.interleaved:
            return list(self.sections)
        axes = [pair % 3 if pair < 3 * self.sections[pair % 3] else 0 for pair in range(pairs)]
        return [int(axis == own) for own in axes for axis in range(3)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """All values that determine tensor shapes and the computation."""

    kind: str
    """model_type, which identifies the family."""
    layers: int
    hidden: int
    heads: int
    """Number of query heads."""
    groups: int
    """Number of key-value heads."""
    head_dim: int
    """Size of a head."""
    ffn: int
    """Intermediate size of a dense layer."""
    vocabulary: int
    """Number of token ids."""
    positions: int
    """max_position_embeddings: the largest number of positions."""
    norm_epsilon: float
    rope: Rope
    tied: bool
    """Whether the output layer shares the embedding."""
    qkv_bias: bool = False
    """Whether the projections of q, k and v have biases."""
    qk_norm: bool = False
    """Whether RMSNorm is applied to each head of q and k."""
    layer_types: tuple[LayerType, ...] = ()
    """Kind of each layer; empty if every layer has full attention."""
    sliding: SlidingWindow | None = None
    """Sliding window; None if no layer has one."""
    attention_scale: float | None = None
    """Factor of attention scores; None: 1 / sqrt(head_dim)."""
    growth: QueryGrowth | None = None
    """Growth of queries with their position; None if they do not grow."""
    mixture: Mixture | None = None
    """Mixture of experts; None if every layer is dense."""
    latent: LatentAttention | None = None
    """Latent attention; None if the model has grouped-query attention."""
    linear: LinearAttention | None = None
    """Gated delta nets; None if no layer has one."""
    vision: VisionShape | None = None
    """Vision tower; None if the model reads only text."""
    extra_layers: int = 0
    """num_nextn_predict_layers of config.json: layers behind the last one, which predict further tokens. Their tensors
    are neither loaded nor exported.
    """

    @property
    def experts(self) -> int:
        """Number of experts per layer; 0 if the model is dense."""
        return self.mixture.experts if self.mixture else 0

    @property
    def experts_per_token(self) -> int:
        """Number of experts that a token is routed to; 0 if the model is dense."""
        return self.mixture.experts_per_token if self.mixture else 0

    def layer_type(self, layer: int) -> LayerType:
        """Return the kind of a layer."""
        return self.layer_types[layer] if self.layer_types else "full_attention"

    def is_mixture(self, layer: int) -> bool:
        """Return whether a layer is a mixture of experts."""
        return self.mixture is not None and layer not in self.mixture.dense_layers


TINY = ModelShape(
    kind="qwen3",
    layers=2,
    hidden=64,
    heads=4,
    groups=2,
    head_dim=16,
    ffn=128,
    vocabulary=384,
    positions=512,
    norm_epsilon=1e-6,
    rope=Rope(theta=10000.0),
    tied=False,
    qk_norm=True,
)
"""The recipes' policy: half a megabyte; it learns one-digit arithmetic with a tool in a minute on two CPU cores."""
TINY_MIXTURE = dataclasses.replace(
    TINY, kind="qwen3_moe", mixture=Mixture(experts=4, experts_per_token=2, expert_ffn=32)
)
"""TINY with four experts per layer, two of them per token."""
TINY_VISION = dataclasses.replace(
    TINY,
    kind="qwen2_5_vl",
    qkv_bias=True,
    qk_norm=False,
    vision=VisionShape(
        layers=2, hidden=64, heads=4, ffn=128, channels=3, patch=14, frames=2, merge=2, window=112, unbounded=(1,),
        token=5, sections=(2, 3, 3),
    ),
)  # fmt: skip
"""TINY with vision."""
TINY_DEEP_VISION = dataclasses.replace(
    TINY,
    kind="qwen3_vl",
    vision=VisionShape(
        layers=3, hidden=64, heads=4, ffn=128, channels=3, patch=16, frames=2, merge=2, positions=16, deep=(1,),
        token=5, sections=(4, 2, 2), interleaved=True,
    ),
)  # fmt: skip
"""TINY with vision that also reaches the decoder behind its first layer."""
TINY_HYBRID = dataclasses.replace(
    TINY,
    kind="qwen3_5_text",
    rope=Rope(theta=10000.0, fraction=0.25),
    layer_types=("linear_attention", "full_attention"),
    linear=LinearAttention(key_heads=2, value_heads=4, key_dim=8, value_dim=8, kernel=4),
)
"""TINY with a gated delta net in its first layer."""
TINY_HYBRID_MIXTURE = dataclasses.replace(
    TINY_HYBRID,
    kind="qwen3_5_moe_text",
    ffn=32,
    mixture=Mixture(experts=4, experts_per_token=2, expert_ffn=32, shared_ffn=32),
)
"""TINY_HYBRID with four experts per layer, two of them per token, and one for every token."""
