"""Weights as a trainer publishes them, of tensors that a test makes up."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from turnlog.infra.blobs import Blobs
from turnlog.schemas.events import WeightVersionPublished
from turnlog.trainer.checkpoint import Cursor
from turnlog.trainer.weights import published, upload, write_tensors


async def version(
    tensors: Mapping[str, torch.Tensor], number: int, blobs: Blobs, model: Path, *, run_id: str = "run"
) -> WeightVersionPublished:
    """Full weights, in the store."""
    with tempfile.TemporaryDirectory() as folder:
        written = write_tensors(Path(folder), tensors)
        files = await upload(Path(folder), written, model, blobs)
    cursor = Cursor(next_batch=number, step=number)
    return published(written, files, run_id=run_id, version=number, incarnation=0, cursor=cursor, checkpoint=None)
