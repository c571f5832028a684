"""Processes, folders and control groups that a killed worker leaves on its machine.

Each name tells its owner, and any worker removes what is ownerless. A name is `turnlog-sandbox-OWNER-REST`. OWNER
consists of pid namespace, pid and start time, because a pid alone is reused, and in another container means another
process. Processes die with their worker; control groups and workspaces do not."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import stat
import tempfile
from pathlib import Path

from prometheus_client import Counter

from turnlog.infra.run_folder import LEAST_FREE, full_disk, lacks_room
from turnlog.sandbox_workers.protocol import DiskLacksRoom, SandboxUnavailable

log = logging.getLogger(__name__)

PREFIX = "turnlog-sandbox-"
NAME = re.compile(rf"{PREFIX}(\d+)-(\d+)-(\d+)-")
LEAKS = Counter(
    "turnlog_sandbox_leaks", "Leftovers of dead workers that were removed: process, group or folder", ["kind"]
)


def owned_prefix() -> str:
    """Return the prefix of the names of this process's things."""
    return f"{PREFIX}{_namespace()}-{os.getpid()}-{_start_time(os.getpid())}-"


def workspace_folder(disk_bytes: int) -> Path:
    """Create a folder of this process for a workspace of that size, on a disk that has room for it. Raises
    SandboxUnavailable, DiskLacksRoom."""
    parent = Path(tempfile.gettempdir())
    if full := lacks_room(parent, min(disk_bytes, LEAST_FREE)):
        raise DiskLacksRoom(f"no workspace: {full}")
    try:
        return Path(tempfile.mkdtemp(prefix=owned_prefix(), dir=parent))
    except OSError as error:
        raise no_workspace(error) from error


def no_workspace(error: OSError) -> SandboxUnavailable:
    """Return the error that explains why no workspace could be made."""
    parent = Path(tempfile.gettempdir())
    if full := full_disk(error, parent):
        return DiskLacksRoom(f"no workspace: {full}")
    return SandboxUnavailable(f"no workspace in {parent}: {error}; set TMPDIR")


def ownerless(name: str) -> bool:
    """Return whether the name is one of ours whose owner lived in this pid namespace and is dead."""
    match = NAME.match(name)
    if match is None:
        return False
    namespace, pid, start = (int(part) for part in match.groups())
    return namespace == _namespace() and _start_time(pid) != start


def record_removal(kind: str, name: str, count: int = 1) -> None:
    """Count and log what was removed."""
    LEAKS.labels(kind).inc(count)
    log.warning("removed a leftover of a dead worker: %s %s", kind, name)


def sweep_folders(parent: Path | None = None) -> int:
    """Remove workspaces of dead workers below `parent` (by default the folder for temporary files). Return how many are
    gone."""
    parent, gone = parent or Path(tempfile.gettempdir()), 0
    for name in _names(parent):
        path = parent / name
        with contextlib.suppress(OSError):  # another worker has removed it, or we lack the permission
            if not ownerless(name) or not stat.S_ISDIR(os.lstat(path).st_mode):
                continue
            remove_tree(path)
            record_removal("folder", str(path))
            gone += 1
    return gone


def remove_tree(root: Path) -> None:
    """Remove a folder that an agent could write to, however deep it is (shutil.rmtree recurses, and a path has a
    maximum length) and whatever rights were removed. A nested folder is moved up before it is emptied. Raises
    OSError."""
    token, number, ahead = secrets.token_hex(8), 0, [""]
    _unlock(str(root))
    here = _open_folder(str(root))
    try:
        while ahead:
            name = ahead.pop()
            inner = _open_folder(name, here) if name else here
            try:
                for found in os.listdir(inner):
                    if not stat.S_ISDIR(os.stat(found, dir_fd=inner, follow_symlinks=False).st_mode):
                        os.unlink(found, dir_fd=inner)
                        continue
                    number += 1
                    ahead.append(f"{token}-{number}")
                    _unlock(found, inner)  # needed before the rename, which changes its `..`
                    os.rename(found, ahead[-1], src_dir_fd=inner, dst_dir_fd=here)
            finally:
                if name:
                    os.close(inner)
            if name:
                os.rmdir(name, dir_fd=here)
    finally:
        os.close(here)
    root.rmdir()


def discard(root: Path) -> None:
    """Remove a sandbox's folder at its end; a failure is logged."""
    try:
        remove_tree(root)
    except OSError as error:
        log.warning("%s could not be removed: %s", root, error)


def _open_folder(name: str, folder: int | None = None) -> int:
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)


def _unlock(name: str, folder: int | None = None) -> None:
    """Restore the owner's rights. Root needs none, and must not follow a link that has just replaced a folder."""
    if os.geteuid() != 0:
        os.chmod(name, 0o700, dir_fd=folder)


def _names(parent: Path) -> list[str]:
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        return [entry.name for entry in entries if entry.name.startswith(PREFIX)]
    return []


def _namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _start_time(pid: int) -> int | None:
    """Return the start time in ticks since boot, field 22 of proc(5) stat; None if there is no such process."""
    try:
        about = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if about[0] in (b"Z", b"X") else int(about[19])
