"""Agents that are programs, in containers of Docker and machines of E2B: they reach the gateway, and never the token of
their session. On E2B each sample has a machine of its template: the program works in it by turns of the policy, its
diff is taken, and a clean machine grades it. Daemon and service are the local stand-ins."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import random
import subprocess
import types
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.agent_clis import program, python_program
from tests.fakes import e2b_server
from tests.fakes.docker_engine import DockerServer
from tests.fakes.memory_log import MemoryLog
from tests.fakes.offers import offering
from tests.integration.conftest import Stage
from tests.integration.test_command_agents import ASKS, LOOKS, Programs
from tests.unit.gateway.conftest import model_in
from tests.unit.gateway.test_anthropic_messages import THINKS
from turnlog.environments import CommandAgent, Task, TaskRow
from turnlog.infra.environments.ready_agents import ready_agent
from turnlog.infra.environments.tools import GATEWAY_INSIDE
from turnlog.infra.event_log import EventLog
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.role import Role
from turnlog.infra.sandbox_root import cache_directory
from turnlog.plugins.recipes.repair import Repair, modules, repository
from turnlog.producers.gateway_client import GatewayClient
from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers import worker
from turnlog.sandbox_workers.pooling.worker_pools import find_isolation_failure
from turnlog.sandbox_workers.workspaces.folder import Folder
from turnlog.sandbox_workers.workspaces.store import Workspaces
from turnlog.schemas.events import (
    Outcome,
    RewardAssigned,
    RolloutRequested,
    SandboxLimits,
    ToolCallRequested,
    TurnCompleted,
)

LIMITS = SandboxLimits(
    cpu_s=300, wall_s=120, memory_bytes=4 << 30, pids=400, disk_bytes=512 << 20, output_bytes=16 << 10
)
SANDBOX = SandboxSettings(slots=2, prewarm=0, first_uid=294_000, memory_bytes=4 << 30, pids=400, disk_bytes=512 << 20)
KEY = "e2b_0123456789abcdef-the-key"
ROOM = 120_000
"""Tokens; most are the system text and tools of Claude Code."""
STAND_IN = """\
#!/usr/bin/env python3
import json, os, subprocess, sys, urllib.request
prompt = sys.argv[sys.argv.index("--") + 1]
tool = {"name": "Bash", "description": "Runs", "input_schema": {"type": "object", "properties": {"command": {}}}}
messages = [{"role": "user", "content": prompt}]
while True:
    body = {"model": "policy", "max_tokens": 1000, "tools": [tool], "messages": messages}
    headers = {"content-type": "application/json", "x-api-key": os.environ["ANTHROPIC_AUTH_TOKEN"],
               "user-agent": "claude-cli/2.1.329 (external, sdk-cli)"}
    url = os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        content = json.load(answer)["content"]
    messages.append({"role": "assistant", "content": content})
    calls = [block for block in content if block["type"] == "tool_use"]
    if not calls:
        break
    results = []
    for call in calls:
        ran = subprocess.run(call["input"]["command"], shell=True, capture_output=True, text=True)
        results.append({"type": "tool_result", "tool_use_id": call["id"], "content": ran.stdout + ran.stderr})
    messages.append({"role": "user", "content": results})
"""
"""A stand-in for Claude Code: what it asks for is what that asks for, without its texts."""


class InMachines(Repair):
    """Repositories that Claude Code mends in machines of E2B, each of the row's template."""

    agent: CommandAgent
    sandbox = dataclasses.replace(Repair.sandbox, backend="e2b", limits=LIMITS)

    def task(self, row: TaskRow) -> Task:
        task = super().task(row)
        sandbox = dataclasses.replace(task.sandbox, image=row["metadata"]["image"])
        return dataclasses.replace(task, sandbox=sandbox, verifier=dataclasses.replace(self.verifier, sandbox=sandbox))


OFFERED = types.SimpleNamespace(in_machines=InMachines(), looking=Programs("looking"))


@pytest.fixture(scope="module")
def calc_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe's, with room for what Claude Code says of itself."""
    return model_in(tmp_path_factory.mktemp("model"), ROOM, THINKS)


