"""What becomes of each field of a chat completion: honoured, limited and counted, or refused by name."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import orjson
import pytest

from turnlog.producers.gateway.dialects.dialect import IGNORED
from turnlog.producers.gateway.dialects.openai_chat import FIELDS
from turnlog.producers.gateway.parsers.parser import certain, cut_at_stop
from turnlog.schemas.events import Boundary, FinishReason
from turnlog.schemas.types import float32s, int32s
from turnlog.settings import Settings

QUESTION = {"role": "user", "content": "3 + 5 = ?"}
COUNTED = [name for name, (treatment, _) in FIELDS.items() if treatment != "honoured"]
CALL = '<tool_call>{"name":"calc","arguments":{"expr":"3+5"}}</tool_call>'


def events_of(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: {")]
    return [orjson.loads(line) for line in lines]


def shown(events: list[dict[str, Any]]) -> str:
    return "".join(
        choice["delta"].get("content") or "" for event in events for choice in event["choices"] if choice["delta"]
    )


@pytest.mark.parametrize(
    ("said", "stop", "text"),
    [
        ("12; 34", ";", "12"),
        ("12; 34", ["zz", "; 3", " 34"], "12"),
        (CALL, "tool_", "<"),  # within one token
        ("abc", "abc", ""),
        ("abc", "cd", "abc"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_sequence_shortens_the_text_and_not_the_record(
    rig: Any, said: str, stop: Any, text: str, stream: bool
) -> None:
    session = await rig.open()
    rig.script.says(said)
    answer = await rig.chat(session, [QUESTION], stop=stop, stream=stream)
    content = shown(events_of(answer.text)) if stream else answer.json()["choices"][0]["message"]["content"]
    assert content == text
    [completed], [snapshot] = await rig.written("TurnCompleted"), await rig.written("TokenSnapshot")
    sampled = rig.tokens.literal(int32s(snapshot.output_ids).tolist())
    found = cut_at_stop(said, [stop] if isinstance(stop, str) else stop)[1]
    assert (completed.stopped_by, completed.finish_reason) == (found, FinishReason.stop)
    assert sampled.startswith(text + (found or "")), "what ended the text was sampled, and stands on the log"
    assert orjson.loads(completed.response)["content"] == text


async def test_the_turn_after_a_shortened_one_extends_all_that_was_sampled(rig: Any) -> None:
    session = await rig.open()
    rig.script.says("12; 34")
    one = (await rig.chat(session, [QUESTION], stop=";")).json()
    assert one["turnlog"]["stopped_by"] == ";"
    await rig.chat(session, [QUESTION, one["choices"][0]["message"], {"role": "user", "content": "go on"}])
    first, second = await rig.written("TokenSnapshot")
    assert second.boundary is Boundary.append
    held = int32s(first.delta_ids).tolist() + int32s(first.output_ids).tolist()
    assert rig.engines["e0"].requests[1].input_ids[: len(held)] == held


async def test_a_stop_sequence_is_found_where_one_engine_gave_its_beginning_and_another_its_end(rig: Any) -> None:
    session, engine = await rig.open(), rig.engines["e0"]
    engine.holds_after = 3
    rig.script.says("12;34", end=False)
    asked = asyncio.create_task(rig.chat(session, [QUESTION], stop=";3"))
    await engine.reached.wait()
    engine.holds_after = None
    rig.script.says("34 and more")
    engine.abort_all()
    answer = (await asked).json()
    assert answer["choices"][0]["message"]["content"] == "12"
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_nothing_is_shown_that_a_stop_sequence_may_take_away() -> None:
    assert [certain("ab;"[:size], (";;",)) for size in range(4)] == ["", "a", "ab", "ab"]
    assert certain("ab;c", (";;",)) == "ab;c"
    assert certain("ab;;c", (";;",)) == "ab"


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probs_and_ids_are_those_of_the_record(rig: Any, stream: bool) -> None:
    session = await rig.open()
    rig.script.says("1 + 2")
    answer = await rig.chat(session, [QUESTION], logprobs=True, return_token_ids=True, stream=stream)
    last = events_of(answer.text)[-1] if stream else answer.json()
    [choice] = last["choices"]
    [snapshot] = await rig.written("TokenSnapshot")
    ids = int32s(snapshot.output_ids).tolist()
    assert choice["token_ids"] == ids
    assert [one["logprob"] for one in choice["logprobs"]["content"]] == float32s(snapshot.output_logprobs).tolist()
    assert "".join(one["token"] for one in choice["logprobs"]["content"]) == rig.tokens.literal(ids)
    assert all(bytes(one["bytes"]).decode() == one["token"] for one in choice["logprobs"]["content"])


async def test_log_probs_of_a_repeat_are_read_from_the_log_by_another_gateway(rig: Any) -> None:
    session = await rig.open()
    body = {"logprobs": True, "return_token_ids": True}
    one = (await rig.chat(session, [QUESTION], **body)).json()["choices"]
    await rig.start("gateway-1")
    assert (await rig.chat(session, [QUESTION], **body)).json()["choices"] == one


OFFERED: Any = {"type": "function", "function": {"name": "calc"}}
PATHS: dict[str, tuple[str, dict[str, Any], Any, Any]] = {
    "chat/completions": ("messages", {}, OFFERED, "none"),
    "responses": ("input", {}, {"type": "function", "name": "calc"}, "none"),
    "messages": (
        "messages",
        {"max_tokens": 50},
        {"name": "calc", "input_schema": {"type": "object"}},
        {"type": "none"},
    ),
}
"""Of each dialect: where messages stand, what it needs beside them, a tool, and how a request has no calls."""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_calls_stay_text_where_none_can_be_made(rig: Any, path: str, stream: bool) -> None:
    session = await rig.open()
    said, body, tool, none = PATHS[path]
    without: list[dict[str, Any]] = [{}, {"tools": []}, {"tools": None}, {"tools": [tool], "tool_choice": none}]
    for more in without:
        rig.script.answers.clear()
        rig.script.says(f"I look. {CALL}")
        asked = {said: [QUESTION], "stream": stream, **body, **more}
        answer = await rig.http.post(f"/v1/{path}", json=asked, headers={"authorization": f"Bearer {session['token']}"})
        assert answer.status_code == 200, answer.text
    for turn in await rig.written("TurnCompleted"):
        assert orjson.loads(turn.response) == {"role": "assistant", "content": f"I look. {CALL}"}
        assert (turn.finish_reason, turn.ill_formed_calls) == (FinishReason.stop, 0)
    rig.script.answers.clear()
    rig.script.says(f"I look. {CALL}")
    await rig.http.post(
        f"/v1/{path}", json=asked | {"tool_choice": None}, headers={"authorization": f"Bearer {session['token']}"}
    )
    assert (await rig.written("TurnCompleted"))[-1].finish_reason is FinishReason.tool_calls


NAMED = {"type": "function", "function": {"name": "calc"}}
CONSTRAINTS = [
    ("tool_choice", "required"),
    ("tool_choice", NAMED),
    ("response_format", {"type": "json_object"}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}),
]


@pytest.mark.parametrize(("field", "value"), [("n", 2), ("stop", ["a"] * 5), ("stop", ""), ("stop", [1]), *CONSTRAINTS])
async def test_what_cannot_be_honoured_is_refused_by_name_and_nothing_is_sampled(
    rig: Any, field: str, value: Any
) -> None:
    session = await rig.open()
    if (field, value) == ("stop", ""):
        value = [""]
    answer = await rig.chat(session, [QUESTION], **{field: value})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field)
    assert field in error["message"]
    assert error["code"] == ("constraint_refused" if (field, value) in CONSTRAINTS else "invalid_request")
    assert not await rig.written("TurnCompleted")


async def test_a_session_that_does_not_train_is_held_to_a_schema_and_its_tokens_say_so(rig: Any) -> None:
    session = await rig.open(purpose="eval")
    rig.engines["e0"].fitting = lambda schema: [*rig.tokens.encode(schema[:1]), 2]
    await rig.chat(session, [QUESTION])
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array"}}}
    [choice] = (await rig.chat(session, [QUESTION], response_format=shape)).json()["choices"]
    assert choice["message"]["content"] == "{"
    assert rig.engines["e0"].requests[-1].grammar == ("json_schema", '{"type":"array"}')
    assert [snapshot.constrained for snapshot in await rig.written("TokenSnapshot")] == [False, True]


CHAT = {"messages": [QUESTION], "tools": [{"type": "function", "function": {"name": "calc"}}]}
RESPONSES = {"input": "3 + 5 = ?", "tools": [{"type": "function", "name": "calc", "parameters": {}}]}
MESSAGES = {"messages": [QUESTION], "max_tokens": 40, "tools": [{"name": "calc", "input_schema": {"type": "object"}}]}
FORCED = [
    ("chat/completions", CHAT | {"tool_choice": "required", "response_format": {"type": "json_object"}}),
    ("chat/completions", CHAT | {"tool_choice": NAMED}),
    ("responses", RESPONSES | {"tool_choice": {"type": "function", "name": "calc"}}),
    ("responses", RESPONSES | {"tool_choice": "required"}),
    ("messages", MESSAGES | {"tool_choice": {"type": "any"}}),
    ("messages", MESSAGES | {"tool_choice": {"type": "tool", "name": "calc"}}),
]


@pytest.mark.parametrize(("path", "body"), FORCED)
async def test_a_call_that_must_be_is_what_engines_are_held_to_where_nothing_trains(
    rig: Any, path: str, body: dict[str, Any]
) -> None:
    session = await rig.open(purpose="eval")
    rig.engines["e0"].fitting = lambda _: [*rig.tokens.encode(CALL), 2]
    headers = {"authorization": f"Bearer {session['token']}"}
    answer = await rig.http.post(f"/v1/{path}", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    kind, tag = rig.engines["e0"].requests[0].grammar
    [call] = orjson.loads(tag)["format"]["elements"]
    assert (kind, [one["begin"] for one in call["elements"]]) == (
        "structural_tag", ['<tool_call>\n{"name": "calc", "arguments": ']
    )  # fmt: skip
    [turn], [snapshot] = await rig.written("TurnCompleted"), await rig.written("TokenSnapshot")
    assert (turn.finish_reason, snapshot.constrained) == (FinishReason.tool_calls, True)


@pytest.mark.parametrize(
    ("purpose", "choice", "why"),
    [
        ("train", "required", "recorded log-probs are the policy's own"),
        ("eval", {"type": "function", "function": {"name": "other"}}, "no engine grammar expresses it"),
        ("eval", {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}, "no engine grammar"),
    ],
)
async def test_a_call_that_no_grammar_can_ask_for_is_refused_and_why(
    rig: Any, purpose: str, choice: Any, why: str
) -> None:
    session = await rig.open(purpose=purpose)
    error = (await rig.chat(session, tool_choice=choice, **CHAT)).json()["error"]
    assert (error["code"], error["param"], why in error["message"]) == ("constraint_refused", "tool_choice", True)


async def test_a_turn_cut_off_under_a_grammar_is_not_continued(rig: Any) -> None:
    session = await rig.open(purpose="eval")
    engine = rig.engines["e0"]
    engine.fitting, engine.holds_after = lambda _: rig.tokens.encode("12345"), 2
    shape = {"type": "json_object"}
    asked = asyncio.create_task(rig.chat(session, [QUESTION], response_format=shape))
    await engine.reached.wait()
    engine.abort_all()
    answer = await asked
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_failed")
    assert len(engine.requests) == 1
    [turn] = await rig.written("TurnCompleted")
    assert (turn.finish_reason, turn.output_tokens) == (FinishReason.error, 2)


class TestIgnored:
    @pytest.fixture
    def settings(self, settings: Settings) -> Settings:
        return dataclasses.replace(settings, gateway=dataclasses.replace(settings.gateway, constraints="ignore"))

    @pytest.mark.parametrize(("field", "value"), CONSTRAINTS)
    async def test_a_constraint_is_ignored_and_counted_where_a_setting_says_so(
        self, rig: Any, field: str, value: Any
    ) -> None:
        session, before = await rig.open(), counted(field)
        assert (await rig.chat(session, [QUESTION], **{field: value})).status_code == 200
        assert counted(field) == before + 1


async def test_what_is_limited_is_counted_by_name_and_what_nobody_knows_as_other(rig: Any) -> None:
    session = await rig.open()
    fields = dict.fromkeys(COUNTED) | {"temperature": 0.2, "of_a_later_year": 1, "and_another": 1}
    before = {name: counted(name) for name in (*COUNTED, "other")}
    assert (await rig.chat(session, [QUESTION], n=1, response_format={"type": "text"}, **fields)).status_code == 200
    assert {name: counted(name) - before[name] for name in before} == dict.fromkeys(COUNTED, 1) | {"other": 2}


def counted(field: str) -> float:
    return IGNORED.labels(field)._value.get()
