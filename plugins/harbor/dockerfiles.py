"""The working directory and the copied files of a Dockerfile that is not built.

A Dockerfile whose only instructions are FROM, WORKDIR, COPY or ADD of local files, and CMD can be served by a root file
system: its base image is the root, and its files are the first workspace.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

from turnlog.plugins.harbor.task_toml import BadTaskFolder

SERVED: Final = frozenset({"FROM", "WORKDIR", "COPY", "ADD", "CMD", "LABEL", "EXPOSE", "MAINTAINER"})


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction of a Dockerfile."""

    word: str
    """Name of the instruction, in upper case."""
    rest: str


def instructions(path: Path) -> Iterator[Instruction]:
    """Yield the instructions of a Dockerfile, continued lines joined. Raises BadTaskFolder."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadTaskFolder(f"{path} cannot be read: {error}") from error
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\s*\n", " ", "\n".join(lines)).splitlines():
        word, _, rest = line.strip().partition(" ")
        if word:
            yield Instruction(word.upper(), rest.strip())


def workdir_of(path: Path) -> str | None:
    """Return the last stage's WORKDIR, or None if the Dockerfile sets none that can be read here. Raises
    BadTaskFolder."""
    found: PurePosixPath | None = None
    for one in instructions(path):
        if one.word == "FROM":
            found = None
        elif one.word == "WORKDIR":
            target = one.rest.strip("\"'")
            found = None if "$" in target else (found or PurePosixPath("/")) / target
    return None if found is None or not found.is_absolute() else os.path.normpath(str(found))


def copied_files(path: Path) -> dict[str, Any]:
    """Return the files that a Dockerfile copies: absolute path -> as in `workspaces.store_files`. Raises
    BadTaskFolder, naming the first instruction that builds an image."""
    workdir, files = PurePosixPath("/"), dict[str, Any]()
    for one in instructions(path):
        if one.word not in SERVED:
            raise BadTaskFolder(
                f"{path}: {one.word} needs an image: use backend=docker, or build the image, put its files into a "
                "folder of [sandbox] image_folder, and name that by image="
            )
        if one.word == "WORKDIR":
            workdir /= one.rest.strip("\"'")
        if one.word in ("COPY", "ADD"):
            files |= _copy_sources(path, one, workdir)
    return files


def _copy_sources(path: Path, one: Instruction, workdir: PurePosixPath) -> Mapping[str, Any]:
    words = [word for word in one.rest.split() if not word.startswith("--")]
    said = f"{path}: {one.word} {one.rest}"
    if len(words) < 2 or one.rest.lstrip().startswith("[") or "--from" in one.rest or "$" in one.rest:
        raise BadTaskFolder(f"{said}: only plain paths of the task's folder can be copied without an image")
    sources, target = words[:-1], words[-1]
    place, found = workdir / target, dict[str, Any]()
    for source in sources:
        origin = (path.parent / source.lstrip("/")).resolve()
        if not origin.is_relative_to(path.parent.resolve()):
            raise BadTaskFolder(f"{said}: {source} leads out of {path.parent}")
        if origin.is_dir():
            for inner in sorted(origin.rglob("*")):
                if inner.is_file() and inner != path.resolve():
                    found[str(place / inner.relative_to(origin))] = file_entry(inner)
        elif origin.is_file():
            into = target.endswith("/") or target == "." or len(sources) > 1
            found[str(place / origin.name if into else place)] = file_entry(origin)
        else:
            raise BadTaskFolder(f"{said}: {origin} is missing")
    return {os.path.normpath(name): entry for name, entry in found.items()}


def file_entry(path: Path) -> dict[str, Any]:
    """Return a file as `workspaces.store_files` takes it: its bytes and permission bits."""
    mode = 0o755 if os.access(path, os.X_OK) else 0o644
    return {"base64": base64.b64encode(path.read_bytes()).decode(), "mode": mode}
