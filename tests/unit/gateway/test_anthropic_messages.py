"""Anthropic messages: what agents send is what the policy is asked, what it says comes back in their shape, whole as
streamed, and an echo of it is the turn that it was, whatever shape a harness gives it."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import given
from hypothesis import settings as fuzzing
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from tests.unit.gateway.conftest import WINDOW, Rig
from tests.unit.gateway.test_gateway_doors import FUZZED, ROLLOUTS, VALUES, bearer
from tests.unit.gateway.test_gateway_images import CAT, vision
from tests.unit.gateway.test_gateway_images import TEMPLATE as SEEING
from tests.unit.gateway.test_gateway_retries import SlowToAbort, held, until, with_engine
from turnlog.plugins.recipes.warm_start import CHAT_TEMPLATE
from turnlog.producers.gateway.conversation import Conversation
from turnlog.producers.gateway.dialects.anthropic_messages import FIELDS, INPUT_DEPTH, UNPARSED, AnthropicMessages
from turnlog.producers.gateway.dialects.dialect import IGNORED
from turnlog.producers.gateway.requests import SigningKeys
from turnlog.schemas.events import Boundary
from turnlog.schemas.types import int32s
from turnlog.settings import GatewaySettings, Settings

ASK = {"role": "user", "content": "3 + 5 = ?"}
GO_ON = {"role": "user", "content": "go on"}
CALL = '<tool_call>{"name":"calc","arguments":{"expr":"3+5"}}</tool_call>'
OTHER = '<tool_call>{"name":"calc","arguments":{"expr":"1+1"}}</tool_call>'
TOOLS = [{"name": "calc", "description": "Evaluate.", "input_schema": {"type": "object"}}]
ROOM = {"temperature": 1.0, "max_new_tokens": 200}
CLAUDE = {"user-agent": "claude-cli/2.1.329 (external, sdk-cli)"}
THINKS = CHAT_TEMPLATE.replace(
    "{%- for call in",
    "{%- if message['reasoning_content'] -%}<think>{{ message['reasoning_content'] }}</think>{%- endif -%}\n"
    "{%- for call in",
)
"""Of a model that reasons."""
LISTS = (
    "{%- for tool in tools or [] -%}<|im_start|>{{ tool['function']['name'] }}<|im_end|>{% endfor -%}" + CHAT_TEMPLATE
)
"""Of a model that is shown its tools."""
STRICT = CHAT_TEMPLATE.replace(
    "{%- for message in messages -%}",
    "{%- for message in messages -%}{%- if message['role'] == 'system' and not loop.first -%}"
    "{{ raise_exception('System message must be at the beginning.') }}{%- endif -%}",
)
"""Of a model whose system message comes first or not at all."""


@pytest.fixture
def template() -> str:
    """The chat template; a test may give its own."""
    return CHAT_TEMPLATE


@pytest.fixture
def settings(settings: Settings, model_folder: Path, tmp_path: Path, template: str) -> Settings:
    """The rig's, with the template."""
    folder = shutil.copytree(model_folder, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(template)
    return dataclasses.replace(settings, model=dataclasses.replace(settings.model, path=str(folder)))


async def ask(rig: Rig, session: Any, messages: Any, *, headers: dict[str, str] | None = None, **more: Any) -> Any:
    """POST /v1/messages as Claude Code does."""
    body = {"model": "claude-of-some-kind", "max_tokens": 64, "messages": messages, **more}
    sent = {"x-api-key": session["token"], "anthropic-version": "2023-06-01", **(headers or {})}
    return await rig.http.post("/v1/messages?beta=true", json=body, headers=sent)


async def said(rig: Rig, session: Any, messages: Any, **more: Any) -> Any:
    """The message that a request is answered with, streamed or whole."""
    answer = await ask(rig, session, messages, **more)
    assert answer.status_code == 200, answer.text
    return folded(events_of(answer.text)) if more.get("stream") else answer.json()


def events_of(text: str) -> list[dict[str, Any]]:
    """Of a stream; each names its type twice."""
    events = []
    for block in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n") if line and not line.startswith(":"))
        if lines:
            events.append(orjson.loads(lines["data"]))
            assert lines["event"] == events[-1]["type"]
    return events


def folded(events: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client makes of a stream, in which every block begins, goes on and ends in its turn."""
    assert [events[0]["type"], events[-1]["type"]] == ["message_start", "message_stop"]
    message, inputs, opened = events[0]["message"], {}, False
    for event in events[1:]:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(dict(event["content_block"]))
                opened = True
            case "content_block_delta":
                assert opened
                assert event["index"] == len(message["content"]) - 1
                block, (kind, value) = message["content"][-1], list(event["delta"].items())[::-1][0:1][0]
                if kind == "partial_json":
                    inputs[event["index"]] = inputs.get(event["index"], "") + value
                else:
                    block[kind] += value
            case "content_block_stop":
                assert opened
                opened = False
                if event["index"] in inputs:
                    message["content"][-1]["input"] = json.loads(inputs[event["index"]])
            case "message_delta":
                message |= {**event["delta"], "usage": event["usage"], "turnlog": event["turnlog"]}
    assert not opened
    return message


def echo(message: Any) -> dict[str, Any]:
    """As an SDK sends an answer back."""
    return {"role": "assistant", "content": message["content"]}


def result(block: Any, text: Any = "8", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": block["id"], "content": text, **more}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def marked(message: Any) -> Any:
    """The newest message as Claude Code sends it: a list whose last block has the cache mark."""
    content = message["content"]
    blocks = [text(content)] if isinstance(content, str) else content
    return {**message, "content": [*blocks[:-1], {**blocks[-1], "cache_control": {"type": "ephemeral"}}]}


async def prompts(rig: Rig) -> list[str]:
    """What the engine was asked, as text."""
    return [rig.tokens.literal(request.input_ids) for request in rig.engines["e0"].requests]


async def boundaries(rig: Rig) -> list[tuple[Boundary, str]]:
    return [(one.boundary, one.boundary_reason) for one in await rig.written("TokenSnapshot")]


def counted(field: str) -> float:
    return IGNORED.labels(field)._value.get()


def unsigned() -> float:
    return REGISTRY.get_sample_value("turnlog_gateway_unsigned_thinking_total") or 0.0


# what comes back


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_is_a_message_of_blocks_and_its_turn_is_on_the_log(rig: Any, stream: bool) -> None:
    session = await rig.open()
    rig.script.says(f"let me see {CALL}{OTHER}")
    message = await said(rig, session, [ASK], tools=TOOLS, stream=stream)
    [turn] = await rig.written("TurnCompleted")
    calls = orjson.loads(turn.response)["tool_calls"]
    assert message["content"] == [
        text("let me see"),
        {"type": "tool_use", "id": calls[0]["id"], "name": "calc", "input": {"expr": "3+5"}},
        {"type": "tool_use", "id": calls[1]["id"], "name": "calc", "input": {"expr": "1+1"}},
    ]
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "turnlog-policy")
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    assert message["usage"]["input_tokens"] == turn.prompt_tokens
    assert message["usage"]["output_tokens"] == turn.output_tokens
    assert (message["turnlog"]["epoch"], message["turnlog"]["index"]) == (turn.turn.epoch, turn.turn.index)
    assert turn.api == "messages"


async def test_streamed_and_whole_are_one_turn_on_the_log(rig: Any) -> None:
    for stream in (False, True):
        session = await rig.open(f"rollout-{stream}")
        rig.script.says(f"let me see {CALL}")
        await said(rig, session, [ASK], tools=TOOLS, stream=stream)
    [one, other] = await rig.written("TurnCompleted")
    same = {"response", "new_messages", "tools", "finish_reason", "prompt_tokens", "output_tokens", "system_sha256"}
    shown = [{name: getattr(turn, name) for name in same} for turn in (one, other)]
    for each in shown:
        each["response"] = orjson.loads(each["response"])
        for call in each["response"]["tool_calls"]:
            del call["id"]
    assert shown[0] == shown[1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("spoken", "end", "more", "reason", "stop"),
    [
        ("8", True, {}, "end_turn", None),
        ("12345678", False, {"max_tokens": 4}, "max_tokens", None),
        ("12; 34", True, {"stop_sequences": ["zz", ";"]}, "stop_sequence", ";"),
        (CALL, True, {}, "tool_use", None),
        ("", True, {}, "end_turn", None),
    ],
)
async def test_why_it_ended(
    rig: Any, spoken: str, end: bool, more: dict[str, Any], reason: str, stop: str | None, stream: bool
) -> None:
    session = await rig.open()
    rig.script.says(spoken, end=end)
    message = await said(rig, session, [ASK], stream=stream, tools=TOOLS, **more)
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, stop)
    if stop:
        assert message["content"] == [text("12")]
        [snapshot] = await rig.written("TokenSnapshot")
        assert ";" in rig.tokens.literal(int32s(snapshot.output_ids).tolist())


async def test_cached_tokens_are_no_input_and_thought_ones_are_output(rig: Any) -> None:
    session = await rig.open()
    rig.engines["e0"].cached_tokens = 5
    message = await said(rig, session, [ASK])
    [turn] = await rig.written("TurnCompleted")
    usage = message["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (turn.prompt_tokens - 5, 5)


# what is asked


async def test_blocks_are_asked_as_the_same_chat_is(rig: Any) -> None:
    session, other = await rig.open("a"), await rig.open("b")
    rig.script.says("8")
    rig.script.says("8")
    system = [text("be brief"), text("and right", cache_control={"type": "ephemeral"})]
    await said(rig, session, [user(text("3 + 5"), text("= ?", of_a_later_year=1))], system=system)
    await rig.chat(other, [{"role": "system", "content": system}, {"role": "user", "content": "3 + 5\n= ?"}])
    one, same = await prompts(rig)
    assert one == same
    assert "be brief\nand right" in one


async def test_a_document_of_text_is_read_with_what_is_said_of_it(rig: Any) -> None:
    session, source = await rig.open(), {"type": "text", "media_type": "text/plain", "data": "3 + 5"}
    document = {"type": "document", "source": source, "title": "a sum", "context": "by hand"}
    await said(rig, session, [user(document, text("= ?"))])
    assert "a sum\nby hand\n3 + 5\n= ?" in (await prompts(rig))[0]
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "eA=="}}
    answer = await ask(rig, session, [user(pdf)])
    assert (answer.status_code, "'document'" in answer.json()["error"]["message"]) == (400, True)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_continues_its_turn_and_results_follow_the_order_of_the_calls(rig: Any, stream: bool) -> None:
    session = await rig.open()
    rig.script.says(f"so: {CALL}{OTHER}")
    message = await said(rig, session, [ASK], tools=TOOLS, stream=stream)
    _, one, two = message["content"]
    results = user(result(two, "two"), result(one, [text("eight")]), text("go on"))
    await said(rig, session, [ASK, echo(message), results], tools=TOOLS, stream=stream)
    assert (await boundaries(rig))[1:] == [(Boundary.append, "append")]
    assert (await prompts(rig))[1].index("eight") < (await prompts(rig))[1].index("two")
    new = orjson.loads((await rig.written("TurnCompleted"))[1].new_messages)
    assert [(each["role"], each.get("tool_call_id"), each["content"]) for each in new] == [
        ("tool", one["id"], "eight"),
        ("tool", two["id"], "two"),
        ("user", None, "go on"),
    ]


async def test_an_answer_that_a_stream_cut_into_texts_is_echoed_as_one(rig: Any) -> None:
    session = await rig.open()
    rig.script.says("let me see")
    await said(rig, session, [ASK])
    cut = {"role": "assistant", "content": [text("let "), text("me see")]}
    await said(rig, session, [ASK, cut, GO_ON])
    assert (await boundaries(rig))[1:] == [(Boundary.append, "append")]


async def test_arguments_are_the_same_after_a_client_that_knows_no_floats(rig: Any) -> None:
    session = await rig.open()
    rig.script.says('<tool_call>{"name":"calc","arguments":{"b":1.0,"a":[2.0,0.5]}}</tool_call>')
    message = await said(rig, session, [ASK], tools=TOOLS)
    [call] = message["content"]
    call["input"] = {"a": [2, 0.5], "b": 1}
    await said(rig, session, [ASK, echo(message), user(result(call))], tools=TOOLS)
    assert (await boundaries(rig))[1:] == [(Boundary.append, "append")]


@pytest.mark.parametrize("stream", [False, True])
async def test_arguments_that_are_no_object_are_shown_as_one_and_known_again(rig: Any, stream: bool) -> None:
    session = await rig.open()
    rig.script.says('<tool_call>{"name":"calc","arguments":"3+5"}</tool_call>')
    message = await said(rig, session, [ASK], tools=TOOLS, stream=stream)
    [call] = message["content"]
    assert call["input"] == {UNPARSED: "3+5"}
    await said(rig, session, [ASK, echo(message), user(result(call))], tools=TOOLS, stream=stream)
    assert (await boundaries(rig))[1:] == [(Boundary.append, "append")]


def test_the_deepest_input_that_is_shown_as_an_object_can_be_sent_back() -> None:
    dialect = AnthropicMessages(SigningKeys(GatewaySettings(signing_key="k"), Path()))
    value: Any = {}
    for _ in range(INPUT_DEPTH - 1):
        value = {"a": value}
    call = {"type": "tool_use", "id": "c", "name": "f", "input": value}
    body = {"messages": [ASK, {"role": "assistant", "content": [call]}, GO_ON]}
    read = dialect.request(orjson.dumps(body), Conversation())
    assert orjson.loads(read.raw[1]["tool_calls"][0]["function"]["arguments"]) == value


async def test_tools_are_functions_and_those_of_the_server_are_left_out_and_counted(rig: Any) -> None:
    session, before = await rig.open(), counted("tools")
    tools = [{**TOOLS[0], "cache_control": {}, "defer_loading": True}, {"type": "web_search_20250305", "name": "web"}]
    await said(rig, session, [ASK], tools=tools)
    [turn] = await rig.written("TurnCompleted")
    function = {"name": "calc", "description": "Evaluate.", "parameters": {"type": "object"}}
    assert orjson.loads(turn.tools) == [{"type": "function", "function": function}]
    assert counted("tools") == before + 1


async def test_no_tool_is_called_where_the_client_wants_none(rig: Any) -> None:
    session = await rig.open()
    rig.script.says(CALL)
    message = await said(rig, session, [ASK], tools=TOOLS, tool_choice={"type": "none"})
    assert (message["content"], message["stop_reason"]) == ([text(CALL)], "end_turn")


CONSTRAINTS = [
    ("tool_choice", {"type": "any"}),
    ("tool_choice", {"type": "tool", "name": "calc"}),
    ("output_config", {"format": {"type": "json_schema", "schema": {"type": "object"}}}),
]


async def test_a_thread_begins_as_any_conversation_and_is_never_continued_without_its_messages(rig: Any) -> None:
    session = await rig.open()
    message = await said(rig, session, [ASK], thread={"type": "create"})
    answer = await ask(rig, session, [GO_ON], thread={"type": "continue", "previous_message_id": message["id"]})
    assert (answer.status_code, answer.headers["x-should-retry"]) == (404, "false")
    assert answer.json()["error"]["details"] == {"error_code": "thread_not_found"}
    assert len(await rig.written("TurnCompleted")) == 1


@pytest.mark.parametrize(("field", "value"), CONSTRAINTS)
async def test_a_constraint_is_refused_by_name(rig: Any, field: str, value: Any) -> None:
    answer = await ask(rig, await rig.open(), [ASK], **{field: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert field in answer.json()["error"]["message"]
    assert not await rig.written("TurnCompleted")


class TestIgnored:
    @pytest.fixture
    def settings(self, settings: Settings) -> Settings:
        return dataclasses.replace(settings, gateway=dataclasses.replace(settings.gateway, constraints="ignore"))

    @pytest.mark.parametrize(("field", "value"), CONSTRAINTS)
    async def test_a_constraint_is_ignored_and_counted_where_a_setting_says_so(
        self, rig: Any, field: str, value: Any
    ) -> None:
        session, before = await rig.open(), counted(field)
        await said(rig, session, [ASK], **{field: value})
        assert counted(field) == before + 1


async def test_what_is_limited_is_counted_by_name_and_what_nobody_knows_as_other(rig: Any) -> None:
    limited = [name for name, (treatment, _) in FIELDS.items() if treatment in ("limited", "without effect")]
    before = {name: counted(name) for name in (*limited, "other")}
    fields = dict.fromkeys(limited, 1) | {"of_a_later_year": 1, "and_another": 1}
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    await said(rig, await rig.open(), [ASK], tool_choice=choice, output_config={"effort": "high"}, **fields)
    once = dict.fromkeys(limited, 1) | {"other": 2, "disable_parallel_tool_use": 2}
    assert {name: counted(name) - before[name] for name in before} == once


@pytest.mark.parametrize("template", [SEEING.replace("IMAGE", "<|image_pad|>") + "{# <tool_call> #}"])
class TestSeeing:
    @pytest.fixture
    def settings(self, settings: Settings, model_folder: Path, tmp_path: Path, template: str) -> Settings:
        return vision(settings, model_folder, tmp_path / "vision", template)

    async def test_images_of_the_user_and_of_results_are_seen(self, rig: Any) -> None:
        rig.engines["e0"].vocabulary += 1
        session = await rig.open()
        media, data = CAT.removeprefix("data:").split(";base64,")
        image = {"type": "image", "source": {"type": "base64", "media_type": media, "data": data}}
        rig.script.says(CALL)
        message = await said(rig, session, [user(image, text("what is it?"))], tools=TOOLS)
        shown = [user(image, text("what is it?")), echo(message), user(result(message["content"][0], [image]))]
        await said(rig, session, shown, tools=TOOLS)
        snapshots = await rig.written("TokenSnapshot")
        assert [[one.tokens for one in each.images] for each in snapshots] == [[4], [4]]
        assert snapshots[1].boundary is Boundary.append
        stored = base64.b64encode(await rig.blobs.get(snapshots[0].images[0].image)).decode()
        assert stored == data

    async def test_an_image_that_somebody_would_have_to_fetch_is_refused_at_its_message(self, rig: Any) -> None:
        image = {"type": "image", "source": {"type": "url", "url": "https://example.com/cat.png"}}
        answer = await ask(rig, await rig.open(), [ASK, echo({"content": "a"}), user(image)], system="be brief")
        assert answer.status_code == 400
        assert "messages[2]" in answer.json()["error"]["message"]
        assert "fetches nothing" in answer.json()["error"]["message"]


# reasoning


@pytest.mark.parametrize("template", [THINKS])
class TestThinking:
    SPOKEN = f"<think>\nthree and five\n</think>\n\nso: {CALL}"

    @pytest.mark.parametrize("stream", [False, True])
    async def test_what_was_thought_is_a_signed_block_and_its_echo_continues_the_turn(
        self, rig: Any, stream: bool
    ) -> None:
        session, before = await rig.open(sampling=ROOM), unsigned()
        rig.script.says(self.SPOKEN)
        message = await said(rig, session, [ASK], tools=TOOLS, stream=stream)
        thinking, spoken, call = message["content"]
        assert (thinking["type"], thinking["thinking"], spoken) == ("thinking", "three and five", text("so:"))
        assert thinking["signature"]
        assert message["usage"]["output_tokens_details"]["thinking_tokens"] > 0
        await said(rig, session, [ASK, echo(message), user(result(call))], tools=TOOLS, stream=stream)
        assert (await boundaries(rig))[1:] == [(Boundary.append, "append")]
        assert unsigned() == before

    async def test_an_answer_that_must_be_json_may_be_thought_of_first(self, rig: Any) -> None:
        session = await rig.open(sampling=ROOM, purpose="eval")
        rig.engines["e0"].fitting = lambda _: [*rig.tokens.encode('<think>\nthree\n</think>\n\n{"a":8}'), 2]
        schema = {"type": "object", "required": ["a"]}
        config = {"format": {"type": "json_schema", "schema": schema}}
        thinking, spoken = (await said(rig, session, [ASK], output_config=config))["content"]
        assert (thinking["thinking"], spoken) == ("three", text('{"a":8}'))
        kind, tag = rig.engines["e0"].requests[-1].grammar
        thought, _, answer = json.loads(tag)["format"]["elements"]
        assert (kind, thought["type"], answer) == (
            "structural_tag", "optional", {"type": "json_schema", "json_schema": schema}
        )  # fmt: skip

    @pytest.mark.parametrize(
        "change",
        [
            lambda block: block | {"signature": block["signature"][:-4]},
            lambda block: block | {"signature": "x.1.y"},
            lambda block: block | {"signature": ""},
            lambda block: block | {"signature": None},
            lambda block: {"type": "thinking", "thinking": block["thinking"]},
        ],
    )
    async def test_a_signature_that_is_wrong_is_counted_and_the_text_still_found(self, rig: Any, change: Any) -> None:
        session, before = await rig.open(sampling=ROOM), unsigned()
        rig.script.says(self.SPOKEN)
        message = await said(rig, session, [ASK], tools=TOOLS)
        thinking, *rest = message["content"]
        echoed = {"role": "assistant", "content": [change(thinking), *rest]}
        await said(rig, session, [ASK, echoed, user(result(rest[-1]))], tools=TOOLS)
        assert (await boundaries(rig))[1:] == [(Boundary.append, "append")]
        assert unsigned() == before + 1

    @pytest.mark.parametrize("left", [[], [{"type": "redacted_thinking", "data": "eHg="}]])
    async def test_thinking_that_a_client_leaves_out_matches_any(self, rig: Any, left: list[Any]) -> None:
        session = await rig.open(sampling=ROOM)
        rig.script.says(self.SPOKEN)
        message = await said(rig, session, [ASK], tools=TOOLS)
        echoed = {"role": "assistant", "content": [*left, *message["content"][1:]]}
        await said(rig, session, [ASK, echoed, user(result(message["content"][-1]))], tools=TOOLS)
        assert (await boundaries(rig))[1:] == [(Boundary.append, "append")]

    async def test_other_thoughts_are_another_turn(self, rig: Any) -> None:
        session, before = await rig.open(sampling=ROOM), unsigned()
        rig.script.says(self.SPOKEN)
        message = await said(rig, session, [ASK], tools=TOOLS)
        message["content"][0]["thinking"] = "four and four"
        await said(rig, session, [ASK, echo(message), user(result(message["content"][-1]))], tools=TOOLS)
        assert (await boundaries(rig))[1:] == [(Boundary.root, "history_rewritten")]
        assert unsigned() == before + 1

    async def test_a_signature_tells_apart_turns_that_said_the_same(self, rig: Any) -> None:
        session = await rig.open(sampling=ROOM)
        for _ in range(2):
            rig.script.says(self.SPOKEN)
        first = await said(rig, session, [ASK], tools=TOOLS)
        second = await said(rig, session, [ASK], tools=TOOLS)
        for message in (first, second):
            await said(rig, session, [ASK, echo(message), user(result(message["content"][-1]))], tools=TOOLS)
        turns = await rig.written("TurnCompleted")
        assert [turn.base_turn and turn.base_turn.index for turn in turns] == [None, None, 0, 1]

    async def test_a_signature_is_good_at_another_gateway_and_after_the_key_was_changed(
        self, rig: Any, settings: Settings
    ) -> None:
        session, before = await rig.open(sampling=ROOM), unsigned()
        rig.script.says(self.SPOKEN)
        message = await said(rig, session, [ASK], tools=TOOLS)
        rotated = dataclasses.replace(settings.gateway, signing_key="new", accepted_signing_keys="other test-key")
        rig.settings = dataclasses.replace(settings, gateway=rotated)
        await rig.start("gateway-1")
        await said(rig, session, [ASK, echo(message), user(result(message["content"][-1]))], tools=TOOLS)
        assert (await boundaries(rig))[1:] == [(Boundary.append, "append")]
        assert unsigned() == before


# errors


def refused(answer: Any) -> tuple[int, str]:
    """Status and type of an error of Anthropic's shape."""
    body = answer.json()
    assert (body.keys(), body["type"], body["error"].keys()) == ({"type", "error"}, "error", {"type", "message"})
    return answer.status_code, body["error"]["type"]


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (b"{", "JSON"),
        (b"[]", "JSON object"),
        (b"{}", "messages"),
        (b'{"messages": []}', "messages"),
        (b'{"messages": [{"role": "wizard", "content": "x"}]}', "messages[0]"),
        (b'{"messages": [{"role": ["user"], "content": "x"}]}', "messages[0]"),
        (b'{"messages": [{"role": "user"}]}', "messages[0]"),
        (b'{"messages": [{"role": "user", "content": ["x"]}]}', "messages[0]"),
        (b'{"messages": [{"role": "user", "content": [{"type": "document"}]}]}', "document"),
        (b'{"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}', "messages[0]"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}', "messages[0]"),
        (b'{"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}]}', "server_tool_use"),
        (b'{"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x"}]}]}', "tool_use"),
        (b'{"messages": [{"role": "user", "content": "x"}], "system": 1}', "system"),
        (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}', "max_tokens"),
        (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": "9"}', "max_tokens"),
        (b'{"messages": [{"role": "user", "content": "x"}], "tool_choice": "auto"}', "tool_choice"),
        (b'{"messages": [{"role": "user", "content": "x"}], "tools": {"a": 1}}', "tools"),
        (b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"name": "f"}]}', "tools[0]"),
        (b'{"messages": [{"role": "user", "content": "x"}], "stop_sequences": [""]}', "stop_sequences"),
        (b'{"messages": [{"role": "user", "content": "x"}], "compaction": {"type": "summarize"}}', "compaction"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_a_bad_body_is_refused_by_name_and_writes_nothing(rig: Any, path: str, body: bytes, names: str) -> None:
    answer = await rig.http.post(path, content=body, headers=bearer(await rig.open()))
    assert refused(answer) == (400, "invalid_request_error")
    assert names in answer.json()["error"]["message"]
    assert await rig.written("TurnCompleted") == []


BLOCK = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image", "tool_use", "tool_result", "thinking", "tool_reference"]) | VALUES},
    optional={"text": VALUES, "source": VALUES, "id": VALUES, "name": VALUES, "input": VALUES, "tool_use_id": VALUES,
              "content": VALUES, "thinking": VALUES, "signature": VALUES, "tool_name": VALUES},
)  # fmt: skip
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "assistant"]) | VALUES, "content": st.lists(BLOCK, max_size=3) | VALUES}
)
BODY = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGE, min_size=1, max_size=3) | VALUES},
    optional=dict.fromkeys(FIELDS.keys() - {"messages", "tools"}, VALUES)
    | {"tools": st.lists(st.fixed_dictionaries({}, optional={"name": VALUES, "type": VALUES, "input_schema": VALUES}))},
)


