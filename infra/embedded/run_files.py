"""The files of a run that the supervisor keeps: settings.toml, supervisor.json, supervisor.lock, logs."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from turnlog.infra.embedded.errors import AlreadyUp
from turnlog.settings import Settings

SETTINGS = "settings.toml"
STATE = "supervisor.json"
LOCK = "supervisor.lock"
LOGS = "logs"
KEPT_RUNS = 5


def write_settings(directory: Path, settings: Settings) -> Path:
    """Every value in effect, as a file that `turnlog --settings` reads back; mode 0600, it holds the store's secret."""
    lines = []
    for section in dataclasses.fields(settings):
        values = dataclasses.asdict(getattr(settings, section.name))
        lines += [f"[{section.name}]", *(f"{key} = {_toml(value)}" for key, value in values.items()), ""]
    path = directory / SETTINGS
    _replace(path, "\n".join(lines))
    return path


def _toml(value: Any) -> str:
    """Strings of JSON are basic strings of TOML, but for a bare DEL, which no setting holds."""
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False)


def write_state(directory: Path, state: dict[str, Any]) -> None:
    """Replace supervisor.json in one step."""
    _replace(directory / STATE, json.dumps(state, indent=2) + "\n")


def read_state(directory: Path) -> dict[str, Any]:
    """What the last supervisor said; empty when there was none."""
    try:
        state: dict[str, Any] = json.loads((directory / STATE).read_text())
    except FileNotFoundError:
        return {}
    return state


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the run: one supervisor at a time. The kernel lets go when its process ends. Raises AlreadyUp."""
    with (directory / LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AlreadyUp(
                f"{directory} is up already: `turnlog status` shows it, `turnlog down` stops it, and another --run ID "
                "is another run"
            ) from None
        yield


def is_live(directory: Path) -> bool:
    """Whether a supervisor holds the run."""
    if not (directory / LOCK).exists():
        return False
    try:
        with locked(directory):
            return False
    except AlreadyUp:
        return True


def prune(runs: Path, keep: Path, *, kept: int = KEPT_RUNS) -> list[Path]:
    """Remove all but the `kept` youngest runs below `runs`, never `keep` nor a live one; what was removed.
    A folder is a run when a supervisor wrote into it."""
    others = [path.parent for path in runs.glob(f"*/{STATE}") if path.parent.resolve() != keep.resolve()]
    oldest_last = sorted(others, key=lambda path: (path / STATE).stat().st_mtime_ns, reverse=True)
    removed = [path for path in oldest_last[max(kept - 1, 0) :] if not is_live(path)]
    for path in removed:
        shutil.rmtree(path)
    return removed


def _replace(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    os.replace(part, path)
