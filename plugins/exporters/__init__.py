"""Exporters of a run to existing programs: TensorBoard, Weights & Biases, OpenTelemetry; e-mail and chat by apprise;
sessions as ATIF trajectories and traces of the Hugging Face Hub.

OutletError
├── BadOutlet       a --to, or an address of [alerts] urls, that names none of them
├── NoLibrary       the extra is not installed
├── BusyOutlet      another process writes to the same folder
└── OtherHistory    the existing files belong to another log
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from turnlog.infra.run_folder import lock_file


class OutletError(Exception):
    """Base of the tree above."""


class BadOutlet(OutletError):
    """Remedy: write KIND=DIR, as `turnlog role track --help` shows; write an address in apprise's format."""


class NoLibrary(OutletError):
    """Remedy: install turnlog with the named extra."""


class BusyOutlet(OutletError):
    """Remedy: end the other process, or give this one a folder of its own."""


class OtherHistory(OutletError):
    """Remedy: give each run a folder of its own."""


def library(name: str, extra: str) -> Any:
    """Import a module of an extra. Raises NoLibrary."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise NoLibrary(f"{error.name} is not installed: pip install 'turnlog[{extra}]'") from error


@contextlib.contextmanager
def one_writer(path: Path) -> Iterator[str]:
    """Hold a folder's lock, which gives the right to write there. Yields what its last holder left in the lock file.
    Raises BusyOutlet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    busy = BusyOutlet(f"{path.parent} is being written by another process, which holds {path.name}")
    with lock_file(path, busy) as lock:
        lock.seek(0)
        yield lock.read()
