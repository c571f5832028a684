"""Environments of packages whose pins are not ours: each is made once, in .cache, by whichever test process needs it
first. Bytecode is left to the imports: to compile all files of such an environment takes a core for minutes."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
UV = ROOT / ".cache/bootstrap/bin/uv"
LOCKS = ROOT / "locks" / "{}.{}".format(*sys.version_info)
"""The locks of this Python."""


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Test processes beside each other install into the folder one after the other."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def locked_python(name: str, missing: str) -> Path:
    """The interpreter with what LOCKS/NAME.lock pins; environments of earlier locks are removed. Skips the test with
    `missing` where no registry has it."""
    lock, folder = LOCKS / f"{name}.lock", ROOT / f".cache/{name}"
    made = folder / f"{LOCKS.name}-{hashlib.sha256(lock.read_bytes()).hexdigest()[:12]}"
    with alone(folder):
        if not made.exists():
            for old in filter(Path.is_dir, folder.iterdir()):
                shutil.rmtree(old)
            make(made, ["sync", "--require-hashes"], [lock], missing)
    return made / "bin/python"


def make(
    made: Path, command: Sequence[str], what: Sequence[str | Path], missing: str, python: str | Path = sys.executable
) -> None:
    """Make the environment `made` by a command of `uv pip`, whole or not at all; the caller is `alone`. Skips the test
    with `missing` if it fails."""
    part = made.with_name("part")
    shutil.rmtree(part, ignore_errors=True)
    subprocess.run([UV, "venv", "--quiet", "--relocatable", "--python", python, part], check=True)
    if subprocess.run([UV, "pip", *command, "--quiet", "--python", part, *what]).returncode:
        shutil.rmtree(part, ignore_errors=True)
        pytest.skip(missing)
    part.rename(made)
