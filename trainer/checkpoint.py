"""Where checkpoints lie: complete folders, a marker that names the newest, and the cursor inside each of them.

    checkpoints/step-00000010-i0.part/  what is being written; SHA256SUMS of its files comes last
    checkpoints/step-00000010-i0/     a Megatron checkpoint of incarnation 0; renamed into place when it is complete
    checkpoints/latest-i0.json        {"incarnation", "folder"}: what incarnation 0 goes on from; the highest counts

The cursor is part of the checkpoint's common state, so cursor, optimizer and weights move together. An incarnation
claims its number by making its marker, which only one process can. All that it names carries that number, so a zombie
changes nothing that its successor goes on from; a process that finds a higher marker is one, and ends.

A folder holds weights, optimizer and common values as a Megatron distributed checkpoint (`checkpoints.state`), and
SHA256SUMS of its files, which are held against it before training goes on from them: where one is altered or gone, the
checkpoint before it is taken, and the steps between the two are stepped again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from turnlog.trainer import CheckpointUnusable, Superseded, mcore
from turnlog.trainer.checkpoints.state import read_common

log = logging.getLogger(__name__)

SUMS = "SHA256SUMS"


def check_files(folder: Path) -> None:
    """Raises CheckpointUnusable for a file that is not as it was written; one of a release that kept no sums passes."""
    sums = folder / SUMS
    for line in sums.read_text().splitlines() if sums.exists() else ():
        wanted, name = line.split("  ", 1)
        if not (folder / name).is_file():
            raise CheckpointUnusable(f"{folder / name} is gone; restore it, or remove {folder}")
        if (found := file_sha256(folder / name)) != wanted:
            raise CheckpointUnusable(
                f"{folder / name} was altered: sha256 {found}, {SUMS} says {wanted}; restore it, or remove {folder}"
            )


def file_sha256(path: Path) -> str:
    """Hex, of a file of any size."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_sums(folder: Path) -> None:
    """The last of its files, on disk when this returns: a folder without it is not complete."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != SUMS)
    text = "".join(f"{file_sha256(path)}  {path.relative_to(folder)}\n" for path in files)
    with (folder / SUMS).open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


MARKERS = "latest*.json"
"""`latest.json` is what releases before 0.2 kept for all incarnations."""
PART = ".part"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """Where training stands."""

    next_batch: int = 0
    """batch_index of the next manifest."""
    offset: int | None = None
    """Where that manifest is looked for in sample-batches; None: from the start of the log."""
    step: int = 0
    """Optimizer steps taken."""
    draws: int = 0
    """Draws trained to their last part."""
    inherited: int = 0
    """Of `step`, those of the run that this one was forked from."""
    skipped: int = 0
    """Steps in a row, up to this one, that had no finite gradient."""


@dataclass(frozen=True, slots=True)
class Marker:
    """What one says. Its incarnation is -1 when there is none."""

    incarnation: int
    folder: str | None


class Checkpoints:
    """The checkpoints of one run, as one incarnation of its trainer sees them."""

    def __init__(self, directory: Path, *, keep: int) -> None:
        """`keep`: how many of the newest stay on disk, at least 1."""
        self._directory = directory
        self._keep = keep
        self._incarnation = -1
        self._sound: dict[Path, Path] = {}
        """Folder that a marker names -> the one to go on from: files are read through once."""

    def newest(self) -> Path | None:
        """The folder that the newest marker names, or, where its files are not what was written, the newest before it.
        Raises CheckpointUnusable when there is none."""
        name, marker = self._marker()
        if marker.folder is None:
            return None
        named = self._directory / marker.folder
        if named in self._sound:
            return self._sound[named]
        found = [path for path in self._complete() if _age(path) <= _age(named)]
        for folder in reversed(found):
            try:
                check_files(folder)
            except CheckpointUnusable as damage:
                log.warning("%s", damage)
                continue
            if folder != named:
                log.warning("training goes on from %s: the steps up to %s are taken again", folder.name, named.name)
            self._sound[named] = folder
            return folder
        raise CheckpointUnusable(
            f"{name} names {named.name}, which is {'damaged' if named.is_dir() else 'gone'}, and there is none before "
            f"it; restore it, or remove {MARKERS} there to train from [model] path again"
        )

    def cursors(self) -> dict[str, Cursor]:
        """Of those on disk by name, oldest first."""
        return {path.name: Cursor(**read_common(path)["cursor"]) for path in self._complete()}

    def _complete(self) -> list[Path]:
        return sorted((path for path in self._directory.glob("step-*-i*") if path.suffix != PART), key=_age)

    def claim(self, least: int, folder: str | None = None) -> int:
        """Become the incarnation that the checkpoints belong to, and start from the newest of them, or from `folder`:
        `least`, or the number above the highest that was ever claimed here. Older ones may no longer write."""
        self._directory.mkdir(parents=True, exist_ok=True)
        while True:
            self.newest()
            _, marker = self._marker()
            self._incarnation = max(least, marker.incarnation + 1)
            if self._created(folder or marker.folder):
                break  # else another one has just claimed it
        for part in self._directory.glob(f"*{PART}"):
            shutil.rmtree(part, ignore_errors=True)
        return self._incarnation

    def begin(self, cursor: Cursor) -> Path:
        """An empty folder to write the checkpoint of `cursor` into. Raises Superseded."""
        self._check_owner()
        part = self._directory / f"{folder_name(cursor.step, self._incarnation)}{PART}"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        return part

    def seal(self, part: Path, needed: Collection[str] = ()) -> Path:
        """The folder is complete: give it its name, let the marker name it, drop old ones but those `needed`, by name;
        where one of this step has it, that one stays, since a marker may name it. Raises Superseded.

        In this order: whoever claims after the second look inherits what the marker names, which is never dropped."""
        self._check_owner()
        folder = part.with_suffix("")
        if folder.exists():
            shutil.rmtree(part)
        else:
            if not (part / SUMS).exists():
                write_sums(part)
            part.rename(folder)
        self._mark(folder.name)
        self._check_owner()
        for old in self._complete()[: -self._keep]:
            if old.name not in needed:
                shutil.rmtree(old, ignore_errors=True)
        for path in self._directory.glob(MARKERS):
            if _read(path).incarnation < self._incarnation:
                path.unlink(missing_ok=True)
        return folder

    def _marker(self) -> tuple[str, Marker]:
        """The marker of the newest incarnation, and where it is."""
        found = [(path.name, _read(path)) for path in self._directory.glob(MARKERS)]
        return max(found, key=lambda one: one[1].incarnation, default=(MARKERS, Marker(-1, None)))

    def _check_owner(self) -> None:
        _, marker = self._marker()
        if marker.incarnation > self._incarnation:
            raise Superseded(f"incarnation {marker.incarnation} owns {self._directory}; this is {self._incarnation}")

    @property
    def _own(self) -> Path:
        return self._directory / MARKERS.replace("*", f"-i{self._incarnation}")

    def _written(self, folder: str | None) -> Path:
        part = self._directory / f"{self._own.name}.{os.getpid()}"
        with part.open("w") as file:
            json.dump({"incarnation": self._incarnation, "folder": folder}, file)
            file.flush()
            os.fsync(file.fileno())
        return part

    def _created(self, folder: str | None) -> bool:
        """Make our marker, unless somebody has it."""
        part = self._written(folder)
        try:
            os.link(part, self._own)
        except FileExistsError:
            return False
        finally:
            part.unlink()
        return True

    def _mark(self, folder: str) -> None:
        self._written(folder).replace(self._own)


def folder_name(step: int, incarnation: int) -> str:
    """Of the checkpoint that the incarnation writes after so many optimizer steps."""
    return f"step-{step:08}-i{incarnation}"


def cursor_values(cursor: Cursor) -> dict[str, int | None]:
    """Plain values for the checkpoint's common state; a key that earlier releases do not know only where it matters."""
    values = dataclasses.asdict(cursor)
    return {key: value for key, value in values.items() if value or key not in ("inherited", "skipped")}


