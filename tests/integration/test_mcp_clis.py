"""Agent CLIs from npm with an MCP server: their calls go through the worker's proxy, and are on the log."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from tests.agent_clis import IMAGES, PACKAGES, program
from tests.integration.test_cli_agents import CLIS, LIMITS, ROOM, calc_model, lines  # noqa: F401
from tests.integration.test_command_agents import offered, outcomes, stage, working  # noqa: F401
from tests.integration.test_mcp_agents import call, reference
from turnlog.environments import CommandAgent
from turnlog.plugins.mcp import mcp_config
from turnlog.schemas.events import Boundary, Outcome, SandboxSpec, ToolCallCompleted, ToolCallRequested

pytestmark = pytest.mark.long
TOOLS = {"claude-code": "mcp__ref__count", "codex": "mcp__ref__count", "opencode": "ref_count"}
"""Name that a CLI gives to the tool `count` of the server `ref`."""


@pytest.mark.parametrize("name", TOOLS)
async def test_a_cli_calls_a_server_through_the_workers_proxy(stage: Any, offered: Any, name: str) -> None:  # noqa: F811
    cli, recipe, inside = CLIS[name], offered.a, f"/opt/{name}/node_modules/.bin"

    def policy(prompt: str) -> str:
        _, *answers = prompt.split("<|im_start|>assistant")
        return call(TOOLS[name], name="cli") if len(answers) == 1 else "Done."

    async with reference(stage) as server:
        config = mcp_config(name, [server])
        *first, task = cli.argv if name != "claude-code" else (*cli.argv[:1], *cli.argv[2:], cli.argv[1])
        argv = [*first, *config.argv, task] if name != "claude-code" else [first[0], task, *first[1:], *config.argv]
        recipe.agent = CommandAgent(
            name=name, version=PACKAGES[name][1], argv=(f"{inside}/{program(name).name}", *argv), mcp=config.servers,
            env={"HOME": "/tmp", "PATH": f"{inside}:/usr/bin:/bin", **cli.env, **config.env}, files=config.files,
        )  # fmt: skip
        recipe.sandbox = SandboxSpec(image="cli", limits=LIMITS)
        stage.policy, stage.engine.context = policy, ROOM
        engine = dataclasses.replace(stage.settings.engine, context=ROOM)
        stage.settings = dataclasses.replace(stage.settings, engine=engine)
        await stage.request(recipe="a", new_tokens=2000, max_turns=30, max_context_tokens=ROOM, deadline_s=120.0)
        limits = {limit: getattr(LIMITS, limit) for limit in ("memory_bytes", "pids", "disk_bytes")}
        async with working(stage, image_folder=str(IMAGES), **limits), stage.gateway(), stage.running():
            [(outcome, _, reason)] = await outcomes(stage, 1)
    done = {one.call_id: one for one in await stage.said(ToolCallCompleted)}
    proxied = [one for one in await stage.said(ToolCallRequested) if one.caller]
    said = [(json.loads(one.arguments).get("tool"), done[one.call_id].output[:60]) for one in proxied]
    assert outcome is Outcome.completed, (reason, [one.output[-2000:] for one in done.values()])
    assert [tool for tool, _ in said] == [None, "count"], [one.output[-3000:] for one in done.values()]
    assert b"cli is 1" in said[1][1]
    assert await lines(stage) == {"main": [Boundary.root, Boundary.append]}
