"""Weights go out beside the next step, one version after the other."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from turnlog.infra.blobs import MemoryBlobs, StoreUnavailable
from turnlog.schemas.events import WeightVersionPublished
from turnlog.schemas.types import BlobRef
from turnlog.trainer.checkpoints.cursor import Cursor
from turnlog.trainer.checkpoints.publications import LastExport, PublicationBuilder, Publications, version_event
from turnlog.trainer.weights import write_tensors


class SlowStore(MemoryBlobs):
    """Files are stored once it is let go on, or never."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on, self.is_away = asyncio.Event(), False

    async def put_file(self, path: Path, *, sha256: str = "", media_type: str) -> BlobRef:
        await self.goes_on.wait()
        if self.is_away:
            raise StoreUnavailable("it is away")
        return await super().put_file(path, sha256=sha256, media_type=media_type)


class Rig:
    """Ranks that hold one value, and what came to the log."""

    def __init__(self, folder: Path) -> None:
        self.store, self.log, self.value = SlowStore(), list[WeightVersionPublished](), 0.0
        self.publications = Publications(LastExport(folder, chain=1), folder, self.store, self.call, self.commit)

    async def call(self, _: Any, folder: Any, *given: Any, **named: Any) -> Any:
        return write_tensors(folder, {"weight": torch.full((4,), self.value)})

    async def commit(self, event: WeightVersionPublished) -> None:
        self.log.append(event)

    async def begin(self, version: int) -> WeightVersionPublished:
        """The weights after that many steps fall due."""
        self.value = float(version)
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
    rig.store.goes_on.set()
    await rig.publications.beside(asyncio.get_running_loop().create_future())  # a step that outlasts the upload
    (event,) = rig.log
    assert (event.version, event.checksums) == (1, due.checksums)
    assert [file.name for file in event.files] == ["model.safetensors"]


async def test_none_is_skipped_or_overtaken(rig: Rig) -> None:
    await rig.begin(1)
    second = asyncio.create_task(rig.begin(2))
    await asyncio.wait([second], timeout=0.01)
    assert not second.done()
    rig.store.goes_on.set()
    await second
    await rig.publications.settle()
    assert [event.version for event in rig.log] == [1, 2]
    assert rig.publications.waited_s() > 0.0
    assert rig.publications.waited_s() == 0.0


async def test_frozen_weights_are_known_by_their_checksums(rig: Rig) -> None:
    due = await rig.begin(1)
    assert await rig.publications.holds(due.checksums)
    rig.value = 2.0
    assert not await rig.publications.holds(due.checksums)


async def test_a_store_that_is_away_ends_it_at_the_next_look(rig: Rig) -> None:
    rig.store.is_away = True
    rig.store.goes_on.set()
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
