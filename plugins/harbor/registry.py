"""Dataset registry files of Harbor: a JSON list of datasets, each with name, version and the places of its tasks.

A task's place is a path beside the registry file, or a git repository, commit and path. Nothing is cloned here: the
option `checkouts` names a folder with the user's own checkouts, called after the repository or after repository and
commit (`tasks`, or `tasks-0123456789ab`).
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

import msgspec

from turnlog.plugins.harbor.task_toml import BadTaskFolder

GIT_S: Final = 20.0
SHORT: Final = 12
"""Length of a commit's name in the name of a checkout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryTask:
    """A task of a dataset."""

    name: str
    path: str
    git_url: str | None = None
    git_commit_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryDataset:
    """A dataset of a registry."""

    name: str
    version: str
    tasks: list[RegistryTask]
    description: str = ""
    metrics: list[dict[str, Any]] | None = None


def registry_folders(registry: Path, dataset: str, checkouts: Path | None) -> list[Path]:
    """Return the folders of a dataset's tasks. `dataset` is NAME, or NAME@VERSION. Raises BadTaskFolder."""
    try:
        datasets = msgspec.convert(json.loads(registry.read_text(encoding="utf-8")), list[RegistryDataset])
    except FileNotFoundError:
        raise BadTaskFolder(f"registry {registry} is missing") from None
    except (OSError, ValueError, msgspec.ValidationError) as error:
        raise BadTaskFolder(f"registry {registry} is no list of datasets: {error}") from error
    name, _, version = dataset.partition("@")
    found = [one for one in datasets if one.name == name and version in ("", one.version)]
    if len(found) != 1:
        there = ", ".join(f"{one.name}@{one.version}" for one in datasets[:50]) or "none"
        said = "is not in" if not found else "has several versions in"
        raise BadTaskFolder(f"dataset {dataset!r} {said} {registry}: name one of {there}")
    if not found[0].tasks:
        raise BadTaskFolder(f"dataset {dataset!r} of {registry} has no tasks")
    commits: dict[Path, str] = {}
    return [_folder(registry, task, checkouts, commits) for task in found[0].tasks]


def _folder(registry: Path, task: RegistryTask, checkouts: Path | None, commits: dict[Path, str]) -> Path:
    if task.git_url is None:
        path = Path(task.path).expanduser()
        return path if path.is_absolute() else registry.parent / path
    repository = PurePosixPath(task.git_url.rstrip("/")).name.rpartition(":")[2].removesuffix(".git")
    wanted = task.git_commit_id if task.git_commit_id not in (None, "", "head", "HEAD") else None
    if ".." in PurePosixPath(task.path).parts or PurePosixPath(task.path).is_absolute():
        raise BadTaskFolder(f"registry {registry}: task {task.name!r}: path {task.path!r} leads out of its repository")
    names = [f"{repository}-{wanted[:SHORT]}", repository] if wanted else [repository]
    for name in names:
        place = (checkouts or Path(".")) / name
        if checkouts is None or not place.is_dir():
            continue
        if wanted and place not in commits:
            commits[place] = _commit(place)
        if wanted is None or commits[place].startswith(wanted):
            return place / task.path
    target = (checkouts or Path("CHECKOUTS")) / names[0]
    raise BadTaskFolder(
        f"registry {registry}: task {task.name!r} needs {task.git_url} at {wanted or 'its head'}: "
        f"git clone {task.git_url} {target}{f' && git -C {target} checkout {wanted}' if wanted else ''}, and name the "
        "folder above it by checkouts="
    )


def _commit(place: Path) -> str:
    command = ["git", "-C", str(place), "-c", f"safe.directory={place.resolve()}", "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=GIT_S, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        raise BadTaskFolder(f"{place} is no git checkout whose commit can be read: {error}") from error
