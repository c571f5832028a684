"""What trees of files held when they were last looked at, so that what has not changed since is not read again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from turnlog.sandbox_workers.protocol import FileEntry, FileKind
from turnlog.sandbox_workers.workspaces.manifest import Manifest, Stored


class Tree(Protocol):
    """Whose files are stored and restored: a Sandbox, or a folder of this machine."""

    @property
    def interpreter(self) -> bool: ...

    async def index(self) -> tuple[FileEntry, ...]: ...

    async def read_files(self, paths: Sequence[str], *, most: int) -> tuple[bytes, ...]: ...

    async def restore(self, entries: Sequence[FileEntry], contents: Mapping[str, bytes]) -> None: ...


@dataclass(frozen=True, slots=True)
class Look:
    """At one tree."""

    tree: Tree
    manifest: Manifest
    entries: list[FileEntry]
    stamps: Mapping[str, str]
    """Of files whose bytes are as the manifest says."""


class Looks:
    """The last look at each of the latest `most` trees. Stamps are believed of the very tree that had them, and only
    as long as nobody has put other files into it behind our back, which the caller's `before` tells."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._looks: OrderedDict[int, Look] = OrderedDict()

    def note(self, tree: Tree, manifest: Manifest, entries: Iterable[FileEntry]) -> None:
        """The tree holds the manifest's files, and so they are stamped."""
        entries = sorted(entries, key=lambda entry: entry.path)
        sizes = {stored.entry.path: stored.entry.size for stored in manifest.files if stored.sha256}
        stamps = {entry.path: entry.stamp for entry in entries if sizes.get(entry.path) == entry.size}
        self._looks[id(tree)] = Look(tree, manifest, entries, stamps)
        self._looks.move_to_end(id(tree))
        if len(self._looks) > self._most:
            self._looks.popitem(last=False)

    def last(self, tree: Tree) -> Manifest | None:
        """What it held."""
        look = self._looks.get(id(tree))
        return look.manifest if look is not None and look.tree is tree else None

    def same(self, tree: Tree, before: Manifest, entries: list[FileEntry]) -> bool:
        """Nothing has changed since, by stamps alone."""
        if self.last(tree) is not before or before.wasteful:
            return False
        stamped = all(entry.stamp or entry.kind is not FileKind.file for entry in entries)
        return stamped and self._looks[id(tree)].entries == entries

    def kept(self, tree: Tree, before: Manifest | None, entries: Iterable[FileEntry]) -> dict[str, Stored]:
        """Files that are as they were, by path."""
        if before is None or self.last(tree) is not before:
            return {}
        stamps = self._looks[id(tree)].stamps
        stored = {file.entry.path: file for file in before.files}
        return {
            entry.path: stored[entry.path]
            for entry in entries
            if entry.stamp and entry.stamp == stamps.get(entry.path) and entry.size == stored[entry.path].entry.size
        }
