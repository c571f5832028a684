"""A folder of this machine as a workspace."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from turnlog.infra.blobs import Blobs
from turnlog.infra.environments.workspaces import FileEntry, FileKind, flaw
from turnlog.sandbox_workers.protocol import FileMissing, FileRefused
from turnlog.sandbox_workers.workspaces.store import Workspaces
from turnlog.schemas.types import BlobRef


async def stored(folder: Path, blobs: Blobs) -> BlobRef:
    """Store the contents of `folder` as a workspace, for ToolCallRequested.workspace of a session's first call. Raises
    FileRefused, StoreUnavailable."""
    return await Workspaces(blobs).snapshot(Folder(folder))


class Folder:
    """A folder of this machine as a tree of files. Nothing else may write below it meanwhile."""

    interpreter = False

    def __init__(self, root: Path) -> None:
        self._root = root

    async def index(self) -> tuple[FileEntry, ...]:
        return await asyncio.to_thread(self._index)

    async def read_files(self, paths: Sequence[str], *, most: int) -> tuple[bytes, ...]:
        contents = await asyncio.to_thread(lambda: tuple((self._root / path).read_bytes() for path in paths))
        if sum(map(len, contents)) > most:
            raise FileMissing(f"{len(paths)} files hold more than {most} bytes")
        return contents

    async def restore(self, entries: Sequence[FileEntry], contents: Mapping[str, bytes]) -> None:
        if said := flaw(entries):
            raise FileRefused(said)
        await asyncio.to_thread(self._restore, entries, contents)

    def _index(self) -> tuple[FileEntry, ...]:
        found: list[FileEntry] = []
        folders = [self._root]
        while folders:
            for item in os.scandir(folders.pop()):
                entry = self._entry(item)
                if entry is not None:
                    found.append(entry)
                    if entry.kind is FileKind.folder:
                        folders.append(Path(item.path))
        return tuple(sorted(found, key=lambda entry: entry.path))

    def _entry(self, item: os.DirEntry[str]) -> FileEntry | None:
        about = item.stat(follow_symlinks=False)
        path, mode = os.path.relpath(item.path, self._root), stat.S_IMODE(about.st_mode) & 0o777
        if stat.S_ISLNK(about.st_mode):
            return FileEntry(path=path, kind=FileKind.link, mode=0o777, target=os.readlink(item.path))
        if stat.S_ISDIR(about.st_mode):
            return FileEntry(path=path, kind=FileKind.folder, mode=mode)
        if stat.S_ISREG(about.st_mode):
            return FileEntry(path=path, kind=FileKind.file, mode=mode, size=about.st_size)
        return None

    def _restore(self, entries: Sequence[FileEntry], contents: Mapping[str, bytes]) -> None:
        for item in os.scandir(self._root):
            if item.is_dir(follow_symlinks=False):
                shutil.rmtree(item.path)
            else:
                os.unlink(item.path)
        for entry in entries:
            place = self._root / entry.path
            if entry.kind is FileKind.folder:
                place.mkdir(mode=0o700)
            elif entry.kind is FileKind.link:
                place.symlink_to(entry.target)
            else:
                place.write_bytes(contents[entry.path])
                place.chmod(entry.mode)
        for entry in reversed(entries):  # children first: the mode of a folder may deny access to it
            if entry.kind is FileKind.folder:
                (self._root / entry.path).chmod(entry.mode)
