"""/etc of a sandbox: one folder in our cache, shown by one mount, since each mount costs part of a millisecond.

It holds users and hosts of our own, a place for the proxy's CA, and the few files of the host's that programs need and
that name nobody; or, for an image, links into the image's.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from turnlog.sandbox_workers.backends.interpreter_cache import published

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