@fuzzing(FUZZED)
@given(BODY.map(lambda value: json.dumps(value).encode()))
async def test_no_request_is_our_failure(rig: Any, body: bytes) -> None:
    session = await rig.open(f"rollout-{next(ROLLOUTS)}")
    for path in ("/v1/messages/count_tokens", "/v1/messages"):
        answer = await rig.http.post(path, content=body, headers=bearer(session))
        assert answer.status_code in (200, 400), (body, answer.text)
        if answer.status_code == 400:
            assert refused(answer) == (400, "invalid_request_error")
    assert (await rig.describe(session))["session_id"] == session["session_id"]


async def test_each_failure_has_anthropics_type_and_says_whether_to_ask_again(rig: Any) -> None:
    session = await rig.open(limits={"max_context_tokens": 40})
    long = await ask(rig, session, [{"role": "user", "content": "x y " * 60}])
    assert refused(long) == (400, "invalid_request_error")
    assert re.fullmatch(r"prompt is too long: \d+ tokens > 40 maximum", long.json()["error"]["message"])
    assert long.headers["x-should-retry"] == "false"
    assert refused(await ask(rig, {"token": "no"}, [ASK])) == (401, "authentication_error")
    rig.held.down = True
    away = await ask(rig, session, [ASK])
    assert refused(away) == (503, "overloaded_error")
    assert (away.headers["x-should-retry"], int(away.headers["retry-after-ms"]) > 0) == ("true", True)
    rig.held.down = False
    await rig.finish(session)
    over = await ask(rig, session, [ASK])
    assert (refused(over), over.headers["x-should-retry"]) == ((400, "invalid_request_error"), "false")


