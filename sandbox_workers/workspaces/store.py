"""Workspaces in the object store: a sandbox's files become a manifest and packs, and files again somewhere else.

Raises the errors of sandbox_workers.protocol: WorkspaceLost (not in the store), WorkspaceCorrupt (not what its hash
says, or no workspace), QuotaExceeded (too large), FileRefused (no tree); and StoreUnavailable.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import ParamSpec, TypeVar

from turnlog.infra.blobs import BlobCorrupt, BlobMissing, Blobs
from turnlog.sandbox_workers.protocol import (
    FileEntry,
    FileKind,
    FileRefused,
    QuotaExceeded,
    SandboxDied,
    WorkspaceCorrupt,
    WorkspaceLost,
)
from turnlog.sandbox_workers.workspaces.looks import Looks, Tree
from turnlog.sandbox_workers.workspaces.manifest import (
    MEDIA_TYPE,
    MOST_MANIFEST_BYTES,
    Manifest,
    Piece,
    Stored,
    decode,
)
from turnlog.sandbox_workers.workspaces.packs import WRITTEN, Known, Packer
from turnlog.sandbox_workers.workspaces.tree import SHA256, flaw
from turnlog.schemas.types import BlobRef

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

BATCH_BYTES = 4 << 20
BATCH_FILES = 1000
"""What one request for contents asks a sandbox for; a longer file comes alone."""
FETCHES = 8
"""Packs fetched at once."""
FEW_ENTRIES = 500
"""Looked through in the loop: it takes 10 ms."""
ENTRY_BYTES = 100
"""Of a manifest, at least."""
CACHED_ENTRIES = 200_000
CACHED_MANIFESTS = 200
"""Manifests kept in memory: so many, or fewer with so many entries together."""


class Workspaces:
    """Stores and restores; one per worker, so that sessions share pieces."""

    def __init__(self, blobs: Blobs, *, pieces: int = 65_536, trees: int = 64) -> None:
        """`pieces`: how many places of pieces are remembered; `trees`: of how many sandboxes the last look is."""
        self._blobs = blobs
        self._known = Known(pieces)
        self._looks = Looks(trees)
        self._manifests: OrderedDict[BlobRef, Manifest] = OrderedDict()
        self._entries = 0

    async def snapshot(
        self, tree: Tree, since: BlobRef | None = None, *, most: int | None = None, interpreter: bool | None = None
    ) -> BlobRef:
        """Store the files. `since`: the workspace that they come from; what it holds already is not written again,
        and when nothing has changed it is the answer. `most`: bytes that they may have. `interpreter`: what the
        manifest says of it, if not what the sandbox says.
        Raises FileRefused, QuotaExceeded, SandboxDied, StoreUnavailable."""
        entries = sorted(await tree.index(), key=lambda entry: entry.path)
        if said := await _aside(len(entries), flaw, entries):
            raise FileRefused(said)
        size = sum(entry.size for entry in entries)
        if most is not None and size > most:
            raise QuotaExceeded(f"the workspace holds {size} bytes, {most} are allowed")
        before = await self._before(tree, since)
        alive = tree.interpreter if interpreter is None else interpreter
        if (
            since is not None
            and before is not None
            and before.interpreter == alive
            and await _aside(len(entries), self._looks.same, tree, before, entries)
        ):
            return since
        kept = self._looks.kept(tree, before, entries)
        manifest = await self._stored(tree, entries, kept, Packer(self._blobs, self._known, _pieces(before)))
        if manifest.wasteful:
            manifest = await self._stored(tree, entries, {}, Packer(self._blobs, Known(0), {}))
        manifest = await self._put(dataclasses.replace(manifest, interpreter=alive), before)
        self._looks.note(tree, manifest, entries)
        assert manifest.ref is not None
        return manifest.ref

    async def empty(self) -> BlobRef:
        """The workspace without files. Raises StoreUnavailable."""
        manifest = await self._put(Manifest(()), None)
        assert manifest.ref is not None
        return manifest.ref

    async def without_interpreter(self, ref: BlobRef) -> BlobRef:
        """The same files, of a session whose interpreter has ended. Raises as `open`."""
        manifest = await self.open(ref)
        if not manifest.interpreter:
            return ref
        manifest = await self._put(dataclasses.replace(manifest, interpreter=False), None)
        assert manifest.ref is not None
        return manifest.ref

    async def open(self, ref: BlobRef) -> Manifest:
        """What is stored under `ref`. Raises WorkspaceLost, WorkspaceCorrupt, StoreUnavailable."""
        if ref in self._manifests:
            self._manifests.move_to_end(ref)
            return self._manifests[ref]
        if not SHA256.match(ref.sha256) or not 0 < ref.size <= MOST_MANIFEST_BYTES:
            raise WorkspaceCorrupt(f"{ref.sha256[:80]} of {ref.size} bytes cannot be a workspace")
        content = await self._get(ref)
        manifest = await _aside(len(content) // ENTRY_BYTES, decode, content, ref)
        return self._manifests.get(ref) or self._cache(ref, manifest)

    async def restore(self, tree: Tree, ref: BlobRef, *, disk_bytes: int) -> Manifest:
        """Make `tree` hold exactly the files stored under `ref`. Nothing is fetched before sizes and paths are
        known to be sound, nothing is written before every hash is.
        Raises WorkspaceLost, WorkspaceCorrupt, QuotaExceeded, SandboxDied, StoreUnavailable."""
        manifest = await self.open(ref)
        if manifest.size > disk_bytes:
            raise QuotaExceeded(f"workspace {ref.sha256} holds {manifest.size} bytes, {disk_bytes} are allowed")
        if manifest.bloated:
            raise WorkspaceCorrupt(f"workspace {ref.sha256} lies in packs of many times its {manifest.size} bytes")
        contents = await self._contents(manifest)
        try:
            await tree.restore([stored.entry for stored in manifest.files], contents)
        except QuotaExceeded:
            raise
        except FileRefused as error:
            raise WorkspaceCorrupt(f"workspace {ref.sha256} does not fit this sandbox: {error}") from error
        self._looks.note(tree, manifest, await tree.index())
        return manifest

    # -- what is known

    async def _before(self, tree: Tree, since: BlobRef | None) -> Manifest | None:
        if since is None:
            return None
        if (seen := self._looks.last(tree)) is not None and seen.ref == since:
            return seen
        try:
            return await self.open(since)
        except WorkspaceLost as error:  # the files themselves are here: they are stored as a whole
            log.warning("workspace %s is stored anew: %s", since.sha256, error)
            return None

    def _cache(self, ref: BlobRef, manifest: Manifest) -> Manifest:
        self._manifests[ref] = manifest
        self._entries += len(manifest.files) + CACHED_ENTRIES // CACHED_MANIFESTS
        while self._entries > CACHED_ENTRIES and len(self._manifests) > 1:
            _, gone = self._manifests.popitem(last=False)
            self._entries -= len(gone.files) + CACHED_ENTRIES // CACHED_MANIFESTS
        return manifest

    # -- from a tree into the store

    async def _stored(
        self, tree: Tree, entries: Iterable[FileEntry], kept: Mapping[str, Stored], packer: Packer
    ) -> Manifest:
        """The tree's manifest, with every piece in the store."""
        changed = [entry for entry in entries if entry.kind is FileKind.file and entry.path not in kept]
        read: dict[str, tuple[str, int, tuple[str, ...]]] = {}
        for batch in _batches(changed):
            contents = await tree.read_files(
                [entry.path for entry in batch], most=max(BATCH_BYTES, sum(entry.size for entry in batch))
            )
            if len(contents) != len(batch):
                raise SandboxDied(f"asked for {len(batch)} files, the sandbox answered with {len(contents)}")
            for entry, content in zip(batch, contents, strict=True):
                sha256 = await asyncio.to_thread(_sha256, content) if len(content) > BATCH_BYTES else _sha256(content)
                read[entry.path] = sha256, len(content), await packer.add(content)
        await packer.flush()
        files = []
        for entry in entries:
            plain = dataclasses.replace(entry, stamp="")
            if entry.path in kept:
                files.append(Stored(plain, kept[entry.path].sha256, kept[entry.path].pieces))
            elif entry.kind is FileKind.file:
                sha256, size, hashes = read[entry.path]
                pieces = tuple(packer.piece(piece) for piece in hashes)
                files.append(Stored(dataclasses.replace(plain, size=size), sha256, pieces))
            else:
                files.append(Stored(plain))
        return Manifest(tuple(files))

    async def _put(self, manifest: Manifest, before: Manifest | None) -> Manifest:
        """Give the manifest its reference; the one before when they say the same."""
        if before is not None and not before.wasteful and before.says == manifest.says:
            return before
        content = await _aside(len(manifest.files), manifest.encode)
        ref = BlobRef(_sha256(content), len(content), MEDIA_TYPE)
        if ref not in self._manifests:
            ref = await self._blobs.put(content, media_type=MEDIA_TYPE)
            WRITTEN.inc(ref.size)
        return self._cache(ref, dataclasses.replace(manifest, ref=ref))

    # -- and back

    async def _contents(self, manifest: Manifest) -> dict[str, bytes]:
        """path -> bytes, every hash checked."""
        turns = asyncio.Semaphore(FETCHES)

        async def fetch(pack: BlobRef) -> bytes:
            async with turns:
                return await self._get(pack)

        fetched = await asyncio.gather(*(fetch(pack) for pack in manifest.packs))
        return await asyncio.to_thread(self._joined, manifest, dict(zip(manifest.packs, fetched, strict=True)))

    def _joined(self, manifest: Manifest, packs: Mapping[BlobRef, bytes]) -> dict[str, bytes]:
        sound: set[Piece] = set()
        contents: dict[str, bytes] = {}
        for stored in manifest.files:
            if stored.entry.kind is not FileKind.file:
                continue
            parts = []
            for piece in stored.pieces:
                part = memoryview(packs[piece.pack])[piece.offset : piece.offset + piece.length]
                if piece not in sound:
                    _same(piece.sha256, part, f"a piece of {stored.entry.path[:200]!r}")
                    sound.add(piece)
                    self._known.add(piece)
                parts.append(part)
            content = contents[stored.entry.path] = b"".join(parts)
            if [piece.sha256 for piece in stored.pieces] != [stored.sha256]:
                _same(stored.sha256, content, repr(stored.entry.path[:200]))
        return contents

    async def _get(self, ref: BlobRef) -> bytes:
        try:
            return await self._blobs.get(ref)
        except BlobMissing as error:
            raise WorkspaceLost(f"a part of the stored workspace is gone: {error}") from error
        except BlobCorrupt as error:
            raise WorkspaceCorrupt(f"a part of the stored workspace is damaged: {error}") from error


async def _aside(entries: int, act: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Do what takes a while for so many entries: in a thread when they are many, so that the loop goes on."""
    if entries <= FEW_ENTRIES:
        return act(*arguments, **named)
    return await asyncio.to_thread(act, *arguments, **named)


def _pieces(before: Manifest | None) -> dict[str, Piece]:
    return {piece.sha256: piece for stored in (before.files if before else ()) for piece in stored.pieces}


def _batches(entries: Iterable[FileEntry]) -> Iterator[list[FileEntry]]:
    batch: list[FileEntry] = []
    size = 0
    for entry in entries:
        if batch and (size + entry.size > BATCH_BYTES or len(batch) >= BATCH_FILES):
            yield batch
            batch, size = [], 0
        batch.append(entry)
        size += entry.size
    if batch:
        yield batch


def _same(sha256: str, content: bytes | memoryview, what: str) -> None:
    if _sha256(content) != sha256:
        raise WorkspaceCorrupt(f"{what} does not hash to {sha256}")


def _sha256(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()
