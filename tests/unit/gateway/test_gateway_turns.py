"""Turns through the gateway: what agents see, what stands on the log, and that both agree."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import numpy as np
import orjson
import pytest

from turnlog.infra.environments.episodes import Episode
from turnlog.plugins.recipes.calc import judge
from turnlog.producers.gateway.conversation import Conversation
from turnlog.producers.gateway.dialects.openai_chat import OpenAIChat
from turnlog.producers.gateway.parsers.formats import THINK
from turnlog.producers.gateway.parsers.parser import ParsedCall, Reasoning, Text
from turnlog.producers.gateway.requests import verify
from turnlog.schemas.events import Boundary, FinishReason, Outcome, TokenSnapshot, TurnCompleted
from turnlog.schemas.types import float32s, int32s

CALC = [{"type": "function", "function": {"name": "calc"}}]
CALL = '<tool_call>{"name":"calc","arguments":{"expr":"3+5"}}</tool_call>'
QUESTION = {"role": "user", "content": "3 + 5 = ?"}


async def test_a_conversation_with_a_tool_call_extends_the_sampled_tokens_exactly(rig: Any) -> None:
    session = await rig.open()
    first = rig.script.says(CALL)
    second = rig.script.says("8")
    one = (await rig.chat(session, [QUESTION], tools=CALC)).json()
    message = one["choices"][0]["message"]
    assert one["choices"][0]["finish_reason"] == "tool_calls"
    assert message["tool_calls"][0]["function"] == {"name": "calc", "arguments": '{"expr":"3+5"}'}
    tool = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "8"}
    two = (await rig.chat(session, [QUESTION, message, tool], tools=CALC)).json()
    assert two["choices"][0] == {
        "index": 0,
        "message": {"role": "assistant", "content": "8"},
        "logprobs": None,
        "finish_reason": "stop",
    }
    asked = [request.input_ids for request in rig.engines["e0"].requests]
    assert asked[1][: len(asked[0]) + len(first)] == asked[0] + first
    assert rig.tokens.literal(asked[1]) == (
        f"<|im_start|>user\n3 + 5 = ?<|im_end|>\n<|im_start|>assistant\n{CALL}<|im_end|>\n"
        "<|im_start|>tool\n8<|im_end|>\n<|im_start|>assistant\n"
    )
    a, b = await rig.written("TokenSnapshot")
    assert int32s(a.delta_ids).tolist() == asked[0]
    assert int32s(a.output_ids).tolist() == first
    assert (a.boundary, a.boundary_reason, a.parent_turn, a.base_len) == (Boundary.root, "first", None, 0)
    assert (b.boundary, b.boundary_reason) == (Boundary.append, "append")
    assert b.parent_turn == a.turn
    assert b.base_len == len(asked[0]) + len(first)
    assert int32s(b.delta_ids).tolist() == asked[1][b.base_len :]
    assert int32s(b.output_ids).tolist() == second
    assert len(float32s(b.output_logprobs)) == sum(span.length for span in b.version_spans) == len(second)
    assert b.prompt_sha256 == hashlib.sha256(np.array(asked[1], dtype="<i4").tobytes()).hexdigest()
    completed = await rig.written("TurnCompleted")
    assert [turn.finish_reason for turn in completed] == [FinishReason.tool_calls, FinishReason.stop]
    assert completed[1].base_turn == a.turn
    assert one["usage"]["prompt_tokens"] == len(asked[0])
    assert one["turnlog"]["index"] == 0


CALLS = ["7+0", "8+0", "9+0"]


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        ([("2", "9"), ("0", "7"), ("1", "8")], "789"),
        ([("2", "9"), (None, "?"), ("0", "7")], "7?9"),  # the one without an id stays in the middle
        ([("other", "?"), ("1", "8"), ("0", "7")], "?78"),
        ([("1", "8"), ("0", "7"), ("1", "b")], "78b"),
        ([({"a": 1}, "?"), ("2", "9"), ("", "!"), ("1", "8")], "?8!9"),
    ],
)
async def test_results_of_parallel_calls_are_read_in_the_order_of_the_calls(
    rig: Any, sent: list[tuple[Any, str]], read: str
) -> None:
    session = await rig.open()
    rig.script.says(
        "".join(f'<tool_call>{{"name":"calc","arguments":{{"expr":"{one}"}}}}</tool_call>' for one in CALLS)
    )
    message = (await rig.chat(session, [QUESTION], tools=CALC)).json()["choices"][0]["message"]
    ids = {str(at): call["id"] for at, call in enumerate(message["tool_calls"])}
    results = [
        {"role": "tool", "content": content, **({} if named is None else {"tool_call_id": ids.get(str(named), named)})}
        for named, content in sent
    ]
    asked = [QUESTION, message, *results]
    answer = (await rig.chat(session, asked, tools=CALC)).json()["choices"][0]["message"]
    await rig.start("gateway-1")  # what is read back from the log is found again by what the client sends
    await rig.chat(session, [*asked, answer, {"role": "user", "content": "so?"}], tools=CALC)
    second, third = (rig.tokens.literal(one.input_ids) for one in rig.engines["e0"].requests[1:])
    assert "".join(second.split("<|im_start|>tool\n")[1:]).startswith("<|im_end|>\n".join([*read, "<|im_start|>"]))
    snapshots = await rig.written("TokenSnapshot")
    assert [one.boundary for one in snapshots] == [Boundary.root, Boundary.append, Boundary.append]
    assert third.startswith(second)
    completed = (await rig.written("TurnCompleted"))[1]
    assert "".join(one["content"] for one in orjson.loads(completed.new_messages)) == read


async def test_a_turn_cut_by_length_is_closed_before_the_next_message(rig: Any) -> None:
    session = await rig.open()
    rig.script.says("1234567890", end=False)
    one = (await rig.chat(session, [QUESTION], max_tokens=3)).json()
    assert one["choices"][0]["finish_reason"] == "length"
    await rig.chat(session, [QUESTION, one["choices"][0]["message"], {"role": "user", "content": "go on"}])
    text = rig.tokens.literal(rig.engines["e0"].requests[1].input_ids)
    assert text.endswith("123<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n")
    assert (await rig.written("TokenSnapshot"))[1].boundary is Boundary.append


async def test_streamed_and_whole_answers_are_equal(rig: Any) -> None:
    texts = []
    for stream in (False, True):
        session = await rig.open(f"rollout-{stream}")
        rig.script.says(f"let me see {CALL}")
        answer = await rig.chat(session, [QUESTION], tools=CALC, stream=stream, stream_options={"include_usage": True})
        texts.append(answer)
    whole, events = texts[0].json(), _events(texts[1].text)
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta.get("content") or "" for delta in deltas) == "let me see"
    assert whole["choices"][0]["message"]["content"] == "let me see"
    [calls] = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert [call["function"] for call in calls] == [
        call["function"] for call in whole["choices"][0]["message"]["tool_calls"]
    ]
    assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert events[-1]["usage"] == whole["usage"]
    a, b = await rig.written("TokenSnapshot")
    assert (a.output_ids, a.delta_ids, a.output_logprobs) == (b.output_ids, b.delta_ids, b.output_logprobs)


async def test_content_flows_before_the_turn_is_complete_and_silence_is_filled(rig: Any) -> None:
    session = await rig.open()
    engine = rig.engines["e0"]
    rig.script.says("1234567")
    engine.holds_after = 4
    lines = []
    async with rig.http.stream(
        "POST",
        "/v1/chat/completions",
        json={"messages": [QUESTION], "stream": True},
        headers={"authorization": f"Bearer {session['token']}"},
    ) as answer:
        async for line in answer.aiter_lines():
            lines.append(line)
            if line == ": keep-alive":
                assert not await rig.written("TurnCompleted")
                engine.released.set()
    contents = [event["choices"][0]["delta"].get("content", "") for event in _events("\n\n".join(filter(None, lines)))]
    assert "".join(contents) == "1234567"
    assert "".join(contents[: contents.index("5") if "5" in contents else -2]) == "1234"
    assert ": keep-alive" in lines


async def test_ids_beyond_the_tokenizer_are_kept_and_read_as_replacement_characters(rig: Any) -> None:
    session = await rig.open()
    rig.script.answers.append([380, 28, 383, 2])
    answer = (await rig.chat(session, [QUESTION])).json()
    assert answer["choices"][0]["message"]["content"] == "�8�"
    assert int32s((await rig.written("TokenSnapshot"))[0].output_ids).tolist() == [380, 28, 383, 2]
    await rig.chat(session, [QUESTION, answer["choices"][0]["message"], {"role": "user", "content": "?"}])
    assert (await rig.written("TokenSnapshot"))[1].boundary is Boundary.append


async def test_changed_tools_and_rewritten_histories_open_new_roots_or_keep_their_tokens(rig: Any) -> None:
    session = await rig.open()
    one = (await rig.chat(session, [QUESTION])).json()["choices"][0]["message"]
    tools = [{"type": "function", "function": {"name": "calc", "parameters": {}}}]
    await rig.chat(session, [QUESTION, one, {"role": "user", "content": "a"}], tools=tools)
    await rig.chat(session, [QUESTION, {"role": "assistant", "content": "other"}, {"role": "user", "content": "a"}])
    await rig.chat(session, [{"role": "user", "content": "something else"}])
    snapshots: list[TokenSnapshot] = await rig.written("TokenSnapshot")
    assert [(each.boundary, each.boundary_reason) for each in snapshots] == [
        (Boundary.root, "first"),
        (Boundary.append, "append"),  # this template shows no tools, so the prompt extends the base all the same
        (Boundary.root, "history_rewritten"),
        (Boundary.root, "new_conversation"),
    ]
    assert snapshots[2].parent_turn == snapshots[0].turn
    assert snapshots[2].base_len > 0
    completed: list[TurnCompleted] = await rig.written("TurnCompleted")
    assert completed[1].tools is not None
    assert completed[2].base_turn is None


async def test_echoes_that_changed_shape_find_their_base(rig: Any) -> None:
    session = await rig.open()
    rig.script.says(CALL)
    message = (await rig.chat(session, [QUESTION], tools=CALC)).json()["choices"][0]["message"]
    call = message["tool_calls"][0]
    echo = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "index": 0,
                "id": "other",
                "function": {"name": "calc", "arguments": '{ "expr" : "3+5" }'},
                "type": "x",
            }
        ],
    }
    asked = {"role": "user", "content": [{"type": "text", "text": "3 + 5 = ?", "cache_control": {"type": "ephemeral"}}]}
    await rig.chat(session, [asked, echo, {"role": "tool", "tool_call_id": call["id"], "content": "8"}], tools=CALC)
    assert (await rig.written("TokenSnapshot"))[1].boundary is Boundary.append


async def test_the_session_writes_tokens_once(rig: Any) -> None:
    session = await rig.open()
    messages: list[dict[str, Any]] = [QUESTION]
    for turn in range(12):
        rig.script.says("7")
        answer = (await rig.chat(session, messages)).json()
        messages += [answer["choices"][0]["message"], {"role": "user", "content": f"{turn}"}]
    snapshots = await rig.written("TokenSnapshot")
    prompts = [len(request.input_ids) for request in rig.engines["e0"].requests]
    stored = sum(len(int32s(each.delta_ids)) + len(int32s(each.output_ids)) for each in snapshots)
    assert stored == prompts[-1] + len(int32s(snapshots[-1].output_ids))
    turns = await rig.written("TurnCompleted")
    assert max(len(turn.new_messages) for turn in turns) < 2 * min(len(turn.new_messages) for turn in turns[1:]) + 99


async def test_what_a_client_asks_may_only_lower_the_token_limit(rig: Any) -> None:
    session = await rig.open(sampling={"temperature": 0.7, "max_new_tokens": 5, "stop_token_ids": [9]})
    answer = await rig.chat(session, [QUESTION], temperature=0.0, max_tokens=50, top_p=0.1, unheard_of={"x": 1})
    assert answer.status_code == 200
    request = rig.engines["e0"].requests[0]
    assert (request.temperature, request.max_new_tokens, set(request.stop_token_ids)) == (0.7, 5, {9, 2})


def _events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [orjson.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("stream", [False, True])
async def test_control_marks_inside_an_output_are_shown_and_the_one_that_ended_it_is_not(
    rig: Any, stream: bool
) -> None:
    session = await rig.open()
    marks = rig.tokens.encode("<|im_start|><|endoftext|>")
    assert len(marks) == 2
    output = [*rig.tokens.encode("8"), *marks, *rig.tokens.encode("9"), marks[0], 2]
    rig.script.answers.append(output)
    answer = await rig.chat(session, [QUESTION], stream=stream)
    if stream:
        deltas = [event["choices"][0]["delta"] for event in _events(answer.text) if event["choices"]]
        assert "".join(delta.get("content") or "" for delta in deltas) == "8<|im_start|><|endoftext|>9<|im_start|>"
    message = (await rig.describe(session))["messages"][-1]
    assert message["content"] == "8<|im_start|><|endoftext|>9<|im_start|>"
    rig.script.answers.append([*rig.tokens.encode("8"), marks[0], 2])
    other = (await rig.chat(session, [QUESTION, message, QUESTION])).json()["choices"][0]["message"]
    (_, second) = await rig.written("TokenSnapshot")
    assert second.boundary is Boundary.append
    assert second.base_len == len(rig.engines["e0"].requests[0].input_ids) + len(output)
    assert other["content"] == "8<|im_start|>"
    for said, exact in ((other, 0.0), ({**other, "content": "8"}, 1.0)):
        episode = Episode(task={"answer": "8"}, messages=(QUESTION, said), outcome=Outcome.completed, reason="")
        assert judge(episode).components["exact"] == exact


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_told_apart_and_counted_where_the_template_has_it(rig: Any, stream: bool) -> None:
    planner = dataclasses.replace(rig.gateway.turns.planner, thinking=THINK)
    rig.gateway = dataclasses.replace(rig.gateway, turns=dataclasses.replace(rig.gateway.turns, planner=planner))
    session = await rig.open(sampling={"max_new_tokens": 100})
    rig.script.says(f"<think>\nof 3 and 5\n</think>\n\nlet me see {CALL}")
    claims = verify(session["token"], *rig.gateway.keys.accepted_keys)
    held = await rig.gateway.sessions.find(claims)
    asked = OpenAIChat().request(
        orjson.dumps({"messages": [QUESTION], "tools": CALC, "stream": stream}), Conversation()
    )
    turn = rig.gateway.turns.start(held, asked, claims, await rig.gateway.turns.plan(held, asked, claims))
    recorded = await turn.task
    assert recorded.response_raw["reasoning_content"] == "of 3 and 5"
    assert recorded.response_raw["content"] == "let me see"
    assert [type(part) for part in turn.parts] == [Reasoning, Text, ParsedCall]
    [completed] = await rig.written("TurnCompleted")
    output = int32s((await rig.written("TokenSnapshot"))[0].output_ids).tolist()
    thought = completed.reasoning_tokens
    assert rig.tokens.decode(output[:thought]).endswith("</think>")
    assert "</think>" not in rig.tokens.decode(output[: thought - 1])
    assert completed.ill_formed_calls == 0


async def test_a_block_that_is_no_call_stays_text_and_is_counted(rig: Any) -> None:
    session = await rig.open()
    rig.script.says('<tool_call>{"name":</tool_call>')
    answer = (await rig.chat(session, [QUESTION], tools=CALC)).json()
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": '<tool_call>{"name":</tool_call>'}
    assert [turn.ill_formed_calls for turn in await rig.written("TurnCompleted")] == [1]