class TestSmall:
    @pytest.fixture
    def settings(self, settings: Settings) -> Settings:
        return dataclasses.replace(settings, gateway=dataclasses.replace(settings.gateway, max_body_bytes=2048))

    @pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
    async def test_a_body_beyond_the_limit_is_too_large(self, rig: Any, path: str) -> None:
        answer = await rig.http.post(path, content=b" " * 4096, headers=bearer(await rig.open()))
        assert refused(answer) == (413, "request_too_large")


async def test_a_failure_inside_a_stream_is_an_event_of_it(rig: Any) -> None:
    rig.engines["e0"].context = 1  # the engine refuses every prompt
    answer = await ask(rig, await rig.open(), [ASK], stream=True)
    assert answer.status_code == 200
    first, last = events_of(answer.text)
    assert (first["type"], last["type"], last["error"]["type"]) == ("message_start", "error", "api_error")
    assert "do not fit" in last["error"]["message"]


# beside turns


async def test_the_tokens_that_are_counted_are_those_of_the_next_prompt(rig: Any) -> None:
    session = await rig.open()
    rig.script.says(f"so: {CALL}")
    message = await said(rig, session, [ASK], tools=TOOLS)
    body = {"messages": [ASK, echo(message), user(result(message["content"][-1]))], "tools": TOOLS}
    answer = await rig.http.post("/v1/messages/count_tokens?beta=true", json=body, headers=bearer(session))
    assert len(await rig.written("TurnCompleted")) == 1
    await said(rig, session, **body)
    assert answer.json() == {"input_tokens": (await rig.written("TurnCompleted"))[1].prompt_tokens}


