"""Repositories that agents mend in real sandboxes, run by a real worker, and are graded there through the runner."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import shutil
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.memory_log import MemoryLog
from tests.fakes.offers import offering
from tests.integration.conftest import Stage
from turnlog.infra.environments.agents import CommandAgent
from turnlog.infra.event_log import EventLog
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.role import Role
from turnlog.plugins.recipes.repair import Repair, modules, repository
from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers import worker
from turnlog.sandbox_workers.pooling.worker_pools import find_isolation_failure
from turnlog.schemas.events import Outcome, RewardAssigned, ToolCallRequested

SANDBOX = SandboxSettings(slots=2, prewarm=0, first_uid=293_000)
PROGRAM = """\
import json, os, subprocess, urllib.request
body = {"model": "m", "messages": [{"role": "user", "content": "go on, program"}]}
headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
    subprocess.run(json.load(answer)["choices"][0]["message"]["content"], shell=True)
"""


class ByProgram(Repair):
    """The same, mended by a program."""

    agent = CommandAgent(name="mine", version="1", argv=("python3", "agent.py"), files={"agent.py": PROGRAM})


RECIPE = ByProgram()


@pytest.fixture
def by_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package that offers the recipe."""
    with offering(tmp_path, monkeypatch, "mending", {"by-program": f"{__name__}:RECIPE"}):
        yield


@asynccontextmanager
async def working(stage: Stage) -> Any:
    """A real worker, its sandboxes bubblewraps, its store the runner's."""
    settings = dataclasses.replace(stage.settings, sandbox=SANDBOX)
    async with EventLog.open(MemoryLog(stage.broker), stage.registry, writer="worker", blobs=stage.blobs) as events:
        role = Role("sandbox", "s-1", settings, MemoryLog(stage.broker), events, stage.blobs, Health("sandbox"))
        task = asyncio.create_task(worker.main(role))
        stage.others.append(task)
        try:
            yield
        finally:
            role.stopping.set()
            await task


async def test_a_repository_is_mended_by_the_loop_or_a_program_and_graded_apart(stage: Stage, by_program: None) -> None:
    if shutil.which("git", path="/usr/local/bin:/usr/bin:/bin") is None:
        pytest.skip("git is not installed")
    if await find_isolation_failure(SANDBOX):
        pytest.skip("user namespaces are off")
    module = modules()[0]
    task = repository(module, bug := module["bugs"][0], random.Random(1))
    name = task["FAIL_TO_PASS"][0].partition(".")[0].removeprefix("test_")
    edit = {"path": f"{name}.py", "old": bug["wrong"], "new": bug["right"]}
    call = json.dumps({"name": "edit_file", "arguments": edit}, separators=(",", ":"))

    def policy(prompt: str) -> str:
        if "go on, program" in prompt:
            return f"sed -i 's/{bug['wrong']}/{bug['right']}/' {name}.py; touch {name}.pyc"
        return "mended" if "replaced the text" in prompt else f"<tool_call>{call}</tool_call>"

    stage.policy, stage.engine.context = policy, 1 << 14
    stage.answers = lambda request, count: None
    stage.settings = dataclasses.replace(
        stage.settings, runner=dataclasses.replace(stage.settings.runner, tool_deadline_s=60.0)
    )
    for group, recipe in (("g", "repair"), ("h", "by-program")):
        await stage.request(
            group, recipe=recipe, task=task, new_tokens=1000, max_context_tokens=1 << 14, deadline_s=60.0
        )
    async with working(stage), stage.gateway(), stage.running():
        finishes = await stage.finished(2, seconds=120)
    assert [finish.outcome for finish in finishes] == [Outcome.completed] * 2
    for reward in await stage.said(RewardAssigned):
        evidence = json.loads(reward.evidence)
        assert (reward.value, evidence.get("outcome"), evidence.get("files")) == (1.0, "resolved", 1), evidence
        assert f"+        if {bug['right']}" in evidence["diff"]
        assert set(evidence["tests"].values()) == {"passed"}
    calls = await stage.said(ToolCallRequested)
    assert len({one.session_id for one in calls}) == len(calls) == 6  # to act, to take the diff, to grade: twice
    assert all(one.sandbox.fresh for one in calls if one.tool == "python")
