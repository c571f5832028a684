"""Data loading: the batches of a run, in order, as checked rows; each is read while the previous one trains.

Only one batch is read ahead, so that at most two are in memory. Reading does not move the cursor, which belongs to the
last batch that was stepped on; after a kill, what was read ahead is read again. Errors of a batch are raised when it is
taken, after the step before it, as if it had been read then.

Batch files contain neither recorded experts, which would be most of their bytes, nor images: a sample refers to them by
content hash. A sample without experts (an engine died, a gateway did not request them) leaves its row unrouted. Images
are preprocessed by the model's own image processor, as an engine does it. transformers' processor resizes with
torchvision if it is installed, else with Pillow, whose values differ by 1/255: trainer and engines need the same.

With engines on the trainer's devices ([engine] colocate) a step also waits until none of them holds memory there. A
loader releases its engine once it has read about a batch that the published weights do not include, and reports the
newest version at that time: the trainer may use the device until it publishes the next version. An engine that is gone
is ignored; one that is silent, or drains, still holds its memory.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client import Counter

from turnlog.infra.batch_files import CorruptBatch, read_rows
from turnlog.infra.blobs import (
    BlobCorrupt,
    BlobMissing,
    Blobs,
    ImageUnreadable,
    StoreUnavailable,
    expert_rows,
    opened_image,
)
from turnlog.infra.event_log import EventLog
from turnlog.infra.history import caught_up, events, partitions, read_range
from turnlog.infra.log import Log, Partition, Reader
from turnlog.infra.roles.role import Role
from turnlog.processors.core.batches.prefixes import shared_prefixes
from turnlog.processors.core.batches.rows import ROWS_VERSIONS, BatchRows, rows_sha256
from turnlog.processors.core.views.fleet import Fleet
from turnlog.schemas.events import BatchSkipped, Outcome, SampleBatchFormed, SegmentSample, SessionStarted
from turnlog.schemas.events.turns import ImageRef
from turnlog.schemas.topics import BATCHES, ENGINES, SAMPLES, SESSIONS
from turnlog.trainer import BatchGap, ExpertsUnfit, ImagesUnfit, TokensUnfit
from turnlog.trainer.checkpoints.cursor import Cursor
from turnlog.trainer.checkpoints.places import file_sha256
from turnlog.trainer.families.family import family
from turnlog.trainer.families.shape import ModelShape, VisionShape
from turnlog.trainer.models.experts import attach_experts
from turnlog.trainer.models.vision import RowImage, attach_pictures

PARTITION = Partition(BATCHES.name, 0)
ENGINE_STATUS = Partition(ENGINES.name, 0)
RETRY_S = (0.1, 0.5, 2.0, 5.0)
POLL_S = 0.2
BEHIND = 200
"""Number of records before the end of each partition that are checked first for their tokenizer: those of sessions that
a rollout batch may still hold.
"""
WAITED = Counter("turnlog_trainer_wait_seconds", "Seconds spent waiting for a batch")
UNROUTED = Counter(
    "turnlog_trainer_unrouted_rows", "Rows for a mixture-of-experts model that came without recorded experts"
)
NAMED = 5
"""Number of samples that a warning names for each cause."""
_said = logging.getLogger(__name__)

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


async def fetch_rows(manifest: SampleBatchFormed, blobs: Blobs, *, retry_s: Sequence[float] = RETRY_S) -> BatchRows:
    """Return the batch's rows, checked against the manifest.

    Raises CorruptBatch, BlobMissing that names the batch, and StoreUnavailable after retries.
    """
    if manifest.rows_version not in ROWS_VERSIONS:
        known = ", ".join(map(str, ROWS_VERSIONS))
        raise CorruptBatch(
            f"{_where(manifest)}: its rows are of version {manifest.rows_version}, this release reads {known}: install "
            "the release of the batcher that formed it"
        )
    return await asyncio.to_thread(_verify_rows, manifest, await _fetch_file(manifest, blobs, retry_s))


def _where(manifest: SampleBatchFormed) -> str:
    return f"batch {manifest.batch_index} (object {manifest.file.sha256})"


def _verify_rows(manifest: SampleBatchFormed, content: bytes) -> BatchRows:
    where, rows = _where(manifest), read_rows(content)
    found = rows_sha256(rows, manifest.rows_version)
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


class SharedDevice:
    """The engines that hold memory, folded from engine-status."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._reader: Reader
        self._fleet = Fleet()

    async def follow(self, reader: Reader) -> None:
        """Start to follow engine-status from the start of the log."""
        self._reader = reader
        reader.assign(await self._role.log.start_offsets([ENGINE_STATUS]))

    async def free(self, published: int | None, beat: Callable[[], None]) -> bool:
        """Wait until every engine was released with version `published`, the newest one; `beat` is called meanwhile.

        Return False if the role is to stop first.
        """
        wanted = -1 if published is None else published
        ends = await self._role.log.end_offsets([ENGINE_STATUS])
        while not caught_up(self._reader, ends) or (holding := self._fleet.engines_holding_memory(wanted)):
            beat()
            if self._role.stopping.is_set():
                return False
            if caught_up(self._reader, ends):
                self._role.health.unmet(
                    "device", f"{', '.join(holding)} still on the trainer's devices ([engine] colocate)"
                )
            async for _, event in self._role.run_events(await self._reader.poll(timeout_s=POLL_S)):
                self._fleet.apply(event)
        self._role.health.mark_ready("device")
        return True