async def test_models_have_the_shape_of_the_client_that_asks(rig: Any) -> None:
    session = await rig.open()
    theirs = bearer(session) | {"anthropic-version": "2023-06-01"}
    page = (await rig.http.get("/v1/models", headers=theirs)).json()
    assert (page["has_more"], page["first_id"], page["last_id"]) == (False, "turnlog-policy", "turnlog-policy")
    assert [(one["type"], one["id"]) for one in page["data"]] == [("model", "turnlog-policy")]
    one = (await rig.http.get("/v1/models/claude-haiku", headers=theirs)).json()
    assert (one["type"], one["id"], one["display_name"]) == ("model", "claude-haiku", "turnlog-policy")
    ours = (await rig.http.get("/v1/models", headers=bearer(session))).json()
    assert (ours["object"], ours["data"][0]["object"]) == ("list", "model")
    assert (await rig.http.get("/v1/models/org/name", headers=bearer(session))).json()["id"] == "org/name"
    assert refused(await rig.http.get("/v1/models", headers={"anthropic-version": "1"})) == (
        401,
        "authentication_error",
    )


@pytest.mark.parametrize(("method", "path"), [("HEAD", "/"), ("GET", "/"), ("HEAD", "/api/hello")])
async def test_a_probe_is_answered_without_a_token_and_a_turn(rig: Any, method: str, path: str) -> None:
    assert (await rig.http.request(method, path)).status_code in (200, 404)
    assert await rig.written("TurnCompleted") == []
    assert (await ask(rig, await rig.open(), [ASK])).status_code == 200


