"""Manifests in order, files that are what their manifests say."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.each import each
from tests.fakes.batches import append_batches, branched_rows, synthetic_manifest, synthetic_rows
from tests.fakes.memory_log import MemoryLog
from turnlog.infra.batch_files import CorruptBatch, read_rows, write_rows
from turnlog.infra.blobs import BlobMissing, MemoryBlobs
from turnlog.infra.event_log import EventLog
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.topics_admin import apply
from turnlog.processors.core.batches.rows import ROWS_VERSIONS, BatchRows, rows_sha256
from turnlog.schemas.events import SampleBatchFormed
from turnlog.schemas.types import BlobRef
from turnlog.settings import Settings
from turnlog.trainer import BatchGap, TokensUnfit
from turnlog.trainer.manifests import WAITED, Cursor, Manifests, ReadAhead, check_lengths, check_vocabulary, fetch_rows
from turnlog.trainer.weight_records import VERSIONS, read_past

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.fixture
async def events() -> AsyncIterator[EventLog]:
    log = MemoryLog()
    await apply(log, Settings())
    async with EventLog.open(log, MemoryRegistry(), writer="test") as events:
        yield events


async def taken(events: EventLog, cursor: Cursor, count: int) -> list[tuple[int, int]]:
    """(batch_index, offset behind) of the next `count` manifests."""
    async with events.log.reader() as reader:
        manifests = Manifests(reader, events, "run", cursor, start=0)
        found = [await manifests.next(timeout_s=0.2) for _ in range(count)]
        return [(manifest.batch_index, offset) for manifest, offset in filter(None, found)]


async def test_each_manifest_comes_once_in_order(events: EventLog) -> None:
    blobs = MemoryBlobs()
    await append_batches(events, blobs, "run", 3)
    await append_batches(events, blobs, "other-run", 2)
    await append_batches(events, blobs, "run", 3)
    assert await taken(events, Cursor(), 9) == [(0, 1), (1, 2), (2, 3)]


async def test_reading_goes_on_behind_the_cursor(events: EventLog) -> None:
    await append_batches(events, MemoryBlobs(), "run", 4)
    assert await taken(events, Cursor(next_batch=2, offset=2), 9) == [(2, 3), (3, 4)]


async def test_a_wait_counts_while_it_lasts_and_not_only_when_a_batch_has_ended_it(events: EventLog) -> None:
    def waited() -> float:
        (found,) = (
            sample.value for metric in WAITED.collect() for sample in metric.samples if sample.name.endswith("_total")
        )
        return found

    before = waited()
    async with events.log.reader() as reader:
        manifests = Manifests(reader, events, "run", Cursor(), start=0)
        async with ReadAhead(manifests, unasked) as ahead:
            assert await ahead.next(timeout_s=0.01) is None
    assert waited() > before


async def unasked(_: object) -> BatchRows:
    raise AssertionError("there is no batch")


async def test_the_past_is_told_once_nothing_of_it_is_hidden(events: EventLog) -> None:
    async with events.log.transactor("whose markers are missing") as before:
        await before.begin()
        await (await before.send(*VERSIONS, b"run", b"a version"))
        asking = asyncio.create_task(read_past(events.log, events, "run"))
        await asyncio.wait({asking}, timeout=0.3)
        assert not asking.done()
        await before.abort()
    past, whole = await asking
    assert (past.incarnation, whole) == (-1, None)


async def test_a_gap_ends_the_trainer(events: EventLog) -> None:
    rows = synthetic_rows(0)
    file = await MemoryBlobs().put(write_rows(rows))
    await events.append(synthetic_manifest(rows, file, "run", 1))
    with pytest.raises(BatchGap, match="holds batch 1, the next one is 0"):
        await taken(events, Cursor(), 1)


async def formed(blobs: MemoryBlobs, seed: int = 0) -> SampleBatchFormed:
    rows = synthetic_rows(seed)
    return synthetic_manifest(rows, await blobs.put(write_rows(rows)), "run", seed)


async def test_a_good_file_is_read(events: EventLog) -> None:
    blobs = MemoryBlobs()
    rows = await fetch_rows(await formed(blobs), blobs)
    assert rows.sample_ids == synthetic_rows(0).sample_ids


async def test_a_file_damaged_in_the_store_is_corrupt() -> None:
    blobs = MemoryBlobs()
    manifest = await formed(blobs)
    blobs.objects[manifest.file.sha256] += b"x"
    with pytest.raises(CorruptBatch, match="batch 0"):
        await fetch_rows(manifest, blobs)


async def test_a_file_that_is_gone_is_missing_by_the_name_of_its_batch() -> None:
    blobs = MemoryBlobs()
    manifest = await formed(blobs)
    blobs.objects.clear()
    with pytest.raises(BlobMissing, match=r"file of batch 0: .*" + manifest.file.sha256):
        await fetch_rows(manifest, blobs, retry_s=[0])


@pytest.mark.parametrize("token", [-1, 384, 5000])
async def test_a_token_that_the_model_lacks_is_refused_by_batch_sample_and_place(token: int) -> None:
    rows = synthetic_rows(3)
    ids = rows.token_ids.copy()
    ids[rows.starts[5] + 2] = token
    manifest = synthetic_manifest(rows, BlobRef("0" * 64, 1), "run", 3)
    check_vocabulary(manifest, rows, 384)
    with pytest.raises(
        TokensUnfit, match=rf"batch 3 .*: sample sample-3-005 has token {token} at 2, but the model has 384"
    ):
        check_vocabulary(manifest, dataclasses.replace(rows, token_ids=ids), 384)


async def test_a_row_that_the_model_has_too_few_positions_for_is_refused_by_batch_sample_and_length() -> None:
    rows = synthetic_rows(3)
    longest = int(rows.lengths.max())
    row, manifest = int(rows.lengths.argmax()), synthetic_manifest(rows, BlobRef("0" * 64, 1), "run", 3)
    check_lengths(manifest, rows, longest - 1)
    with pytest.raises(
        TokensUnfit,
        match=rf"batch 3 .*: sample sample-3-{row:03} has {longest} tokens, but the model has {longest - 2} positions",
    ):
        check_lengths(manifest, rows, longest - 2)


async def test_a_batch_without_rows_is_refused() -> None:
    none = synthetic_rows(3).among(np.zeros(len(synthetic_rows(3)), bool))
    blobs = MemoryBlobs()
    manifest = synthetic_manifest(none, await blobs.put(write_rows(none)), "run", 3)
    with pytest.raises(CorruptBatch, match=r"batch 3 .* holds no rows"):
        await fetch_rows(manifest, blobs)


async def test_the_file_of_another_batch_is_corrupt() -> None:
    blobs = MemoryBlobs()
    manifest, other = await formed(blobs), await formed(blobs, 1)
    with pytest.raises(CorruptBatch, match="rows hash to"):
        await fetch_rows(dataclasses.replace(manifest, file=other.file), blobs)


async def test_bytes_that_are_no_batch_file_are_corrupt() -> None:
    blobs = MemoryBlobs()
    manifest = await formed(blobs)
    file = await blobs.put(b"not arrow")
    with pytest.raises(CorruptBatch, match="not a batch file"):
        await fetch_rows(dataclasses.replace(manifest, file=file), blobs)


async def test_counts_that_differ_from_the_manifest_are_corrupt() -> None:
    blobs = MemoryBlobs()
    manifest = await formed(blobs)
    with pytest.raises(CorruptBatch, match="the manifest counts"):
        await fetch_rows(dataclasses.replace(manifest, trained_tokens=1), blobs)


async def test_shared_prefixes_that_differ_from_the_manifest_are_corrupt_and_older_manifests_have_none() -> None:
    blobs, rows = MemoryBlobs(), branched_rows(synthetic_rows(0), 0)
    manifest = synthetic_manifest(rows, await blobs.put(write_rows(rows)), "run", 0)
    row = next(at for at, one in enumerate(manifest.samples) if one.shared_tokens)
    for changes, corrupt in (
        ({}, False),
        ({"shared_tokens": manifest.samples[row].shared_tokens - 1}, True),
        ({"parent_row": -1, "shared_tokens": 0}, True),
        ({"parent_row": None, "shared_tokens": 0}, False),
    ):
        changed = list(manifest.samples)
        changed[row] = dataclasses.replace(changed[row], **changes)
        with pytest.raises(CorruptBatch, match="the manifest says") if corrupt else contextlib.nullcontext():
            await fetch_rows(dataclasses.replace(manifest, samples=tuple(changed)), blobs)


async def test_a_batch_of_the_first_rows_version_verifies() -> None:
    content = (GOLDEN / "batch-rows-1.arrow").read_bytes()
    blobs = MemoryBlobs()
    manifest = synthetic_manifest(synthetic_rows(0, rows=4), await blobs.put(content), "run", 0)
    assert manifest.rows_version == 1
    assert manifest.rows_sha256 == "a53d6aac4037bd0fca0b65c9e8a45c6520d4f414935f3c70d4ff436219404c65"
    rows = await fetch_rows(manifest, blobs)
    assert rows.lengths.tolist() == synthetic_rows(0, rows=4).lengths.tolist()


async def test_a_batch_with_tokens_on_an_old_cache_is_of_the_second_rows_version_and_verifies() -> None:
    content = (GOLDEN / "batch-rows-2.arrow").read_bytes()
    blobs, plain = MemoryBlobs(), synthetic_rows(0, rows=4)
    manifest = synthetic_manifest(on_old_cache(plain), await blobs.put(content), "run", 0)
    assert manifest.rows_version == 2
    assert manifest.rows_sha256 == "5f5d58b09c306eabc17fdc76f70ffdfed07fb2b5cbf28f4210aa68deee43e04f"
    rows = await fetch_rows(manifest, blobs)
    assert rows.old_cache is not None
    assert rows.old_cache.tolist() == plain.trained.tolist()
    with pytest.raises(CorruptBatch, match="rows hash to"):
        await fetch_rows(dataclasses.replace(manifest, file=await blobs.put(write_rows(plain))), blobs)


def on_old_cache(rows: BatchRows) -> BatchRows:
    """Every trained token is marked."""
    return dataclasses.replace(rows, old_cache=rows.trained)


async def test_a_batch_that_names_kinds_of_engines_is_of_the_third_rows_version_and_verifies() -> None:
    content = (GOLDEN / "batch-rows-3.arrow").read_bytes()
    blobs, plain = MemoryBlobs(), synthetic_rows(0, rows=4)
    manifest = synthetic_manifest(of_two_kinds(plain), await blobs.put(content), "run", 0)
    assert manifest.rows_version == 3
    assert manifest.rows_sha256 == "e3f0f44818a29e970c9d08cb751f24b7fbbef44cae140ab81e38f591e646707f"
    rows = await fetch_rows(manifest, blobs)
    assert rows.engine_kind is not None
    assert rows.engine_kind.tolist() == of_two_kinds(plain).engine_kind.tolist()  # type: ignore[union-attr]
    assert rows.old_cache is None, "the hash covers its name, and no bytes"
    with pytest.raises(CorruptBatch, match="rows hash to"):
        await fetch_rows(dataclasses.replace(manifest, file=await blobs.put(write_rows(plain))), blobs)


def of_two_kinds(rows: BatchRows) -> BatchRows:
    """The trained tokens of the first half were sampled by the first kind of engine, the others by the second."""
    kinds = np.where(np.arange(len(rows.trained)) < len(rows.trained) // 2, 1, 2)
    return dataclasses.replace(rows, engine_kind=(kinds * rows.trained).astype("|u1"))


@each("version", list(ROWS_VERSIONS))
def test_the_rule_of_the_page_gives_the_hash_of_every_rows_version(version: int) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (GOLDEN.parents[1] / "docs/attach.md").read_text(), re.M | re.S)
    page: dict[str, Any] = {}
    exec(next(block for block in blocks if "COLUMNS" in block), page)
    content = (GOLDEN / f"batch-rows-{version}.arrow").read_bytes()
    assert page["rows_sha256"](content, version) == rows_sha256(read_rows(content), version)


async def test_rows_of_a_version_that_is_not_known_are_refused_by_it() -> None:
    blobs = MemoryBlobs()
    later = dataclasses.replace(await formed(blobs), rows_version=max(ROWS_VERSIONS) + 1)
    with pytest.raises(CorruptBatch, match=r"batch 0 .*: its rows are of version 4, this release reads 1, 2, 3"):
        await fetch_rows(later, blobs)
