"""Harness profiles: which agent of a session sent a request, derived from what the harness itself puts into it.

A profile is a pure function of a request in any API; its result is TurnCompleted.agent_path. The fold reads "" and
"main" as the main lineage, a path that starts with "side" as a side call, `AGENT/compaction` as the request for a
summary of that agent's history, any other as a sub-agent of its own.

ProfileError
├── UnknownHarness     [gateway] harness names no profile
├── AmbiguousProfile   two packages offer the same name
└── BrokenProfile      an entry point of `turnlog.harness_profiles` is no profile
Sources: recorded traffic of Claude Code 2.1.329, Codex 0.169.0, opencode 1.18.33, Qwen Code 0.24.4 (docs/harnesses.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any, Protocol

from turnlog.infra.environments.players import NAME, PLAYERS, UNTRAINED
from turnlog.infra.offers import find_plugins
from turnlog.names import EntryPointGroup
from turnlog.processors.core.lineages import COMPACTION, MAIN, UNNAMED
from turnlog.producers.gateway.errors import BadRequest
from turnlog.producers.gateway.messages import Message
from turnlog.producers.gateway.python_harnesses import PYTHON_HARNESSES

GROUP = EntryPointGroup.HARNESS_PROFILES
"""Entry points: name = module:function."""
AUTO, NONE = "auto", "none"
PATH_HEADER = "x-turnlog-agent-path"
"""Header by which a client names the agent of a request itself. It takes precedence over every profile."""
PATH_CHARACTERS = 256
"""Maximum length of an agent path in that header."""
TITLE = "side/title"
"""Path of a request for a title. All other requests that a harness sends without tools outside of the conversation have
UNNAMED; the last component of one for a summary is COMPACTION, below `side` if it has no tools."""
SUMMARISES = {
    "claude_code": ("create a detailed summary of",),
    "codex": ("CONTEXT CHECKPOINT COMPACTION",),
    "opencode": ("anchored summary", "<prior-summary>"),
    "qwen_code": ("produce the <state_snapshot>",),
}
"""Harness -> words of the last message of its requests for a summary, in all of its wordings."""


class ProfileError(Exception):
    """Base class of the tree in this module's docstring."""


class UnknownHarness(ProfileError):
    """The message names the profiles that exist."""


class AmbiguousProfile(ProfileError):
    """Remedy: uninstall one of the packages."""


class BrokenProfile(ProfileError):
    """The message names the entry point and why it cannot be used."""


class Profile(Protocol):
    """Rule for one harness."""

    def __call__(
        self, headers: Mapping[str, str], system: str, tools: Sequence[Any] | None, messages: Sequence[Message]
    ) -> str | None:
        """Return the agent path of a request; None leaves the lineage to the fold.

        `headers`: names in any case if the mapping ignores case, else lower-case. `system`: the text of the leading
        system messages as received. `tools`: schemas in the API's own shape. `messages`: normalised messages."""
        ...


def claude_code(
    headers: Mapping[str, str], system: str, tools: Sequence[Any] | None, messages: Sequence[Message]
) -> str | None:
    """Recognise Claude Code's agents: sub-agents name themselves in a header, or at least in the billing line of their
    system text."""
    compacts = _asks_for_summary("claude_code", tools, messages)
    if agent := headers.get("x-claude-code-agent-id"):
        path = f"agent/{agent}"
    elif not tools:
        return f"side/{COMPACTION}" if compacts else _beside(system)
    else:
        path = "agent/unnamed" if "cc_is_subagent=true" in system.partition("\n")[0] else MAIN
    return f"{path}/{COMPACTION}" if compacts else path


def codex(
    headers: Mapping[str, str], system: str, tools: Sequence[Any] | None, messages: Sequence[Message]
) -> str | None:
    """Recognise Codex's agents: every agent has a thread, and the first one's id is the session's."""
    thread = headers.get("thread-id")
    path = MAIN if thread in (None, headers.get("session-id")) else f"agent/{thread}"
    named = '"request_kind":"compaction"' in headers.get("x-codex-turn-metadata", "")
    return _of_agent("codex", path, system, tools, messages, compacts=named)


def opencode(
    headers: Mapping[str, str], system: str, tools: Sequence[Any] | None, messages: Sequence[Message]
) -> str | None:
    """Recognise opencode's agents: a sub-agent is a session with a parent. Titles come first, without tools."""
    path = f"agent/{headers.get('x-session-id', 'unnamed')}" if headers.get("x-parent-session-id") else MAIN
    return _of_agent("opencode", path, system, tools, messages)


def qwen_code(
    headers: Mapping[str, str], system: str, tools: Sequence[Any] | None, messages: Sequence[Message]
) -> str | None:
    """Recognise Qwen Code's side calls and summaries: it marks no agent, so other requests without tools are side calls
    and the fold decides about the rest."""
    path = _of_agent("qwen_code", MAIN, system, tools, messages)
    return None if path == MAIN else path


