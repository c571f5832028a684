"""The whole workspace: what is in it, and putting it back. What is put back is checked to its end before the first byte
is written, since it was made from what a sandbox said."""

from __future__ import annotations

import contextlib
import os
import stat
from _blake2 import blake2b  # hashlib would load OpenSSL, which takes a third of the init's start
from collections.abc import Iterator
from typing import Any

from turnlog.sandbox_workers.inside.files import PLAIN, fill, plain_content, read
from turnlog.sandbox_workers.inside.frames import PART_BYTES, Control, ControlClosed
from turnlog.sandbox_workers.inside.paths import FOLDER, LONGEST_PATH, Locked, Quota, Refused, exact, refusal, shown
from turnlog.sandbox_workers.inside.processes import INODE_BYTES, Place
from turnlog.sandbox_workers.inside.wipe import empty

MOST_ENTRIES = 20_000
"""Of a workspace that is to be kept."""
NAME_BYTES = 4 << 20
"""All paths and targets of one together."""
MOST_DEPTH = 200
"""Folders in folders."""
PAGE = 4096
"""A file takes whole pages of a tmpfs."""
Entry = dict[str, Any]
"""path, kind ("file" | "folder" | "link"), mode, size, target, stamp; see protocol.FileEntry."""


def index(place: Place, disk_bytes: int) -> list[Entry]:
    """What is there, parents first. A file's stamp is a hash of its bytes: time stamps have the resolution of the
    kernel's clock tick, and a write through a shared mapping may leave them as they were. Raises Refused."""
    found: list[Entry] = []
    left = [disk_bytes, NAME_BYTES]
    try:
        with _root(place) as root:
            for entry in _below(root, "", left):
                found.append(entry)
                if len(found) > MOST_ENTRIES:
                    raise Refused(f"the workspace holds more than {MOST_ENTRIES} files, too many to be kept")
    except OSError as error:
        raise refusal(error, found[-1]["path"] if found else "") from error
    return sorted(found, key=lambda entry: str(entry["path"]))


def read_many(place: Place, paths: list[str], most: int) -> list[bytes]:
    """Bytes of plain files, `most` together, those included whose owner took the right to read them away: `index` has
    found them all. Raises Refused, Missing."""
    found = []
    for path in paths:
        try:
            found.append(read(place, path, most))
        except Locked:
            found.append(_unlocked(place, path, most))
        most -= len(found[-1])
    return found


def _unlocked(place: Place, path: str, most: int) -> bytes:
    """What `read` would find if its owner let it."""
    *above, name = exact(path)
    try:
        with contextlib.ExitStack() as held:
            folder = held.enter_context(_root(place))
            for part in above:
                mode = os.stat(part, dir_fd=folder, follow_symlinks=False).st_mode
                folder = held.enter_context(_opened(folder, part, mode, 0o700, os.O_DIRECTORY))
            mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
            return plain_content(held.enter_context(_opened(folder, name, mode, 0o400, 0)), path, most)
    except OSError as error:
        raise refusal(error, path) from error


