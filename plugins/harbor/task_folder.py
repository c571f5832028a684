"""A task folder: its parts, as they go into the row of a dataset.

task.toml, instruction.md, environment/ (Dockerfile, or none beside [environment] docker_image), tests/ with test.sh,
perhaps solution/ with solve.sh. A task of several steps has steps/NAME/ with instruction.md and perhaps tests/,
solution/ and workdir/ of its own instead; workdir/setup.sh is run before the step. A file .harborignore leaves out
files of tests/ and solution/.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from turnlog.plugins.harbor.packs import pack_folder
from turnlog.plugins.harbor.tables import EnvironmentTable, StepTable, TaskTable
from turnlog.plugins.harbor.task_toml import BadTaskFolder, parse_task_table, unknown_keys

CANARY: Final = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)
"""A line at the start of an instruction that marks the text as benchmark data, and that no agent sees."""


@dataclass(frozen=True, slots=True)
class TaskFolder:
    """A task folder that can be served, apart from what its backend lacks."""

    path: Path
    table: TaskTable
    row: dict[str, Any]
    """Parts of the row that come from the folder alone."""
    unknown: tuple[str, ...]
    """Keys of task.toml that the format does not have."""

    @property
    def dockerfile(self) -> Path:
        """Path of the environment's Dockerfile, which need not exist."""
        return self.path / "environment/Dockerfile"


def read_task_folder(path: Path) -> TaskFolder:
    """Read and check a task folder. Raises BadTaskFolder."""
    try:
        text = (path / "task.toml").read_text(encoding="utf-8")
    except FileNotFoundError:
        raise BadTaskFolder(f"{path}/task.toml is missing: a task folder needs it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadTaskFolder(f"{path}/task.toml cannot be read: {error}") from error
    table = parse_task_table(text, f"{path}/task.toml")
    _refuse_hardware(path, "environment", table.environment)
    _check_environment(path, table)
    packs = {name: pack_folder(path / name, path) for name in ("tests", "solution") if (path / name).is_dir()}
    row: dict[str, Any] = {
        "id": table.task.name if table.task else path.name,
        "task": path.name,
        "toml": text,
        "packs": packs,
        "mcp_servers": [],
    }
    if table.steps:
        row["steps"] = [_step(path, step, packs) for step in table.steps]
        row["setups"] = [one.name for one in table.steps if (path / "steps" / one.name / "workdir/setup.sh").is_file()]
        row["prompt"] = row["steps"][0]["prompt"]
    else:
        row["prompt"] = instruction(path / "instruction.md")
        _check_tests(path, table, None)
    return TaskFolder(path, table, row, tuple(unknown_keys(text)))


def _step(path: Path, step: StepTable, packs: dict[str, Any]) -> dict[str, Any]:
    folder = path / "steps" / step.name
    if not folder.is_dir():
        raise BadTaskFolder(f"{folder} is missing: [[steps]] names {step.name!r}")
    for name in ("tests", "solution", "workdir"):
        if (folder / name).is_dir():
            packs[f"steps/{step.name}/{name}"] = pack_folder(folder / name, path)
    _check_tests(path, parse_task_table((path / "task.toml").read_text(), f"{path}/task.toml"), step)
    return {"name": step.name, "prompt": instruction(folder / "instruction.md")}


def instruction(path: Path) -> str:
    """Return the text of an instruction without its canary. Raises BadTaskFolder."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        raise BadTaskFolder(f"{path} is missing: it is what the agent is told") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadTaskFolder(f"{path} cannot be read: {error}") from error
    place = 0
    while place < len(lines) and CANARY.fullmatch(lines[place].strip()):
        place += 1
    while place < len(lines) and not lines[place].strip():
        place += 1
    text = "\n".join(lines[place:])
    if not text.strip():
        raise BadTaskFolder(f"{path} is empty: write what the agent is to do")
    return text


def bundles_tests(path: Path, table: TaskTable, step: StepTable | None) -> Path | None:
    """Return the folder whose image holds the tests of a separate verifier, or None if they are sent to it: an image of
    its own is named, or a Dockerfile lies beside the tests."""
    if table.verifier_environment(step) is None:
        return None
    places = [(step.verifier.environment, path / "steps" / step.name / "tests")] if step else []
    for environment, folder in (*places, (table.verifier.environment, path / "tests")):
        if (environment is not None and environment.docker_image) or (folder / "Dockerfile").is_file():
            return folder
    return None


def _check_environment(path: Path, table: TaskTable) -> None:
    for folder in (path / "environment", path / "tests"):
        if (compose := folder / "docker-compose.yaml").exists():
            raise BadTaskFolder(
                f"{compose}: a task with services of its own cannot be served, since a sandbox is one container: leave "
                "the task out, or move the services into its image"
            )
    if not table.environment.docker_image and not (path / "environment/Dockerfile").is_file():
        raise BadTaskFolder(f"{path}/environment/Dockerfile is missing, and [environment] docker_image names no image")


def _refuse_hardware(path: Path, place: str, table: EnvironmentTable) -> None:
    if table.os != "linux":
        raise BadTaskFolder(f"{path}/task.toml: {place}.os: {table.os} containers cannot be served")
    for key in ("gpus", "tpu"):
        if getattr(table, key):
            raise BadTaskFolder(f"{path}/task.toml: {place}.{key}: sandboxes have no accelerator: leave the task out")


def _check_tests(path: Path, table: TaskTable, step: StepTable | None) -> None:
    container = table.verifier_environment(step)
    if container is not None:
        _refuse_hardware(path, "verifier.environment", container)
    if bundles_tests(path, table, step) is not None:
        return
    folders = [path / "tests"] if step is None else [path / "steps" / step.name / "tests", path / "tests"]
    if not any((folder / "test.sh").is_file() for folder in folders):
        raise BadTaskFolder(
            f"{folders[0]}/test.sh is missing: it judges the task, and writes /logs/verifier/reward.txt"
        )
    for hook in (step.verifier if step else table.verifier).collect:
        if hook.service != "main":
            raise BadTaskFolder(f"{path}/task.toml: verifier.collect: there is no service {hook.service!r}")
