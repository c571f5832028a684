"""A task folder in the shape of terminal-bench: a program in a sandbox does it, and its test.sh judges in another."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.offers import offering
from tests.integration.conftest import Stage
from tests.integration.test_command_agents import ASKS, stage, working  # noqa: F401
from turnlog.infra.environments.agents import CommandAgent
from turnlog.plugins.recipes.task_folders import TaskFolders
from turnlog.schemas.events import Outcome, RewardAssigned, RewardFailed

TASK = {
    "instruction.md": "Make /app/adds.py add, and say so in /app/said.\n",
    "task.toml": 'version = "1.0"\n[metadata]\ndifficulty = "easy"\n[agent]\ntimeout_sec = 20.0\n'
    "[verifier]\ntimeout_sec = 20.0\n[environment]\nmemory_mb = 256\nstorage_mb = 32\n",
    "environment/Dockerfile": "FROM python:3.11-slim\nWORKDIR /app\nCOPY adds.py ./\n",
    "environment/adds.py": "def add(a, b):\n    return a - b\n",
    "tests/test.sh": "#!/bin/bash\ncd /app\nif [ -e broken ]; then exit 1; fi\n"
    "if python3 /tests/test_adds.py; then said=1; else said=0; fi\necho $said >/logs/verifier/reward.txt\n",
    "tests/test_adds.py": "import sys\nsys.path.insert(0, '/app')\nimport adds\nassert adds.add(3, 5) == 8\n",
    "solution/solve.sh": "#!/bin/bash\nsed -i s/-/+/ /app/adds.py\n",
}  # fmt: skip
AGENT = (
    ASKS
    + """\
import subprocess
subprocess.run(ask({"role": "user", "content": sys.argv[1]}), shell=True)
ask({"role": "user", "content": "done"})
"""
)
OFFERED = types.SimpleNamespace()


@pytest.fixture
def offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TaskFolders]:
    """An installed package's recipe over a folder with this task."""
    for path, text in TASK.items():
        target = tmp_path / "tasks/adds" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    agent = CommandAgent(
        name="mine", version="1", argv=lambda row: ("python3", "agent.py", row["prompt"]), files={"agent.py": AGENT}
    )
    OFFERED.recipe = TaskFolders("folders", tmp_path / "tasks", agent)
    with offering(tmp_path, monkeypatch, "folders", {"folders": f"{__name__}:OFFERED.recipe"}):
        yield OFFERED.recipe


SOLVED = "sed -i s/-/+/ adds.py"
PLANTED = "mkdir -p .task/logs; echo 1 >.task/logs/reward.txt"


async def test_a_task_folder_is_done_by_a_program_and_judged_by_its_test(stage: Stage, offered: TaskFolders) -> None:  # noqa: F811
    row = dict(next(iter(offered.tasks(0))))
    says = {"solved": SOLVED, "planted": PLANTED, "broken": f"{PLANTED}; touch broken"}
    stage.policy = lambda prompt: next((line for word, line in says.items() if f"task {word}" in prompt), "done")
    for word in says:
        prompt = f"{row['prompt']} task {word}"
        await stage.request(group=word, recipe="folders", new_tokens=200, task={**row, "prompt": prompt})
    async with working(stage), stage.gateway(), stage.running():
        finishes = await stage.finished(3, seconds=120)
    assert {finish.outcome for finish in finishes} == {Outcome.completed}
    rewards = {reward.group_id: reward for reward in await stage.said(RewardAssigned)}
    assert {group: reward.value for group, reward in rewards.items()} == {"solved": 1.0, "planted": 0.0}
    assert "AssertionError" in json.loads(rewards["planted"].evidence)["evidence"]["test.sh"]
    [failed] = await stage.said(RewardFailed)
    assert (failed.group_id, "NoReward: task adds" in failed.cause) == ("broken", True)