@contextlib.contextmanager
def _root(place: Place) -> Iterator[int]:
    root = os.open(place.folders[0], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield root
    finally:
        os.close(root)


def _below(folder: int, above: str, left: list[int]) -> Iterator[Entry]:
    if above.count("/") > MOST_DEPTH:
        raise Refused(f"{shown(above)}: more than {MOST_DEPTH} folders in each other, too many to be kept")
    for name in sorted(os.listdir(folder)):
        about = os.stat(name, dir_fd=folder, follow_symlinks=False)
        entry = {"path": above + name, "mode": about.st_mode & 0o777, "size": 0, "target": "", "stamp": ""}
        if stat.S_ISDIR(about.st_mode):
            yield _within(entry | {"kind": "folder"}, left)
            with _opened(folder, name, about.st_mode, 0o700, os.O_DIRECTORY) as inner:
                yield from _below(inner, f"{above}{name}/", left)
        elif stat.S_ISLNK(about.st_mode):
            yield _within(entry | {"kind": "link", "target": os.readlink(name, dir_fd=folder)}, left)
        elif stat.S_ISREG(about.st_mode):
            sized = _within(entry | {"kind": "file", "size": about.st_size}, left)
            with _opened(folder, name, about.st_mode, 0o400, 0) as inner:
                stamp = _stamp(inner)
            yield sized | {"stamp": stamp}


def _within(entry: Entry, left: list[int]) -> Entry:
    """Raises Refused for an entry that makes it too much, before its bytes are looked at (a sparse file's are zeros
    without end)."""
    path = entry["path"]
    left[0] -= _cost(entry)
    left[1] -= len(os.fsencode(path)) + len(os.fsencode(entry["target"]))
    if left[0] < 0:
        raise Refused(f"the workspace's files take more than it may hold, {shown(path)} among them: too much to keep")
    if left[1] < 0 or len(os.fsencode(path)) > LONGEST_PATH:
        raise Refused(f"{shown(path)}: the workspace's names are too long to be kept")
    return entry


def _cost(entry: Entry) -> int:
    """Of the workspace's room. What is kept is measured as what is put back: a session whose files were kept goes on
    with them in any sandbox."""
    size: int = entry["size"]
    return -(-size // PAGE) * PAGE + INODE_BYTES


@contextlib.contextmanager
def _opened(folder: int, name: str, mode: int, needed: int, flags: int) -> Iterator[int]:
    """A descriptor; its owner may have taken every right away, and has it so again afterwards."""
    locked = mode & needed != needed
    if locked:
        os.chmod(name, stat.S_IMODE(mode) | needed, dir_fd=folder)
    try:
        descriptor = os.open(name, os.O_RDONLY | PLAIN | flags, dir_fd=folder)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
    finally:
        if locked:
            os.chmod(name, stat.S_IMODE(mode), dir_fd=folder)


def _stamp(descriptor: int) -> str:
    digest = blake2b(digest_size=20)
    while part := os.read(descriptor, 1 << 20):
        digest.update(part)
    return digest.hexdigest()


def check(entries: list[Entry], disk_bytes: int) -> None:
    """All of it is a workspace that fits. Raises Refused, Quota."""
    if len(entries) > MOST_ENTRIES:
        raise Refused(f"{len(entries)} entries, more than the {MOST_ENTRIES} of a workspace")
    kinds: dict[str, str] = {"": "folder"}
    names = 0
    for entry in entries:
        path = "/".join(exact(entry["path"]))
        if path in kinds:
            raise Refused(f"{shown(path)} is there twice")
        if kinds.get(path.rpartition("/")[0]) != "folder":
            raise Refused(f"{shown(path)} does not lie in a folder that comes before it")
        if entry["kind"] not in ("file", "folder", "link") or not 0 <= entry["mode"] <= 0o777 or entry["size"] < 0:
            raise Refused(f"{shown(path)} is no file, folder or link")
        if (entry["kind"] == "link") != bool(entry["target"]) or "\0" in entry["target"]:
            raise Refused(f"{shown(path)}: a link and nothing else has a target")
        if len(os.fsencode(entry["target"])) > LONGEST_PATH:
            raise Refused(f"{shown(path)}: its target is too long")
        kinds[path] = entry["kind"]
        names += len(path) + len(entry["target"])
    needed = sum(map(_cost, entries))
    if needed > disk_bytes or names > NAME_BYTES:
        raise Quota(f"{len(entries)} entries of {needed} bytes do not fit the workspace's {disk_bytes}")


class Contents:
    """The files' bytes as they come from the worker, one file behind the other."""

    def __init__(self, control: Control, size: int) -> None:
        self.control = control
        self.left = size
        self.room = bytearray(PART_BYTES)

    def copy(self, descriptor: int, size: int) -> None:
        """The next file. Raises ControlClosed."""
        while size:
            part = self._part(size)
            size -= len(part)
            fill(descriptor, part)

    def skip(self) -> None:
        """What nobody has taken. Raises ControlClosed."""
        while self.left:
            self._part(self.left)

    def _part(self, most: int) -> memoryview:
        room = memoryview(self.room)[: min(most, PART_BYTES)]
        count = self.control.recv_into(room)
        if not count:
            raise ControlClosed
        self.left -= count
        return room[:count]


def restore(place: Place, entries: list[Entry], contents: Contents) -> None:
    """Empty the workspace and fill it with checked entries. Raises Refused, Quota, ControlClosed."""
    path = ""
    try:
        empty(place)
        root = os.open(place.folders[0], FOLDER)
        try:
            for entry in entries:
                path = entry["path"]
                _put(root, entry, contents)
            for entry in reversed(entries):  # the deepest first: a folder may take the right to enter it away
                if entry["kind"] != "link":
                    os.chmod(entry["path"], entry["mode"], dir_fd=root)
        finally:
            os.close(root)
    except OSError as error:
        raise refusal(error, path) from error


def _put(root: int, entry: Entry, contents: Contents) -> None:
    if entry["kind"] == "folder":
        os.mkdir(entry["path"], 0o700, dir_fd=root)
    elif entry["kind"] == "link":
        os.symlink(entry["target"], entry["path"], dir_fd=root)
    else:
        descriptor = os.open(entry["path"], os.O_WRONLY | os.O_CREAT | os.O_EXCL | PLAIN, 0o600, dir_fd=root)
        try:
            contents.copy(descriptor, entry["size"])
        finally:
            os.close(descriptor)
