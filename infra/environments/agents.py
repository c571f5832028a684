"""Agents that an environment may bring in place of the built-in loop over tools: a function, or a program."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnlog.infra.environments.episodes import Message, SandboxAnswer, SandboxCall, TaskRow, Verdict


def no_mapping(name: str, arguments: str) -> SandboxCall | str:
    """Answer that there is no such tool."""
    return f"there is no tool {name!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSession:
    """Arguments of an agent's function: enough for any OpenAI or Anthropic client."""

    base_url: str
    """Base URL for OpenAI's clients, ending in /v1. Anthropic's take `root_url`."""
    api_key: str = field(repr=False)
    """Key that is valid for this session only, until it ends."""
    model: str
    """Name of the policy."""
    task: TaskRow
    tools: tuple[dict[str, Any], ...]
    """Tool declarations of the task, and of the servers that its opening call has listed."""
    max_turns: int
    """Maximum number of turns of the session: the gateway refuses further ones."""
    call: Callable[[SandboxCall], Awaitable[SandboxAnswer]]
    """Runs a call in the session's sandbox. Its exceptions do not count as a failure of the agent: the session
    is retried."""
    messages: tuple[Message, ...] = ()
    """Initial conversation of the task, with what its opening call adds."""
    tool_call: Callable[[str, str], SandboxCall | str] = no_mapping
    """Maps a tool call of the model (name, arguments as JSON text) to what `call` runs; a string is the answer itself.
    """

    @property
    def root_url(self) -> str:
        """Base URL without /v1."""
        return self.base_url.removesuffix("/v1")


class AgentError(Exception):
    """Raised by an agent's function if the agent itself failed. The session gets a reward, like that of any
    other agent."""


@dataclass(frozen=True, slots=True)
class TruncatedRun:
    """Result of an agent's function that a limit of its own ended: the session ends as `truncated`."""

    reason: str
    """Name of the limit."""
    verdict: Verdict | None = None
    """Reward of what was done until then; None if the recipe's verifier judges."""


@dataclass(frozen=True, slots=True)
class FunctionAgent:
    """An agent written with any framework, which runs in the runner's process and its event loop.

    It returns None, so that the recipe's verifier judges, or the Verdict, or a TruncatedRun. Exceptions other than
    AgentError do not count as a failure of the agent: the session ends as `infra_failure` and is retried, as after the
    death of its runner. If the gateway refused a turn because of a limit, the session is `truncated`.
    """

    name: str
    version: str
    run: Callable[[AgentSession], Awaitable[Verdict | TruncatedRun | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandAgent:
    """An agent that is a program (Claude Code, Codex, a script). It runs as one call in the session's sandbox.

    It reaches the gateway at GATEWAY_INSIDE (turnlog.infra.environments.tools), with any word as its key, and otherwise
    only what `sandbox.allow` of the recipe names. The session ends with the program. A program that ended without a
    turn of the policy did not act: `infra_failure`, retried. A function in place of a value receives the task's row.
    """

    name: str
    version: str
    argv: Sequence[str] | Callable[[TaskRow], Sequence[str]]
    """The program, searched on the sandbox's PATH, and its arguments. Its standard input is empty."""
    env: Mapping[str, str] | Callable[[TaskRow], Mapping[str, str]] = field(default_factory=dict)
    """Variables added to the sandbox's. Not for secrets, because they are recorded on the log."""
    files: Mapping[str, str] | Callable[[TaskRow], Mapping[str, str]] = field(default_factory=dict)
    """Path in the workspace -> text, written before the start."""
    mcp: Sequence[Mapping[str, Any]] = ()
    """MCP servers that the program reaches through the worker, by name below MCP_INSIDE; see
    turnlog.plugins.mcp.mcp_config."""
