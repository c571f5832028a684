"""Tools of MCP servers as a model sees them, and the configuration of programs: pure functions of what was recorded."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from turnlog.environments import FunctionVerifier, Recipe, SandboxAnswer, SandboxCall, Task, Verdict, tool_declarations
from turnlog.plugins.mcp import BadServer, McpServer, ToolListing, content_of, list_call, mcp_config, with_servers
from turnlog.plugins.mcp.driver import fit_content
from turnlog.plugins.mcp.harnesses import HARNESSES

WEB = McpServer(name="web", url="https://web.example/mcp", classes={"post": "idempotent"})
FILES = McpServer(name="files", command=["server", "--root", "."], env={"LEVEL": "2"})


def recorded(**tools: list[Any]) -> str:
    """The answer of an opening call: names of tools by server."""
    servers = [
        {"name": server, "tools": [one if isinstance(one, dict) else {"name": one, "inputSchema": {}} for one in names]}
        for server, names in tools.items()
    ]
    return json.dumps({"servers": servers})


def names(output: str, *servers: McpServer) -> list[str]:
    """Names for the model."""
    return [tool.name for tool in ToolListing(servers, output).tools]


def test_tools_have_their_own_names_and_those_of_two_servers_a_prefix() -> None:
    output = recorded(web=["read", "find"], files=["read", "write"])
    assert names(output, WEB, FILES) == ["web__read", "find", "files__read", "write"]


def test_names_that_no_function_may_have_are_replaced_and_stay_apart() -> None:
    output = recorded(web=["a.b", "a/b", "x" * 200, "ok"])
    first, second, long, plain = names(output, WEB)
    assert (first[:8], second[:8], plain) == ("web__a_b", "web__a_b", "ok")
    assert len({first, second, long}) == 3
    assert max(map(len, (first, second, long))) <= 64


def test_a_call_names_the_servers_own_tool_and_its_class() -> None:
    read = {"name": "a.b", "inputSchema": {"type": "object"}, "annotations": {"readOnlyHint": True}}
    listing = ToolListing([WEB], recorded(web=[read, "post", "delete"]))
    call = listing.tool_call("a_b", '{"x": 1}')
    assert isinstance(call, SandboxCall)
    assert (call.arguments["tool"], call.arguments["class"], call.arguments["arguments"]) == (
        "a.b",
        "read_only",
        {"x": 1},
    )
    classes = [listing.call(name, {}).arguments["class"] for name in ("post", "delete")]
    assert classes == ["idempotent", "unsafe"]
    assert listing.tool_call("nobody", "{}") == "there is no tool 'nobody'"
    assert listing.tool_call("post", "[]") == "the arguments are no JSON object"


@pytest.mark.parametrize("output", ["", "{}", '{"servers": []}', '{"servers": [{"name": "web"}]}', "[1"])
def test_a_record_that_is_none_is_named(output: str) -> None:
    with pytest.raises(BadServer, match="no list of tools"):
        ToolListing([WEB], output)


def a_task(**more: Any) -> Task:
    """A task with a tool of its own."""

    class Plain(Recipe):
        name = "plain"
        verifier = FunctionVerifier("v", "1", lambda _: Verdict(0.0))
        tools = tool_declarations(["shell"])

    return dataclasses.replace(Plain().task({"prompt": "Begin."}), **more)


def test_a_task_keeps_its_own_tools_beside_those_of_servers() -> None:
    task = with_servers(a_task(), [FILES])
    assert task.sandbox.durable_workspace
    assert task.sandbox_tools == ("shell", "mcp")
    assert task.opened is not None
    opening = task.opened(SandboxAnswer(True, recorded(files=["read"])))
    assert [tool["function"]["name"] for tool in opening.tools] == ["read"]
    assert opening.tool_call is not None
    assert opening.tool_call("shell", '{"command": "ls"}') == SandboxCall("shell", {"command": "ls"})
    read = opening.tool_call("read", "{}")
    assert isinstance(read, SandboxCall)
    said = json.dumps({"content": [{"type": "text", "text": "found"}], "isError": False})
    assert task.observe(read, SandboxAnswer(True, said)).content == "found"
    assert task.observe(SandboxCall("shell", {}), SandboxAnswer(True, said)).content == said


def test_what_cannot_stand_together_is_refused() -> None:
    with pytest.raises(BadServer, match="opening call of its own"):
        with_servers(a_task(opening=SandboxCall("env_step", {})), [WEB])
    task = with_servers(a_task(), [WEB])
    assert task.opened is not None
    with pytest.raises(BadServer, match="both have a tool 'shell'"):
        task.opened(SandboxAnswer(True, recorded(web=["shell"])))
    with pytest.raises(BadServer, match="two MCP servers have the name 'web'"):
        list_call([WEB, WEB])


def test_blocks_become_text_or_blocks_of_openai() -> None:
    blocks = [
        {"type": "text", "text": "a"},
        {"type": "audio", "mimeType": "audio/wav", "data": "AAAA"},
        {"type": "resource", "resource": {"uri": "file:///x", "text": "inside"}},
        {"type": "resource", "resource": {"uri": "file:///y", "mimeType": "x/y", "blob": "AAAA"}},
        {"type": "resource_link", "name": "n", "uri": "file:///z"},
        {"type": "new", "data": 7},
    ]
    assert content_of(json.dumps({"content": blocks})) == (
        "a\n[audio audio/wav, 3 bytes]\ninside\n[resource file:///y x/y, 3 bytes]\n[n: file:///z]\n[new ]"
    )
    assert content_of("MCP server x did not answer in 30 s\n") == "MCP server x did not answer in 30 s\n"


def test_content_is_cut_to_its_room_and_says_so() -> None:
    blocks = [
        {"type": "text", "text": "a"},
        {"type": "text", "text": "é\n" * 5000},
        {"type": "image", "data": "A" * 99},
    ]
    cut = fit_content(blocks, 4000)
    assert [block["type"] for block in cut] == ["text"] * 3
    assert cut[1]["text"].endswith("characters left out: output_bytes is 4000]")
    assert cut[2]["text"] == "[1 more parts left out]"
    assert len(json.dumps(cut, ensure_ascii=False).encode()) <= 4000
    (only,) = fit_content([{"type": "image", "data": "A" * 9999}], 4000)
    assert only["text"].startswith("[image of ")


@pytest.mark.parametrize("harness", HARNESSES)
def test_every_harness_finds_its_servers_at_the_proxy_and_never_elsewhere(harness: str) -> None:
    config = mcp_config(harness, [WEB, FILES])
    written = " ".join([*config.argv, *config.files.values()])
    assert "http://127.0.0.1:3128/mcp/web" in written
    assert ".turnlog/mcp_shim.py" in config.files
    assert "web.example" not in written
    assert [server["name"] for server in config.servers] == ["web", "files"]
    assert ".turnlog/mcp_shim.py" not in mcp_config(harness, [WEB]).files


def test_a_harness_that_nobody_knows_is_named() -> None:
    with pytest.raises(BadServer, match="no MCP configuration for harness 'vim'"):
        mcp_config("vim", [WEB])
