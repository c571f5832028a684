"""Immutable objects named by their sha256. `infra.s3` is the real store; MemoryBlobs passes the same contract.
Payloads that are too large for an event are put here, and fetched where they are needed.

BlobError
├── BlobMissing       nothing under that hash (yet): retried, then a typed end where it is needed
├── BlobCorrupt       the bytes do not hash to their name
└── StoreUnavailable      credentials, quota
    └── StoreUnreachable  transport or 5xx
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import hashlib
from collections.abc import Callable
from types import UnionType
from typing import Annotated, Any, Protocol, Union, get_args, get_origin

import numpy as np
from numpy.typing import NDArray

from turnlog.infra.roles import Unreachable
from turnlog.processors.core.experts import assembled, unpacked
from turnlog.schemas.avsc import field_types
from turnlog.schemas.events import Event, SegmentSample
from turnlog.schemas.topics import INLINE_LIMIT_BYTES
from turnlog.schemas.types import BlobRef


class BlobError(Exception):
    """Base of the tree above."""


class BlobMissing(BlobError):
    """The store holds no such object."""


class BlobCorrupt(BlobError):
    """Length or sha256 differ from the reference."""


class StoreUnavailable(BlobError):
    """The store did not answer, or refused us; names [store] settings to check."""


class StoreUnreachable(StoreUnavailable, Unreachable):
    """The store did not answer, or failed."""


class Blobs(Protocol):
    """Put always writes (so that a re-used blob becomes young); get always verifies length and hash."""

    async def put(self, content: bytes, *, media_type: str = "application/octet-stream") -> BlobRef:
        """Store `content`; its key is derived from its sha256. Raises StoreUnavailable."""
        ...

    async def get(self, ref: BlobRef) -> bytes:
        """The verified bytes. Raises BlobMissing, BlobCorrupt, StoreUnavailable."""
        ...

    async def put_named(self, name: str, content: bytes, *, media_type: str = "application/octet-stream") -> None:
        """Store `content` under a name of the writer's choice (the archive: files that people look for by name), in
        one piece or not at all; what stood there is replaced. Raises StoreUnavailable."""
        ...

    async def get_named(self, name: str) -> bytes:
        """The bytes under a name, unverified: whoever names objects keeps their hashes. Raises BlobMissing,
        StoreUnavailable."""
        ...

    async def names(self, prefix: str) -> list[str]:
        """Names that begin with `prefix`, sorted; empty when there is none. Raises StoreUnavailable."""
        ...

    async def close(self) -> None:
        """Release connections."""
        ...


class MemoryBlobs:
    """See Blobs. `objects` maps sha256, `named` maps names to bytes, for tests that damage them."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.named: dict[str, bytes] = {}
        self.point: Callable[[], None] = _nothing
        """Called before and after each put of a named object: a place where a process may die (`MemoryLog.point`)."""

    async def put(self, content: bytes, *, media_type: str = "application/octet-stream") -> BlobRef:
        sha256 = hashlib.sha256(content).hexdigest()
        self.objects[sha256] = content
        return BlobRef(sha256, len(content), media_type)

    async def get(self, ref: BlobRef) -> bytes:
        try:
            content = self.objects[ref.sha256]
        except KeyError:
            raise BlobMissing(f"the store holds no object {ref.sha256}") from None
        if len(content) != ref.size or hashlib.sha256(content).hexdigest() != ref.sha256:
            raise BlobCorrupt(f"object {ref.sha256}: its {len(content)} bytes are not the {ref.size} that were put")
        return content

    async def put_named(self, name: str, content: bytes, *, media_type: str = "application/octet-stream") -> None:
        self.point()
        self.named[name] = content
        self.point()

    async def get_named(self, name: str) -> bytes:
        try:
            return self.named[name]
        except KeyError:
            raise BlobMissing(f"the store holds no object {name}") from None

    async def names(self, prefix: str) -> list[str]:
        return sorted(name for name in self.named if name.startswith(prefix))

    async def close(self) -> None:
        """Nothing to release."""


def _nothing() -> None: ...


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


async def expert_rows(sample: SegmentSample, blobs: Blobs) -> NDArray[np.int32]:
    """Expert ids by position, int32 [tokens - 1, layers, top_k]; row i was chosen where token i + 1 was predicted. Each
    blob is fetched once.

    Raises NoExperts, BrokenExperts, ExpertsDoNotCover (processors.core.experts); BlobMissing, BlobCorrupt,
    StoreUnavailable.
    """
    refs = list(dict.fromkeys(piece.rows for piece in sample.experts))
    contents = await asyncio.gather(*(blobs.get(ref) for ref in refs))
    return assembled(sample, {ref: unpacked(content) for ref, content in zip(refs, contents, strict=True)})
