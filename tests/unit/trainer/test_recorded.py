"""Experts of a batch, from the samples on the log and their blobs."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import AsyncIterator

import numpy as np
import pytest

from tests.fakes.memory_log import MemoryLog
from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.event_log import EventLog
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.topics_admin import apply
from turnlog.processors.core.experts import packed
from turnlog.schemas.events import BatchSample, Outcome, Purpose, SampleBatchFormed, SegmentSample
from turnlog.schemas.events.samples import ExpertRows
from turnlog.schemas.types import BlobRef, pack_float32s, pack_int32s
from turnlog.settings import Settings
from turnlog.trainer import ExpertsUnfit
from turnlog.trainer.models.experts import RoutedRows, unrouted
from turnlog.trainer.reading.recorded import truncated, with_experts
from turnlog.trainer.reference import synthetic_manifest, synthetic_rows, with_random_experts
from turnlog.trainer.shape import TINY_MIXTURE

ROWS = synthetic_rows(0, rows=4)
IDS = with_random_experts(ROWS, TINY_MIXTURE, 0).experts
NOWHERE = BlobRef(hashlib.sha256(b"").hexdigest(), 0)


@pytest.fixture
async def events() -> AsyncIterator[EventLog]:
    log = MemoryLog()
    await apply(log, Settings())
    async with EventLog.open(log, MemoryRegistry(), writer="test") as events:
        yield events


async def formed(
    events: EventLog, blobs: MemoryBlobs, *, without: int = -1, longer: int = 3, cut_short: int = -1
) -> SampleBatchFormed:
    """The manifest of ROWS, whose samples are on the log and were cut by `longer` tokens; one has no experts, one's
    trajectory was truncated."""
    places: list[BatchSample] = []
    manifest = synthetic_manifest(ROWS, NOWHERE, "run", 0)
    for row, entry in enumerate(manifest.samples):
        start, length = int(ROWS.starts[row]), int(ROWS.lengths[row])
        ids = np.concatenate([IDS[start : start + length - 1], np.zeros((longer, *IDS.shape[1:]), "u1")])
        content, _ = packed(ids.astype("<i4"))
        piece = ExpertRows(await blobs.put(content), 0, len(ids), 0)
        whole = sample(entry, length + longer, () if row == without else (piece,))
        ended = Outcome.truncated if row == cut_short else Outcome.completed
        partition, offset = await events.append(dataclasses.replace(whole, outcome=ended))
        places.append(dataclasses.replace(entry, partition=partition, offset=offset))
    return dataclasses.replace(manifest, samples=tuple(places))


def sample(entry: BatchSample, tokens: int, experts: tuple[ExpertRows, ...]) -> SegmentSample:
    """A sample of context alone."""
    return SegmentSample(
        event_id=entry.sample_id,
        run_id="run",
        group_id=entry.group_id,
        session_id=entry.session_id,
        rollout_id=entry.session_id,
        rollout_index=entry.rollout_index,
        task_id="t",
        sample_id=entry.sample_id,
        purpose=Purpose.train,
        segment_index=0,
        segment_count=1,
        is_anchor=True,
        token_ids=pack_int32s(range(tokens)),
        spans=(),
        logprobs=pack_float32s([]),
        temperature=1.0,
        logprob_kind="at_temperature",
        advantage=0.5,
        reward=1.0,
        outcome=Outcome.completed,
        recipe="calc",
        weight_version_min=0,
        weight_version_max=0,
        experts=experts,
        experts_gap="" if experts else "turn_without_rows",
    )


async def test_each_row_has_the_experts_of_its_sample_as_far_as_it_was_not_cut(events: EventLog) -> None:
    blobs = MemoryBlobs()
    manifest = await formed(events, blobs)
    found = await with_experts(manifest, ROWS, TINY_MIXTURE, events.log, events, blobs)
    assert isinstance(found, RoutedRows)
    inputs = np.ones(len(ROWS.token_ids), bool)
    inputs[ROWS.starts + ROWS.lengths - 1] = False
    assert np.array_equal(found.experts[inputs], IDS[inputs])
    assert found.experts.dtype == np.uint8
    assert not unrouted(found).any()


async def test_a_row_that_has_none_is_unrouted_and_told(events: EventLog, caplog: pytest.LogCaptureFixture) -> None:
    blobs = MemoryBlobs()
    manifest = await formed(events, blobs, without=2)
    found = await with_experts(manifest, ROWS, TINY_MIXTURE, events.log, events, blobs)
    assert unrouted(found).tolist() == [False, False, True, False]
    assert "1 of 4 rows have no recorded experts (turn_without_rows): samples sample-0-002" in caplog.text
    assert isinstance(found, RoutedRows)
    first = int(ROWS.lengths[0])
    assert np.array_equal(found.experts[: first - 1], IDS[: first - 1])


async def test_a_sample_that_is_not_where_the_manifest_says_is_named(events: EventLog) -> None:
    blobs = MemoryBlobs()
    manifest = await formed(events, blobs)
    wrong = dataclasses.replace(manifest.samples[1], sample_id="another")
    manifest = dataclasses.replace(manifest, samples=(manifest.samples[0], wrong, *manifest.samples[2:]))
    with pytest.raises(ExpertsUnfit, match="sample another does not stand at segment-samples"):
        await with_experts(manifest, ROWS, TINY_MIXTURE, events.log, events, blobs)


async def test_each_row_is_truncated_or_not_as_its_sample_says(events: EventLog) -> None:
    manifest = await formed(events, MemoryBlobs(), cut_short=2)
    assert (await truncated(manifest, events.log, events)).tolist() == [False, False, True, False]
