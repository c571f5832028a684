"""Agents written in Python at the gateway: what they send back continues the turns that they were given, and their
sub-agents and summaries have lines of their own. Their traffic is recorded, without their texts, in `harnesses`."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.agent_clis import python_program
from tests.unit.gateway.conftest import model_in, settings_of
from turnlog.environments import CommandAgent
from turnlog.infra.environments.ready_agents import ready_agent
from turnlog.infra.environments.tools import GATEWAY_INSIDE, KEY_INSIDE
from turnlog.producers.gateway.messages import normalise_messages
from turnlog.producers.gateway.profiles import harness, system_text
from turnlog.producers.gateway.python_harnesses import KIMI_SUMMARISES, OPENHANDS_SUMMARISES
from turnlog.schemas.events import Boundary
from turnlog.settings import Settings

ROOM = 150_000
"""Tokens; most are system texts and tools, a token a character."""
RECORDED = Path(__file__).parent / "harnesses"
WRITES = "TURNLOG_TEST_WRITE_HARNESSES"
"""Set, to record anew what the agents ask."""
KEPT_HEADERS = ("user-agent",)
KEPT_CHARACTERS = 90
"""Of each text."""


def recorded() -> list[tuple[str, dict[str, Any]]]:
    """Every recorded request with its file's name."""
    return [(file.stem, one) for file in sorted(RECORDED.glob("*.json")) for one in json.loads(file.read_text())]


@pytest.mark.parametrize("name", [file.stem for file in sorted(RECORDED.glob("*.json"))])
def test_a_recorded_request_has_the_path_of_its_agent(name: str) -> None:
    requests = [one for file, one in recorded() if file == name]
    assert requests
    for one in requests:
        messages = normalise_messages(one["messages"])
        tools = [{"type": "function", "function": {"name": tool}} for tool in one["tools"]] or None
        found = harness("auto").agent_path(one["agent"], one["headers"], one["messages"], tools, messages)
        assert found == one["path"], (one, system_text(one["messages"]))


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe's, with room for what agents say of themselves."""
    return model_in(tmp_path_factory.mktemp("model"), ROOM)


@pytest.fixture
def settings(tmp_path: Path, model_folder: Path) -> Settings:
    """A window that holds it."""
    return settings_of(model_folder, tmp_path, context=ROOM)


def trimmed(content: Any) -> Any:
    """A text of a message, cut; words by which a profile knows it stay."""
    if isinstance(content, list):
        return [{"type": "text", "text": trimmed(block["text"])} for block in content if block.get("type") == "text"]
    words = next((words for words in (OPENHANDS_SUMMARISES, KIMI_SUMMARISES) if words in content), "")
    return content if len(content) <= KEPT_CHARACTERS else f"{content[:KEPT_CHARACTERS]} ... {words}".rstrip()


