"""Experts and images of a batch, from the samples on the log and their blobs."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.fakes.batches import synthetic_manifest, synthetic_rows, with_random_experts
from tests.fakes.memory_log import MemoryLog
from tests.fakes.pictures import encoded, painted
from tests.tiny_model import make_tiny_vision
from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.event_log import EventLog
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.topics_admin import apply
from turnlog.processors.core.experts import pack_experts
from turnlog.schemas.events import BatchSample, Outcome, Purpose, SampleBatchFormed, SegmentSample
from turnlog.schemas.events.samples import ExpertRows
from turnlog.schemas.events.turns import ImageRef
from turnlog.schemas.types import BlobRef, pack_float32s, pack_int32s
from turnlog.settings import Settings
from turnlog.trainer import ExpertsUnfit, ImagesUnfit
from turnlog.trainer.batches import read_truncation_flags, with_experts, with_pictures
from turnlog.trainer.families.shape import TINY_MIXTURE, TINY_VISION
from turnlog.trainer.models.experts import RoutedRows, unrouted_rows
from turnlog.trainer.models.vision import PicturedRows, lay_out_images

ROWS = with_random_experts(synthetic_rows(0, rows=4), TINY_MIXTURE, 0)
IDS = ROWS.experts
NOWHERE = BlobRef(hashlib.sha256(b"").hexdigest(), 0)


@pytest.fixture
async def events() -> AsyncIterator[EventLog]:
    log = MemoryLog()
    await apply(log, Settings())
    async with EventLog.open(log, MemoryRegistry(), writer="test") as events:
        yield events


async def formed(
    events: EventLog,
    blobs: MemoryBlobs,
    rows: RoutedRows = ROWS,
    file: BlobRef = NOWHERE,
    index: int = 0,
    *,
    without: int = -1,
    longer: int = 3,
    cut_short: int = -1,
) -> SampleBatchFormed:
    """The manifest of `rows`, whose samples are on the log and were cut by `longer` tokens; one has no experts, like
    unrouted ones, one's trajectory was truncated."""
    places: list[BatchSample] = []
    manifest = synthetic_manifest(rows, file, "run", index)
    for row, entry in enumerate(manifest.samples):
        start, length = int(rows.starts[row]), int(rows.lengths[row])
        ids = np.concatenate([rows.experts[start : start + length - 1], np.zeros((longer, *IDS.shape[1:]), "u1")])
        content, _ = pack_experts(ids.astype("<i4"))
        piece = ExpertRows(await blobs.put(content), 0, len(ids), 0)
        routed = rows.has_experts[row] and row != without
        whole = sample(entry, length + longer, (piece,) if routed else ())
        ended = Outcome.truncated if row == cut_short else Outcome.completed
        partition, offset = await events.append(dataclasses.replace(whole, outcome=ended))
        places.append(dataclasses.replace(entry, partition=partition, offset=offset))
    return dataclasses.replace(manifest, samples=tuple(places))


def sample(
    entry: BatchSample, tokens: int, experts: tuple[ExpertRows, ...], images: tuple[ImageRef, ...] = ()
) -> SegmentSample:
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
        images=images,
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
    assert not unrouted_rows(found).any()


async def test_a_row_that_has_none_is_unrouted_and_told(events: EventLog, caplog: pytest.LogCaptureFixture) -> None:
    blobs = MemoryBlobs()
    manifest = await formed(events, blobs, without=2)
    found = await with_experts(manifest, ROWS, TINY_MIXTURE, events.log, events, blobs)
    assert unrouted_rows(found).tolist() == [False, False, True, False]
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
    assert (await read_truncation_flags(manifest, events.log, events)).tolist() == [False, False, True, False]


@pytest.fixture(scope="module")
def eyes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny policy that sees."""
    return make_tiny_vision(tmp_path_factory.mktemp("vision"))


def drawn(width: int, height: int) -> bytes:
    return encoded(painted(width, height))


async def seen(
    events: EventLog, model: Path, content: bytes, *, tokens: int = 6, position: int = 3, painted: int = 6
) -> PicturedRows:
    """ROWS, each with that image and `painted` of its tokens; the last was cut two tokens behind its first."""
    blobs = MemoryBlobs()
    image = ImageRef(await blobs.put(content, media_type="image/png"), position, tokens)
    manifest, places, vision = synthetic_manifest(ROWS, NOWHERE, "run", 0), list[BatchSample](), TINY_VISION.vision
    assert vision is not None
    lengths = np.minimum(ROWS.lengths, [99, 99, 99, position + 2]).astype("<i4")
    ids = np.where(ROWS.token_ids == vision.token, 0, ROWS.token_ids)
    kept = np.concatenate([np.arange(one) < left for one, left in zip(ROWS.lengths.tolist(), lengths, strict=True)])
    for start in ROWS.starts.tolist():
        ids[start + position : start + position + painted] = vision.token
    columns = {name: getattr(ROWS, name)[kept] for name in ("trained", "logprobs", "advantages")}
    rows = dataclasses.replace(ROWS, token_ids=ids[kept].astype("<i4"), lengths=lengths, **columns)
    for entry, length in zip(manifest.samples, ROWS.lengths.tolist(), strict=True):
        partition, offset = await events.append(sample(entry, length, (), (image,)))
        places.append(dataclasses.replace(entry, partition=partition, offset=offset))
    manifest = dataclasses.replace(manifest, samples=tuple(places))
    found = await with_pictures(manifest, rows, vision, model, events.log, events, blobs)
    assert isinstance(found, PicturedRows)
    return found


async def test_each_row_has_the_images_of_its_sample(events: EventLog, eyes: Path) -> None:
    found = await seen(events, eyes, drawn(84, 56))
    assert [[(one.position, one.rows, one.columns) for one in row] for row in found.pictures] == [[(3, 2, 3)]] * 4
    assert found.pictures[0][0].pixels.shape == (24, 3 * 2 * 14 * 14)
    assert (await seen(events, eyes, drawn(84, 56), position=50, painted=0)).pictures[0] == (), "cut off with the tail"


async def test_an_image_token_that_an_agent_or_the_policy_wrote_is_text(events: EventLog, eyes: Path) -> None:
    found = await seen(events, eyes, drawn(84, 56), painted=8)
    assert [one.tokens for one in found.pictures[0]] == [6]
    _, features, _ = lay_out_images(found, (0,), 20, torch.device("cpu"))
    assert features[0, :12].tolist() == [0, 0, 0, 1, 2, 3, 4, 5, 6, 0, 0, 0]


@pytest.mark.parametrize(
    ("content", "tokens", "painted", "message"),
    [
        (drawn(84, 84), 6, 6, r"sample sample-0-000: the image \w+ at token 3 takes 6 tokens in the sample, but 9"),
        (drawn(84, 56), 6, 5, r"the image \w+ at token 3: its tokens are not all 5"),
        (b"GIF89a", 6, 6, r"at token 3: an image of 6 bytes cannot be read"),
        (drawn(84, 56)[:-40], 6, 6, r"at token 3: .*truncated"),
    ],
    ids=["other-size", "painted-short", "no-image", "cut-file"],
)
async def test_an_image_that_is_not_what_its_sample_says_is_refused_by_name(
    events: EventLog, eyes: Path, content: bytes, tokens: int, painted: int, message: str
) -> None:
    with pytest.raises(ImagesUnfit, match=message):
        await seen(events, eyes, content, tokens=tokens, painted=painted)
