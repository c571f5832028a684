"""Llama 3, 3.1, 3.2 and 3.3. Defaults are those of transformers' LlamaConfig."""

from __future__ import annotations

from turnlog.trainer.families.family import NO_BIAS, Family

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    only=NO_BIAS,
    absent={
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
    },
)
