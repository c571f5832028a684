"""Workspaces in the store: the list of files, and the pieces of packs that make up their contents.

A manifest is a blob of canonical JSON (`version` 1). `tree_sha256` covers only paths, kinds, modes, targets and content
hashes, so that equal trees have equal hashes, however they were made and wherever their pieces are stored.

ref = await store_files({"calc.py": "def add(a, b): ..."}, blobs)  # for example a session's first workspace
both = await put(join_trees({"before": first, "after": last}), blobs)  # joined below folders without reading files

NotAWorkspace      the blob is not a manifest, describes an impossible workspace, or is not in the store
FilesUnusable      files that no workspace can contain; the message names the path
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from turnlog.infra.blobs import BlobCorrupt, BlobMissing, Blobs
from turnlog.schemas.types import BlobRef

MEDIA_TYPE = "application/vnd.turnlog.workspace+json"
PACK_TYPE = "application/vnd.turnlog.workspace-pack"
VERSION = 1
PIECE_BYTES = 1 << 20
"""Size of a file's pieces; the last piece may be shorter."""
PACK_BYTES = 4 << 20
"""Maximum size of a pack."""
MOST_MANIFEST_BYTES = 64 << 20
WASTE_BYTES = 16 << 20
WASTE_FACTOR = 4
"""A workspace of n bytes may take packs of at most WASTE_FACTOR * n + WASTE_BYTES. A larger one is packed again. If
somebody else has stored such a workspace, it is rejected before any byte is fetched."""
MANY_PACKS = 128
"""Number of small packs that a chain of snapshots may accumulate before they are packed again."""
CANONICAL = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"), sort_keys=True)

MOST_ENTRIES = 100_000
MOST_PATH_BYTES = 4096
"""PATH_MAX of Linux (limits.h)."""
MOST_NAME_BYTES = 255
"""NAME_MAX of Linux."""
SHA256 = re.compile(r"[0-9a-f]{64}\Z")


class FileKind(StrEnum):
    """Kinds of entries in a workspace. Sockets, pipes and devices are left out of snapshots."""

    file = "file"
    folder = "folder"
    link = "link"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """An entry of a workspace."""

    path: str
    """Relative path with / as separator. Bytes that are not UTF-8 are escaped by surrogateescape. Parents precede
    children."""
    kind: FileKind
    mode: int
    """Permission bits only (0 .. 0o777)."""
    size: int = 0
    """Size of a file in bytes; 0 for other kinds."""
    target: str = ""
    """Target of a link, unresolved."""
    stamp: str = ""
    """Value that changes whenever the file's bytes may have changed; empty if the backend cannot tell. It is valid only
    in the backend that made it."""


class NotAWorkspace(Exception):
    """The blob is not a manifest, or not of a tree of files."""


class FilesUnusable(Exception):
    """The given files cannot form a workspace."""


@dataclass(frozen=True, slots=True)
class PackedRange:
    """A range of bytes of a file, and its location in a pack."""

    sha256: str
    pack: BlobRef
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """An entry of the tree, with empty `stamp`. Files also have the hash of their contents and their pieces, in
    order."""

    entry: FileEntry
    sha256: str = ""
    pieces: tuple[PackedRange, ...] = ()


@dataclass(frozen=True)
class WorkspaceManifest:
    """A complete workspace."""

    files: tuple[StoredEntry, ...]
    """Entries, sorted by path."""
    interpreter: bool = False
    """True if a persistent interpreter ran with these files; its state is not part of the manifest."""
    ref: BlobRef | None = field(default=None, compare=False)
    """Reference of the manifest's own blob, if it is stored."""

    @functools.cached_property
    def tree_sha256(self) -> str:
        """Hex sha256 that is equal for equal trees."""
        about = hashlib.sha256()
        for stored in self.files:
            entry = stored.entry
            line = CANONICAL.encode([entry.path, entry.kind.value, entry.mode, entry.target, stored.sha256])
            about.update(line.encode() + b"\n")
        return about.hexdigest()

    @functools.cached_property
    def size(self) -> int:
        """Total size of all files in bytes."""
        return sum(stored.entry.size for stored in self.files)

    @functools.cached_property
    def packs(self) -> tuple[BlobRef, ...]:
        """Packs that must be fetched, each once, in order of first use."""
        return tuple(dict.fromkeys(piece.pack for stored in self.files for piece in stored.pieces))

    @property
    def is_bloated(self) -> bool:
        """True if the packs are much larger than the files."""
        return sum(pack.size for pack in self.packs) > WASTE_FACTOR * self.size + WASTE_BYTES

    @property
    def wasteful(self) -> bool:
        """True if the files should be packed again: the packs are bloated, or too many are small."""
        return self.is_bloated or len(self.packs) > MANY_PACKS + 2 * self.size // PACK_BYTES

    @property
    def says(self) -> tuple[str, bool]:
        """Everything by which a session can distinguish two workspaces."""
        return self.tree_sha256, self.interpreter

    def encode(self) -> bytes:
        """Encode the manifest as canonical JSON."""
        number = {pack: place for place, pack in enumerate(self.packs)}
        text = CANONICAL.encode(
            {
                "version": VERSION,
                "tree_sha256": self.tree_sha256,
                "interpreter": self.interpreter,
                "packs": [[pack.sha256, pack.size] for pack in self.packs],
                "entries": [_line(stored, number) for stored in self.files],
            }
        )
        return text.encode()


