"""Files of a run that are for its owner alone: the run's folder, and the secrets in it."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

GATEWAY_KEY = Path("gateway.key")
"""In the run's folder: signs session tokens."""
STORE_KEY = Path("store", "store.key")
"""In the run's folder: signs requests to the embedded store."""


def private_folder(folder: Path) -> None:
    """Make the folder its owner's alone (0700), also one of ours that is there already."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_mode & 0o077 and found.st_uid == os.geteuid():
        folder.chmod(0o700)


def kept_secret(path: Path) -> str:
    """The secret of a file, made by whoever asks first: random, mode 0600, whole or absent."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_text().strip()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_urlsafe(32) + "\n")
    try:
        with contextlib.suppress(FileExistsError):  # another was faster: its secret is the secret
            os.link(part, path)
    finally:
        part.unlink()
    return path.read_text().strip()
