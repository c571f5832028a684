"""The workspace: paths that never lead out of it, single files, and snapshots of the whole, taken and restored.

These functions are called between calls, when every process of the agent is dead or stopped, so nothing changes
underneath. A snapshot is checked completely before its first byte is written, since it was made from what a sandbox
reported.

PathRefused        the path leads out, is too long, or is not what was asked for; the message is for the model
├── Missing        nothing is there
├── Locked         its owner has removed the right to it
└── Quota          it would not fit
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from _blake2 import blake2b  # hashlib would load OpenSSL, which takes a third of the init's start
from collections.abc import Iterator
from typing import Any

from turnlog.sandbox_workers.inside.frames import PART_BYTES, Control, ControlClosed
from turnlog.sandbox_workers.inside.observables import empty
from turnlog.sandbox_workers.inside.processes import INODE_BYTES, InitEnvironment, disk

MOST_ENTRIES = 20_000
"""Maximum number of entries in a workspace that can be stored."""
NAME_BYTES = 4 << 20
"""Maximum size of all paths and link targets of a workspace together."""
MOST_DEPTH = 200
"""Maximum nesting depth of folders."""
PAGE = 4096
"""Page size of a tmpfs; a file takes whole pages."""
Entry = dict[str, Any]
"""path, kind ("file" | "folder" | "link"), mode, size, target, stamp; see protocol.FileEntry."""

PLAIN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""Flags for plain files: a pipe or a device is detected by fstat(2) and never waited for."""
TEMPORARY = ".turnlog-part-"
"""Prefix of the name under which a file is written before it is renamed; agents must not know the rest."""

LONGEST_NAME = 255
"""NAME_MAX of limits.h."""
LONGEST_PATH = 4095
"""PATH_MAX of limits.h, less its NUL."""
MOST_LINKS = 40
"""Maximum number of links followed, as in the kernel (path_resolution(7))."""
WORKSPACE = "/workspace"
"""Name of the root that models use in links, wherever a backend has it."""
FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def index(place: InitEnvironment, disk_bytes: int) -> list[Entry]:
    """Return all entries, parents first. A file's stamp is a hash of its bytes: time stamps have the resolution of the
    kernel's clock tick, and a write through a shared mapping may leave them unchanged. Raises PathRefused."""
    found: list[Entry] = []
    left = [disk_bytes, NAME_BYTES]
    try:
        for entry in _tree(place, left):
            found.append(entry)
            if len(found) > MOST_ENTRIES:
                raise PathRefused(f"the workspace holds more than {MOST_ENTRIES} files, too many to be kept")
    except OSError as error:
        raise refusal(error, found[-1]["path"] if found else "") from error
    return sorted(found, key=lambda entry: str(entry["path"]))


def _tree(place: InitEnvironment, left: list[int]) -> Iterator[Entry]:
    if not place.roots:
        with _open(place.folders[0]) as root:
            yield from _below(root, "", left)
    for above in sorted(_above(place.roots)):
        yield _folder_entry(above, 0o755)
    for path in place.roots:
        with _open(path) as root:
            yield _within(_folder_entry(path[1:], os.fstat(root).st_mode & 0o777), left)
            yield from _below(root, f"{path[1:]}/", left)


def _above(roots: tuple[str, ...]) -> set[str]:
    """Return the folders above those that make up the workspace, as a snapshot names them."""
    parents = [path[1:].split("/")[:-1] for path in roots]
    return {"/".join(names[: count + 1]) for names in parents for count in range(len(names))}


def _folder_entry(path: str, mode: int) -> Entry:
    return {"path": path, "kind": "folder", "mode": mode, "size": 0, "target": "", "stamp": ""}


def outermost(paths: list[str]) -> tuple[str, ...]:
    """Return the folders that lie in none of the others, each once."""
    found = dict.fromkeys(paths)
    return tuple(path for path in found if not any(path.startswith(f"{other}/") for other in found))


def locate(place: InitEnvironment, path: str) -> tuple[str, str]:
    """Return the folder that holds a path of the workspace, and the path relative to it. Raises PathRefused."""
    if not place.roots:
        return place.folders[0], path
    path = path if path.startswith("/") else f"{place.cwd}/{path}".rstrip("/")
    for root in place.roots:
        if f"{path}/".startswith(f"{root}/"):
            return root, path[len(root) :].lstrip("/")
    raise PathRefused(f"{format_path(path)} lies in none of the folders {', '.join(place.roots)}")


