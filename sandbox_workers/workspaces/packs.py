"""Pieces of files on their way into packs: cut, hashed, and written only when they are nowhere yet."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from prometheus_client import Counter

from turnlog.infra.blobs import Blobs
from turnlog.sandbox_workers.workspaces.manifest import PACK_BYTES, PACK_TYPE, PIECE_BYTES, Piece
from turnlog.schemas.types import BlobRef

WRITTEN = Counter("turnlog_sandbox_workspace_written_bytes", "Bytes of workspaces put into the object store")
REUSED = Counter(
    "turnlog_sandbox_workspace_reused_bytes", "Bytes of changed files that lay in the object store already"
)


class Known:
    """Pieces whose place this worker has seen or made itself, the latest `most` of them. A place is taken in only
    when the bytes there were hashed here: nobody can pass other bytes off under a hash."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._places: OrderedDict[str, Piece] = OrderedDict()

    def add(self, piece: Piece) -> None:
        """Remember where these bytes lie."""
        self._places[piece.sha256] = piece
        self._places.move_to_end(piece.sha256)
        if len(self._places) > self._most:
            self._places.popitem(last=False)

    def find(self, sha256: str) -> Piece | None:
        """Where these bytes lie, if it is known."""
        if sha256 in self._places:
            self._places.move_to_end(sha256)
        return self._places.get(sha256)


class Packer:
    """Takes the contents of one snapshot's files and puts what is new, several files to a pack."""

    def __init__(self, blobs: Blobs, known: Known, before: dict[str, Piece]) -> None:
        """`before`: pieces of the manifest that this snapshot follows, by hash."""
        self._blobs = blobs
        self._known = known
        self._before = before
        self._made: dict[str, Piece] = {}
        """Pieces of packs that are written."""
        self._open: dict[str, tuple[int, int]] = {}
        """Pieces of the open pack: offset, length."""
        self._parts: list[bytes] = []
        self._size = 0

    async def add(self, content: bytes) -> tuple[str, ...]:
        """Cut a file; the hashes of its pieces, to be found by `piece` after `flush`. Raises StoreUnavailable."""
        view = memoryview(content)
        hashes = []
        for start in range(0, len(content), PIECE_BYTES):
            part = view[start : start + PIECE_BYTES]
            sha256 = hashlib.sha256(part).hexdigest()
            hashes.append(sha256)
            if self._place(sha256) is not None or sha256 in self._open:
                REUSED.inc(len(part))
                continue
            if self._size + len(part) > PACK_BYTES:
                await self.flush()
            self._open[sha256] = (self._size, len(part))
            self._parts.append(bytes(part))
            self._size += len(part)
        return tuple(hashes)

    async def flush(self) -> None:
        """Put the open pack, if there is anything in it. Raises StoreUnavailable."""
        if not self._parts:
            return
        pack = await self._blobs.put(b"".join(self._parts), media_type=PACK_TYPE)
        WRITTEN.inc(pack.size)
        for sha256, (offset, length) in self._open.items():
            piece = self._made[sha256] = Piece(sha256, _as_pack(pack), offset, length)
            self._known.add(piece)
        self._open, self._parts, self._size = {}, [], 0

    def piece(self, sha256: str) -> Piece:
        """Where the bytes of that hash lie. Raises KeyError before they were added and flushed."""
        found = self._place(sha256)
        if found is None:
            raise KeyError(sha256)
        return found

    def _place(self, sha256: str) -> Piece | None:
        """Decided once per snapshot, so that what `add` has found is not forgotten before `piece` asks."""
        found = self._made.get(sha256) or self._before.get(sha256) or self._known.find(sha256)
        if found is not None:
            self._made[sha256] = found
        return found


def _as_pack(ref: BlobRef) -> BlobRef:
    return BlobRef(ref.sha256, ref.size, PACK_TYPE)
