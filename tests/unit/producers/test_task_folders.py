"""Task folders as rows: what of them a rollout is given, and what cannot be served."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from turnlog.infra.environments.agents import CommandAgent
from turnlog.infra.environments.episodes import Episode, SandboxAnswer
from turnlog.plugins.recipes.task_folders import (
    BadTaskFolder,
    NoReward,
    TaskFolders,
    calls_of,
    task_row,
    verdict_of,
)
from turnlog.schemas.events import Outcome

DOCKERFILE = """\
# Comment
FROM python:3.11-slim
WORKDIR /app
COPY --chown=root . .
COPY data/a.txt \\
  data/b.txt ./inputs/
COPY main.py /app/start.py
"""


def folder(parent: Path, name: str = "one", **changed: str) -> Path:
    """A task folder; `changed`: path -> text."""
    texts = {
        "instruction.md": "Read /app/inputs, write /app/out; /apple is no /app-folder.",
        "task.toml": "[agent]\ntimeout_sec = 60\n[environment]\nmemory_mb = 256",
        "environment/Dockerfile": DOCKERFILE,
        "environment/main.py": "print(1)\n",
        "environment/data/a.txt": "a",
        "environment/data/b.txt": "b",
        "tests/test.sh": "cp /tests/x /logs/verifier/reward.txt; ls /app /usr/tests",
        "tests/deep/x": "1",
        "solution/solve.sh": "true",
        **changed,
    }
    for path, text in texts.items():
        target = parent / name / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return parent / name


def test_a_row_holds_what_a_rollout_needs_at_the_places_of_a_sandbox(tmp_path: Path) -> None:
    row = task_row(folder(tmp_path))
    assert row["prompt"] == "Read /workspace/inputs, write /workspace/out; /apple is no /app-folder."
    assert row["files"] == {
        "main.py": "print(1)\n", "data/a.txt": "a", "data/b.txt": "b", "inputs/a.txt": "a", "inputs/b.txt": "b",
        "start.py": "print(1)\n",
    }  # fmt: skip
    moved = "cp /workspace/.task/tests/x /workspace/.task/logs/reward.txt; ls /workspace /usr/tests"
    assert row["tests"] == {"test.sh": moved, "deep/x": "1"}
    assert (row["seconds"], row["mib"]) == (
        {"agent": 60.0, "verifier": 600.0}, {"memory": 256, "storage": 1024},
    )  # fmt: skip
    assert "solve" not in str(row)


def test_a_recipe_offers_every_folder_again_and_again_with_limits_for_all(tmp_path: Path) -> None:
    folder(tmp_path, "one")
    folder(tmp_path, "two", **{"task.toml": "[agent]\ntimeout_sec = 90\n[environment]\nmemory_mb = 128"})
    agent = CommandAgent(name="a", version="1", argv=("a",), files=lambda row: {"task": row["task"]})
    recipe = TaskFolders("folders", tmp_path, agent, image="slim")
    rows = list(itertools.islice(recipe.tasks(3), 6))
    assert [sorted(row["task"] for row in rows[at : at + 2]) for at in (0, 2, 4)] == [["one", "two"]] * 3
    assert (recipe.sandbox.limits.wall_s, recipe.sandbox.limits.memory_bytes) == (90.0, 256 << 20)
    assert (recipe.sandbox.image, recipe.verifier.sandbox.image, recipe.verifier.sandbox.limits.wall_s) == (
        "slim", "slim", 600.0,
    )  # fmt: skip
    assert callable(recipe.agent.files)
    assert recipe.agent.files(rows[0]) == {**rows[0]["files"], "task": rows[0]["task"]}


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"task.toml": "[agent"}, "task.toml"),
        ({"task.toml": "a=" + "[" * 5000}, "task.toml: not TOML"),
        ({"environment/Dockerfile": "FROM x\nRUN apt-get update"}, "RUN builds an image"),
        ({"environment/Dockerfile": "WORKDIR /app\nCOPY main.py /etc/x"}, "below WORKDIR"),
        ({"environment/Dockerfile": "COPY missing.py ."}, "missing.py is missing"),
        ({"environment/Dockerfile": 'COPY ["main.py", "."]'}, "below WORKDIR"),
    ],
)
def test_what_cannot_be_served_is_refused_with_its_remedy(tmp_path: Path, changed: dict[str, str], why: str) -> None:
    with pytest.raises(BadTaskFolder, match=why):
        task_row(folder(tmp_path, **changed))


def test_parts_that_are_missing_or_no_text_are_named(tmp_path: Path) -> None:
    for path in ("instruction.md", "tests/test.sh", "environment/Dockerfile"):
        (folder(tmp_path, path.replace("/", "-")) / path).unlink()
        with pytest.raises(BadTaskFolder, match=path.rpartition("/")[2]):
            task_row(tmp_path / path.replace("/", "-"))
    (folder(tmp_path) / "environment/data/a.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(BadTaskFolder, match="must be part of the image"):
        task_row(tmp_path / "one")
    with pytest.raises(BadTaskFolder, match="no folder in it"):
        TaskFolders("none", tmp_path / "one/solution", CommandAgent(name="a", version="1", argv=("a",)))


def test_an_image_brings_what_its_dockerfile_runs(tmp_path: Path) -> None:
    text = "FROM x\nRUN apt-get update\nENV A=1\nWORKDIR /app\nCOPY main.py .\n"
    assert task_row(folder(tmp_path, **{"environment/Dockerfile": text}), "slim")["files"] == {"main.py": "print(1)\n"}


def answered(*outputs: str, ok: bool = True) -> list[SandboxAnswer]:
    return [SandboxAnswer(ok, output, 0 if ok else 1) for output in outputs]


def episode(tmp_path: Path) -> Episode:
    return Episode(task=task_row(folder(tmp_path)), messages=(), outcome=Outcome.completed, reason="")


@pytest.mark.parametrize(
    ("said", "value", "parts"),
    [("1\n", 1.0, {}), ("0.25", 0.25, {}), ('{"reward": 0.5, "style": 1}', 0.5, {"style": 1.0})],
)
def test_the_reward_is_what_the_test_wrote(tmp_path: Path, said: str, value: float, parts: dict[str, float]) -> None:
    judged = episode(tmp_path)
    assert [call.tool for call in calls_of(judged)] == ["shell", "write_file", "write_file", "shell", "shell"]
    verdict = verdict_of(judged, answered("", "", "", "1 passed", said))
    assert (verdict.value, verdict.components, verdict.evidence["test.sh"]) == (value, parts, "1 passed")


@pytest.mark.parametrize("said", ["", "passed", "[1]", '{"style": 1}', '{"reward": "x"}'])
def test_no_reward_is_no_verdict_and_never_a_zero(tmp_path: Path, said: str) -> None:
    with pytest.raises(NoReward, match="ImportError"):
        verdict_of(episode(tmp_path), answered("ImportError", said))
    with pytest.raises(NoReward):
        verdict_of(episode(tmp_path), [*answered("ImportError"), *answered("1", ok=False)])