def decode(content: bytes, ref: BlobRef) -> WorkspaceManifest:
    """Parse a manifest and check everything that can be checked without its packs: shape, paths, sizes, ranges, tree
    hash. Raises NotAWorkspace, whose message states the fault."""
    try:
        datum = json.loads(content)
        if not isinstance(datum, dict) or datum.get("version") != VERSION:
            raise ValueError(f"no manifest of version {VERSION}")
        packs = [BlobRef(_hash(sha256), _count(size, PACK_BYTES), PACK_TYPE) for sha256, size in datum["packs"]]
        files = tuple(_parse_entry(line, packs) for line in datum["entries"])
        manifest = WorkspaceManifest(files, _flag(datum["interpreter"]), ref)
        if said := flaw([stored.entry for stored in files]) or _overlap(manifest):
            raise ValueError(said)
        if manifest.tree_sha256 != datum["tree_sha256"]:
            raise ValueError("its entries do not hash to its tree_sha256")
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise NotAWorkspace(f"{ref.sha256} is no workspace: {_error_text(error)}") from error
    return manifest


def _error_text(error: Exception) -> str:
    return str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"


def _line(stored: StoredEntry, number: dict[BlobRef, int]) -> dict[str, Any]:
    entry = stored.entry
    line: dict[str, Any] = {"path": entry.path, "kind": entry.kind.value, "mode": entry.mode}
    if entry.kind is FileKind.link:
        line["target"] = entry.target
    if entry.kind is FileKind.file:
        line["size"] = entry.size
        line["sha256"] = stored.sha256
        line["pieces"] = [[number[piece.pack], piece.offset, piece.length, piece.sha256] for piece in stored.pieces]
    return line


def _parse_entry(line: dict[str, Any], packs: list[BlobRef]) -> StoredEntry:
    kind = FileKind(line["kind"])
    entry = FileEntry(
        path=_text(line["path"]),
        kind=kind,
        mode=_count(line["mode"], 0o777),
        size=_count(line["size"]) if kind is FileKind.file else 0,
        target=_text(line["target"]) if kind is FileKind.link else "",
    )
    if kind is not FileKind.file:
        return StoredEntry(entry)
    pieces = tuple(_piece(place, packs) for place in line["pieces"])
    if sum(piece.length for piece in pieces) != entry.size:
        raise ValueError(f"the pieces of {entry.path[:200]!r} do not make up its {entry.size} bytes")
    return StoredEntry(entry, _hash(line["sha256"]), pieces)


def _piece(place: list[Any], packs: list[BlobRef]) -> PackedRange:
    number, offset, length, sha256 = place
    pack = packs[_count(number)]
    piece = PackedRange(_hash(sha256), pack, _count(offset), _count(length, PIECE_BYTES))
    if piece.length == 0 or piece.offset + piece.length > pack.size:
        raise ValueError(f"a piece from {offset} over {length} bytes does not lie in its pack of {pack.size}")
    return piece


def _overlap(manifest: WorkspaceManifest) -> str:
    """Return an error text if pieces of one pack overlap, else "". Several files may use the same piece."""
    ranges = {(piece.pack.sha256, piece.offset): piece for stored in manifest.files for piece in stored.pieces}
    ends: dict[str, int] = {}
    for (pack, offset), piece in sorted(ranges.items()):
        if offset < ends.get(pack, 0):
            return f"pieces of pack {pack} overlap at {offset}"
        ends[pack] = offset + piece.length
    for stored in manifest.files:
        for piece in stored.pieces:
            if piece != ranges[piece.pack.sha256, piece.offset]:
                return f"pieces of pack {piece.pack.sha256} overlap at {piece.offset}"
    return ""


