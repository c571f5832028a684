"""The root file system of a sandbox, and its hash: the same files give the same hash on any machine.

An image is a folder `[sandbox] image_folder`/NAME with usr, bin, lib*, etc ... Its hash covers every path, mode, link
and byte. It is computed once and cached with the time of the newest change. Without an image a sandbox sees the host's
/usr. That is identified by the package manager's list of installed packages, since hashing it would take minutes.

RootError
├── RootMissing   there is no such image; the message lists those that exist
└── RootRefused   the name or the folder is not allowed for an image
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:+-]{0,127}")
IDENTITY = (
    "/etc/os-release", "/var/lib/dpkg/status", "/var/lib/rpm/rpmdb.sqlite", "/var/lib/rpm/Packages",
    "/usr/lib/sysimage/rpm/rpmdb.sqlite", "/lib/apk/db/installed", "/var/lib/pacman/local/ALPM_DB_VERSION",
)  # fmt: skip
"""Files that identify the packages installed on the host."""
CHUNK_BYTES = 1 << 20
KEPT = "image-hashes"


class RootError(Exception):
    """Base class of all errors of images; see the module docstring."""


class RootMissing(RootError):
    """No image has this name."""


class RootRefused(RootError):
    """The name or the folder is not allowed for an image."""


def root_sha256(image_folder: str, image: str | None, cache: Path | None = None) -> str:
    """Return the hash (64 hex digits) of the root file system for this image; None means the host's.

    The first call takes seconds per GB. The result is stored in `cache` (None: `cache_directory()`). Raises RootError.
    Raises OSError if the image cannot be read.
    """
    if image is None:
        return _host_sha256()
    return _image_sha256(image_root(image_folder, image), cache or cache_directory())


def image_root(image_folder: str, image: str) -> Path:
    """Return the folder of an image. Raises RootMissing, RootRefused."""
    if not NAME.fullmatch(image):
        raise RootRefused(f"image {image!r}: a name of letters, digits and . _ : + - is asked for, not a path")
    if not image_folder:
        raise RootMissing(f"image {image!r}: [sandbox] image_folder is not set, so there are no images")
    folder = Path(image_folder).resolve()
    root = (folder / image).resolve()
    if not root.is_dir():
        there = ", ".join(images(image_folder)) or "none"
        raise RootMissing(f"image {image!r} is not in [sandbox] image_folder = {str(folder)!r}; there are: {there}")
    if root.parent != folder:
        raise RootRefused(f"image {image!r} is a link out of [sandbox] image_folder = {str(folder)!r}")
    if (root / "usr").is_symlink() or (root / "etc").is_symlink():
        raise RootRefused(f"image {image!r}: its usr and etc must be folders, not links")
    return root


def images(image_folder: str) -> list[str]:
    """Return the names of the existing images."""
    try:
        with os.scandir(image_folder) as entries:
            return sorted(entry.name for entry in entries if NAME.fullmatch(entry.name) and entry.is_dir())
    except OSError:
        return []


def cache_directory() -> Path:
    """Return the cache folder: /var/cache/turnlog for root, else in the user's own cache."""
    if os.geteuid() == 0:
        return Path("/var/cache/turnlog")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "turnlog"


def tree_sha256(root: Path, left_out: frozenset[str] = frozenset()) -> str:
    """Hash a tree: path, kind and mode of every entry, targets of links, contents of files. Owners and times do not
    count. Entries named in `left_out` are skipped, with everything below them. Raises OSError."""
    total = hashlib.sha256()
    for path, about in _walk(root, left_out):
        name = os.fsencode(os.path.relpath(path, root))
        total.update(b"%d %s %o " % (len(name), name, about.st_mode))
        if stat.S_ISLNK(about.st_mode):
            total.update(hashlib.sha256(os.fsencode(os.readlink(path))).digest())
        elif stat.S_ISREG(about.st_mode):
            total.update(_file_sha256(path))
    return total.hexdigest()


@cache
def _host_sha256() -> str:
    total = hashlib.sha256()
    for path in IDENTITY:
        if os.path.isfile(path):
            total.update(path.encode() + b"\0" + _file_sha256(path))
    total.update(os.uname().machine.encode())
    return total.hexdigest()


def _image_sha256(root: Path, cache: Path) -> str:
    stamp = _stamp(root)
    kept = cache / KEPT / hashlib.sha256(os.fsencode(root)).hexdigest()
    try:
        about = json.loads(kept.read_text()) if _ours(kept) else {}
        if about.get("stamp") == stamp:
            return str(about["sha256"])
    except (OSError, ValueError):
        pass  # missing or incomplete: computed again
    found = tree_sha256(root)
    _keep(kept, json.dumps({"root": str(root), "stamp": stamp, "sha256": found}))
    return found


def _stamp(root: Path) -> list[int]:
    """Return values that change whenever anything in the tree does: number of entries, bytes, newest change (the ctime,
    which no program can set back)."""
    count = size = newest = 0
    for _, about in _walk(root, frozenset()):
        count, size, newest = count + 1, size + about.st_size, max(newest, about.st_ctime_ns)
    return [count, size, newest]


def _ours(kept: Path) -> bool:
    """Return True if the file was written by this user or root, and not everybody may write it. Other files are
    not trusted."""
    about = kept.stat()
    return about.st_uid in (0, os.geteuid()) and not about.st_mode & stat.S_IWOTH


def _keep(kept: Path, text: str) -> None:
    try:
        kept.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        descriptor, part = tempfile.mkstemp(dir=kept.parent)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.replace(part, kept)
    except OSError:
        return  # a cache that cannot be written only costs time


def _walk(root: Path, left_out: frozenset[str]) -> Iterator[tuple[str, os.stat_result]]:
    """Yield every entry below `root` with its status, in the same order on every machine. Raises OSError."""
    ahead = [os.fspath(root)]
    while ahead:
        with os.scandir(ahead.pop()) as entries:
            found = sorted((entry for entry in entries if entry.name not in left_out), key=lambda entry: entry.name)
        for entry in found:
            yield entry.path, entry.stat(follow_symlinks=False)
        ahead += [entry.path for entry in reversed(found) if entry.is_dir(follow_symlinks=False)]


def _file_sha256(path: str) -> bytes:
    total = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(CHUNK_BYTES):
            total.update(part)
    return total.digest()
