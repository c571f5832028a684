"""Weights as an event: safetensors files, content-addressed in the store, then WeightVersionPublished naming them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch

from turnlog.infra.blobs import Blobs
from turnlog.schemas.events import WeightVersionPublished
from turnlog.schemas.events.weights import WeightFile
from turnlog.schemas.ids import digest
from turnlog.trainer.checkpoint import Cursor
from turnlog.trainer.model_folder import description, weight_files

SAFETENSORS = "application/vnd.safetensors"
JSON = "application/json"


def checksum(tensor: torch.Tensor) -> str:
    """sha256 of the tensor's little-endian bytes and its shape: "<hex>:2x3"."""
    content = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return f"{hashlib.sha256(content).hexdigest()}:{'x'.join(map(str, tensor.shape))}"


async def upload(tensors: Mapping[str, torch.Tensor], model: Path, blobs: Blobs) -> tuple[WeightFile, ...]:
    """Store the tensors with the config files of the `model` folder; unchanged files keep their names."""
    contents = {**description(model), **dict(weight_files(tensors))}
    media = [JSON if name.endswith(".json") else SAFETENSORS for name in contents]
    puts = [blobs.put(content, media_type=kind) for content, kind in zip(contents.values(), media, strict=True)]
    refs = await asyncio.gather(*puts)
    return tuple(WeightFile(name, ref) for name, ref in zip(contents, refs, strict=True))


def published(
    tensors: Mapping[str, torch.Tensor],
    files: tuple[WeightFile, ...],
    *,
    run_id: str,
    version: int,
    incarnation: int,
    cursor: Cursor,
    checkpoint: Path | None,
) -> WeightVersionPublished:
    """The event of weights that stand at `cursor`."""
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
    return WeightVersionPublished(
        event_id=digest("WeightVersionPublished", run_id, version),
        run_id=run_id,
        version=version,
        step=cursor.step,
        batch_index=cursor.next_batch - 1,
        incarnation=incarnation,
        kind="full",
        base_version=None,
        files=files,
        dtype="+".join(sorted(dtypes)),
        checksums={name: checksum(tensor) for name, tensor in sorted(tensors.items())},
        checkpoint=None if checkpoint is None else str(checkpoint),
    )
