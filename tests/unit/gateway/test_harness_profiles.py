"""Harness profiles: which agent of a session asked, from what each harness puts into its requests."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.each import each
from turnlog.producers.gateway.messages import normalise_messages
from turnlog.producers.gateway.profiles import AmbiguousProfile, BrokenProfile, UnknownHarness, harness, system_text

TOOLS = [{"type": "function", "function": {"name": "Bash", "parameters": {}}}]
TASK = {"role": "user", "content": "write out.txt"}
CLAUDE = {"user-agent": "claude-cli/2.1.329 (external, sdk-cli)"}
CODEX = {"user-agent": "codex_exec/0.169.0 (Debian 12.0.0; x86_64)", "session-id": "t1", "thread-id": "t1"}
OPENCODE = {"user-agent": "opencode/1.18.33 ai-sdk/provider-utils/4.0.23", "x-session-id": "ses_1"}
CHILD = OPENCODE | {"x-session-id": "ses_2", "x-parent-session-id": "ses_1"}
QWEN = {"user-agent": "QwenCode/0.24.4 (linux; x64)"}


def path(
    headers: dict[str, str], tools: list[Any] | None = TOOLS, system: Any = "You are an agent.", *,
    name: str = "auto", agent: str = "unknown",
) -> str | None:  # fmt: skip
    """The path of a request with one system message and the task."""
    raw = [{"role": "system", "content": system}, TASK]
    return harness(name).agent_path(agent, headers, raw, tools, normalise_messages(raw))


def billed(more: str = "") -> list[dict[str, str]]:
    """Claude Code's system text: its billing line first."""
    line = f"x-anthropic-billing-header: cc_version=2.1.329.ea0; cc_entrypoint=sdk-cli;{more}"
    return [{"type": "text", "text": line}, {"type": "text", "text": "You are a Claude agent."}]


@each(
    ("headers", "tools", "system", "expected"),
    [
        (CLAUDE, TOOLS, billed(), "main"),
        (CLAUDE | {"x-claude-code-agent-id": "a14d"}, TOOLS, billed(" cc_is_subagent=true;"), "agent/a14d"),
        (CLAUDE, TOOLS, billed(" cc_is_subagent=true;"), "agent/unnamed"),
        (CLAUDE, TOOLS, "Explain cc_is_subagent.\ncc_is_subagent=true", "main"),
        (CLAUDE, None, "Write a short title for this session.", "side/title"),
        (CLAUDE, [], "Summarise the conversation.", "side/no-tools"),
        (CLAUDE | {"x-claude-code-agent-id": "a14d"}, None, "You are an agent.", "agent/a14d"),
        (CODEX, TOOLS, "You are a coding agent.", "main"),
        (CODEX | {"thread-id": "t2"}, TOOLS, "You are a coding agent.", "agent/t2"),
        (CODEX, None, "Summarise.", "side/no-tools"),
        (OPENCODE, None, "You are a title generator. You output ONLY a thread title.", "side/title"),
        (OPENCODE, TOOLS, "You are opencode.", "main"),
        (CHILD, TOOLS, "You are opencode.", "agent/ses_2"),
        (QWEN, TOOLS, "You are Qwen Code.", None),
        (QWEN, None, "Summarise.", "side/no-tools"),
    ],
)  # fmt: skip
def test_each_harness_is_known_by_its_user_agent_and_its_agents_by_their_marks(
    headers: dict[str, str], tools: list[Any] | None, system: Any, expected: str | None
) -> None:
    assert path(headers, tools, system) == expected


HISTORY = [TASK, {"role": "assistant", "content": "written"}]
CLAUDE_ASKS = "Your task is to create a detailed summary of the conversation so far."
CODEX_ASKS = "You are performing a CONTEXT CHECKPOINT COMPACTION."
OPENCODE_ASKS = "<conversation>..</conversation> Create a new anchored summary from the conversation history."
OPENCODE_ASKS_AGAIN = "Here is the summary: <prior-summary>..</prior-summary>"
QWEN_ASKS = "First, reason. Then, produce the <state_snapshot> XML."
NAMED = {"x-codex-turn-metadata": '{"session_id":"t1","request_kind":"compaction"}'}