class Recorder:
    """A server before the gateway, which keeps what was asked."""

    def __init__(self, url: str) -> None:
        self._upstream = url
        self.requests: list[dict[str, Any]] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Pass one request on, and its answer back."""
        body = await request.read()
        if request.path.endswith("/chat/completions"):
            asked = json.loads(body)
            self.requests.append({
                "headers": {name: request.headers[name] for name in KEPT_HEADERS if name in request.headers},
                "tools": [tool["function"]["name"] for tool in asked.get("tools") or ()],
                "messages": [
                    {"role": one["role"], "content": trimmed(one.get("content") or "")} for one in asked["messages"]
                    if one["role"] in ("system", "user", "assistant")
                ],
            })  # fmt: skip
        headers = {name: request.headers[name] for name in ("authorization", "content-type", "user-agent")
                   if name in request.headers}  # fmt: skip
        async with (
            aiohttp.ClientSession() as session,
            session.request(request.method, self._upstream + request.path_qs, data=body, headers=headers) as upstream,
        ):
            content = await upstream.read()
            return web.Response(status=upstream.status, body=content, content_type=upstream.content_type)


@asynccontextmanager
async def recording(url: str) -> AsyncIterator[tuple[str, Recorder]]:
    """A recorder before the gateway at `url`, and its address."""
    recorder = Recorder(url)
    app = web.Application(client_max_size=1 << 26)
    app.router.add_route("*", "/{tail:.*}", recorder.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", recorder
    finally:
        await runner.cleanup()


async def ends(agent: CommandAgent, folder: Path, task: str, address: str, token: str) -> None:
    """Run the agent outside a sandbox, in `folder`/work, with the gateway at `address`."""

    def placed(text: str) -> str:
        return text.replace(GATEWAY_INSIDE, address).replace(f'"{KEY_INSIDE}"', f'"{token}"')

    assert callable(agent.argv)
    assert not callable(agent.env)
    env = {key: token if value == KEY_INSIDE else placed(value) for key, value in agent.env.items()}
    env |= {"HOME": str(folder), "TMUX_TMPDIR": str(folder)}
    program, *argv = map(placed, agent.argv({"prompt": task}))
    process = await asyncio.create_subprocess_exec(
        Path(env["PATH"].partition(":")[0], program), *argv, env=env, cwd=folder / "work",
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        said, _ = await asyncio.wait_for(process.communicate(), 240)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, said.decode()[-3000:]


@pytest.fixture
def run(rig: Any, tmp_path: Path) -> Callable[..., Any]:
    """Runs an agent on a task in an empty folder, which is `tmp_path / "work"`, and gives the lines of its turns."""
    (tmp_path / "work").mkdir()

    async def run(
        name: str, task: str, policy: Callable[[str], str], *, window: int = 100_000
    ) -> dict[str, list[Boundary]]:
        agent = ready_agent(name, path=str(python_program(name).parent), context_tokens=window)
        session = await rig.open(
            agent={"name": agent.name, "version": agent.version},
            sampling={"temperature": 1.0, "max_new_tokens": 2000}, limits={"max_context_tokens": ROOM},
        )  # fmt: skip
        tokens = rig.tokens
        rig.engines["e0"].script = lambda prompt: [*tokens.encode(policy(tokens.literal(prompt))), 2]
        async with recording(rig.url) as (address, recorder):
            await ends(agent, tmp_path, task, address, session["agent_token"])
        turns = await rig.written("TurnCompleted")
        if os.environ.get(WRITES):
            record(f"{name}-{task.partition(' ')[0].strip(':').lower()}", name, recorder.requests, turns)
        paths = {turn.turn: str(turn.agent_path) for turn in turns}
        lines: dict[str, list[Boundary]] = {}
        for one in await rig.written("TokenSnapshot"):
            lines.setdefault(paths[one.turn], []).append(one.boundary)
        return lines

    return run


def record(file: str, name: str, requests: list[dict[str, Any]], turns: list[Any]) -> None:
    """Write what was asked, with the paths that the gateway found, in the order of the turns."""
    ordered = sorted(turns, key=lambda turn: turn.turn.index)
    assert len(ordered) == len(requests)
    for one, turn in zip(requests, ordered, strict=True):
        one |= {"agent": name, "path": turn.agent_path}
    RECORDED.mkdir(exist_ok=True)
    (RECORDED / f"{file}.json").write_text(json.dumps(requests, indent=1) + "\n")


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def answers(prompt: str) -> int:
    return prompt.count("<|im_start|>assistant") - 1


ONE = [Boundary.root, Boundary.append]


@pytest.mark.long
async def test_mini_swe_agent_edits_a_file_by_turns_of_the_policy(run: Callable[..., Any], tmp_path: Path) -> None:
    def policy(prompt: str) -> str:
        done = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
        return "So: " + called("bash", command=done if answers(prompt) else "printf hi > out.txt")

    lines = await run("mini-swe-agent", "Write hi into out.txt", policy)
    assert (tmp_path / "work/out.txt").read_text() == "hi"
    assert lines == {"main": ONE}


@pytest.mark.long
async def test_openhands_delegates_and_its_sub_agent_has_a_line_of_its_own(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    def policy(prompt: str) -> str:
        if "PARENT: delegate it" in prompt:
            return "all done" if answers(prompt) else called(
                "task", description="write", prompt="CHILD: write it", subagent_type="bash-runner", security_risk="LOW"
            )  # fmt: skip
        return "written" if answers(prompt) else called("terminal", command="printf c > c", security_risk="LOW")

    lines = await run("openhands", "PARENT: delegate it", policy)
    assert (tmp_path / "work/c").read_text() == "c"
    assert lines.pop("main") == ONE
    [(child, boundaries)] = lines.items()
    assert (child.partition("/")[0], boundaries) == ("agent", ONE)


@pytest.mark.long
async def test_kimi_cli_delegates_and_its_sub_agent_has_a_line_of_its_own(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    summary = "I wrote it. " * 30  # a shorter one it asks for again

    def policy(prompt: str) -> str:
        if "PARENT: delegate it" in prompt:
            return "all done" if answers(prompt) else called("Agent", description="write", prompt="CHILD: write it")
        return summary if answers(prompt) else called("Shell", command="printf c > c")

    lines = await run("kimi-cli", "PARENT: delegate it", policy)
    assert (tmp_path / "work/c").read_text() == "c"
    assert lines.pop("main") == ONE
    [(child, boundaries)] = lines.items()
    assert (child.partition("/")[0], boundaries) == ("agent", ONE)


@pytest.mark.long
async def test_kimi_cli_compacts_beside_its_main_line(run: Callable[..., Any]) -> None:
    def policy(prompt: str) -> str:
        if "compact this conversation context" in prompt[-8000:]:
            return "It has printed all of it."
        return "done" if "printed all of it" in prompt else called("Shell", command=f"seq {answers(prompt)} 900")

    lines = await run("kimi-cli", "Print it", policy, window=60_000)
    assert lines["side/compaction"] == [Boundary.root]
    assert lines["main"][:2] == ONE
    assert lines["main"][-1] is Boundary.root


def types(*keys: str, done: bool = False) -> str:
    """What Terminus-2 reads."""
    commands = [{"keystrokes": f"{key}\n", "duration": 0.5} for key in keys]
    return json.dumps({"analysis": "a", "plan": "p", "commands": commands, "task_complete": done})


@pytest.mark.long
async def test_terminus_2_works_in_its_terminal_and_hands_over(run: Callable[..., Any], tmp_path: Path) -> None:
    def policy(prompt: str) -> str:
        last = prompt.rpartition("<|im_start|>user")[2]
        if "hand off your work" in last:
            return "It wrote hi."
        if "picking up work" in last:
            return "Where is it?"
        if "few questions for you" in last:
            return "In out.txt."
        over = "In out.txt." in prompt or answers(prompt) > 16
        return types(done=True) if over else types("printf hi > out.txt", "seq 1 400")

    lines = await run("terminus-2", "Write hi into out.txt", policy, window=9_500)
    assert (tmp_path / "work/out.txt").read_text() == "hi"
    assert lines["main"][:2] == ONE
    assert Boundary.root in lines["main"][2:], lines
    assert len(lines["main/compaction"]) == 3
