"""Weights as a trainer publishes them, of tensors that a test makes up."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from turnlog.infra.blobs import Blobs
from turnlog.schemas.events import WeightVersionPublished
from turnlog.trainer.checkpoint import Cursor
from turnlog.trainer.weights import LastExport, published, upload, write_tensors


class Publications:
    """What one incarnation of a trainer publishes, in the store."""

    def __init__(self, blobs: Blobs, model: Path, exports: Path, *, chain: int, run_id: str = "run") -> None:
        self._blobs, self._model, self._run_id = blobs, model, run_id
        self._exported = LastExport(exports, chain=chain)

    async def version(self, tensors: Mapping[str, torch.Tensor], number: int) -> WeightVersionPublished:
        """The next one."""
        folder = self._exported.begun(number)
        written = write_tensors(folder, tensors)
        difference = self._exported.difference(folder, written)
        files = difference.files if difference and difference.files else written.sha256
        stored = await upload(folder, files, self._model, self._blobs)
        self._exported.keep(number, folder, written, difference)
        return published(
            written,
            stored,
            run_id=self._run_id,
            version=number,
            incarnation=0,
            cursor=Cursor(next_batch=number, step=number),
            checkpoint=None,
            difference=difference,
        )


async def version(
    tensors: Mapping[str, torch.Tensor], number: int, blobs: Blobs, model: Path, *, run_id: str = "run"
) -> WeightVersionPublished:
    """Full weights, in the store."""
    with tempfile.TemporaryDirectory() as folder:
        return await Publications(blobs, model, Path(folder), chain=0, run_id=run_id).version(tensors, number)
