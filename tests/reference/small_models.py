"""One small model of every built-in family, by model_type."""

from __future__ import annotations

from dataclasses import replace

from turnlog.trainer.families.family import family
from turnlog.trainer.families.shape import (
    TINY,
    TINY_DEEP_VISION,
    TINY_HYBRID,
    TINY_HYBRID_MIXTURE,
    TINY_MIXTURE,
    TINY_VISION,
    LatentAttention,
    LinearScaling,
    Mixture,
    ModelShape,
    QueryGrowth,
    Rope,
    SigmoidRouting,
    SlidingWindow,
    YarnScaling,
)

WINDOW = SlidingWindow(size=8)


def _decoder(kind: str) -> ModelShape:
    """Return a plain decoder with the biases and norms of its family."""
    own = family(kind)
    return replace(TINY, kind=kind, qkv_bias=own.qkv_bias, qk_norm=own.qk_norm)


MISTRAL = replace(_decoder("mistral"), layer_types=("sliding_attention", "sliding_attention"), sliding=WINDOW)
MINISTRAL = replace(_decoder("ministral"), layer_types=("sliding_attention", "full_attention"), sliding=WINDOW)
MINISTRAL3 = replace(
    _decoder("ministral3"),
    rope=Rope(theta=1000.0, scaling=YarnScaling(factor=4.0, original=8, shares=(1.0, 1.0))),
    growth=QueryGrowth(beta=0.5, original=8),
)
GEMMA3 = replace(
    _decoder("gemma3_text"),
    rope=Rope(theta=10000.0, scaling=LinearScaling(factor=8.0)),
    tied=True,
    layer_types=("sliding_attention", "full_attention"),
    sliding=replace(WINDOW, rope=Rope(theta=1000.0)),
    attention_scale=24**-0.5,
)
GPT_OSS = replace(
    _decoder("gpt_oss"),
    ffn=32,
    rope=Rope(theta=150000.0, scaling=YarnScaling(factor=4.0, original=64, truncate=False)),
    layer_types=("sliding_attention", "full_attention"),
    sliding=WINDOW,
    mixture=Mixture(experts=4, experts_per_token=2, expert_ffn=32),
)
_SIGMOID = Mixture(
    experts=8,
    experts_per_token=4,
    expert_ffn=32,
    dense_layers=(0,),
    shared_ffn=32,
    sigmoid=SigmoidRouting(factor=2.5),
)
SIGMOID = replace(
    TINY, kind="glm4_moe", layers=4, qkv_bias=True, rope=Rope(theta=10000.0, fraction=0.5), mixture=_SIGMOID
)
LATENT = replace(
    TINY,
    kind="deepseek_v3",
    layers=4,
    groups=4,
    head_dim=8,
    qk_norm=False,
    rope=Rope(theta=10000.0, scaling=YarnScaling(factor=4.0, original=16, shares=(1.0, 1.0))),
    mixture=replace(_SIGMOID, sigmoid=SigmoidRouting(factor=2.5, groups=4, groups_per_token=2)),
    latent=LatentAttention(q_rank=40, kv_rank=24, unrotated=16, value=20),
)
LATENT_LITE = replace(LATENT, kind="glm4_moe_lite", rope=TINY.rope, mixture=_SIGMOID)
"""Small models of GLM-4.5's, of DeepSeek-V3's and of GLM-4.7-Flash's kind: four layers, of which the first is dense."""
SMALL = {
    shape.kind: shape
    for shape in (
        *(_decoder(kind) for kind in ("llama", "qwen2")),
        *(TINY, TINY_MIXTURE, TINY_VISION, TINY_DEEP_VISION, TINY_HYBRID, TINY_HYBRID_MIXTURE),
        *(replace(TINY_HYBRID, kind="qwen3_5"), replace(TINY_HYBRID_MIXTURE, kind="qwen3_5_moe")),
        *(MISTRAL, MINISTRAL, MINISTRAL3, GEMMA3, GPT_OSS),
        *(SIGMOID, LATENT, replace(LATENT, kind="kimi_k2"), LATENT_LITE),
    )
}
"""model_type -> model."""


def model_of(layout: str) -> str:
    """Return the model_type of a layout of tests.reference.layouts by name."""
    words = layout.partition(":")[0].split("-")
    named = [word for word in words if word in SMALL]
    if named:
        return named[0]
    if "images" in words:
        return "qwen2_5_vl"
    return "qwen3_moe" if "replay" in words or any(word[:2] == "ep" for word in words) else "qwen3"
