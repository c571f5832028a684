"""Agent CLIs from npm as a recipe's agent in a bubblewrap: each edits a file and runs a test; sub-agents, side calls
and compactions land in lineages of their own."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from tests.agent_clis import IMAGES, PACKAGES, program
from tests.integration.conftest import Stage
from tests.integration.test_command_agents import left, offered, outcomes, stage, working  # noqa: F401
from tests.unit.gateway.conftest import model_in
from tests.unit.gateway.test_anthropic_messages import THINKS
from turnlog.infra.environments.agents import CommandAgent
from turnlog.infra.environments.tools import GATEWAY_INSIDE, KEY_INSIDE
from turnlog.processors.core.fold.group import offline
from turnlog.processors.core.methods.rules import FoldRules
from turnlog.schemas.events import (
    Boundary,
    Outcome,
    RewardAssigned,
    SandboxLimits,
    SandboxSpec,
    SessionFinished,
    SessionStarted,
    TokenSnapshot,
    ToolCallCompleted,
    TurnCompleted,
    TurnTreeAssembled,
)
from turnlog.schemas.topics import TOPIC_OF

pytestmark = pytest.mark.long

ROOM = 120_000
"""Tokens; most are system texts and tools."""
PAGE = Path(__file__).parents[2] / "docs/agents.md"
LIMITS = SandboxLimits(cpu_s=300.0, memory_bytes=4 << 30, pids=400, disk_bytes=512 << 20)
FILES = {
    "adds.py": "def add(a, b):\n    return a - b\n",
    "test_adds.py": "import unittest\nimport adds\n\n\nclass Adds(unittest.TestCase):\n"
    "    def test_it(self):\n        self.assertEqual(adds.add(3, 5), 8)\n",
}
TASK = "Mend adds.py so that its test passes."
EDIT = "sed -i s/-/+/ adds.py"
TEST = "python3 -m unittest 2>&1 | tail -n 1 | tee result"


def opencode(window: int = ROOM, **more: Any) -> dict[str, str]:
    """The variable that is its configuration. `window`: tokens that it takes the model to have."""
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "turnlog",
        "options": {"baseURL": f"{GATEWAY_INSIDE}/v1", "apiKey": KEY_INSIDE},
        "models": {"policy": {"name": "policy", "limit": {"context": window, "output": 4096}}},
    }
    config = {
        "model": "turnlog/policy", "small_model": "turnlog/policy", "autoupdate": False, "share": "disabled",
        "permission": {"*": "allow"}, "provider": {"turnlog": provider}, **more,
    }  # fmt: skip
    return {"OPENCODE_CONFIG_CONTENT": json.dumps(config)}


@dataclasses.dataclass(frozen=True)
class Cli:
    """How one is started. `shell`: its tool's name, and the argument that is the command."""

    argv: tuple[str, ...]
    env: dict[str, str]
    shell: tuple[str, str]