def _count(value: Any, most: int | None = None) -> int:
    if type(value) is not int or value < 0 or (most is not None and value > most):
        raise ValueError(f"{str(value)[:40]} is no number from 0 to {most or 'any'}")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"{str(value)[:40]} is no text")
    return value


def _hash(value: Any) -> str:
    if not SHA256.match(_text(value)):
        raise ValueError(f"{value[:80]!r} is no sha256")
    return str(value)


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError(f"{str(value)[:40]} is neither true nor false")
    return value


def flaw(entries: Sequence[FileEntry]) -> str:
    """Return an error text if the entries do not form a tree, else "". Faults are a path outside of it or below an
    entry that is not a folder, a duplicate, a wrong order, or more entries than a snapshot may have."""
    if len(entries) > MOST_ENTRIES:
        return f"{len(entries)} files and folders; a workspace holds {MOST_ENTRIES}"
    folders = {""}
    last = ""
    for entry in entries:
        if said := path_flaw(entry.path) or _entry_flaw(entry):
            return f"{entry.path[:200]!r}: {said}"
        if entry.path <= last:
            return f"{entry.path[:200]!r} does not come after {last[:200]!r}"
        if entry.path.rpartition("/")[0] not in folders:
            return f"{entry.path[:200]!r} lies in no folder of the workspace"
        if entry.kind is FileKind.folder:
            folders.add(entry.path)
        last = entry.path
    return ""


def path_flaw(path: str) -> str:
    """Return an error text if `path` is not allowed in a workspace, else ""."""
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "a path is relative and has no empty part, no . and no .."
    if "\0" in path:
        return "a path holds no NUL"
    try:
        sizes = [len(part.encode(errors="surrogateescape")) for part in parts]
    except UnicodeEncodeError:
        return "a path is text that a file system could have"
    if max(sizes) > MOST_NAME_BYTES or sum(sizes) + len(parts) > MOST_PATH_BYTES:
        return f"a name has at most {MOST_NAME_BYTES} bytes, a path {MOST_PATH_BYTES}"
    return ""


def _entry_flaw(entry: FileEntry) -> str:
    if not 0 <= entry.mode <= 0o777:
        return f"mode {entry.mode:o}; permission bits are 0 to 777"
    if entry.size < 0 or (entry.size and entry.kind is not FileKind.file):
        return f"a {entry.kind} of {entry.size} bytes"
    if bool(entry.target) != (entry.kind is FileKind.link) or "\0" in entry.target:
        return f"a {entry.kind} with target {entry.target[:200]!r}"
    try:
        target = entry.target.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return "a target is text that a file system could have"
    return f"a target has at most {MOST_PATH_BYTES} bytes" if len(target) >= MOST_PATH_BYTES else ""


async def fetch_manifest(ref: BlobRef, blobs: Blobs) -> WorkspaceManifest:
    """Fetch and parse the manifest `ref`. Raises NotAWorkspace, StoreUnavailable."""
    if not SHA256.match(ref.sha256) or not 0 < ref.size <= MOST_MANIFEST_BYTES:
        raise NotAWorkspace(f"{ref.sha256[:80]} of {ref.size} bytes cannot be a workspace")
    return await asyncio.to_thread(decode, await _got(ref, blobs), ref)


async def read(manifest: WorkspaceManifest, blobs: Blobs) -> dict[str, bytes]:
    """Return path -> contents of the files, with every hash checked. Raises NotAWorkspace, StoreUnavailable."""
    packs = {pack: await _got(pack, blobs) for pack in manifest.packs}
    contents = {}
    for stored in manifest.files:
        if stored.entry.kind is FileKind.file:
            parts = [packs[piece.pack][piece.offset : piece.offset + piece.length] for piece in stored.pieces]
            content = contents[stored.entry.path] = b"".join(parts)
            if hashlib.sha256(content).hexdigest() != stored.sha256:
                raise NotAWorkspace(f"{stored.entry.path[:200]!r} does not hash to {stored.sha256}")
    return contents


