"""Low-rank adapters in the layout of PEFT, which SGLang loads: FILE with the factors of each matrix, CONFIG beside it.

Sources: peft 0.17, `peft_model.py` (save_pretrained) and `tuners/lora/config.py`; sglang 0.5.21, `srt/lora/lora.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

PREFIX, WEIGHT = "base_model.model.", ".weight"
A, B = ".lora_A.weight", ".lora_B.weight"
"""Suffixes of the factors' names, with shapes [rank, in] and [out, rank]."""
STEM = "adapter_model"
CONFIG = "adapter_config.json"
DENSE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Matrices of a decoder layer that have adapters. In a mixture of experts only those of attention have."""
ATTENTION = DENSE[:4]
OUTPUT = ("lm_head",)
"""The output layer, which only adapters of tenants (turnlog.trainer.tenants) change."""


def factors_of(matrix: str) -> tuple[str, str]:
    """Return the names of A and B for the matrix that a Hugging Face folder names NAME.weight."""
    stem = PREFIX + matrix.removesuffix(WEIGHT)
    return stem + A, stem + B


def config_json(rank: int, alpha: float, names: Iterable[str]) -> bytes:
    """Return the content of CONFIG for an adapter with these tensors. Its product is scaled by alpha / rank."""
    found = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": sorted({name.removesuffix(A).removesuffix(B).rpartition(".")[2] for name in names}),
    }
    return json.dumps(found, indent=2, sort_keys=True).encode()


def expected_tensors(
    model: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Return the tensors, name -> shape, that an adapter with the tensors `found` must have for the model's tensors
    `model`: both factors of each matrix, with the same rank."""
    wanted = dict[str, tuple[int, ...]]()
    for matrix, size in model.items():
        a, b = factors_of(matrix)
        if len(size) == 2 and (a in found or b in found):
            rank = found[a][0] if a in found else found[b][-1]
            wanted |= {a: (rank, size[1]), b: (size[0], rank)}
    return wanted
