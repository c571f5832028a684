"""Immutable objects named by their sha256. `infra.s3` is the real store, `infra.memory` the fake; one contract.

BlobError
├── BlobMissing       nothing under that hash (yet): retried, then a typed end where it is needed
├── BlobCorrupt       the bytes do not hash to their name
└── StoreUnavailable      credentials, quota
    └── StoreUnreachable  transport or 5xx
"""

from __future__ import annotations

from typing import Protocol

from turnlog.infra.unreachable import Unreachable
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