async def store_files(files: Mapping[str, Any], blobs: Blobs) -> BlobRef:
    """Store these files as a workspace and return its reference. Equal files give equal references.

    `files` maps a path to text, to {"base64": ..., "mode": 493}, to {"text": ..., "mode": 493}, or to {"link": target}.
    Raises FilesUnusable, StoreUnavailable.
    """
    if not isinstance(files, Mapping):
        raise FilesUnusable(f"{type(files).__name__} says no path -> file")
    entries, contents = [], {}
    for path, said in files.items():
        try:
            entry, content = _entry(path, said)
        except (ValueError, TypeError, KeyError) as error:
            raise FilesUnusable(f"file {str(path)[:200]!r}: {error}") from error
        entries.append(StoredEntry(entry))
        if entry.kind is FileKind.file:
            contents[path] = content
    manifest = join_trees({"": entries})
    if said := flaw([stored.entry for stored in manifest.files]):
        raise FilesUnusable(said)
    return await _put(await _pack_contents(manifest, contents, blobs), blobs)


def join_trees(parts: Mapping[str, Iterable[StoredEntry]]) -> WorkspaceManifest:
    """Join trees into one: each is placed below the folder that is its key. Missing parent folders are added."""
    found: dict[str, StoredEntry] = {}
    for folder, files in parts.items():
        for stored in files:
            path = f"{folder}/{stored.entry.path}" if folder else stored.entry.path
            found[path] = dataclasses.replace(stored, entry=dataclasses.replace(stored.entry, path=path))
    for path in list(found):
        while (path := path.rpartition("/")[0]) and path not in found:
            found[path] = StoredEntry(FileEntry(path=path, kind=FileKind.folder, mode=0o755))
    return WorkspaceManifest(tuple(found[path] for path in sorted(found)))


async def put(manifest: WorkspaceManifest, blobs: Blobs) -> BlobRef:
    """Store the manifest. If its packs are much larger than its files, the files are packed again first. Raises
    NotAWorkspace, StoreUnavailable."""
    if manifest.is_bloated:
        manifest = await _pack_contents(manifest, await read(manifest, blobs), blobs)
    return await _put(manifest, blobs)


async def _put(manifest: WorkspaceManifest, blobs: Blobs) -> BlobRef:
    return await blobs.put(await asyncio.to_thread(manifest.encode), media_type=MEDIA_TYPE)


async def _pack_contents(manifest: WorkspaceManifest, contents: Mapping[str, bytes], blobs: Blobs) -> WorkspaceManifest:
    """Store `contents` in new packs, and return the manifest that refers to them."""
    cut = [
        (path, content[start : start + PIECE_BYTES])
        for path, content in contents.items()
        for start in range(0, len(content), PIECE_BYTES)
    ]
    pieces: dict[str, list[PackedRange]] = {path: [] for path in contents}
    packs: list[list[tuple[str, bytes]]] = []
    size = PACK_BYTES
    for path, part in cut:
        if size + len(part) > PACK_BYTES:
            packs.append([])
            size = 0
        packs[-1].append((path, part))
        size += len(part)
    for pack in packs:
        ref = await blobs.put(b"".join(part for _, part in pack), media_type=PACK_TYPE)
        offset = 0
        for path, part in pack:
            pieces[path].append(PackedRange(hashlib.sha256(part).hexdigest(), ref, offset, len(part)))
            offset += len(part)
    return WorkspaceManifest(tuple(_fill_entry(stored, contents, pieces) for stored in manifest.files))


def _fill_entry(
    stored: StoredEntry, contents: Mapping[str, bytes], pieces: Mapping[str, list[PackedRange]]
) -> StoredEntry:
    path = stored.entry.path
    if path not in contents:
        return stored
    entry = dataclasses.replace(stored.entry, size=len(contents[path]))
    return StoredEntry(entry, hashlib.sha256(contents[path]).hexdigest(), tuple(pieces[path]))


def _entry(path: str, said: Any) -> tuple[FileEntry, bytes]:
    """Parse the description of a file. Raises ValueError, TypeError, KeyError if it is invalid."""
    if fault := path_flaw(_text(path)):
        raise ValueError(fault)
    said = {"text": said} if isinstance(said, str) else dict(said)
    if "link" in said:
        return FileEntry(path=path, kind=FileKind.link, mode=0o777, target=_text(said["link"])), b""
    content = base64.b64decode(said["base64"], validate=True) if "base64" in said else said["text"].encode()
    return FileEntry(path=path, kind=FileKind.file, mode=_count(said.get("mode", 0o644), 0o777)), content


async def _got(ref: BlobRef, blobs: Blobs) -> bytes:
    try:
        return await blobs.get(ref)
    except (BlobMissing, BlobCorrupt) as error:
        raise NotAWorkspace(f"a part of a stored workspace cannot be had: {error}") from error
