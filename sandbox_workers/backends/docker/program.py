"""What runs as a container's first process: python3 of the image, with the init program sent over its input."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from pathlib import Path

from turnlog.sandbox_workers.inside import loader

INSIDE = Path(loader.__file__).parent
PACKAGE = "turnlog.sandbox_workers.inside"


def command(name: str) -> list[str]:
    """argv, the image's PATH deciding on python3; `name` is there for the worker to know the process by."""
    return ["python3", "-s", "-X", "utf8", "-c", Path(loader.__file__).read_text(), name]


def program(denied: bytes, *folders: str) -> bytes:
    """What to send first: for `inside.attached.main` a seccomp filter (or nothing) and the writable folders."""
    modules = {"turnlog": "", "turnlog.sandbox_workers": "", **_modules()}
    words = {
        "modules": modules,
        "main": f"{PACKAGE}.attached",
        "arguments": [base64.b64encode(denied).decode(), *folders],
    }
    data = json.dumps(words, separators=(",", ":")).encode()
    return len(data).to_bytes(4, "big") + data


def fingerprint() -> str:
    """sha256 of the init program."""
    return hashlib.sha256(json.dumps(_modules(), sort_keys=True).encode()).hexdigest()


@functools.cache
def _modules() -> dict[str, str]:
    found = {PACKAGE: (INSIDE / "__init__.py").read_text()}
    names = sorted(path.stem for path in INSIDE.glob("*.py") if path.stem not in ("__init__", "loader"))
    return found | {f"{PACKAGE}.{name}": (INSIDE / f"{name}.py").read_text() for name in names}
