"""A disk that is soon full: a file system of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mounted(folder: Path) -> Iterator[Path]:
    """200 MiB at an existing folder, which every user may write to. Skips the test where nothing can be mounted."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=200m,mode=1777", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("no file system can be mounted")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path, *, but: int = 0) -> Path:
    """The file that takes all but so many bytes of what is left of the folder's disk."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (2**20, 4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))
        file.truncate(file.tell() - but)
    return filler
