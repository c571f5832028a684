"""Low-rank adapters as PEFT lays them out, which SGLang loads: FILE with the factors of each matrix, CONFIG beside it.

Sources: peft 0.17, `peft_model.py` (save_pretrained) and `tuners/lora/config.py`; sglang 0.5.21, `srt/lora/lora.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

PREFIX, WEIGHT = "base_model.model.", ".weight"
A, B = ".lora_A.weight", ".lora_B.weight"
"""[rank, in] and [out, rank]"""
STEM = "adapter_model"
CONFIG = "adapter_config.json"
DENSE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Matrices of a decoder layer that have adapters; of a mixture of experts those of attention alone."""
ATTENTION = DENSE[:4]


def factors_of(matrix: str) -> tuple[str, str]:
    """Names of A and B of what a Hugging Face folder calls NAME.weight."""
    stem = PREFIX + matrix.removesuffix(WEIGHT)
    return stem + A, stem + B


def config_json(rank: int, alpha: float, names: Iterable[str]) -> bytes:
    """CONFIG of an adapter with these tensors; what it adds is multiplied by alpha / rank."""
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


def expected(model: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """What an adapter with the tensors `found`, name -> shape, must hold where `model` says what it adapts: both
    factors of each matrix, of one rank."""
    wanted = dict[str, tuple[int, ...]]()
    for matrix, size in model.items():
        a, b = factors_of(matrix)
        if len(size) == 2 and (a in found or b in found):
            rank = found[a][0] if a in found else found[b][-1]
            wanted |= {a: (rank, size[1]), b: (size[0], rank)}
    return wanted