async def trained_rows(manifest: SampleBatchFormed, role: Role, shape: ModelShape, model: Path) -> BatchRows:
    """Return the batch's rows, with images if the model has a vision tower, else with experts if routers replay them.

    `model` is the model's folder. Raises the errors of the functions that it calls.
    """
    rows = await fetch_rows(manifest, role.blobs)
    check_vocabulary(manifest, rows, shape.vocabulary)
    check_lengths(manifest, rows, shape.positions)
    if shape.vision or family(shape.kind).blind:
        return await with_pictures(manifest, rows, shape.vision, model, role.log, role.events, role.blobs)
    if not shape.mixture or role.settings.trainer.router_replay == "off":
        return rows
    return await with_experts(manifest, rows, shape, role.log, role.events, role.blobs)


async def with_experts(
    manifest: SampleBatchFormed, rows: BatchRows, shape: ModelShape, log: Log, events: EventLog, blobs: Blobs
) -> BatchRows:
    """Return the rows of a batch with the experts of those that have some.

    Raises BrokenExperts, ExpertsDoNotCover, BlobError, LogError, and ExpertsUnfit if samples have different shapes of
    experts or experts that are not the model's.
    """
    named = await samples_of(manifest, log, events)
    _tell_unrouted(manifest, named)
    recorded = np.array([bool(sample.experts) for sample in named], bool)
    if not recorded.any():
        return rows
    found = await asyncio.gather(*(expert_rows(sample, blobs) for sample in named if sample.experts))
    return await asyncio.to_thread(_join_experts, manifest, rows, shape, recorded, found)


def _join_experts(
    manifest: SampleBatchFormed,
    rows: BatchRows,
    shape: ModelShape,
    recorded: NDArray[np.bool_],
    found: list[NDArray[np.int32]],
) -> BatchRows:
    if len(widths := {each.shape[1:] for each in found}) > 1:
        raise ExpertsUnfit(f"batch {manifest.batch_index}: its samples have experts of shapes {sorted(widths)}")
    largest = max(int(each.max(initial=0)) for each in found)
    narrow = "u1" if largest <= np.iinfo("u1").max else "<u2"
    whole = np.zeros((len(rows.token_ids), *widths.pop()), narrow)
    for row, each in zip(np.flatnonzero(recorded).tolist(), found, strict=True):
        start, inputs = int(rows.starts[row]), int(rows.lengths[row]) - 1
        whole[start : start + inputs] = each[:inputs]  # the rollout batch may have cut the sample's tail
    return attach_experts(rows, whole, shape, recorded)


def _tell_unrouted(manifest: SampleBatchFormed, named: list[SegmentSample]) -> None:
    causes: dict[str, list[str]] = defaultdict(list)
    for sample in named:
        if not sample.experts:
            causes[sample.experts_gap or "none were recorded"].append(sample.sample_id)
    for cause, samples in causes.items():
        UNROUTED.inc(len(samples))
        more = f" and {len(samples) - NAMED} more" if len(samples) > NAMED else ""
        _said.warning(
            "batch %d: %d of %d rows have no recorded experts (%s): samples %s%s",
            manifest.batch_index, len(samples), len(named), cause, ", ".join(samples[:NAMED]), more,
        )  # fmt: skip


async def read_truncation_flags(manifest: SampleBatchFormed, log: Log, events: EventLog) -> NDArray[np.bool_]:
    """Return [n] whether the trajectory of each row was truncated. Raises ExpertsUnfit, LogError."""
    return np.array([one.outcome is Outcome.truncated for one in await samples_of(manifest, log, events)], bool)


