"""MCP servers in sessions of every kind of agent, at the real gateway: each call of them is on the log."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.fakes.offers import offering
from tests.integration.conftest import Stage
from tests.integration.test_command_agents import ASKS, offered, outcomes, stage, until, working  # noqa: F401
from tests.mcp_servers.upstream import environment, http_server
from turnlog.environments import AgentSession, Episode, FunctionAgent, FunctionVerifier, Recipe, Verdict
from turnlog.infra.embedded.ports import free_ports
from turnlog.plugins.mcp import McpRecipe, McpServer, mcp_config
from turnlog.sandbox_settings import EgressSettings
from turnlog.schemas.events import (
    Outcome,
    RewardAssigned,
    SandboxLimits,
    SandboxSpec,
    SessionStarted,
    ToolCallCancelled,
    ToolCallCompleted,
    ToolCallRequested,
    ToolStatus,
    TurnCompleted,
)

FAKE = Path(__file__).parents[1] / "fakes/mcp_server.py"


@asynccontextmanager
async def reference(stage: Stage, *how: str) -> AsyncIterator[McpServer]:  # noqa: F811
    """A server outside, which workers may reach."""
    (port,) = free_ports(1)
    egress = EgressSettings(allow=(f"* http://127.0.0.1:{port}/mcp",), private_hosts=(f"127.0.0.1:{port}",))
    stage.settings = dataclasses.replace(stage.settings, egress=egress)
    python, program = (Path(sys.executable), str(FAKE)) if how else (environment(), "server.py")
    async with http_server(python, port, *how, program=program):
        yield McpServer(name="ref", url=f"http://127.0.0.1:{port}/mcp")


class Asked(McpRecipe):
    """A recipe whose model has the servers' tools."""

    name = "asked"
    sandbox = SandboxSpec(limits=SandboxLimits(output_bytes=4096))
    verifier = FunctionVerifier("last", "1", lambda episode: Verdict(float(episode.messages[-1]["content"] == "8")))

    def __init__(self, *servers: McpServer) -> None:
        self.servers = servers


OFFERED: Any = type("Offered", (), {})()


@pytest.fixture
def bring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have a package offer a recipe."""
    with offering(tmp_path, monkeypatch, "bringing", {"asked": f"{__name__}:OFFERED.recipe"}):

        def brought(recipe: Recipe) -> None:
            OFFERED.recipe = recipe

        yield brought


def call(name: str, /, **arguments: Any) -> str:
    """A tool call as the model writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def calls(stage: Stage) -> list[tuple[Any, ...]]:  # noqa: F811
    """Each call: caller, operation, tool, class; status and text of its answer."""
    done = {one.call_id: one for one in await stage.said(ToolCallCompleted)}
    found = []
    for request in await stage.said(ToolCallRequested):
        given = json.loads(request.arguments)
        answer = done[request.call_id]
        assert answer.caller == request.caller
        about = json.loads(answer.output)
        text = about["content"][0]["text"] if "content" in about else about["servers"][0]["tools"][0]["name"]
        found.append((request.caller, given["op"], given.get("tool"), given.get("class"), answer.status.value, text))
    return found


async def test_a_model_calls_the_tools_of_a_server_by_calls_on_the_log(stage: Stage, bring: Any) -> None:  # noqa: F811
    turns = iter([call("add", a=3, b=5), call("count", name="y"), call("peek", name="y"), "8"])
    stage.policy = lambda prompt: next(turns)
    async with reference(stage) as server, working(stage), stage.gateway(), stage.running():
        bring(Asked(server))
        await stage.request(recipe="asked", new_tokens=200, max_context_tokens=8000, deadline_s=60.0)
        assert await outcomes(stage, 1) == [(Outcome.completed, True, "")]
        await until(stage, ToolCallCancelled)
    [reward] = await stage.said(RewardAssigned)
    assert reward.value == 1.0
    assert await calls(stage) == [
        ("", "list", None, None, "ok", "add"),
        ("", "call", "add", "read_only", "ok", "8"),
        ("", "call", "count", "unsafe", "ok", "y is 1"),
        ("", "call", "peek", "read_only", "ok", '{\n  "count": 1\n}'),
    ]
    touched = [json.loads(one.arguments).get("touched") for one in await stage.said(ToolCallRequested)]
    assert touched == [None, False, False, True], "the runner tells what a new session with the server would lack"
    [over] = await stage.said(ToolCallCancelled)
    assert over.reason == "session_over"
    [started] = await stage.said(SessionStarted)
    assert started.environment.tools["mcp"] == "1"
    assert len(await stage.said(TurnCompleted)) == 4


