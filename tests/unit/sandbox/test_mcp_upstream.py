"""The tool `mcp` and servers of the reference implementation: the same tools and answers as its own client gets."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.mcp_servers.session import LIMITS, Session, outside
from tests.mcp_servers.upstream import HERE, clean_environment, environment, http_server
from turnlog.plugins.mcp import McpServer, content_of
from turnlog.plugins.mcp.driver import KEPT
from turnlog.schemas.events import SandboxSpec, ToolStatus

SCRIPT: list[tuple[str, dict[str, Any]]] = [
    *(("add", {"a": number, "b": 2 * number}) for number in range(5)),
    *(("count", {"name": name}) for name in ("x", "y", "x", "x")),
    ("peek", {"name": "x"}),
    ("put", {"name": "x", "value": 40}),
    ("count", {"name": "x"}),
    ("peek", {"name": "x"}),
    ("peek", {"name": "nobody"}),
    ("fail", {"text": "as told"}),
    ("add", {"a": "no number"}),
    ("add", {}),
    ("picture", {}),
    ("header", {"name": 'é"\n' * 20}),
    ("no such tool", {}),
]
assert len(SCRIPT) == 20
PYTHON = "python{}.{}".format(*sys.version_info)


@pytest.fixture(scope="session")
def python() -> Path:
    """The interpreter that has the package."""
    return environment()


def reference(python: Path, script: Sequence[Any], *arguments: str) -> dict[str, Any]:
    """What the reference client gets."""
    command = [python, HERE / "client.py", *arguments]
    done = subprocess.run(
        command, input=json.dumps(script), capture_output=True, text=True, check=False, env=clean_environment()
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def by_stdio(python: Path) -> McpServer:
    """The reference server in a sandbox, whose user may read the package and runs an interpreter of its own."""
    packages = python.parents[1] / f"lib/{PYTHON}/site-packages"
    return McpServer(name="ref", command=[PYTHON, str(HERE / "server.py"), "stdio"], env={"PYTHONPATH": str(packages)})


@pytest.fixture(autouse=True)
def _patience(house: Any) -> None:
    """Calls get as long as a server needs to start on a machine that is busy."""
    sandbox = dataclasses.replace(house.settings.sandbox, wall_s=60.0, cpu_s=60.0)
    house.settings = dataclasses.replace(house.settings, sandbox=sandbox)


async def play(session: Session, server: McpServer, script: Sequence[tuple[str, dict[str, Any]]]) -> list[Any]:
    """The answers to a script; a tool that is not listed is called as if it were."""
    listing = await session.begin(server)
    listed = {tool.name for tool in listing.tools}
    answers = []
    for name, arguments in script:
        call = listing.call(name if name in listed else "count", arguments)
        call.arguments["tool"] = name
        done = await session.call(call)
        answers.append((done.status, json.loads(done.output)))
    return answers


def same(answers: Sequence[Any], expected: dict[str, Any]) -> None:
    """Status, content and isError as the reference client got them."""
    for (status, mine), theirs, (name, _) in zip(answers, expected["answers"], SCRIPT, strict=True):
        assert mine == {"content": theirs["content"], "isError": theirs["isError"]}, name
        assert status is (ToolStatus.tool_error if theirs["isError"] else ToolStatus.ok)


async def test_20_calls_by_stdio_are_answered_as_those_of_the_reference_client(house: Any, python: Path) -> None:
    expected = await asyncio.to_thread(
        reference, python, SCRIPT, "stdio", str(python), str(HERE / "server.py"), "stdio"
    )
    server = by_stdio(python)
    async with house.worker():
        session = Session(house, "s")
        same(await play(session, server, SCRIPT), expected)
        again = await Session(house, "t").begin(server)
    assert [dict(tool.tool) for tool in again.tools] == [
        {key: tool[key] for key in KEPT if key in tool} for tool in expected["tools"]
    ]
    assert again.instructions == {"ref": "Count and add."}
    classes = {tool.name: tool.server.class_of(tool.tool) for tool in again.tools}
    assert (classes["add"], classes["put"], classes["count"]) == ("read_only", "idempotent", "unsafe")


@pytest.fixture
async def server(house: Any, python: Path, request: pytest.FixtureRequest) -> AsyncIterator[McpServer]:
    """A server that the worker may reach."""
    port = outside(house)
    async with http_server(python, port, *getattr(request, "param", ())):
        yield McpServer(name="ref", url=f"http://mcp.test:{port}/mcp")


@pytest.mark.parametrize("server", [(), ("json",), ("stateless",)], indirect=True)
async def test_20_calls_by_http_are_answered_as_those_of_the_reference_client(
    house: Any, python: Path, server: McpServer
) -> None:
    address = server.url.replace("mcp.test", "127.0.0.1")
    async with house.worker():
        session = Session(house, "s", SandboxSpec(backend="subprocess", limits=LIMITS))
        answers = await play(session, server, SCRIPT)
    resets = [("put", {"name": name, "value": 0}) for name in "xy"]
    expected = await asyncio.to_thread(reference, python, [*resets, *SCRIPT], "http", address)
    same(answers, {"answers": expected["answers"][2:]})
    assert {started.environment_sha256 for started in await house.starts()} == {
        (await house.starts())[0].environment_sha256
    }


async def test_a_picture_becomes_a_content_block_of_openai_where_the_model_takes_images(
    house: Any, python: Path
) -> None:
    server = by_stdio(python)
    async with house.worker():
        session = Session(house, "s")
        output = (await session.call((await session.begin(server)).call("picture", {}))).output.decode()
    text, image = content_of(output, images=True)
    assert text == {"type": "text", "text": "a dot"}
    assert image["image_url"]["url"].startswith("data:image/png;base64,iVBOR")  # type: ignore[index]
    assert content_of(output) == "a dot\n[image image/png, 70 bytes]"
