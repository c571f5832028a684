"""Claude Code itself at the gateway: what it sends back continues the turns that it was given, token for token."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.agent_clis import program
from tests.unit.gateway.conftest import model_in, settings_of
from tests.unit.gateway.test_anthropic_messages import THINKS, boundaries, unsigned
from tests.unit.gateway.test_gateway_retries import until
from turnlog.producers.gateway.errors import ERRORS
from turnlog.schemas.events import Boundary
from turnlog.settings import Settings

pytestmark = pytest.mark.long

ROOM = 100_000
"""Tokens; most are its system text and tools."""
OPENED = {"sampling": {"temperature": 1.0, "max_new_tokens": 2000}, "limits": {"max_context_tokens": ROOM}}


@pytest.fixture(scope="session")
def command() -> Path:
    """Claude Code, installed once."""
    return program("claude-code")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe's, with room for what Claude Code says of itself, and reasoning."""
    return model_in(tmp_path_factory.mktemp("model"), ROOM, THINKS)


@pytest.fixture
def settings(tmp_path: Path, model_folder: Path) -> Settings:
    """A window that holds it."""
    return settings_of(model_folder, tmp_path, context=ROOM)


@pytest.fixture
def run(rig: Any, command: Path, tmp_path: Path) -> Callable[..., Any]:
    """Runs Claude Code on a task in an empty folder, which is `tmp_path / "work"`, and gives what it said last."""
    work = tmp_path / "work"
    work.mkdir()

    async def run(session: Any, task: str, *options: str) -> str:
        environment = {
            "HOME": str(tmp_path), "PATH": os.environ["PATH"], "IS_SANDBOX": "1", "DISABLE_AUTOUPDATER": "1",
            "ANTHROPIC_BASE_URL": rig.url, "ANTHROPIC_AUTH_TOKEN": session["token"], "ANTHROPIC_MODEL": "policy",
            "ANTHROPIC_API_KEY": session["token"] if "--bare" in options else "",
        }  # fmt: skip
        always = ("--permission-mode", "bypassPermissions", "--strict-mcp-config", "--output-format", "json")
        process = await asyncio.create_subprocess_exec(
            command, "-p", task, *always, *options, env=environment, cwd=work,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            said, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == 0, said.decode()
        return str(json.loads(said)["result"])

    return run


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def shell(line: str) -> str:
    return called("Bash", command=line, timeout=5000.0)


def files(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


APPEND = (Boundary.append, "append")


@pytest.mark.parametrize("options", [(), ("--tools", "Bash,Read,Write,Edit"), ("--bare",)])
async def test_parallel_calls_and_thoughts_go_on_where_they_ended(
    rig: Any, run: Callable[..., Any], tmp_path: Path, options: tuple[str, ...]
) -> None:
    session, before = await rig.open(**OPENED), unsigned()
    rig.script.says(f"<think>two\n\ncalls </think>\n\nso: {shell('printf a >> a; echo a')}{shell('printf b >> b')}")
    rig.script.says(f"<think>once more</think>{shell('printf a >> a')}{shell('cat a')}")
    rig.script.says("<think>enough</think>Done: both are written. ")
    assert (await run(session, "Create files", *options)).strip() == "Done: both are written."
    assert files(tmp_path / "work") == {"a": "aa", "b": "b"}
    assert await boundaries(rig) == [(Boundary.root, "first"), APPEND, APPEND]
    assert {turn.agent_path for turn in await rig.written("TurnCompleted")} == {"main"}
    assert unsigned() == before


@pytest.mark.parametrize("background", [False, True])
async def test_a_sub_agent_has_a_line_of_its_own_beside_its_parents(
    rig: Any, run: Callable[..., Any], tmp_path: Path, background: bool
) -> None:
    session, tokens = await rig.open(**OPENED), rig.tokens
    task = {"description": "write", "prompt": "CHILD: write it", "subagent_type": "claude"}

    def policy(prompt: list[int]) -> list[int]:
        _, *answers = tokens.literal(prompt).split("<|im_start|>assistant")
        if "PARENT: delegate it" in tokens.literal(prompt):
            said = "all done" if len(answers) > 1 else called("Agent", **task, run_in_background=background)
        else:
            said = "written" if len(answers) > 1 else shell("printf c >> c")
        return [*tokens.encode(f"<think>hm</think>{said}"), 2]

    rig.engines["e0"].script = policy
    assert await run(session, "PARENT: delegate it") == "all done"
    assert files(tmp_path / "work") == {"c": "c"}
    turns = {turn.turn: turn for turn in await rig.written("TurnCompleted")}
    lines: dict[str, list[Boundary]] = {}
    for one in await rig.written("TokenSnapshot"):
        lines.setdefault(str(turns[one.turn].agent_path), []).append(one.boundary)
    [main, child] = sorted(lines, reverse=True)
    assert (main, child.partition("/")[0]) == ("main", "agent")
    assert lines[child] == [Boundary.root, Boundary.append]
    assert lines[main] == [Boundary.root, *[Boundary.append] * (2 if background else 1)]


async def test_a_failure_is_repeated_until_it_is_none(rig: Any, run: Callable[..., Any]) -> None:
    session, engine, failed = await rig.open(**OPENED), rig.engines["e0"], ERRORS.labels("engine_failed")._value
    before, engine.context = failed.get(), 1  # it refuses every prompt
    asked = asyncio.create_task(run(session, "Say it"))
    await until(lambda: asked.done() or failed.get() > before)
    engine.context = ROOM
    rig.script.says("it")
    assert await asked == "it"
    assert await boundaries(rig) == [(Boundary.root, "first")]


async def test_an_overflow_is_answered_by_a_compaction(rig: Any, run: Callable[..., Any]) -> None:
    session, tokens = await rig.open(**OPENED | {"limits": {"max_context_tokens": 24_000}}), rig.tokens

    def policy(prompt: list[int]) -> list[int]:
        text = tokens.literal(prompt)
        if "<summary>" in text[-6000:] and "printed it" not in text:
            said = "<analysis>x</analysis><summary>It has printed it.</summary>"
        else:
            said = "done" if "printed it" in text else shell("seq 1 900")
        return [*tokens.encode(f"<think>hm</think>{said}"), 2]

    rig.engines["e0"].script = policy
    assert await run(session, "Print it") == "done"
    reasons = [reason for _, reason in await boundaries(rig)]
    assert reasons[:3] == ["first", "append", "append"]
    assert "history_rewritten" in reasons[3:]
