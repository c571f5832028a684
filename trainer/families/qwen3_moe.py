"""Qwen3's mixtures of experts. Defaults are those of transformers' Qwen3MoeConfig."""

from __future__ import annotations

from turnlog.trainer.families.family import NO_BIAS, NO_WINDOW, Family

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    qk_norm=True,
    mixture=True,
    only=NO_WINDOW | NO_BIAS | {"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
    also=("num_experts", "norm_topk_prob"),
    absent={
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
)
