"""Qwen3: RMSNorm over each head of q and k. Defaults are those of transformers' Qwen3Config."""

from __future__ import annotations

from turnlog.trainer.families import qwen2
from turnlog.trainer.families.family import NO_BIAS, NO_WINDOW, Family

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    qk_norm=True,
    only=NO_WINDOW | NO_BIAS,
    absent=qwen2.DEFAULTS | {"head_dim": 128},
    write=qwen2.with_layer_types,
)
