"""What is sent into an E2B machine: the command that runs the relay, and the init's sources for the loader below it."""

from __future__ import annotations

import functools
import hashlib
import json
import shlex
from pathlib import Path

from turnlog.sandbox_workers.backends.e2b import relay as e2b_relay
from turnlog.sandbox_workers.inside import loader

FOLDERS = ("workspace", "tmp")
"""The writable ones, the workspace first; in the home of the template's user."""
INSIDE = Path(loader.__file__).parent
PACKAGE = "turnlog.sandbox_workers.inside"
PLACE = ("plain", "shared", "none")
"""As `inside.init.main` takes it: folders in place of file systems, a user whom the relay has too, no proxy."""


def relay() -> str:
    """For a shell."""
    init = ["python3", "-s", "-X", "utf8", "-c", Path(loader.__file__).read_text()]
    return shlex.join(["python3", "-s", "-c", Path(e2b_relay.__file__).read_text(), json.dumps([FOLDERS, init])])


def program() -> bytes:
    """What `inside.loader` reads, but for the folders' names, which the relay knows."""
    words = {"modules": modules(), "main": f"{PACKAGE}.init", "arguments": [str(e2b_relay.CONTROL), *PLACE]}
    data = json.dumps(words, separators=(",", ":")).encode()
    return len(data).to_bytes(4, "big") + data


def fingerprint() -> str:
    """sha256 of what runs there of ours."""
    return hashlib.sha256(relay().encode() + program()).hexdigest()


@functools.cache
def modules() -> dict[str, str]:
    """Name -> source of the init's."""
    parents = {"turnlog": "", "turnlog.sandbox_workers": "", PACKAGE: (INSIDE / "__init__.py").read_text()}
    names = sorted(path.stem for path in INSIDE.glob("*.py") if path.stem not in ("__init__", "loader"))
    return parents | {f"{PACKAGE}.{name}": (INSIDE / f"{name}.py").read_text() for name in names}
