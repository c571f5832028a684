"""Agent CLIs from npm as a recipe's agent: each edits a file and runs a test in its bubblewrap."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Stage
from tests.integration.test_command_agents import left, offered, outcomes, stage, working  # noqa: F401
from tests.unit.gateway.test_anthropic_messages import THINKS
from turnlog.infra.recipes import CommandAgent
from turnlog.infra.tools import GATEWAY_INSIDE, KEY_INSIDE
from turnlog.producers.recipes.calc import RECIPE
from turnlog.schemas.events import Outcome, SandboxLimits, SandboxSpec, ToolCallCompleted, TurnCompleted

pytestmark = pytest.mark.long

ROOM = 120_000
"""Tokens; most are system texts and tools."""
KEPT = Path(__file__).parents[2] / ".cache" / "cli-agents"
LIMITS = SandboxLimits(cpu_s=300.0, memory_bytes=4 << 30, pids=400, disk_bytes=512 << 20)
FILES = {
    "adds.py": "def add(a, b):\n    return a - b\n",
    "test_adds.py": "import unittest\nimport adds\n\n\nclass Adds(unittest.TestCase):\n"
    "    def test_it(self):\n        self.assertEqual(adds.add(3, 5), 8)\n",
}
TASK = "Mend adds.py so that its test passes."
EDIT = "sed -i s/-/+/ adds.py"
TEST = "python3 -m unittest 2>&1 | tail -n 1 | tee result"


PROVIDER = {
    "npm": "@ai-sdk/openai-compatible",
    "name": "turnlog",
    "options": {"baseURL": f"{GATEWAY_INSIDE}/v1", "apiKey": KEY_INSIDE},
    "models": {"policy": {"name": "policy", "limit": {"context": ROOM, "output": 4096}}},
}
OPENCODE = {
    "model": "turnlog/policy", "small_model": "turnlog/policy", "autoupdate": False, "share": "disabled",
    "permission": {"*": "allow"}, "provider": {"turnlog": PROVIDER},
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Cli:
    """How one is had and started. `shell`: its tool's name, and the argument that is the command."""

    packages: tuple[str, ...]
    argv: tuple[str, ...]
    env: dict[str, str]
    shell: tuple[str, str]