CLIS = {
    "claude-code": Cli(
        ("-p", TASK, "--permission-mode", "bypassPermissions", "--tools", "Bash,Read,Write,Edit",
         "--strict-mcp-config", "--output-format", "json"),
        {"IS_SANDBOX": "1", "DISABLE_AUTOUPDATER": "1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
         "CLAUDE_CODE_ATTRIBUTION_HEADER": "0", "ANTHROPIC_MODEL": "policy"},
        ("Bash", "command"),
    ),
    "codex": Cli(
        ("exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox",
         "-c", "model=policy", "-c", "model_provider=turnlog", "-c", f"model_context_window={ROOM}",
         "-c", f'model_providers.turnlog={{name="turnlog",base_url="{GATEWAY_INSIDE}/v1",env_key="OPENAI_API_KEY",'
         'wire_api="responses"}', "-c", 'web_search="disabled"', "-c", "features.multi_agent=false",
         "-c", "features.goals=false", "-c", "analytics.enabled=false", TASK),
        {},
        ("exec_command", "cmd"),
    ),
    "opencode": Cli(
        ("run", "--format", "json", "--title", "t1", "-m", "turnlog/policy", TASK),
        {"PWD": "/workspace", "OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1", **opencode()},
        ("bash", "command"),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def calc_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe's, with room for what CLIs say of themselves."""
    return model_in(tmp_path_factory.mktemp("model"), ROOM, THINKS)


@pytest.fixture
def started(stage: Stage, offered: Any) -> Callable[..., Any]:  # noqa: F811
    """Has a CLI as the agent of the recipe, and lets it act until its session has ended."""

    async def start(
        name: str,
        policy: Callable[[str], str],
        *arguments: str,
        context: int = ROOM,
        env: Mapping[str, str] = MappingProxyType({}),
        ended: tuple[Outcome, str] = (Outcome.completed, ""),
    ) -> Any:
        """`arguments` are in place of its own, `env` beside it; `context`: max_context_tokens of the session, which is
        to end as `ended`."""
        cli, recipe, inside = CLIS[name], offered.a, f"/opt/{name}/node_modules/.bin"
        recipe.agent = CommandAgent(
            name=name, version=PACKAGES[name][1], argv=(f"{inside}/{program(name).name}", *(arguments or cli.argv)),
            env={"HOME": "/tmp", "PATH": f"{inside}:/usr/bin:/bin", **cli.env, **env}, files=FILES,
        )  # fmt: skip
        recipe.sandbox = SandboxSpec(image="cli", limits=LIMITS)
        stage.policy, stage.engine.context = policy, ROOM
        stage.settings = dataclasses.replace(
            stage.settings, engine=dataclasses.replace(stage.settings.engine, context=ROOM)
        )
        await stage.request(recipe="a", new_tokens=2000, max_turns=30, max_context_tokens=context, deadline_s=120.0)
        limits = {limit: getattr(LIMITS, limit) for limit in ("memory_bytes", "pids", "disk_bytes")}
        async with working(stage, image_folder=str(IMAGES), **limits), stage.gateway(), stage.running():
            [(outcome, _, reason)] = await outcomes(stage, 1)
            [call] = await stage.said(ToolCallCompleted)
            assert (outcome, reason) == ended, call.output.decode()
        return recipe.judged[0]

    return start


async def lines(stage: Stage) -> dict[str, list[Boundary]]:  # noqa: F811
    """How each turn of an agent continues the one before, by the agent's path."""
    turns = {turn.turn: str(turn.agent_path) for turn in await stage.said(TurnCompleted)}
    found: dict[str, list[Boundary]] = {}
    for one in await stage.said(TokenSnapshot):
        found.setdefault(turns[one.turn], []).append(one.boundary)
    return found


async def tree(stage: Stage) -> TurnTreeAssembled:  # noqa: F811
    """What the fold makes of the one session."""
    events = await stage.said(SessionStarted, SessionFinished, RewardAssigned, TurnCompleted, TokenSnapshot)
    placed = [(TOPIC_OF[type(event).__name__].name, 0, offset, event) for offset, event in enumerate(events)]
    [assembled] = offline(placed, FoldRules(run_id="r", settings_sha256=""))
    assert isinstance(assembled, TurnTreeAssembled)
    return assembled


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def by_javascript(command: str) -> str:
    """A call of the tool that Codex gives to the models of its own list."""
    return called("exec", input=f"text(await tools.exec_command({{cmd: {json.dumps(command)}}}))")


def mends(name: str, calls: Callable[[str], str] | None = None) -> Callable[[str], str]:
    """The policy that edits, tests and says so, with the CLI's shell, or by what `calls` makes of a command."""
    tool, argument = CLIS[name].shell
    runs = calls or (lambda command: called(tool, **{argument: command}))

    def policy(prompt: str) -> str:
        _, *answers = prompt.split("<|im_start|>assistant")
        if len(answers) > 2:
            return "Done: the test says OK." if "OK" in answers[-2] else "It fails."
        return runs(EDIT if len(answers) == 1 else TEST)

    return policy


@pytest.mark.parametrize("name", CLIS)
async def test_a_cli_edits_a_file_and_runs_a_test_by_turns_of_the_policy(
    stage: Stage,  # noqa: F811
    started: Callable[..., Any],
    tmp_path: Path,
    name: str,
) -> None:
    episode = await started(name, mends(name))
    work = await left(tmp_path / "left", episode)
    assert (work / "adds.py").read_text() == FILES["adds.py"].replace("-", "+")
    assert (work / "result").read_text() == "OK\n"
    assert "Done: the test says OK." in str(episode.messages[-1]["content"])
    assert await lines(stage) == {"main": [Boundary.root, Boundary.append, Boundary.append]}


def of_the_page(name: str) -> CommandAgent:
    """The agent of that name in docs/agents.md."""
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        if f'name="{name}"' in block:
            module: dict[str, Any] = {"__name__": "page"}
            exec(compile(block, PAGE, "exec"), module)
            agent: CommandAgent = module["RECIPE"].agent
            return agent
    raise LookupError(name)


def started_by_the_page() -> list[str]:
    """Codex's command line in docs/agents.md, for the task."""
    agent = of_the_page("codex")
    assert (agent.version, agent.env) == (PACKAGES["codex"][1], {"HOME": "/tmp"})
    program, *argv = agent.argv({"prompt": TASK})
    assert program == "codex"
    return argv


@pytest.mark.parametrize("model", ["policy", "its own"])
async def test_codex_does_its_work_as_the_page_starts_it(
    stage: Stage,  # noqa: F811
    started: Callable[..., Any],
    tmp_path: Path,
    model: str,
) -> None:
    """Also as the model that it takes unasked, to which it gives one tool that runs JavaScript."""
    argv, calls = started_by_the_page(), None
    if model == "its own":
        at = argv.index("model=policy")
        argv, calls = argv[: at - 1] + argv[at + 1 :], by_javascript
    episode = await started("codex", mends("codex", calls), *argv)
    assert ((await left(tmp_path / "left", episode)) / "result").read_text() == "OK\n"
    assert await lines(stage) == {"main": [Boundary.root, Boundary.append, Boundary.append]}


CLAUDE = ("--permission-mode", "bypassPermissions", "--strict-mcp-config", "--output-format", "json")


async def test_a_sub_agent_in_a_sandbox_has_a_line_of_its_own_and_its_parents_goes_on(
    stage: Stage,  # noqa: F811
    started: Callable[..., Any],
    tmp_path: Path,
) -> None:
    task = {"description": "write", "prompt": "CHILD: write it", "subagent_type": "claude"}

    def policy(prompt: str) -> str:
        answers = prompt.count("<|im_start|>assistant")
        if "PARENT: delegate it" in prompt:
            return "all done" if answers > 1 else called("Agent", **task, run_in_background=False)
        return "written" if answers > 1 else called("Bash", command="printf c >> c")

    episode = await started("claude-code", policy, "-p", "PARENT: delegate it", *CLAUDE)
    assert (await left(tmp_path / "left", episode) / "c").read_text() == "c"
    assert "all done" in str(episode.messages[-1]["content"])
    found = await lines(stage)
    assert found.pop("main") == [Boundary.root, Boundary.append]
    [(child, boundaries)] = found.items()
    assert (child.partition("/")[0], boundaries) == ("agent", [Boundary.root, Boundary.append])


async def test_a_sub_agent_of_opencode_has_a_line_of_its_own_and_its_parents_goes_on(
    stage: Stage,  # noqa: F811
    started: Callable[..., Any],
    tmp_path: Path,
) -> None:
    task = {"description": "write", "prompt": "CHILD: write it", "subagent_type": "general"}

    def policy(prompt: str) -> str:
        answers = prompt.count("<|im_start|>assistant")
        if "PARENT: delegate it" in prompt:
            return "all done" if answers > 1 else called("task", **task)
        return "written" if answers > 1 else called("bash", command="printf c >> c", description="writes")

    *argv, _ = CLIS["opencode"].argv
    episode = await started("opencode", policy, *argv, "PARENT: delegate it")
    assert (await left(tmp_path / "left", episode) / "c").read_text() == "c"
    assert episode.messages[-1]["content"] == "all done"
    found = await lines(stage)
    assert found.pop("main") == [Boundary.root, Boundary.append]
    [(child, boundaries)] = found.items()
    assert (child.partition("/")[0], boundaries) == ("agent", [Boundary.root, Boundary.append])
    assert [one.kind for one in (await tree(stage)).lineages] == ["main", "sub_agent"]


async def test_a_compaction_in_a_sandbox_begins_the_main_line_anew(
    stage: Stage,  # noqa: F811
    started: Callable[..., Any],
) -> None:
    def policy(prompt: str) -> str:
        if "<summary>" in prompt[-6000:] and "printed it" not in prompt:
            return "<analysis>x</analysis><summary>It has printed it.</summary>"
        return "done" if "printed it" in prompt else called("Bash", command="seq 1 900")

    episode = await started("claude-code", policy, "-p", "Print it", *CLAUDE, context=24_000)
    assert "done" in str(episode.messages[-1]["content"])
    found = await lines(stage)
    assert found.pop("main") == [Boundary.root, Boundary.append, Boundary.append, Boundary.root], "without the summary"
    assert [*found] == ["main/compaction"]
    folded = await tree(stage)
    assert [one.kind for one in folded.lineages] == ["main", "compaction"]
    assert folded.books.masked == {}


PRINTED = "It has printed all of it."


def forgets(name: str, asked: str) -> Callable[[str], str]:
    """The policy that prints until it is asked, by a text with `asked`, for a summary, and is done after that."""
    tool, argument = CLIS[name].shell

    def policy(prompt: str) -> str:
        if PRINTED in prompt:
            return "done"
        return PRINTED if asked in prompt[-4000:] else called(tool, **{argument: "seq 1 900"})

    return policy


CODEX_ASKS, OPENCODE_ASKS = "CONTEXT CHECKPOINT COMPACTION", "Create a new anchored summary"


def codex(*words: str, called_openai: bool = False) -> list[str]:
    """Its command line with more words."""
    *argv, task = CLIS["codex"].argv
    argv = [word.replace('name="turnlog"', 'name="OpenAI"') if called_openai else word for word in argv]
    return [*argv, *words, task]


async def is_compacted(stage: Stage, episode: Any, main: list[Boundary], side: Boundary) -> None:  # noqa: F811
    """What was judged came of a summary that was asked for beside the main line, and trains with it."""
    assert await lines(stage) == {"main": main, "side/compaction": [side]}
    assert (episode.messages[-1]["content"], PRINTED in str(episode.messages)) == ("done", True)
    folded = await tree(stage)
    assert [one.kind for one in folded.lineages] == ["main", "compaction"]
    assert folded.books.masked == {}
    turns = await stage.said(TurnCompleted)
    [summary] = [one.turn for one in turns if one.agent_path == "side/compaction"]
    assert turns[-1].summary_turn == summary, "the text alone tells, too"
    assert folded.anchor_segment is not None
    assert folded.segments[folded.anchor_segment].turns == (folded.nodes[-1].turn,)


async def test_codex_sums_up_beside_the_main_line_which_begins_anew(
    stage: Stage,  # noqa: F811
    started: Callable[..., Any],
) -> None:
    argv = codex("-c", "model_auto_compact_token_limit=20000")
    episode = await started("codex", forgets("codex", CODEX_ASKS), *argv)
    await is_compacted(stage, episode, [Boundary.root, Boundary.append, Boundary.root], Boundary.branch)


async def test_opencode_sums_up_beside_the_main_line_which_begins_anew(
    stage: Stage,  # noqa: F811
    started: Callable[..., Any],
) -> None:
    """With the newest call verbatim."""
    env = opencode(window=20_000, compaction={"preserve_recent_tokens": 2000})
    episode = await started("opencode", forgets("opencode", OPENCODE_ASKS), env=env)
    await is_compacted(stage, episode, [Boundary.root, Boundary.append, Boundary.append, Boundary.root], Boundary.root)
    assert [one["role"] for one in episode.messages[-3:]] == ["tool", "user", "assistant"]


async def test_opencode_compacts_at_an_overflow_too_and_ends_with_1(
    stage: Stage,  # noqa: F811
    started: Callable[..., Any],
) -> None:
    policy, ended = forgets("opencode", OPENCODE_ASKS), (Outcome.completed, "exit 1")
    episode = await started("opencode", policy, context=14_000, ended=ended)
    await is_compacted(stage, episode, [Boundary.root, Boundary.append, Boundary.root], Boundary.root)


async def test_codex_does_not_compact_at_an_overflow(
    stage: Stage,  # noqa: F811
    started: Callable[..., Any],
) -> None:
    policy, ended = forgets("codex", CODEX_ASKS), (Outcome.truncated, "context")
    await started("codex", policy, context=24_000, ended=ended)
    assert await lines(stage) == {"main": [Boundary.root, Boundary.append]}


async def test_a_codex_that_asks_the_server_to_compact_is_told_that_it_does_not(
    stage: Stage,  # noqa: F811
    started: Callable[..., Any],
) -> None:
    argv = codex("-c", "model_auto_compact_token_limit=20000", called_openai=True)
    episode = await started("codex", forgets("codex", CODEX_ASKS), *argv, ended=(Outcome.completed, "exit 1"))
    assert "has type 'compaction_trigger'; served are message" in episode.ended.output


async def test_a_call_beside_the_conversation_in_a_sandbox_is_no_turn_of_it(
    stage: Stage,  # noqa: F811
    started: Callable[..., Any],
) -> None:
    """opencode asks for a title, unless it is given one."""
    argv = [word for word in CLIS["opencode"].argv if word not in ("--title", "t1")]
    mending = mends("opencode")
    episode = await started("opencode", lambda prompt: "A title" if "title" in prompt[:600] else mending(prompt), *argv)
    found = await lines(stage)
    assert found.pop("main") == [Boundary.root, Boundary.append, Boundary.append]
    [(side, boundaries)] = found.items()
    assert (side.partition("/")[0], boundaries) == ("side", [Boundary.root])
    assert "Done: the test says OK." in str(episode.messages[-1]["content"])
