"""Calls, answers, and the input and output of verifiers: the values that environments exchange with the runner."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from turnlog.schemas.events.sessions import Outcome
from turnlog.schemas.types import BlobRef

Message = dict[str, Any]
"""An OpenAI chat message: role, content and, for an assistant, tool_calls."""
TaskRow = Mapping[str, Any]
"""A row of the dataset; it has at least `prompt`."""


@dataclass(frozen=True, slots=True)
class SandboxCall:
    """A tool call as the sandbox runs it: `python` {"code"}, `shell` {"command"} ...
    (turnlog.infra.environments.tools), or a tool that a package offers under `turnlog.tools`."""

    tool: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class SandboxAnswer:
    """The result of a call."""

    ok: bool
    """False if the tool failed or hit a limit."""
    output: str
    """Stdout, followed by stderr."""
    exit_code: int | None = None
    """Exit status of the program; None if none ended."""


@dataclass(frozen=True, slots=True)
class CommandEnd:
    """The end of an agent that is a program, and its results."""

    exit_code: int | None
    """Exit status, or None if the program did not end by itself. It proves nothing about success: examine the
    workspace."""
    output: str
    """Stdout and stderr in the order of writing; if too long, the middle is left out."""
    workspace: BlobRef | None
    """The workspace after the end (docs/sandbox.md, Workspaces)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """Input of a verifier."""

    task: TaskRow
    messages: tuple[Message, ...]
    """The whole conversation, the last assistant message included."""
    outcome: Outcome
    reason: str
    """Limit that a truncated session hit, or a program's exit status; empty otherwise."""
    ended: CommandEnd | None = None
    """Result of an agent that is a program; None for other agents."""
    players: Mapping[str, tuple[Message, ...]] = field(default_factory=dict)
    """Conversation of each player by its name, in a task of several players."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A reward, its components, and JSON-able evidence."""

    value: float
    components: dict[str, float] = field(default_factory=dict)
    evidence: dict[str, Any] = field(default_factory=dict)
    players: dict[str, float] = field(default_factory=dict)
    """Reward of each player that is trained, in a task of several players; empty if all of them get `value`."""


def add_rewards(rewards: Iterable[float]) -> float:
    """Return the sum of rewards, which is the same on every Python: since 3.12 `sum` corrects rounding errors. NaN if
    the sum is no number."""
    try:
        return math.fsum(rewards)
    except (OverflowError, ValueError):
        return math.nan


class Judged(Protocol):
    """Interface common to all verifiers: FunctionVerifier, and those of turnlog.infra.environments.verifiers."""

    @property
    def name(self) -> str:
        """Name that is recorded with the reward."""
        ...

    @property
    def version(self) -> str:
        """Version of the verifier. Change it if the same episode may get another reward."""
        ...


@dataclass(frozen=True, slots=True)
class FunctionVerifier:
    """A verifier that is a pure function. An exception becomes a RewardFailed, never a reward of 0."""

    name: str
    version: str
    judge: Callable[[Episode], Verdict]
    timeout_s: float = 300.0
    """Seconds after which the function is abandoned and recorded as RewardFailed."""
    late: bool = False
    """True if the session is finished before the reward is known."""


def text_of(message: Message) -> str:
    """Return the text of a message: its content, or the text blocks of it."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(block.get("text", "") for block in content if block.get("type") == "text")
