"""sample-batches as the trainer reads it: from a cursor on, each manifest once, each file checked against it."""

from __future__ import annotations

import asyncio
from collections import deque

import numpy as np

from turnlog.infra.batch_files import CorruptBatch, read_rows
from turnlog.infra.blobs import BlobCorrupt, BlobMissing, Blobs, StoreUnavailable
from turnlog.infra.event_log import EventLog
from turnlog.infra.log import Partition, Reader
from turnlog.processors.core.batches.rows import BatchRows, rows_sha256
from turnlog.schemas.events import BatchSkipped, SampleBatchFormed
from turnlog.schemas.topics import BATCHES
from turnlog.trainer.checkpoint import Cursor
from turnlog.trainer.errors import BatchGap

PARTITION = Partition(BATCHES.name, 0)
RETRY_S = (0.1, 0.5, 2.0, 5.0)

Manifest = SampleBatchFormed | BatchSkipped


class Manifests:
    """Manifests of one run, in order of batch_index, without gaps or repeats."""

    def __init__(self, reader: Reader, events: EventLog, run_id: str, cursor: Cursor, *, start: int) -> None:
        """`start`: first offset of the topic, for a cursor that has none."""
        self._reader, self._events, self._run_id = reader, events, run_id
        self._next = cursor.next_batch
        self._waiting: deque[tuple[Manifest, int]] = deque()
        reader.assign({PARTITION: start if cursor.offset is None else cursor.offset})

    async def next(self, *, timeout_s: float) -> tuple[Manifest, int] | None:
        """The next manifest and the offset behind it; None when there is none yet. Raises BatchGap."""
        if not self._waiting:
            for record in await self._reader.poll(max_records=16, timeout_s=timeout_s):
                event = await self._events.decode(record)
                if isinstance(event, SampleBatchFormed | BatchSkipped) and event.run_id == self._run_id:
                    self._waiting.append((event, record.offset + 1))
        while self._waiting:
            manifest, offset = self._waiting.popleft()
            if manifest.batch_index > self._next:
                raise BatchGap(
                    f"{BATCHES.name}@{offset - 1} holds batch {manifest.batch_index}, the next one is {self._next}"
                )
            if manifest.batch_index == self._next:
                self._next += 1
                return manifest, offset
        return None


async def fetch_rows(manifest: SampleBatchFormed, blobs: Blobs) -> BatchRows:
    """The batch's rows, checked. Raises CorruptBatch, BlobMissing, StoreUnavailable (after retries)."""
    rows = read_rows(await _fetched(manifest, blobs))
    where = f"batch {manifest.batch_index} (object {manifest.file.sha256})"
    found = rows_sha256(rows)
    if found != manifest.rows_sha256:
        raise CorruptBatch(f"{where}: rows hash to {found}, the manifest says {manifest.rows_sha256}")
    trained = int(rows.trained.sum())
    if len(rows) != len(manifest.samples) or trained != manifest.trained_tokens:
        raise CorruptBatch(
            f"{where}: {len(rows)} rows with {trained} trained tokens, the manifest counts {len(manifest.samples)} "
            f"with {manifest.trained_tokens}"
        )
    if bool(np.any(rows.trained[rows.starts])) or bool(np.any(rows.weight_divisor <= 0)):
        raise CorruptBatch(f"{where}: a row trains its first token or has no weight")
    return rows


async def _fetched(manifest: SampleBatchFormed, blobs: Blobs) -> bytes:
    for pause in RETRY_S:
        try:
            return await blobs.get(manifest.file)
        except BlobCorrupt as error:
            raise CorruptBatch(f"batch {manifest.batch_index}: {error}") from error
        except (BlobMissing, StoreUnavailable):
            await asyncio.sleep(pause)
    return await blobs.get(manifest.file)
