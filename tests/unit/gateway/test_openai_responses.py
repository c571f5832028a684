"""The responses API: items in, items out, every turn the same turn as of any other API."""

from __future__ import annotations

import base64
import dataclasses
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from turnlog.plugins.recipes.calc import RECIPE
from turnlog.producers.gateway.conversation import Conversation
from turnlog.producers.gateway.dialects.dialect import IGNORED
from turnlog.producers.gateway.dialects.openai_responses import FIELDS
from turnlog.producers.gateway.requests import refer
from turnlog.schemas.events import Boundary, FinishReason
from turnlog.schemas.types import TurnId, float32s, int32s
from turnlog.settings import Settings

ENCRYPTED = "reasoning.encrypted_content"
QUESTION = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "3 + 5 = ?"}]}
GO_ON = {"role": "user", "content": "1 + 1 = ?"}
CALC = [{"type": "function", "name": "calc"}]
CALL = '<tool_call>{"name":"calc","arguments":{"expr":"3+5"}}</tool_call>'
CALLS = ("function_call", "custom_tool_call")
TOOL = {"type": "function", "name": "calc", "parameters": {"type": "object", "properties": {}}, "strict": False}


async def ask(rig: Any, session: Any, given: Any, **more: Any) -> httpx.Response:
    """POST /v1/responses."""
    return await sent(rig, session, "POST", "", json={"input": given, **more})


