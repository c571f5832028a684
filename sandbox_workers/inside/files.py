"""Single files of the workspace: read, write. Called between calls, when every process of the agent is dead or stands
still, so nothing changes underneath."""

from __future__ import annotations

import contextlib
import os
import stat

from turnlog.sandbox_workers.inside.paths import Quota, Refused, Walk, parts, refusal, shown
from turnlog.sandbox_workers.inside.processes import Place, disk_used

PLAIN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""A pipe or a device is seen by fstat(2) and never waited for."""
TEMPORARY = ".turnlog-part-"
"""How the name begins under which a file is written before it is renamed; what follows is no agent's to know."""


def read(place: Place, path: str, most: int, *, offset: int = 0, size: int | None = None) -> bytes:
    """Bytes of a plain file that has `most` at most: all, or `size` from `offset` on. Raises Refused, Missing,
    Locked."""
    *above, name = _named(path)
    try:
        with Walk(place.folders[0]) as walk:
            walk.down(above, path)
            name = walk.last(name, path)
            descriptor = os.open(name, os.O_RDONLY | PLAIN, dir_fd=walk.here)
            try:
                return plain_content(descriptor, path, most, offset, size)
            finally:
                os.close(descriptor)
    except OSError as error:
        raise refusal(error, path) from error


def plain_content(descriptor: int, path: str, most: int, offset: int = 0, size: int | None = None) -> bytes:
    """What `read` reads, of an open file. Raises Refused, OSError."""
    about = os.fstat(descriptor)
    if not stat.S_ISREG(about.st_mode):
        raise Refused(f"{shown(path)} is {_what(about.st_mode)}, not a file")
    if about.st_size > most:
        raise Refused(f"{shown(path)} has {about.st_size} bytes, more than the {most} that can be read")
    wanted = max(0, about.st_size - offset) if size is None else max(0, min(size, about.st_size - offset))
    data = bytearray()
    while len(data) < wanted and (part := os.pread(descriptor, wanted - len(data), offset + len(data))):
        data += part
    return bytes(data)


def write(place: Place, path: str, content: bytes, mode: int, disk_bytes: int, *, follow: bool) -> None:
    """Replace or make a file by one rename; `follow`: the one that links lead to, which keeps its mode. Raises Refused,
    Quota."""
    *above, name = _named(path)
    if disk_used(place) + len(content) > disk_bytes:
        raise Quota(f"{shown(path)}: {len(content)} bytes more do not fit the workspace's {disk_bytes}")
    try:
        with Walk(place.folders[0]) as walk:
            walk.down(above, path, make=True)
            if follow:
                name = walk.last(name, path, make=True)
            with contextlib.suppress(FileNotFoundError):
                there = os.stat(name, dir_fd=walk.here, follow_symlinks=False).st_mode
                if stat.S_ISDIR(there):
                    raise Refused(f"{shown(path)} is a folder")
                mode = there if follow and stat.S_ISREG(there) else mode
            _replace(walk.here, name, content, mode)
    except OSError as error:
        raise refusal(error, path) from error


def fill(descriptor: int, content: bytes | memoryview) -> None:
    """Write all of it."""
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


def _replace(folder: int, name: str, content: bytes, mode: int) -> None:
    temporary = TEMPORARY + os.urandom(8).hex()
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | PLAIN, 0o600, dir_fd=folder)
    try:
        try:
            fill(descriptor, content)
            os.fchmod(descriptor, mode & 0o777)
        finally:
            os.close(descriptor)
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        os.unlink(temporary, dir_fd=folder)
        raise


def _named(path: str) -> list[str]:
    found = parts(path)
    if not found:
        raise Refused(f"{shown(path)} names no file")
    return found


def _what(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "a folder"
    return "a pipe" if stat.S_ISFIFO(mode) else "a device" if stat.S_ISCHR(mode) or stat.S_ISBLK(mode) else "special"