@pytest.fixture
def offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The recipes of an installed package."""
    OFFERED.looking.judged.clear()
    points = {"in-machines": f"{__name__}:OFFERED.in_machines", "looking": f"{__name__}:OFFERED.looking"}
    with offering(tmp_path, monkeypatch, "machines", points):
        yield OFFERED


@pytest.fixture
async def service(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[e2b_server.LocalE2b]:
    """The stand-in for the service; the environment of a worker leads to it."""
    if await find_isolation_failure(SANDBOX):
        pytest.skip("user namespaces are off")
    async with e2b_server.serving(first_uid=295_000, key=KEY) as server:
        for name, value in (("API_KEY", KEY), ("API_URL", server.url), ("SANDBOX_URL", server.url)):
            monkeypatch.setenv(f"E2B_{name}", value)
        yield server


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-in for a Docker daemon; the environment of a worker leads to it."""
    if os.geteuid():
        pytest.skip("not started by root")
    images = {SANDBOX.docker_image: "/opt/python/bin:/usr/bin:/bin"}
    with DockerServer(tmp_path / "docker.sock", cache_directory(), images) as server:
        monkeypatch.setenv("DOCKER_HOST", server.url)
        yield


@asynccontextmanager
async def working(stage: Stage, backend: str = "e2b") -> AsyncIterator[None]:
    """A real worker that serves the backend, its store the runner's."""
    own = {"backend": backend} if backend == "subprocess" else {"backends": (backend,)}
    settings = dataclasses.replace(stage.settings, sandbox=dataclasses.replace(SANDBOX, **own))
    async with EventLog.open(MemoryLog(stage.broker), stage.registry, writer="worker", blobs=stage.blobs) as events:
        role = Role("sandbox", "s-1", settings, MemoryLog(stage.broker), events, stage.blobs, Health("sandbox"))
        task = asyncio.create_task(worker.main(role))
        stage.others.append(task)
        try:
            yield
        finally:
            role.stopping.set()
            await task


def bug() -> tuple[dict[str, Any], str]:
    """A row, and the command that mends it."""
    module = modules()[0]
    task = repository(module, wrong := module["bugs"][0], random.Random(1))
    name = task["FAIL_TO_PASS"][0].partition(".")[0].removeprefix("test_")
    return task, f"sed -i 's/{wrong['wrong']}/{wrong['right']}/' {name}.py"


def runs(command: str, tool: str = "Bash", ends: str = "mended", argument: str = "command") -> Callable[[str], str]:
    """The policy that runs a command by a tool, which takes it as `argument`, and then says `ends`."""
    call = json.dumps({"name": tool, "arguments": {argument: command}})
    return lambda prompt: ends if prompt.count("<|im_start|>assistant") > 1 else f"<tool_call>{call}</tool_call>"


async def graded(stage: Stage, policy: Callable[[str], str], samples: int) -> list[dict[str, Any]]:
    """The evidence of each sample's reward."""
    stage.policy, stage.engine.context = policy, ROOM
    stage.answers = lambda request, count: None
    stage.settings = dataclasses.replace(
        stage.settings,
        runner=dataclasses.replace(stage.settings.runner, tool_deadline_s=60.0),
        engine=dataclasses.replace(stage.settings.engine, context=ROOM),
    )
    async with working(stage), stage.gateway(), stage.running():
        finishes = await stage.finished(samples, seconds=150)
    assert [(finish.outcome, finish.reason) for finish in finishes] == [(Outcome.completed, "")] * samples, finishes
    return [json.loads(reward.evidence) for reward in await stage.said(RewardAssigned)]


