"""Weights go out beside the next step, one version after the other."""

from __future__ import annotations

import asyncio
import functools
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from turnlog.infra.blobs import MemoryBlobs, StoreUnavailable
from turnlog.infra.tensors.files import TensorSpec, Written
from turnlog.schemas.events import WeightFile, WeightVersionPublished
from turnlog.schemas.types import BlobRef
from turnlog.trainer import ExportFailed
from turnlog.trainer.checkpoints.exports import ExportedVersion
from turnlog.trainer.checkpoints.publications import PublicationBuilder, Publications
from turnlog.trainer.checkpoints.state import unwritten
from turnlog.trainer.manifests import Cursor
from turnlog.trainer.weight_records import version_event
from turnlog.trainer.weights import write_tensors


class Ranks:
    """Ranks that hold one value, and finish an export once they are let go on, or never."""

    def __init__(self) -> None:
        self.goes_on, self.is_away, self.value = asyncio.Event(), False, 0.0
        self._folder = Path()

    async def call(self, method: Any, *given: Any) -> Any:
        return await getattr(self, method.__name__)(*given)

    async def begin_export(self, folder: Path, *_: Any) -> list[TensorSpec]:
        try:
            self._written = self._write(folder)
        except OSError as error:
            raise ExportFailed(unwritten(folder, error)) from error
        return list(self._written.specs)

    def _write(self, folder: Path) -> Written:
        folder.mkdir(parents=True, exist_ok=True)
        return write_tensors(folder, self._tensors())

    async def find_export(self, _: float) -> ExportedVersion:
        await self.goes_on.wait()
        if self.is_away:
            raise StoreUnavailable("it is away")
        stored = [WeightFile(name, BlobRef(sha256, 1)) for name, sha256 in self._written.sha256.items()]
        return ExportedVersion(self._written, tuple(stored), None)

    async def finish_export(self, _: bool) -> ExportedVersion:
        return await self.find_export(0.0)

    async def checksums(self, _: str) -> dict[str, str]:
        with tempfile.TemporaryDirectory() as folder:
            return write_tensors(Path(folder), self._tensors()).checksums

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {"weight": torch.full((4,), self.value)}


class Rig:
    """A publisher of such ranks, and what came to the log."""

    def __init__(self, folder: Path) -> None:
        self.ranks, self.log = Ranks(), list[WeightVersionPublished]()
        call = self.ranks.call
        self.publications = Publications(folder, folder, MemoryBlobs(), call, call, self.commit)

    async def commit(self, event: WeightVersionPublished) -> None:
        self.log.append(event)

    async def begin(self, version: int) -> WeightVersionPublished:
        """The weights after that many steps fall due."""
        self.ranks.value = float(version)
        cursor = Cursor(next_batch=version, step=version)
        said: PublicationBuilder = functools.partial(
            version_event, run_id="r", version=version, incarnation=0, cursor=cursor, checkpoint=None
        )
        return await self.publications.begin(version, said)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    rig = Rig(tmp_path)
    async with rig.publications:
        yield rig


async def test_a_step_is_taken_while_weights_go_out(rig: Rig) -> None:
    due = await rig.begin(1)
    assert (due.version, due.step, due.batch_index, due.files) == (1, 1, 0, ())
    step = asyncio.get_running_loop().create_future()
    step.set_result(None)
    await rig.publications.beside(step)
    assert rig.log == []
    rig.ranks.goes_on.set()
    await rig.publications.beside(asyncio.get_running_loop().create_future())  # a step that outlasts the upload
    (event,) = rig.log
    assert (event.version, due.checksums, list(event.checksums)) == (1, {}, ["weight"])
    assert [file.name for file in event.files] == ["model.safetensors"]


async def test_none_is_skipped_or_overtaken(rig: Rig) -> None:
    await rig.begin(1)
    second = asyncio.create_task(rig.begin(2))
    await asyncio.wait([second], timeout=0.01)
    assert not second.done()
    rig.ranks.goes_on.set()
    await second
    await rig.publications.settle()
    assert [event.version for event in rig.log] == [1, 2]
    assert rig.publications.waited_s() > 0.0
    assert rig.publications.waited_s() == 0.0


async def test_frozen_weights_are_known_by_their_checksums(rig: Rig) -> None:
    rig.ranks.goes_on.set()
    await rig.begin(1)
    await rig.publications.settle()
    assert await rig.publications.holds(rig.log[0].checksums)
    rig.ranks.value = 2.0
    assert not await rig.publications.holds(rig.log[0].checksums)


async def test_a_store_that_is_away_ends_it_at_the_next_look(rig: Rig) -> None:
    rig.ranks.is_away = True
    rig.ranks.goes_on.set()
    await rig.begin(1)
    with pytest.raises(StoreUnavailable):
        await rig.publications.beside(asyncio.get_running_loop().create_future())
    assert rig.log == []


async def test_what_is_under_way_at_an_early_end_is_given_up(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    async with rig.publications:
        await rig.begin(1)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert rig.log == []
