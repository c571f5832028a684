"""Versions in bfloat16 of which small shares of the values changed, through the store: what is written, uploaded,
fetched and applied, in bytes and seconds, beside a whole copy (part of W1)."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
from pathlib import Path
from typing import Any

import torch
from row import say

from tests.tiny_model import make_tiny_model
from turnlog.infra.s3 import S3Blobs
from turnlog.infra.tensors import deltas
from turnlog.infra.tensors.versions import Timer, WeightFolders
from turnlog.schemas.events import WeightFile, WeightVersionPublished
from turnlog.settings import StoreSettings
from turnlog.trainer import weights
from turnlog.trainer.checkpoints.exports import LastExport
from turnlog.trainer.checkpoints.places import RunBlobs
from turnlog.trainer.families.family import read_shape
from turnlog.trainer.manifests import Cursor
from turnlog.trainer.weight_records import WeightDelta, version_event

SHARES = (0.01, 0.03)
"""Of the values that an update changes (docs/sizing.md)."""
CHAIN = 8


def random_tensors(folder: Path, parameters: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a random model in bfloat16, and write its other files to the folder `model`."""
    tiny = make_tiny_model(folder / "tiny")
    shape = read_shape(tiny)
    if parameters:
        shape = dataclasses.replace(shape, hidden=1024, ffn=4096, layers=max(1, parameters // (12 << 20)))
        torch.manual_seed(0)
    sizes = weights.expected_shapes(shape)
    return {name: (torch.randn(dims) * 0.02).bfloat16() for name, dims in sizes.items()}


def change(tensors: dict[str, torch.Tensor], share: float) -> None:
    """Change a random share of the values, each up or down by one unit in its last place, as small steps do."""
    for tensor in tensors.values():
        drawn = torch.rand(tensor.shape)
        tensor.view(torch.int16).add_((drawn < share / 2).short() - (drawn > 1 - share / 2).short())


class StoredVersions:
    """Versions of one model, one after another, as a training rank publishes its files and a loader fetches them."""

    def __init__(self, folder: Path, store: StoreSettings, blobs: S3Blobs) -> None:
        self._folder, self._uploads, self._blobs = folder, RunBlobs(store), blobs
        self._last = LastExport(chain=CHAIN)
        self._folders = WeightFolders(folder / "weights", blobs)
        self._events: list[WeightVersionPublished] = []

    async def take(self, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Publish the tensors and fetch them; return bytes and seconds of each phase."""
        number, timer = len(self._events), Timer()
        folder = self._folder / "exports" / str(number)
        folder.mkdir(parents=True)
        with timer.phase("export"):
            written = weights.write_tensors(folder, tensors)
        with timer.phase("write"):
            base, changed, unchanged = self._last.difference(folder, written.sha256)
        files = {folder / name: sha256 for name, sha256 in written.sha256.items() if name not in changed}
        files |= {folder / (name + deltas.SUFFIX): "" for name in changed}
        with timer.phase("upload"):
            sent = await asyncio.to_thread(self._uploads.put_files, files, "")
        self._last.keep(number, folder, written.sha256)
        changes = frozenset(name + deltas.SUFFIX for name in changed)
        event = version_event(
            written, tuple(WeightFile(name, ref) for name, ref in sent.items()), run_id="bench", version=number,
            incarnation=0, cursor=Cursor(), checkpoint=None,
            difference=None if base is None else WeightDelta(base, changes, unchanged.shares()),
        )  # fmt: skip
        self._events.append(event)
        (await self._folders.obtain_folder(self._events, timer)).release()
        return {
            "kind": event.kind, "bytes": sum(one.blob.size for one in event.files),
            "seconds": {name: round(taken, 4) for name, taken in timer.seconds.items()},
            "unchanged": {name: round(share, 4) for name, share in event.unchanged.items()},
        }  # fmt: skip


async def changed_versions(folder: Path, store: StoreSettings, blobs: S3Blobs, parameters: int) -> dict[str, Any]:
    """Return figures of a whole copy, and of versions of which each of SHARES changed."""
    own = folder / "deltas"
    own.mkdir()
    tensors = random_tensors(own, parameters)
    versions = StoredVersions(own, store, blobs)
    found = {"whole": await versions.take(tensors)}
    for share in SHARES:
        change(tensors, share)
        found[f"{share:.0%}"] = await versions.take(tensors)
    for name, of in found.items():
        of["share_of_bytes"] = round(of["bytes"] / found["whole"]["bytes"], 4)
        say(f"version in bfloat16, {name}: {of}")
    shutil.rmtree(own)
    return found