def _absolute(place: InitEnvironment, path: str) -> str:
    """Return the path of an entry of a snapshot as `read` and `write` take it."""
    return f"/{path}" if place.roots else path


def read_many(place: InitEnvironment, paths: list[str], most: int) -> list[bytes]:
    """Return the bytes of plain files, at most `most` together, including files whose owner removed the right to read
    them, since `index` listed those too. Raises PathRefused, Missing."""
    found = []
    for path in paths:
        try:
            found.append(read(place, _absolute(place, path), most))
        except Locked:
            found.append(_read_locked_file(place, path, most))
        most -= len(found[-1])
    return found


def _read_locked_file(place: InitEnvironment, path: str, most: int) -> bytes:
    """Read a file whose owner has removed the right to read it."""
    root, within = locate(place, _absolute(place, path))
    *above, name = exact(within)
    try:
        with contextlib.ExitStack() as held:
            folder = held.enter_context(_open(root))
            for part in above:
                mode = os.stat(part, dir_fd=folder, follow_symlinks=False).st_mode
                folder = held.enter_context(_open_with_rights(folder, part, mode, 0o700, os.O_DIRECTORY))
            mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
            return plain_content(held.enter_context(_open_with_rights(folder, name, mode, 0o400, 0)), path, most)
    except OSError as error:
        raise refusal(error, path) from error


@contextlib.contextmanager
def _open(folder: str) -> Iterator[int]:
    root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield root
    finally:
        os.close(root)


def _below(folder: int, above: str, left: list[int]) -> Iterator[Entry]:
    if above.count("/") > MOST_DEPTH:
        raise PathRefused(f"{format_path(above)}: more than {MOST_DEPTH} folders in each other, too many to be kept")
    for name in sorted(os.listdir(folder)):
        about = os.stat(name, dir_fd=folder, follow_symlinks=False)
        entry = {"path": above + name, "mode": about.st_mode & 0o777, "size": 0, "target": "", "stamp": ""}
        if stat.S_ISDIR(about.st_mode):
            yield _within(entry | {"kind": "folder"}, left)
            with _open_with_rights(folder, name, about.st_mode, 0o700, os.O_DIRECTORY) as inner:
                yield from _below(inner, f"{above}{name}/", left)
        elif stat.S_ISLNK(about.st_mode):
            yield _within(entry | {"kind": "link", "target": os.readlink(name, dir_fd=folder)}, left)
        elif stat.S_ISREG(about.st_mode):
            sized = _within(entry | {"kind": "file", "size": about.st_size}, left)
            with _open_with_rights(folder, name, about.st_mode, 0o400, 0) as inner:
                stamp = _stamp(inner)
            yield sized | {"stamp": stamp}


def _within(entry: Entry, left: list[int]) -> Entry:
    """Subtract the entry from what is `left`. Raises PathRefused if it is too much, before its bytes are read (a sparse
    file's are zeros without end)."""
    path = entry["path"]
    left[0] -= _cost(entry)
    left[1] -= len(os.fsencode(path)) + len(os.fsencode(entry["target"]))
    if left[0] < 0:
        raise PathRefused(
            f"the workspace's files take more than it may hold, {format_path(path)} among them: too much to keep"
        )
    if left[1] < 0 or len(os.fsencode(path)) > LONGEST_PATH:
        raise PathRefused(f"{format_path(path)}: the workspace's names are too long to be kept")
    return entry


