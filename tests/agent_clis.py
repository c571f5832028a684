"""Agents' CLIs, each installed once: those from npm in the image `cli` of a folder of images for sandboxes, those from
PyPI in a virtual environment each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.upstream_environments import alone, make

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
PYTHON = {
    "mini-swe-agent": ("mini-swe-agent", "2.4.6", "3.11", "mini"),
    "openhands": ("openhands", "1.16.0", "3.12", "openhands"),
    "terminus-2": ("harbor", "0.26.0", "3.12", "python3"),
    "kimi-cli": ("kimi-cli", "1.51.0", "3.13", "kimi"),
}
"""Name -> package, version, Python that it needs, program."""
RESOLVED = "2026-11-27"
"""What packages depend on is as their registry had it then."""


def program(name: str) -> Path:
    """The program, installed unless that version was. Skips the test where npm does not give it."""
    package, version, word = PACKAGES[name]
    with alone(KEPT):
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


def python_program(name: str) -> Path:
    """The program of a Python package, installed unless that version was. Skips the test where the machine lacks its
    Python, or no registry gives it."""
    package, version, python, word = PYTHON[name]
    interpreter = _interpreter(python)
    if interpreter is None:
        pytest.skip(f"Python {python} is not installed")
    made = KEPT / "python" / f"{name}-{version}"
    with alone(KEPT):
        if not made.exists():
            install, pinned = ["install", "--exclude-newer", RESOLVED], f"{package}=={version}"
            make(made, install, [pinned], f"no registry gives {name}", interpreter)
    return made / "bin" / word


def _interpreter(version: str) -> str | None:
    """A Python of that version, on PATH or of pyenv; the shims of pyenv may lead nowhere."""
    found = [shutil.which(f"python{version}"), *sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))]
    for each in filter(None, found):
        if subprocess.run([each, "-c", ""], capture_output=True).returncode == 0:
            return str(each)
    return None


def _image() -> None:
    """This machine's programs and libraries, and /opt for the CLIs."""
    root = IMAGES / "cli"
    if root.exists():
        return
    part = KEPT / f"part-{os.getpid()}"
    (part / "opt").mkdir(parents=True)
    (part / "usr/lib").mkdir(parents=True)
    libraries = [f"lib/{path.name}" for path in Path("/usr/lib").glob("python3.*")]
    for source in ("bin", "lib64", "lib/x86_64-linux-gnu", *libraries):
        if Path("/usr", source).exists():
            linked = subprocess.run(["cp", "-al", f"/usr/{source}", part / "usr" / source], capture_output=True)
            if linked.returncode:
                subprocess.run(["cp", "-a", f"/usr/{source}", (part / "usr" / source).parent], check=True)
    for name in ("bin", "lib", "lib64"):
        (part / name).symlink_to(f"usr/{name}")
    root.parent.mkdir(exist_ok=True)
    part.rename(root)
