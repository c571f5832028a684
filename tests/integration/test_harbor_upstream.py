"""Task folders read by turnlog and by the package harbor: what both say of them is the same."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.harbor_tasks import STEPS, TASK, write_task
from tests.harbor_upstream import upstream_about
from tests.unit.harbor.test_source import DOCKER
from tests.unit.harbor.test_task_toml import WHOLE
from turnlog.plugins.harbor.source import Harbor, make_task, source, task_folders
from turnlog.plugins.harbor.task_folder import read_task_folder
from turnlog.plugins.harbor.task_toml import BadTaskFolder

MOST = 200
"""Task folders of a suite that are compared, evenly spaced."""
GIVEN = os.environ.get("TURNLOG_TEST_HARBOR_TASKS", "")
STEP = {"steps/first/instruction.md": "1", "steps/second/instruction.md": "2", "steps/first/tests/test.sh": "true"}


def ours(folder: Path) -> dict[str, Any]:
    """In the form of `upstream_about`."""
    try:
        found = read_task_folder(folder)
    except BadTaskFolder as error:
        return {"refused": str(error)}
    table, row = found.table, found.row
    phases = []
    for place, step in enumerate(table.steps or [None]):
        agent, verifier = table.agent_policy(step), table.verifier_policy(step)
        phases.append(
            {
                "instruction": row["steps"][place]["prompt"] if step else row["prompt"],
                "mode": "shared" if table.verifier_environment(step) is None else "separate",
                "timeout": (step or table).verifier.timeout_sec,
                "min_reward": step.min_reward if step else None,
                "agent": [agent.mode, list(agent.hosts)],
                "verifier": [verifier.mode, list(verifier.hosts)],
                "artifacts": [one.source for one in table.artifacts_of(step)],
            }
        )
    environment = table.environment
    return {
        "name": row["id"], "phases": phases, "agent_timeout": table.agent.timeout_sec,
        "image": environment.docker_image, "workdir": environment.workdir, "cpus": environment.cpus,
        "memory_mb": environment.memory_mb, "storage_mb": environment.storage_mb, "env": environment.env,
        "servers": [[one.name, one.transport, one.url, one.command] for one in environment.mcp_servers],
        "strategy": table.multi_step_reward_strategy,
    }  # fmt: skip


@pytest.mark.long
def test_folders_mean_the_same_to_harbor_itself(tmp_path: Path) -> None:
    tasks = {
        "plain": TASK,
        "steps": STEPS,
        "docker": {**TASK, "task.toml": DOCKER},
        "whole": {**TASK, **STEP, "task.toml": WHOLE},
        "canary": {**TASK, "instruction.md": "# a canary line\n<!-- CANARY -->\n\n# Title\nText\n"},
        "untested": {path: text for path, text in TASK.items() if path != "tests/test.sh"},
        "untold": {path: text for path, text in TASK.items() if path != "instruction.md"},
        "negative": {**TASK, "task.toml": '[environment]\nallowed_hosts = ["a.b"]'},
        "legacy": {**TASK, "task.toml": '[environment]\nmemory = "1.5G"\nstorage = "512M"\nallow_internet = false'},
    }
    folders = [write_task(tmp_path / name, files) for name, files in tasks.items()]
    told = upstream_about(folders)
    for folder in folders:
        mine, theirs = ours(folder), told[folder]
        assert ("refused" in mine) == ("refused" in theirs), (folder.name, mine, theirs)
        assert "refused" in mine or mine == theirs, folder.name


def test_a_suite_of_others_is_served(tmp_path: Path) -> None:
    if not GIVEN:
        pytest.skip("TURNLOG_TEST_HARBOR_TASKS is not set")
    there = task_folders(Path(GIVEN))
    folders = there[:: -(-len(there) // MOST)]
    told = upstream_about(folders)
    different = {one.name: (mine, told[one]) for one in folders if (mine := ours(one)) != told[one]}
    unserved = {name for name, (mine, _) in different.items() if "docker-compose.yaml" in mine.get("refused", "")}
    assert set(different) == unserved, json.dumps({n: different[n] for n in list(different)[:3]}, indent=1, default=str)
    options = source(path=str(folders[0]), unserved="skip").options
    found = Harbor(folders, options, skip=True)
    assert len({make_task(row).id for row in found.rows}) == len(folders) - len(unserved)
