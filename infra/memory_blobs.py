"""The object store in memory: the fake that passes the contract of `infra.blobs`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from turnlog.infra.blobs import BlobCorrupt, BlobMissing
from turnlog.schemas.types import BlobRef


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