PROFILES: dict[str, Profile] = {
    "claude_code": claude_code,
    "codex": codex,
    "opencode": opencode,
    "qwen_code": qwen_code,
    **PYTHON_HARNESSES,
}
"""Built-in profiles by their names in [gateway] harness."""
USER_AGENTS = {
    "claude-cli/": "claude_code",
    "codex": "codex",
    "opencode/": "opencode",
    "QwenCode/": "qwen_code",
    "kimi-code-cli/": "kimi_code",
}
"""Prefix of each harness's User-Agent -> its profile."""


@dataclass(frozen=True, slots=True)
class Harness:
    """The profile of a gateway's requests, or the rule that recognises the profile of each request."""

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
        """Return the path of one request; None if no profile decides. `agent` is the session's agent name, `raw` the
        messages as received. Raises BadRequest if the request names a path that cannot be one."""
        if (stated := headers.get(PATH_HEADER)) is not None:
            return stated_path(stated)
        name = recognise_profile(agent, headers, self.profiles) if self.name == AUTO else self.name
        if name not in self.profiles:
            return None
        return self.profiles[name](headers, system_text(raw), tools, messages)


def harness(name: str) -> Harness:
    """Return the harness of [gateway] harness: auto, none, a built-in profile, or one of an entry point, which
    overrides a built-in of the same name. Raises UnknownHarness, AmbiguousProfile, BrokenProfile."""
    offers = find_plugins(GROUP, "harness profile", AmbiguousProfile)
    profiles = PROFILES | {name: _load_profile(entry) for name, entry in offers.items()}
    if name not in (AUTO, NONE, *profiles):
        raise UnknownHarness(f"[gateway] harness is {name!r}; it must be auto, none, {', '.join(sorted(profiles))}")
    return Harness(name, {} if name == NONE else profiles)


def stated_path(stated: str) -> str:
    """Return the agent path in PATH_HEADER. Raises BadRequest."""
    if len(stated) > PATH_CHARACTERS or not all(NAME.fullmatch(part) for part in stated.split("/")):
        raise BadRequest(
            f"{PATH_HEADER} must be names joined by `/`, each of 1 to 64 letters, digits, `_`, `.` or `-`, such as "
            f"player/white, with at most {PATH_CHARACTERS} characters",
            param=PATH_HEADER,
        )
    return stated


def is_player(path: str | None) -> bool:
    """Return whether an agent path is that of a player or of a user simulator."""
    return path is not None and path.startswith((PLAYERS, UNTRAINED))


def recognise_profile(agent: str, headers: Mapping[str, str], profiles: Mapping[str, Profile]) -> str:
    """Return the profile's name, by User-Agent or else by the agent name that the session was opened with; "none" for
    neither."""
    sent = headers.get("user-agent", "")
    for start, name in USER_AGENTS.items():
        if sent.startswith(start):
            return name
    named = agent.strip().lower().replace("-", "_").replace(" ", "_")
    return named if named in profiles else NONE


def system_text(raw: Sequence[Any]) -> str:
    """Return the text of the leading system messages as received, including billing lines, with a line break between
    blocks."""
    texts: list[Any] = []
    for one in raw:
        if not isinstance(one, dict) or one.get("role") not in ("system", "developer"):
            break
        content = one.get("content")
        blocks = content if isinstance(content, list) else [content]
        texts += [block.get("text") if isinstance(block, dict) else block for block in blocks]
    return "\n".join(text for text in texts if isinstance(text, str))


def _of_agent(
    name: str,
    path: str,
    system: str,
    tools: Sequence[Any] | None,
    messages: Sequence[Message],
    *,
    compacts: bool = False,
) -> str:
    """Return the path of a request by the agent of a harness that sends what is no turn of its conversation without
    tools. `compacts`: the harness itself says that it asks for a summary."""
    if compacts or _asks_for_summary(name, tools, messages):
        return (
            f"{path}/{COMPACTION}" if tools else f"side/{COMPACTION}" if path == MAIN else f"side/{path}/{COMPACTION}"
        )
    return path if tools else _beside(system)


def _asks_for_summary(name: str, tools: Sequence[Any] | None, messages: Sequence[Message]) -> bool:
    """Return whether the last message of a request asks for a summary. A first request with tools has no history: a
    task that is worded like that is a task."""
    if not messages or (tools and all(one.role != "assistant" for one in messages)):
        return False
    return messages[-1].role == "user" and any(words in messages[-1].text for words in SUMMARISES[name])


def _beside(system: str) -> str:
    return TITLE if "title" in system.partition("\n")[0].lower() else UNNAMED


def _load_profile(entry: EntryPoint) -> Profile:
    try:
        profile: Profile = entry.load()
    except Exception as error:  # a module may raise anything while it is imported
        raise BrokenProfile(f"entry point {GROUP} {entry.name} = {entry.value} cannot be loaded: {error}") from error
    if not callable(profile):
        raise BrokenProfile(f"entry point {GROUP} {entry.name} = {entry.value} is not a function")
    return profile
