"""Weights as a trainer publishes them, of tensors that a test makes up."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from turnlog.infra.blobs import Blobs
from turnlog.infra.tensors import adapters, deltas
from turnlog.schemas.events import WeightFile, WeightVersionPublished
from turnlog.trainer.checkpoints.exports import LastExport
from turnlog.trainer.checkpoints.places import MEDIA
from turnlog.trainer.manifests import Cursor
from turnlog.trainer.weight_records import WeightDelta, description, version_event
from turnlog.trainer.weights import write_tensors


async def upload(folder: Path, names: Iterable[str], model: Path, blobs: Blobs) -> tuple[WeightFile, ...]:
    """Files of the folder in the store, with the config files of the `model` folder; an adapter has its own."""
    config = {} if adapters.CONFIG in names else description(model)
    beside = [WeightFile(name, await blobs.put(content)) for name, content in config.items()]
    return (
        *beside,
        *[WeightFile(name, await blobs.put_file(folder / name, media_type=MEDIA[Path(name).suffix])) for name in names],
    )


class Publications:
    """What one incarnation of a trainer publishes, in the store."""

    def __init__(self, blobs: Blobs, model: Path, exports: Path, *, chain: int, run_id: str = "run") -> None:
        self._blobs, self._model, self._run_id = blobs, model, run_id
        self._exports, self._last = exports, LastExport(chain=chain)

    async def version(self, tensors: Mapping[str, torch.Tensor], number: int) -> WeightVersionPublished:
        """The next one."""
        folder = self._exports / str(number)
        folder.mkdir(parents=True)
        written = write_tensors(folder, tensors)
        base, changed, unchanged = self._last.difference(folder, written.sha256)
        changes = {name: name + deltas.SUFFIX for name in changed}
        stored = await upload(folder, [changes.get(name, name) for name in written.sha256], self._model, self._blobs)
        self._last.keep(number, folder, written.sha256)
        difference = None if base is None else WeightDelta(base, frozenset(changes.values()), unchanged.shares())
        return version_event(
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


async def adapter(
    matrices: Mapping[str, torch.Tensor], number: int, blobs: Blobs, *, adapts: int, seed: int = 0, run_id: str = "run"
) -> WeightVersionPublished:
    """A random one of rank 1 for these matrices, in the store, that rests on the version `adapts`."""
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    for name, matrix in matrices.items():
        a, b = adapters.factors_of(name)
        tensors[a] = torch.randn(1, matrix.shape[1], generator=generator) / matrix.shape[1] ** 0.5
        tensors[b] = torch.randn(matrix.shape[0], 1, generator=generator)
    with tempfile.TemporaryDirectory() as folder:
        written = write_tensors(Path(folder), tensors)
        (file,) = (Path(folder) / name for name in written.sha256)
        file.rename(file.with_stem(adapters.STEM))
        (Path(folder) / adapters.CONFIG).write_bytes(adapters.config_json(1, 1.0, tensors))
        files = {f"{adapters.STEM}.safetensors": "", adapters.CONFIG: ""}
        stored = await upload(Path(folder), files, Path(folder), blobs)
    return version_event(
        dataclasses.replace(written, sha256=files),
        stored,
        run_id=run_id,
        version=number,
        incarnation=0,
        cursor=Cursor(next_batch=number, step=number),
        checkpoint=None,
        adapts=adapts,
    )
