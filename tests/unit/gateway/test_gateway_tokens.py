"""Templates render as transformers renders them; prompts append what a full render would, or say that they cannot."""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.each import each
from turnlog.producers.gateway.chat_template import ChatTemplate, TemplateMissing, TemplateUnbounded, check_ends
from turnlog.producers.gateway.errors import TemplateSpent
from turnlog.producers.gateway.messages import normalise_messages, parts_of, response_of
from turnlog.producers.gateway.parsers.formats import HERMES, THINK
from turnlog.producers.gateway.parsers.parser import OutputParser, ParsedCall, Part, Reasoning, Text
from turnlog.producers.gateway.prompts import Prompts, TextStream, TextTokens, TokenizerMissing

TOOLS = [{"type": "function", "function": {"name": "calc", "description": "ü <b>", "parameters": {"type": "object"}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "calc", "arguments": '{"expr": "1<2", "b": 1}'}}
CONVERSATIONS: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "3 + 5 = ?"}],
    [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hé"}],
    [
        {"role": "user", "content": "3 + 5 = ?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "8"},
        {"role": "tool", "tool_call_id": "c2", "content": "9"},
    ],
    [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "because"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d", "tool_calls": [CALL]},
        {"role": "tool", "content": "e"},
        {"role": "assistant", "content": "f"},
        {"role": "user", "content": "g"},
    ],
)
QWEN3_LIKE = (Path(__file__).parent / "templates/qwen3.jinja").read_text().rstrip("\n")
"""What matters of a stock Qwen3 template: merged tool results, reasoning of the last query only."""
NEXT_ROLE_ENDS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As GLM: nothing ends a turn but the next role's mark."""
ALTERNATING = (
    "{% for m in messages %}{% if m.role != 'user' and m.role != 'assistant' %}{{ raise_exception('no ' + m.role) }}"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _prompts(folder: Path, source: str | None = None) -> Prompts:
    template = ChatTemplate.load(folder) if source is None else ChatTemplate(source, {"eos_token": "<|im_end|>"})
    return Prompts(TextTokens(folder), template)


@pytest.mark.parametrize("source", [None, QWEN3_LIKE], ids=["chatml", "qwen3"])
def test_rendering_and_tokens_equal_transformers(model_folder: Path, source: str | None, monkeypatch: Any) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import transformers

    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(model_folder / "tokenizer.json"), eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    ours = _prompts(model_folder, source)
    text = source or (model_folder / "chat_template.jinja").read_text()
    for conversation in CONVERSATIONS:
        for tools in (None, TOOLS):
            messages = normalise_messages(conversation)
            expected = theirs.apply_chat_template(
                [dict(one.template) for one in messages],
                tools=tools,
                chat_template=text,
                add_generation_prompt=True,
                tokenize=False,
            )
            assert ours.text(messages, tools) == expected
            assert ours.full(messages, tools) == theirs(expected, add_special_tokens=False)["input_ids"]
            prefilled = normalise_messages([*conversation, {"role": "assistant", "content": "It is"}])
            assert ours.text(prefilled, tools) == theirs.apply_chat_template(
                [dict(one.template) for one in prefilled],
                tools=tools,
                chat_template=text,
                continue_final_message=True,
                tokenize=False,
            )


@pytest.mark.parametrize("source", [None, QWEN3_LIKE], ids=["chatml", "qwen3"])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
def test_a_continuation_is_what_a_full_render_puts_after_the_answer(
    model_folder: Path, source: str | None, tools: Any
) -> None:
    prompts = _prompts(model_folder, source)
    for new in (
        [{"role": "tool", "content": "8"}],
        [{"role": "tool", "content": "8"}, {"role": "tool", "content": "9"}],
        [{"role": "user", "content": "and 2?"}],
        [{"role": "tool", "content": "8"}, {"role": "user", "content": "so?"}],
        [{"role": "user", "content": "and 2?"}, {"role": "assistant", "content": "It is "}],
    ):
        answer = {"role": "assistant", "content": "x", **({"tool_calls": [CALL]} if new[0]["role"] == "tool" else {})}
        whole = prompts.full(normalise_messages([{"role": "user", "content": "q"}, answer, *new]), tools)
        more = prompts.continuation(prompts.end_of_turn or -1, normalise_messages(new), tools)
        assert more is not None
        assert whole[-len(more) - 1 :] == [prompts.end_of_turn, *more]
        cut = prompts.continuation(100, normalise_messages(new), tools)
        assert cut == [prompts.end_of_turn, *more]


def test_a_base_that_ends_in_the_next_roles_mark_keeps_it_once(model_folder: Path) -> None:
    prompts = _prompts(model_folder, NEXT_ROLE_ENDS)
    new = normalise_messages([{"role": "user", "content": "b"}])
    mark = prompts.tokens.encode("<|im_start|>")[0]
    whole = prompts.continuation(7, new, None)
    assert whole is not None
    assert whole[0] == mark
    assert prompts.continuation(mark, new, None) == whole[1:]


def test_a_kind_that_the_template_refuses_falls_back_alone(model_folder: Path) -> None:
    prompts = _prompts(model_folder, ALTERNATING)
    assert prompts.continuation(2, normalise_messages([{"role": "tool", "content": "8"}]), None) is None
    assert prompts.continuation(2, normalise_messages([{"role": "user", "content": "8"}]), None) is not None


LISTS_TOOLS = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_template_that_prints_the_date_appends_on_every_day(model_folder: Path) -> None:
    source = "{{ strftime_now('%d %b') }}" + LISTS_TOOLS
    prompts, new = _prompts(model_folder, source), normalise_messages([{"role": "user", "content": "b"}])
    for now in (datetime(2026, 1, 1, 23, tzinfo=UTC), datetime(2026, 1, 2, 0, tzinfo=UTC)) * 2:
        assert prompts.text(new, None, now).startswith(f"{now:%d %b}<|im_start|>")
        appended = prompts.continuation(2, new, None, now)
        assert appended is not None
        asked = [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "x"},
            {"role": "user", "content": "b"},
        ]
        assert prompts.full(normalise_messages(asked), None, now)[-len(appended) :] == appended


RESULT = (
    "{% if m.role == 'tool' %}{% for b in messages %}{% for c in b.tool_calls or [] %}{% if c.id == m.tool_call_id %}"
    "[{{ c.function.name }}]{% endif %}{% endfor %}{% endfor %}{% endif %}"
)
"""Finds a result's tool by the call that it answers."""


@pytest.mark.parametrize(
    "finds", [RESULT, "{{ m.name or '' }}" + RESULT.replace("c.id == ", "not m.name and c.id == ")]
)
def test_a_result_that_is_written_by_its_call_is_appended_with_the_name_of_that_call(
    model_folder: Path, finds: str
) -> None:
    prompts = _prompts(model_folder, LISTS_TOOLS.replace("{{ m.content }}", finds + "{{ m.content }}"))
    assert all(prompts.check_appends().values())
    answer = {"role": "assistant", "content": "", "tool_calls": [CALL, CALL | {"id": "c2"}]}
    for result in ({"tool_call_id": "c1"}, {"tool_call_id": "c2", "name": "calc"}, {"tool_call_id": "other"}, {}):
        messages = normalise_messages([CONVERSATIONS[0][0], answer, {"role": "tool", "content": "8", **result}])
        more = prompts.continuation(2, messages[2:], TOOLS, answer=messages[1])
        assert more is not None
        assert prompts.full(messages, TOOLS)[-len(more) :] == more
        named = result and ("name" in result or result["tool_call_id"] == "c1")
        assert prompts.tokens.literal(more).count("calc") == bool(named)


def test_a_template_that_lists_the_properties_of_a_tool_appends_where_tools_are_offered(model_folder: Path) -> None:
    listed = (
        "{% for name, one in tool.function.parameters.properties.items() %}{{ name + one.description }}{% endfor %}"
    )
    prompts = _prompts(model_folder, LISTS_TOOLS.replace("{{ tool | tojson }}", listed))
    assert all(prompts.check_appends().values())


NAMED = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools[0].function.name }}", "rag": "no"}


