"""A folder that appears whole or not at all: written beside its place, synced, renamed.

While it is written the folder is `.NAME.partial-xxxx`, locked by its writer. What a killed writer left behind is
removed by the next one; a dataset that was moved aside when its writer died is put back.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from turnlog.consumers.datasets.errors import DatasetExists, NotADataset, Unwritable
from turnlog.consumers.datasets.manifest import NAME


class StagedFolder:
    """Where a dataset will stand. `folder` takes its files until `publish` or `discard`."""

    def __init__(self, out: Path, *, overwrite: bool = False) -> None:
        """Raises DatasetExists, NotADataset (something else stands at OUT), Unwritable."""
        self.out = Path(os.path.abspath(out))
        self._overwrite = overwrite
        self._aside = self.out.with_name(f".{self.out.name}.replaced")
        try:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            with _alone(self.out.parent):
                self._recover()
                self._admit()
                self.folder = Path(tempfile.mkdtemp(prefix=f".{self.out.name}.partial-", dir=self.out.parent))
                self._lock = _locked(self.folder)
            self.folder.chmod(0o755)
        except OSError as error:
            raise Unwritable(f"{self.out}: {error}; choose another OUT or free the space") from error

    def publish(self) -> None:
        """The folder takes its place; what stood there goes. Raises DatasetExists, Unwritable."""
        try:
            for folder in (*(path for path in self.folder.rglob("*") if path.is_dir()), self.folder):
                _sync(folder)
            with _alone(self.out.parent):
                self._admit()
                self._exchange()
        except OSError as error:
            raise Unwritable(f"{self.out}: {error}; choose another OUT or free the space") from error
        os.close(self._lock)
        shutil.rmtree(self._aside, ignore_errors=True)

    def discard(self) -> None:
        """Nothing was written."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)

    def _exchange(self) -> None:
        """What stands at OUT steps aside, and back when the new one cannot take its place. Raises OSError."""
        if self.out.exists():
            self.out.rename(self._aside)
        try:
            self.folder.rename(self.out)
        except OSError:
            if self._aside.exists():
                self._aside.rename(self.out)
            raise
        _sync(self.out.parent)

    def _admit(self) -> None:
        if not self.out.exists():
            return
        whole = (self.out / NAME).is_file()
        if not whole and not (self.out.is_dir() and not any(self.out.iterdir())):
            raise NotADataset(f"{self.out} is there and is no dataset: choose another OUT")
        if whole and not self._overwrite:
            raise DatasetExists(f"{self.out} is a dataset already: choose another OUT, or --overwrite")

    def _recover(self) -> None:
        """Undo what a killed writer of this place left."""
        if self._aside.exists():
            if self.out.exists():
                shutil.rmtree(self._aside)
            else:
                self._aside.rename(self.out)
        for left in self.out.parent.glob(f".{self.out.name}.partial-*"):
            with contextlib.suppress(BlockingIOError):  # its writer lives
                os.close(_locked(left))
                shutil.rmtree(left)


@contextlib.contextmanager
def _alone(parent: Path) -> Iterator[None]:
    """One at a time among the writers of a folder's datasets."""
    descriptor = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _locked(folder: Path) -> int:
    """An exclusive lock on a folder, as the descriptor that holds it. Raises BlockingIOError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
