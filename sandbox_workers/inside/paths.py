"""Names in a workspace: what may be asked for, and finding it without ever leaving.

Refused            the path leads out, is too long, or is not what was asked for: said so that a model can read it
├── Missing        nothing is there
├── Locked         its owner has taken the right to it away
└── Quota          it would not fit
"""

from __future__ import annotations

import errno
import os
import stat

LONGEST_NAME = 255
"""NAME_MAX of limits.h."""
LONGEST_PATH = 4095
"""PATH_MAX of limits.h, less its NUL."""
MOST_LINKS = 40
"""As the kernel follows (path_resolution(7))."""
WORKSPACE = "/workspace"
"""What models call the root in links, wherever a backend has it."""
FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Refused(Exception):
    """Not served."""

    kind = "path"


class Missing(Refused):
    """Nothing is there."""

    kind = "missing"


class Locked(Refused):
    """Its rights are in the way."""


class Quota(Refused):
    """It would not fit."""

    kind = "quota"


def shown(path: str) -> str:
    """A path for a message: short, without control characters."""
    text = path if len(path) <= 120 else f"{path[:100]}... ({len(path)} characters)"
    return repr(text.encode(errors="backslashreplace").decode())


def parts(path: str) -> list[str]:
    """Components of a path relative to the workspace. Raises Refused."""
    if "\0" in path:
        raise Refused(f"{shown(path)}: a path holds no NUL byte")
    if path.startswith("/"):
        raise Refused(f"{shown(path)}: give a path relative to the workspace, without a leading /")
    try:
        raw = os.fsencode(path)
    except UnicodeEncodeError as error:
        raise Refused(f"{shown(path)}: no file can have this name") from error
    found = [name for name in path.split("/") if name not in ("", ".")]
    if ".." in found:
        raise Refused(f"{shown(path)}: paths stay inside the workspace, '..' is not allowed")
    if len(raw) > LONGEST_PATH or any(len(os.fsencode(name)) > LONGEST_NAME for name in found):
        raise Refused(f"{shown(path)}: the name is too long ({LONGEST_NAME} bytes a part, {LONGEST_PATH} in all)")
    return found


def exact(path: str) -> list[str]:
    """Components of a path as a snapshot holds it: nothing in it that `parts` would have to drop. Raises Refused."""
    found = parts(path)
    if not found or "/".join(found) != path:
        raise Refused(f"{shown(path)}: no name of an entry")
    return found


class Walk:
    """Descriptors of the folders from a root down to where we stand. Links are followed as far as they stay below the
    root, absolute ones counted from the root's own path; each step opens one name without following it, so that no
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
        """The folder where we stand."""
        return self.stack[-1]

    def down(self, names: list[str], path: str, *, make: bool = False) -> None:
        """Enter folders; `make` those that are not there. `path` is for messages. Raises Refused, Missing."""
        ahead = names[::-1]
        while ahead:
            name = ahead.pop()
            if name == "..":
                self._up(path)
            elif (target := self._enter(name, path, make)) is not None:
                ahead += self._followed(target, path)[::-1]

    def last(self, name: str, path: str, *, make: bool = False) -> str:
        """Enter what links say until `name` is none; the name where we stand then. `make`: nothing need be there, and
        folders on the way are made. Raises Refused, Missing."""
        while (target := self._link(name, make)) is not None:
            names = self._followed(target, path)
            if not names or names[-1] == "..":
                raise Refused(f"{shown(path)} is a folder")
            self.down(names[:-1], path, make=make)
            name = names[-1]
        return name

    def _enter(self, name: str, path: str, make: bool) -> str | None:
        """Go one folder down, or say what the link at its place says."""
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

    def _followed(self, target: str, path: str) -> list[str]:
        self.links += 1
        if self.links > MOST_LINKS:
            raise Refused(f"{shown(path)}: too many links")
        if target.startswith("/"):
            root = next((root for root in (self.root, WORKSPACE) if f"{target}/".startswith(f"{root}/")), None)
            if root is None:
                raise Refused(f"{shown(path)}: a link leads out of the workspace")
            target = target[len(root) :]
            while len(self.stack) > 1:
                os.close(self.stack.pop())
        return [name for name in target.split("/") if name not in ("", ".")]

    def _up(self, path: str) -> None:
        if len(self.stack) == 1:
            raise Refused(f"{shown(path)}: a link leads out of the workspace")
        os.close(self.stack.pop())


def refusal(error: OSError, path: str) -> Refused:
    """What an error of the file system means to whoever asked."""
    if error.errno == errno.ENOENT:
        return Missing(f"{shown(path)}: no such file")
    if error.errno == errno.EACCES:
        return Locked(f"{shown(path)}: {os.strerror(errno.EACCES)}")
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return Quota(f"{shown(path)}: no room is left in the workspace")
    return Refused(f"{shown(path)}: {os.strerror(error.errno or 0)}")
