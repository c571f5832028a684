"""Ready CommandAgents by name: command-line agents that other people wrote, and how each is started in a sandbox.

`ready_agent("mini-swe-agent")` starts the program of that name in the sandbox's image. The programs themselves are part
of the image; docs/harnesses.md says which package has each, and which version was run. Every agent has the gateway at
GATEWAY_INSIDE and gets the row's prompt as its task.

UnreadyAgent: there is no such agent, or it cannot use the gateway; the message names the remedy.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from turnlog.infra.environments import terminus_launcher
from turnlog.infra.environments.agents import CommandAgent
from turnlog.infra.environments.episodes import TaskRow, text_of
from turnlog.infra.environments.tasks import prompt_messages
from turnlog.infra.environments.tools import GATEWAY_INSIDE, KEY_INSIDE

BASE_URL: Final = f"{GATEWAY_INSIDE}/v1"
SYSTEM_PATH: Final = "/usr/local/bin:/usr/bin:/bin"
LITELLM: Final = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # otherwise it asks GitHub for prices, and waits for the answer
    "OPENAI_API_KEY": KEY_INSIDE,
    "OPENAI_BASE_URL": BASE_URL,
}


class UnreadyAgent(Exception):
    """No agent of this name can be started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyOptions:
    """Options common to all ready agents."""

    model: str = "policy"
    """Name of the model that the agent requests. The policy answers, whatever it is."""
    context_tokens: int = 100_000
    """Context window that the agent assumes. Agents that compact do so below it, so it should be lower than [feeder]
    max_context_tokens by the length of an answer and its results."""
    path: str = ""
    """Folders of the image in which the program is searched before the system's."""
    version: str = ""
    """Version that is recorded on SessionStarted; empty for the one that was tested."""
    arguments: tuple[str, ...] = ()
    """Further arguments of the program, before the task."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Further variables; they take precedence."""


@dataclass(frozen=True, slots=True)
class ReadyAgent:
    """A program, and its start."""

    version: str
    """Version that was tested."""
    argv: Callable[[ReadyOptions, str], Sequence[str]]
    """Returns the command line for a task."""
    env: Callable[[ReadyOptions], Mapping[str, str]]


def ready_agent(name: str, options: ReadyOptions | None = None, **changes: Any) -> CommandAgent:
    """Return the agent of this name. `changes` are fields of ReadyOptions. Raises UnreadyAgent."""
    if name in UNSERVED:
        raise UnreadyAgent(f"agent {name!r}: {UNSERVED[name]}")
    if name not in READY_AGENTS:
        raise UnreadyAgent(f"there is no ready agent {name!r}: they are {', '.join(READY_AGENTS)}")
    chosen = options or ReadyOptions()
    chosen = dataclasses.replace(chosen, **changes)
    ready = READY_AGENTS[name]

    def argv(row: TaskRow) -> Sequence[str]:
        return ready.argv(chosen, task_text(row))

    env = {"HOME": "/tmp", **ready.env(chosen), **chosen.env}
    if chosen.path:
        env.setdefault("PATH", f"{chosen.path}:{SYSTEM_PATH}")
    return CommandAgent(name=name, version=chosen.version or ready.version, argv=argv, env=env)


def task_text(row: TaskRow) -> str:
    """Return the row's prompt as one text: the user's messages, or all of them if there is none of the user's."""
    messages = prompt_messages(row)
    said = [message for message in messages if message["role"] == "user"] or messages
    return "\n\n".join(map(text_of, said))


def _claude_code(options: ReadyOptions, task: str) -> Sequence[str]:
    always = ("--permission-mode", "bypassPermissions", "--strict-mcp-config", "--output-format", "json")
    return ("claude", "-p", *always, *options.arguments, "--", task)


def _claude_code_env(options: ReadyOptions) -> Mapping[str, str]:
    return {
        "ANTHROPIC_BASE_URL": GATEWAY_INSIDE,
        "ANTHROPIC_AUTH_TOKEN": KEY_INSIDE,
        "ANTHROPIC_MODEL": options.model,
        "IS_SANDBOX": "1",  # otherwise it refuses to run without permission prompts as root
        "DISABLE_AUTOUPDATER": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # it has a hash of the run, so that no two sessions share a prefix
    }


