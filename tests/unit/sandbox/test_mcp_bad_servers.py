"""MCP servers that err: each is an outcome with a name of its own, and never a reward of 0 for a failure of theirs."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.mcp_servers.session import LIMITS, Session, outside
from tests.mcp_servers.upstream import HERE, clean_environment, environment, http_server
from turnlog.plugins.mcp import BadServer, McpServer, ToolListing, list_call
from turnlog.schemas.events import SandboxSpec, ToolCallCompleted, ToolStatus

FAKE = Path(__file__).parents[2] / "fakes/mcp_server.py"
SPEC = SandboxSpec(backend="subprocess", limits=LIMITS)


@pytest.fixture(autouse=True)
def _patience(house: Any) -> None:
    """Calls get as long as a server needs to start on a machine that is busy."""
    sandbox = dataclasses.replace(house.settings.sandbox, wall_s=60.0, cpu_s=60.0)
    house.settings = dataclasses.replace(house.settings, sandbox=sandbox)


def stdio(*how: str, **more: Any) -> McpServer:
    """The fake in a sandbox."""
    return McpServer(name="fake", command=["python3", str(FAKE), "stdio", *how], **more)


@asynccontextmanager
async def http(house: Any, *how: str, **more: Any) -> AsyncIterator[McpServer]:
    """The fake outside."""
    port = outside(house)
    async with http_server(Path(sys.executable), port, *how, program=str(FAKE)):
        yield McpServer(name="fake", url=f"http://mcp.test:{port}/mcp", **more)


async def listed(house: Any, server: McpServer, *, name: str = "s") -> ToolCallCompleted:
    """The end of the opening call of a session with this server."""
    durable = dataclasses.replace(SPEC, durable_workspace=bool(server.command))
    async with house.worker():
        return await Session(house, name, durable).call(list_call([server]))


def test_the_fake_is_a_server_to_the_reference_client() -> None:
    script = [("add", {"a": 1, "b": 2}), ("count", {}), ("count", {}), ("peek", {}), ("nobody", {})]
    command = [environment(), HERE / "client.py", "stdio", sys.executable, FAKE, "stdio"]
    done = subprocess.run(
        command, input=json.dumps(script), capture_output=True, text=True, check=False, env=clean_environment()
    )
    assert done.returncode == 0, done.stderr[-2000:]
    texts = [(said["content"][0]["text"], said["isError"]) for said in json.loads(done.stdout)["answers"]]
    assert texts == [("3", False), ("1", False), ("2", False), ("2", False), ("Unknown tool: nobody", True)]


STARTS = {
    "exits": ("mcp_start", "a module is missing"),
    "mute": ("mcp_start", "did not list its tools in 3 s"),
    "deaf": ("mcp_start", "did not list its tools in 3 s"),
    "garbage": ("mcp_protocol", "writes no JSON-RPC: 'Welcome! This is no JSON.'"),
    "old": ("mcp_protocol", "speaks '1999-01-01'; turnlog speaks 2024-11-05"),
    "strange": ("mcp_protocol", "answers tools/list with"),
    "many=10000": ("mcp_tools", "lists 10000 tools; a session may have 128 of it"),
    "endless": ("mcp_tools", "lists more than 20000 tools"),
}


@pytest.mark.parametrize("how", STARTS)
async def test_a_server_that_cannot_be_used_is_our_failure_by_name_before_the_agent_acts(house: Any, how: str) -> None:
    more = () if how == "endless" else ("pages=500",) if how.startswith("many") else ()
    within = 3.0 if how in ("mute", "deaf", "garbage") else 30.0
    done = await listed(house, stdio(how, *more, timeout_s=within))
    reason, text = STARTS[how]
    assert (done.status, done.reason) == (ToolStatus.infra_error, reason)
    assert text in done.output.decode()


async def test_a_program_that_does_not_exist_is_named(house: Any) -> None:
    done = await listed(house, McpServer(name="gone", command=["no-such-server"]))
    assert (done.status, done.reason) == (ToolStatus.infra_error, "mcp_start")
    assert b"MCP server gone cannot be started" in done.output


async def test_of_10000_tools_a_session_has_those_that_it_chooses_or_the_first_ones(house: Any) -> None:
    for choice, names in (
        ({"only": ["t77", "t999?"]}, ["t77", *(f"t999{digit}" for digit in range(10))]),
        ({"first": True, "most_tools": 3}, ["t0", "t1", "t2"]),
    ):
        server = stdio("many=10000", "pages=1000", **choice)
        done = await listed(house, server, name=names[0])
        assert done.status is ToolStatus.ok, done.output
        assert [tool.name for tool in ToolListing([server], done.output.decode()).tools] == names


async def test_a_server_that_dies_is_repeated_for_calls_that_change_nothing_alone(house: Any) -> None:
    server = stdio()
    async with house.worker():
        session = Session(house, "a")
        listing = await session.begin(server)
        done = await session.call(listing.call("die_once", {"mark": "mark"}))
        assert (done.status, json.loads(done.output)["content"][0]["text"]) == (ToolStatus.ok, "lives")
        done = await session.call(listing.call("die", {}))
        assert done.status is ToolStatus.tool_error
        assert b"ended (exit 7): last words; it did so twice under this call" in done.output
        done = await session.call(listing.call("add", {"a": 1, "b": 2}))
        assert done.status is ToolStatus.ok
        await session.call(listing.call("count", {}))
        done = await session.call(listing.call("die_once", {"mark": "another"}))  # the count is lost with the server
        assert (done.status, done.reason) == (ToolStatus.infra_error, "mcp_lost")
        session = Session(house, "b")
        listing = await session.begin(server)
        done = await session.call(listing.call("die_unsafe", {}))
        assert (done.status, done.reason) == (ToolStatus.infra_error, "mcp_lost")
        assert b"last words" in done.output
    assert [started.attempt for started in await house.starts()] == [1] * 8


async def test_a_call_that_hangs_ends_alone(house: Any) -> None:
    server = stdio(timeout_s=2.0)
    async with house.worker():
        session = Session(house, "s")
        listing = await session.begin(server)
        done = await session.call(listing.call("hang", {}))
        assert (done.status, done.reason) == (ToolStatus.timeout, "wall_s")
        assert b"did not answer in 2 s" in done.output


async def test_a_session_keeps_the_list_of_its_beginning(house: Any) -> None:
    async with house.worker():
        session = Session(house, "s")
        listing = await session.begin(stdio())
        await session.call(listing.call("change", {}))
        done = await session.call(listing.call("add", {"a": 1, "b": 2}))
    assert done.status is ToolStatus.tool_error
    assert b"Unknown tool: add" in done.output


async def test_50_mb_are_cut_to_what_a_call_may_answer_and_more_is_an_error_of_the_tool(house: Any) -> None:
    limits = dataclasses.replace(LIMITS, output_bytes=10_000)
    async with house.worker():
        session = Session(house, "s", SandboxSpec(backend="subprocess", durable_workspace=True, limits=limits))
        listing = await session.begin(stdio())
        done = await session.call(listing.call("big", {"size": 50_000_000}))
        text = json.loads(done.output)["content"][0]["text"]
        assert done.status is ToolStatus.ok
        assert 5_000 < len(done.output) <= 10_000
        assert text.endswith("characters left out: output_bytes is 10000]")
        done = await session.call(listing.call("big", {"size": 80_000_000}))
        assert (done.status, b"answered with more than" in done.output) == (ToolStatus.tool_error, True)
        assert (await session.call(listing.call("add", {"a": 1, "b": 2}))).status is ToolStatus.ok


async def test_an_answer_of_another_shape_is_the_servers_failure(house: Any) -> None:
    async with house.worker():
        session = Session(house, "s")
        done = await session.call((await session.begin(stdio())).call("strange", {}))
    assert (done.status, done.reason) == (ToolStatus.infra_error, "mcp_protocol")


HTTP = {
    "garbage": ("mcp_protocol", "sends no JSON-RPC: b'<html>"),
    "status=401": ("mcp_credential", "answers 401: not for you"),
    "status=410": ("mcp_protocol", "answers 410"),
    "status=500": ("mcp_start", "did not"),
    "mute": ("mcp_start", "did not list its tools in 3 s"),
}


@pytest.mark.parametrize("how", HTTP)
async def test_an_http_server_that_cannot_be_used_is_our_failure_by_name(house: Any, how: str) -> None:
    within = 3.0 if how in ("mute", "status=500") else 30.0
    async with http(house, how, timeout_s=within) as server:
        done = await listed(house, server)
    reason, text = HTTP[how]
    assert (done.status, done.reason) == (ToolStatus.infra_error, reason), done.output
    assert text in done.output.decode()


async def test_an_address_that_no_rule_grants_is_refused_by_name(house: Any) -> None:
    outside(house)
    done = await listed(house, McpServer(name="far", url="http://other.test/mcp"))
    assert (done.status, done.reason) == (ToolStatus.infra_error, "mcp_start")
    assert b"[egress] allow" in done.output


async def test_credentials_stay_with_the_worker(house: Any, tmp_path: Path) -> None:
    async with http(house, "stateless") as server:
        secret = tmp_path / "credentials.toml"
        secret.write_text(f'["{server.url}"]\nAuthorization = "Bearer a-secret-of-the-worker"\n')
        egress = dataclasses.replace(house.settings.egress, credentials_file=str(secret))
        house.settings = dataclasses.replace(house.settings, egress=egress)
        async with house.worker():
            session = Session(house, "s", SPEC)
            listing = await session.begin(server)
            done = await session.call(listing.call("environment", {"name": "Authorization"}))
    assert json.loads(done.output)["content"][0]["text"] == "[credential]"


@asynccontextmanager
async def two_workers(
    house: Any, server: McpServer, before: Callable[[Session, ToolListing], Any]
) -> AsyncIterator[Any]:
    """A session whose worker is gone after its first calls, and that the next worker continues."""
    session = Session(house, "s", dataclasses.replace(SPEC, durable_workspace=bool(server.command)))
    async with house.worker(instance="A"):
        listing = await session.begin(server)
        await before(session, listing)
    async with house.worker(instance="B"):
        yield session, listing


async def nothing(session: Session, listing: ToolListing) -> None:
    """No call."""


async def counted(session: Session, listing: ToolListing) -> None:
    """A call that is not safe."""
    await session.call(listing.call("count", {}))


async def test_another_worker_begins_anew_with_a_server_in_which_nothing_was_changed(house: Any) -> None:
    async with two_workers(house, stdio(), nothing) as (session, listing):
        done = await session.call(listing.call("add", {"a": 1, "b": 2}))
    assert done.status is ToolStatus.ok, done


async def test_a_server_that_was_changed_is_lost_with_its_worker(house: Any) -> None:
    async with two_workers(house, stdio(), counted) as (session, listing):
        done = await session.call(listing.call("peek", {}))
    assert (done.status, done.reason) == (ToolStatus.infra_error, "interpreter_lost")


@pytest.mark.parametrize("touched", [False, True])
async def test_a_session_over_http_that_was_changed_is_lost_with_its_worker(house: Any, touched: bool) -> None:
    async with http(house) as server, two_workers(house, server, counted if touched else nothing) as (session, listing):
        call = listing.call("peek", {})
        call.arguments["touched"] = touched
        done = await session.call(call)
    assert (done.status, done.reason) == ((ToolStatus.infra_error, "mcp_lost") if touched else (ToolStatus.ok, ""))


async def test_a_server_without_sessions_is_never_lost(house: Any) -> None:
    async with http(house, "stateless") as server, two_workers(house, server, counted) as (session, listing):
        assert (await session.call(listing.call("count", {}))).status is ToolStatus.ok


@pytest.mark.parametrize("name", ["add", "count"])
async def test_a_call_whose_worker_died_runs_again_if_it_is_safe_alone(house: Any, name: str) -> None:
    async with http(house) as server:
        session = Session(house, "s", SPEC)
        async with house.worker():
            listing = await session.begin(server)
            call = listing.call(name, {"a": 1, "b": 2} if name == "add" else {})
            await house.ask(house.started("s-1", 1))  # as the worker that died had written
        call.arguments["touched"] = False
        async with house.worker(instance="B"):
            done = await session.call(call)
    if name == "add":
        assert (done.status, done.attempt) == (ToolStatus.ok, 2)
    else:
        assert (done.status, done.reason) == (ToolStatus.infra_error, "not_repeated")


async def test_a_server_that_is_restarted_is_found_again(house: Any) -> None:
    port = outside(house)
    server = McpServer(name="fake", url=f"http://mcp.test:{port}/mcp")
    async with house.worker():
        session = Session(house, "s", SPEC)
        async with http_server(Path(sys.executable), port, program=str(FAKE)):
            listing = await session.begin(server)
        asking = asyncio.create_task(session.call(listing.call("add", {"a": 1, "b": 2})))
        async with http_server(Path(sys.executable), port, program=str(FAKE)):
            assert (await asking).status is ToolStatus.ok
            await session.call(listing.call("count", {}))
        async with http_server(Path(sys.executable), port, program=str(FAKE)):
            done = await session.call(listing.call("peek", {}))
    assert (done.status, done.reason) == (ToolStatus.infra_error, "mcp_lost")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"name": "a b", "command": ["x"]}, "a name has"),
        ({"name": "a"}, "either a command or a url"),
        ({"name": "a", "command": ["x"], "url": "http://x"}, "either a command or a url"),
        ({"name": "a", "url": "ftp://x"}, "begins with"),
        ({"name": "a", "command": "npx server"}, "list of words"),
    ],
)
def test_a_server_that_is_described_badly_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(BadServer, match=said):
        McpServer(**given)


async def test_a_server_with_a_command_needs_a_workspace_that_lasts(house: Any) -> None:
    async with house.worker():
        done = await Session(house, "s", SPEC).call(list_call([stdio()]))
    assert (done.status, done.reason) == (ToolStatus.refused, "arguments")
    assert b"durable_workspace" in done.output