def _cost(entry: Entry) -> int:
    """Return the room that an entry takes in the workspace. The same measure applies to storing and restoring, so a
    session whose files were stored can continue with them in any sandbox."""
    size: int = entry["size"]
    return -(-size // PAGE) * PAGE + INODE_BYTES


@contextlib.contextmanager
def _open_with_rights(folder: int, name: str, mode: int, needed: int, flags: int) -> Iterator[int]:
    """Open a file or folder. If its owner has removed the needed rights, they are granted meanwhile and removed again
    afterwards."""
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


def check(entries: list[Entry], disk_bytes: int, roots: tuple[str, ...] = ()) -> None:
    """Check that the entries are a workspace that fits. `roots`: see InitEnvironment. Raises PathRefused, Quota."""
    above = _above(roots)
    if len(entries) > MOST_ENTRIES:
        raise PathRefused(f"{len(entries)} entries, more than the {MOST_ENTRIES} of a workspace")
    kinds: dict[str, str] = {"": "folder"}
    names = 0
    for entry in entries:
        path = "/".join(exact(entry["path"]))
        if path in kinds:
            raise PathRefused(f"{format_path(path)} is there twice")
        if kinds.get(path.rpartition("/")[0]) != "folder":
            raise PathRefused(f"{format_path(path)} does not lie in a folder that comes before it")
        if entry["kind"] not in ("file", "folder", "link") or not 0 <= entry["mode"] <= 0o777 or entry["size"] < 0:
            raise PathRefused(f"{format_path(path)} is no file, folder or link")
        if (entry["kind"] == "link") != bool(entry["target"]) or "\0" in entry["target"]:
            raise PathRefused(f"{format_path(path)}: a link and nothing else has a target")
        if len(os.fsencode(entry["target"])) > LONGEST_PATH:
            raise PathRefused(f"{format_path(path)}: its target is too long")
        if roots and not _is_below(path, entry["kind"], roots, above):
            raise PathRefused(f"{format_path(path)} lies in none of the folders {', '.join(roots)}")
        kinds[path] = entry["kind"]
        names += len(path) + len(entry["target"])
    needed = sum(map(_cost, entries))
    if needed > disk_bytes or names > NAME_BYTES:
        raise Quota(f"{len(entries)} entries of {needed} bytes do not fit the workspace's {disk_bytes}")


def _is_below(path: str, kind: str, roots: tuple[str, ...], above: set[str]) -> bool:
    if path in above or f"/{path}" in roots:
        return kind == "folder"
    return any(f"/{path}".startswith(f"{root}/") for root in roots)


class Contents:
    """The files' bytes as they come from the worker, one file after the other."""

    def __init__(self, control: Control, size: int) -> None:
        self.control = control
        self.left = size

    def copy(self, descriptor: int, size: int) -> None:
        """Copy the bytes of the next file. Raises ControlClosed."""
        while size:
            part = self._part(size)
            size -= len(part)
            fill(descriptor, part)

    def skip(self) -> None:
        """Discard the bytes that were not taken. Raises ControlClosed."""
        while self.left:
            self._part(self.left)

    def _part(self, most: int) -> bytes:
        part = self.control.recv(min(most, PART_BYTES))
        if not part:
            raise ControlClosed
        self.left -= len(part)
        return part


def restore(place: InitEnvironment, entries: list[Entry], contents: Contents) -> None:
    """Empty the workspace and fill it with checked entries. A folder of `place.roots` that is no entry itself is left
    as it is. Raises PathRefused, Quota, ControlClosed."""
    path = ""
    try:
        given = {f"/{entry['path']}" for entry in entries} if place.roots else set()
        there = {*_above(place.roots), *(folder[1:] for folder in place.roots)}
        empty(place, [folder for folder in place.folders if folder not in place.roots or folder in given])
        root = os.open("/" if place.roots else place.folders[0], FOLDER)
        try:
            entries = [entry for entry in entries if entry["path"] not in there]
            for entry in entries:
                path = entry["path"]
                _put(root, entry, contents)
            for entry in reversed(entries):  # deepest first: the mode of a folder may deny access to it
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


def copy_tree(source: str, target: str) -> None:
    """Copy folders, files and links with their modes into an existing folder. What cannot be read, and what is neither,
    is left out. Raises OSError."""
    with os.scandir(source) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        path, mode = f"{target}/{entry.name}", stat.S_IMODE(entry.stat(follow_symlinks=False).st_mode)
        if entry.is_symlink():
            os.symlink(os.readlink(entry.path), path)
        elif entry.is_dir():
            os.mkdir(path, 0o700)
            with contextlib.suppress(PermissionError):
                copy_tree(entry.path, path)
            os.chmod(path, mode & 0o777)
        elif entry.is_file():
            with contextlib.suppress(PermissionError):
                _copy_file(entry.path, path, mode & 0o777)


def _copy_file(source: str, target: str, mode: int) -> None:
    descriptor = os.open(source, os.O_RDONLY | PLAIN)
    try:
        copy = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | PLAIN, 0o600)
        try:
            while part := os.read(descriptor, 1 << 20):
                fill(copy, part)
            os.fchmod(copy, mode)
        finally:
            os.close(copy)
    finally:
        os.close(descriptor)


