"""Folders of a task as part of its row: a compressed archive, or the hash of a folder that is too large for the log.

A pack is `{"sha256": ..., "data": base64 of a tar.gz}`, or `{"sha256": ..., "folder": path, "task": path}` for one of
more than INLINE_BYTES. The bytes of an archive depend on the files alone, so the hash names the content; a folder that
has changed since is refused. Files keep their bytes, permission bits and links.
"""

from __future__ import annotations

import base64
import fnmatch
import functools
import hashlib
import io
import os
import stat
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from turnlog.environments import SandboxCall
from turnlog.plugins.harbor.inside import UNPACKING
from turnlog.plugins.harbor.task_toml import BadTaskFolder

INLINE_BYTES: Final = 128 << 10
"""Maximum size of an archive that is part of the row; every rollout of the task has it on the log."""
MOST_BYTES: Final = 64 << 20
"""Maximum size of an archive: a verifier sends it to its sandbox in calls of PART_CHARS."""
PART_CHARS: Final = 256 << 10
Pack = Mapping[str, Any]
GZIP: Final = 16 + zlib.MAX_WBITS
"""zlib's number for a gzip file. gzip.compress writes another header from Python 3.13 on, and so gives another hash."""
IGNORE: Final = ".harborignore"


def pack_folder(folder: Path, task: Path) -> dict[str, str]:
    """Return the pack of a folder of the task folder `task`. Raises BadTaskFolder."""
    data = _archive(folder, TaskFiles(task))
    digest = hashlib.sha256(data).hexdigest()
    if len(data) > MOST_BYTES:
        raise BadTaskFolder(
            f"{folder}: {len(data)} bytes compressed, {MOST_BYTES} can be served: put it into the image"
        )
    if len(data) > INLINE_BYTES:
        return {"sha256": digest, "folder": str(folder.resolve()), "task": str(task.resolve())}
    return {"sha256": digest, "data": base64.b64encode(data).decode()}


def pack_data(pack: Pack) -> str:
    """Return the archive of a pack as base64. Raises BadTaskFolder if the folder has changed or is not on this
    machine."""
    if "data" in pack:
        return str(pack["data"])
    return _folder_data(str(pack["folder"]), str(pack["task"]), str(pack["sha256"]))


@functools.lru_cache(16)
def _folder_data(folder: str, task: str, sha256: str) -> str:
    data = _archive(Path(folder), TaskFiles(Path(task)))
    if hashlib.sha256(data).hexdigest() != sha256:
        raise BadTaskFolder(f"{folder} has changed since the row was made, or is not on this machine: restore it")
    return base64.b64encode(data).decode()


def _archive(folder: Path, keep: TaskFiles) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in _files(folder, folder, keep):
            _add(archive, folder, path)
    return zlib.compress(raw.getvalue(), 9, wbits=GZIP)


def _files(root: Path, folder: Path, keep: TaskFiles) -> Iterator[Path]:
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return
    for name in names:
        path = folder / name
        if not keep(path):
            continue
        yield path
        if path.is_dir() and not path.is_symlink():
            yield from _files(root, path, keep)


def _add(archive: tarfile.TarFile, root: Path, path: Path) -> None:
    about = path.lstat()
    entry = tarfile.TarInfo(str(path.relative_to(root)))
    entry.mode = stat.S_IMODE(about.st_mode) & 0o777
    if stat.S_ISLNK(about.st_mode):
        if not path.resolve().is_relative_to(root.resolve()):
            raise BadTaskFolder(f"{path} is a link out of {root}: replace it by what it leads to")
        entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, os.readlink(path), 0o777
        archive.addfile(entry)
    elif stat.S_ISDIR(about.st_mode):
        entry.type = tarfile.DIRTYPE
        archive.addfile(entry)
    elif stat.S_ISREG(about.st_mode):
        content = path.read_bytes()
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
    else:
        raise BadTaskFolder(f"{path} is neither a file nor a folder nor a link: remove it")


UNPACK: Final = """\
import base64, os, tarfile
target, part, data, last = {target!r}, {part!r}, {data!r}, {last!r}
os.makedirs(target, exist_ok=True)
with open(part, "ab") as file:
    file.write(base64.b64decode(data))
if last:
    with tarfile.open(part) as archive:
        unpack(archive, target)
    os.unlink(part)
"""
"""Program, after UNPACKING, that appends a part of an archive to a file, and unpacks it after the last part."""


def unpack_calls(pack: Pack, target: str) -> list[SandboxCall]:
    """Return the calls that unpack a pack into the folder `target` of a sandbox. Raises BadTaskFolder."""
    data, part = pack_data(pack), f"/logs/{pack['sha256'][:16]}.part"
    pieces = [data[start : start + PART_CHARS] for start in range(0, len(data), PART_CHARS)]
    programs = [UNPACK.format(target=target, part=part, data=piece, last=piece is pieces[-1]) for piece in pieces]
    return [SandboxCall("python", {"code": UNPACKING + program}) for program in programs]


class TaskFiles:
    """Tells which files of tests/ and solution/ belong to the task, by .harborignore files above them: a pattern per
    line as in .gitignore; `!` takes a file in again."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __call__(self, path: Path) -> bool:
        """Return whether the file or folder belongs to the task."""
        if path.name == IGNORE:
            return False
        ignored, folder = False, self._root
        for name in ("", *path.parent.relative_to(self._root).parts):
            folder /= name
            for pattern in _patterns(folder / IGNORE):
                if _matches(pattern.lstrip("!"), path, folder):
                    ignored = not pattern.startswith("!")
        return not ignored


def _patterns(path: Path) -> list[str]:
    if not path.is_file():
        return []
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def _matches(pattern: str, path: Path, folder: Path) -> bool:
    if pattern.endswith("/") and not path.is_dir():
        return False
    bare = pattern.strip("/")
    relative = path.relative_to(folder).as_posix()
    if "/" not in bare and not pattern.startswith("/"):
        return fnmatch.fnmatchcase(path.name, bare)
    return fnmatch.fnmatchcase(relative, bare.replace("**/", "*"))
