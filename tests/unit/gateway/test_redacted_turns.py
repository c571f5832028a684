"""Redaction through the gateway: what records hold, what the engine sees, and what trains, for each setting."""

from __future__ import annotations

import dataclasses
from typing import Any

import orjson
import pytest

from turnlog.infra.log import Partition
from turnlog.processors.core.fold.group import GroupFold
from turnlog.processors.core.methods.rules import FoldRules
from turnlog.redaction_settings import RedactionSettings
from turnlog.schemas.events import (
    RewardAssigned,
    SegmentSample,
    TokenSnapshot,
    TurnCompleted,
    TurnTreeAssembled,
    Verifier,
)
from turnlog.schemas.topics import CATALOGUE, TOPIC_OF
from turnlog.schemas.types import int32s

RULES = FoldRules(run_id="r", settings_sha256="s" * 64, min_valid=1)
MAIL = "ada.byron" + "@mail.example"
TOKEN = "gh" + "p_" + "aB3dE5gH7jK9mN1pQ3sT5vX7zB9dF1hJ3kL5"
PASSWORD = "Tr0ub4dor" + "-Xy7"
SECRETS = (MAIL, TOKEN, PASSWORD)
ALL = [("mask", "off"), ("mask", "drop"), ("drop", "drop"), ("off", "drop")]
CALL = {"type": "function", "function": {"name": "sh", "parameters": {}}}


def user(text: str) -> dict[str, Any]:
    """A user's message."""
    return {"role": "user", "content": text}


