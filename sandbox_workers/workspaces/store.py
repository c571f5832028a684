"""Workspaces in the object store: a sandbox's files become a manifest and packs, and can be restored elsewhere.

Files are cut into pieces, hashed, and written only if they are not stored yet. Files that have not changed since a tree
was last examined are not read again.

Raises the errors of sandbox_workers.protocol: WorkspaceLost (not in the store), WorkspaceCorrupt (does not match its
hash, or is no workspace), QuotaExceeded (too large), FileRefused (no tree); and StoreUnavailable."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ParamSpec, Protocol, TypeVar

from prometheus_client import Counter

from turnlog.infra.blobs import REUSED_S, BlobCorrupt, BlobMissing, Blobs
from turnlog.infra.environments.workspaces import (
    MEDIA_TYPE,
    MOST_MANIFEST_BYTES,
    PACK_BYTES,
    PACK_TYPE,
    PIECE_BYTES,
    SHA256,
    FileEntry,
    FileKind,
    NotAWorkspace,
    PackedRange,
    StoredEntry,
    WorkspaceManifest,
    decode,
    flaw,
)
from turnlog.sandbox_workers.protocol import FileRefused, QuotaExceeded, SandboxDied, WorkspaceCorrupt, WorkspaceLost
from turnlog.schemas.types import BlobRef

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

BATCH_BYTES = 4 << 20
BATCH_FILES = 1000
"""Limits of one request for contents to a sandbox; a longer file is requested alone."""
FETCHES = 8
"""Number of packs fetched at once."""
FEW_ENTRIES = 500
"""Maximum number of entries processed in the event loop, which takes 10 ms; more are processed in a thread."""
ENTRY_BYTES = 100
"""Minimum size of a manifest entry."""
CACHED_ENTRIES = 200_000
CACHED_MANIFESTS = 200
"""Limits of the manifests cached in memory: their number, and their entries together."""

WRITTEN = Counter("turnlog_sandbox_workspace_written_bytes", "Bytes of workspaces put into the object store")
REUSED = Counter(
    "turnlog_sandbox_workspace_reused_bytes", "Bytes of changed files that were already in the object store"
)


class Workspaces:
    """Stores and restores workspaces; one per worker, so that sessions share pieces."""

    def __init__(self, blobs: Blobs, *, pieces: int = 65_536, trees: int = 64) -> None:
        """Create it. `pieces` is the number of piece locations to remember, `trees` the number of sandboxes whose last
        examination is remembered."""
        self._blobs = blobs
        self._known = PieceLocations(pieces)
        self._looks = TreeExaminations(trees)
        self._manifests: OrderedDict[BlobRef, WorkspaceManifest] = OrderedDict()
        self._since: dict[BlobRef, float] = {}
        """Time at which each cached manifest was put or read."""
        self._entries = 0

    async def snapshot(
        self, tree: FileTree, since: BlobRef | None = None, *, most: int | None = None, interpreter: bool | None = None
    ) -> BlobRef:
        """Store the files of `tree` and return their workspace.

        `since` is the workspace that the files come from: what it contains is not written again, and it is returned if
        nothing has changed. `most` is the maximum size in bytes. `interpreter` overrides the sandbox's own report in
        the manifest. Raises FileRefused, QuotaExceeded, SandboxDied, StoreUnavailable."""
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
        kept = self._looks.unchanged_files(tree, before, entries)
        manifest = await self._store_tree(tree, entries, kept, Packer(self._blobs, self._known, _pieces(before)))
        if manifest.wasteful:
            manifest = await self._store_tree(tree, entries, {}, Packer(self._blobs, PieceLocations(0), {}))
        manifest = await self._put(dataclasses.replace(manifest, interpreter=alive), before)
        self._looks.note(tree, manifest, entries)
        assert manifest.ref is not None
        return manifest.ref

    async def empty(self) -> BlobRef:
        """Return the workspace without files. Raises StoreUnavailable."""
        manifest = await self._put(WorkspaceManifest(()), None)
        assert manifest.ref is not None
        return manifest.ref

    async def without_interpreter(self, ref: BlobRef) -> BlobRef:
        """Return the workspace with the same files, marked as having no interpreter. Raises as `open` does."""
        manifest = await self.open(ref)
        if not manifest.interpreter:
            return ref
        manifest = await self._put(dataclasses.replace(manifest, interpreter=False), None)
        assert manifest.ref is not None
        return manifest.ref

    async def open(self, ref: BlobRef) -> WorkspaceManifest:
        """Return the manifest stored under `ref`. Raises WorkspaceLost, WorkspaceCorrupt, StoreUnavailable."""
        if ref in self._manifests:
            self._manifests.move_to_end(ref)
            return self._manifests[ref]
        if not SHA256.match(ref.sha256) or not 0 < ref.size <= MOST_MANIFEST_BYTES:
            raise WorkspaceCorrupt(f"{ref.sha256[:80]} of {ref.size} bytes cannot be a workspace")
        content = await self._get(ref)
        try:
            manifest = await _aside(len(content) // ENTRY_BYTES, decode, content, ref)
        except NotAWorkspace as error:
            raise WorkspaceCorrupt(str(error)) from error
        return self._manifests.get(ref) or self._cache(ref, manifest)

    async def restore(self, tree: FileTree, ref: BlobRef, *, disk_bytes: int) -> WorkspaceManifest:
        """Make `tree` contain exactly the files stored under `ref`. Nothing is fetched before sizes and paths are
        checked; nothing is written before every hash is. Raises WorkspaceLost, WorkspaceCorrupt, QuotaExceeded,
        SandboxDied, StoreUnavailable."""
        manifest = await self.open(ref)
        if manifest.size > disk_bytes:
            raise QuotaExceeded(f"workspace {ref.sha256} holds {manifest.size} bytes, {disk_bytes} are allowed")
        if manifest.is_bloated:
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

    async def _before(self, tree: FileTree, since: BlobRef | None) -> WorkspaceManifest | None:
        if since is None:
            return None
        if (seen := self._looks.last(tree)) is not None and seen.ref == since:
            return seen
        try:
            return await self.open(since)
        except WorkspaceLost as error:  # the files themselves are here, so store all of them
            log.warning("workspace %s is stored anew: %s", since.sha256, error)
            return None

    def _cache(self, ref: BlobRef, manifest: WorkspaceManifest) -> WorkspaceManifest:
        self._manifests[ref] = manifest
        self._since.setdefault(ref, time.monotonic())
        self._entries += len(manifest.files) + CACHED_ENTRIES // CACHED_MANIFESTS
        while self._entries > CACHED_ENTRIES and len(self._manifests) > 1:
            old, gone = self._manifests.popitem(last=False)
            del self._since[old]
            self._entries -= len(gone.files) + CACHED_ENTRIES // CACHED_MANIFESTS
        return manifest

    # -- from a tree into the store

    async def _store_tree(
        self, tree: FileTree, entries: Iterable[FileEntry], kept: Mapping[str, StoredEntry], packer: Packer
    ) -> WorkspaceManifest:
        """Build the tree's manifest, with every piece in the store."""
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
                files.append(StoredEntry(plain, kept[entry.path].sha256, kept[entry.path].pieces))
            elif entry.kind is FileKind.file:
                sha256, size, hashes = read[entry.path]
                pieces = tuple(packer.piece(piece) for piece in hashes)
                files.append(StoredEntry(dataclasses.replace(plain, size=size), sha256, pieces))
            else:
                files.append(StoredEntry(plain))
        return WorkspaceManifest(tuple(files))

    async def _put(self, manifest: WorkspaceManifest, before: WorkspaceManifest | None) -> WorkspaceManifest:
        """Store the manifest and set its reference. Return `before` if both describe the same files."""
        if before is not None and not before.wasteful and before.says == manifest.says:
            return before
        content = await _aside(len(manifest.files), manifest.encode)
        ref = BlobRef(_sha256(content), len(content), MEDIA_TYPE)
        if ref not in self._manifests or time.monotonic() - self._since[ref] > REUSED_S:  # as for pieces, see Known
            ref = await self._blobs.put(content, media_type=MEDIA_TYPE)
            WRITTEN.inc(ref.size)
            self._since[ref] = time.monotonic()
        return self._cache(ref, dataclasses.replace(manifest, ref=ref))

    # -- and back

    async def _contents(self, manifest: WorkspaceManifest) -> dict[str, bytes]:
        """Return the bytes of each file by path, every hash checked."""
        turns = asyncio.Semaphore(FETCHES)

        async def fetch(pack: BlobRef) -> bytes:
            async with turns:
                return await self._get(pack)

        fetched = await asyncio.gather(*(fetch(pack) for pack in manifest.packs))
        return await asyncio.to_thread(self._join_pieces, manifest, dict(zip(manifest.packs, fetched, strict=True)))

    def _join_pieces(self, manifest: WorkspaceManifest, packs: Mapping[BlobRef, bytes]) -> dict[str, bytes]:
        sound: set[PackedRange] = set()
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
    """Call `act`, in a thread if there are many entries, so that the event loop is not blocked."""
    if entries <= FEW_ENTRIES:
        return act(*arguments, **named)
    return await asyncio.to_thread(act, *arguments, **named)