async def sees_no_token_and_reaches_the_gateway_alone(stage: Stage, offered: Any, folder: Path, backend: str) -> None:
    """The program that looks for it."""
    own = "http://127.0.0.1:3128"
    gateway = f"{stage.settings.gateway.url}/v1/models"
    places = [gateway, "http://169.254.169.254/", f"{own}/sessions/s", f"{own}/v1/models"]
    recipe = offered.looking.runs(LOOKS, json.dumps(places))
    recipe.sandbox = dataclasses.replace(Programs.sandbox, backend=backend)
    stage.answers = lambda request, count: None
    stage.settings = dataclasses.replace(
        stage.settings, runner=dataclasses.replace(stage.settings.runner, tool_deadline_s=60.0)
    )
    await stage.request(recipe="looking")
    async with working(stage, backend), stage.gateway(), stage.running():
        [finish] = await stage.finished(1, seconds=90)
        assert (finish.outcome, finish.reason) == (Outcome.completed, "")
        [rollout] = await stage.said(RolloutRequested)
        async with GatewayClient(stage.settings) as client:
            secret, mac = (await client.open(rollout, recipe.task(json.loads(rollout.task)), 0)).token.split(".")
    [episode] = recipe.judged
    left = folder / "left"
    await asyncio.to_thread(left.mkdir)
    await Workspaces(stage.blobs).restore(Folder(left), episode.ended.workspace, disk_bytes=1 << 26)
    assert json.loads((left / "reached").read_text()) == {
        gateway: ["no way", "no way"],
        "http://169.254.169.254/": ["no way", 403],
        f"{own}/sessions/s": [403, 403],
        f"{own}/v1/models": [200, 200],
    }
    seen = (left / "seen").read_text()
    assert "OPENAI_API_KEY" in seen
    assert secret not in seen
    assert mac not in seen


async def test_a_program_in_a_container_sees_no_token_and_reaches_the_gateway_alone(
    stage: Stage, offered: Any, daemon: None, tmp_path: Path
) -> None:
    await sees_no_token_and_reaches_the_gateway_alone(stage, offered, tmp_path, "docker")


async def test_a_program_in_a_machine_sees_no_token_and_reaches_the_gateway_alone(
    stage: Stage, offered: Any, service: e2b_server.LocalE2b, tmp_path: Path
) -> None:
    await sees_no_token_and_reaches_the_gateway_alone(stage, offered, tmp_path, "e2b")
    assert service.machines == {}


ASKS_THERE = """\
import json, os, sys, urllib.request
body = json.dumps({"messages": [{"role": "user", "content": "3 + 5 = ?"}]}).encode()
for url in (sys.argv[1], os.environ["OTHER"], open("address").read()):
    asked = urllib.request.Request(url + "/v1/chat/completions", body, {"content-type": "application/json"})
    print(json.load(urllib.request.urlopen(asked))["choices"][0]["message"]["content"])
"""


async def test_a_program_as_a_subprocess_finds_the_gateway_wherever_its_configuration_names_it(
    stage: Stage, offered: Any
) -> None:
    """Its loopback is the host's, where the port of its proxy is any free one."""
    recipe = offered.looking.runs(ASKS_THERE, GATEWAY_INSIDE, env={"OTHER": GATEWAY_INSIDE})
    recipe.agent = dataclasses.replace(recipe.agent, files={**recipe.agent.files, "address": GATEWAY_INSIDE})
    recipe.sandbox = dataclasses.replace(Programs.sandbox, backend="subprocess")
    stage.policy, stage.answers = lambda prompt: "8", lambda request, count: None
    stage.settings = dataclasses.replace(
        stage.settings, runner=dataclasses.replace(stage.settings.runner, tool_deadline_s=60.0)
    )
    await stage.request(recipe="looking")
    async with working(stage, "subprocess"), stage.gateway(), stage.running():
        [finish] = await stage.finished(1, seconds=90)
    [episode] = recipe.judged
    assert (finish.outcome, finish.reason, episode.ended.output) == (Outcome.completed, "", "8\n8\n8\n")


async def test_a_program_that_kills_what_runs_it_in_a_machine_does_not_get_another_attempt(
    stage: Stage, offered: Any, service: e2b_server.LocalE2b
) -> None:
    """As by `pkill python3`: it would learn to void its episodes."""
    recipe = offered.looking.runs(
        ASKS + "ask()\nfor pid in range(2, 20):\n    if pid != os.getpid():\n        try: os.kill(pid, 9)\n"
        "        except OSError: pass\n"
    )
    recipe.sandbox = dataclasses.replace(Programs.sandbox, backend="e2b")
    stage.policy, stage.answers = lambda prompt: "8", lambda request, count: None
    stage.settings = dataclasses.replace(
        stage.settings, runner=dataclasses.replace(stage.settings.runner, tool_deadline_s=60.0)
    )
    await stage.request(recipe="looking")
    async with working(stage), stage.gateway(), stage.running():
        [finish] = await stage.finished(1, seconds=90)
    assert (finish.outcome, finish.final, finish.reason) == (Outcome.agent_error, True, "sandbox_ended")
    assert len(recipe.judged) == 1


