"""Harness profiles of agents written in Python (mini-swe-agent, OpenHands, Terminus-2, Kimi CLI), and of Kimi Code.

The OpenAI clients of the former send no User-Agent of their own and no header about the agent, so `auto` selects them
by the name that the session was opened with. Agents are told apart by their tools, and a request for a summary is
recognised by words of its last message. Sources: recorded traffic of mini-swe-agent 2.4.6, OpenHands 1.16.0, Terminus-2
of harbor 0.26.0, Kimi CLI 1.51.0 and its successor Kimi Code 2.1.0 (tests/unit/gateway/harnesses).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from turnlog.processors.core.lineages import COMPACTION, MAIN, UNNAMED
from turnlog.producers.gateway.messages import Message

CONTINUED_SUMMARY = f"/{COMPACTION}"
"""End of the path of a request for a summary that continues the history of its agent."""
OPENHANDS_SUMMARISES = "context-aware state summary"
KIMI_SUMMARISES = "compact this conversation context"
KIMI_CODE_SUMMARISES = "Create a handoff summary for the"
TERMINUS_HANDS_OFF = (
    "You are about to hand off your work to another AI agent",
    "You are picking up work from a previous AI agent on this task",
    "The next agent has a few questions for you",
)
"""Beginnings of the three requests by which Terminus-2 summarises: the summary, questions about it, and answers. It
goes on with its first message, the questions and the answers."""


def mini_swe_agent(
    headers: Mapping[str, str], system: str, tools: Sequence[Any] | None, messages: Sequence[Message]
) -> str | None:
    """Recognise the one agent: it neither delegates nor compacts. Its text-based variant offers no tools."""
    return MAIN


def openhands(
    headers: Mapping[str, str], system: str, tools: Sequence[Any] | None, messages: Sequence[Message]
) -> str | None:
    """Recognise OpenHands' agents: only the main one can delegate, by the tool `task`."""
    return _by_delegating_tool("task", (OPENHANDS_SUMMARISES,), tools, messages)


def kimi_cli(
    headers: Mapping[str, str], system: str, tools: Sequence[Any] | None, messages: Sequence[Message]
) -> str | None:
    """Recognise the agents of Kimi CLI and Kimi Code: only the main one can delegate, by the tool `Agent`."""
    return _by_delegating_tool("Agent", (KIMI_SUMMARISES, KIMI_CODE_SUMMARISES), tools, messages)


def terminus_2(
    headers: Mapping[str, str], system: str, tools: Sequence[Any] | None, messages: Sequence[Message]
) -> str | None:
    """Recognise the one agent, which acts by the text of its messages, without tools, and its handing over."""
    return MAIN + CONTINUED_SUMMARY if text_of_last(messages).startswith(TERMINUS_HANDS_OFF) else MAIN


def _by_delegating_tool(
    delegates: str, summarises: tuple[str, ...], tools: Sequence[Any] | None, messages: Sequence[Message]
) -> str | None:
    """Return the path of an agent of a harness whose sub-agents lack the tool `delegates`. Each sub-agent is named by
    its task, since nothing else tells those that run at once apart. Requests for a summary have one of the words
    `summarises`; a first request with tools has no history, whatever its words."""
    compacts = any(words in text_of_last(messages) for words in summarises)
    if not tools:
        return f"side/{COMPACTION}" if compacts else UNNAMED
    path = MAIN
    if delegates not in map(_tool_name, tools):
        task = next((message.text for message in messages if message.role == "user"), "")
        path = f"agent/{hashlib.sha256(task.encode(errors='replace')).hexdigest()[:12]}"
    begun = any(message.role == "assistant" for message in messages)
    return path + CONTINUED_SUMMARY if compacts and begun else path


def _tool_name(tool: Any) -> str:
    about = tool.get("function", tool) if isinstance(tool, dict) else {}
    return str(about.get("name", "")) if isinstance(about, dict) else ""


def text_of_last(messages: Sequence[Message]) -> str:
    """Return the text of the last message if it is the user's, else an empty one."""
    return messages[-1].text if messages and messages[-1].role == "user" else ""


PYTHON_HARNESSES = {
    "mini_swe_agent": mini_swe_agent,
    "openhands": openhands,
    "terminus_2": terminus_2,
    "kimi_cli": kimi_cli,
    "kimi_code": kimi_cli,
}
"""Profiles by their names in [gateway] harness."""