CLIS = {
    "claude-code": Cli(
        ("@anthropic-ai/claude-code@2.1.329",),
        ("claude", "-p", TASK, "--permission-mode", "bypassPermissions", "--tools", "Bash,Read,Write,Edit",
         "--strict-mcp-config", "--output-format", "json"),
        {"IS_SANDBOX": "1", "DISABLE_AUTOUPDATER": "1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
         "CLAUDE_CODE_ATTRIBUTION_HEADER": "0", "ANTHROPIC_MODEL": "policy"},
        ("Bash", "command"),
    ),
    "codex": Cli(
        ("@openai/codex@0.169.0",),
        ("codex", "exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox",
         "-c", "model=policy", "-c", "model_provider=turnlog", "-c", f"model_context_window={ROOM}",
         "-c", f'model_providers.turnlog={{name="turnlog",base_url="{GATEWAY_INSIDE}/v1",env_key="OPENAI_API_KEY",'
         'wire_api="responses"}', "-c", 'web_search="disabled"', "-c", "features.multi_agent=false",
         "-c", "features.goals=false", "-c", "analytics.enabled=false", TASK),
        {},
        ("exec_command", "cmd"),
    ),
    "opencode": Cli(
        ("opencode-ai@1.18.33",),
        ("opencode", "run", "--format", "json", "--title", "t1", "-m", "turnlog/policy", TASK),
        {"PWD": "/workspace", "OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1",
         "OPENCODE_CONFIG_CONTENT": json.dumps(OPENCODE)},
        ("bash", "command"),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def images() -> Path:
    """[sandbox] image_folder with the image `cli`: this machine's programs and libraries, and /opt for the CLIs."""
    root = KEPT / "images/cli"
    if not root.exists():
        part = KEPT / f"part-{os.getpid()}"
        (part / "opt").mkdir(parents=True)
        (part / "usr/lib").mkdir(parents=True)
        for source in ("bin", "lib64", "lib/x86_64-linux-gnu", "lib/python3.11"):
            if Path("/usr", source).exists():
                linked = subprocess.run(["cp", "-al", f"/usr/{source}", part / "usr" / source], capture_output=True)
                if linked.returncode:
                    subprocess.run(["cp", "-a", f"/usr/{source}", (part / "usr" / source).parent], check=True)
        for name in ("bin", "lib", "lib64"):
            (part / name).symlink_to(f"usr/{name}")
        root.parent.mkdir(exist_ok=True)
        part.rename(root)
    return root.parent


@pytest.fixture
def installed(images: Path) -> Callable[[str], Cli]:
    """Have one in the image, once."""

    def install(name: str) -> Cli:
        cli, folder = CLIS[name], images / "cli/opt" / name
        command = ["npm", "install", "--prefix", str(folder), "--no-fund", "--no-audit", "--silent", *cli.packages]
        there = (folder / "node_modules/.bin" / cli.argv[0]).exists()
        if not there and (not shutil.which("npm") or subprocess.run(command).returncode):
            shutil.rmtree(folder, ignore_errors=True)
            pytest.skip(f"npm gives no {name}")
        return cli

    return install


@pytest.fixture(scope="module")
def calc_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe's, with room for what CLIs say of themselves."""
    folder = tmp_path_factory.mktemp("model")
    RECIPE.warm_start.write_tokenizer(folder)
    config = RECIPE.warm_start.model.config() | {"max_position_embeddings": ROOM}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(THINKS)
    return folder


@pytest.mark.parametrize("name", CLIS)
async def test_a_cli_edits_a_file_and_runs_a_test_by_turns_of_the_policy(
    stage: Stage,  # noqa: F811
    offered: Any,  # noqa: F811
    installed: Callable[[str], Cli],
    images: Path,
    tmp_path: Path,
    name: str,
) -> None:
    cli, recipe = installed(name), offered.a
    folder = f"/opt/{name}/node_modules/.bin"
    recipe.agent = CommandAgent(
        name=name, version=cli.packages[0].rpartition("@")[2], argv=(f"{folder}/{cli.argv[0]}", *cli.argv[1:]),
        env={"HOME": "/tmp", "PATH": f"{folder}:/usr/bin:/bin", **cli.env}, files=FILES,
    )  # fmt: skip
    recipe.sandbox = SandboxSpec(image="cli", limits=LIMITS)
    tool, argument = cli.shell

    def policy(prompt: str) -> str:
        _, *answers = prompt.split("<|im_start|>assistant")
        if len(answers) > 2:
            return "Done: the test says OK." if "OK" in answers[-2] else "It fails."
        line = EDIT if len(answers) == 1 else TEST
        return f"<tool_call>{json.dumps({'name': tool, 'arguments': {argument: line}})}</tool_call>"

    stage.policy, stage.engine.context = policy, ROOM
    stage.settings = dataclasses.replace(
        stage.settings, engine=dataclasses.replace(stage.settings.engine, context=ROOM)
    )
    await stage.request(recipe="a", new_tokens=2000, max_turns=9, max_context_tokens=ROOM, deadline_s=120.0)
    limits = {limit: getattr(LIMITS, limit) for limit in ("memory_bytes", "pids", "disk_bytes")}
    async with working(stage, image_folder=str(images), **limits), stage.gateway(), stage.running():
        ended = await outcomes(stage, 1)
        [call] = await stage.said(ToolCallCompleted)
        assert ended == [(Outcome.completed, True, "")], call.output.decode()
    work = await left(tmp_path / "left", recipe.judged[0])
    assert (work / "adds.py").read_text() == FILES["adds.py"].replace("-", "+")
    assert (work / "result").read_text() == "OK\n"
    assert "Done: the test says OK." in str(recipe.judged[0].messages[-1]["content"])
    assert [turn.agent_path for turn in await stage.said(TurnCompleted)] == ["main"] * 3