# what harnesses do


ENVIRONMENT = {"role": "system", "content": "# Environment: /workspace"}
BILLING = "x-anthropic-billing-header: cc_version=2.1.329.{}; cc_entrypoint=sdk-cli;{}"


def billed(mark: str, more: str = "") -> list[dict[str, Any]]:
    return [text(BILLING.format(mark, more)), text("You are an agent.", cache_control={"type": "ephemeral"})]


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, STRICT])
async def test_a_system_message_between_others_is_read_also_where_the_template_has_it_first_alone(
    rig: Any, template: str
) -> None:
    session = await rig.open()
    rig.script.says(CALL)
    asked = [ASK, marked(ENVIRONMENT)]
    message = await said(rig, session, asked, system=billed("ea0"), tools=TOOLS)
    told = user(result(message["content"][0]))
    later = [ASK, ENVIRONMENT, echo(message), told, marked({"role": "system", "content": "Agents: claude"})]
    await said(rig, session, later, system=billed("ea0"), tools=TOOLS)
    assert (await boundaries(rig))[1:] == [(Boundary.append, "append")]
    role = "user" if template == STRICT else "system"
    first, second = await prompts(rig)
    assert f"<|im_start|>{role}\n{ENVIRONMENT['content']}<|im_end|>" in first
    assert f"<|im_start|>{role}\nAgents: claude<|im_end|>" in second
    assert orjson.loads((await rig.written("TurnCompleted"))[0].new_messages)[2]["role"] == "system"


