"""Reading of weights in MXFP4, where 32 values of four bits share an exponent (OCP Microscaling Formats 1.0, 5)."""

from __future__ import annotations

import torch

from turnlog.trainer import WeightsMismatch

BLOCKS, SCALES = "_blocks", "_scales"
"""Suffixes of the two tensors that stand for one in a folder of gpt-oss."""
POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the lower three bits, an exponent of two bits and a mantissa of one; the fourth bit is the sign."""
BIAS = 127
"""Subtracted from a scale, which is an exponent of 2."""


def dequantize(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Replace each pair NAME_blocks, NAME_scales by NAME in bfloat16, which holds all values of MXFP4 exactly.

    Raises WeightsMismatch for one without the other.
    """
    found = dict(state)
    for name in state:
        if not name.endswith(BLOCKS):
            continue
        plain = name.removesuffix(BLOCKS)
        if plain + SCALES not in state:
            raise WeightsMismatch(f"{name} has no {plain}{SCALES} beside it: fetch the model again")
        found[plain] = values(found.pop(name), found.pop(plain + SCALES)).mT.contiguous()
    return found


def values(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return bfloat16 [..., 32 n] of uint8 blocks [..., n, 16], low bits first, and uint8 scales [..., n]."""
    signed = torch.tensor((*POSITIVE, *(-value for value in POSITIVE)))
    bits = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
    whole = torch.ldexp(signed[bits.int()], scales.int()[..., None] - BIAS)
    return whole.bfloat16().flatten(-2)
