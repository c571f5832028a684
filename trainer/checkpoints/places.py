"""Storage of a run's checkpoints, below the rules of `trainer.checkpoint`: a folder here, an object store in `store`.

Both implementations pass the same tests.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from turnlog.schemas.types import BlobRef
from turnlog.trainer import CheckpointDamaged, CheckpointUnusable

SUMS = "SHA256SUMS"
PART = ".part"
MARKERS = "latest*.json"
"""`latest.json` is the single marker that releases before 0.2 wrote for all generations."""


@dataclass(frozen=True, slots=True)
class Marker:
    """The content of a marker. `incarnation` is -1 if there is no marker."""

    incarnation: int
    folder: str | None
    """Checkpoint that the generation resumes from until it has written its own."""
    confirmed: bool = True
    """True if nobody else claims this generation, so that the marker is effective."""


Stored = Mapping[str, BlobRef]
"""Files of a checkpoint that ranks have already uploaded to their final place, by name."""


class CheckpointStorage(Protocol):
    """The storage of a run's checkpoints. All methods block."""

    @property
    def where(self) -> str:
        """The address, for people."""
        ...

    def names(self) -> list[str]:
        """Return the names of complete checkpoints."""
        ...

    def open_folder(self, name: str) -> Path:
        """Return a local folder with the common values of a checkpoint, ready to restore from. Raises
        CheckpointDamaged.
        """
        ...

    def checkpoint_address(self, name: str) -> str:
        """Return the whole address of a checkpoint."""
        ...

    def markers(self) -> dict[str, Marker]:
        """Return all markers by name, including those that are being created.

        Raises CheckpointUnusable for an unreadable marker: the checkpoint that it named may be the only effective one.
        """
        ...

    def create_marker(self, marker: Marker) -> bool:
        """Create the marker of a generation. Return False if another process has it."""
        ...

    def mark(self, marker: Marker) -> None:
        """Overwrite the marker that was created."""
        ...

    def forget(self, marker: str) -> None:
        """Remove the marker of an earlier generation."""
        ...

    def create_folder(self, name: str) -> Path:
        """Return an empty local folder to write a checkpoint into."""
        ...

    def store_files(self, folder: Path, stored: Stored, about: Mapping[str, Any]) -> None:
        """Bring files to their final place, with their checksums; all files are written, and those of other ranks are
        in `stored`.

        This takes long. For `about`, see `StorePlace`.
        """
        ...

    def seal(self, folder: Path) -> str:
        """Finalize a checkpoint and return its name."""
        ...

    def drop(self, name: str) -> None:
        """Remove a checkpoint."""
        ...

    def sweep(self) -> None:
        """Remove the remains of checkpoints that were never finalized."""
        ...


class FolderPlace:
    """Checkpoints in a folder on disk, which several machines must share."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._own: Path

    @property
    def where(self) -> str:
        return str(self._directory)

    def names(self) -> list[str]:
        return [path.name for path in self._directory.glob("step-*-i*") if path.suffix != PART]

    def open_folder(self, name: str) -> Path:
        """Return the folder of a checkpoint after verifying its files; one of a release that stored no checksums is
        accepted.
        """
        folder = self._directory / name
        if not folder.is_dir():
            raise CheckpointDamaged(f"{folder} is gone; restore it")
        check_files(folder)
        return folder

    def checkpoint_address(self, name: str) -> str:
        return str(self._directory / name)

    def markers(self) -> dict[str, Marker]:
        return {path.name: _read(path) for path in self._directory.glob(MARKERS)}

    def create_marker(self, marker: Marker) -> bool:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._own = self._directory / MARKERS.replace("*", f"-i{marker.incarnation}")
        part = self._write_marker(marker)
        try:
            os.link(part, self._own)
        except FileExistsError:
            return False
        finally:
            part.unlink()
        return True

    def mark(self, marker: Marker) -> None:
        self._write_marker(marker).replace(self._own)

    def forget(self, marker: str) -> None:
        (self._directory / marker).unlink(missing_ok=True)

    def create_folder(self, name: str) -> Path:
        part = self._directory / f"{name}{PART}"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        return part

    def store_files(self, folder: Path, stored: Stored, about: Mapping[str, Any]) -> None:
        assert not stored, "ranks write into the folder itself"
        write_sums(folder)

    def seal(self, folder: Path) -> str:
        whole = folder.with_suffix("")
        if whole.exists():
            shutil.rmtree(folder)
        else:
            folder.rename(whole)
        return whole.name

    def drop(self, name: str) -> None:
        shutil.rmtree(self._directory / name, ignore_errors=True)

    def sweep(self) -> None:
        for part in self._directory.glob(f"*{PART}"):
            shutil.rmtree(part, ignore_errors=True)

    def _write_marker(self, marker: Marker) -> Path:
        part = self._directory / f"{self._own.name}.{os.getpid()}"
        with part.open("w") as file:
            json.dump({"incarnation": marker.incarnation, "folder": marker.folder}, file)
            file.flush()
            os.fsync(file.fileno())
        return part


def _read(path: Path) -> Marker:
    """Read a marker; an empty one if the successor of its owner has just removed it. Raises CheckpointUnusable."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return Marker(-1, None)
    return read_marker(content, str(path))


def read_marker(content: bytes, where: str) -> Marker:
    """Parse the content of the marker at `where`. Raises CheckpointUnusable if it is malformed."""
    try:
        said = json.loads(content)
        folder, confirmed = said["folder"], said.get("confirmed", True)
        if isinstance(folder, str | None) and isinstance(confirmed, bool):
            return Marker(int(said["incarnation"]), folder, confirmed)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _marker_error(where, repr(error)) from error
    raise _marker_error(where, repr(said))


def _marker_error(where: str, why: str) -> CheckpointUnusable:
    return CheckpointUnusable(
        f"{where} does not say which checkpoint to continue from ({why}): restore it, or remove it to continue from "
        "the checkpoint that the other markers beside it name, or from [model] path if there are none"
    )


def check_files(folder: Path) -> None:
    """Verify the files of a checkpoint. Raises CheckpointDamaged for a file that is missing or was altered.

    A checkpoint of a release that stored no checksums is accepted.
    """
    sums = folder / SUMS
    for line in sums.read_text(errors="replace").splitlines() if sums.exists() else ():
        wanted, apart, name = line.partition("  ")
        if not apart:
            raise CheckpointDamaged(f"{sums} does not list checksums of files; restore it, or remove {folder}")
        if not (folder / name).is_file():
            raise CheckpointDamaged(f"{folder / name} is gone; restore it, or remove {folder}")
        if (found := file_sha256(folder / name)) != wanted:
            raise CheckpointDamaged(
                f"{folder / name} was altered: sha256 {found}, {SUMS} says {wanted}; restore it, or remove {folder}"
            )


def file_sha256(path: Path) -> str:
    """Return the hex sha256 of a file of any size."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def contents_sha256(folder: Path, *patterns: str) -> str:
    """Return the hex sha256 over names and contents of the files that match, independently of the folder's path."""
    running = hashlib.sha256()
    for file in sorted(file for pattern in patterns for file in folder.glob(pattern)):
        running.update(f"{file.name} {file_sha256(file)}\n".encode())
    return running.hexdigest()


def write_sums(folder: Path) -> None:
    """Write the checksums as the last file and sync it to disk: a folder without this file is not complete."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != SUMS)
    text = "".join(f"{file_sha256(path)}  {path.relative_to(folder)}\n" for path in files)
    with (folder / SUMS).open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
