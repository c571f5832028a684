"""The list of a workspace's files: what each is, and which pieces of which packs its bytes are.

A manifest is a blob of canonical JSON (`version` 1). `tree_sha256` is over paths, kinds, modes, targets and hashes of
contents alone, so that equal trees have equal ones, however they came to be and wherever their pieces lie.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from turnlog.sandbox_workers.protocol import FileEntry, FileKind, WorkspaceCorrupt
from turnlog.schemas.types import BlobRef

MEDIA_TYPE = "application/vnd.turnlog.workspace+json"
PACK_TYPE = "application/vnd.turnlog.workspace-pack"
VERSION = 1
PIECE_BYTES = 1 << 20
"""A file is cut every so many bytes; its last piece may be shorter."""
PACK_BYTES = 4 << 20
"""No pack is longer."""
MOST_MANIFEST_BYTES = 64 << 20
WASTE_BYTES = 16 << 20
WASTE_FACTOR = 4
"""A workspace of n bytes lies in packs of at most WASTE_FACTOR * n + WASTE_BYTES: else it is packed anew, and what
somebody else has stored so is refused before a byte of it is fetched."""
MANY_PACKS = 128
"""Small packs that a chain of snapshots may pile up before they are packed anew."""
CANONICAL = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"), sort_keys=True)

MOST_ENTRIES = 100_000
MOST_PATH_BYTES = 4096
"""PATH_MAX of Linux (limits.h)."""
MOST_NAME_BYTES = 255
"""NAME_MAX of Linux."""
SHA256 = re.compile(r"[0-9a-f]{64}\Z")


@dataclass(frozen=True, slots=True)
class Piece:
    """Some bytes of a file, and where they lie."""

    sha256: str
    pack: BlobRef
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Stored:
    """One entry of the tree, `stamp` empty; for a file the hash of its bytes and its pieces, in order."""

    entry: FileEntry
    sha256: str = ""
    pieces: tuple[Piece, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """A whole workspace."""

    files: tuple[Stored, ...]
    """Sorted by path."""
    interpreter: bool = False
    """A persistent interpreter lived beside these files; what it held is nowhere but in it."""
    ref: BlobRef | None = field(default=None, compare=False)
    """Of the manifest's own blob."""

    @functools.cached_property
    def tree_sha256(self) -> str:
        """Hex sha256 that equal trees share."""
        about = hashlib.sha256()
        for stored in self.files:
            entry = stored.entry
            line = CANONICAL.encode([entry.path, entry.kind.value, entry.mode, entry.target, stored.sha256])
            about.update(line.encode() + b"\n")
        return about.hexdigest()

    @functools.cached_property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(stored.entry.size for stored in self.files)

    @functools.cached_property
    def packs(self) -> tuple[BlobRef, ...]:
        """What must be fetched for it, each once, in order of first use."""
        return tuple(dict.fromkeys(piece.pack for stored in self.files for piece in stored.pieces))

    @property
    def bloated(self) -> bool:
        """Much more would be fetched than there is."""
        return sum(pack.size for pack in self.packs) > WASTE_FACTOR * self.size + WASTE_BYTES

    @property
    def wasteful(self) -> bool:
        """It is better packed anew: it is bloated, or lies in many small packs."""
        return self.bloated or len(self.packs) > MANY_PACKS + 2 * self.size // PACK_BYTES

    @property
    def says(self) -> tuple[str, bool]:
        """All that a session can tell of it."""
        return self.tree_sha256, self.interpreter

    def encode(self) -> bytes:
        """Canonical JSON."""
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


def decode(content: bytes, ref: BlobRef) -> Manifest:
    """The manifest of a blob, every claim checked that can be without its packs: shape, paths, sizes, ranges, tree
    hash. Raises WorkspaceCorrupt, which says what is wrong."""
    try:
        datum = json.loads(content)
        if not isinstance(datum, dict) or datum.get("version") != VERSION:
            raise ValueError(f"no manifest of version {VERSION}")
        packs = [BlobRef(_hash(sha256), _count(size, PACK_BYTES), PACK_TYPE) for sha256, size in datum["packs"]]
        files = tuple(_stored(line, packs) for line in datum["entries"])
        manifest = Manifest(files, _flag(datum["interpreter"]), ref)
        if said := flaw([stored.entry for stored in files]) or _overlap(manifest):
            raise ValueError(said)
        if manifest.tree_sha256 != datum["tree_sha256"]:
            raise ValueError("its entries do not hash to its tree_sha256")
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise WorkspaceCorrupt(f"{ref.sha256} is no workspace: {_said(error)}") from error
    return manifest


def _said(error: Exception) -> str:
    return str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"


def _line(stored: Stored, number: dict[BlobRef, int]) -> dict[str, Any]:
    entry = stored.entry
    line: dict[str, Any] = {"path": entry.path, "kind": entry.kind.value, "mode": entry.mode}
    if entry.kind is FileKind.link:
        line["target"] = entry.target
    if entry.kind is FileKind.file:
        line["size"] = entry.size
        line["sha256"] = stored.sha256
        line["pieces"] = [[number[piece.pack], piece.offset, piece.length, piece.sha256] for piece in stored.pieces]
    return line


def _stored(line: dict[str, Any], packs: list[BlobRef]) -> Stored:
    kind = FileKind(line["kind"])
    entry = FileEntry(
        path=_text(line["path"]),
        kind=kind,
        mode=_count(line["mode"], 0o777),
        size=_count(line["size"]) if kind is FileKind.file else 0,
        target=_text(line["target"]) if kind is FileKind.link else "",
    )
    if kind is not FileKind.file:
        return Stored(entry)
    pieces = tuple(_piece(place, packs) for place in line["pieces"])
    if sum(piece.length for piece in pieces) != entry.size:
        raise ValueError(f"the pieces of {entry.path[:200]!r} do not make up its {entry.size} bytes")
    return Stored(entry, _hash(line["sha256"]), pieces)


def _piece(place: list[Any], packs: list[BlobRef]) -> Piece:
    number, offset, length, sha256 = place
    pack = packs[_count(number)]
    piece = Piece(_hash(sha256), pack, _count(offset), _count(length, PIECE_BYTES))
    if piece.length == 0 or piece.offset + piece.length > pack.size:
        raise ValueError(f"a piece from {offset} over {length} bytes does not lie in its pack of {pack.size}")
    return piece


def _overlap(manifest: Manifest) -> str:
    """Why pieces of one pack are not apart; the same piece may serve many files."""
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
    """Why these are no tree: a path out of it or below something that is no folder, the same twice, a wrong order,
    more than a snapshot holds. Empty when they are one."""
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
    """Why this is no path of a workspace; empty when it is one."""
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
