"""Images in chat messages: accepted as data: URLs or as references to blobs, stored by reference, and written as
placeholder tokens.

A chat template writes one image token per image; the model's image processor decides by the image's size how many
tokens the image takes. Blob references (`blob:SHA256;SIZE;MEDIA_TYPE`) are what the log holds in place of the bytes.
Sources: RFC 2397 (data URLs); `smart_resize` of transformers' Qwen2VLImageProcessor.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from turnlog.infra.blobs import BlobMissing, Blobs, ImageUnreadable, opened_image
from turnlog.processors.core.turns import Ids
from turnlog.producers.gateway.chat_template import read_json
from turnlog.producers.gateway.errors import BadRequest, ImagesNotServed, StrayImageToken
from turnlog.schemas.events.turns import ImageRef
from turnlog.schemas.types import BlobRef

DATA = re.compile(r"data:(image/[\w.+-]+);base64,", re.ASCII)
BLOB = re.compile(r"blob:([0-9a-f]{64});(\d{1,18});(image/[\w.+-]+)", re.ASCII)
MIN_PIXELS, MAX_PIXELS = 56 * 56, 28 * 28 * 1280
"""Defaults of Qwen2VLImageProcessor if preprocessor_config.json names no limits."""
IMAGE_PIXELS = 32 * 2**20
"""Maximum pixels of an image in a request, read from its header before anything decodes it: 96 MiB when decoded."""
LONGEST = 200
"""Largest ratio of the sides that it accepts."""


@dataclass(frozen=True, slots=True)
class MessageImage:
    """An image as a message carries it; `content` is None for a reference."""

    ref: BlobRef
    content: bytes | None = None


@dataclass(frozen=True, slots=True)
class Admitted:
    """An image in the store, the number of its placeholder tokens, and the URL that an engine gets."""

    ref: BlobRef
    tokens: int
    url: str


TokenRule = Callable[[int, int], int]
"""(height, width) in pixels -> the number of placeholder tokens, at least 1."""


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """Image placeholder of a model, and the rule for how many an image takes."""

    token: int
    """Id of the placeholder."""
    rule: TokenRule
    most_pixels: int
    """Maximum number of pixels of one image."""

    async def admit_all(
        self, pictures: Sequence[MessageImage], shown: Mapping[str, BlobRef], blobs: Blobs
    ) -> dict[str, Admitted]:
        """Store all images, and return them by sha256. `shown` holds the images of the session's own turns; only those
        may be named by reference. Raises BadRequest, StoreUnavailable, BlobCorrupt."""
        found: dict[str, Admitted] = {}
        for picture in sorted(pictures, key=lambda picture: picture.content is None):  # bytes first: they need no proof
            if picture.ref.sha256 not in found:
                found[picture.ref.sha256] = await self._admit(picture, shown, blobs)
        return found

    async def _admit(self, picture: MessageImage, shown: Mapping[str, BlobRef], blobs: Blobs) -> Admitted:
        content, ref = picture.content, picture.ref
        if content is not None:
            tokens = self.rule(*_size(content, self.most_pixels))
            if ref.sha256 not in shown:
                await asyncio.to_thread(_check_whole, content)
            ref = await blobs.put(content, media_type=ref.media_type)
        else:
            if ref.sha256 not in shown:
                raise BadRequest(f"no turn of this session has an image {ref.sha256}: send its bytes", param="messages")
            ref = shown[ref.sha256]
            try:
                content = await blobs.get(ref)
            except BlobMissing:
                raise BadRequest(f"the store holds no image {ref.sha256}", param="messages") from None
            tokens = self.rule(*_size(content, self.most_pixels))
        return Admitted(ref, tokens, f"data:{ref.media_type};base64,{base64.b64encode(content).decode()}")


def image_tokens(folder: Path, most_pixels: int = IMAGE_PIXELS) -> ImageTokens | None:
    """Return the placeholder and its rule from config.json and preprocessor_config.json; None for a text model, or if
    the rule is not known here."""
    config, processor = read_json(folder / "config.json"), read_json(folder / "preprocessor_config.json")
    token = config.get("image_token_id")
    if not isinstance(token, int) or not {"patch_size", "merge_size"} <= processor.keys():
        return None
    size = processor.get("size") or {}
    least = processor.get("min_pixels") or size.get("shortest_edge") or MIN_PIXELS
    most = processor.get("max_pixels") or size.get("longest_edge") or MAX_PIXELS
    factor = int(processor["patch_size"]) * int(processor["merge_size"])
    return ImageTokens(token, patches(factor, least, most), most_pixels)


def patches(factor: int, least: int, most: int) -> TokenRule:
    """Return Qwen-VL's rule: sides are rounded to multiples of `factor` pixels, the area is scaled into [least, most],
    and one token stands for a square of `factor` pixels. The rule raises BadRequest for an image more than 200 times
    longer than wide."""

    def rule(height: int, width: int) -> int:
        if max(height, width) > LONGEST * min(height, width):
            raise BadRequest(f"an image of {width} x {height} pixels is too narrow for the model", param="messages")
        rows, columns = round(height / factor), round(width / factor)
        if rows * columns * factor**2 > most:
            shrink = math.sqrt(height * width / most)
            rows, columns = (max(1, math.floor(side / shrink / factor)) for side in (height, width))
        elif rows * columns * factor**2 < least:
            grow = math.sqrt(least / (height * width))
            rows, columns = (math.ceil(side * grow / factor) for side in (height, width))
        return rows * columns

    return rule


def picture(block: Mapping[str, Any], where: str) -> MessageImage:
    """Return the image of an `image_url` block. Raises BadRequest."""
    given = block.get("image_url")
    url = given.get("url") if isinstance(given, dict) else given
    if isinstance(url, str) and (match := BLOB.fullmatch(url)):
        return MessageImage(BlobRef(match[1], int(match[2]), match[3]))
    if not isinstance(url, str) or not (match := DATA.match(url)):
        raise BadRequest(
            f"{where} has an image_url that is neither a data:image/...;base64 URL nor a blob: reference; the gateway "
            "fetches nothing",
            param=where,
        )
    try:
        content = base64.b64decode(url[match.end() :], validate=True)
    except ValueError as error:  # binascii.Error, or characters outside ASCII
        raise BadRequest(f"{where} has an image_url that is not base64: {error}", param=where) from None
    return MessageImage(BlobRef(hashlib.sha256(content).hexdigest(), len(content), match[1]), content)


def by_reference(raw: Any) -> Any:
    """Return a message as the log stores it: with references in place of data: URLs."""
    if not isinstance(raw, dict) or not isinstance(raw.get("content"), list):
        return raw
    return {**raw, "content": [_to_reference(block) for block in raw["content"]]}


def place_images(
    ids: list[int], start: int, token: int | None, images: Sequence[Admitted]
) -> tuple[list[int], tuple[ImageRef, ...]]:
    """Return rendered ids with each placeholder repeated as often as its image requires, and the resulting positions of
    the images in a prompt in which `ids` begin at `start`. Raises ImagesNotServed if the template wrote other
    placeholders."""
    if not images:
        return ids, ()
    found = 0 if token is None else ids.count(token)
    if found != len(images):
        raise ImagesNotServed(
            f"the model's chat template wrote {found} image tokens for {len(images)} images: serve a vision model "
            "whose template writes one per image, and keep its image token out of the text",
            param="messages",
        )
    out: list[int] = []
    refs: list[ImageRef] = []
    for one in ids:
        if one == token:
            image = images[len(refs)]
            refs.append(ImageRef(image.ref, start + len(out), image.tokens))
            out += [one] * image.tokens
        else:
            out.append(one)
    return out, tuple(refs)


def check_images_alone(ids: Ids, token: int | None, images: Sequence[ImageRef]) -> None:
    """Raise StrayImageToken if a prompt with images holds further image tokens, because engines look for an image of
    each."""
    if images and (more := np.count_nonzero(ids == token) - sum(image.tokens for image in images)):
        raise StrayImageToken(
            f"the conversation holds {more} image tokens without an image, written by the model or a message: no "
            "engine takes them together with images, and the session ends here",
            param="messages",
        )


def within(length: int, images: Sequence[ImageRef]) -> Iterator[ImageRef]:
    """Return the images that lie wholly within the first `length` tokens."""
    return (image for image in images if image.position + image.tokens <= length)


def _to_reference(block: Any) -> Any:
    if not isinstance(block, dict) or block.get("type") != "image_url":
        return block
    ref = picture(block, "messages").ref
    return {"type": "image_url", "image_url": {"url": f"blob:{ref.sha256};{ref.size};{ref.media_type}"}}


def _check_whole(content: bytes) -> None:
    """Raise BadRequest if an image is incomplete. Some engines accept half an image, and the trainer would see another
    half."""
    try:
        opened_image(content, whole=True).close()
    except ImageUnreadable as error:
        raise BadRequest(str(error), param="messages") from None


def _size(content: bytes, most: int) -> tuple[int, int]:
    """Return (height, width) in pixels, read from the header. Raises BadRequest, also for more than `most` pixels."""
    try:
        with opened_image(content) as image:
            height, width = image.height, image.width
    except ImageUnreadable as error:
        raise BadRequest(str(error), param="messages") from None
    if height * width > most:
        raise BadRequest(f"an image of {width} x {height} pixels; at most {most:,} are allowed", param="messages")
    return height, width
