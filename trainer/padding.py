"""Rows as right-padded tensors: position t predicts token t + 1, so token columns are shifted by one here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from turnlog.processors.core.batches.rows import BatchRows
from turnlog.trainer.microbatches import Microbatch


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """b rows, s = longest length - 1 positions. Padding carries weight 0."""

    inputs: torch.Tensor
    """[b, s] int64"""
    targets: torch.Tensor
    """[b, s] int64, the token after each input"""
    positions: torch.Tensor
    """[b, s] int64"""
    trained: torch.Tensor
    """[b, s] bool"""
    recorded: torch.Tensor
    """[b, s] float32, the engine's log-prob of the target"""
    advantages: torch.Tensor
    """[b, s] float32"""
    weights: torch.Tensor
    """[b, s] float32, 1 / weight_divisor where trained"""
    temperature: torch.Tensor
    """[b] float32"""


def padded(rows: BatchRows, microbatch: Microbatch, device: torch.device) -> PaddedRows:
    """The rows of one microbatch. A trained first token, which nothing predicts, is left out; `step` then finds the
    books off."""
    if not microbatch:
        return _stand_in(device)
    index = np.asarray(microbatch)
    starts, lengths = rows.starts[index], rows.lengths[index].astype(np.int64)
    width = max(2, int(lengths.max()))
    columns = np.arange(width)
    real = columns < lengths[:, None]
    at = np.where(real, starts[:, None] + columns, 0)

    def table(values: np.ndarray[tuple[int, ...], np.dtype[np.generic]], dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(np.where(real, values[at], values.dtype.type(0))).to(dtype)

    trained = table(rows.trained, torch.bool)
    tokens = table(rows.token_ids, torch.int64)
    share = torch.from_numpy(1.0 / rows.weight_divisor[index]).to(torch.float32)
    return PaddedRows(
        inputs=tokens[:, :-1].contiguous().to(device),
        targets=tokens[:, 1:].contiguous().to(device),
        positions=torch.arange(width - 1).expand(len(microbatch), -1).contiguous().to(device),
        trained=trained[:, 1:].to(device),
        recorded=table(rows.logprobs, torch.float32)[:, 1:].to(device),
        advantages=table(rows.advantages, torch.float32)[:, 1:].to(device),
        weights=(trained[:, 1:] * share[:, None]).to(device),
        temperature=torch.from_numpy(rows.temperature[index].astype(np.float32)).to(device),
    )


def _stand_in(device: torch.device) -> PaddedRows:
    """One row of one position and weight 0."""
    integers = torch.zeros((1, 1), dtype=torch.int64, device=device)
    floats = torch.zeros((1, 1), dtype=torch.float32, device=device)
    return PaddedRows(
        inputs=integers,
        targets=integers,
        positions=integers,
        trained=integers.bool(),
        recorded=floats,
        advantages=floats,
        weights=floats,
        temperature=torch.ones(1, device=device),
    )
