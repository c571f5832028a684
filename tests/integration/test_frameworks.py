"""Frameworks unchanged: the agents of docs/frameworks.md, in an environment of their own: its pins are not ours."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import pytest

from tests.integration.test_command_agents import SANDBOX
from tests.upstream_environments import locked_python
from turnlog.sandbox_workers.pooling.worker_pools import find_isolation_failure

ROOT = Path(__file__).parents[2]
QUIET = {"MSWEA_SILENT_STARTUP": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


@pytest.fixture(scope="module")
def python() -> Path:
    """The interpreter of that environment."""
    return locked_python("frameworks", "no registry gives the frameworks")


@pytest.mark.parametrize(
    "name",
    [
        "openai-agents",
        pytest.param("pydantic-ai", marks=pytest.mark.long),
        pytest.param("mini-swe-agent", marks=pytest.mark.long),
    ],
)
def test_an_agent_of_a_framework_does_a_task_by_turns_of_the_policy(python: Path, tmp_path: Path, name: str) -> None:
    if asyncio.run(find_isolation_failure(SANDBOX)):
        pytest.skip("user namespaces are off")
    tests = [ROOT / "tests/frameworks/test_frameworks.py", "-k", name, "--basetemp", tmp_path / "pytest"]
    # tests/conftest.py has servers in mind, whose clients are not there.
    command = [python, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", *tests]
    env = {**os.environ, **QUIET, "PYTHONPATH": str(ROOT / "src"), "MSWEA_GLOBAL_CONFIG_DIR": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
    assert "1 passed" in done.stdout