@pytest.fixture(params=ALL, ids=lambda pair: "-".join(pair))
def setting(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Settings (inputs, outputs)."""
    inputs, outputs = request.param
    return inputs, outputs


async def redacting(rig: Any, inputs: str, outputs: str, **more: Any) -> Any:
    """The rig behind a gateway with these settings."""
    rig.settings = dataclasses.replace(
        rig.settings, redaction=RedactionSettings(inputs=inputs, outputs=outputs, **more)
    )
    await rig.start("gateway-1")
    return rig


async def everything(rig: Any) -> str:
    """The bytes of all records and blobs, and the text of all token ids, as one text."""
    texts = [content.decode(errors="replace") for content in rig.blobs.objects.values()]
    for topic in CATALOGUE:
        partitions = [Partition(topic.name, number) for number in range(1 if topic.partitions == "one" else 2)]
        ends = await rig.log.end_offsets(partitions)
        async with rig.log.reader() as reader:
            reader.assign(dict.fromkeys(partitions, 0))
            while any(reader.position(partition) < ends[partition] for partition in partitions):
                texts += [record.value.decode(errors="replace") for record in await reader.poll()]
    for snapshot in await rig.written("TokenSnapshot"):
        texts += [rig.tokens.decode(int32s(ids).tolist()) for ids in (snapshot.delta_ids, snapshot.output_ids)]
    return "\n".join(texts)


async def folded(rig: Any, session: Any) -> tuple[TurnTreeAssembled, list[SegmentSample]]:
    """(tree, samples) of the one session on the log, whose verdict is written here."""
    await rig.finish(session)
    await rig.events.append(
        RewardAssigned(
            event_id="reward", run_id="r", group_id="group-0", session_id=session["session_id"], floor=0, value=1.0,
            components={}, verifier=Verifier("exact", "1"), evidence=orjson.dumps({"said": MAIL}),
        )
    )  # fmt: skip
    group, outputs = GroupFold("group-0", 0, RULES), []
    names = ("TurnCompleted", "TokenSnapshot", "SessionFinished", "RewardAssigned")
    for offset, event in enumerate(await rig.written("SessionStarted", "SessionAdopted", *names)):
        outputs += group.apply(TOPIC_OF[type(event).__name__].name, offset, event)
    (tree,) = [out for out in outputs if isinstance(out, TurnTreeAssembled)]
    return tree, [out for out in outputs if isinstance(out, SegmentSample)]


async def said(rig: Any, session: Any, messages: list[Any], **more: Any) -> dict[str, Any]:
    """The message that a request is answered with."""
    answer = await rig.chat(session, messages, **more)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["choices"][0]["message"]
    return found


async def records(rig: Any) -> list[tuple[TurnCompleted, TokenSnapshot]]:
    """Both records of each turn, in order."""
    turns, snapshots = await rig.written("TurnCompleted"), await rig.written("TokenSnapshot")
    return list(zip(turns, snapshots, strict=True))


async def conversation(rig: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A session with a secret in a prompt, in a tool's result and in an answer, and a turn after them."""
    session = await rig.open(group_size=1)
    rig.script.says("I look")
    messages = [user(f"write to {MAIL}")]
    messages.append(await said(rig, session, messages))
    messages.append(user(f"it printed {TOKEN}"))
    rig.script.says(f"password={PASSWORD}")
    messages.append(await said(rig, session, messages))
    messages.append(user("go on"))
    rig.script.says("done")
    messages.append(await said(rig, session, messages))
    return session, messages


async def test_no_record_and_no_blob_holds_a_secret_that_the_setting_covers(rig: Any, setting: tuple[str, str]) -> None:
    inputs, outputs = setting
    await redacting(rig, inputs, outputs)
    session, messages = await conversation(rig)
    assert PASSWORD in messages[3]["content"]  # the agent gets what was sampled
    await folded(rig, session)
    shown = await everything(rig)
    covered = ([MAIL, TOKEN] if inputs != "off" else []) + ([PASSWORD] if outputs != "off" else [])
    assert [secret for secret in SECRETS if secret in shown] == [one for one in SECRETS if one not in covered]


async def test_masked_prompts_are_what_the_engine_sees_and_train(rig: Any) -> None:
    await redacting(rig, "mask", "off")
    session, _ = await conversation(rig)
    tree, samples = await folded(rig, session)
    asked = [rig.tokens.decode(one.input_ids) for one in rig.engines["e0"].requests]
    assert [one for one in asked if MAIL in one or TOKEN in one] == []
    assert ("[redacted:email:1]" in asked[2], "[redacted:token:1]" in asked[2]) == (True, True)
    (sample,) = samples
    last = rig.engines["e0"].requests[-1].input_ids
    assert int32s(sample.token_ids)[: len(last)].tolist() == list(last)
    assert (dict(tree.books.masked), tree.books.trained) == ({}, tree.books.sampled)
    turns = await records(rig)
    assert [(turn.redacted, snapshot.redacted) for turn, snapshot in turns] == [
        ({"email": 1}, False), ({"token": 1}, False), ({}, False)
    ]  # fmt: skip
    assert [snapshot.boundary_reason for _, snapshot in turns] == ["first", "append", "append"]


async def test_a_masked_history_goes_on_after_an_answer_that_is_withheld(rig: Any) -> None:
    await redacting(rig, "mask", "drop")
    session, _ = await conversation(rig)
    tree, samples = await folded(rig, session)
    turns = await records(rig)
    assert [snapshot.redacted for _, snapshot in turns] == [False, True, False]
    assert orjson.loads(turns[1][0].response)["content"] == "password=[redacted:password:1]"
    assert set(int32s(turns[1][1].output_ids).tolist()) == {0}
    assert turns[2][1].boundary_reason == "redacted"  # the third prompt is the masked history, rendered anew
    asked = rig.tokens.decode(rig.engines["e0"].requests[2].input_ids)
    assert ("[redacted:password:1]" in asked, PASSWORD in asked) == (True, False)
    withheld = turns[0][0].output_tokens + turns[1][0].output_tokens
    assert tree.books.masked == {"redacted": withheld}  # the row that ends in the withheld answer
    assert tree.books.trained == turns[2][0].output_tokens
    (sample,) = samples
    assert int32s(sample.token_ids)[: len(rig.engines["e0"].requests[2].input_ids)].tolist() == list(
        rig.engines["e0"].requests[2].input_ids
    )


async def test_dropped_prompts_reach_the_engine_and_no_row(rig: Any) -> None:
    await redacting(rig, "drop", "drop")
    session, _ = await conversation(rig)
    tree, samples = await folded(rig, session)
    asked = [rig.tokens.decode(one.input_ids) for one in rig.engines["e0"].requests]
    assert (MAIL in asked[0], TOKEN in asked[1], PASSWORD in asked[2]) == (True, True, True)
    assert samples == []
    assert tree.books.masked == {"redacted": tree.books.sampled}
    turns = await records(rig)
    assert [snapshot.redacted for _, snapshot in turns] == [True, True, True]
    assert [turn.base_turn and turn.base_turn.index for turn, _ in turns] == [None, 0, 1]  # echoes are recognised
    assert {len(int32s(snapshot.output_logprobs)) for _, snapshot in turns} == {turn.output_tokens for turn, _ in turns}


async def test_a_clean_session_is_recorded_as_without_redaction(rig: Any, setting: tuple[str, str]) -> None:
    await redacting(rig, *setting)
    session = await rig.open(group_size=1)
    messages = [user("3 + 5 = ?")]
    rig.script.says("8")
    messages += [await said(rig, session, messages), user("sure?")]
    await said(rig, session, messages)
    _, samples = await folded(rig, session)
    assert len(samples) == 1
    assert [(turn.redacted, snapshot.redacted, snapshot.boundary_reason) for turn, snapshot in await records(rig)] == [
        ({}, False, "first"), ({}, False, "append")
    ]  # fmt: skip


async def test_another_gateway_masks_alike_and_goes_on(rig: Any, setting: tuple[str, str]) -> None:
    await redacting(rig, *setting)
    session, messages = await conversation(rig)
    await rig.start("gateway-2")  # knows the records only
    rig.script.says("at once")
    await said(rig, session, [*messages, user(f"again {MAIL}, and new: eve@mail.example")])
    *_, (turn, _) = await records(rig)
    assert turn.base_turn is not None
    assert turn.base_turn.index == 2
    shown = turn.new_messages.decode()
    if setting[0] != "off":
        assert "again [redacted:email:1], and new: [redacted:email:2]" in shown


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_gets_text_ids_and_log_probs_of_a_withheld_answer(rig: Any, stream: bool) -> None:
    await redacting(rig, "off", "drop")
    session = await rig.open(group_size=1)
    ids = rig.script.says(f"mail {MAIL}")
    answer = await rig.chat(session, [user("who?")], logprobs=True, return_token_ids=True, stream=stream)
    assert (MAIL in answer.text.replace('"}}]}\n\ndata: ', "")) or "".join(
        (orjson.loads(line[6:])["choices"] or [{}])[0].get("delta", {}).get("content") or ""
        for line in answer.text.splitlines()
        if line.startswith("data: {")
    ) == f"mail {MAIL}"
    if not stream:
        choice = answer.json()["choices"][0]
        assert choice["token_ids"] == ids
        assert all(one["logprob"] < 0 for one in choice["logprobs"]["content"])
    assert MAIL not in await everything(rig)


async def test_a_retry_after_a_withheld_answer_that_nobody_got_is_sampled_anew(rig: Any) -> None:
    await redacting(rig, "off", "drop")
    session = await rig.open(group_size=1)
    rig.script.says(f"mail {MAIL}")
    await said(rig, session, [user("who?")])
    await rig.start("gateway-2")
    rig.script.says("nobody")
    assert (await said(rig, session, [user("who?")]))["content"] == "nobody"


async def test_arguments_of_calls_are_masked_as_json_and_echoes_of_any_shape_are_recognised(rig: Any) -> None:
    await redacting(rig, "drop", "drop")
    session = await rig.open(group_size=1)
    rig.script.says('<tool_call>{"name":"sh","arguments":{"cmd":"x","pwd":"Ab3!9z"}}</tool_call>')
    messages = [user("go")]
    answer = await said(rig, session, messages, tools=[CALL])
    (call,) = answer["tool_calls"]
    assert orjson.loads(call["function"]["arguments"]) == {"cmd": "x", "pwd": "Ab3!9z"}
    call["function"]["arguments"] = '{ "pwd": "Ab3!9z",  "cmd": "x" }'
    messages += [answer, {"role": "tool", "tool_call_id": call["id"], "content": "ok"}]
    await said(rig, session, messages, tools=[CALL])
    (first, _), (second, _) = await records(rig)
    (recorded,) = orjson.loads(first.response)["tool_calls"]
    assert orjson.loads(recorded["function"]["arguments"]) == {"cmd": "x", "pwd": "[redacted:password:1]"}
    assert recorded["id"] == call["id"]
    assert second.base_turn == first.turn


async def test_the_runs_own_secrets_are_found_whatever_they_look_like(rig: Any) -> None:
    await redacting(rig, "mask", "off", kinds=())
    session = await rig.open(group_size=1)
    key = rig.settings.gateway.signing_key
    await said(rig, session, [user(f"the {key} it is")])
    ((turn, _),) = await records(rig)
    assert orjson.loads(turn.new_messages) == [user("the [redacted:known:1] it is")]


async def test_hashes_of_a_masked_request_cannot_be_tried_out(rig: Any) -> None:
    await redacting(rig, "mask", "off")
    session = await rig.open(group_size=1)
    body = {"messages": [user(f"write to {MAIL}")]}
    await said(rig, session, body["messages"])
    ((turn, _),) = await records(rig)
    import hashlib

    guesses = [orjson.dumps(body), str(body).encode(), b'{"messages":[{"role":"user","content":"write to %s"}]}']
    assert turn.request_sha256 not in [hashlib.sha256(one).hexdigest() for one in guesses]


async def test_a_stop_sequence_and_what_the_parser_drops_are_withheld(rig: Any) -> None:
    await redacting(rig, "off", "drop")
    session = await rig.open(group_size=1)
    rig.script.says(f"it is {MAIL}")
    answer = await rig.chat(session, [user("who?")], stop=[MAIL])
    assert answer.json()["choices"][0]["message"]["content"] == "it is "
    rig.script.says(f'<tool_call>{{"name":"sh","arguments":{{}},"note":"{MAIL}"}}</tool_call>')
    await said(rig, session, [user("again")], tools=[CALL])
    assert [snapshot.redacted for _, snapshot in await records(rig)] == [True, True]
    (first, _), _ = await records(rig)
    assert first.stopped_by == "[redacted:email:1]"
    assert MAIL not in await everything(rig)
