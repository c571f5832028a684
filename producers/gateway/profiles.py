"""Harness profiles: which agent of a session sent a request, said by what the harness itself puts into it.

A profile is a pure function of a request in any API; what it answers is TurnCompleted.agent_path. The fold reads "" and
"main" as the main lineage, a path that starts with "side" as a side call, any other as a sub-agent of its own.

ProfileError
├── UnknownHarness     [gateway] harness names no profile
├── AmbiguousProfile   two packages offer one name
└── BrokenProfile      an entry point of `turnlog.harness_profiles` that is no profile
Sources: recorded traffic of Claude Code 2.1.329, Codex 0.169.0, opencode 1.18.33, Qwen Code 0.24.4 (docs/harnesses.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any, Protocol

from turnlog.infra.offers import offered
from turnlog.names import EntryPointGroup
from turnlog.producers.gateway.messages import Message

GROUP = EntryPointGroup.HARNESS_PROFILES
"""Entry points: name = module:function."""
AUTO, NONE = "auto", "none"
MAIN = "main"
TITLE, NO_TOOLS = "side/title", "side/no-tools"
"""Requests beside the conversation: titles, and whatever else a harness asks of a model without tools."""


class ProfileError(Exception):
    """Base of the tree above."""


class UnknownHarness(ProfileError):
    """Names the profiles that there are."""


class AmbiguousProfile(ProfileError):
    """Remedy: uninstall one of the packages."""


class BrokenProfile(ProfileError):
    """Names the entry point and why it cannot be used."""


class Profile(Protocol):
    """One harness."""

    def __call__(
        self, headers: Mapping[str, str], system: str, tools: Sequence[Any] | None, messages: Sequence[Message]
    ) -> str | None:
        """The agent path of a request; None leaves the lineage to the fold.

        `headers`: names in any case if the mapping ignores case, else lower-case. `system`: the text of the leading
        system messages as they came. `tools`: schemas in the API's own shape. `messages`: canonical ones.
        """
        ...


def claude_code(
    headers: Mapping[str, str], system: str, tools: Sequence[Any] | None, messages: Sequence[Message]
) -> str | None:
    """Claude Code: sub-agents name themselves in a header, or at least in the billing line of their system text."""
    if agent := headers.get("x-claude-code-agent-id"):
        return f"agent/{agent}"
    if not tools:
        return _beside(system)
    return "agent/unnamed" if "cc_is_subagent=true" in system.partition("\n")[0] else MAIN


def codex(
    headers: Mapping[str, str], system: str, tools: Sequence[Any] | None, messages: Sequence[Message]
) -> str | None:
    """Codex: every agent has a thread; the first one's id is the session's."""
    if not tools:
        return _beside(system)
    thread = headers.get("thread-id")
    return MAIN if thread in (None, headers.get("session-id")) else f"agent/{thread}"


def opencode(
    headers: Mapping[str, str], system: str, tools: Sequence[Any] | None, messages: Sequence[Message]
) -> str | None:
    """opencode: a sub-agent is a session with a parent; the title is asked for first, without tools."""
    if not tools:
        return _beside(system)
    if headers.get("x-parent-session-id"):
        return f"agent/{headers.get('x-session-id', 'unnamed')}"
    return MAIN


def qwen_code(
    headers: Mapping[str, str], system: str, tools: Sequence[Any] | None, messages: Sequence[Message]
) -> str | None:
    """Qwen Code marks nothing: requests without tools are beside the conversation, the fold decides the rest."""
    return None if tools else _beside(system)


PROFILES: dict[str, Profile] = {
    "claude_code": claude_code,
    "codex": codex,
    "opencode": opencode,
    "qwen_code": qwen_code,
}
"""The built-in profiles, by the name that [gateway] harness gives them."""
USER_AGENTS = {"claude-cli/": "claude_code", "codex": "codex", "opencode/": "opencode", "QwenCode/": "qwen_code"}
"""How each begins its User-Agent."""


@dataclass(frozen=True, slots=True)
class Harness:
    """The profile of a gateway's requests, or the rule by which each request's is recognised."""

    name: str
    profiles: Mapping[str, Profile]

    def agent_path(
        self,
        agent: str,
        headers: Mapping[str, str],
        raw: Sequence[Any],
        tools: Sequence[Any] | None,
        messages: Sequence[Message],
    ) -> str | None:
        """The path of one request; None where no profile speaks. `agent`: the session's agent name; `raw`: messages."""
        name = recognised(agent, headers, self.profiles) if self.name == AUTO else self.name
        if name not in self.profiles:
            return None
        return self.profiles[name](headers, system_text(raw), tools, messages)


def harness(name: str) -> Harness:
    """The harness of [gateway] harness: auto, none, a built-in profile or one of an entry point, which wins over a
    built-in of its name. Raises UnknownHarness, AmbiguousProfile, BrokenProfile."""
    offers = offered(GROUP, "harness profile", AmbiguousProfile)
    profiles = PROFILES | {name: _loaded(entry) for name, entry in offers.items()}
    if name not in (AUTO, NONE, *profiles):
        raise UnknownHarness(f"[gateway] harness is {name!r}; it must be auto, none, {', '.join(sorted(profiles))}")
    return Harness(name, {} if name == NONE else profiles)


def recognised(agent: str, headers: Mapping[str, str], profiles: Mapping[str, Profile]) -> str:
    """The profile's name by User-Agent, else by the name that the session was opened with; "none" for neither."""
    sent = headers.get("user-agent", "")
    for start, name in USER_AGENTS.items():
        if sent.startswith(start):
            return name
    named = agent.strip().lower().replace("-", "_").replace(" ", "_")
    return named if named in profiles else NONE


def system_text(raw: Sequence[Any]) -> str:
    """The text of the leading system messages as they came, billing lines included, one line break between blocks."""
    texts: list[Any] = []
    for one in raw:
        if not isinstance(one, dict) or one.get("role") not in ("system", "developer"):
            break
        content = one.get("content")
        blocks = content if isinstance(content, list) else [content]
        texts += [block.get("text") if isinstance(block, dict) else block for block in blocks]
    return "\n".join(text for text in texts if isinstance(text, str))


def _beside(system: str) -> str:
    return TITLE if "title" in system.partition("\n")[0].lower() else NO_TOOLS


def _loaded(entry: EntryPoint) -> Profile:
    try:
        profile: Profile = entry.load()
    except Exception as error:  # a module may raise anything while it is imported
        raise BrokenProfile(f"entry point {GROUP} {entry.name} = {entry.value} cannot be loaded: {error}") from error
    if not callable(profile):
        raise BrokenProfile(f"entry point {GROUP} {entry.name} = {entry.value} is no function")
    return profile
