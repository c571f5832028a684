"""The summary of each harness, requested as that harness does: through the gateway to the log, and folded.

The requests have the headers, roles and marks of recorded traffic of Claude Code 2.1.329, Codex 0.171.0, opencode
1.18.33 and Qwen Code 0.24.4; their texts are shortened to the words that the profiles read.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from turnlog.processors.core.fold.group import GroupFold
from turnlog.processors.core.fold_versions import VERSIONS
from turnlog.processors.core.methods.rules import FoldRules
from turnlog.schemas.events import RewardAssigned, SegmentSample, TurnTreeAssembled, Verifier
from turnlog.schemas.topics import TOPIC_OF

RULES = FoldRules(run_id="r", settings_sha256="s" * 64, min_valid=1)
FIRST, SUMMARY, LAST = "first of all 12", "So far: 12 and 30, to be added.", "it is 42"
TOOLS = [{"type": "function", "function": {"name": "calc", "parameters": {"type": "object", "properties": {}}}}]
CLAUDE = {"user-agent": "claude-cli/2.1.329 (external, sdk-cli)"}
CODEX = {"user-agent": "codex_exec/0.171.0 (Debian 12.0.0; x86_64)", "session-id": "t1", "thread-id": "t1"}
OPENCODE = {"user-agent": "opencode/1.18.33 ai-sdk/provider-utils/4.0.23", "x-session-id": "ses_1"}
QWEN = {"user-agent": "QwenCode/0.24.4 (linux; x64)"}
Talk = Callable[[Any, Any], Awaitable[None]]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def chat(headers: dict[str, str]) -> Callable[..., Awaitable[dict[str, Any]]]:
    """Requests of a client that has these headers, and their answers as it echoes them."""

    async def ask(rig: Any, session: Any, messages: Any, tools: Any = TOOLS) -> dict[str, Any]:
        body = {"messages": messages} | ({"tools": tools} if tools else {})
        headed = headers | {"authorization": f"Bearer {session['token']}"}
        answer = await rig.http.post("/v1/chat/completions", json=body, headers=headed)
        assert answer.status_code == 200, answer.text
        message: dict[str, Any] = answer.json()["choices"][0]["message"]
        return message

    return ask


async def claude_code(rig: Any, session: Any) -> None:
    """The summary is the next turn of the conversation; only what its tags enclose is kept."""
    tools = [{"name": "calc", "input_schema": {"type": "object", "properties": {}}}]

    async def ask(messages: Any) -> dict[str, Any]:
        body = {
            "model": "policy",
            "max_tokens": 200,
            "system": "You are an agent.",
            "messages": messages,
            "tools": tools,
        }
        headed = CLAUDE | {"x-api-key": session["token"], "anthropic-version": "2023-06-01"}
        answer = await rig.http.post("/v1/messages?beta=true", json=body, headers=headed)
        assert answer.status_code == 200, answer.text
        return {"role": "assistant", "content": answer.json()["content"]}

    rig.script.says(FIRST)
    rig.script.says(f"<analysis>hm</analysis>\n<summary>\n{SUMMARY}\n</summary>")
    task = [user("12 + 30?")]
    task += [await ask(task), user("Your task is to create a detailed summary of the conversation so far.")]
    await ask(task)
    rig.script.says(LAST)
    await ask([user(f"This session is continued. Summary:\n{SUMMARY}\nGo on.")])


async def codex(rig: Any, session: Any) -> None:
    """The summary is requested by the same history without tools, and follows the user's messages."""
    tools = [{"type": "function", "name": "calc", "parameters": {"type": "object", "properties": {}}}]

    def item(role: str, text: str) -> dict[str, Any]:
        kind = "output_text" if role == "assistant" else "input_text"
        return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}

    async def ask(items: Any, tools: Any = tools) -> list[Any]:
        body = {"model": "policy", "input": items, "store": False} | ({"tools": tools} if tools else {})
        headed = CODEX | {"authorization": f"Bearer {session['token']}"}
        answer = await rig.http.post("/v1/responses", json=body, headers=headed)
        assert answer.status_code == 200, answer.text
        output: list[Any] = answer.json()["output"]
        return output

    for text in (FIRST, SUMMARY, LAST):
        rig.script.says(text)
    task = [item("developer", "You are a coding agent."), item("user", "12 + 30?")]
    history = task + await ask(task)
    await ask([*history, item("user", "You are performing a CONTEXT CHECKPOINT COMPACTION.")], tools=None)
    await ask([*task, item("user", f"Another model produced a summary: {SUMMARY}")])