async def samples_of(manifest: SampleBatchFormed, log: Log, events: EventLog) -> list[SegmentSample]:
    """Return the samples of a batch, in order of its rows. Raises ExpertsUnfit if a sample is not where the manifest
    says.
    """
    wanted: dict[int, dict[int, str]] = {}
    for row in manifest.samples:
        wanted.setdefault(row.partition, {})[row.offset] = row.sample_id
    found: dict[str, SegmentSample] = {}
    async with log.reader() as reader:
        for partition, ids in wanted.items():
            place = Partition(SAMPLES.name, partition)
            async for record in read_range(reader, {place: min(ids)}, {place: max(ids) + 1}):
                event = await events.decode_known(record) if record.offset in ids else None
                if isinstance(event, SegmentSample) and event.sample_id == ids[record.offset]:
                    found[event.sample_id] = event
    for row in manifest.samples:
        if row.sample_id not in found:
            place_said = f"{SAMPLES.name}[{row.partition}]@{row.offset}"
            raise ExpertsUnfit(
                f"sample {row.sample_id} does not stand at {place_said}, where batch {manifest.batch_index} says"
            )
    return [found[row.sample_id] for row in manifest.samples]


async def with_pictures(
    manifest: SampleBatchFormed,
    rows: BatchRows,
    vision: VisionShape | None,
    model: Path,
    log: Log,
    events: EventLog,
    blobs: Blobs,
) -> BatchRows:
    """Return the rows of a batch with their images. `model` is the folder with the processor's settings.

    Raises BlobError, LogError, ExpertsUnfit if a sample is not where the manifest says, and ImagesUnfit for an image
    that cannot be read or that takes another number of tokens than its sample says, and for any if there is no
    `vision`.
    """
    named = await samples_of(manifest, log, events)
    refs = {one.image.sha256: one.image for sample in named for one in sample.images}
    contents = dict(zip(refs, await asyncio.gather(*map(blobs.get, refs.values())), strict=True))
    if not contents:
        return rows
    return await asyncio.to_thread(laid_out, rows, [sample.images for sample in named], contents, vision, model)


def laid_out(
    rows: BatchRows,
    images: Sequence[Sequence[ImageRef]],
    contents: Mapping[str, bytes],
    vision: VisionShape | None,
    model: Path,
) -> BatchRows:
    """Return the rows with the images of each; `contents` maps sha256 to the file. Raises ImagesUnfit."""
    arrays: dict[str, Any] = {}
    pictures: list[list[RowImage]] = []
    for row, named in enumerate(images):
        start, length = int(rows.starts[row]), int(rows.lengths[row])
        tokens = rows.token_ids[start : start + length]
        pictures.append([])
        for image in named:
            if image.position >= length:
                continue  # the rollout batch may have cut the sample's tail
            about = f"sample {rows.sample_ids[row]}: the image {image.image.sha256} at token {image.position}"
            if vision is None:
                raise ImagesUnfit(f"{about}: the trainer uses no images for this model: give it tasks of text alone")
            if image.image.sha256 not in arrays:
                arrays[image.image.sha256] = _process_image(contents[image.image.sha256], model, about)
            pictures[-1].append(_make_picture(image, arrays[image.image.sha256], vision, about))
            if np.any(tokens[image.position : image.position + image.tokens] != vision.token):
                raise ImagesUnfit(f"{about}: its tokens are not all {vision.token}, the model's for images")
    return attach_pictures(rows, pictures)


def _make_picture(image: ImageRef, arrays: Any, vision: VisionShape, about: str) -> RowImage:
    frames, height, width = (int(side) for side in arrays["image_grid_thw"][0])
    picture = RowImage(
        image.image.sha256, image.position, height // vision.merge, width // vision.merge, arrays["pixel_values"]
    )
    if frames != 1 or picture.tokens != image.tokens:
        raise ImagesUnfit(
            f"{about} takes {image.tokens} tokens in the sample, but {picture.tokens} with the model's image "
            "processor: the preprocessor_config.json in the gateway's [model] path differs from the trainer's"
        )
    return picture


def _process_image(content: bytes, model: Path, about: str) -> Any:
    """Run the model's image processor. Raises ImagesUnfit."""
    try:
        with opened_image(content, whole=True) as image:
            return _processor(model)(images=[image], return_tensors="np")
    except (ImageUnreadable, ValueError) as error:  # raised for an image that is too narrow
        raise ImagesUnfit(f"{about}: {error}") from error


@functools.lru_cache(maxsize=1)
def _processor(model: Path) -> Any:
    from transformers import AutoImageProcessor

    loader: Any = AutoImageProcessor
    return loader.from_pretrained(model)