@pytest.mark.parametrize("where", ["configuration", "files", "processor"])
def test_named_templates_are_taken_as_transformers_takes_them(
    tmp_path: Path, model_folder: Path, where: str, monkeypatch: Any
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import transformers

    (tmp_path / "tokenizer.json").write_bytes((model_folder / "tokenizer.json").read_bytes())
    listed = [{"name": name, "template": source} for name, source in NAMED.items()]
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if where == "configuration":
        config["chat_template"] = listed
    elif where == "files":
        config["chat_template"] = "{{ 'not this' }}"
        (tmp_path / "chat_template.jinja").write_text(NAMED["default"])
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates/tool_use.jinja").write_text(NAMED["tool_use"])
    else:
        config["chat_template"] = "{{ 'of the text model' }}"
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": NAMED}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, asked = ChatTemplate.load(tmp_path), [{"role": "user", "content": "q"}]
    assert [ours.render(asked, tools, generate=False) for tools in (None, [], TOOLS)] == ["q", "q", "calc"]
    if where != "processor":  # which only a processor of transformers reads
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
        for tools in (None, TOOLS):
            expected = theirs.apply_chat_template(asked, tools=tools, tokenize=False)
            assert ours.render(asked, tools, generate=False) == expected
    assert ours.sha256 != ChatTemplate(NAMED["default"], {}).sha256


def test_a_template_that_joins_arguments_as_text_gets_text(model_folder: Path) -> None:
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}"
        "{{ call.function.name + '\n' + call.function.arguments }}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )  # as DeepSeek's
    prompts = _prompts(model_folder, source)
    for arguments in ('{"expr": "1<2"}', "no json"):
        call = {"id": "c1", "type": "function", "function": {"name": "calc", "arguments": arguments}}
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        asked = normalise_messages([{"role": "user", "content": "q"}, said, {"role": "tool", "content": "8"}])
        assert f"<|im_start|>assistant\ncalc\n{arguments}<|im_end|>\n<|im_start|>tool\n8" in prompts.text(asked, TOOLS)
    assert prompts.continuation(prompts.end_of_turn or -1, asked[2:], TOOLS) is not None


