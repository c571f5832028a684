"""Ready agents: each is started on the row's prompt at the gateway, whatever the prompt looks like."""

from __future__ import annotations

import ast

import pytest

from tests.agent_clis import PACKAGES, PYTHON
from turnlog.environments import ReadyOptions, UnreadyAgent, ready_agent
from turnlog.infra.environments.ready_agents import READY_AGENTS, task_text
from turnlog.infra.environments.tools import GATEWAY_INSIDE


@pytest.mark.parametrize("name", READY_AGENTS)
def test_a_ready_agent_gets_the_task_as_one_word_and_asks_the_gateway(name: str) -> None:
    agent = ready_agent(name, path="/opt/it/bin", context_tokens=32_000, env={"MORE": "1"})
    assert callable(agent.argv)
    argv = list(agent.argv({"prompt": "--help\nme"}))
    assert argv[-1].endswith("--help\nme")
    assert (
        argv[-1].startswith("--prompt=") or argv[-1].startswith("--task=") or argv[-2] == "--" or name == "terminus-2"
    )
    assert not callable(agent.env)
    assert agent.env["PATH"] == "/opt/it/bin:/usr/local/bin:/usr/bin:/bin"
    assert (agent.env["MORE"], agent.env["HOME"]) == ("1", "/tmp")
    assert GATEWAY_INSIDE in " ".join([*argv, *agent.env.values()])
    assert "32000" in " ".join([*argv, *agent.env.values()]) or name in (
        "claude-code",
        "qwen-code",
        "mini-swe-agent",
        "openhands",
    )


def test_the_versions_are_those_that_the_tests_run() -> None:
    tested = {name: version for name, (_, version, *_) in [*PACKAGES.items(), *PYTHON.items()]}
    for name, ready in READY_AGENTS.items():
        assert tested.get(name, ready.version) == ready.version
        assert ready_agent(name).version == ready.version
        assert ready_agent(name, version="9").version == "9"


def test_options_are_taken_together_or_one_by_one() -> None:
    options = ReadyOptions(model="m", arguments=("--verbose",))
    agent = ready_agent("mini-swe-agent", options, model="n")
    assert callable(agent.argv)
    argv = agent.argv({"prompt": "x"})
    assert "--model=openai/n" in argv
    assert "--verbose" in argv


def test_a_prompt_of_messages_is_the_users_text() -> None:
    said = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "user", "content": "b"}]  # fmt: skip
    assert task_text({"prompt": said}) == "a\n\nb"
    assert task_text({"prompt": said[:1]}) == "s"


@pytest.mark.parametrize(("name", "says"), [("gemini-cli", "use qwen-code"), ("cursor", "they are claude-code, codex")])
def test_an_agent_that_cannot_be_started_says_what_to_use(name: str, says: str) -> None:
    with pytest.raises(UnreadyAgent, match=says):
        ready_agent(name)


def test_the_launcher_of_terminus_2_is_a_program_of_the_standard_library_and_harbor() -> None:
    agent = ready_agent("terminus-2")
    assert callable(agent.argv)
    _, _, source, *_ = agent.argv({"prompt": "x"})
    imported = {
        alias.name if isinstance(node, ast.Import) else str(node.module)
        for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names
    }  # fmt: skip
    assert not any(name.startswith("turnlog") for name in imported)