def _codex(options: ReadyOptions, task: str) -> Sequence[str]:
    provider = f'{{name="turnlog",base_url="{BASE_URL}",env_key="OPENAI_API_KEY",wire_api="responses"}}'
    settings = (
        f"model={options.model}", "model_provider=turnlog", f"model_providers.turnlog={provider}",
        f"model_context_window={options.context_tokens}",
        f"model_auto_compact_token_limit={options.context_tokens * 9 // 10}",
        'web_search="disabled"', "analytics.enabled=false",
    )  # fmt: skip
    chosen = [word for setting in settings for word in ("-c", setting)]
    always = ("--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    return ("codex", "exec", *always, *chosen, *options.arguments, "--", task)


def _opencode(options: ReadyOptions, task: str) -> Sequence[str]:
    always = ("--format", "json", "--title", "task")  # without a title it asks for one
    return ("opencode", "run", *always, "-m", f"turnlog/{options.model}", *options.arguments, "--", task)


def _opencode_env(options: ReadyOptions) -> Mapping[str, str]:
    limit = {"context": options.context_tokens, "output": min(4096, options.context_tokens // 4)}
    provider = {
        "npm": "@ai-sdk/openai-compatible", "name": "turnlog",
        "options": {"baseURL": BASE_URL, "apiKey": KEY_INSIDE},
        "models": {options.model: {"name": options.model, "limit": limit}},
    }  # fmt: skip
    model = f"turnlog/{options.model}"
    config = {
        "model": model, "small_model": model, "autoupdate": False, "share": "disabled",
        "permission": {"*": "allow"}, "provider": {"turnlog": provider},
    }  # fmt: skip
    return {
        "OPENCODE_CONFIG_CONTENT": json.dumps(config),
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
    }


def _qwen_code(options: ReadyOptions, task: str) -> Sequence[str]:
    always = ("--yolo", "--output-format", "stream-json", "--auth-type", "openai")
    return ("qwen", *always, *options.arguments, f"--prompt={task}")


def _openai_env(options: ReadyOptions) -> Mapping[str, str]:
    return {"OPENAI_BASE_URL": BASE_URL, "OPENAI_API_KEY": KEY_INSIDE, "OPENAI_MODEL": options.model}


def _mini_swe_agent(options: ReadyOptions, task: str) -> Sequence[str]:
    always = ("--yolo", "--exit-immediately", "--cost-limit=0", "--output=/tmp/mini-swe-agent.json")
    return ("mini", f"--model=openai/{options.model}", *always, *options.arguments, f"--task={task}")


def _mini_swe_agent_env(options: ReadyOptions) -> Mapping[str, str]:
    return {
        **LITELLM,
        "MSWEA_CONFIGURED": "true",  # otherwise it asks which model to use
        "MSWEA_COST_TRACKING": "ignore_errors",  # the policy has no price
        "MSWEA_GLOBAL_CONFIG_DIR": "/tmp/.mini-swe-agent",
    }


def _openhands(options: ReadyOptions, task: str) -> Sequence[str]:
    return ("openhands", "--headless", "--json", "--override-with-envs", *options.arguments, f"--task={task}")


def _openhands_env(options: ReadyOptions) -> Mapping[str, str]:
    return {
        **LITELLM,
        "LLM_MODEL": f"openai/{options.model}",
        "LLM_BASE_URL": BASE_URL,
        "LLM_API_KEY": KEY_INSIDE,
        "OPENHANDS_SUPPRESS_BANNER": "1",
    }


def _terminus_2(options: ReadyOptions, task: str) -> Sequence[str]:
    source = Path(terminus_launcher.__file__).read_text()
    return ("python3", "-c", source, f"openai/{options.model}", BASE_URL, str(options.context_tokens), task)


def _litellm_env(options: ReadyOptions) -> Mapping[str, str]:
    return LITELLM


def _kimi_cli(options: ReadyOptions, task: str) -> Sequence[str]:
    provider = {"type": "openai_legacy", "base_url": BASE_URL, "api_key": KEY_INSIDE}
    model = {"provider": "turnlog", "model": options.model, "max_context_size": options.context_tokens}
    config = {
        "default_model": "policy", "models": {"policy": model}, "providers": {"turnlog": provider},
        "loop_control": {"reserved_context_size": max(1000, options.context_tokens // 4)},  # its default is 50,000
    }  # fmt: skip
    always = ("--config", json.dumps(config), "--print")
    return ("kimi", *always, *options.arguments, f"--prompt={task}")


def _kimi_code(options: ReadyOptions, task: str) -> Sequence[str]:
    return ("kimi", "--output-format", "stream-json", *options.arguments, f"--prompt={task}")


def _kimi_code_env(options: ReadyOptions) -> Mapping[str, str]:
    return {
        "KIMI_MODEL_NAME": options.model,
        "KIMI_MODEL_PROVIDER_TYPE": "openai",
        "KIMI_MODEL_BASE_URL": BASE_URL,
        "KIMI_MODEL_API_KEY": KEY_INSIDE,
        "KIMI_MODEL_MAX_CONTEXT_SIZE": str(options.context_tokens),
    }


READY_AGENTS: Final[Mapping[str, ReadyAgent]] = {
    "claude-code": ReadyAgent("2.1.329", _claude_code, _claude_code_env),
    "codex": ReadyAgent("0.171.0", _codex, _openai_env),
    "opencode": ReadyAgent("1.18.33", _opencode, _opencode_env),
    "qwen-code": ReadyAgent("0.24.4", _qwen_code, _openai_env),
    "mini-swe-agent": ReadyAgent("2.4.6", _mini_swe_agent, _mini_swe_agent_env),
    "openhands": ReadyAgent("1.16.0", _openhands, _openhands_env),
    "terminus-2": ReadyAgent("0.26.0", _terminus_2, _litellm_env),
    "kimi-cli": ReadyAgent("1.51.0", _kimi_cli, _openai_env),
    "kimi-code": ReadyAgent("2.1.0", _kimi_code, _kimi_code_env),
}
UNSERVED: Final[Mapping[str, str]] = {
    "gemini-cli": "Gemini CLI speaks Google's API alone, which the gateway does not serve, and has no setting for "
    "another; use qwen-code, which descends from it, or put a proxy that translates into the image",
}
"""Agents that were tried and cannot use the gateway: name -> cause and remedy."""