def _pieces(before: WorkspaceManifest | None) -> dict[str, PackedRange]:
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


class PieceLocations:
    """Locations of pieces that this worker has seen or made itself; the latest `most` are retained. A location is added
    only if its bytes were hashed here, so nobody can pass other bytes off under a hash. It is forgotten after REUSED_S,
    since `turnlog gc` may remove a pack that nobody has named for so long."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._places: OrderedDict[str, tuple[PackedRange, float]] = OrderedDict()

    def add(self, piece: PackedRange) -> None:
        """Remember the location of a piece."""
        self._places[piece.sha256] = piece, self._clock()
        self._places.move_to_end(piece.sha256)
        if len(self._places) > self._most:
            self._places.popitem(last=False)

    def find(self, sha256: str) -> PackedRange | None:
        """Return the location of the piece with this hash, or None if unknown."""
        if (found := self._places.get(sha256)) is None:
            return None
        piece, since = found
        if self._clock() - since > REUSED_S:
            del self._places[sha256]
            return None
        self._places.move_to_end(sha256)
        return piece


class Packer:
    """Collects the contents of one snapshot's files and puts what is new into packs of several files."""

    def __init__(self, blobs: Blobs, known: PieceLocations, before: dict[str, PackedRange]) -> None:
        """Create a packer. `before` has the pieces of the previous manifest by hash."""
        self._blobs = blobs
        self._known = known
        self._before = before
        self._made: dict[str, PackedRange] = {}
        """Pieces in packs that are written."""
        self._open: dict[str, tuple[int, int]] = {}
        """Pieces of the open pack, as (offset, length)."""
        self._parts: list[bytes] = []
        self._size = 0

    async def add(self, content: bytes) -> tuple[str, ...]:
        """Cut a file into pieces. Return their hashes, to be looked up by `piece` after `flush`. Raises
        StoreUnavailable."""
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
        """Write the open pack, if it is not empty. Raises StoreUnavailable."""
        if not self._parts:
            return
        pack = await self._blobs.put(b"".join(self._parts), media_type=PACK_TYPE)
        WRITTEN.inc(pack.size)
        for sha256, (offset, length) in self._open.items():
            piece = self._made[sha256] = PackedRange(sha256, _as_pack(pack), offset, length)
            self._known.add(piece)
        self._open, self._parts, self._size = {}, [], 0

    def piece(self, sha256: str) -> PackedRange:
        """Return the location of the piece with this hash. Raises KeyError if it was not added and flushed."""
        found = self._place(sha256)
        if found is None:
            raise KeyError(sha256)
        return found

    def _place(self, sha256: str) -> PackedRange | None:
        """Look the piece up once per snapshot, so that what `add` has found is not forgotten before `piece` asks."""
        found = self._made.get(sha256) or self._before.get(sha256) or self._known.find(sha256)
        if found is not None:
            self._made[sha256] = found
        return found