async def opencode(rig: Any, session: Any) -> None:
    """The summary is requested of another agent, which gets the history as one text; it comes back as an answer."""
    ask = chat(OPENCODE)
    for text in (FIRST, SUMMARY, LAST):
        rig.script.says(text)
    task = [system("You are opencode."), user("12 + 30?")]
    await ask(rig, session, task)
    quoted = f"<conversation>{FIRST}</conversation>\nCreate a new anchored summary from the conversation history."
    await ask(rig, session, [system("You are a context agent."), user(quoted)], tools=None)
    summary = {"role": "assistant", "content": SUMMARY}
    await ask(rig, session, [system("You are opencode."), user("What did we do so far?"), summary, user("Go on.")])


async def qwen_code(rig: Any, session: Any) -> None:
    """The summary is requested by a system text of its own, without tools."""
    ask = chat(QWEN)
    for text in (FIRST, f"<state_snapshot>\n{SUMMARY}\n</state_snapshot>", LAST):
        rig.script.says(text)
    task = [system("You are Qwen Code."), user("12 + 30?")]
    task += [await ask(rig, session, task)]
    asks = user("First, reason in your <analysis> block. Then, produce the <state_snapshot> XML.")
    await ask(rig, session, [system("You summarize a conversation."), *task[1:], asks], tools=None)
    restored = user(f"<state_snapshot>\n{SUMMARY}\n</state_snapshot>")
    await ask(
        rig, session, [system("You are Qwen Code."), restored, {"role": "assistant", "content": "Got it."}, user("?")]
    )


async def qwen_code_sharing_its_cache(rig: Any, session: Any) -> None:
    """The same with a provider that caches prefixes: the summary is the next turn of the conversation."""
    ask = chat(QWEN)
    for text in (FIRST, f"<state_snapshot>\n{SUMMARY}\n</state_snapshot>", LAST):
        rig.script.says(text)
    task = [system("You are Qwen Code."), user("12 + 30?")]
    task += [await ask(rig, session, task)]
    await ask(rig, session, [*task, user("Do not call tools. Then, produce the <state_snapshot> XML.")])
    await ask(rig, session, [system("You are Qwen Code."), user(f"<state_snapshot>\n{SUMMARY}\n</state_snapshot>")])


async def function(rig: Any, session: Any) -> None:
    """A loop of the user's own, which no profile knows: it asks beside the conversation and goes on from the answer."""
    ask = chat({"user-agent": "python-httpx/0.28"})
    for text in (FIRST, SUMMARY, LAST):
        rig.script.says(text)
    first = await ask(rig, session, [system("You add."), user("12 + 30?")])
    await ask(rig, session, [system("You sum up."), user(f"Sum up: {first['content']}")], tools=None)
    await ask(rig, session, [system("You add."), user(f"What happened before: {SUMMARY} Go on.")])


async def function_in_place(rig: Any, session: Any) -> None:
    """A loop that asks at the end of its history, as most do, and puts the answer into a new system text."""
    ask = chat({})
    for text in (FIRST, SUMMARY, LAST):
        rig.script.says(text)
    task = [system("You add."), user("12 + 30?")]
    task += [await ask(rig, session, task), user("Sum up what you did.")]
    await ask(rig, session, task)
    await ask(rig, session, [system(f"You add. You remember: {SUMMARY}"), user("Go on.")])


async def folded(rig: Any, rules: FoldRules = RULES) -> tuple[Any, Any]:
    """(tree, samples) of the one session on the log."""
    group, outputs = GroupFold("group-0", 0, rules), []
    names = ("TurnCompleted", "TokenSnapshot", "SessionFinished", "RewardAssigned")
    for offset, event in enumerate(await rig.written("SessionStarted", "SessionAdopted", *names)):
        outputs += group.apply(TOPIC_OF[type(event).__name__].name, offset, event)
    (tree,) = [out for out in outputs if isinstance(out, TurnTreeAssembled)]
    return tree, [out for out in outputs if isinstance(out, SegmentSample)]