def read(place: InitEnvironment, path: str, most: int, *, offset: int = 0, size: int | None = None) -> bytes:
    """Return the bytes of a plain file of at most `most` bytes: all of them, or `size` from `offset` on. Raises
    PathRefused, Missing, Locked."""
    root, within = locate(place, path)
    *above, name = _split_file_path(within)
    try:
        with Walk(root) as walk:
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
    """Return the bytes of an open file, as `read` does. Raises PathRefused, OSError."""
    about = os.fstat(descriptor)
    if not stat.S_ISREG(about.st_mode):
        raise PathRefused(f"{format_path(path)} is {_what(about.st_mode)}, not a file")
    if about.st_size > most:
        raise PathRefused(f"{format_path(path)} has {about.st_size} bytes, more than the {most} that can be read")
    wanted = max(0, about.st_size - offset) if size is None else max(0, min(size, about.st_size - offset))
    data = bytearray()
    while len(data) < wanted and (part := os.pread(descriptor, wanted - len(data), offset + len(data))):
        data += part
    return bytes(data)


def write(place: InitEnvironment, path: str, content: bytes, mode: int, disk_bytes: int, *, follow: bool) -> None:
    """Replace or create a file by one rename. `follow`: write the file that links lead to, which retains its mode.
    Raises PathRefused, Quota."""
    root, within = locate(place, path)
    *above, name = _split_file_path(within)
    held = disk(place)
    if held.full or held.used + len(content) > disk_bytes:
        raise Quota(f"{format_path(path)}: {len(content)} bytes more do not fit the workspace's {disk_bytes}")
    try:
        with Walk(root) as walk:
            walk.down(above, path, make=True)
            if follow:
                name = walk.last(name, path, make=True)
            with contextlib.suppress(FileNotFoundError):
                there = os.stat(name, dir_fd=walk.here, follow_symlinks=False).st_mode
                if stat.S_ISDIR(there):
                    raise PathRefused(f"{format_path(path)} is a folder")
                mode = there if follow and stat.S_ISREG(there) else mode
            _replace(walk.here, name, content, mode)
    except OSError as error:
        raise refusal(error, path) from error


def fill(descriptor: int, content: bytes | memoryview) -> None:
    """Write all bytes."""
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


def _split_file_path(path: str) -> list[str]:
    found = parts(path)
    if not found:
        raise PathRefused(f"{format_path(path)} names no file")
    return found


