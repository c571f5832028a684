"""Train again over the manifests of a run, publishing nothing: the losses must be those of train-steps, bit for bit."""

from __future__ import annotations

import asyncio
from pathlib import Path

from turnlog.infra.role import Role, opened
from turnlog.schemas.events import SampleBatchFormed
from turnlog.settings import Settings
from turnlog.trainer.checkpoint import Cursor
from turnlog.trainer.launch import ranks
from turnlog.trainer.manifests import PARTITION, Manifests, fetch_rows
from turnlog.trainer.plan import learning_plan
from turnlog.trainer.ranks import Ranks
from turnlog.trainer.sharded_state import read_common


def rerun(settings: Settings, checkpoint: Path | None, until: int) -> list[float]:
    """Losses of the batches from the checkpoint's cursor (None: batch 0, from the model folder) up to, not including,
    batch_index `until`, or to the end of sample-batches.

    Not from within an event loop or a process that trains. Raises CheckpointUnusable, CorruptBatch, BatchGap.
    """

    async def run() -> list[float]:
        async with opened("rerun", settings) as role:
            with ranks(learning_plan(settings)) as everyone:
                return await _losses(role, everyone, checkpoint, until)

    return asyncio.run(run())


async def _losses(role: Role, everyone: Ranks, checkpoint: Path | None, until: int) -> list[float]:
    plan = learning_plan(role.settings)
    cursor = Cursor()
    if checkpoint is not None:
        cursor = Cursor(**read_common(checkpoint)["cursor"])
        everyone.restore(checkpoint)
    start = (await role.log.start_offsets([PARTITION]))[PARTITION]
    end = (await role.log.end_offsets([PARTITION]))[PARTITION]
    losses: list[float] = []
    async with role.log.reader() as reader:
        manifests = Manifests(reader, role.events, role.settings.run.id, cursor, start=start)
        while True:
            found = await manifests.next(timeout_s=0.2)
            if found is None and reader.position(PARTITION) >= end:
                return losses
            if found is None:
                continue
            manifest, _ = found
            if manifest.batch_index >= until:
                return losses
            if isinstance(manifest, SampleBatchFormed):
                rows = await fetch_rows(manifest, role.blobs)
                rate = plan.learning_rate(cursor.step + len(losses))
                losses.append(everyone.step(rows, plan.objective, rate).loss)
