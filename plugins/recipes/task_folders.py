"""Task folders in the format of terminal-bench and Harbor, as rows of an environment whose agent is a program.

A folder holds `instruction.md`, `task.toml`, `environment/Dockerfile` and the files that it copies, `tests/test.sh`,
which writes the reward, and perhaps `solution/`, which no agent sees. Rows hold all that a rollout needs. Tests run on
the files that the agent left, in a sandbox that has never run anything.

BadTaskFolder  names the folder, what is missing or cannot be served, and the remedy
NoReward       test.sh wrote no reward, so the session has none
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final

from turnlog.environments import CommandAgent, Episode, Recipe, SandboxAnswer, SandboxCall, TaskRow, Verdict
from turnlog.infra.environments.verifiers import SandboxVerifier
from turnlog.schemas.events.tools import SandboxLimits, SandboxSpec
from turnlog.setting_types import SettingsError, parsed_toml

WORKSPACE: Final = "/workspace"
OURS: Final = ".task"
"""Folder of the workspace that holds, after the agent's end, what tasks expect at /tests and /logs/verifier."""
ELSEWHERE: Final = {"/tests": f"{WORKSPACE}/{OURS}/tests", "/logs/verifier": f"{WORKSPACE}/{OURS}/logs"}
TEST: Final = f"mkdir -p {OURS}/logs && bash {OURS}/tests/test.sh 2>&1"
REWARD: Final = f"cat {OURS}/logs/reward.json 2>/dev/null || cat {OURS}/logs/reward.txt"
LAST: Final = 4000
"""Number of last characters of test.sh's output that are the reward's evidence."""
SECONDS: Final = 600.0
"""Time limit in seconds for agent and tests if task.toml sets none."""


class BadTaskFolder(Exception):
    """See the module's docstring."""


class NoReward(Exception):
    """See the module's docstring."""


class TaskFolders(Recipe):
    """Environment of all task folders in `folder`. The agent gets the instruction as its row's `prompt`, and the files
    that the task's environment copies in its workspace. `image` is the root made from the tasks' Dockerfile, needed if
    that does more than copy."""

    def __init__(self, name: str, folder: Path, agent: CommandAgent, *, image: str | None = None) -> None:
        """Read the folders. Raises BadTaskFolder."""
        self.name = name
        self.rows = tuple(task_row(path.parent, image) for path in sorted(folder.glob("*/task.toml")))
        """A row for each folder, ordered by name."""
        if not self.rows:
            raise BadTaskFolder(f"{folder}: no folder in it has a task.toml")
        self._brought = agent.files
        self.agent = dataclasses.replace(agent, files=self._files)
        self.sandbox = SandboxSpec(image=image, limits=self._limits("agent"))
        limits = self._limits("verifier")
        self.verifier = SandboxVerifier(
            name="test.sh", version="1", calls=calls_of, judge=verdict_of,
            sandbox=SandboxSpec(image=image, limits=limits), timeout_s=2 * limits.wall_s,
        )  # fmt: skip

    def tasks(self, seed: int) -> Iterator[TaskRow]:
        """Yield every task once, in an order given by the seed, and then again."""
        generator = random.Random(f"{self.name} tasks {seed}")
        while True:
            yield from generator.sample(self.rows, len(self.rows))

    def _files(self, task: TaskRow) -> Mapping[str, str]:
        brought = self._brought(task) if callable(self._brought) else self._brought
        return {**task["files"], **brought}

    def _limits(self, whose: str) -> SandboxLimits:
        seconds = max(row["seconds"][whose] for row in self.rows)
        memory, disk = (max(row["mib"][what] for row in self.rows) << 20 for what in ("memory", "storage"))
        return SandboxLimits(cpu_s=seconds, wall_s=seconds, memory_bytes=memory, pids=256, disk_bytes=disk)


