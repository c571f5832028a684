"""The next batch is read while a step is taken, and nothing else comes of that."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.batches import append_batches, synthetic_rows
from tests.unit.trainer.test_draws import Run
from turnlog.infra.batch_files import CorruptBatch, write_rows
from turnlog.infra.blobs import MemoryBlobs
from turnlog.schemas.types import BlobRef
from turnlog.trainer.launch import Beat, LearnerThread
from turnlog.trainer.learner import Learner
from turnlog.trainer.plan import LearningPlan

PATIENCE_S = 120
BATCHES = 3


class Asked(MemoryBlobs):
    """Says what is fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.kept_back = ""
        """An object that does not come."""

    async def get(self, ref: BlobRef) -> bytes:
        self.of[ref.sha256].set()
        if ref.sha256 == self.kept_back:
            await asyncio.Event().wait()
        return await super().get(ref)


class OneByOne(LearnerThread):
    """Its steps begin when the files of the batches behind them are asked for."""

    def __init__(self, plan: LearningPlan, beat: Beat, asked: list[asyncio.Event]) -> None:
        super().__init__(plan, beat)
        self._asked = asked

    async def call(self, method: Any, *arguments: Any, **named: Any) -> Any:
        if method is Learner.step and self._asked:
            await self._asked.pop(0).wait()
        return await super().call(method, *arguments, **named)


async def begun(folder: Path) -> tuple[Run, Asked, list[str]]:
    """A run of three batches of a draw each, and the names of their files."""
    run, blobs = Run(folder), Asked()
    run.settings = dataclasses.replace(run.settings, feeder=dataclasses.replace(run.settings.feeder, draws=BATCHES))
    run.blobs = blobs
    await run.begin()
    async with run.events() as events:
        await append_batches(events, blobs, "run", BATCHES)
    files = [(await MemoryBlobs().put(write_rows(synthetic_rows(index)))).sha256 for index in range(BATCHES)]
    return run, blobs, files


async def test_the_file_of_the_next_batch_is_fetched_before_the_step_is_over(tmp_path: Path) -> None:
    run, blobs, files = await begun(tmp_path)
    behind = [blobs.of[name] for name in files[1:]]
    async with asyncio.timeout(PATIENCE_S):
        await run.train(lambda plan, beat: OneByOne(plan, beat, behind))
    assert [step.batch_index for step in await run.steps(BATCHES)] == [0, 1, 2]


async def test_what_is_wrong_with_the_next_batch_ends_the_trainer_behind_the_step(tmp_path: Path) -> None:
    run, blobs, files = await begun(tmp_path)
    blobs.objects[files[1]] += b"x"
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(CorruptBatch, match="batch 1"):
            await run.train(lambda plan, beat: OneByOne(plan, beat, [blobs.of[files[1]]]))
    assert [step.batch_index for step in await run.steps(1)] == [0]


async def test_a_kill_while_the_next_batch_is_read_changes_no_step(tmp_path: Path) -> None:
    whole, _, files = await begun(tmp_path / "whole")
    await whole.train()
    run, blobs, _ = await begun(tmp_path / "struck")
    blobs.kept_back = files[2]
    first = asyncio.create_task(run.train())
    async with asyncio.timeout(PATIENCE_S):
        await blobs.of[files[2]].wait()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    blobs.kept_back = ""
    await run.train()
    found = {step.batch_index: step for step in await run.steps(BATCHES) if step.incarnation == 1}
    assert found
    for step in await whole.steps(BATCHES):
        assert step.batch_index not in found or found[step.batch_index].loss == step.loss
    assert max(found) == BATCHES - 1
