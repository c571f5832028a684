"""An object store that reads from the real one and keeps what is put in memory: a rerun leaves nothing behind."""

from __future__ import annotations

from turnlog.infra.blobs import BlobMissing, Blobs
from turnlog.infra.memory_blobs import MemoryBlobs
from turnlog.schemas.types import BlobRef


class ScratchBlobs:
    """See Blobs."""

    def __init__(self, below: Blobs) -> None:
        self._below = below
        self._own = MemoryBlobs()

    async def put(self, content: bytes, *, media_type: str = "application/octet-stream") -> BlobRef:
        """See Blobs."""
        return await self._own.put(content, media_type=media_type)

    async def get(self, ref: BlobRef) -> bytes:
        """See Blobs."""
        try:
            return await self._own.get(ref)
        except BlobMissing:
            return await self._below.get(ref)

    async def put_named(self, name: str, content: bytes, *, media_type: str = "application/octet-stream") -> None:
        """See Blobs."""
        await self._own.put_named(name, content, media_type=media_type)

    async def get_named(self, name: str) -> bytes:
        """See Blobs."""
        try:
            return await self._own.get_named(name)
        except BlobMissing:
            return await self._below.get_named(name)

    async def names(self, prefix: str) -> list[str]:
        """See Blobs."""
        return sorted({*await self._own.names(prefix), *await self._below.names(prefix)})

    async def close(self) -> None:
        """Nothing to release: the store below is somebody else's."""