async def sent(rig: Any, session: Any, method: str, path: str, **more: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {session['token']}"}
    answer: httpx.Response = await rig.http.request(method, f"/v1/responses{path}", headers=headers, **more)
    return answer


def events_of(text: str) -> list[dict[str, Any]]:
    events = []
    for block in text.split("\n\n"):
        if block and not block.startswith(":"):
            kind, data = block.split("\n")
            event = orjson.loads(data.removeprefix("data: "))
            assert kind == f"event: {event['type']}"
            events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


async def response(rig: Any, session: Any, given: Any, *, stream: bool = False, **more: Any) -> dict[str, Any]:
    """The finished response, however it came."""
    answer = await ask(rig, session, given, stream=stream, **more)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = events_of(answer.text)[-1]["response"] if stream else answer.json()
    return found


def text_of(found: dict[str, Any]) -> str:
    return "".join(item["content"][0]["text"] for item in found["output"] if item["type"] == "message")


async def turns_of(rig: Any, session: Any) -> list[Any]:
    return [turn for turn in await rig.written("TurnCompleted") if turn.session_id == session["session_id"]]


async def bounds(rig: Any, session: Any) -> list[Boundary]:
    snapshots = await rig.written("TokenSnapshot")
    return [each.boundary for each in snapshots if each.session_id == session["session_id"]]


def counted(field: str) -> float:
    return IGNORED.labels(field)._value.get()


@pytest.fixture(scope="module")
def thinking_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template knows reasoning."""
    folder = tmp_path_factory.mktemp("thinking")
    RECIPE.warm_start.write_tokenizer(folder)
    (folder / "config.json").write_bytes(orjson.dumps(RECIPE.warm_start.model.config()))
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + "{# </think> #}")
    return folder


ANSWERS = ["8", f"let me see {CALL}", f"{CALL}{CALL}", f"{CALL} and 8", f"a {CALL} b", "", "<tool_call>{", "8 <tool_"]


def nameless(value: Any) -> Any:
    """Without what names the turn."""
    if isinstance(value, dict):
        named = ("id", "call_id", "created_at", "turnlog", "index", "epoch")
        return {name: nameless(one) for name, one in value.items() if name not in named}
    return [nameless(one) for one in value] if isinstance(value, list) else value


async def test_a_streamed_turn_and_a_whole_one_are_the_same_on_the_log_and_for_the_client(rig: Any) -> None:
    for at, said in enumerate(ANSWERS):
        session, finished = await rig.open(f"rollout-{at}"), []
        for stream in (False, True):
            rig.script.says(said)
            finished.append(await response(rig, session, [QUESTION], stream=stream, tools=[TOOL]))
        assert nameless(finished[0]) == nameless(finished[1]), said
        one, other = await turns_of(rig, session)
        assert (one.api, one.new_messages) == (other.api, other.new_messages)
        assert (one.api, nameless(orjson.loads(one.response))) == ("responses", nameless(orjson.loads(other.response)))


async def test_what_is_streamed_adds_up_to_the_finished_response(rig: Any) -> None:
    session = await rig.open()
    for said in ANSWERS:
        rig.script.says(said)
        adds_up(events_of((await ask(rig, session, [QUESTION], stream=True)).text))


def adds_up(events: list[dict[str, Any]]) -> None:
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    finished, items = events[-1]["response"], []
    assert {event["response"]["id"] for event in (*events[:2], events[-1])} == {finished["id"]}
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            items.append(event["item"])
            continue
        item = items[event["output_index"]]
        assert event.get("item_id", item["id"]) == item["id"]
        if kind == "content_part.added":
            item["content"].append(event["part"])
        elif kind == "output_text.delta":
            item["content"][event["content_index"]]["text"] += event["delta"]
        elif kind == "function_call_arguments.delta":
            item["arguments"] += event["delta"]
        elif kind == "custom_tool_call_input.delta":
            item["input"] += event["delta"]
        elif kind == "output_text.done":
            assert item["content"][event["content_index"]]["text"] == event["text"]
        elif kind == "output_item.done":
            assert {**item, "status": "completed"} == event["item"]
    texts = [item["content"][0]["text"] for item in items if item["type"] == "message"]
    assert "".join(texts) == text_of(finished)
    calls = [item["call_id"] for item in items if item["type"] in CALLS]
    assert calls == [item["call_id"] for item in finished["output"] if item["type"] in CALLS]
    assert {item["id"] for item in finished["output"]} <= {item["id"] for item in items}


@pytest.mark.parametrize("stream", [False, True])
async def test_items_sent_back_continue_the_turn_that_said_them(rig: Any, stream: bool) -> None:
    for at, said in enumerate(ANSWERS):
        session = await rig.open(f"rollout-{at}")
        rig.script.says(said)
        answer = await ask(rig, session, [QUESTION], store=False, stream=stream)
        items = answer.json()["output"] if not stream else []
        if stream:  # as a client that keeps each item when it is done
            events = events_of(answer.text)
            items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        items = [{**item, "id": "another", "status": None} for item in items]
        named = [item["call_id"] for item in items if "call_id" in item]
        results = [{"type": "function_call_output", "call_id": name, "output": "8"} for name in named]
        plain = {"role": "user", "content": "3 + 5 = ?"}  # the shape of a message may change between turns
        await response(rig, session, [plain, *items, *results, GO_ON], store=False)
        assert await bounds(rig, session) == [Boundary.root, Boundary.append], said


@pytest.mark.parametrize("stream", [False, True])
async def test_items_referred_to_by_their_ids_are_the_items(rig: Any, stream: bool) -> None:
    for at, said in enumerate(ANSWERS):
        session = await rig.open(f"rollout-{at}")
        rig.script.says(said)
        answer = await ask(rig, session, [QUESTION], stream=stream)
        items = [] if stream else answer.json()["output"]
        if stream:
            items = [each["item"] for each in events_of(answer.text) if each["type"] == "response.output_item.done"]
        results = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "8"}
            for item in items
            if "call_id" in item
        ]
        named = [{"type": "item_reference", "id": item["id"]} for item in items[:-1]] + [{"id": items[-1]["id"]}]
        if not at:
            await rig.start("gateway-1")  # which knows the turn from the log alone
        await response(rig, session, [QUESTION, *named, *results, GO_ON])
        assert await bounds(rig, session) == [Boundary.root, Boundary.append], said
        first, second = await turns_of(rig, session)
        assert second.base_turn == first.turn
        answered = [one["tool_call_id"] for one in orjson.loads(second.new_messages) if one["role"] == "tool"]
        assert answered == [result["call_id"] for result in results], "their ids are those of the calls"


async def test_a_reference_to_no_item_of_the_session_is_refused_by_name(rig: Any) -> None:
    session, other = await rig.open("a"), await rig.open("b")
    rig.script.says(CALL)
    one, foreign = (
        await response(rig, session, [QUESTION], tools=CALC),
        await response(rig, other, [QUESTION], tools=CALC),
    )
    [call], [theirs] = one["output"], foreign["output"]
    gone = await response(rig, session, [GO_ON], tools=CALC)
    await sent(rig, session, "DELETE", f"/{gone['id']}")
    strange = [theirs["id"], gone["output"][0]["id"], one["id"], f"{call['id']}_1", call["id"].replace("fc", "msg"), ""]
    for name in (*strange, None, 8):
        answer = await ask(rig, session, [QUESTION, {"type": "item_reference", "id": name}])
        error = answer.json()["error"]
        assert answer.status_code == 400, name
        assert error["param"].startswith("input[1]")
        assert (name if isinstance(name, str) else "input[1].id") in error["message"]


async def test_arguments_that_a_client_wrote_anew_and_a_text_alone_are_what_they_were(rig: Any) -> None:
    session = await rig.open()
    rig.script.says(CALL)
    [call] = (await response(rig, session, "3 + 5 = ?", tools=CALC))["output"]
    echo = {**call, "arguments": '{ "expr" : "3+5" }'}
    result = {
        "type": "function_call_output",
        "call_id": call["call_id"],
        "output": [{"type": "input_text", "text": "8"}],
    }
    await response(rig, session, [QUESTION, echo, result], tools=CALC)
    assert await bounds(rig, session) == [Boundary.root, Boundary.append]


async def test_results_come_in_the_order_of_the_calls_that_they_name(rig: Any) -> None:
    session = await rig.open()
    rig.script.says(CALL + CALL.replace("3+5", "1+1"))
    first, second = (await response(rig, session, [QUESTION], tools=CALC))["output"]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": said}
        for item, said in ((second, "2"), (first, "8"))
    ]
    await response(rig, session, [QUESTION, first, second, *results], tools=CALC)
    new = orjson.loads((await rig.written("TurnCompleted"))[1].new_messages)
    assert [one["tool_call_id"] for one in new] == [first["call_id"], second["call_id"]]


async def test_instructions_are_a_system_message_that_the_next_response_does_not_inherit(rig: Any) -> None:
    session = await rig.open()
    one = await response(rig, session, [QUESTION], instructions="be brief")
    same = await response(rig, session, [GO_ON], instructions="be brief", previous_response_id=one["id"])
    await response(rig, session, [GO_ON], previous_response_id=same["id"])
    prompts = [rig.tokens.literal(request.input_ids) for request in rig.engines["e0"].requests]
    assert ["be brief" in prompt for prompt in prompts] == [True, True, False]
    assert await bounds(rig, session) == [Boundary.root, Boundary.append, Boundary.root]
    assert "3 + 5" in prompts[2]


async def test_developers_and_systems_items_are_inherited(rig: Any) -> None:
    session = await rig.open()
    one = await response(rig, session, [{"role": "developer", "content": "be brief"}, QUESTION])
    await response(rig, session, "go on", previous_response_id=one["id"])
    assert await bounds(rig, session) == [Boundary.root, Boundary.append]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_is_continued_by_its_name_at_any_gateway(rig: Any, stream: bool) -> None:
    session = await rig.open()
    rig.script.says(f"let me see {CALL}")
    one = await response(rig, session, [QUESTION], tools=CALC, stream=stream)
    result = {"type": "function_call_output", "call_id": one["output"][1]["call_id"], "output": "8"}
    two = await response(rig, session, [result], tools=CALC, previous_response_id=one["id"])
    assert two["previous_response_id"] == one["id"]
    await rig.start("gateway-1")
    shown = (await sent(rig, session, "GET", f"/{two['id']}")).json()
    assert (shown["output"], shown["usage"]) == (two["output"], two["usage"])
    three = await response(rig, session, "and now?", tools=CALC, previous_response_id=two["id"])
    turns = await rig.written("TurnCompleted")
    assert [turn.base_turn for turn in turns] == [None, turns[0].turn, turns[1].turn]
    assert turns[1].turn.epoch != turns[2].turn.epoch
    assert [each["turnlog"]["epoch"] for each in (two, three)] == [turn.turn.epoch for turn in turns[1:]]


async def test_of_two_turns_that_said_the_same_the_one_that_is_named_is_continued(rig: Any) -> None:
    session = await rig.open()
    named = []
    for _ in range(3):
        rig.script.says("8")
        named.append((await response(rig, session, [QUESTION]))["id"])
    for name in (named[1], named[0], named[2]):
        await response(rig, session, [GO_ON], previous_response_id=name)
    turns = await rig.written("TurnCompleted")
    assert [turn.base_turn.index for turn in turns[3:]] == [1, 0, 2]


async def test_a_name_that_is_none_of_the_session_is_refused(rig: Any) -> None:
    session, other = await rig.open("a"), await rig.open("b")
    one, foreign = await response(rig, session, "1"), await response(rig, other, "1")
    epoch = one["turnlog"]["epoch"]
    wrong = [
        foreign["id"],
        f"resp_{epoch}_7",
        f"resp_{epoch}_-1",
        f"resp_{epoch}",
        "resp_",
        "",
        "8" * 1000,
        "resp_\u0663_1",
    ]
    for name in wrong:
        answer = await ask(rig, session, "2", previous_response_id=name)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "previous_response_not_found")
        assert error["param"] == "previous_response_id"
        if name and name.isascii():
            assert (await sent(rig, session, "GET", f"/{name}")).status_code == 404
    assert len(await rig.written("TurnCompleted")) == 2


async def test_a_response_is_shown_until_it_is_deleted_and_the_log_keeps_it(rig: Any) -> None:
    session = await rig.open()
    rig.script.says(f"let me see {CALL}")
    one = await response(rig, session, [QUESTION], tools=[TOOL])
    shown = (await sent(rig, session, "GET", f"/{one['id']}")).json()
    asked = ("tools", "created_at")  # what was asked, and when, is not told again
    assert [shown.pop(name) for name in asked] == [[], 0]
    assert shown == {name: value for name, value in one.items() if name not in asked}
    streamed = await sent(rig, session, "GET", f"/{one['id']}?stream=true")
    assert (streamed.status_code, streamed.json()["error"]["param"]) == (400, "stream")
    gone = await sent(rig, session, "DELETE", f"/{one['id']}")
    assert gone.json() == {"id": one["id"], "object": "response", "deleted": True}
    for method in ("GET", "DELETE"):
        answer = await sent(rig, session, method, f"/{one['id']}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")
    assert (await ask(rig, session, "go on", previous_response_id=one["id"])).status_code == 400
    results = [{"type": "function_call_output", "call_id": one["output"][1]["call_id"], "output": "8"}]
    await response(rig, session, [QUESTION, *one["output"], *results], tools=[TOOL])
    assert await bounds(rig, session) == [Boundary.root, Boundary.append]


async def test_an_upgrade_to_a_websocket_is_refused_by_name_and_asks_for_no_turn(rig: Any) -> None:
    session = await rig.open()
    upgrade = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13",
               "sec-websocket-key": "yx8nW9kR7eK3brSUs9HHMQ=="}  # fmt: skip
    headers = {**upgrade, "authorization": f"Bearer {session['token']}"}
    answer = await rig.http.get("/v1/responses", headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (426, "websocket_not_served")
    assert answer.headers["x-should-retry"] == "false"
    assert not rig.engines["e0"].requests


async def test_functions_are_offered_and_tools_of_other_kinds_counted_and_left_out(rig: Any) -> None:
    session, before = await rig.open(), counted("tools")
    nested = {"type": "namespace", "name": "agents", "tools": [{"type": "namespace", "name": "a", "tools": [TOOL]}]}
    one = await response(rig, session, [QUESTION], tools=[TOOL, nested, {"type": "web_search"}, {"type": "shell"}])
    assert one["tools"] == [TOOL]
    assert counted("tools") == before + 3
    [turn] = await rig.written("TurnCompleted")
    function = {name: value for name, value in TOOL.items() if name != "type"}
    assert orjson.loads(turn.tools) == [{"type": "function", "function": function}]


GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: SOURCE"}
EXEC = {"type": "custom", "name": "exec", "description": "Run JavaScript.", "format": GRAMMAR}
WAIT = {"type": "function", "name": "wait", "parameters": {"type": "object", "properties": {}}}
OF_CODEX = {
    "type": "additional_tools", "role": "developer", "tools": [
        {"type": "namespace", "name": "functions", "tools": [EXEC, WAIT]},
        {"type": "namespace", "name": "clock", "tools": [TOOL]},
    ],
}  # fmt: skip
"""As Codex offers tools to the models of its own list."""
RUNS = '<tool_call>{"name":"exec","arguments":{"input":"text(\\"8\\")"}}</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_custom_tool_is_called_by_one_text_and_its_echo_continues_the_turn(
    rig: Any, stream: bool, elsewhere: bool
) -> None:
    """Also by a gateway that has the session from the log alone."""
    session = await rig.open(sampling={"temperature": 1.0, "max_new_tokens": 99})
    rig.script.says(f"I look. {RUNS}")
    answer = await ask(rig, session, [OF_CODEX, QUESTION], stream=stream)
    if stream:
        adds_up(events_of(answer.text))
    one = events_of(answer.text)[-1]["response"] if stream else answer.json()
    text, call = one["output"]
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "exec", 'text("8")')
    assert [tool["type"] for tool in one["tools"]] == ["custom", "function", "function"]
    if elsewhere:
        await rig.start("gateway-1")
    result = {"type": "custom_tool_call_output", "call_id": call["call_id"]}
    output = [{"type": "input_text", "text": "completed"}, {"type": "input_text", "text": "8"}]
    await response(rig, session, [OF_CODEX, QUESTION, text, call, {**result, "output": output}])
    referred = {"type": "item_reference", "id": call["id"]}
    await response(rig, session, [OF_CODEX, QUESTION, text, referred, {**result, "output": "eight"}])
    assert await bounds(rig, session) == [Boundary.root, Boundary.append, Boundary.append]
    first, second, third = await turns_of(rig, session)
    assert first.tools_sha256 == second.tools_sha256 == third.tools_sha256
    taken, waits, _ = orjson.loads(first.tools)
    assert taken["function"]["parameters"] == {
        "type": "object", "required": ["input"],
        "properties": {"input": {"type": "string", "description": "lark: start: SOURCE"}},
    }  # fmt: skip
    assert waits["function"]["name"] == "wait"


REF = {"type": "namespace", "name": "mcp__ref", "description": "Tools in the mcp__ref namespace.", "tools": [
    {"type": "function", "name": "count", "description": "Count.", "strict": False, "parameters": {"type": "object"}},
    {"type": "custom", "name": "note"},
]}  # fmt: skip
"""As Codex offers an MCP server."""
COUNTS = '<tool_call>{"name":"mcp__ref__count","arguments":{"name":"cli"}}</tool_call>'
NOTES = '<tool_call>{"name":"mcp__ref__note","arguments":{"input":"one"}}</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_tool_in_a_namespace_is_a_function_of_the_policy_and_is_called_by_both_names(
    rig: Any, stream: bool, elsewhere: bool
) -> None:
    """Its echo continues the turn, also at a gateway that has the session from the log alone, by a request that no
    longer offers the namespace, and by a reference."""
    session = await rig.open(sampling={"temperature": 1.0, "max_new_tokens": 199})
    rig.script.says(COUNTS + NOTES)
    answer = await ask(rig, session, [QUESTION], stream=stream, tools=[TOOL, REF])
    if stream:
        adds_up(events := events_of(answer.text))
        [done] = [event for event in events if event["type"] == "response.function_call_arguments.done"]
        assert done["name"] == "count"
        calls = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    else:
        calls = answer.json()["output"]
    assert [(call["type"], call["namespace"], call["name"]) for call in calls] == [
        ("function_call", "mcp__ref", "count"), ("custom_tool_call", "mcp__ref", "note")
    ]  # fmt: skip
    assert orjson.loads(calls[0]["arguments"]) == {"name": "cli"}
    assert calls[1]["input"] == "one"
    if elsewhere:
        await rig.start("gateway-1")
    results = [
        {"type": "function_call_output", "call_id": calls[0]["call_id"], "output": "cli is 1"},
        {"type": "custom_tool_call_output", "call_id": calls[1]["call_id"], "output": "noted"},
    ]
    await response(rig, session, [QUESTION, *calls, *results], tools=[TOOL, REF])
    await response(rig, session, [QUESTION, *calls, results[1], {**results[0], "output": "1"}], tools=[TOOL])
    referred = [{"type": "item_reference", "id": call["id"]} for call in calls]
    await response(rig, session, [QUESTION, *referred, {**results[0], "output": "2"}, results[1]], tools=[TOOL, REF])
    assert await bounds(rig, session) == [Boundary.root, *[Boundary.append] * 3]
    first, *_ = await turns_of(rig, session)
    assert [tool["function"]["name"] for tool in orjson.loads(first.tools)] == [
        "calc", "mcp__ref__count", "mcp__ref__note"
    ]  # fmt: skip


async def test_of_two_tools_with_one_name_for_the_policy_the_one_in_the_namespace_is_left_out(rig: Any) -> None:
    session, before = await rig.open(), counted("tools")
    taken = {**TOOL, "name": "mcp__ref__count"}
    again = {"type": "namespace", "name": "mcp", "tools": [{**TOOL, "name": "ref__note"}]}
    rig.script.says(COUNTS)
    one = await response(rig, session, [QUESTION], tools=[REF, again, taken])
    assert counted("tools") == before + 2
    assert [tool["name"] for tool in one["tools"]] == ["mcp__ref__note", "mcp__ref__count"]
    [call] = one["output"]
    assert (call["name"], call.get("namespace")) == ("mcp__ref__count", None)


@pytest.mark.parametrize("arguments", ['{"code":"8"}', '{"input":8}', '{"input":null}'])
async def test_a_custom_tool_that_is_called_without_its_text_is_given_the_arguments(rig: Any, arguments: str) -> None:
    session = await rig.open()
    rig.script.says(f'<tool_call>{{"name":"exec","arguments":{arguments}}}</tool_call>')
    [call] = (await response(rig, session, [QUESTION], tools=[EXEC]))["output"]
    assert (call["type"], orjson.loads(call["input"])) == ("custom_tool_call", orjson.loads(arguments))
    result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "that is no code"}
    await response(rig, session, [QUESTION, call, result], tools=[EXEC])
    assert await bounds(rig, session) == [Boundary.root, Boundary.append]


async def test_calls_stay_text_where_the_client_wants_none(rig: Any) -> None:
    session = await rig.open()
    rig.script.says(CALL)
    one = await response(rig, session, [QUESTION], tools=[TOOL], tool_choice="none")
    assert (text_of(one), one["tool_choice"]) == (CALL, "none")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_that_its_limit_ended_is_incomplete(rig: Any, stream: bool) -> None:
    session = await rig.open()
    rig.script.says("12345678")
    answer = await ask(rig, session, [QUESTION], stream=stream, max_output_tokens=3)
    one = events_of(answer.text)[-1]["response"] if stream else answer.json()
    if stream:
        kinds = [event["type"] for event in events_of(answer.text)]
        assert kinds[-2:] == ["response.output_item.done", "response.incomplete"]
        assert events_of(answer.text)[-2]["item"]["status"] == "incomplete"
    assert (one["status"], one["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (text_of(one), one["output"][0]["status"], one["usage"]["output_tokens"]) == ("123", "incomplete", 3)


async def test_a_limit_beyond_the_window_is_lowered_and_no_error(rig: Any) -> None:
    session = await rig.open(limits={"max_context_tokens": 40}, sampling={"max_new_tokens": 40})
    rig.script.says("1234567890" * 9, end=False)
    one = await response(rig, session, "3 + 5 = ?", max_output_tokens=32_000)
    assert one["usage"]["total_tokens"] == 39


async def test_a_prompt_that_leaves_no_room_is_said_so_that_agents_compact(rig: Any) -> None:
    session = await rig.open(limits={"max_context_tokens": 40})
    answer = await ask(rig, session, "x y " * 60, stream=True)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "input")
    assert answer.headers["x-should-retry"] == "false"


async def test_log_probs_are_those_of_the_record(rig: Any) -> None:
    session, before = await rig.open(), counted("include")
    include = ["message.output_text.logprobs", "file_search_call.results"]
    for stream in (False, True):
        one = await response(rig, session, [QUESTION], stream=stream, include=include)
        snapshot = (await rig.written("TokenSnapshot"))[-1]
        found = one["output"][0]["content"][0]["logprobs"]
        assert [each["logprob"] for each in found] == float32s(snapshot.output_logprobs).tolist()
        assert "".join(each["token"] for each in found) == rig.tokens.literal(int32s(snapshot.output_ids).tolist())
    assert counted("include") == before + 2


COUNTED = [name for name, (treatment, _) in FIELDS.items() if treatment != "honoured"]


async def test_what_is_not_honoured_is_counted_by_name_and_what_nobody_knows_as_other(rig: Any) -> None:
    fields = dict.fromkeys(COUNTED, 1) | {"of_a_later_year": 1, "background": False, "conversation": None}
    before = {name: counted(name) for name in (*COUNTED, "other")}
    await response(rig, await rig.open(), [QUESTION], **fields, text={"format": {"type": "text"}, "verbosity": "low"})
    assert {name: counted(name) - before[name] for name in before} == dict.fromkeys((*COUNTED, "other"), 1)


CONSTRAINTS = [
    ("tool_choice", "tool_choice", "required"),
    ("tool_choice", "tool_choice", {"type": "function", "name": "calc"}),
    ("text.format", "text", {"format": {"type": "json_object"}}),
    ("text.format", "text", {"format": {"type": "json_schema", "name": "x", "schema": {}}}),
]
REFUSED = [
    ("background", "background", True),
    ("conversation", "conversation", "conv_1"),
    ("prompt", "prompt", {"id": "x"}),
]


async def test_what_cannot_be_honoured_is_refused_by_name(rig: Any) -> None:
    session = await rig.open()
    for name, field, value in (*REFUSED, *CONSTRAINTS):
        answer = await ask(rig, session, [QUESTION], **{field: value})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, name)
        assert name in error["message"]
        assert error["code"] == ("constraint_refused" if (name, field, value) in CONSTRAINTS else "invalid_request")
    assert not await rig.written("TurnCompleted")


async def test_a_session_that_does_not_train_is_held_to_its_schema(rig: Any) -> None:
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}}
    text = {"format": {"type": "json_schema", "name": "sum", "schema": schema}}
    rig.engines["e0"].fitting = lambda _: [*rig.tokens.encode('{"sum":8}'), 2]
    assert text_of(await response(rig, await rig.open(purpose="eval"), [QUESTION], text=text)) == '{"sum":8}'
    assert [orjson.loads(request.grammar.text) for request in rig.engines["e0"].requests] == [schema]
    assert [each.constrained for each in await rig.written("TokenSnapshot")] == [True]


class TestIgnored:
    @pytest.fixture
    def settings(self, settings: Settings) -> Settings:
        return dataclasses.replace(settings, gateway=dataclasses.replace(settings.gateway, constraints="ignore"))

    async def test_a_constraint_is_ignored_and_counted_where_a_setting_says_so(self, rig: Any) -> None:
        session = await rig.open()
        for name, field, value in CONSTRAINTS:
            before = counted(name)
            await response(rig, session, [QUESTION], **{field: value})
            assert counted(name) == before + 1


def item(**fields: Any) -> dict[str, Any]:
    return {"input": [QUESTION, fields]}


IMAGE = "data:image/png;base64," + base64.b64encode(b"no image").decode()
BROKEN = [
    (b"{", "JSON"),
    (b"[]", "JSON object"),
    (b"\xff", "JSON"),
    (b'{"input": ' + b"[" * 300 + b"]" * 300 + b"}", "deeper"),
    ({}, "input"),
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 8}, "input"),
    ({"input": {"role": "user"}}, "input"),
    ({"input": ["text"]}, "input[0]"),
    (item(), "input[1]"),
    (item(type=["message"]), "input[1]"),
    (item(type="computer_call", id="cu_1"), "computer_call"),
    (item(type="item_reference", id="msg_1"), "msg_1"),
    (item(type="web_search_call", id="ws_1"), "web_search_call"),
    (item(type="message", content="x"), "input[1].role"),
    (item(role="tool", content="x"), "input[1].role"),
    (item(role=["user"], content="x"), "input[1].role"),
    (item(role="user", content=8), "input[1].content"),
    (item(role="user", content=[8]), "input[1].content"),
    (item(role="user", content=[{"type": "input_file", "file_id": "f"}]), "input_file"),
    (item(role="user", content=[{"type": "input_image", "file_id": "f"}]), "image_url"),
    (item(role="user", content=[{"type": "input_image", "image_url": "https://x/y.png"}]), "image_url"),
    (item(role="assistant", content=[{"type": "input_image", "image_url": IMAGE}]), "input[1]"),
    (item(type="reasoning", summary=8), "input[1]"),
    (item(type="reasoning", summary=[{"type": "summary_text"}]), "input[1]"),
    (item(type="function_call", call_id="c", arguments="{}"), "input[1].name"),
    (item(type="function_call", call_id=1, name="calc", arguments="{}"), "input[1].call_id"),
    (item(type="function_call", call_id="c", name="calc", arguments={}), "input[1].arguments"),
    (item(type="function_call", call_id="c", name="calc", arguments="{}"), "tool calls"),
    (item(type="function_call_output", output="8"), "input[1].call_id"),
    (item(type="function_call_output", call_id="c", output={"a": 1}), "input[1].output"),
    ({"input": "x", "instructions": ["a"]}, "instructions"),
    ({"input": "x", "previous_response_id": 1}, "previous_response_id"),
    ({"input": "x", "include": "all"}, "include"),
    ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
    ({"input": "x", "max_output_tokens": "9"}, "max_output_tokens"),
    ({"input": "x", "text": "json"}, "text"),
    ({"input": "x", "tools": {"a": 1}}, "tools"),
    ({"input": "x", "tools": ["calc"]}, "tools"),
    ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name"),
]


async def test_a_bad_body_is_refused_by_name_and_writes_nothing(rig: Any) -> None:
    session = await rig.open()
    for body, names in BROKEN:
        content = body if isinstance(body, bytes) else orjson.dumps(body)
        answer = await sent(rig, session, "POST", "", content=content)
        assert (answer.status_code, answer.headers["x-should-retry"]) == (400, "false"), body
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert names in error["message"]
        assert "messages" not in (error["param"] or "")
    assert not await rig.written("TurnCompleted")


async def test_images_are_taken_and_refused_by_name_where_the_model_has_none(rig: Any) -> None:
    blocks = [{"type": "input_text", "text": "what?"}, {"type": "input_image", "image_url": IMAGE, "detail": "auto"}]
    asked = {"input": [{"role": "user", "content": blocks}]}
    [dialect] = [each for each in rig.gateway.dialects if each.path == "/v1/responses"]
    [picture] = dialect.request(orjson.dumps(asked), Conversation()).pictures
    assert picture.content == b"no image"
    answer = await ask(rig, await rig.open(), asked["input"])
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "images_not_served", "input")


async def test_a_turn_that_fails_in_a_stream_is_a_failed_response(rig: Any) -> None:
    session = await rig.open()
    rig.held.down = True
    events = events_of((await ask(rig, session, [QUESTION], stream=True)).text)
    assert [event["type"] for event in (*events[:2], events[-1])] == [
        "response.created", "response.in_progress", "response.failed",
    ]  # fmt: skip
    failed = events[-1]["response"]
    assert (failed["status"], failed["error"]["code"]) == ("failed", "log_unavailable")
    whole = await ask(rig, session, [QUESTION])
    assert (whole.status_code, whole.headers["x-should-retry"]) == (503, "true")


async def test_a_stream_that_was_cut_is_sampled_anew_for_the_same_body(rig: Any) -> None:
    session, engine = await rig.open(), rig.engines["e0"]
    rig.script.says("123456")
    engine.holds_after = 3
    headers = {"authorization": f"Bearer {session['token']}"}
    body = {"input": [QUESTION], "stream": True}
    async with rig.http.stream("POST", "/v1/responses", json=body, headers=headers) as answer:
        assert answer.status_code == 200
        await engine.reached.wait()
    engine.holds_after = None
    rig.script.says("77")
    assert text_of(await response(rig, session, [QUESTION], stream=True)) == "77"
    await rig.finish(session)
    parts = {turn.turn.index: turn.finish_reason for turn in await rig.written("TurnCompleted")}
    assert parts == {0: FinishReason.abort, 1: FinishReason.stop}


@pytest.mark.parametrize(("thread", "path"), [("s-1", "main"), ("s-2", "agent/s-2")])
async def test_codex_goes_on_from_turn_to_turn_and_names_its_agents(rig: Any, thread: str, path: str) -> None:
    session = await rig.open()
    token = {"authorization": f"Bearer {session['token']}"}
    headers = {"user-agent": "codex_exec/0.169.0 (Debian)", "session-id": "s-1", "thread-id": thread, **token}
    asked = {
        "model": "any", "stream": True, "store": False, "include": [ENCRYPTED], "tool_choice": "auto",
        "parallel_tool_calls": True, "reasoning": {"summary": "auto"}, "prompt_cache_key": "s-1",
        "client_metadata": {"thread_id": thread}, "tools": [TOOL, {"type": "web_search"}],
    }  # fmt: skip
    history: list[dict[str, Any]] = [
        {"type": "message", "id": f"msg_{at}", "role": role, "content": [{"type": "input_text", "text": text}]}
        for at, (role, text) in enumerate([("developer", "Codex"), ("developer", "skills"), ("user", "3 + 5 = ?")])
    ]
    rig.script.says(CALL)
    rig.script.says("it is 8")
    for _ in range(2):
        body = {"input": history, **asked}
        answer = await rig.http.post("/v1/responses", json=body, headers=headers)
        done = [one["item"] for one in events_of(answer.text) if one["type"] == "response.output_item.done"]
        history += done
        history += [
            {"type": "function_call_output", "id": "fco_1", "call_id": one["call_id"], "output": "8"}
            for one in done
            if one["type"] == "function_call"
        ]
    assert history[-1]["content"][0]["text"] == "it is 8"
    assert [turn.agent_path for turn in await rig.written("TurnCompleted")] == [path, path]
    assert await bounds(rig, session) == [Boundary.root, Boundary.append]


async def test_a_message_is_on_the_log_as_it_came(rig: Any) -> None:
    session = await rig.open()
    blocks = [{"type": "input_text", "text": "3 + 5"}, {"type": "input_text", "text": "= ?"}]
    await response(rig, session, [{"role": "user", "content": "now"}, {"role": "user", "content": blocks}])
    [turn] = await rig.written("TurnCompleted")
    texts = [{"type": "text", "text": block["text"]} for block in blocks]
    assert [one["content"] for one in orjson.loads(turn.new_messages)] == ["now", texts]


class TestReasoning:
    """Of a model whose template has it."""

    @pytest.fixture
    def model_folder(self, thinking_folder: Path) -> Path:
        return thinking_folder

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("include", [[], [ENCRYPTED]])
    async def test_reasoning_is_an_item_of_its_own_and_counted_in_the_output(
        self, rig: Any, include: list[str], stream: bool
    ) -> None:
        session = await rig.open()
        rig.script.says("<think>\n3 and 5\n</think>\n\n8")
        answer = await ask(rig, session, [QUESTION], include=include, stream=stream)
        one = events_of(answer.text)[-1]["response"] if stream else answer.json()
        thought, message = one["output"]
        assert (thought["type"], thought["summary"]) == ("reasoning", [])
        assert thought["content"] == [{"type": "reasoning_text", "text": "3 and 5"}]
        assert message["content"][0]["text"] == "8"
        assert ("encrypted_content" in thought) == bool(include)
        usage = one["usage"]
        assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        if stream:
            events = events_of(answer.text)
            deltas = [event["delta"] for event in events if event["type"] == "response.reasoning_text.delta"]
            assert "".join(deltas) == "3 and 5"
            done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
            assert done == one["output"]
        elif include:
            query = {"params": {"include[]": ENCRYPTED}}
            assert (await sent(rig, session, "GET", f"/{one['id']}", **query)).json()["output"] == one["output"]

    async def twice(self, rig: Any, session: Any) -> list[dict[str, Any]]:
        """Two turns that said the same and thought otherwise."""
        found = []
        for thought in ("3 and 5", "5 and 3"):
            rig.script.says(f"<think>\n{thought}\n</think>\n\n8")
            found.append(await response(rig, session, [QUESTION], include=[ENCRYPTED]))
        return found

    @pytest.mark.parametrize("at", [0, 1])
    async def test_a_reference_stands_for_the_reasoning_at_any_gateway(self, rig: Any, at: int) -> None:
        session = await rig.open()
        thought, message = (await self.twice(rig, session))[at]["output"]
        await rig.start("gateway-1")
        echo = {"type": "reasoning", "summary": [], "encrypted_content": thought["encrypted_content"]}
        await response(rig, session, [QUESTION, echo, message, GO_ON])
        turns = await rig.written("TurnCompleted")
        assert turns[2].base_turn == turns[at].turn
        assert (await rig.written("TokenSnapshot"))[2].boundary is Boundary.append

    @pytest.mark.parametrize("at", [0, 1])
    async def test_reasoning_that_is_sent_back_says_which_turn_it_is_of(self, rig: Any, at: int) -> None:
        session = await rig.open()
        output = (await self.twice(rig, session))[at]["output"]
        await response(rig, session, [QUESTION, *output, GO_ON])
        turns = await rig.written("TurnCompleted")
        assert turns[2].base_turn == turns[at].turn

    async def test_a_reference_that_is_wrong_is_no_error_and_agrees_with_any_reasoning(self, rig: Any) -> None:
        session, other = await rig.open("a"), await rig.open("b")
        thought, message = (await self.twice(rig, session))[0]["output"]
        right = thought["encrypted_content"]
        turn = TurnId(*right.split(".")[:1], 0)
        [foreign, _] = (await self.twice(rig, other))[0]["output"]
        wrong = [
            "",
            "x",
            right[:-2],
            right[:-1] + "\u00e4",
            foreign["encrypted_content"],
            refer(turn, "", b"other"),
            None,
            8,
        ]
        for reference in wrong:
            echo = {"type": "reasoning", "summary": [], "encrypted_content": reference}
            await response(rig, session, [QUESTION, echo, message, GO_ON])
        turns = [turn for turn in await rig.written("TurnCompleted") if turn.session_id == session["session_id"]]
        assert {turn.base_turn.index for turn in turns[2:]} == {1}, "the latest that agrees"
