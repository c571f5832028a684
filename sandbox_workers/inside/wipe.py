"""Reset: empty the writable folders and say whether the sandbox is as new."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import stat
from typing import Any

from turnlog.sandbox_workers.inside.processes import Place


def wipe(place: Place, as_new: tuple[Any, ...]) -> bool:
    """Empty the writable folders; False when something is left or this process was tampered with."""
    try:
        for folder in place.folders:
            os.chmod(folder, 0o700)
            with os.scandir(folder) as entries:
                for entry in list(entries):
                    _remove(entry.path)
        return not place.namespace or (not _shared_memory() and fingerprint() == as_new)
    except (OSError, RecursionError):
        return False


def _remove(path: str) -> None:
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        os.unlink(path)
        return
    for parent, folders, _ in os.walk(path):  # top down: a folder is made readable before it is entered
        for folder in folders:
            if not os.path.islink(inner := os.path.join(parent, folder)):
                os.chmod(inner, 0o700)
    os.chmod(path, 0o700)
    shutil.rmtree(path)


def _shared_memory() -> bool:
    """System V objects outlive processes (each table has one title line)."""
    for table in ("shm", "sem", "msg"):
        with contextlib.suppress(FileNotFoundError), open(f"/proc/sysvipc/{table}", "rb") as file:
            if len(file.readlines()) > 1:
                return True
    return False


def fingerprint() -> tuple[Any, ...]:
    """What a process of our user could change of us from outside: prlimit(2), setpriority(2), sched_setaffinity(2)."""
    limits = tuple(resource.getrlimit(number) for number in range(16))
    return limits, os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0), os.sched_getaffinity(0)
