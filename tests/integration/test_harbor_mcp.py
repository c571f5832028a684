"""MCP servers of a task in Harbor's format: programs and the built-in loop call them, and each call is on the log."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from typing import Any

from tests.harbor_tasks import TASK
from tests.integration.conftest import Stage
from tests.integration.test_command_agents import stage  # noqa: F401
from tests.integration.test_harbor import acting, harbor  # noqa: F401
from tests.integration.test_mcp_agents import FAKE, SPEAKS, call
from turnlog.schemas.events import Outcome, RewardAssigned, RewardFailed, ToolCallCompleted, ToolCallRequested

SERVED = {
    **TASK,
    "instruction.md": json.dumps([["add", {"a": 3, "b": 5}]]),
    "task.toml": TASK["task.toml"]
    + '[[environment.mcp_servers]]\nname = "ref"\ntransport = "stdio"\ncommand = "python3"\n'
    'args = ["/app/server.py", "stdio"]\n',
    "environment/Dockerfile": "FROM python:3.11-slim\nWORKDIR /app\nCOPY server.py .mcp.json ./\n",
    "environment/.mcp.json": "mine",
    "environment/server.py": FAKE.read_text(),
    "tests/test.sh": "#!/bin/bash\ncd /app\n"
    'if [ "$(cat .mcp.json; ls -A)" = "$(echo mine.mcp.json; echo said; echo server.py)" ]; then\n'
    "cat said >/logs/verifier/reward.txt; fi\n",
}
"""A task whose answer, 8, is that of its server. Its tests fail if configuration is left, or the own file is lost."""
PROGRAM = SPEAKS + 'open("said", "w").write(said[-1]["result"]["content"][0]["text"])\n'


async def test_a_program_finds_the_servers_of_its_task_and_leaves_no_configuration(
    stage: Stage,  # noqa: F811
    harbor: Callable[..., Any],  # noqa: F811
) -> None:
    text, source = harbor({"served": SERVED}, program=shlex.join(["python3", "-c", PROGRAM]))
    await stage.request(recipe=text, new_tokens=300, task=dict(next(iter(source.tasks(0)))))
    async with acting(stage, {}):
        [finish] = await stage.finished(1, seconds=120)
    assert finish.outcome is Outcome.completed, finish.reason
    failures = [failed.cause for failed in await stage.said(RewardFailed)]
    assert ([reward.value for reward in await stage.said(RewardAssigned)], failures) == ([8.0], [])
    proxied = [one for one in await stage.said(ToolCallRequested) if one.caller == "mcp_proxy"]
    done = {one.call_id: one for one in await stage.said(ToolCallCompleted)}
    assert [json.loads(one.arguments).get("tool") for one in proxied] == [None, "add"]
    assert json.loads(done[proxied[-1].call_id].output)["content"][0]["text"] == "8"


async def test_the_loop_has_the_tools_of_its_tasks_servers_beside_its_own(
    stage: Stage,  # noqa: F811
    harbor: Callable[..., Any],  # noqa: F811
) -> None:
    text, source = harbor({"served": SERVED}, agent="loop")
    await stage.request(recipe=text, new_tokens=600, max_turns=4, max_context_tokens=16_000,
                        task=dict(next(iter(source.tasks(0)))))  # fmt: skip
    turns = iter([call("add", a=3, b=5), call("write_file", path="said", content="8"), "done"])
    async with acting(stage, {}):
        stage.policy = lambda prompt: next(turns)
        [finish] = await stage.finished(1, seconds=120)
    assert finish.outcome is Outcome.completed, finish.reason
    failures = [failed.cause for failed in await stage.said(RewardFailed)]
    assert ([reward.value for reward in await stage.said(RewardAssigned)], failures) == ([8.0], [])
    asked = [one for one in await stage.said(ToolCallRequested) if one.tool == "mcp"]
    done = {one.call_id: one for one in await stage.said(ToolCallCompleted)}
    assert [json.loads(one.arguments)["op"] for one in asked] == ["list", "call"]
    assert json.loads(done[asked[-1].call_id].output)["content"][0]["text"] == "8"
