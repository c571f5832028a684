"""Small models with sliding windows, one of each family, and random weights for them."""

from __future__ import annotations

from dataclasses import replace

import torch

from turnlog.trainer.families.shape import TINY, Mixture, ModelShape, Rope, SlidingWindow, YarnScaling
from turnlog.trainer.weights import Tensors, expected_shapes

WINDOW = SlidingWindow(size=8)
MISTRAL = replace(
    TINY, kind="mistral", qk_norm=False, layer_types=("sliding_attention", "sliding_attention"), sliding=WINDOW
)
GEMMA3 = replace(
    TINY,
    kind="gemma3_text",
    tied=True,
    layer_types=("sliding_attention", "full_attention"),
    sliding=replace(WINDOW, rope=Rope(theta=1000.0)),
    attention_scale=24**-0.5,
)
GPT_OSS = replace(
    TINY,
    kind="gpt_oss",
    qk_norm=False,
    qkv_bias=True,
    ffn=32,
    rope=Rope(theta=150000.0, scaling=YarnScaling(factor=4.0, original=64, truncate=False)),
    layer_types=("sliding_attention", "full_attention"),
    sliding=WINDOW,
    mixture=Mixture(experts=4, experts_per_token=2, expert_ffn=32),
)


def weights_of(shape: ModelShape, seed: int) -> Tensors:
    """Return weights of which no norm, bias or sink is trivial."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(size, generator=generator) * (0.05 if len(size) > 1 else 0.3)
        for name, size in expected_shapes(shape).items()
    }
