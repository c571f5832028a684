"""Main agent, sub-agent and title call of one session: through the gateway to the log, folded into three lineages."""

from __future__ import annotations

from typing import Any

import httpx

from turnlog.processors.core.fold.group import GroupFold
from turnlog.processors.core.methods.rules import FoldRules
from turnlog.schemas.events import RewardAssigned, SegmentSample, TurnTreeAssembled, Verifier
from turnlog.schemas.topics import TOPIC_OF

TOOLS = [{"type": "function", "function": {"name": "task", "parameters": {}}}]
OPENCODE = {"user-agent": "opencode/1.18.33 ai-sdk/provider-utils/4.0.23"}
MAIN = OPENCODE | {"x-session-id": "ses_1"}
CHILD = OPENCODE | {"x-session-id": "ses_2", "x-parent-session-id": "ses_1"}
SYSTEM = {"role": "system", "content": "You are opencode."}
TITLE = {"role": "system", "content": "You are a title generator."}
RULES = FoldRules(run_id="r", settings_sha256="s" * 64, min_valid=1)


async def asked(rig: Any, session: Any, headers: Any, messages: Any, tools: Any = TOOLS) -> Any:
    """One request of the harness; the message that it is answered with."""
    body = {"messages": messages} | ({"tools": tools} if tools else {})
    answer: httpx.Response = await rig.http.post(
        "/v1/chat/completions", json=body, headers=headers | {"authorization": f"Bearer {session['token']}"}
    )
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]


def user(text: str) -> dict[str, str]:
    """A user's message."""
    return {"role": "user", "content": text}


async def folded(rig: Any) -> tuple[Any, Any]:
    """(tree, samples) of the one session on the log."""
    group, outputs = GroupFold("group-0", 0, RULES), []
    names = ("SessionStarted", "TurnCompleted", "TokenSnapshot", "SessionFinished", "RewardAssigned")
    for offset, event in enumerate(await rig.written(*names)):
        outputs += group.apply(TOPIC_OF[type(event).__name__].name, offset, event)
    (tree,) = [out for out in outputs if isinstance(out, TurnTreeAssembled)]
    return tree, [out for out in outputs if isinstance(out, SegmentSample)]


async def test_main_sub_agent_and_title_call_are_three_lineages_of_the_right_kinds(rig: Any) -> None:
    session = await rig.open(group_size=1, agent={"name": "opencode", "version": "1.18.33"})
    await asked(rig, session, MAIN, [TITLE, user("name this")], tools=None)
    main = [SYSTEM, user("write out.txt")]
    main += [await asked(rig, session, MAIN, main), user("ask the helper")]
    child = [SYSTEM, user("SUBAGENT: write it")]  # the same system text as main's: only the header tells them apart
    child += [await asked(rig, session, CHILD, child), user("go on")]
    await asked(rig, session, MAIN, main)
    await asked(rig, session, CHILD, child)
    await asked(rig, session, MAIN, [SYSTEM, user("compacted: go on")])
    await rig.finish(session)
    await rig.events.append(
        RewardAssigned(
            event_id="reward", run_id="r", group_id="group-0", session_id=session["session_id"], floor=0, value=1.0,
            components={}, verifier=Verifier("exact", "1"), evidence=b"{}",
        )
    )  # fmt: skip
    paths = [turn.agent_path for turn in await rig.written("TurnCompleted")]
    assert paths == ["side/title", "main", "agent/ses_2", "main", "agent/ses_2", "main"]
    tree, samples = await folded(rig)
    assert {lineage.id: lineage.kind for lineage in tree.lineages} == {0: "side_call", 1: "main", 2: "sub_agent"}
    assert [node.lineage for node in tree.nodes] == [0, 1, 2, 1, 2, 1]
    assert [[turn.index for turn in segment.turns] for segment in tree.segments] == [[0], [1, 3], [2, 4], [5]]
    assert tree.anchor_segment == 3
    assert [sample.segment_index for sample in samples] == [1, 2, 3]
    assert list(tree.books.masked) == ["side_call"]
