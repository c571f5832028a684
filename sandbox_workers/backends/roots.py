"""What a sandbox's root file system under bubblewrap is made of: what of the host or an image is shown, and its /etc.

The /etc is one folder in our cache, shown by one mount, since each mount costs part of a millisecond. It holds users
and hosts of our own, a place for the proxy's CA, and the few files of the host's that programs need and that name
nobody; or, for an image, links into the image's.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from turnlog.infra.sandbox_root import RootError, image_root, root_sha256, tree_sha256
from turnlog.sandbox_workers.backends.interpreter_cache import published
from turnlog.sandbox_workers.protocol import ImageMissing

SYSTEM_FOLDERS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
OURS_OF_OPT = frozenset({"python", "init", "loader", "empty", "nothing"})

HOST_FILES = ("ld.so.cache", "localtime", "mime.types", "alternatives", "ssl/certs", "pki/tls/certs")
"""Libraries, time zone, content types, default programs, public certificate authorities."""
IMAGE = ".image"
"""Below it, the image's own /etc is mounted."""
OURS = {
    "passwd": "sandbox:x:{uid}:{uid}:sandbox:/workspace:/bin/sh\n",
    "group": "sandbox:x:{uid}:\n",
    "hosts": "127.0.0.1 localhost sandbox\n",
}
NEVER = frozenset({*OURS, "shadow", "gshadow", "shadow-", "gshadow-", "passwd-", "group-", "turnlog", IMAGE})
"""Of an image's."""
CA = "turnlog/ca.pem"
"""Where the CA is mounted, where there is one: each worker has its own, so it is no part of the folder."""


def image(image_folder: str, name: str) -> Path:
    """Folder of an image. Raises ImageMissing."""
    try:
        return image_root(image_folder, name)
    except RootError as error:
        raise ImageMissing(str(error)) from error


async def root_hash(image_folder: str, image: str | None) -> str:
    """See `root_sha256`. Raises ImageMissing (also for one that cannot be read)."""
    try:
        return await asyncio.to_thread(root_sha256, image_folder, image)
    except (RootError, OSError) as error:
        raise ImageMissing(str(error)) from error


@cache
def _tree(root: Path) -> str:
    return tree_sha256(root, frozenset({"__pycache__"}))


async def tree_hash(root: Path) -> str:
    """Of a folder in our cache, which never changes; what Python compiles there does not count."""
    return await asyncio.to_thread(_tree, root)


def shown(root: Path) -> list[str]:
    """bwrap words that make this the system, read-only; its /etc aside (`etc_folder`)."""
    words = list(_bound(root / "usr", "/usr"))
    for name in SYSTEM_FOLDERS:
        words += _bound(root / name, f"/{name}")
    if (root / "opt").is_dir() and not (root / "opt").is_symlink():
        for name in sorted(set(os.listdir(root / "opt")) - OURS_OF_OPT):
            words += _bound(root / "opt" / name, f"/opt/{name}")
    return words


def _bound(source: Path, target: str) -> Iterator[str]:
    """A link stays one, so that it leads where it leads inside; on the host it could lead anywhere."""
    if source.is_symlink():
        yield from ("--symlink", os.readlink(source), target)
    elif source.exists():
        yield from ("--ro-bind", str(source), target)


def etc_folder(cache: Path, *, uid: int, ca: bool, image: Path | None) -> Path:
    """The folder. `ca`: with `CA`, empty; `image`: the image's /etc, which need not be there; None: the host's.
    Raises SandboxUnavailable."""
    names = sorted(set(os.listdir(image)) - NEVER) if image is not None and image.is_dir() else []
    about = [str(uid), str(ca), *names]
    about += ["host", *_identities()] if image is None else ["image"]

    def fill(root: Path) -> None:
        for name, text in OURS.items():
            (root / name).write_text(text.format(uid=uid))
        if ca:
            (root / CA).parent.mkdir()
            (root / CA).touch()
        if image is None:
            _fill_from_host(root)
            return
        (root / IMAGE).mkdir()
        for name in names:
            (root / name).symlink_to(f"{IMAGE}/{name}")

    return published(cache, "etc", about, fill)


def _identities() -> list[str]:
    found = []
    for name in HOST_FILES:
        if os.path.exists(path := f"/etc/{name}"):
            about = os.stat(path)
            found.append(f"{name}:{about.st_size}:{about.st_mtime_ns}")
    return found


def _fill_from_host(root: Path) -> None:
    for name in HOST_FILES:
        source, target = Path("/etc") / name, root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, ignore=_unreadable)
        elif source.is_file():
            shutil.copyfile(source, target)


def _unreadable(folder: str, names: list[str]) -> list[str]:
    """What is not for everybody on the host is not for a sandbox either."""
    return [name for name in names if not os.lstat(os.path.join(folder, name)).st_mode & 0o004]