async def test_a_function_has_the_listed_tools_and_maps_its_calls(stage: Stage, bring: Any) -> None:  # noqa: F811
    async def act(session: AgentSession) -> None:
        assert "add" in [tool["function"]["name"] for tool in session.tools]
        mapped = session.tool_call("add", '{"a": 3, "b": 5}')
        assert not isinstance(mapped, str)
        answer = await session.call(mapped)
        assert json.loads(answer.output)["content"][0]["text"] == "8"
        assert session.tool_call("nothing", "{}") == "there is no tool 'nothing'"
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as client:
            await client.chat.completions.create(
                model=session.model, messages=list(session.messages), tools=list(session.tools)
            )  # type: ignore[arg-type, misc]

    stage.policy = lambda prompt: "8"
    async with reference(stage) as server, working(stage), stage.gateway(), stage.running():
        recipe = Asked(server)
        recipe.agent = FunctionAgent("mine", "1", act)  # type: ignore[attr-defined]
        bring(recipe)
        await stage.request(recipe="asked", new_tokens=200, max_context_tokens=8000, deadline_s=60.0)
        assert await outcomes(stage, 1) == [(Outcome.completed, True, "")]
    assert [one[1:] for one in await calls(stage)] == [
        ("list", None, None, "ok", "add"),
        ("call", "add", "read_only", "ok", "8"),
    ]


SPEAKS = (
    ASKS
    + """\
config = json.load(open(".mcp.json"))["mcpServers"]["ref"]
def post(url, message, opener=urllib.request.build_opener(urllib.request.ProxyHandler({}))):
    headers = {"content-type": "application/json", "accept": "application/json, text/event-stream"}
    body = json.dumps({"jsonrpc": "2.0", **message}).encode()
    with opener.open(urllib.request.Request(url, body, headers)) as answer:
        return json.loads(answer.read() or b"null")
if "url" in config:
    def say(message):
        return post(config["url"], message)
else:
    import subprocess
    shim = subprocess.Popen([config["command"], *config["args"]], stdin=-1, stdout=-1)
    def say(message):
        shim.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\\n")
        shim.stdin.flush()
        return json.loads(shim.stdout.readline()) if "id" in message else None
hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "me", "version": "1"}}
said = [say({"id": 1, "method": "initialize", "params": hello}), say({"method": "notifications/initialized"})]
said.append(say({"id": 2, "method": "tools/list"}))
for number, (name, given) in enumerate(json.loads(sys.argv[1])):
    said.append(say({"id": 3 + number, "method": "tools/call", "params": {"name": name, "arguments": given}}))
print(json.dumps(said))
ask()
"""
)


def spoken(episode: Episode) -> list[Any]:
    """What the program heard."""
    assert episode.ended is not None
    return json.loads(episode.ended.output)  # type: ignore[no-any-return]


async def program(stage: Stage, offered: Any, server: McpServer, *script: tuple[str, dict[str, Any]]) -> list[Any]:  # noqa: F811
    """Have a program speak to the server; the endings of its sessions."""
    config = mcp_config("mcp.json", [server])
    recipe = offered.a.runs(SPEAKS, json.dumps(script), mcp=config.servers)
    recipe.agent = dataclasses.replace(recipe.agent, files={**recipe.agent.files, **config.files})
    recipe.sandbox = SandboxSpec(limits=SandboxLimits(output_bytes=65536))
    stage.policy = lambda prompt: "done"
    await stage.request(recipe="a", max_context_tokens=8000, deadline_s=60.0)
    async with working(stage), stage.gateway(), stage.running():
        return await outcomes(stage, 1)


