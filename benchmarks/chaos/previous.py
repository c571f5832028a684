"""The release before the last: built as a wheel from the commit that cut its schemas, unpacked, kept in the cache.

`python benchmarks/chaos/previous.py` prints the folder; with PYTHONPATH=FOLDER an interpreter of ours runs it, with the
libraries that this release locks. Exit status 2 where the repository has not that commit (a shallow clone, an export).
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from turnlog.plugins.harbor.inside.unpacking import unpack
from turnlog.schemas.releases import releases

ROOT = Path(__file__).parents[2]
KEPT = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "turnlog/releases"


class NoPreviousRelease(Exception):
    """Remedy: a clone with its history (`git fetch --unshallow`)."""


def commit() -> tuple[str, str]:
    """(name of the release before the last, the commit that cut its schemas). Raises NoPreviousRelease."""
    name = releases()[-2].name
    found = _git("log", "--diff-filter=A", "--format=%H", "--", f"schemas/released/{name}/SHA256SUMS").split()
    if not found:
        raise NoPreviousRelease(f"no commit of {ROOT} cut release {name}: upgrades from it cannot be run here")
    return name, found[-1].decode()


def previous() -> Path:
    """The folder that holds the release's package. Raises NoPreviousRelease."""
    _, sha = commit()
    folder = KEPT / sha
    if not folder.is_dir():
        KEPT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=KEPT) as scratch:
            unpacked = _unpacked_wheel(sha, Path(scratch))
            if not folder.is_dir():  # another process may have made it meanwhile
                shutil.move(unpacked, folder)
    return folder


def _unpacked_wheel(sha: str, scratch: Path) -> Path:
    source, wheels, unpacked = scratch / "source", scratch / "wheels", scratch / "unpacked"
    with tarfile.open(fileobj=io.BytesIO(_git("archive", sha))) as tree:
        unpack(tree, str(source))
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(wheels), str(source)]
    subprocess.run(build, capture_output=True, check=True)
    (wheel,) = wheels.iterdir()
    with zipfile.ZipFile(wheel) as content:
        content.extractall(unpacked)
    return unpacked


def _git(*arguments: str) -> bytes:
    try:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        raise NoPreviousRelease(f"git {arguments[0]} in {ROOT}: {error}") from error


if __name__ == "__main__":
    try:
        print(previous())
    except NoPreviousRelease as missing:
        print(f"NoPreviousRelease: {missing}", file=sys.stderr)
        raise SystemExit(2) from None
