"""Dataset registry files: tasks beside the file, and in the user's own checkouts."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.harbor_tasks import TASK, write_task
from turnlog.plugins.harbor.registry import registry_folders
from turnlog.plugins.harbor.task_toml import BadTaskFolder

URL = "https://example.com/org/suite.git"


def write_registry(path: Path, *tasks: dict[str, str], name: str = "bench", version: str = "1.0") -> Path:
    there = json.loads(path.read_text()) if path.exists() else []
    about = {"name": name, "version": version, "description": "d", "metrics": [{"type": "mean"}], "extra": 1}
    path.write_text(json.dumps([*there, {**about, "tasks": list(tasks)}]))
    return path


def commit_of(folder: Path) -> str:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"]):
        subprocess.run(["git", "-C", str(folder), *words], check=True)
    done = subprocess.run(["git", "-C", str(folder), "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_tasks_are_found_beside_the_file_and_in_checkouts(tmp_path: Path) -> None:
    write_task(tmp_path / "checkouts/suite/tasks/one", TASK)
    commit = commit_of(tmp_path / "checkouts/suite")
    pinned = {"name": "one", "git_url": URL, "git_commit_id": commit, "path": "tasks/one"}
    head = {"name": "two", "git_url": URL, "git_commit_id": "head", "path": "tasks/one"}
    registry = write_registry(tmp_path / "registry.json", pinned, head, {"name": "here", "path": "local/three"})
    folders = registry_folders(registry, "bench@1.0", tmp_path / "checkouts")
    assert folders == [tmp_path / "checkouts/suite/tasks/one"] * 2 + [tmp_path / "local/three"]


def test_what_a_registry_lacks_is_named_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "registry.json"
    with pytest.raises(BadTaskFolder, match="is missing"):
        registry_folders(path, "bench", None)
    path.write_text("{")
    with pytest.raises(BadTaskFolder, match="is no list of datasets"):
        registry_folders(path, "bench", None)
    path.unlink()
    task = {"name": "one", "git_url": URL, "git_commit_id": "a" * 40, "path": "tasks/one"}
    write_registry(write_registry(path, task), task, version="2.0")
    with pytest.raises(BadTaskFolder, match=r"has several versions in .*bench@1.0, bench@2.0"):
        registry_folders(path, "bench", None)
    with pytest.raises(BadTaskFolder, match=r"'other' is not in"):
        registry_folders(path, "other", None)
    with pytest.raises(BadTaskFolder, match=r"git clone https://example.com/org/suite.git .*suite-aaaaaaaaaaaa"):
        registry_folders(path, "bench@1.0", tmp_path)
    write_task(tmp_path / "suite/tasks/one", TASK)
    commit_of(tmp_path / "suite")
    with pytest.raises(BadTaskFolder, match=r"needs https://example.com/org/suite.git at aaaa"):
        registry_folders(path, "bench@1.0", tmp_path)
    write_registry(tmp_path / "out.json", {**task, "path": "../x"})
    with pytest.raises(BadTaskFolder, match="leads out of its repository"):
        registry_folders(tmp_path / "out.json", "bench", tmp_path)
