"""Images of a turn: those that its storage parent gives whole, and its own.

Two images of one size have the same placeholder ids, so that equal tokens do not mean equal images.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from turnlog.processors.core.errors import ImageOutOfPlace
from turnlog.schemas.events import ImageRef, TokenSnapshot

if TYPE_CHECKING:
    from turnlog.processors.core.turns import Tokens


def visible(event: TokenSnapshot, parent: Tokens | None, prompt_len: int) -> tuple[ImageRef, ...]:
    """Every image in the turn's prompt, by position. Raises ImageOutOfPlace for one that lies outside it, that the
    parent gives already, or that overlaps another."""
    given = parent.images if parent is not None else ()
    if not given and not event.images:
        return ()
    kept = tuple(image for image in given if image.position + image.tokens <= event.base_len)
    images = tuple(sorted((*kept, *event.images), key=lambda image: image.position))
    end = 0
    for image in images:
        if image.position < end or image.tokens < 1 or image.position + image.tokens > prompt_len:
            raise ImageOutOfPlace(
                event.session_id, event.turn,
                f"an image at {image.position} with {image.tokens} tokens, {end} are taken of a prompt of {prompt_len}",
                "images lie in the prompt, one after another, each named by the turn whose delta brings its end",
            )  # fmt: skip
        end = image.position + image.tokens
    return images


def agree(earlier: Tokens, later: Tokens) -> bool:
    """Whether the images within `earlier` are the same where `later` has its tokens."""
    if not earlier.images and not later.images:
        return True
    return earlier.images == tuple(image for image in later.images if image.position < earlier.length)