def find(directory: Path, step: int | None) -> tuple[Path, dict[str, int | None]]:
    """The checkpoint after `step` optimizer steps, of the newest incarnation that wrote one, and its cursor; None: the
    one that training would go on from. Raises CheckpointUnusable, which names the steps that are there."""
    there = sorted((path for path in directory.glob("step-*-i*") if path.suffix != PART), key=_age)
    found = {_age(path)[1]: path for path in there}
    folder = Checkpoints(directory, keep=1).newest() if step is None else found.get(step)
    if folder is None:
        held = ", ".join(map(str, sorted(found))) or "none"
        wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
        raise CheckpointUnusable(f"{directory} holds no {wanted}; there are those of steps: {held}")
    check_files(folder)
    return folder, dict(read_common(folder)["cursor"])


def hand_on(source: Path, directory: Path) -> None:
    """Copy a checkpoint to where another run's trainer finds it as the newest, with a cursor at that run's beginning.
    Begun anew where it died. Raises CheckpointUnusable for a source that goes away meanwhile."""
    step = Cursor(**read_common(source)["cursor"]).step
    part = directory / f"{folder_name(step, 0)}{PART}"
    folder = part.with_suffix("")
    for path in (part, folder):
        shutil.rmtree(path, ignore_errors=True)
    try:
        shutil.copytree(source, part)
        begun = {"cursor": cursor_values(Cursor(step=step, inherited=step)), "draw": {}, "learning": {}}
        mcore.rewrite_common(part, {**read_common(part), **begun})
        source.stat()
    except (FileNotFoundError, shutil.Error) as error:
        raise CheckpointUnusable(
            f"{source} was removed while it was copied: take a newer step, or keep more ([trainer] checkpoints_kept)"
        ) from error
    write_sums(part)
    part.rename(folder)
    first = Checkpoints(directory, keep=1)
    first.claim(0, folder.name)


def _read(path: Path) -> Marker:
    """A marker; of none when its owner's successor has just removed it."""
    try:
        said = json.loads(path.read_text())
    except FileNotFoundError:
        return Marker(-1, None)
    return Marker(int(said["incarnation"]), said["folder"])


def _age(folder: Path) -> tuple[int, int]:
    """(incarnation, step): the order in which checkpoints were written."""
    _, step, incarnation = folder.name.split("-")
    return int(incarnation.removeprefix("i")), int(step)
