"""JSON nested around every parser's limit: a request is taken or refused before anything is sampled, what the policy
says is kept as it was sampled, and whatever stands on the log is read by all who read it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as fuzzing
from hypothesis import strategies as st

from tests.unit.gateway.conftest import model_in, settings_of
from turnlog.consumers.datasets.conversations import messages_of, response_of, tools_json
from turnlog.processors.core.messages import messages, response
from turnlog.producers.gateway.parsers.formats import HERMES
from turnlog.producers.gateway.parsers.parser import OutputParser, Text
from turnlog.schemas.json_depth import MAX_DEPTH, deeper_than
from turnlog.settings import Settings

QUESTION = {"role": "user", "content": "3 + 5 = ?"}
NEAR = st.one_of(
    st.integers(1, 12),
    st.integers(MAX_DEPTH - 12, MAX_DEPTH + 12),
    st.integers(1015, 1035),
)
WINDOW = 8000
ROOM = {"sampling": {"temperature": 1.0, "max_new_tokens": WINDOW // 2}, "limits": {"max_context_tokens": WINDOW}}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The calc recipe's, with room for the deepest answer."""
    return model_in(tmp_path_factory.mktemp("model"), WINDOW)


@pytest.fixture
def settings(tmp_path: Path, model_folder: Path) -> Settings:
    """A window that holds the deepest answer."""
    return settings_of(model_folder, tmp_path, context=WINDOW)


def nested(depth: int, kind: str) -> str:
    opened, closed = {"list": ("[", "]"), "object": ('{"a":', "}")}[kind]
    return opened * (depth - 1) + ("[]" if kind == "list" else "{}") + closed * (depth - 1)


def said(place: str, depth: int, kind: str) -> tuple[bytes, int]:
    """A body with JSON of that depth in a place of it, and how deep the body is."""
    inner = nested(depth, kind)
    offered = '"tools":[{"type":"function","function":{"name":"f"}}]'
    calls = (
        "{"
        + offered
        + ',"messages":[{"role":"user","content":"x"},{"role":"assistant","tool_calls":[{"function":{"name":"f",'
    )
    answered = '}}]},{"role":"tool","content":"y"}]}'
    bodies = {
        "tools": ('{"messages":[{"role":"user","content":"x"}],"tools":[{"a":' + inner + "}]}", 3),
        "arguments": (calls + '"arguments":' + inner + answered, 6),
        "text": (calls + '"arguments":' + json.dumps(inner) + answered, 6 - depth),
        "unknown": ("{" + offered + ',"messages":[{"role":"user","content":"x","more":' + inner + "}]}", 3),
    }
    body, above = bodies[place]
    return body.encode(), above + depth


@fuzzing(
    deadline=None, database=None, derandomize=True,
    phases=[Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(
    NEAR | st.just(5000),
    NEAR,
    st.sampled_from(["tools", "arguments", "text", "unknown"]),
    st.sampled_from(["list", "object"]),
)
async def test_nothing_that_was_sampled_is_lost_however_deep_the_request_and_the_answer_are(
    rig: Any, asked: int, answered: int, place: str, kind: str
) -> None:
    session = await rig.open(f"rollout-{next(ROLLOUTS)}", **ROOM)
    body, deep = said(place, asked, kind)
    arguments = f'{{"a":{nested(answered - 1, "list")}}}' if answered > 1 else "{}"
    answer = f'<tool_call>{{"name":"f","arguments":{arguments}}}</tool_call>'
    rig.script.answers.clear()
    rig.script.says(answer)
    headers = {"authorization": f"Bearer {session['token']}"}
    got = await rig.http.post("/v1/chat/completions", content=body, headers=headers)
    turns = [turn for turn in await rig.written("TurnCompleted") if turn.session_id == session["session_id"]]
    if deep > MAX_DEPTH:
        assert (got.status_code, turns) == (400, [])
        assert str(MAX_DEPTH) in got.json()["error"]["message"]
        return
    if got.status_code == 400:  # a prompt that is too long is told before anything is sampled
        assert (got.json()["error"]["code"], turns) == ("context_length_exceeded", [])
        return
    assert got.status_code == 200, got.text
    [turn] = turns
    reply = got.json()["choices"][0]["message"]
    if answered < MAX_DEPTH:
        assert json.loads(reply["tool_calls"][0]["function"]["arguments"]) == json.loads(arguments)
    else:
        assert reply["content"] == answer
    for read in (messages, lambda content: messages_of(content, "here")):
        assert len(read(turn.new_messages)) == len(orjson.loads(turn.new_messages))
    response(turn.response)
    assert response_of(turn.response, "here")["role"] == "assistant"
    tools_json(turn.tools, "here")


ROLLOUTS = itertools.count()


@pytest.mark.parametrize("arguments", ["[" * 2000, "{" * 300, nested(MAX_DEPTH, "object"), "no JSON", "[1"])
async def test_a_calls_text_that_is_no_object_comes_back_as_it_was_sampled(rig: Any, arguments: str) -> None:
    session = await rig.open(**ROOM)
    whole = f'<tool_call>{{"name":"f","arguments":{json.dumps(arguments)}}}</tool_call>'
    rig.script.says(whole)
    first = await rig.chat(session, [QUESTION], tools=[{"type": "function", "function": {"name": "f"}}])
    assert first.status_code == 200
    reply = first.json()["choices"][0]["message"]
    assert reply["tool_calls"][0]["function"]["arguments"] == arguments
    assert (await rig.chat(session, [QUESTION, reply, {"role": "tool", "content": "4"}])).status_code == 200
    one, two = await rig.written("TurnCompleted")
    assert two.base_turn == one.turn
    await rig.start("gateway-1")
    assert len((await rig.describe(session))["messages"]) == 4


@pytest.mark.parametrize("depth", [MAX_DEPTH - 1, MAX_DEPTH, 1023, 1024, 5000])
def test_a_call_that_is_too_deep_stays_in_the_content(depth: int) -> None:
    text = f'<tool_call>{{"name":"f","arguments":{nested(depth, "object")}}}</tool_call>'
    parser = OutputParser(HERMES)
    parser.push(text)
    assert (parser.parts == [Text(text)]) == deeper_than(text) == bool(parser.ill_formed)