async def test_a_message_that_changes_its_shape_when_it_is_no_more_the_newest_is_the_same_message(rig: Any) -> None:
    session = await rig.open()
    rig.script.says(CALL)
    message = await said(rig, session, [marked(ASK)], tools=TOOLS)
    results = user(result(message["content"][0], cache_control={"type": "ephemeral"}, is_error=False))
    rig.script.says("8")
    last = await said(rig, session, [ASK, echo(message), results], tools=TOOLS)
    bare = user({name: value for name, value in results["content"][0].items() if name != "cache_control"})
    await said(rig, session, [ASK, echo(message), bare, marked(echo(last)), marked(GO_ON)], tools=TOOLS)
    assert (await boundaries(rig))[1:] == [(Boundary.append, "append")] * 2


async def test_a_billing_line_that_differs_is_neither_asked_nor_another_conversation(rig: Any) -> None:
    session = await rig.open()
    rig.script.says("8")
    message = await said(rig, session, [ASK], system=billed("7fc"))
    await said(rig, session, [ASK, echo(message), GO_ON], system=billed("ea0"))
    assert (await boundaries(rig))[1:] == [(Boundary.append, "append")]
    assert not any("billing" in prompt for prompt in await prompts(rig))


async def test_no_field_of_a_harness_is_a_reason_to_refuse_for_it_would_repeat_with_other_tools(rig: Any) -> None:
    session = await rig.open()
    fields: dict[str, Any] = {
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "metadata": {"user_id": '{"session_id":"x"}'},
        "of_a_later_year": {"deep": [1]},
    }
    tools = [{**TOOLS[0], "defer_loading": True, "of_a_later_year": 1}, {"type": "tool_search_20300101", "name": "t"}]
    for size in range(len(fields) + 1):
        more = dict(itertools.islice(fields.items(), size))
        headers = {"anthropic-beta": f"some-{size}"}
        assert (await ask(rig, session, [ASK], tools=tools, headers=headers, **more)).status_code == 200


