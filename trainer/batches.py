"""Recorded experts and images of a batch, which the Megatron trainer adds to its rows (`manifests`), and the turns of
trainer and engines on devices that they share.

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
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client import Counter

from turnlog.infra.blobs import (
    Blobs,
    ImageUnreadable,
    expert_rows,
    opened_image,
)
from turnlog.infra.event_log import EventLog
from turnlog.infra.history import caught_up, read_range
from turnlog.infra.log import Log, Partition, Reader
from turnlog.infra.roles.role import Role
from turnlog.processors.core.batches.rows import BatchRows
from turnlog.processors.core.views.fleet import Fleet
from turnlog.schemas.events import Outcome, SampleBatchFormed, SegmentSample
from turnlog.schemas.events.turns import ImageRef
from turnlog.schemas.topics import ENGINES, SAMPLES
from turnlog.trainer import ExpertsUnfit, ImagesUnfit
from turnlog.trainer.families.family import family
from turnlog.trainer.families.shape import ModelShape, VisionShape
from turnlog.trainer.manifests import POLL_S, check_lengths, check_vocabulary, fetch_rows
from turnlog.trainer.models.experts import attach_experts
from turnlog.trainer.models.vision import RowImage, attach_pictures

ENGINE_STATUS = Partition(ENGINES.name, 0)
UNROUTED = Counter(
    "turnlog_trainer_unrouted_rows", "Rows for a mixture-of-experts model that came without recorded experts"
)
NAMED = 5
"""Number of samples that a warning names for each cause."""
_said = logging.getLogger(__name__)


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
    rows = await fetch_rows(manifest, role.blobs, role.events.keys)
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
