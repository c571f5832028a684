"""An answer that its client sends back changed is the turn that it was as long as it says the same: its call ids name
it. The tokens stay those that were sampled, and what the client changed is on the log."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnlog.producers.gateway.messages import as_said, message
from turnlog.schemas.types import int32s

ASK: dict[str, Any] = {"role": "user", "content": "3 + 5 = ?"}
ROOM = {"sampling": {"temperature": 1.0, "max_new_tokens": 200}}
ARGUMENTS = {"expr": "3+5", "id": 2512292042121000001, "deep": {"a": [1.5, "x "], "b": None}}
SAID = "let me see " + "".join(
    f"<tool_call>{json.dumps({'name': name, 'arguments': ARGUMENTS})}</tool_call>" for name in ("calc", "look")
)
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("calc", "look")
]


def with_arguments(change: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    """The first call's arguments changed in place."""

    def changed(echo: dict[str, Any]) -> None:
        function = echo["tool_calls"][0]["function"]
        arguments = json.loads(function["arguments"])
        change(arguments)
        function["arguments"] = json.dumps(arguments)

    return changed


SAME: dict[str, tuple[Callable[[dict[str, Any]], Any], set[str]]] = {
    "a name": (lambda echo: echo.update(name="weather_agent"), {"name"}),
    "no text beside the calls": (lambda echo: echo.update(content=None), {"content"}),
    "an integer as JavaScript rounds it": (with_arguments(lambda one: one.update(id=2512292042121000000)),
                                           {"tool_calls"}),
    "a key that its schema does not know": (with_arguments(lambda one: one.pop("deep")), {"tool_calls"}),
    "a default filled in": (with_arguments(lambda one: one.update(unit="celsius")), {"tool_calls"}),
    "a text trimmed": (with_arguments(lambda one: one["deep"]["a"].__setitem__(1, "x")), {"tool_calls"}),
    "all at once": (lambda echo: [echo.update(name="a", content=""), with_arguments(lambda one: one.pop("id"))(echo)],
                    {"name", "content", "tool_calls"}),
}  # fmt: skip
OTHER: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another tool": lambda echo: echo["tool_calls"][0]["function"].update(name="look"),
    "another argument": with_arguments(lambda one: one.update(expr="1+1")),
    "a list of another length": with_arguments(lambda one: one["deep"]["a"].append(1)),
    "other words": lambda echo: echo.update(content="let me think"),
    "a call less": lambda echo: echo["tool_calls"].pop(),
    "the calls exchanged": lambda echo: echo["tool_calls"].reverse(),
    "calls without ids": lambda echo: [echo.update(content=None), [one.pop("id") for one in echo["tool_calls"]]],
}