async def ended(rig: Any, session: Any) -> None:
    """Finish the session, with its reward."""
    answer = await rig.finish(session)
    assert answer.status_code == 200, answer.text
    await rig.events.append(
        RewardAssigned(
            event_id="reward", run_id="r", group_id="group-0", session_id=session["session_id"], floor=0, value=1.0,
            components={}, verifier=Verifier("exact", "1"), evidence=b"{}",
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("talk", "path", "before"),
    [
        (claude_code, "main/compaction", {}),
        (codex, "side/compaction", {"side_call"}),
        (opencode, "side/compaction", {"side_call"}),
        (qwen_code, "side/compaction", {"side_call"}),
        (qwen_code_sharing_its_cache, "main/compaction", {}),
        (function, None, {"side_call"}),
        (function_in_place, None, {}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_the_summary_of_every_harness_is_a_compaction_that_trains(
    rig: Any, talk: Talk, path: str | None, before: Any
) -> None:
    session = await rig.open(group_size=1, sampling={"temperature": 1.0, "max_new_tokens": 200})
    await talk(rig, session)
    described = await rig.describe(session)
    assert described["messages"][-1]["content"] == LAST, "the verifier sees what came of the summary"
    await ended(rig, session)
    turns = await rig.written("TurnCompleted")
    assert [turn.agent_path for turn in turns][1] == path
    assert [turn.summary_turn for turn in turns] == [None, None, turns[1].turn]
    tree, samples = await folded(rig)
    kinds = [tree.lineages[node.lineage].kind for node in tree.nodes]
    assert kinds == ["main", "compaction", "main"]
    assert (tree.books.masked, tree.books.trained) == ({}, sum(node.output_tokens for node in tree.nodes))
    assert {sample.advantage for sample in samples} == {samples[0].advantage}
    anchor = tree.segments[tree.anchor_segment]
    assert turns[2].turn in anchor.turns

    masked, _ = await folded(rig, replace(RULES, train_compactions=False))
    assert masked.books.masked == {"compaction": tree.nodes[1].output_tokens}
    old, _ = await folded(rig, replace(RULES, version=VERSIONS["4"]))
    assert set(old.books.masked) == set(before), "as runs of fold version 4 were folded"


async def test_a_gateway_that_takes_over_knows_the_summary_from_the_log(rig: Any) -> None:
    session = await rig.open(group_size=1)
    ask = chat({})
    rig.script.says(FIRST)
    rig.script.says(SUMMARY)
    await ask(rig, session, [system("You add."), user("12 + 30?")])
    await ask(rig, session, [system("You sum up."), user("?")], tools=None)
    await rig.start("gateway-1")
    await ask(rig, session, [system("You add."), user(f"Before: {SUMMARY}")])
    turns = await rig.written("TurnCompleted")
    assert turns[2].summary_turn == turns[1].turn


@pytest.mark.parametrize(
    ("answer", "messages"),
    [
        ("fine", [user("this is fine so far")]),  # too short to be more than chance
        ("You add the numbers up.", [system("You add the numbers up."), user("3 + 5?")]),  # from the common system text
    ],
)
async def test_what_stands_in_a_text_by_chance_is_no_summary(rig: Any, answer: str, messages: Any) -> None:
    session = await rig.open(group_size=1)
    ask = chat({})
    rig.script.says(answer)
    await ask(rig, session, [system("You add the numbers up."), user("12 + 30?")])
    await ask(rig, session, messages)
    assert [turn.summary_turn for turn in await rig.written("TurnCompleted")] == [None, None]


async def test_an_answer_that_the_conversation_continues_is_no_summary(rig: Any) -> None:
    """A sub-agent's task may quote what main said; main goes on behind it."""
    session = await rig.open(group_size=1)
    ask = chat({})
    rig.script.says(SUMMARY)
    task = [system("You add."), user("12 + 30?")]
    task += [await ask(rig, session, task), user("go on")]
    await ask(rig, session, task)
    await ask(rig, session, [system("You help."), user(f"Main said: {SUMMARY}")])
    assert [turn.summary_turn for turn in await rig.written("TurnCompleted")] == [None, None, None]
