"""What a replay remembers on disk, so that one that was killed goes on where it stood: `runs/ID/replay/*.json`.

A file belongs to one question (what is folded, from where, up to when, under which settings and code); it is removed
when the answer is given.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turnlog.schemas.ids import digest

FORMAT = 1


class ReplayState:
    """Sections of plain values. Without a folder nothing is kept."""

    def __init__(self, folder: Path | None, question: Mapping[str, Any], *, every_s: float = 5.0) -> None:
        """`question` is what must be the same for the file to count; `every_s`: between two saves, at least."""
        text = json.dumps({"format": FORMAT, **question}, sort_keys=True)
        self.name = digest("replay", text)[:16]
        self._path = None if folder is None else folder / f"{self.name}.json"
        self._every_s = every_s
        self._saved_at = time.monotonic()
        self.sections: dict[str, Any] = {}
        self.resumed = False

    def load(self, *, fresh: bool) -> None:
        """Read what an earlier attempt left; `fresh` forgets it."""
        if self._path is None or not self._path.exists():
            return
        if fresh:
            self.remove()
            return
        try:
            self.sections = json.loads(self._path.read_text())
            self.resumed = True
        except ValueError:  # cannot come of a kill, the file is replaced in one step: start again
            self.remove()

    @property
    def due(self) -> bool:
        """Time to save."""
        return self._path is not None and time.monotonic() - self._saved_at >= self._every_s

    def save(self) -> None:
        """Replace the file in one step."""
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        part = self._path.with_suffix(".part")
        with part.open("w") as file:
            json.dump(self.sections, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, self._path)
        self._saved_at = time.monotonic()

    def remove(self) -> None:
        """The answer was given."""
        self.sections = {}
        if self._path is not None:
            self._path.unlink(missing_ok=True)