@pytest.fixture
def template(tmp_path: Path) -> Path:
    """A folder of a template that has the stand-in for Claude Code."""
    folder = tmp_path / "template"
    folder.mkdir()
    (folder / "claude").write_text(STAND_IN)
    (folder / "claude").chmod(0o755)
    tmp_path.chmod(0o755)
    return folder


async def test_every_sample_has_a_machine_and_its_diff_is_graded_in_a_clean_one(
    stage: Stage, offered: Any, service: e2b_server.LocalE2b, template: Path
) -> None:
    offered.in_machines.agent = ready_agent("claude-code", path="/opt/claude")
    task, mends = bug()
    for image in ("swe-1", "swe-2"):
        service.templates[image] = {"/opt/claude": template}
        row = {**task, "metadata": {"image": image}}
        for index in range(2):
            await stage.request(
                image, index, recipe="in-machines", task=row, new_tokens=1000, max_context_tokens=ROOM, deadline_s=90.0
            )
    evidence = await graded(stage, runs(mends), samples=4)
    assert [one["outcome"] for one in evidence] == ["resolved"] * 4, evidence
    assert service.machines == {}
    calls = await stage.said(ToolCallRequested)
    assert sorted((one.sandbox.image, one.tool) for one in calls) == [
        (image, tool) for image in ("swe-1", "swe-2") for tool in (*["agent"] * 2, *["python"] * 4)
    ]  # to act, to take the diff, and to grade
    assert [service.asked.count(image) for image in ("swe-1", "swe-2")] >= [6, 6], "a machine for each"
    assert {turn.agent_path for turn in await stage.said(TurnCompleted)} == {"main"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "tool", "argument"),
    [("claude-code", "Bash", "command"), ("codex", "exec_command", "cmd"), ("opencode", "bash", "command")],
)
async def test_a_ready_agent_itself_mends_a_repository_in_a_machine(
    stage: Stage, offered: Any, service: e2b_server.LocalE2b, name: str, tool: str, argument: str
) -> None:
    service.templates["npm"] = {"/opt/node_modules": program(name).parents[1]}
    offered.in_machines.agent = ready_agent(name, path="/opt/node_modules/.bin")
    task, mends = bug()
    row = {**task, "prompt": f"- {task['prompt']}", "metadata": {"image": "npm"}}  # a task may look like an option
    await stage.request(
        "g", recipe="in-machines", task=row, new_tokens=2000, max_turns=8, max_context_tokens=ROOM, deadline_s=150.0
    )
    [evidence] = await graded(stage, runs(mends, tool, argument=argument), samples=1)
    assert evidence["outcome"] == "resolved"
    assert service.machines == {}
    assert {turn.agent_path for turn in await stage.said(TurnCompleted)} == {"main"}


def copied(source: Path, target: Path) -> None:
    """Copy a folder, by hard links where it lies on the same file system."""
    if subprocess.run(["cp", "-al", source, target], capture_output=True).returncode:
        subprocess.run(["cp", "-a", source, target], check=True)


@pytest.mark.long
async def test_mini_swe_agent_itself_mends_a_repository_in_a_machine(
    stage: Stage, offered: Any, service: e2b_server.LocalE2b, template: Path
) -> None:
    made = python_program("mini-swe-agent").parents[1]
    interpreter = (made / "bin/python").resolve().parents[1]
    readable = template / "python"  # others may not enter a user's home
    await asyncio.to_thread(copied, interpreter, readable)
    service.templates["mini"] = {"/opt/mini": made, str(interpreter): readable}
    offered.in_machines.agent = ready_agent("mini-swe-agent", path="/opt/mini/bin")
    task, mends = bug()
    row = {**task, "metadata": {"image": "mini"}}
    await stage.request(
        "g", recipe="in-machines", task=row, new_tokens=2000, max_turns=8, max_context_tokens=ROOM, deadline_s=150.0
    )
    ends = json.dumps({"name": "bash", "arguments": {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}})
    [evidence] = await graded(stage, runs(mends, "bash", f"<tool_call>{ends}</tool_call>"), samples=1)
    assert evidence["outcome"] == "resolved"
    assert {turn.agent_path for turn in await stage.said(TurnCompleted)} == {"main"}