def task_row(folder: Path, image: str | None = None) -> dict[str, Any]:
    """Return a row with all that a rollout of the task needs. Raises BadTaskFolder."""
    try:
        said = parsed_toml(_text(folder / "task.toml"))
    except SettingsError as error:
        raise BadTaskFolder(f"{folder}/task.toml: {error}") from error
    environment = said.get("environment", {})
    workdir, files = _environment(folder / "environment", image)
    tests = {str(path.relative_to(folder / "tests")): _text(path) for path in _inside(folder / "tests")}
    if "test.sh" not in tests:
        raise BadTaskFolder(f"{folder}/tests has no test.sh")
    moved = {**ELSEWHERE, workdir: WORKSPACE}
    return {
        "prompt": _replace_paths(_text(folder / "instruction.md"), {workdir: WORKSPACE}),
        "task": folder.name,
        "files": files,
        "tests": {path: _replace_paths(text, moved) for path, text in tests.items()},
        "seconds": {whose: float(said.get(whose, {}).get("timeout_sec", SECONDS)) for whose in ("agent", "verifier")},
        "mib": {"memory": environment.get("memory_mb", 2048), "storage": environment.get("storage_mb", 1024)},
    }


def _environment(folder: Path, image: str | None) -> tuple[str, dict[str, str]]:
    """Return the WORKDIR of the Dockerfile, and the files that it copies there."""
    workdir, files = WORKSPACE, dict[str, str]()
    for line in re.sub(r"\\\n", " ", _text(folder / "Dockerfile")).splitlines():
        word, _, rest = line.strip().partition(" ")
        match word.upper():
            case "WORKDIR":
                workdir = rest.strip()
            case "COPY" | "ADD":
                files |= _copy_files(folder, rest, workdir)
            case "" | "#" | "FROM" | "CMD":
                continue
            case _ if image is None and not word.startswith("#"):
                raise BadTaskFolder(
                    f"{folder}/Dockerfile: {word} builds an image: build it, put it into [sandbox] image_folder, "
                    "name it by `image`"
                )
    return workdir, files


def _copy_files(folder: Path, said: str, workdir: str) -> dict[str, str]:
    """Return path in the workspace -> text for one COPY."""
    words = [word for word in said.split() if not word.startswith("--")]
    sources, target = words[:-1], PurePosixPath(workdir, words[-1] if words else "")
    if not sources or said.lstrip().startswith("[") or not target.is_relative_to(workdir):
        raise BadTaskFolder(f"{folder}/Dockerfile: COPY {said}: only files below WORKDIR ({workdir}) can be provided")
    place, found = target.relative_to(workdir), dict[str, str]()
    for source in sources:
        path = folder / source
        if path.is_dir():
            here = [inner for inner in _inside(path) if inner != folder / "Dockerfile"]
            found |= {str(place / inner.relative_to(path)): _text(inner) for inner in here}
        else:
            into = words[-1].endswith("/") or words[-1] == "." or len(sources) > 1
            found[str(place / path.name if into else place)] = _text(path)
    return found


def _inside(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        raise BadTaskFolder(f"{path} is missing") from None
    except UnicodeDecodeError:
        raise BadTaskFolder(f"{path} is not text: it must be part of the image") from None


def _replace_paths(text: str, places: Mapping[str, str]) -> str:
    """Return the text with each path in it replaced by its new place."""
    words = "|".join(re.escape(place) for place in places if place != WORKSPACE and place != "/")
    return re.sub(rf"(?<![\w./-])({words})(?![\w-])", lambda found: places[found[1]], text) if words else text


def calls_of(episode: Episode) -> list[SandboxCall]:
    """Return the calls of the verifier. Remove our folder first, because the agent may have left files there; then
    write and run the tests, and read the reward."""
    tests: Mapping[str, str] = episode.task["tests"]
    written = [{"path": f"{OURS}/tests/{path}", "content": text} for path, text in tests.items()]
    return [
        SandboxCall("shell", {"command": f"rm -rf {OURS}"}),
        *(SandboxCall("write_file", one) for one in written),
        SandboxCall("shell", {"command": TEST}),
        SandboxCall("shell", {"command": REWARD}),
    ]


def verdict_of(episode: Episode, answers: Sequence[SandboxAnswer]) -> Verdict:
    """Return the number in reward.txt, or `reward` of reward.json, whose other numbers are components. Raises
    NoReward."""
    tests, reward = answers[-2], answers[-1]
    try:
        said = json.loads(reward.output) if reward.ok else None
        parts: dict[str, Any] = said if isinstance(said, dict) else {"reward": said}
        components = {name: float(part) for name, part in parts.items()}
        value = components.pop("reward")
    except (ValueError, TypeError, KeyError):
        raise NoReward(f"task {episode.task['task']}: test.sh wrote no reward: {tests.output[-LAST:]}") from None
    return Verdict(value, components, {"task": episode.task["task"], "test.sh": tests.output[-LAST:]})