def _what(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "a folder"
    return "a pipe" if stat.S_ISFIFO(mode) else "a device" if stat.S_ISCHR(mode) or stat.S_ISBLK(mode) else "special"


class PathRefused(Exception):
    """The path leads out, is too long, or is not what was asked for."""

    kind = "path"


class Missing(PathRefused):
    """Nothing is there."""

    kind = "missing"


class Locked(PathRefused):
    """The owner has removed the right to the file or folder."""


class Quota(PathRefused):
    """The content would not fit the workspace."""

    kind = "quota"


def format_path(path: str) -> str:
    """Return a path for a message: short, without control characters."""
    text = path if len(path) <= 120 else f"{path[:100]}... ({len(path)} characters)"
    return repr(text.encode(errors="backslashreplace").decode())


def parts(path: str) -> list[str]:
    """Return the components of a path relative to the workspace. Raises PathRefused."""
    if "\0" in path:
        raise PathRefused(f"{format_path(path)}: a path holds no NUL byte")
    if path.startswith("/"):
        raise PathRefused(f"{format_path(path)}: give a path relative to the workspace, without a leading /")
    try:
        raw = os.fsencode(path)
    except UnicodeEncodeError as error:
        raise PathRefused(f"{format_path(path)}: no file can have this name") from error
    found = [name for name in path.split("/") if name not in ("", ".")]
    if ".." in found:
        raise PathRefused(f"{format_path(path)}: paths stay inside the workspace, '..' is not allowed")
    if len(raw) > LONGEST_PATH or any(len(os.fsencode(name)) > LONGEST_NAME for name in found):
        raise PathRefused(
            f"{format_path(path)}: the name is too long ({LONGEST_NAME} bytes a part, {LONGEST_PATH} in all)"
        )
    return found


def exact(path: str) -> list[str]:
    """Return the components of a path as a snapshot holds it, without anything that `parts` would drop. Raises
    PathRefused."""
    found = parts(path)
    if not found or "/".join(found) != path:
        raise PathRefused(f"{format_path(path)}: no name of an entry")
    return found


class Walk:
    """Descriptors of the folders from a root down to the current one. Links are followed as far as they stay below the
    root; absolute ones are relative to the root's own path. Each step opens one name without following it, so that no
    link can lead out (the idea of openat2(2)'s RESOLVE_BENEATH, on every kernel and the same everywhere)."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.stack = [os.open(root, FOLDER)]
        self.links = 0

    def __enter__(self) -> Walk:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self.stack:
            os.close(descriptor)

    @property
    def here(self) -> int:
        return self.stack[-1]

    def down(self, names: list[str], path: str, *, make: bool = False) -> None:
        """Enter folders; `make` those that do not exist. `path` is for messages. Raises PathRefused, Missing."""
        ahead = names[::-1]
        while ahead:
            name = ahead.pop()
            if name == "..":
                self._up(path)
            elif (target := self._enter(name, path, make)) is not None:
                ahead += self._follow_link(target, path)[::-1]

    def last(self, name: str, path: str, *, make: bool = False) -> str:
        """Follow links until `name` is none. Return the name in the folder that is current then. `make`: nothing need
        exist, and folders on the way are made. Raises PathRefused, Missing."""
        while (target := self._link(name, make)) is not None:
            names = self._follow_link(target, path)
            if not names or names[-1] == "..":
                raise PathRefused(f"{format_path(path)} is a folder")
            self.down(names[:-1], path, make=make)
            name = names[-1]
        return name

    def _enter(self, name: str, path: str, make: bool) -> str | None:
        """Enter one folder. Return None, or the target if there is a link in its place."""
        try:
            self.stack.append(os.open(name, FOLDER, dir_fd=self.here))
            return None
        except OSError as error:
            if error.errno == errno.ENOENT and make:
                os.mkdir(name, 0o755, dir_fd=self.here)
                self.stack.append(os.open(name, FOLDER, dir_fd=self.here))
                return None
            if error.errno not in (errno.ELOOP, errno.ENOTDIR) or (target := self._link(name)) is None:
                raise
            return target

    def _link(self, name: str, make: bool = False) -> str | None:
        try:
            found = os.stat(name, dir_fd=self.here, follow_symlinks=False).st_mode
        except FileNotFoundError:
            if make:
                return None
            raise
        if not stat.S_ISLNK(found):
            return None
        return os.readlink(name, dir_fd=self.here)

    def _follow_link(self, target: str, path: str) -> list[str]:
        self.links += 1
        if self.links > MOST_LINKS:
            raise PathRefused(f"{format_path(path)}: too many links")
        if target.startswith("/"):
            root = next((root for root in (self.root, WORKSPACE) if f"{target}/".startswith(f"{root}/")), None)
            if root is None:
                raise PathRefused(f"{format_path(path)}: a link leads out of the workspace")
            target = target[len(root) :]
            while len(self.stack) > 1:
                os.close(self.stack.pop())
        return [name for name in target.split("/") if name not in ("", ".")]

    def _up(self, path: str) -> None:
        if len(self.stack) == 1:
            raise PathRefused(f"{format_path(path)}: a link leads out of the workspace")
        os.close(self.stack.pop())


def refusal(error: OSError, path: str) -> PathRefused:
    """Translate an error of the file system into a PathRefused."""
    if error.errno == errno.ENOENT:
        return Missing(f"{format_path(path)}: no such file")
    if error.errno == errno.EACCES:
        return Locked(f"{format_path(path)}: {os.strerror(errno.EACCES)}")
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return Quota(f"{format_path(path)}: no room is left in the workspace")
    return PathRefused(f"{format_path(path)}: {os.strerror(error.errno or 0)}")
