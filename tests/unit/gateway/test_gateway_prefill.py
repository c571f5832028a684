"""A last message of the assistant's is left open: what is sampled goes on with it, and its echo is one message."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from turnlog.processors.core.fold.group import FoldRules, GroupFold
from turnlog.producers.gateway.chat_template import ChatTemplate
from turnlog.producers.gateway.errors import PrefillNotServed
from turnlog.producers.gateway.messages import normalise_messages
from turnlog.producers.gateway.prompts import Prompts, TextTokens
from turnlog.schemas.events import Boundary, RewardAssigned, SegmentSample, Verifier
from turnlog.schemas.topics import TOPIC_OF
from turnlog.schemas.types import int32s

QUESTION = {"role": "user", "content": "3 + 5 = ?"}
PREFILL = {"role": "assistant", "content": "It is "}
NEXT = {"role": "user", "content": "sure?"}
CALL = {"id": "c", "type": "function", "function": {"name": "calc", "arguments": "{}"}}
OPENED = "<|im_start|>user\n3 + 5 = ?<|im_end|>\n<|im_start|>assistant\nIt is "


def asked(rig: Any, number: int) -> list[int]:
    """The ids that the n-th request was sampled on."""
    ids: list[int] = rig.engines["e0"].requests[number].input_ids
    return ids


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prefill_is_left_open_and_its_answer_holds_what_is_new(rig: Any, stream: bool) -> None:
    session = await rig.open()
    sampled = rig.script.says("8")
    answer = await rig.chat(session, [QUESTION, PREFILL], stream=stream)
    assert rig.tokens.literal(asked(rig, 0)) == OPENED
    if not stream:
        assert answer.json()["choices"][0]["message"]["content"] == "8"
    [snapshot] = await rig.written("TokenSnapshot")
    assert int32s(snapshot.delta_ids).tolist() == asked(rig, 0)
    assert int32s(snapshot.output_ids).tolist() == sampled
    assert (await rig.describe(session))["messages"] == [QUESTION, {"role": "assistant", "content": "It is 8"}]


@pytest.mark.parametrize("restarted", [False, True], ids=["the same gateway", "a gateway that took over"])
@pytest.mark.parametrize(
    "echo",
    [
        [{"role": "assistant", "content": "It is 8"}],
        [{"role": "assistant", "content": [{"type": "text", "text": "It is 8"}]}],
        [PREFILL, {"role": "assistant", "content": "8"}],
    ],
    ids=["one message", "one text block", "two messages"],
)
async def test_the_echo_of_prefill_and_response_continues_their_turn(rig: Any, echo: Any, restarted: bool) -> None:
    session = await rig.open()
    sampled = rig.script.says("8")
    await rig.chat(session, [QUESTION, PREFILL])
    if restarted:
        await rig.start("gateway-1")
    for messages in ([QUESTION, *echo, NEXT], [QUESTION, *echo, NEXT, {"role": "assistant", "content": "9"}, NEXT]):
        rig.script.says("9")
        await rig.chat(session, messages)
    held = asked(rig, 0) + sampled
    assert asked(rig, 1)[: len(held)] == held
    assert rig.tokens.literal(asked(rig, 1)) == f"{OPENED}8<|im_end|>\n<|im_start|>user\nsure?<|im_end|>\n" + (
        "<|im_start|>assistant\n"
    )
    snapshots, turns = await rig.written("TokenSnapshot"), await rig.written("TurnCompleted")
    assert [each.boundary for each in snapshots] == [Boundary.root, Boundary.append, Boundary.append]
    assert [each.base_turn for each in turns] == [None, turns[0].turn, turns[1].turn]


async def test_what_was_cut_by_length_goes_on_exactly_where_it_ended(rig: Any) -> None:
    session = await rig.open()
    rig.script.says("1234567", end=False)
    one = (await rig.chat(session, [QUESTION], max_tokens=3)).json()["choices"][0]["message"]
    rig.script.says("45")
    await rig.chat(session, [QUESTION, one])
    assert asked(rig, 1) == asked(rig, 0) + rig.tokens.encode("123")
    _, snapshot = await rig.written("TokenSnapshot")
    assert (snapshot.boundary, snapshot.delta_ids) == (Boundary.append, b"")
    await rig.chat(session, [QUESTION, {"role": "assistant", "content": "12345"}, NEXT])
    assert [each.boundary for each in await rig.written("TokenSnapshot")][2] is Boundary.append


@pytest.mark.parametrize("history", ["sampled", "template"])
async def test_an_answer_that_had_ended_is_reopened_before_what_ended_it(rig: Any, history: str) -> None:
    rig.settings = dataclasses.replace(rig.settings, gateway=dataclasses.replace(rig.settings.gateway, history=history))
    await rig.start("gateway-1")
    session = await rig.open()
    rig.script.says("8")
    one = (await rig.chat(session, [QUESTION])).json()["choices"][0]["message"]
    rig.script.says("9")
    await rig.chat(session, [QUESTION, one])
    assert asked(rig, 1) == asked(rig, 0) + rig.tokens.encode("8")
    first, second = await rig.written("TokenSnapshot")
    assert (second.boundary, second.boundary_reason) == (Boundary.branch, "reopened")
    assert (second.parent_turn, second.base_len) == (first.turn, len(asked(rig, 1)))
    assert (await rig.describe(session))["messages"][-1]["content"] == "89"
    await rig.chat(session, [QUESTION, {"role": "assistant", "content": "89"}, NEXT])
    assert [each.boundary for each in await rig.written("TokenSnapshot")][2] is Boundary.append


async def test_what_was_sampled_behind_a_prefill_is_one_segment_with_what_followed(rig: Any) -> None:
    session = await rig.open(group_size=1)
    rig.script.says("8")
    await rig.chat(session, [QUESTION, PREFILL])
    await rig.chat(session, [QUESTION, {"role": "assistant", "content": "It is 8"}, NEXT])
    await rig.finish(session)
    await rig.events.append(
        RewardAssigned(
            event_id="reward", run_id="r", group_id="group-0", session_id=session["session_id"], floor=0, value=1.0,
            components={}, verifier=Verifier("exact", "1"), evidence=b"{}",
        )
    )  # fmt: skip
    for policy in ("prefix", "slime"):
        rules = FoldRules(run_id="r", settings_sha256="s" * 64, min_valid=1, policy=policy)
        group, outputs = GroupFold("group-0", 0, rules), []
        names = ("SessionStarted", "TurnCompleted", "TokenSnapshot", "SessionFinished", "RewardAssigned")
        for offset, event in enumerate(await rig.written(*names)):
            outputs += group.apply(TOPIC_OF[type(event).__name__].name, offset, event)
        [sample] = [out for out in outputs if isinstance(out, SegmentSample)]
        assert [(span.turn.index, span.trained) for span in sample.spans] == [(0, True), (1, True)]


@pytest.mark.parametrize(
    ("last", "why"),
    [({"role": "assistant", "content": "", "tool_calls": [CALL]}, "answer its calls")],
)
async def test_what_cannot_be_continued_is_refused_by_name(rig: Any, last: Any, why: str) -> None:
    answer = await rig.chat(await rig.open(), [QUESTION, last])
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "prefill_not_served", "messages")
    assert why in error["message"]
    assert rig.engines["e0"].requests == []


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.role }}: {{ m.content[:3] }}\n{% endfor %}",
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ messages[-1].content }}",
    ],
    ids=["cut", "written twice"],
)
def test_a_template_that_does_not_leave_it_open_is_named(model_folder: Path, source: str) -> None:
    prompts = Prompts(TextTokens(model_folder), ChatTemplate(source, {}))
    with pytest.raises(PrefillNotServed, match="chat template"):
        prompts.full(normalise_messages([QUESTION, PREFILL]), None)