def test_a_template_that_rewrites_history_is_not_incremental(model_folder: Path) -> None:
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% if m.role == 'assistant' and not loop.last %} (said){% endif %}<|im_end|>\n{% endfor %}"
        "[{{ messages | length }}]{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    prompts = _prompts(model_folder, source)
    assert prompts.continuation(2, normalise_messages([{"role": "user", "content": "a"}]), None) is None


@example([99, 0, 0, 0, 131, 0, 0, 0, 99], random.Random(0))
@example([0, 3, 3, 99, 0, 3, 131, 99, 3, 3, 3], random.Random(0))
@given(st.lists(st.integers(0, 383), max_size=60), st.randoms(use_true_random=False))
def test_a_stream_never_takes_back_what_it_gave(model_folder: Path, ids: list[int], cuts: random.Random) -> None:
    tokens = TextTokens(model_folder)
    stream, given_out, at = TextStream(tokens), "", 0
    while at < len(ids):
        size = cuts.randint(1, 7)
        text = stream.push(ids[at : at + size])
        assert text.startswith(given_out)
        given_out, at = text, at + size
    assert tokens.decode(ids).startswith(given_out)


def parsed(*pieces: str, inside: bool = False) -> tuple[list[Part], int]:
    parser = OutputParser(HERMES, THINK, inside)
    for piece in pieces:
        parser.push(piece)
    parser.end()
    return parser.parts, parser.ill_formed


@each(
    ("text", "parts", "ill_formed"),
    [
        ("plain ", [Text("plain ")], 0),
        ('<tool_call>{"name":"f"}</tool_call>', [ParsedCall("f", "{}")], 0),
        (
            'a <tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call> ',
            [Text("a"), ParsedCall("f", '{"x":1}')],
            0,
        ),
        ('<tool_call>{"name":"f"}</tool_call>\nb ', [ParsedCall("f", "{}"), Text("b")], 0),
        ("<tool_call>{broken</tool_call>", [Text("<tool_call>{broken</tool_call>")], 1),
        ('a <tool_call>{"name":"f"}', [Text('a <tool_call>{"name":"f"}')], 1),
        ("<tool_call>[1]</tool_call>x", [Text("<tool_call>[1]</tool_call>x")], 1),
        ("<think>\nwhy\n</think>\n\nso", [Reasoning("why"), Text("so")], 0),
        ("<think>\n\n</think>\n\nso ", [Text("so ")], 0),
        ("<think>why", [Reasoning("why")], 0),
        ("so <think>why</think>", [Text("so <think>why</think>")], 0),
        ("<think><tool_call></think>", [Reasoning("<tool_call>")], 0),
    ],
)
def test_reasoning_and_well_formed_calls_leave_the_text(text: str, parts: list[Part], ill_formed: int) -> None:
    assert parsed(text) == (parts, ill_formed)


