"""Where the checkpoints of a run lie, beneath the rules of `trainer.checkpoint`: a folder here, an object store in
`store`. Both pass the same tests."""

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
"""`latest.json` is what releases before 0.2 kept for all incarnations."""


@dataclass(frozen=True, slots=True)
class Marker:
    """What one says. Its incarnation is -1 when there is none."""

    incarnation: int
    folder: str | None
    """What the incarnation goes on from, as long as it has written none of its own."""
    confirmed: bool = True
    """Nobody else claims this incarnation: it says what to go on from."""


Stored = Mapping[str, BlobRef]
"""Files of a checkpoint that ranks have put where it will lie, by name."""


class Place(Protocol):
    """Calls block."""

    @property
    def where(self) -> str:
        """Its address, for people."""
        ...

    def names(self) -> list[str]:
        """Of the checkpoints that are whole."""
        ...

    def opened(self, name: str) -> Path:
        """A folder of this machine with its common values, ready to be restored from. Raises CheckpointDamaged."""
        ...

    def said(self, name: str) -> str:
        """Its whole address."""
        ...

    def markers(self) -> dict[str, Marker]:
        """By name, also of those that somebody is about to make. Raises CheckpointUnusable for one that cannot be
        read: what it named may be the only one that counts."""
        ...

    def created(self, marker: Marker) -> bool:
        """Make the marker of an incarnation, unless another process has it."""
        ...

    def mark(self, marker: Marker) -> None:
        """Let the marker that was created say this."""
        ...

    def forget(self, marker: str) -> None:
        """One of an earlier incarnation goes."""
        ...

    def begun(self, name: str) -> Path:
        """An empty folder of this machine to write into."""
        ...

    def finished(self, folder: Path, stored: Stored, about: Mapping[str, Any]) -> None:
        """All of its files are written, those of other ranks `stored`: bring what is left there, with their sums.
        Takes long. `about`: see `StorePlace`."""
        ...

    def seal(self, folder: Path) -> str:
        """From now on it is whole: its name."""
        ...

    def drop(self, name: str) -> None:
        """Remove one."""
        ...

    def sweep(self) -> None:
        """Remove what was left of those that never became whole."""
        ...


class FolderPlace:
    """On disk, which several machines must share."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._own: Path

    @property
    def where(self) -> str:
        return str(self._directory)

    def names(self) -> list[str]:
        return [path.name for path in self._directory.glob("step-*-i*") if path.suffix != PART]

    def opened(self, name: str) -> Path:
        """A file of a release that kept no sums passes."""
        folder = self._directory / name
        if not folder.is_dir():
            raise CheckpointDamaged(f"{folder} is gone; restore it")
        check_files(folder)
        return folder

    def said(self, name: str) -> str:
        return str(self._directory / name)

    def markers(self) -> dict[str, Marker]:
        return {path.name: _read(path) for path in self._directory.glob(MARKERS)}

    def created(self, marker: Marker) -> bool:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._own = self._directory / MARKERS.replace("*", f"-i{marker.incarnation}")
        part = self._written(marker)
        try:
            os.link(part, self._own)
        except FileExistsError:
            return False
        finally:
            part.unlink()
        return True

    def mark(self, marker: Marker) -> None:
        self._written(marker).replace(self._own)

    def forget(self, marker: str) -> None:
        (self._directory / marker).unlink(missing_ok=True)

    def begun(self, name: str) -> Path:
        part = self._directory / f"{name}{PART}"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        return part

    def finished(self, folder: Path, stored: Stored, about: Mapping[str, Any]) -> None:
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

    def _written(self, marker: Marker) -> Path:
        part = self._directory / f"{self._own.name}.{os.getpid()}"
        with part.open("w") as file:
            json.dump({"incarnation": marker.incarnation, "folder": marker.folder}, file)
            file.flush()
            os.fsync(file.fileno())
        return part


def _read(path: Path) -> Marker:
    """A marker; of none when its owner's successor has just removed it. Raises CheckpointUnusable."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return Marker(-1, None)
    return read_marker(content, str(path))


def read_marker(content: bytes, where: str) -> Marker:
    """What one says that lies there. Raises CheckpointUnusable."""
    try:
        said = json.loads(content)
        folder, confirmed = said["folder"], said.get("confirmed", True)
        if isinstance(folder, str | None) and isinstance(confirmed, bool):
            return Marker(int(said["incarnation"]), folder, confirmed)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _garbled(where, repr(error)) from error
    raise _garbled(where, repr(said))


def _garbled(where: str, why: str) -> CheckpointUnusable:
    return CheckpointUnusable(
        f"{where} does not say which checkpoint to go on from ({why}): restore it, or remove it to go on from what the "
        "other markers beside it name, and from [model] path where there is none"
    )


def check_files(folder: Path) -> None:
    """Raises CheckpointDamaged for a file that is not as it was written; one of a release that kept no sums passes."""
    sums = folder / SUMS
    for line in sums.read_text(errors="replace").splitlines() if sums.exists() else ():
        wanted, apart, name = line.partition("  ")
        if not apart:
            raise CheckpointDamaged(f"{sums} does not list sums of files; restore it, or remove {folder}")
        if not (folder / name).is_file():
            raise CheckpointDamaged(f"{folder / name} is gone; restore it, or remove {folder}")
        if (found := file_sha256(folder / name)) != wanted:
            raise CheckpointDamaged(
                f"{folder / name} was altered: sha256 {found}, {SUMS} says {wanted}; restore it, or remove {folder}"
            )


def file_sha256(path: Path) -> str:
    """Hex, of a file of any size."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def contents_sha256(folder: Path, *patterns: str) -> str:
    """Over names and contents of the files that fit, wherever the folder lies."""
    running = hashlib.sha256()
    for file in sorted(file for pattern in patterns for file in folder.glob(pattern)):
        running.update(f"{file.name} {file_sha256(file)}\n".encode())
    return running.hexdigest()


def write_sums(folder: Path) -> None:
    """The last of its files, on disk when this returns: a folder without it is not complete."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != SUMS)
    text = "".join(f"{file_sha256(path)}  {path.relative_to(folder)}\n" for path in files)
    with (folder / SUMS).open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