SCRIPT = (("add", {"a": 3, "b": 5}), ("count", {"name": "z"}), ("fail", {"text": "oh"}), ("nobody", {}))


async def test_a_program_calls_a_server_outside_through_the_workers_proxy(stage: Stage, offered: Any) -> None:  # noqa: F811
    async with reference(stage) as server:
        assert await program(stage, offered, server, *SCRIPT) == [(Outcome.completed, True, "")]
    [episode] = offered.a.judged
    hello, _, listed, add, count, fail, nobody = spoken(episode)
    assert hello["result"]["protocolVersion"] == "2025-06-18"
    assert hello["result"]["instructions"] == "Count and add."
    assert [tool["name"] for tool in listed["result"]["tools"]][:3] == ["add", "put", "count"]
    assert [one["result"]["content"][0]["text"] for one in (add, count)] == ["8", "z is 1"]
    assert fail["result"]["isError"]
    assert nobody["error"]["message"] == "there is no tool 'nobody'"
    own = [one for one in await stage.said(ToolCallRequested) if not one.caller]
    assert [one.tool for one in own] == ["agent"]
    proxied = [one for one in await stage.said(ToolCallRequested) if one.caller]
    done = {one.call_id: one for one in await stage.said(ToolCallCompleted)}
    assert [(json.loads(one.arguments).get("tool"), json.loads(one.arguments).get("class")) for one in proxied] == [
        (None, None), ("add", "read_only"), ("count", "unsafe"), ("fail", "unsafe"),
    ]  # fmt: skip
    assert {one.caller for one in proxied} == {"mcp_proxy"}
    assert [done[one.call_id].status for one in proxied] == [ToolStatus.ok] * 3 + [ToolStatus.tool_error]
    assert len(done) == len(proxied) + 1, "the worker does not run again what it has run"
    assert server.url.encode() not in json.dumps(spoken(episode)).encode()


async def test_a_program_calls_a_server_in_its_sandbox_through_a_stand_in_that_reports(
    stage: Stage,  # noqa: F811
    offered: Any,  # noqa: F811
) -> None:
    server = McpServer(name="ref", command=["python3", "server.py", "stdio"])
    script = (("add", {"a": 3, "b": 5}), ("count", {}))
    config = mcp_config("mcp.json", [server])
    recipe = offered.a.runs(SPEAKS, json.dumps(script), mcp=config.servers)
    files = {**recipe.agent.files, **config.files, "server.py": FAKE.read_text()}
    recipe.agent = dataclasses.replace(recipe.agent, files=files)
    recipe.sandbox = SandboxSpec(limits=SandboxLimits(output_bytes=65536))
    stage.policy = lambda prompt: "done"
    await stage.request(recipe="a", max_context_tokens=8000, deadline_s=60.0)
    async with working(stage), stage.gateway(), stage.running():
        assert await outcomes(stage, 1) == [(Outcome.completed, True, "")]
    assert [one["result"]["content"][0]["text"] for one in spoken(offered.a.judged[0])[3:]] == ["8", "1"]
    done = {one.call_id: one for one in await stage.said(ToolCallCompleted)}
    proxied = [one for one in await stage.said(ToolCallRequested) if one.caller]
    assert [(json.loads(one.arguments)["op"], json.loads(one.arguments).get("class")) for one in proxied] == [
        ("list", None), ("call", "read_only"), ("call", "unsafe"),
    ]  # fmt: skip
    assert [json.loads(done[one.call_id].output)["content"][0]["text"] for one in proxied[1:]] == ["8", "1"]


async def test_a_server_that_fails_under_a_program_is_never_the_programs_failure(stage: Stage, offered: Any) -> None:  # noqa: F811
    async with reference(stage, "stateless") as server:
        stage.settings = dataclasses.replace(
            stage.settings, runner=dataclasses.replace(stage.settings.runner, max_attempts=1)
        )
        [(outcome, final, reason)] = await program(stage, offered, server, ("die_unsafe", {}))
    assert (outcome, final) == (Outcome.infra_failure, True)
    assert "mcp_lost" in reason
    assert await stage.said(RewardAssigned) == []
