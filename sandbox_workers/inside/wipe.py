"""Reset: empty the writable folders, and prove that nothing of a call is left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import stat
import struct
import sys
from typing import Any

from turnlog.sandbox_workers.inside.network import sockets
from turnlog.sandbox_workers.inside.processes import Place, others

FS_IOC_GETFLAGS = 0x80086601
"""ioctl_iflags(2)."""
SETTABLE = 0x000380FF
"""FS_FL_USER_MODIFIABLE of linux/fs.h: the kernel sets others, such as that a folder had many entries once."""
AGENTS = ("user.", "system.posix_acl_")
"""Attributes that the owner of a folder may set (xattr(7))."""


def wipe(place: Place, as_new: tuple[Any, ...]) -> bool:
    """Empty the writable folders; False when something is left, or this process was tampered with."""
    try:
        empty(place)
        left = others(place) or (place.namespace and _shared_memory())
        return not left and fingerprint(place) == as_new
    except (OSError, RecursionError):
        return False


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


def _shared_memory() -> bool:
    """System V objects outlive processes (each table has one title line). POSIX ones are files of /dev/shm; POSIX
    queues cannot be made (RLIMIT_MSGQUEUE is 0)."""
    for table in ("shm", "sem", "msg"):
        with contextlib.suppress(FileNotFoundError), open(f"/proc/sysvipc/{table}", "rb") as file:
            if len(file.readlines()) > 1:
                return True
    return False


def fingerprint(place: Place) -> tuple[Any, ...]:
    """All that must be as at the start. The only socket of a network namespace of ours may be our listener; the host's
    tables are full of others."""
    return own_state(place), sockets() if place.namespace else ()


def own_state(place: Place) -> tuple[Any, ...]:
    """What a process of our user could change of us from outside (prlimit(2), setpriority(2), sched_setaffinity(2)),
    what the folders are, and that we ourselves have kept nothing of a call."""
    limits = tuple(resource.getrlimit(number) for number in range(16))
    scheduling = os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0), sorted(os.sched_getaffinity(0))
    kept = dict(os.environ), os.getcwd(), len(sys.modules), len(os.listdir("/proc/self/fd"))
    return limits, scheduling, kept, [_folder(path) for path in place.folders]


def _folder(path: str) -> tuple[Any, ...]:
    about = os.stat(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        flags = fcntl.ioctl(descriptor, FS_IOC_GETFLAGS, bytes(8))
    except OSError:
        flags = bytes(8)  # this file system has none
    finally:
        os.close(descriptor)
    return about.st_mode, about.st_uid, about.st_gid, os.listxattr(path), struct.unpack("@l", flags)[0] & SETTABLE
