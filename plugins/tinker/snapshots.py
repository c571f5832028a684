"""Snapshots of the models in the object store: named objects below the run's folder. The record that names them makes
them count (TenantStateSaved)."""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from turnlog.infra.blobs import BlobCorrupt, BlobMissing, Blobs
from turnlog.schemas.events import TenantStateSaved, WeightFile

log = logging.getLogger(__name__)
FOLDER = "tenants/snapshots"
KEPT = 2
"""Snapshots that stay in the store: the newest, and the one before it."""


def files_below(folder: Path) -> list[Path]:
    """Return the files of a folder and its subfolders, sorted by name."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


class Scratch:
    """Temporary folders of the server, in one folder, so that a server removes those of one that was killed."""

    def __init__(self, root: Path) -> None:
        """Remove what is in `root`; the server that used it is dead or fenced. Raises OSError."""
        # A server that is fenced may still write for a moment. The next start removes that.
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True, exist_ok=True)
        self._root = root

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """Yield an empty folder, which is removed afterwards. Raises OSError."""
        with tempfile.TemporaryDirectory(dir=self._root) as folder:
            yield Path(folder)


class SnapshotStore:
    """The snapshots of a run, below `run_folder` of the store."""

    def __init__(self, blobs: Blobs, run_folder: str, scratch: Scratch) -> None:
        self.scratch = scratch
        self._blobs, self._prefix = blobs, f"{run_folder}/{FOLDER}/" if run_folder else f"{FOLDER}/"

    async def store(self, folder: Path, executed: int) -> tuple[str, tuple[WeightFile, ...]]:
        """Store the files of a folder. Return the prefix of their names, and their references. Raises
        StoreUnavailable."""
        prefix = f"{self._prefix}{executed:010d}-{secrets.token_hex(4)}"
        files = []
        for path in files_below(folder):
            name = path.relative_to(folder).as_posix()
            files.append(WeightFile(name, await self._blobs.put_named_file(f"{prefix}/{name}", path)))
        return prefix, tuple(files)

    @asynccontextmanager
    async def newest(self, snapshots: Sequence[TenantStateSaved]) -> AsyncIterator[tuple[int, Path | None]]:
        """Yield the number of commands before the newest snapshot that is whole, and a folder with its files; 0 and
        None if there is none. Raises StoreUnavailable."""
        with self.scratch.folder() as scratch:
            for snapshot in reversed(snapshots):
                folder = scratch / str(snapshot.executed)
                if await self._fetch(snapshot, folder):
                    yield snapshot.executed, folder
                    return
            yield 0, None

    async def _fetch(self, snapshot: TenantStateSaved, folder: Path) -> bool:
        for file in snapshot.files:
            path = folder / file.name
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                await self._blobs.get_named_file(f"{snapshot.folder}/{file.name}", file.blob, path)
            except (BlobMissing, BlobCorrupt) as error:
                log.warning("snapshot %s cannot be used, an earlier one is taken: %s", snapshot.folder, error)
                return False
        return True

    async def prune(self, snapshots: Sequence[TenantStateSaved]) -> None:
        """Remove the objects of all but the newest snapshots, and those of snapshots that no record names. Raises
        StoreUnavailable."""
        kept = tuple(f"{snapshot.folder}/" for snapshot in snapshots[-KEPT:])
        names = await self._blobs.names(self._prefix)
        await asyncio.gather(*(self._blobs.remove(name) for name in names if not name.startswith(kept)))
