"""Agents' CLIs from npm, each installed once, in the image `cli` of a folder of images for sandboxes."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

KEPT = Path(__file__).parents[1] / ".cache/cli-agents"
IMAGES = KEPT / "images"
"""[sandbox] image_folder."""
PACKAGES = {
    "claude-code": ("@anthropic-ai/claude-code", "2.1.329", "claude"),
    "codex": ("@openai/codex", "0.171.0", "codex"),
    "opencode": ("opencode-ai", "1.18.33", "opencode"),
    "gemini-cli": ("@google/gemini-cli", "0.61.0", "gemini"),
}
"""Name -> package, version, program."""


def program(name: str) -> Path:
    """The program, installed unless that version was. Skips the test where npm does not give it."""
    package, version, word = PACKAGES[name]
    with _alone():
        _image()
        folder = IMAGES / "cli/opt" / name
        found, manifest = folder / "node_modules/.bin" / word, folder / "node_modules" / package / "package.json"
        if not manifest.exists() or json.loads(manifest.read_text())["version"] != version:
            shutil.rmtree(folder, ignore_errors=True)
        install = ["npm", "install", "--prefix", str(folder), "--no-fund", "--no-audit", "--silent"]
        asked = [*install, f"{package}@{version}"]
        if not found.exists() and (not shutil.which("npm") or subprocess.run(asked).returncode):
            shutil.rmtree(folder, ignore_errors=True)
            pytest.skip(f"npm gives no {name}")
    return found


@contextmanager
def _alone() -> Iterator[None]:
    """Test processes beside each other install one after the other."""
    KEPT.mkdir(parents=True, exist_ok=True)
    with (KEPT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _image() -> None:
    """This machine's programs and libraries, and /opt for the CLIs."""
    root = IMAGES / "cli"
    if root.exists():
        return
    part = KEPT / f"part-{os.getpid()}"
    (part / "opt").mkdir(parents=True)
    (part / "usr/lib").mkdir(parents=True)
    for source in ("bin", "lib64", "lib/x86_64-linux-gnu", "lib/python3.11"):
        if Path("/usr", source).exists():
            linked = subprocess.run(["cp", "-al", f"/usr/{source}", part / "usr" / source], capture_output=True)
            if linked.returncode:
                subprocess.run(["cp", "-a", f"/usr/{source}", (part / "usr" / source).parent], check=True)
    for name in ("bin", "lib", "lib64"):
        (part / name).symlink_to(f"usr/{name}")
    root.parent.mkdir(exist_ok=True)
    part.rename(root)
