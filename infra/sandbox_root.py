"""Which root file system a sandbox sees, and its hash: the same files give the same hash on any machine.

An image is a folder `[sandbox] image_folder`/NAME with usr, bin, lib*, etc ... Its hash covers every path, mode, link
and byte; it is computed once and kept, with the newest change, in the cache folder. Without an image a sandbox sees the
host's /usr, which is known by what the host's package manager has installed, since hashing it would take minutes.

RootError
├── RootMissing   there is no such image: says which there are
└── RootRefused   the name or the folder is none that an image may have
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
"""What says which packages the host has."""
CHUNK_BYTES = 1 << 20
KEPT = "image-hashes"


class RootError(Exception):
    """Base of the tree above."""


class RootMissing(RootError):
    """There is no such image."""


class RootRefused(RootError):
    """No image may be called or be made like that."""


def root_sha256(image_folder: str, image: str | None, cache: Path | None = None) -> str:
    """Of the root file system that a sandbox with this image sees (64 hex digits); None: of the host's. Takes seconds
    per GB the first time; `cache`: where it is kept then (None: `cache_directory()`). Raises RootError, OSError (the
    image cannot be read)."""
    if image is None:
        return _host_sha256()
    return _image_sha256(image_root(image_folder, image), cache or cache_directory())


def image_root(image_folder: str, image: str) -> Path:
    """The folder of an image. Raises RootMissing, RootRefused."""
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
    """Names of the images that are there."""
    try:
        with os.scandir(image_folder) as entries:
            return sorted(entry.name for entry in entries if NAME.fullmatch(entry.name) and entry.is_dir())
    except OSError:
        return []


def cache_directory() -> Path:
    """A folder that every user can reach: /var/cache/turnlog for root, else the user's own cache."""
    if os.geteuid() == 0:
        return Path("/var/cache/turnlog")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "turnlog"


def tree_sha256(root: Path, left_out: frozenset[str] = frozenset()) -> str:
    """Of a tree: path, kind and mode of every entry, target of links, bytes of files. Owners and times do not count,
    nor names in `left_out` with what is below them. Raises OSError."""
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
        pass  # not there yet, or half written: computed again
    found = tree_sha256(root)
    _keep(kept, json.dumps({"root": str(root), "stamp": stamp, "sha256": found}))
    return found


def _stamp(root: Path) -> list[int]:
    """Changes whenever anything of the tree does: entries, bytes, newest change (ctime: no program can set it back)."""
    count = size = newest = 0
    for _, about in _walk(root, frozenset()):
        count, size, newest = count + 1, size + about.st_size, max(newest, about.st_ctime_ns)
    return [count, size, newest]


def _ours(kept: Path) -> bool:
    """Written by us or root: anyone else's word is not taken."""
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
        return  # a cache that cannot be written costs time, nothing else


def _walk(root: Path, left_out: frozenset[str]) -> Iterator[tuple[str, os.stat_result]]:
    """Everything below, in one order everywhere. Raises OSError."""
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
