"""Reading of weights in MXFP4, where 32 values of four bits share an exponent (OCP Microscaling Formats 1.0, 5)."""

from __future__ import annotations

import functools
from typing import Any

import torch

from turnlog.trainer import WeightsMismatch
from turnlog.trainer.families.tensors import ByExpert

BLOCKS, SCALES = "_blocks", "_scales"
"""Suffixes of the two tensors that stand for one in a folder of gpt-oss."""
POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the lower three bits, an exponent of two bits and a mantissa of one; the fourth bit is the sign."""
BIAS = 127
"""Subtracted from a scale, which is an exponent of 2."""


def dequantize(state: dict[str, Any]) -> dict[str, Any]:
    """Replace each pair NAME_blocks, NAME_scales, of all experts, by NAME in bfloat16, which holds all values of MXFP4
    exactly; each expert's are computed as they are taken.

    Raises WeightsMismatch for one without the other.
    """
    found = dict(state)
    for name in state:
        if not name.endswith(BLOCKS):
            continue
        plain = name.removesuffix(BLOCKS)
        if plain + SCALES not in state:
            raise WeightsMismatch(f"{name} has no {plain}{SCALES} beside it: fetch the model again")
        blocks, scales = found.pop(name), found.pop(plain + SCALES)
        experts, rows, groups, half = blocks.shape
        shape = (experts, groups * 2 * half, rows)
        found[plain] = ByExpert(shape, torch.bfloat16, functools.partial(_of_expert, blocks, scales))
    return found


def _of_expert(blocks: torch.Tensor, scales: torch.Tensor, expert: int) -> torch.Tensor:
    return values(blocks[expert], scales[expert]).mT


def values(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return bfloat16 [..., 32 n] of uint8 blocks [..., n, 16], low bits first, and uint8 scales [..., n]."""
    signed = torch.tensor((*POSITIVE, *(-value for value in POSITIVE)))
    bits = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
    whole = torch.ldexp(signed[bits.int()], scales.int()[..., None] - BIAS)
    return whole.bfloat16().flatten(-2)
