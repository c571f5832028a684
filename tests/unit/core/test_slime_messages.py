"""What counts as one message, and what policy slime refuses of a turn's messages."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.each import each
from turnlog.processors.core.errors import PayloadNotFetched
from turnlog.processors.core.messages import ComparableMessage, Dialogue, NotMessages, message, messages, response
from turnlog.processors.core.methods.policies import Routes
from turnlog.processors.core.methods.rules import FoldRules
from turnlog.producers.gateway.messages import message as at_the_gateway
from turnlog.schemas.events import GroupStatus, TurnCompleted
from turnlog.schemas.json_depth import MAX_DEPTH
from turnlog.schemas.types import BlobRef

RULES = FoldRules(run_id="r", settings_sha256="s" * 64, min_valid=1, policy="slime")
CALL = {"type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": [2]}'}}


def user(content):
    return {"role": "user", "content": content}


def calling(arguments, **more):
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
    } | (more)


EQUAL = {
    "a string and one text block": (user("hi"), user([{"type": "text", "text": "hi"}])),
    "a cache mark": (user("hi"), user([{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}])),
    "nothing, the empty string, no blocks": (user(None), user("")),
    "no blocks": (user([]), user("")),
    "arguments in another order": (calling('{"b": 1, "a": [2]}'), calling('{"a":[2],"b":1}')),
    "arguments as an object": (calling('{"b": 1}'), calling({"b": 1})),
    "a call's id and index": (
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "call_9", "index": 3, **CALL}]},
    ),
    "a tool answer's call id": (
        {"role": "tool", "content": "4", "tool_call_id": "x"},
        {"role": "tool", "content": "4", "tool_call_id": "y"},
    ),
    "developer and system": ({"role": "developer", "content": "S"}, {"role": "system", "content": "S"}),
    "a billing line": (
        {"role": "system", "content": "S"},
        {"role": "system", "content": [{"type": "text", "text": "x-anthropic-billing-header: 1"},
                                       {"type": "text", "text": "S"}]},
    ),
    "a call of another API": (
        calling('{"a": 1}'),
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}]},
    ),
    "an item of the Responses API": (
        calling('{"a": 1}'),
        {"type": "function_call", "name": "f", "arguments": '{"a":1}', "call_id": "c", "status": "completed"},
    ),
}  # fmt: skip
DIFFERENT = {
    "a space at the end": (user("ok"), user("ok ")),
    "the role": (user("hi"), {"role": "tool", "content": "hi"}),
    "the arguments": (calling('{"a": 1}'), calling('{"a": 2}')),
    "a call more": ({"role": "assistant", "content": ""}, calling("{}")),
    "the order of blocks": (
        user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
        user([{"type": "text", "text": "b"}, {"type": "text", "text": "a"}]),
    ),
    "an image": (user("hi"), user([{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": "u"}}])),
}


@each("name", EQUAL)
def test_a_message_in_another_shape_is_the_same_message(name):
    one, other = map(message, EQUAL[name])
    assert one.echoes(other)
    assert other.echoes(one)


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_message_that_says_something_else_is_another(name):
    one, other = map(message, DIFFERENT[name])
    assert not one.echoes(other)


TEXTS = st.sampled_from(["", "a", "b", "a\nb", "x-anthropic-billing-header: 7"])
BLOCKS = st.builds(lambda text, marked: {"type": "text", "text": text} | ({"cache_control": {}} if marked else {}),
                   TEXTS, st.booleans())  # fmt: skip
CONTENTS = st.one_of(st.none(), TEXTS.filter(lambda text: not text.startswith("x-")), st.lists(BLOCKS, max_size=2))
ARGUMENTS = st.sampled_from(["", "{}", '{"a":1,"b":2}', '{"b": 2, "a": 1}', {"a": 1, "b": 2}, "[1]", "no json ", None])
CALLS = st.lists(
    st.builds(lambda name, arguments, number: {"id": number, "function": {"name": name, "arguments": arguments}},
              st.sampled_from("fg"), ARGUMENTS, st.sampled_from(["x", "y"])), max_size=2)  # fmt: skip
MESSAGES = st.one_of(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "developer", "tool"]), "content": CONTENTS},
        optional={"name": st.sampled_from(["n", ""]), "tool_call_id": TEXTS},
    ),
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": CONTENTS}, optional={"tool_calls": CALLS, "name": st.just("n")}
    ),
)


@settings(deadline=None, database=None, derandomize=True)
@given(st.lists(MESSAGES, min_size=2, max_size=8))
def test_two_messages_are_one_here_if_and_only_if_they_are_at_the_gateway(many):
    here, there = [message(one) for one in many], [at_the_gateway(one, "messages") for one in many]
    for i in range(len(many)):
        for j in range(i):
            assert here[i].echoes(here[j]) == (there[i].digest == there[j].digest), (many[i], many[j])


def test_reasoning_that_is_left_out_matches_any_and_present_it_must_match():
    own = message({"role": "assistant", "content": "A", "reasoning_content": " hm\n"})
    assert message({"role": "assistant", "content": "A"}).echoes(own)
    assert message({"role": "assistant", "content": "A", "reasoning": "hm"}).echoes(own)
    assert not message({"role": "assistant", "content": "A", "reasoning": "other"}).echoes(own)
    blocks = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "A"}]
    assert message({"role": "assistant", "content": blocks}).echoes(own)
    assert message({"content": "A", "summary": [{"type": "summary_text", "text": "hm"}]}).reasoning == "hm"
    wordless = {"role": "assistant", "content": "A", "reasoning": [{"type": "reasoning.encrypted", "data": "x"}]}
    assert message(wordless).echoes(own)
    redacted = [{"type": "thinking"}, {"type": "text", "text": "A"}]
    assert message({"role": "assistant", "content": redacted}).echoes(own)


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        (b"", "not JSON: "),
        (b"\xff", "not JSON: "),
        (b"{}", "a dict, not a list"),
        (b"[1]", "a int, not an object"),
        (b'["hi"]', "a str, not an object"),
    ],
)
def test_what_is_no_list_of_messages_is_named(payload, says):
    with pytest.raises(NotMessages, match=says):
        messages(payload)


@pytest.mark.parametrize("payload", [b"[1]", b'"hi"', b"null"])
def test_a_response_that_is_no_object_is_named(payload):
    with pytest.raises(NotMessages, match="not an object"):
        response(payload)


def test_results_of_tools_are_told_apart_by_what_they_say():
    def result(said):
        return message({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": said}]})

    assert result("4").echoes(result([{"type": "text", "text": "4"}]))
    assert not result("4").echoes(result("5"))


def test_a_response_without_a_role_is_the_assistants():
    assert response(b'{"content": "A"}').echoes(message({"role": "assistant", "content": "A"}))


DEEP = b"[" * 5000 + b"]" * 5000
BAD = {
    "no JSON": ("BrokenMessages", {"new_messages": b"not json"}),
    "too deep": ("BrokenMessages", {"new_messages": DEEP}),
    "a response that is too deep": ("BrokenMessages", {"response": b'{"content": ' + DEEP + b"}"}),
    "no base": ("BaseUnknown", {}),
}

REMEDIES = {
    "BrokenMessages": "; new_messages is a JSON list, response a JSON object",
    "BaseUnknown": "; a base's TurnCompleted stands before its continuation's in agent.turns",
}


@pytest.mark.parametrize("name", BAD)
def test_a_turn_whose_messages_cannot_be_known_is_refused_under_slime_alone(story, folded, name):
    refusal, change = BAD[name]
    s = story()
    s.turn("a", 0, "sq", "A", messages=[user("q")])
    s.turn("a", 1, "sqAr", "B", base=0, messages=[user("r")])
    s.end("a", reward=1.0)
    broken = [
        (topic, offset, replace(event, **change) if index_of(event) == 1 else event)
        for topic, offset, event in s.arrivals
        if name != "no base" or index_of(event) != 0
    ]
    if name == "no base":  # the base's record comes after its continuation's
        first = next(event for _, _, event in s.arrivals if index_of(event) == 0)
        broken.append(("agent.turns", 99, first))
    result = folded(broken, RULES)
    ((topic, _, error),) = result.refused
    assert (topic, type(error).__name__) == ("agent.turns", refusal)
    assert "session a turn (start/a, 1)" in str(error)
    assert ("has no readable record before it" in str(error)) == (name == "no base")
    assert str(error).endswith(REMEDIES[refusal])
    assert result.trees["a"].books.masked == {"refused": 2}
    assert result.score.status is GroupStatus.discarded
    prefix = folded(broken, replace(RULES, policy="prefix"))
    assert (prefix.refused, prefix.trees["a"].books.trained) == ([], 2)


def index_of(event):
    return event.turn.index if isinstance(event, TurnCompleted) else None


def test_a_payload_that_was_not_fetched_is_a_defect_of_the_shell(story, folded):
    s = story()
    s.turn("a", 0, "sq", "A")
    away = [
        (topic, offset, replace(event, response=BlobRef("0" * 64, 9)) if index_of(event) == 0 else event)
        for topic, offset, event in s.arrivals
    ]
    with pytest.raises(PayloadNotFetched):
        folded(away, RULES)


def test_messages_are_kept_once_however_many_turns_repeat_them(story):
    s = story()
    for index in range(50):
        s.turn(
            "a", index, "s" + "uo" * index + "u", "o", base=index - 1 if index else None, messages=[user(str(index))]
        )
    group = s.fold(RULES).group
    kept = group._dialogues["a"]._of.values()
    assert sum(len(dialogue.new) for dialogue in kept) == 50


class Compared(ComparableMessage):
    """A message that counts how often it is held against another."""

    times = 0

    def echoes(self, own):
        Compared.times += 1
        return super().echoes(own)


def test_a_turn_is_mounted_by_its_new_messages_alone_however_long_its_dialogue_is():
    routes, base = Routes(), None
    for order in range(400):
        new = (Compared("user", b"q%d" % order, ""), Compared("tool", b"t%d" % order, ""))
        base = Dialogue(base, new, Compared("assistant", b"a%d" % order, ""))
        assert routes.mount(order, base, [1] * 400, threshold=1024) is None
    assert list(routes.root.lines()) == [list(range(400))]
    assert Compared.times == 399  # each turn: its base's response


def test_json_of_a_whole_conversation_gives_one_message_each():
    raw = [{"role": "system", "content": "S"}, user("q"), calling("{}"), {"role": "tool", "content": "4"}]
    assert [one.role for one in messages(json.dumps(raw).encode())] == ["system", "user", "assistant", "tool"]


@pytest.mark.parametrize(
    "arguments", ["[" * 5000, "[" * 5000 + "]" * 5000, '{"a":' * 300 + "1" + "}" * 300, "1" * 5000]
)
def test_arguments_that_no_parser_takes_are_compared_as_text(story, folded, arguments):
    assert message(calling(f" {arguments}")).echoes(message(calling(arguments)))
    assert not message(calling(arguments + "x")).echoes(message(calling(arguments)))
    s = story()
    s.turn("a", 0, "sq", "A", messages=[user("q"), calling(arguments)])
    s.end("a", reward=1.0)
    result = folded(s.arrivals, RULES)
    assert (result.refused, result.trees["a"].books.trained) == ([], 1)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-32"])
@pytest.mark.parametrize("depth", [MAX_DEPTH, MAX_DEPTH + 1, 5000])
def test_messages_are_read_up_to_the_depth_of_every_door(encoding, depth):
    inner = "[" * (depth - 2) + "]" * (depth - 2)
    payload = f'[{{"role": "user", "content": "\\u0122Ģ", "more": {inner}}}]'.encode(encoding)
    if depth <= MAX_DEPTH:
        assert len(messages(payload)) == 1
    else:
        with pytest.raises(NotMessages, match=str(MAX_DEPTH)):
            messages(payload)
