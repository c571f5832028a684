"""Main agent, sub-agent and title call of one session: through the gateway to the log, folded into three lineages."""

from __future__ import annotations

import dataclasses
from typing import Any

import httpx
import pytest

from turnlog.processors.core.fold.group import GroupFold
from turnlog.processors.core.methods.rules import FoldRules
from turnlog.schemas.events import RewardAssigned, SegmentSample, TurnTreeAssembled, Verifier
from turnlog.schemas.topics import TOPIC_OF
from turnlog.schemas.types import int32s
from turnlog.settings import SettingsError, from_tables

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
    names = ("TurnCompleted", "TokenSnapshot", "SessionFinished", "RewardAssigned")
    for offset, event in enumerate(await rig.written("SessionStarted", "SessionAdopted", *names)):
        outputs += group.apply(TOPIC_OF[type(event).__name__].name, offset, event)
    (tree,) = [out for out in outputs if isinstance(out, TurnTreeAssembled)]
    return tree, [out for out in outputs if isinstance(out, SegmentSample)]


async def rewarded(rig: Any, session: Any) -> None:
    """The verdict on a finished session."""
    await rig.events.append(
        RewardAssigned(
            event_id="reward", run_id="r", group_id="group-0", session_id=session["session_id"], floor=0, value=1.0,
            components={}, verifier=Verifier("exact", "1"), evidence=b"{}",
        )
    )  # fmt: skip


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
    await rewarded(rig, session)
    paths = [turn.agent_path for turn in await rig.written("TurnCompleted")]
    assert paths == ["side/title", "main", "agent/ses_2", "main", "agent/ses_2", "main"]
    tree, samples = await folded(rig)
    assert {lineage.id: lineage.kind for lineage in tree.lineages} == {0: "side_call", 1: "main", 2: "sub_agent"}
    assert [node.lineage for node in tree.nodes] == [0, 1, 2, 1, 2, 1]
    assert [[turn.index for turn in segment.turns] for segment in tree.segments] == [[0], [1, 3], [2, 4], [5]]
    assert tree.anchor_segment == 3
    assert [sample.segment_index for sample in samples] == [1, 2, 3]
    assert list(tree.books.masked) == ["side_call"]


@pytest.fixture
async def beside(rig: Any) -> Any:
    """The rig behind a gateway with a side engine, whose weights nobody has labelled."""
    side = rig.engines["side"] = rig.new_engine("http://side")
    side.script, side.version = lambda _: [*rig.tokens.encode("aside"), 2], "default"
    sides = ("*haiku*=http://side", "small=http://side")
    rig.settings = dataclasses.replace(
        rig.settings, gateway=dataclasses.replace(rig.settings.gateway, side_engines=sides)
    )
    await rig.start("gateway-1")
    return rig


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_side_engine_says_is_context_and_no_data_of_the_policy(beside: Any, stream: bool) -> None:
    rig = beside
    session = await rig.open(group_size=1, min_weight_version=0)
    main = [user("3 + 5 = ?")]
    answer = await rig.chat(session, main, model="claude-haiku-4-5", stream=stream, logprobs=True)
    assert ("claude-haiku-4-5" in answer.text, "aside" in answer.text) == (True, True)
    main += [{"role": "assistant", "content": "aside"}, user("go on")]
    await rig.start("gateway-2")  # which knows it from the log
    answer = (await rig.chat(session, main, model="claude-opus")).json()
    assert answer["model"] == rig.settings.model.name
    await rig.chat(session, main, model="small")
    await rig.finish(session)
    await rewarded(rig, session)
    turns, snapshots = await rig.written("TurnCompleted"), await rig.written("TokenSnapshot")
    assert [turn.engine_id for turn in turns] == ["side/http://side", "e0", "side/http://side"]
    assert [turn.weight_version_first for turn in turns] == [-1, 0, -1]
    assert turns[1].base_turn == turns[0].turn
    [policys] = rig.engines["e0"].requests
    sampled = int32s(snapshots[1].output_ids).tolist()
    assert [len(each.output_ids) // 4 for each in snapshots] == [0, len(sampled), 0]
    tree, [sample] = await folded(rig)
    ids = int32s(sample.token_ids).tolist()
    assert ids == [*policys.input_ids, *sampled], "the tokens that its engine saw, the side engine's among them"
    assert [(span.start, span.length) for span in sample.spans if span.length] == [
        (len(ids) - len(sampled), len(sampled))
    ]
    assert (tree.books.sampled, tree.books.masked) == (len(sampled), {})


async def test_a_side_engine_keeps_to_a_grammar_also_in_a_session_that_trains(beside: Any) -> None:
    session = await beside.open()
    beside.engines["side"].fitting = lambda _: [*beside.tokens.encode("{}"), 2]
    shape = {"response_format": {"type": "json_object"}}
    answer = await beside.chat(session, [user("?")], model="small", **shape)
    assert answer.json()["choices"][0]["message"]["content"] == "{}"
    assert (await beside.chat(session, [user("?")], model="large", **shape)).status_code == 400


@pytest.mark.parametrize(
    "spec", ["haiku", "=http://side", "haiku=side:1", "haiku=https://api.example.com/v1", "haiku=http://me:secret@side"]
)
def test_a_side_engine_that_has_no_tokens_is_refused_where_it_is_set(spec: str) -> None:
    with pytest.raises(SettingsError, match=r"gateway\.side_engines must be PATTERN="):
        from_tables({"gateway": {"side_engines": [spec]}}, {}, source="a file")


async def test_what_a_verifier_is_shown_is_the_main_agents_newest_turn(rig: Any) -> None:
    """Not the title that was asked for first; after a compaction what came of that."""
    session = await rig.open()
    await asked(rig, session, MAIN, [TITLE, user("write")], tools=None)
    said = await asked(rig, session, MAIN, [SYSTEM, user("write")])
    await asked(rig, session, CHILD, [SYSTEM, user("read")])
    described = await rig.describe(session)
    assert [one["content"] for one in described["messages"]] == [SYSTEM["content"], "write", said["content"]]
    said = await asked(rig, session, MAIN, [SYSTEM, user("It is written. Go on.")])
    described = await rig.describe(session)
    assert [one["content"] for one in described["messages"]][1:] == ["It is written. Go on.", said["content"]]
    assert described["last_turn"]["index"] == 3