def results(echo: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": one.get("id", "x"), "content": "8"} for one in echo["tool_calls"]]


async def said(rig: Any, session: Any, messages: list[Any], text: str, **more: Any) -> dict[str, Any]:
    rig.script.says(text)
    answer = await rig.chat(session, messages, tools=TOOLS, **more)
    assert answer.status_code == 200, answer.text
    spoken: dict[str, Any] = answer.json()["choices"][0]["message"]
    return spoken


async def boundaries(rig: Any) -> list[tuple[str, str]]:
    return [(one.boundary.value, one.boundary_reason) for one in await rig.written("TokenSnapshot")]


@pytest.mark.parametrize("kind", SAME)
@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_changed_echo_that_says_the_same_is_continued(rig: Any, kind: str, elsewhere: bool) -> None:
    """Also by a gateway that has the session from the log alone, and again by the turn after."""
    change, members = SAME[kind]
    session = await rig.open(**ROOM)
    echo = copy.deepcopy(await said(rig, session, [ASK], SAID))
    change(echo)
    if elsewhere:
        await rig.start("gateway-1")
    messages = [ASK, echo, *results(echo)]
    last = await said(rig, session, messages, "it is 8")
    await said(rig, session, [*messages, last, {"role": "user", "content": "sure?"}], "yes")
    assert await boundaries(rig) == [("root", "first"), ("append", "append"), ("append", "append")]
    completed = await rig.written("TurnCompleted")
    assert [set(json.loads(one.base_echo)) if one.base_echo else None for one in completed] == [None, members, None]
    assert {name: echo[name] for name in members - {"tool_calls"}} == {
        name: value or echo[name] for name, value in json.loads(completed[1].base_echo).items() if name != "tool_calls"
    }
    first, second, _ = await rig.written("TokenSnapshot")
    assert int32s(first.output_ids).tolist() == [*rig.tokens.encode(SAID), 2]
    assert second.base_len == len(int32s(first.delta_ids)) + len(int32s(first.output_ids))
    assert [json.loads(one.new_messages)[0]["role"] for one in completed] == ["user", "tool", "user"]


@pytest.mark.parametrize("kind", OTHER)
async def test_an_echo_that_says_something_else_is_another_history(rig: Any, kind: str) -> None:
    session = await rig.open(**ROOM)
    echo = copy.deepcopy(await said(rig, session, [ASK], SAID))
    OTHER[kind](echo)
    await said(rig, session, [ASK, echo, *results(echo)], "it is 8")
    assert await boundaries(rig) == [("root", "first"), ("root", "history_rewritten")]
    assert [one.base_echo for one in await rig.written("TurnCompleted")] == [None, None]


async def test_an_answer_without_calls_is_known_again_under_a_name(rig: Any) -> None:
    session = await rig.open(**ROOM)
    echo = await said(rig, session, [ASK], "it is 8")
    messages = [ASK, {**echo, "name": "agent"}, {"role": "user", "content": "sure?"}]
    await said(rig, session, messages, "yes")
    assert await boundaries(rig) == [("root", "first"), ("append", "append")]


async def test_names_of_messages_that_no_turn_said_count(rig: Any) -> None:
    """Templates may write them."""
    session = await rig.open(**ROOM)
    for name in ("a", "b"):
        await said(rig, session, [{"role": "assistant", "content": "hello", "name": name}, ASK], "8")
    assert [one[0] for one in await boundaries(rig)] == ["root", "root"]


async def test_ids_of_another_session_or_of_a_turn_elsewhere_name_nothing(rig: Any) -> None:
    mine, other = await rig.open(**ROOM), await rig.open("rollout-1", **ROOM)
    theirs = await said(rig, other, [ASK], SAID)
    elsewhere = await said(rig, mine, [{"role": "user", "content": "another question"}], SAID)
    own = await said(rig, mine, [ASK], SAID)
    for forged in (theirs, elsewhere):
        echo = {**own, "content": None, "tool_calls": forged["tool_calls"]}
        await said(rig, mine, [ASK, echo, *results(echo)], "8")
    written = [one for one in await rig.written("TokenSnapshot") if one.session_id == mine["session_id"]]
    assert [one.boundary.value for one in written] == ["root"] * 4


async def test_ids_tell_turns_apart_that_said_the_same(rig: Any) -> None:
    session = await rig.open(**ROOM)
    first = await said(rig, session, [ASK], SAID)
    await said(rig, session, [ASK], SAID, metadata={"again": 1})
    await said(rig, session, [ASK, first, *results(first)], "8")
    assert [one.base_turn.index if one.base_turn else None for one in await rig.written("TurnCompleted")] == [
        None, None, 0,
    ]  # fmt: skip


@pytest.mark.parametrize("api", ["messages", "responses"])
async def test_other_apis_send_changed_arguments_back_as_well(rig: Any, api: str) -> None:
    """The AI SDK sends what its schema made of them."""
    session = await rig.open(**ROOM)
    headers = {"authorization": f"Bearer {session['agent_token']}"}
    rig.script.says(SAID)
    rig.script.says("8")
    if api == "messages":
        tools = [{"name": one["function"]["name"], "input_schema": {"type": "object"}} for one in TOOLS]
        body: dict[str, Any] = {"model": "m", "max_tokens": 99, "messages": [ASK], "tools": tools}
        content = (await rig.http.post("/v1/messages", json=body, headers=headers)).json()["content"]
        calls = [block for block in content if block["type"] == "tool_use"]
        calls[0]["input"]["id"] = 2512292042121000000
        answers = [{"type": "tool_result", "tool_use_id": one["id"], "content": "8"} for one in calls]
        body["messages"] += [{"role": "assistant", "content": calls}, {"role": "user", "content": answers}]
    else:
        tools = [{"type": "function", "name": one["function"]["name"], "parameters": {}} for one in TOOLS]
        body = {"model": "m", "input": [ASK], "tools": tools}
        output = (await rig.http.post("/v1/responses", json=body, headers=headers)).json()["output"]
        calls = [item for item in output if item["type"] == "function_call"]
        arguments = json.loads(calls[0]["arguments"])
        calls[0]["arguments"] = json.dumps({**arguments, "unit": "celsius"})
        answers = [{"type": "function_call_output", "call_id": one["call_id"], "output": "8"} for one in calls]
        body["input"] += [*calls, *answers]
    path = f"/v1/{api}"
    assert (await rig.http.post(path, content=orjson.dumps(body), headers=headers)).status_code == 200
    assert await boundaries(rig) == [("root", "first"), ("append", "append")]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
OBJECTS = st.dictionaries(st.text(max_size=3), JSON, max_size=4)


def spoken(arguments: Any, named: str = "i", tool: str = "f") -> Any:
    call = {"id": named, "function": {"name": tool, "arguments": json.dumps(arguments)}}
    return message({"role": "assistant", "content": "text", "tool_calls": [call]}, "echo")


@given(OBJECTS, st.sets(st.text(max_size=3)), OBJECTS)
def test_whatever_keys_are_dropped_or_filled_in_the_rest_says_the_same(own: Any, gone: Any, more: Any) -> None:
    echo = {name: value for name, value in own.items() if name not in gone} | {
        name: value for name, value in more.items() if name not in own
    }
    found = as_said(spoken(own), spoken(echo))
    assert found is not None
    assert found.template["tool_calls"] == spoken(own).template["tool_calls"]
    assert found.digest == spoken(own).digest


@given(OBJECTS, OBJECTS)
def test_another_tool_or_id_is_never_the_same(own: Any, echo: Any) -> None:
    assert as_said(spoken(own), spoken(echo, tool="g")) is None
    assert as_said(spoken(own), spoken(echo, named="j")) is None
