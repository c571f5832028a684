"""Payloads: fetched before a fold sees them, uploaded when they are too large for a record."""

from __future__ import annotations

import dataclasses
import functools
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from turnlog.infra.blobs import Blobs
from turnlog.schemas.avsc import field_types
from turnlog.schemas.events import Event
from turnlog.schemas.topics import INLINE_LIMIT_BYTES
from turnlog.schemas.types import BlobRef


@functools.cache
def payload_fields(record: type) -> tuple[str, ...]:
    """Fields of a record that hold bytes or a reference to them."""
    return tuple(name for name, kind in field_types(record).items() if _is_payload(kind))


async def inlined(event: Event, blobs: Blobs) -> Event:
    """The event with every payload as bytes. Raises BlobMissing, BlobCorrupt, StoreUnavailable."""
    fetched: dict[str, Any] = {}
    for name in payload_fields(event.__class__):
        value = getattr(event, name)
        if isinstance(value, BlobRef):
            fetched[name] = await blobs.get(value)
    return dataclasses.replace(event, **fetched) if fetched else event


async def externalized(event: Event, blobs: Blobs, *, limit: int = INLINE_LIMIT_BYTES) -> Event:
    """The event with payloads above `limit` bytes in the store: blob first, then the event that names it."""
    stored: dict[str, Any] = {}
    for name in payload_fields(event.__class__):
        value = getattr(event, name)
        if isinstance(value, bytes) and len(value) > limit:
            stored[name] = await blobs.put(value)
    return dataclasses.replace(event, **stored) if stored else event


def _is_payload(kind: Any) -> bool:
    if get_origin(kind) not in (Union, UnionType):
        return False
    arms = {get_args(arm)[0] if get_origin(arm) is Annotated else arm for arm in get_args(kind)}
    return bytes in arms and BlobRef in arms
