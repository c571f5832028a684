"""Images of rows, preprocessed by the model's own image processor, as an engine does it.

Batch files and datasets do not contain images: they refer to them by content hash, as they do to experts. transformers'
processor resizes with torchvision if it is installed, else with Pillow, whose values differ by 1/255: trainer and
engines need the same library.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from turnlog.infra.blobs import Blobs, ImageUnreadable, opened_image
from turnlog.infra.event_log import EventLog
from turnlog.infra.log import Log
from turnlog.processors.core.batches.rows import BatchRows
from turnlog.schemas.events import SampleBatchFormed
from turnlog.schemas.events.turns import ImageRef
from turnlog.trainer import ImagesUnfit
from turnlog.trainer.models.vision import RowImage, attach_pictures
from turnlog.trainer.reading.recorded import samples_of
from turnlog.trainer.shape import VisionShape


async def with_pictures(
    manifest: SampleBatchFormed,
    rows: BatchRows,
    vision: VisionShape,
    model: Path,
    log: Log,
    events: EventLog,
    blobs: Blobs,
) -> BatchRows:
    """Return the rows of a batch with their images. `model` is the folder with the processor's settings.

    Raises BlobError, LogError, ExpertsUnfit if a sample is not where the manifest says, and ImagesUnfit for an image
    that cannot be read or that takes another number of tokens than its sample says.
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
    vision: VisionShape,
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
