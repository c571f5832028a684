"""Where checkpoints lie: complete folders, a marker that names the newest, and the cursor inside each of them.

    checkpoints/step-00000010-i0/     a Megatron checkpoint; renamed into place when it is complete
    checkpoints/latest.json           {"incarnation", "folder"}; replaced in one step

The cursor is part of the checkpoint's common state, so cursor, optimizer and weights move together. An incarnation
claims the marker when it starts; a process that finds a higher one there is a zombie and must not write.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from turnlog.trainer.errors import CheckpointUnusable, Superseded

MARKER = "latest.json"


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


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete one."""

    folder: Path
    cursor: Cursor


class Checkpoints:
    """The checkpoints of one run, as one incarnation of its trainer sees them."""

    def __init__(self, directory: Path, *, keep: int) -> None:
        """`keep`: how many of the newest stay on disk."""
        self._directory = directory
        self._keep = keep
        self._incarnation = -1

    def newest(self) -> Path | None:
        """The folder that the marker names. Raises CheckpointUnusable when it is gone."""
        marker = self._marker()
        if marker is None or marker["folder"] is None:
            return None
        folder = self._directory / str(marker["folder"])
        if not folder.is_dir():
            raise CheckpointUnusable(
                f"{self._directory / MARKER} names {folder.name}, which is gone; restore it, or remove the marker to "
                "train from [model] path again"
            )
        return folder

    def claim(self, incarnation: int) -> None:
        """This process is `incarnation`; older ones may no longer write. Raises Superseded."""
        self._incarnation = incarnation
        self._directory.mkdir(parents=True, exist_ok=True)
        self._check_owner()
        newest = self.newest()
        self._mark(None if newest is None else newest.name)
        for part in self._directory.glob("*.part"):
            shutil.rmtree(part, ignore_errors=True)

    def begin(self, cursor: Cursor) -> Path:
        """An empty folder to write the checkpoint of `cursor` into. Raises Superseded."""
        self._check_owner()
        part = self._directory / f"step-{cursor.step:08}-i{self._incarnation}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        return part

    def seal(self, part: Path) -> Path:
        """The folder is complete: give it its name, let the marker name it, drop old ones. Raises Superseded."""
        self._check_owner()
        folder = part.with_suffix("")
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
        self._mark(folder.name)
        complete = sorted((path for path in self._directory.glob("step-*-i*") if path.suffix != ".part"), key=_age)
        for old in complete[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)
        return folder

    def _marker(self) -> dict[str, object] | None:
        try:
            marker: dict[str, object] = json.loads((self._directory / MARKER).read_text())
        except FileNotFoundError:
            return None
        return marker

    def _check_owner(self) -> None:
        marker = self._marker()
        if marker is not None and int(str(marker["incarnation"])) > self._incarnation:
            raise Superseded(f"incarnation {marker['incarnation']} owns {self._directory}; this is {self._incarnation}")

    def _mark(self, folder: str | None) -> None:
        part = self._directory / f"{MARKER}.{os.getpid()}"
        with part.open("w") as file:
            json.dump({"incarnation": self._incarnation, "folder": folder}, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(self._directory / MARKER)


def cursor_values(cursor: Cursor) -> dict[str, int | None]:
    """Plain values for the checkpoint's common state."""
    return dataclasses.asdict(cursor)


def _age(folder: Path) -> tuple[int, int]:
    """(incarnation, step): the order in which checkpoints were written."""
    _, step, incarnation = folder.name.split("-")
    return int(incarnation.removeprefix("i")), int(step)
