"""Draws that are skipped, weights that go out less often than after every draw, or as adapters alone; in memory."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.batches import append_batches, synthetic_manifest, synthetic_rows
from tests.unit.trainer.test_draws import Run
from turnlog.infra.batch_files import MEDIA_TYPE, CorruptBatch, write_rows
from turnlog.infra.log import Partition
from turnlog.schemas.events import BatchSkipped, StepCompleted, WeightVersionPublished
from turnlog.schemas.topics import STEPS, WEIGHTS
from turnlog.settings import StoreSettings


async def begun(
    folder: Path, *, draws: int, batches: int, parts: int = 1, store: StoreSettings | None = None, **trainer: Any
) -> Run:
    """A run with batches on its log, checkpoints every second step."""
    run = Run(folder, checkpoint_every=2, **trainer)
    run.store = store
    run.settings = dataclasses.replace(run.settings, feeder=dataclasses.replace(run.settings.feeder, draws=draws))
    await run.begin()
    async with run.events() as events:
        await append_batches(events, run.blobs, "run", batches, parts=parts)
    return run


async def written(run: Run, topic: str, kind: type) -> list[Any]:
    """All events of a kind in a topic of one partition."""
    found = []
    async with run.events() as events, events.log.reader() as reader:
        place = Partition(topic, 0)
        end = (await events.log.end_offsets([place]))[place]
        reader.assign({place: 0})
        while reader.position(place) < end:
            found += [await events.decode_known(record) for record in await reader.poll()]
    return [event for event in found if isinstance(event, kind)]


async def steps_of(run: Run) -> list[StepCompleted]:
    return await written(run, STEPS.name, StepCompleted)


async def versions_of(run: Run) -> list[WeightVersionPublished]:
    return await written(run, WEIGHTS.name, WeightVersionPublished)


async def test_adapters_go_out_alone_on_the_weights_that_the_first_incarnation_published(
    tmp_path: Path, store: StoreSettings
) -> None:
    run = await begun(
        tmp_path, draws=1, batches=2, store=store, lora_rank=4, publish="adapter", learning_rate_schedule="constant"
    )  # fmt: skip
    await run.train()
    run.settings = dataclasses.replace(run.settings, feeder=dataclasses.replace(run.settings.feeder, draws=2))
    await run.train()
    versions = await versions_of(run)
    assert [(version.kind, version.base_version, version.step, version.incarnation) for version in versions] == [
        ("full", None, 0, 0),
        ("adapter", 0, 1, 0),
        ("adapter", 0, 1, 1),
        ("adapter", 0, 2, 1),
    ]
    first, again, last = (version.files for version in versions[1:])
    assert first == again != last
    assert {file.name for file in last} == {"adapter_config.json", "adapter_model.safetensors"}


async def test_a_corrupt_batch_ends_the_trainer_and_is_not_skipped(tmp_path: Path) -> None:
    run = await begun(tmp_path, draws=6, batches=1)
    wrong = await run.blobs.put(b"not a batch", media_type=MEDIA_TYPE)
    async with run.events() as events:
        await events.append(synthetic_manifest(synthetic_rows(1), wrong, "run", 1))
    with pytest.raises(CorruptBatch):
        await run.train()
    assert [step.batch_index for step in await steps_of(run)] == [0]


async def test_a_skipped_draw_moves_the_cursor_and_counts_for_no_publication(tmp_path: Path) -> None:
    run = await begun(tmp_path, draws=3, batches=1, publish_every=2)
    skipped = BatchSkipped(
        event_id="skipped", run_id="run", batch_index=1, draw_index=1, reason="nothing left to train", groups=(),
        masked={}, dropped=(), positions=(), settings_sha256="",
    )  # fmt: skip
    async with run.events() as events:
        await events.append(skipped)
        for index in (2, 3):
            rows = synthetic_rows(index)
            file = await run.blobs.put(write_rows(rows), media_type=MEDIA_TYPE)
            await events.append(synthetic_manifest(rows, file, "run", index))
    await run.train()
    assert [(step.batch_index, step.step) for step in await steps_of(run)] == [(0, 1), (2, 2), (3, 3)]
    assert [(version.version, version.batch_index) for version in await versions_of(run)] == [(0, -1), (1, 2), (2, 3)]


async def test_weights_go_out_after_every_second_draw_and_at_the_end(tmp_path: Path, store: StoreSettings) -> None:
    run = await begun(tmp_path, draws=3, batches=6, parts=2, store=store, publish_every=2, delta_chain=1)
    await run.train()
    versions = await versions_of(run)
    assert [(version.version, version.batch_index) for version in versions] == [(0, -1), (1, 3), (2, 5)]
    assert [(version.kind, version.base_version) for version in versions] == [
        ("full", None),
        ("delta", 0),
        ("full", None),
    ]
    assert all(0 <= version.unchanged["published"] <= version.unchanged["bfloat16"] <= 1 for version in versions[1:])
    assert [(step.draw_index, step.batch_index) for step in await steps_of(run)] == [(n // 2, n) for n in range(6)]