def _as_pack(ref: BlobRef) -> BlobRef:
    return BlobRef(ref.sha256, ref.size, PACK_TYPE)


class FileTree(Protocol):
    """A source and target of files: a Sandbox, or a folder of this machine."""

    @property
    def interpreter(self) -> bool: ...

    async def index(self) -> tuple[FileEntry, ...]: ...

    async def read_files(self, paths: Sequence[str], *, most: int) -> tuple[bytes, ...]: ...

    async def restore(self, entries: Sequence[FileEntry], contents: Mapping[str, bytes]) -> None: ...


@dataclass(frozen=True, slots=True)
class Look:
    """State of a tree when it was last examined."""

    tree: FileTree
    manifest: WorkspaceManifest
    entries: list[FileEntry]
    stamps: Mapping[str, str]
    """Stamps by path of files whose bytes match the manifest."""


class TreeExaminations:
    """The last examination of each of the latest `most` trees. Stamps are trusted only for the very tree that had them,
    and only while nobody has put other files into it behind our back, which the caller's `before` shows."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._looks: OrderedDict[int, Look] = OrderedDict()

    def note(self, tree: FileTree, manifest: WorkspaceManifest, entries: Iterable[FileEntry]) -> None:
        """Note that the tree holds the manifest's files, with the stamps of `entries`."""
        entries = sorted(entries, key=lambda entry: entry.path)
        sizes = {stored.entry.path: stored.entry.size for stored in manifest.files if stored.sha256}
        stamps = {entry.path: entry.stamp for entry in entries if sizes.get(entry.path) == entry.size}
        self._looks[id(tree)] = Look(tree, manifest, entries, stamps)
        self._looks.move_to_end(id(tree))
        if len(self._looks) > self._most:
            self._looks.popitem(last=False)

    def last(self, tree: FileTree) -> WorkspaceManifest | None:
        """Return the manifest of the last examination, or None."""
        look = self._looks.get(id(tree))
        return look.manifest if look is not None and look.tree is tree else None

    def same(self, tree: FileTree, before: WorkspaceManifest, entries: list[FileEntry]) -> bool:
        """Return whether nothing has changed since, judged by stamps alone."""
        if self.last(tree) is not before or before.wasteful:
            return False
        stamped = all(entry.stamp or entry.kind is not FileKind.file for entry in entries)
        return stamped and self._looks[id(tree)].entries == entries

    def unchanged_files(
        self, tree: FileTree, before: WorkspaceManifest | None, entries: Iterable[FileEntry]
    ) -> dict[str, StoredEntry]:
        """Return unchanged files, by path."""
        if before is None or self.last(tree) is not before:
            return {}
        stamps = self._looks[id(tree)].stamps
        stored = {file.entry.path: file for file in before.files}
        return {
            entry.path: stored[entry.path]
            for entry in entries
            if entry.stamp and entry.stamp == stamps.get(entry.path) and entry.size == stored[entry.path].entry.size
        }