@each(
    ("headers", "tools", "asks", "expected"),
    [
        (CLAUDE, TOOLS, CLAUDE_ASKS, "main/compaction"),
        (CLAUDE, None, CLAUDE_ASKS, "side/compaction"),
        (CLAUDE | {"x-claude-code-agent-id": "a14d"}, TOOLS, CLAUDE_ASKS, "agent/a14d/compaction"),
        (CODEX, None, CODEX_ASKS, "side/compaction"),
        (CODEX | NAMED, None, "in other words", "side/compaction"),
        (CODEX | NAMED, TOOLS, "in other words", "main/compaction"),
        (CODEX | {"thread-id": "t2"}, None, CODEX_ASKS, "side/agent/t2/compaction"),
        (CODEX, None, "in other words", "side/no-tools"),
        (OPENCODE, None, OPENCODE_ASKS, "side/compaction"),
        (OPENCODE, None, OPENCODE_ASKS_AGAIN, "side/compaction"),
        (CHILD, None, OPENCODE_ASKS, "side/agent/ses_2/compaction"),
        (QWEN, None, QWEN_ASKS, "side/compaction"),
        (QWEN, TOOLS, QWEN_ASKS, "main/compaction"),
        (QWEN, TOOLS, "go on", None),
        (QWEN, TOOLS, CLAUDE_ASKS, None),  # these are words of another harness
    ],
)
def test_a_request_for_a_summary_is_a_compaction_of_the_agent_that_sends_it(
    headers: dict[str, str], tools: list[Any] | None, asks: str, expected: str | None
) -> None:
    raw = [{"role": "system", "content": "You are an agent."}, *HISTORY, {"role": "user", "content": asks}]
    assert harness("auto").agent_path("unknown", headers, raw, tools, normalise_messages(raw)) == expected
    answered = [*raw, {"role": "assistant", "content": "summary"}, TASK]
    assert "compaction" not in str(
        harness("auto").agent_path("", CLAUDE, answered, TOOLS, normalise_messages(answered))
    )


def test_a_task_that_is_worded_like_the_request_for_a_summary_is_a_task() -> None:
    for headers, asks in ((CLAUDE, CLAUDE_ASKS), (CODEX, CODEX_ASKS), (OPENCODE, OPENCODE_ASKS), (QWEN, QWEN_ASKS)):
        raw = [{"role": "system", "content": "You are an agent."}, {"role": "user", "content": asks}]
        path = harness("auto").agent_path("unknown", headers, raw, TOOLS, normalise_messages(raw))
        assert path == (None if headers is QWEN else "main")


def test_a_client_that_is_no_known_harness_leaves_the_lineages_to_the_fold() -> None:
    assert path({"user-agent": "python-httpx/0.28"}, None) is None
    assert path({}, agent="white-box") is None


def test_the_sessions_agent_name_says_which_harness_where_the_user_agent_does_not() -> None:
    assert path({"x-parent-session-id": "p", "x-session-id": "c"}, agent="opencode") == "agent/c"
    assert path({"x-claude-code-agent-id": "a1"}, agent="Claude-Code") == "agent/a1"
    assert path(OPENCODE | {"x-claude-code-agent-id": "a1"}, agent="claude-code") == "main"


def test_the_setting_fixes_a_profile_or_none() -> None:
    assert path(CLAUDE | {"x-claude-code-agent-id": "a1"}, name="none") is None
    assert path({"x-parent-session-id": "p", "x-session-id": "c"}, name="opencode") == "agent/c"
    with pytest.raises(
        UnknownHarness,
        match="auto, none, claude_code, codex, kimi_cli, kimi_code, mini_swe_agent, opencode, openhands, qwen_code, ",
    ):
        harness("cursor")


def test_the_system_text_is_what_stands_before_the_first_other_message() -> None:
    raw = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, "b"]},
        {"role": "system", "content": "c"},
        TASK,
        {"role": "system", "content": "d"},
    ]
    assert system_text(raw) == "a\nb\nc"
    assert system_text([TASK]) == ""


PACKAGE = """
def by_room(headers, system, tools, messages):
    return "room/" + headers["x-room"]

LIMIT = 3
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Installs a package `rooms` of the user's with one entry point, given as `name = module:attribute`."""
    (tmp_path / "rooms.py").write_text(PACKAGE)
    information = tmp_path / "rooms-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: rooms\nVersion: 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(entry: str) -> None:
        (information / "entry_points.txt").write_text(f"[turnlog.harness_profiles]\n{entry}\n")
        importlib.invalidate_caches()

    return install


def test_a_profile_of_ones_own_comes_by_an_entry_point(installed: Callable[[str], None]) -> None:
    installed("rooms = rooms:by_room")
    assert path({"x-room": "7"}, name="rooms") == "room/7"
    assert path({"x-room": "7"}, agent="rooms") == "room/7"


def test_two_packages_that_offer_one_profile_are_named(installed: Callable[[str], None], tmp_path: Path) -> None:
    installed("rooms = rooms:by_room")
    rival = tmp_path / "rival-1.dist-info"
    rival.mkdir()
    (rival / "METADATA").write_text("Metadata-Version: 2.1\nName: rival\nVersion: 1\n")
    (rival / "entry_points.txt").write_text("[turnlog.harness_profiles]\nrooms = rival:by_room\n")
    with pytest.raises(AmbiguousProfile, match=r"'rooms', .* rival:by_room and rooms:by_room .* two packages offer"):
        harness("rooms")


@pytest.mark.parametrize(("entry", "says"), [("rooms:absent", "rooms:absent"), ("rooms:LIMIT", "is not a function")])
def test_an_entry_point_that_is_no_profile_ends_the_start(
    installed: Callable[[str], None], entry: str, says: str
) -> None:
    installed(f"rooms = {entry}")
    with pytest.raises(BrokenProfile, match=says):
        harness("auto")
