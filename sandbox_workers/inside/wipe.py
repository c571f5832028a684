"""Reset in place: empty the writable folders, and prove that nothing of a call is left."""

from __future__ import annotations

import os
import stat
from typing import Any

from turnlog.sandbox_workers.inside.observables import observed
from turnlog.sandbox_workers.inside.processes import Place

AGENTS = ("user.", "system.posix_acl_")
"""Attributes that the owner of a folder may set (xattr(7))."""


def wipe(place: Place, as_new: dict[str, Any] | None) -> bool:
    """Empty the writable folders; False when something is left, or this process was tampered with."""
    try:
        empty(place)
        untouched(place)
        return observed(place) == as_new
    except (OSError, RecursionError):
        return False


def untouched(place: Place) -> None:
    """Let the times of the writable folders tell of nothing. Raises OSError."""
    for folder in place.folders:
        os.utime(folder, (0, 0))


def empty(place: Place) -> None:
    """Take everything out of the writable folders, their own attributes included. Raises OSError, RecursionError."""
    for folder in place.folders:
        os.chmod(folder, 0o700)
        for name in os.listxattr(folder):
            if name.startswith(AGENTS):
                os.removexattr(folder, name)
        with os.scandir(folder) as entries:
            for entry in list(entries):
                _remove(entry.path)


def _remove(path: str) -> None:
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        os.unlink(path)
        return
    os.chmod(path, 0o700)
    found = [path]
    for parent, folders, names in os.walk(path):  # top down: a folder is made readable before it is entered
        for name in names:
            os.unlink(os.path.join(parent, name))
        for name in folders:
            inner = os.path.join(parent, name)
            if os.path.islink(inner):
                os.unlink(inner)
            else:
                os.chmod(inner, 0o700)
                found.append(inner)
    for folder in reversed(found):
        os.rmdir(folder)