def test_reasoning_that_the_prompt_opened_goes_on_to_its_end() -> None:
    assert parsed("why\n</think>\n\nso", inside=True) == ([Reasoning("why"), Text("so")], 0)


def test_a_recorded_response_has_the_parts_that_made_it() -> None:
    parts: list[Part] = [Reasoning("why"), Text("so"), ParsedCall("f", "{}"), ParsedCall("g", '{"x":1}')]
    assert parts_of(response_of(parts, str)) == parts


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "source", [LOOP, "{{ 'x' * 10**10 }}", "{{ lipsum(10**7) }}", f"{{% if tools %}}{LOOP}{{% endif %}}"]
)
def test_a_template_that_does_not_end_is_refused_at_the_start(source: str, tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(source)
    with pytest.raises(TemplateUnbounded, match=f"chat template of {tmp_path} takes more than 1 s"):
        check_ends(tmp_path, cpu_s=1)


SPENT = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) | select %}{% for b in range(99999) | select %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "{% set ns = namespace(a=messages[0].content) %}{% for i in range(60) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
    "{% set ns = namespace(a=messages[0].content) %}{% for i in range(60) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
    "{% set a0 = messages[0].content %}" + "".join(
        f"{{% set a{at + 1} %}}{{{{ a{at} }}}}{{{{ a{at} }}}}{{% endset %}}" for at in range(40)
    ),
    "{{ messages[0].content * 10**10 }}", "{{ [messages] * 10**10 }}", "{{ (messages | length + 1) ** 9999999999 }}",
    "{{ messages[0].content.ljust(10**10) }}", "{{ messages[0].content | center(10**10) }}",
    "{{ messages[0].content | indent(width=10**10, first=true) }}", "{{ '%9999999999d' % messages | length }}",
    "{{ '{:>{}}'.format('', 10**10) }}", "{{ messages[0].content.replace('x', 'y' * 10**8) }}",
    "{{ messages[0].content | replace('x', 'y' * 10**8) }}", "{{ range(9999) | join('y' * 10**6) }}",
    "{{ ('y' * 10**6).join(messages[0].content) }}", "{{ lipsum(10**7) }}", "{{ messages | tojson(indent=10**10) }}",
    "{% filter center(10**10) %}x{% endfilter %}", "{% for a in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
]  # fmt: skip
"""Templates whose work has no bound, each by another means of theirs."""


@each("source", SPENT)
def test_a_template_that_loops_or_multiplies_text_is_refused_by_name(source: str) -> None:
    template = ChatTemplate(f"{{% if messages[0].content == 'fine' %}}so{{% else %}}{source}{{% endif %}}", {})
    assert template.render([{"role": "user", "content": "fine"}], None, generate=True) == "so"
    with pytest.raises(TemplateSpent, match=f"template .{template.sha256[:12]}. takes more than") as raised:
        template.render([{"role": "user", "content": "x" * 1000}], None, generate=True)
    assert (raised.value.status, raised.value.code) == (400, "template_unbounded")


def test_a_template_that_looks_at_all_messages_for_each_of_many_is_not_refused() -> None:
    template = ChatTemplate("{% for a in messages %}{% for b in messages %}{% endfor %}{{ a.content }}{% endfor %}", {})
    assert template.render([{"role": "user", "content": "x"}] * 1500, None, generate=True) == "x" * 1500
    assert template.slow


@pytest.mark.parametrize("source", ["{{ messages[0].content }}", "{{ raise_exception('no') }}"])
def test_a_template_that_ends_or_refuses_a_question_is_not_refused(source: str, tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(source)
    check_ends(tmp_path, cpu_s=1)


def test_a_folder_without_a_model_or_template_is_named(tmp_path: Path, model_folder: Path) -> None:
    with pytest.raises(TokenizerMissing, match=r"tokenizer\.json"):
        TextTokens(tmp_path)
    with pytest.raises(TemplateMissing, match=str(tmp_path)):
        ChatTemplate.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "{{ eos_token }}", "eos_token": {"content": "E"}})
    )
    assert ChatTemplate.load(tmp_path).render([], None, generate=True) == "E"
