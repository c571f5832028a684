"""Root file systems for bubblewrap: what of an image is shown, and what a sandbox of it is made of."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from turnlog.infra.sandbox_root import RootError, image_root, root_sha256, tree_sha256
from turnlog.sandbox_workers.protocol import ImageMissing

SYSTEM_FOLDERS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
OURS_OF_OPT = frozenset({"python", "init", "loader", "empty", "nothing"})


def found(image_folder: str, image: str) -> Path:
    """Folder of an image. Raises ImageMissing."""
    try:
        return image_root(image_folder, image)
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
    """bwrap words that make this the system, read-only; its /etc aside (etc_folder.py)."""
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
