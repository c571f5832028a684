"""The batches of a run, in order, as checked rows; each is read while the previous one trains. Every trainer reads them
so: Megatron's (`loop`), and those that are connected by `turnlog.client`. Nothing here imports torch.

Only one batch is read ahead, so that at most two are in memory. Reading does not move the cursor, which belongs to the
last batch that was stepped on; after a kill, what was read ahead is read again. Errors of a batch are raised when it is
taken, after the step before it, as if it had been read then.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from prometheus_client import Counter

from turnlog.infra.batch_files import CorruptBatch, open_rows
from turnlog.infra.blobs import BlobCorrupt, BlobMissing, Blobs, StoreUnavailable
from turnlog.infra.event_log import EventLog
from turnlog.infra.history import events, partitions
from turnlog.infra.log import Partition, Reader
from turnlog.infra.roles.role import Role
from turnlog.infra.session_keys import SessionKeys
from turnlog.processors.core.batches.prefixes import shared_prefixes
from turnlog.processors.core.batches.rows import ROWS_VERSIONS, BatchRows, rows_sha256
from turnlog.schemas.events import BatchSkipped, SampleBatchFormed, SessionStarted
from turnlog.schemas.topics import BATCHES, SESSIONS
from turnlog.trainer import BatchGap, TokensUnfit
from turnlog.trainer.checkpoints.places import file_sha256

log = logging.getLogger(__name__)
PARTITION = Partition(BATCHES.name, 0)
RETRY_S = (0.1, 0.5, 2.0, 5.0)
POLL_S = 0.2
BEHIND = 200
"""Number of records before the end of each partition that are checked first for their tokenizer: those of sessions that
a rollout batch may still hold.
"""
WAITED = Counter("turnlog_trainer_wait_seconds", "Seconds spent waiting for a batch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """The position of training."""

    next_batch: int = 0
    """batch_index of the next manifest."""
    offset: int | None = None
    """Offset in sample-batches from which that manifest is searched; None: from the start of the log."""
    step: int = 0
    """Number of optimizer steps taken."""
    draws: int = 0
    """Number of rollout batches trained to their last part."""
    inherited: int = 0
    """Part of `step` that was taken by the run from which this one was forked."""
    skipped: int = 0
    """Number of consecutive steps, up to this one, without a finite gradient."""
    critic_from: int = 0
    """Part of `step` that was taken before the critic began."""


Manifest = SampleBatchFormed | BatchSkipped
Fetch = Callable[[SampleBatchFormed], Awaitable[BatchRows]]


class Manifests:
    """Manifests of one run, in order of batch_index, without gaps or repeats."""

    def __init__(self, reader: Reader, events: EventLog, run_id: str, cursor: Cursor, *, start: int) -> None:
        """`start` is the first offset of the topic, for a cursor without an offset."""
        self._reader, self._events, self._run_id = reader, events, run_id
        self._next = cursor.next_batch
        self._waiting: deque[tuple[Manifest, int]] = deque()
        reader.assign({PARTITION: start if cursor.offset is None else cursor.offset})

    async def next(self, *, timeout_s: float) -> tuple[Manifest, int] | None:
        """Return the next manifest and the offset after it; None if there is none yet. Raises BatchGap if a batch is
        missing.
        """
        if not self._waiting:
            await self._read(timeout_s)
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

    async def ahead(self, count: int) -> list[SampleBatchFormed]:
        """Return the `count` manifests after the last one without consuming them.

        They are the further parts of its rollout batch and were written in the same transaction. Raises BatchGap if one
        is missing.
        """
        wanted = range(self._next, self._next + count)
        while True:
            found = {one.batch_index: one for one, _ in self._waiting if isinstance(one, SampleBatchFormed)}
            if all(index in found for index in wanted):
                return [found[index] for index in wanted]
            if self._waiting and self._waiting[-1][0].batch_index >= wanted.stop:
                raise BatchGap(
                    f"{BATCHES.name} lacks a part of the rollout batch: one of batches {wanted[0]} to {wanted[-1]}"
                )
            await self._read(POLL_S)

    async def _read(self, timeout_s: float) -> None:
        for record in await self._reader.poll(max_records=16, timeout_s=timeout_s):
            event = await self._events.decode_known(record)
            if isinstance(event, SampleBatchFormed | BatchSkipped) and event.run_id == self._run_id:
                self._waiting.append((event, record.offset + 1))


@dataclass(frozen=True, slots=True)
class Batch:
    """The next batch of a run."""

    manifest: Manifest
    offset: int
    """Offset after the manifest."""
    rows: BatchRows | None
    """Rows of the batch; None if the rollout batch was skipped."""
    known_at: float
    """time.monotonic() when the manifest was read."""


class ReadAhead:
    """Reader of the batch after the one that trains. Leaving the context abandons a read in progress."""

    def __init__(self, manifests: Manifests, fetch: Fetch) -> None:
        self._manifests, self._fetch = manifests, fetch
        self._reading: asyncio.Task[Batch] | None = None

    async def __aenter__(self) -> ReadAhead:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)  # nobody waits for its errors

    def begin(self) -> None:
        """Start to read the next batch concurrently. After this, `Manifests.ahead` can no longer return the parts of
        the current rollout batch.
        """
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())

    async def next(self, *, timeout_s: float) -> Batch | None:
        """Return the next batch; None if it is not available within `timeout_s`. Raises BatchGap, and the errors of
        `fetch`.
        """
        self.begin()
        assert self._reading is not None
        began = time.monotonic()
        await asyncio.wait([self._reading], timeout=timeout_s)
        WAITED.inc(time.monotonic() - began)  # counted while waiting, so that an endless wait shows
        if not self._reading.done():
            return None
        done, self._reading = self._reading, None
        return done.result()

    async def _read(self) -> Batch:
        while (found := await self._manifests.next(timeout_s=POLL_S)) is None:
            pass
        manifest, offset = found
        known_at = time.monotonic()
        rows = await self._fetch(manifest) if isinstance(manifest, SampleBatchFormed) else None
        return Batch(manifest, offset, rows, known_at)


async def fetch_rows(
    manifest: SampleBatchFormed, blobs: Blobs, keys: SessionKeys | None = None, *, retry_s: Sequence[float] = RETRY_S
) -> BatchRows:
    """Return the batch's rows, checked against the manifest. `keys` decrypt their tokens if the run encrypts them; rows
    of sessions that were erased since have the token 0 throughout, and none that trains.

    Raises CorruptBatch, BlobMissing that names the batch, StoreUnavailable after retries, and ContentKeyError.
    """
    if manifest.rows_version not in ROWS_VERSIONS:
        known = ", ".join(map(str, ROWS_VERSIONS))
        raise CorruptBatch(
            f"{_where(manifest)}: its rows are of version {manifest.rows_version}, this release reads {known}: install "
            "the release of the batcher that formed it"
        )
    content = await _fetch_file(manifest, blobs, retry_s)
    if keys is not None:
        await keys.refresh()
    return await asyncio.to_thread(_verify_rows, manifest, content, keys)


def _where(manifest: SampleBatchFormed) -> str:
    return f"batch {manifest.batch_index} (object {manifest.file.sha256})"


def _verify_rows(manifest: SampleBatchFormed, content: bytes, keys: SessionKeys | None) -> BatchRows:
    where, opened = _where(manifest), open_rows(content, keys)
    rows, erased = opened.rows, bool(opened.erased.any())  # nobody can verify the hash of what was erased
    found = manifest.rows_sha256 if erased else rows_sha256(rows, manifest.rows_version)
    if found != manifest.rows_sha256:
        raise CorruptBatch(f"{where}: rows hash to {found}, the manifest says {manifest.rows_sha256}")
    trained = int(rows.trained.sum())
    if len(rows) != len(manifest.samples) or trained != manifest.trained_tokens:
        raise CorruptBatch(
            f"{where}: {len(rows)} rows with {trained} trained tokens, the manifest counts {len(manifest.samples)} "
            f"with {manifest.trained_tokens}"
        )
    if not len(rows):
        raise CorruptBatch(f"{where}: it holds no rows, but a rollout batch without rows forms no batch")
    if bool(np.any(rows.trained[rows.starts])) or bool(np.any(rows.weight_divisor <= 0)):
        raise CorruptBatch(f"{where}: a row trains its first token or has no weight")
    if erased:
        log.warning("%s: %d of its rows were erased and are not trained", where, int(opened.erased.sum()))
        trained_rows = np.repeat(~opened.erased, rows.lengths)
        return dataclasses.replace(rows, trained=(rows.trained * trained_rows).astype(rows.trained.dtype))
    _check_prefixes(manifest, rows)
    return rows


def _check_prefixes(manifest: SampleBatchFormed, rows: BatchRows) -> None:
    """Raises CorruptBatch if rows share other prefixes than the manifest says. Manifests of earlier releases do not."""
    found = shared_prefixes(rows.token_ids, rows.lengths)
    for row, parent, shared in zip(manifest.samples, found.parents.tolist(), found.lengths.tolist(), strict=True):
        if row.parent_row is not None and (row.parent_row, row.shared_tokens) != (parent, shared):
            raise CorruptBatch(
                f"{_where(manifest)}: the row of sample {row.sample_id} shares {shared} tokens with row {parent}, the "
                f"manifest says {row.shared_tokens} with row {row.parent_row}"
            )


async def _fetch_file(manifest: SampleBatchFormed, blobs: Blobs, retry_s: Sequence[float]) -> bytes:
    try:
        for pause in retry_s:
            try:
                return await blobs.get(manifest.file)
            except (BlobMissing, StoreUnavailable):
                await asyncio.sleep(pause)
        return await blobs.get(manifest.file)
    except BlobCorrupt as error:
        raise CorruptBatch(f"batch {manifest.batch_index}: {error}") from error
    except BlobMissing as error:
        raise BlobMissing(f"the file of batch {manifest.batch_index}: {error}") from error


def check_lengths(manifest: SampleBatchFormed, rows: BatchRows, positions: int) -> None:
    """Raises TokensUnfit for a row that exceeds the model's positions.

    Beyond them neither transformers nor Megatron raises an error, but what they compute is not what the model was
    trained for. The last token of a row is only predicted and takes no position.
    """
    beyond = np.flatnonzero(rows.lengths - 1 > positions)
    if len(beyond):
        row = int(beyond[0])
        raise TokensUnfit(
            f"{_where(manifest)}: sample {rows.sample_ids[row]} has {int(rows.lengths[row])} tokens, but the model "
            f"has {positions} positions (max_position_embeddings of its config.json); {len(beyond)} of {len(rows)} "
            "rows are too long: set [batcher] max_tokens to cut longer rows, keep [engine] context and [feeder] "
            "max_context_tokens within that limit, or correct config.json if the model supports more"
        )


def check_vocabulary(manifest: SampleBatchFormed, rows: BatchRows, vocabulary: int) -> None:
    """Raises TokensUnfit for a token without an embedding in the model.

    Tensor-parallel ranks would use a zero embedding for it, and the columns that pad a vocabulary would give it
    probability 0.
    """
    outside = np.flatnonzero((rows.token_ids < 0) | (rows.token_ids >= vocabulary))
    if len(outside):
        at = int(outside[0])
        row = int(np.searchsorted(rows.starts, at, "right")) - 1
        raise TokensUnfit(
            f"{_where(manifest)}: sample {rows.sample_ids[row]} has token {rows.token_ids[at]} at "
            f"{at - int(rows.starts[row])}, but the model has {vocabulary} tokens: its sessions were sampled by "
            "another model than the trainer's [model] path"
        )


class Tokenizers:
    """The tokenizer check of a role's run: ids of another tokenizer can all lie within the model's vocabulary."""

    def __init__(self, role: Role, model: Path) -> None:
        self._role, self._file = role, model / "tokenizer.json"
        self._own = file_sha256(self._file) if self._file.exists() else ""
        self._since: dict[Partition, int] = {}

    async def check(self, manifest: SampleBatchFormed) -> None:
        """Check, once per rollout batch, the sessions that began since the previous one. Raises TokensUnfit,
        LogError.
        """
        if manifest.part:
            return
        ends = await self._role.log.end_offsets(partitions(self._role, SESSIONS))
        since = self._since or {place: end - BEHIND for place, end in ends.items()}
        async for _, event in events(self._role, SESSIONS, since=since, names=(SessionStarted.__name__,)):
            assert isinstance(event, SessionStarted)
            if event.tokenizer_sha256 not in ("", self._own):
                raise TokensUnfit(
                    f"batch {manifest.batch_index} is refused: session {event.session_id} comes from a gateway "
                    f"({event.writer_url}) whose tokenizer.json has sha256 {event.tokenizer_sha256}, {self._file} has "
                    f"{self._own or 'none'}: set [model] path of gateway and trainer to the same folder"
                )
        self._since = ends
