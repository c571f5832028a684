"""Which folder an engine starts again from.

The loader notes the verified folder whose weights its engine serves. The engine's next start takes the note: it begins
with these weights, labelled with their version, and nothing has to be loaded a second time. A note is taken once, so
that a start which fails is followed by one from the model's own folder; the loader writes it again once the engine
answers.
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

from turnlog.infra.tensors.versions import Held, hold, sealed
from turnlog.schemas.events import WeightVersionPublished

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServedNote:
    """The note of one engine. Without one, its next start is from the model's own folder."""

    directory: Path
    """The run's folders of weights."""
    run_id: str
    engine_id: str

    @classmethod
    def of(cls, run_directory: str, run_id: str, engine_id: str) -> ServedNote:
        """The note as both the loader and whoever starts the engine find it."""
        return cls(weight_folders(run_directory), run_id, engine_id)

    @property
    def _file(self) -> Path:
        return self.directory / f".served-{quote(self.engine_id, safe='')}"

    def write(self, event: WeightVersionPublished, folder: Path) -> None:
        """The engine serves that version, which is in that folder. A note that cannot be written costs the next start a
        second load, and nothing else."""
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
        """The version and its folder, which stays until it is released; None where there is no note, or where the
        folder is gone or is not what was verified."""
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
        if sealed(folder, event_id):
            return version, held
        log.warning("%s starts from its model's own weights: %s was altered", self.engine_id, folder)
        held.release()
        return None


def weight_folders(run_directory: str) -> Path:
    """Where the versions that this machine has fetched are."""
    return Path(run_directory).resolve() / "weights"