@pytest.mark.parametrize("template", [LISTS])
async def test_tools_that_were_searched_for_and_join_the_list_begin_a_segment(rig: Any) -> None:
    session = await rig.open()
    rig.script.says(CALL)
    message = await said(rig, session, [ASK], tools=TOOLS)
    found = user(result(message["content"][0], [{"type": "tool_reference", "tool_name": "WebFetch"}]))
    more = [*TOOLS, {"name": "WebFetch", "input_schema": {"type": "object"}}]
    await said(rig, session, [ASK, echo(message), found], tools=more)
    assert (await boundaries(rig))[1:] == [(Boundary.branch, "tools_changed")]
    assert "WebFetch" in (await prompts(rig))[1]


async def test_a_body_that_comes_again_after_its_client_left_gets_the_turn_that_nobody_saw(rig: Any) -> None:
    session = await rig.open()
    engine = await with_engine(rig, SlowToAbort)
    rig.script.says("12")
    engine.holds_after = 1
    body = {"max_tokens": 64, "messages": [ASK], "stream": True}
    async with httpx.AsyncClient(base_url=rig.url) as client:
        asked = asyncio.create_task(client.post("/v1/messages", json=body, headers=bearer(session)))
        await engine.reached.wait()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
    await engine.asked_to_abort.wait()
    engine.released.set()
    await until(lambda: held(rig, session).conversation.turns)
    engine.aborts.set()
    again = await rig.http.post("/v1/messages", json=body, headers=bearer(session))
    assert folded(events_of(again.text))["content"] == [text("12")]
    assert len(await rig.written("TurnCompleted")) == 1
    engine.holds_after = None
    anew = await rig.http.post("/v1/messages", json=body, headers=bearer(session))
    assert folded(events_of(anew.text))["content"] != [text("12")]
    assert len(await rig.written("TurnCompleted")) == 2


