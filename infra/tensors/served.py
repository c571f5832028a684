"""Note of the folder from which an engine starts again.

The loader writes a note of the verified folder whose weights its engine serves. The engine's next start takes the note
and begins with these weights, labelled with their version, so that nothing is loaded a second time. A note is taken
only once: if that start fails, the next one uses the model's own folder. The loader writes the note again once the
engine answers.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from turnlog.infra.tensors.versions import Held, hold, is_finalized
from turnlog.schemas.events import WeightVersionPublished

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServedNote:
    """The note of one engine. Without a note, its next start uses the model's own folder."""

    directory: Path
    """Folder of the run's weight versions."""
    run_id: str
    engine_id: str

    @classmethod
    def of(cls, run_directory: str, run_id: str, engine_id: str) -> ServedNote:
        """Return the note at the path on which the loader and the starter of the engine agree."""
        return cls(weight_folders(run_directory), run_id, engine_id)

    @property
    def _file(self) -> Path:
        return self.directory / f".served-{quote(self.engine_id, safe='')}"

    def write(self, event: WeightVersionPublished, folder: Path) -> None:
        """Record that the engine serves the version of `event` from `folder`. Failure to write is only logged: the next
        start then loads the weights a second time."""
        content = {
            "run_id": self.run_id, "version": event.version, "event_id": event.event_id, "folder": folder.name,
        }  # fmt: skip
        try:
            descriptor, part = tempfile.mkstemp(prefix=f"{self._file.name}.", dir=self.directory)
            with os.fdopen(descriptor, "w") as file:
                json.dump(content, file)
            os.replace(part, self._file)
        except OSError as error:
            log.warning("%s will start again from its model's own weights: %s", self.engine_id, error)

    def take(self) -> tuple[int, Held] | None:
        """Take the note: return the version and its folder, locked until it is released. Returns None if there is no
        note, if the folder is gone, or if it changed after verification."""
        try:
            note: dict[str, Any] = json.loads(self._file.read_bytes())
            self._file.unlink()
            version, event_id = int(note["version"]), str(note["event_id"])
            folder = self.directory / Path(str(note["folder"])).name
            ours = note["run_id"] == self.run_id
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s starts from its model's own weights: %s: %r", self.engine_id, self._file, error)
            return None
        held = hold(folder) if ours else None
        if held is None:
            return None
        if is_finalized(folder, event_id):
            return version, held
        log.warning("%s starts from its model's own weights: %s was altered", self.engine_id, folder)
        held.release()
        return None


def weight_folders(run_directory: str) -> Path:
    """Return the folder of the weight versions that this machine has fetched."""
    return Path(run_directory).resolve() / "weights"
