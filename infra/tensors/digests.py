"""Digests of tensors, computed where the tensors are: on the trainer's devices before a version is announced, and on
the engine's after it was loaded.

A digest has 64 bits. It finds every error of a transfer or a load (a changed byte always, other changes with a
probability of 1 - 2^-64); it is no protection against somebody who forges weights. For that, durable copies have
sha256.

A bucket is a buffer of bytes in which every tensor begins at a multiple of ROW, with zeros behind it. Each row of ROW
signed bytes is multiplied by a fixed matrix [ROW, COLUMNS] of odd numbers, exactly, in int32 (torch._int_mm, which runs
on tensor cores). The results are summed over the rows of a tensor with an odd weight for each row, modulo 2^64, and
mixed by the finalizer of splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014). Sums of
integers do not depend on their order, so every device computes the same digest.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from turnlog.infra.tensors.files import DTYPES, TensorSpec, checksum

ROW = 4096
"""Bytes of a row; tensors begin at multiples of it."""
COLUMNS = 16
LEAST_ROWS = 24
"""torch._int_mm takes no fewer rows than 17 on CUDA."""
CHUNK_ROWS = 1 << 14
"""Rows that are computed at once, which bounds the memory beside the bucket."""
GOLDEN = 0x9E3779B97F4A7C15


def bucket_offsets(specs: Sequence[TensorSpec]) -> list[int]:
    """Return the offset in bytes of each tensor in a bucket, and the size of the bucket behind them."""
    offsets = [0]
    for spec in specs:
        offsets.append(offsets[-1] + -(-spec.nbytes // ROW) * ROW)
    return offsets


def bucket_tensors(specs: Sequence[TensorSpec], bucket: torch.Tensor) -> list[torch.Tensor]:
    """Return each tensor as a view of the bucket, a uint8 tensor [bytes]."""
    return [
        bucket[offset : offset + spec.nbytes].view(getattr(torch, DTYPES[spec.code])).view(spec.shape)
        for spec, offset in zip(specs, bucket_offsets(specs), strict=False)
    ]


def bucket_digests(specs: Sequence[TensorSpec], bucket: torch.Tensor) -> list[str]:
    """Return "HEX:SHAPE" of each tensor in the bucket, a uint8 tensor [bytes] on any device, whose bytes between
    tensors are zeros.

    The host waits once for the device.
    """
    counts = torch.tensor([-(-spec.nbytes // ROW) for spec in specs])
    starts = torch.cumsum(counts, 0) - counts
    rows = int(counts.sum())
    of_row = torch.repeat_interleave(torch.arange(len(specs)), counts)
    within = (torch.arange(rows) - starts[of_row]).to(bucket.device)
    of_row = of_row.to(bucket.device)
    sums = torch.zeros((len(specs), COLUMNS), dtype=torch.int64, device=bucket.device)
    signed = bucket[: rows * ROW].view(torch.int8).view(rows, ROW)
    for begin in range(0, rows, CHUNK_ROWS):
        end = min(begin + CHUNK_ROWS, rows)
        products = _multiply(signed[begin:end])
        sums.index_add_(0, of_row[begin:end], products.long() * _row_weights(within[begin:end])[:, None])
    return [
        checksum(f"{_mix_columns(columns):016x}", spec.shape)
        for columns, spec in zip(sums.tolist(), specs, strict=True)
    ]


def _multiply(rows: torch.Tensor) -> torch.Tensor:
    matrix = _matrix(rows.device)
    if len(rows) >= LEAST_ROWS:
        return torch._int_mm(rows, matrix)
    padded = torch.zeros((LEAST_ROWS, ROW), dtype=torch.int8, device=rows.device)
    padded[: len(rows)] = rows
    return torch._int_mm(padded, matrix)[: len(rows)]


@functools.lru_cache(maxsize=8)
def _matrix(device: torch.device) -> torch.Tensor:
    """Return the matrix [ROW, COLUMNS] of odd numbers from -127 to 127. It is part of the protocol."""
    values = [(_mix(place) % 128) * 2 - 127 for place in range(ROW * COLUMNS)]
    return torch.tensor(values, dtype=torch.int8).view(ROW, COLUMNS).to(device)


def _row_weights(within: torch.Tensor) -> torch.Tensor:
    """Return an odd weight for each number of a row within its tensor."""
    values = within * _as_signed(GOLDEN)
    values = (values ^ ((values >> 30) & ((1 << 34) - 1))) * _as_signed(0xBF58476D1CE4E5B9)
    return values | 1


def _mix_columns(columns: Sequence[int]) -> int:
    found = 0
    for column in columns:
        found = _mix((found ^ column) & (2**64 - 1))
    return found


def _mix(value: int) -> int:
    value = (value + GOLDEN) % 2**64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)


def _as_signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