async def test_sub_agents_that_speak_between_a_parents_turns_have_lines_of_their_own(rig: Any) -> None:
    session = await rig.open(agent={"name": "claude_code", "version": "2"})
    task = {"role": "user", "content": "SUBAGENT: 1 + 1"}
    child = CLAUDE | {"x-claude-code-agent-id": "a14d"}

    async def turn(messages: list[Any], headers: dict[str, str], more: str = "") -> dict[str, Any]:
        return echo(
            await said(rig, session, messages, headers=headers, system=billed("ea0", more), tools=TOOLS)
        )  # fmt: skip

    sub = " cc_is_subagent=true;"
    parent = [ASK, await turn([ASK], CLAUDE)]
    inner = [task, await turn([task], child, sub)]
    await turn([*parent, GO_ON], CLAUDE)
    await turn([*inner, GO_ON], child, sub)
    await turn([{"role": "user", "content": "by the billing line"}], CLAUDE, sub)
    turns = await rig.written("TurnCompleted")
    assert [turn.agent_path for turn in turns] == ["main", "agent/a14d", "main", "agent/a14d", "agent/unnamed"]
    assert [turn.base_turn and turn.base_turn.index for turn in turns] == [None, None, 0, 1, None]


async def test_more_tokens_than_the_window_has_are_as_many_as_it_has(rig: Any) -> None:
    session = await rig.open(sampling={"temperature": 1.0, "max_new_tokens": 32000})
    rig.script.says("1" * 2 * WINDOW, end=False)
    message = await said(rig, session, [ASK], max_tokens=32000)
    assert message["stop_reason"] == "max_tokens"
    assert message["usage"]["input_tokens"] + message["usage"]["output_tokens"] == WINDOW - 1
