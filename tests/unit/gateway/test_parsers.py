"""Outputs of every family of models, however they are split: the same parts, nothing taken back, nothing lost."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.each import each
from turnlog.producers.gateway.parsers.formats import FORMATS, MARKS, THINKING, TOLD_BY, formats_of
from turnlog.producers.gateway.parsers.parser import OutputParser, ParsedCall, Part, Reasoning, Text
from turnlog.producers.gateway.prompts import TextStream, TextTokens
from turnlog.settings import GatewaySettings

PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "share": {"type": ["number", "null"]},
    "fine": {"type": "boolean"},
    "where": {"type": "object"},
    "either": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
    "kind": {"enum": [1, 2]},
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": PROPERTIES}}},
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}},
]
OSLO, FIVE = ParsedCall("weather", '{"city":"Oslo ü","days":5}'), ParsedCall("weather", '{"days":5}')
STOP = ParsedCall("stop", "{}")


def coder(body: str) -> str:
    """A call of Qwen3-Coder's."""
    return f"<tool_call>\n<function={body}\n</function>\n</tool_call>"


WEATHER = "weather>\n<parameter=city>\nOslo ü\n</parameter>\n<parameter=days>\n5\n</parameter>"
GLM = "<arg_key>city</arg_key>\n<arg_value>Oslo ü</arg_value>\n<arg_key>days</arg_key>\n<arg_value>5</arg_value>\n"
ARGS = '{"city": "Oslo ü", "days": 5}'
FIVE_DAYS, BROKEN = '{"days": 5}', "{"
LISTED = f'{{"name": "weather", "arguments": {ARGS}}}'
LLAMA = f'{{"name": "weather", "parameters": {ARGS}}}'
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n%s\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>weather<｜tool▁sep｜>%s<｜tool▁call▁end｜>"
KIMI = "<|tool_call_begin|>functions.%s:%d<|tool_call_argument_begin|>%s<|tool_call_end|>"

JSON_MARKS = {
    "hermes": "<tool_call>%s</tool_call>", "llama3": "<|python_tag|>%s", "mistral": "[TOOL_CALLS][%s]",
}  # fmt: skip
CITY, MARKED = '{"city":"%s"}', '{"%s": "weather", "%s": {"city": "%s"}}'


def call_of(city: str) -> ParsedCall:
    """A call of weather."""
    return ParsedCall("weather", CITY % city)


WELL_FORMED: dict[str, dict[str, list[Part]]] = {
    "hermes": {
        f"<tool_call>\n{LISTED}\n</tool_call>": [OSLO],
        f'so\n<tool_call>\n{LISTED}\n</tool_call>\n<tool_call>\n{{"name": "stop", "arguments": {{}}}}\n</tool_call>': [
            Text("so"), OSLO, STOP,
        ],
    },
    "qwen3_coder": {
        coder(WEATHER): [OSLO],
        f"so\n\n{coder(WEATHER)}\n{coder('stop>')}": [Text("so"), OSLO, STOP],
    },
    "glm45": {
        f"<tool_call>weather\n{GLM}</tool_call>": [OSLO],
        f"so\n<tool_call>weather\n{GLM}</tool_call>\n<tool_call>stop\n</tool_call>": [Text("so"), OSLO, STOP],
    },
    "llama3": {
        LLAMA: [OSLO],
        f"<|python_tag|>{LLAMA}": [OSLO],
        f'<|python_tag|>{LLAMA};{{"name": "stop", "parameters": {{}}}}': [OSLO, STOP],
    },
    "mistral": {
        f'[TOOL_CALLS] [{LISTED}, {{"name": "stop", "arguments": {{}}}}]': [OSLO, STOP],
        f"so[TOOL_CALLS]weather[ARGS]{ARGS}[TOOL_CALLS]stop[ARGS]{{}}": [Text("so"), OSLO, STOP],
    },
    "deepseek": {
        f"so<｜tool▁calls▁begin｜>{V31 % ARGS}{V31 % FIVE_DAYS}<｜tool▁calls▁end｜>": [Text("so"), OSLO, FIVE],
    },
    "deepseek_v3": {
        f"<｜tool▁calls▁begin｜>{V3 % ARGS}\n{V3 % FIVE_DAYS}<｜tool▁calls▁end｜>": [OSLO, FIVE],
    },
    "kimi_k2": {
        f"so<|tool_calls_section_begin|>{KIMI % ('weather', 0, ARGS)}{KIMI % ('stop', 1, '{}')}"
        "<|tool_calls_section_end|>": [Text("so"), OSLO, STOP],
    },
}  # fmt: skip
"""What the chat templates of these families write: every parser of them must agree."""
PARAMETERS = (("city", "Oslo ü"), ("days", "5"))


def tags(parameter: str) -> str:
    """The parameters of OSLO, each as `parameter` writes it."""
    return "".join(parameter % one for one in PARAMETERS)


DSML = "".join(
    f'<｜DSML｜parameter name="{key}" string="{kind}">{value}</｜DSML｜parameter>\n'
    for (key, value), kind in zip(PARAMETERS, ("true", "false"), strict=True)
)
HUNYUAN = tags("<arg_key:opensource>%s</arg_key:opensource>\n<arg_value:opensource>%s</arg_value:opensource>\n")
CALLED = "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
XTML_THOUGHT = "<|open|>think<|sep|>why<|close|>think<|sep|>"
XTML_SAID = "<|open|>response<|sep|>so<|close|>response<|sep|>"
XTML_ARGUMENTS = "".join(
    f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'
    for (key, value), kind in zip(PARAMETERS, ("string", "number"), strict=True)
)
XTML_CALLS = (
    f'<|open|>tools<|sep|><|open|>call tool="weather" index="1"<|sep|>{XTML_ARGUMENTS}<|close|>call<|sep|>'
    '<|open|>call tool="stop" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
)
XTML_END = "<|close|>message<|sep|>"
M3 = "]<]minimax[>["
FAMILIES: list[tuple[str, str, list[Part]]] = [
    ("gpt_oss", f"<|channel|>analysis<|message|>why<|end|>{CALLED}{ARGS}", [Reasoning("why"), OSLO]),
    ("gpt_oss", f"<|channel|>commentary<|message|>so<|end|>{CALLED}{ARGS}<|call|>", [Text("so"), OSLO]),
    ("gpt_oss", " to=functions.stop<|channel|>commentary json<|message|>{}<|call|>", [STOP]),
    ("gpt_oss", "<|channel|>final<|message|>so", [Text("so")]),
    ("gpt_oss", "so", [Text("so")]),
    (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="weather">' + tags('<parameter name="%s">%s</parameter>\n')
        + '</invoke>\n<invoke name="stop"></invoke>\n</minimax:tool_call>',
        [OSLO, STOP],
    ),
    *(
        (
            name,
            f'so\n\n<｜DSML｜{around}>\n<｜DSML｜invoke name="weather">\n{DSML}</｜DSML｜invoke>\n'
            f'<｜DSML｜invoke name="stop">\n</｜DSML｜invoke>\n</｜DSML｜{around}>',
            [Text("so"), OSLO, STOP],
        )
        for name, around in (("deepseek_v32", "function_calls"), ("deepseek_v4", "tool_calls"))
    ),
    ("gemma4", 'so<|tool_call>call:weather{city:<|"|>Oslo ü<|"|>,days:5}<tool_call|>', [Text("so"), OSLO]),
    ("gemma4", '<|tool_call>call:weather{city:<|"|><tool_call|><|"|>}<tool_call|>', [call_of("<tool_call|>")]),
    (
        "gemma4",
        '<|tool_call>call:f{a:[1,true,null,{<|"|>b<|"|>:<|"|>c<|"|>}],d:{}}<tool_call|>',
        [ParsedCall("f", '{"a":[1,true,null,{"b":"c"}],"d":{}}')],
    ),
    ("lfm2", "<|tool_call_start|>[weather(city='Oslo ü', days=5), stop()]<|tool_call_end|>", [OSLO, STOP]),
    (
        "lfm2",
        "<|tool_call_start|>[f(a=[1, None, true], b={'c': -1})]<|tool_call_end|>so",
        [ParsedCall("f", '{"a":[1,null,true],"b":{"c":-1}}'), Text("so")],
    ),
    (
        "cohere",
        f'<|START_ACTION|>[\n{{"tool_call_id": "0", "tool_name": "weather", "parameters": {ARGS}}}\n]<|END_ACTION|>',
        [OSLO],
    ),
    ("nemotron", f"so <TOOLCALL>[{LISTED}, {LISTED}]</TOOLCALL>", [Text("so"), OSLO, OSLO]),
    ("apertus", f'<|tools_prefix|>[{{"weather": {ARGS}}}, {{"stop": {{}}}}]<|tools_suffix|>', [OSLO, STOP]),
    (
        "hunyuan",
        f"<tool_calls:opensource>\n<tool_call:opensource>weather<tool_sep:opensource>\n{HUNYUAN}"
        "</tool_call:opensource>\n</tool_calls:opensource>",
        [OSLO],
    ),
    (
        "minicpm",
        '<function name="weather"><param name="city"><![CDATA[Oslo ü]]></param><param name="days">5</param></function>',
        [OSLO],
    ),
    (
        "muse",
        '<atem:function_calls>\n<atem:invoke name="weather">\n'
        + tags('<atem:parameter name="%s">%s</atem:parameter>\n') + "</atem:invoke>\n</atem:function_calls>",
        [OSLO],
    ),
    (
        "solar",
        f"<|tool_calls|><|tool_call:begin|>i<|tool_call:name|>weather<|tool_call:args|>{ARGS}<|tool_call:end|><|calls|>",
        [OSLO],
    ),
    ("gigachat", f"<|function_call|>{LISTED}", [OSLO]),
    ("functionary", f"so<function=weather>{ARGS}</function>", [Text("so"), OSLO]),
    ("kimi_k3", f"{XTML_THOUGHT}{XTML_SAID}{XTML_CALLS}{XTML_END}", [Reasoning("why"), Text("so"), OSLO, STOP]),
    ("kimi_k3", f"why<|close|>think<|sep|>{XTML_SAID}{XTML_END}", [Reasoning("why"), Text("so")]),
    ("kimi_k3", f"so<|close|>response<|sep|>{XTML_CALLS}", [Text("so"), OSLO, STOP]),
    (
        "kimi_k3",
        '<|open|>tools<|sep|><|open|>call tool="a&amp;&quot;" index="1"<|sep|><|open|>json type="object"<|sep|>'
        f"{ARGS}<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
        [ParsedCall('a&"', OSLO.arguments)],
    ),
    ("functionary_v32", f"weather\n{ARGS}>>>stop\n{{}}", [OSLO, STOP]),
    ("functionary_v32", f"all\nas in\n>>> 5\n>>>six\n5>>>weather\n{ARGS}", [Text("as in\n>>> 5\n>>>six\n5"), OSLO]),
    ("functionary_v32", "all\nso", [Text("so")]),
    (
        "minimax_m3",
        f'so{M3}<tool_call>\n{M3}<invoke name="weather">{M3}<city>Oslo ü{M3}</city>{M3}<days>5{M3}</days>'
        f'{M3}</invoke>\n{M3}<invoke name="stop">{M3}</invoke>\n{M3}</tool_call>',
        [Text("so"), OSLO, STOP],
    ),
    (
        "minimax_m3",
        f'{M3}<invoke name="weather">{M3}<city>"</invoke>{M3}</city>{M3}<where>{M3}<a>{M3}<item>x{M3}</item>'
        f"{M3}<item>{M3}<b>5{M3}</b>{M3}</item>{M3}</a>{M3}</where>{M3}</invoke>",
        [ParsedCall("weather", '{"city":"\\"</invoke>","where":{"a":["x",{"b":"5"}]}}')],
    ),
    (
        "minimax_m3",
        f'{M3}<invoke name="stop">{M3}<where>{M3}</where>{M3}</invoke>',
        [ParsedCall("stop", '{"where":""}')],
    ),
    (
        "minimax_m3",
        f'{M3}<invoke name="weather">{M3}<where>{M3}</where>{M3}</invoke>',
        [ParsedCall("weather", '{"where":{}}')],
    ),
    ("gigachat3", f"so<|message_sep|>\n\nfunction call<|role_sep|>\n{LISTED}", [Text("so"), OSLO]),
    ("granite", f"<|tool_call|>[{LISTED}, {LISTED}]", [OSLO, OSLO]),
    (
        "command_r",
        f'so\nAction:\n```json\n[\n    {{\n        "tool_name": "weather",\n        "parameters": {ARGS}\n    }}\n]```',
        [Text("so"), OSLO],
    ),
    ("tool_calls", f"<tool_calls>[{LISTED}]</tool_calls>", [OSLO]),
    ("tool_calls", f"<tool_calls>\n{LISTED}\n{LISTED}\n</tool_calls>", [OSLO, OSLO]),
]  # fmt: skip
"""As the chat templates of these families write a call of each."""
ILL_FORMED: dict[str, str] = {
    "gpt_oss": f"{CALLED.removeprefix('<|start|>assistant')}{{<|call|>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="weather">so</invoke>',
    "deepseek_v32": '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="false">so</｜DSML｜invoke>',
    "gemma4": "<|tool_call>call:weather{city:Oslo}<tool_call|>",
    "lfm2": "<|tool_call_start|>[weather(open('a'))]<|tool_call_end|>",
    "cohere": f"<|START_ACTION|>[{LISTED}]<|END_ACTION|>",
    "nemotron": "<TOOLCALL>[]</TOOLCALL>",
    "apertus": f'<|tools_prefix|>[{{"weather": {ARGS}, "stop": {{}}}}]<|tools_suffix|>',
    "hunyuan": "<tool_call:opensource>weather</tool_call:opensource>",
    "minicpm": '<function name="weather">so</function>',
    "solar": "<|tool_call:begin|>i<|tool_call:name|>weather<|tool_call:end|>",
    "functionary": "<function=weather>5</function>",
    "kimi_k3": f"so<|close|>response<|sep|>{XTML_CALLS.replace('number', 'object').replace('5', 'five')}",
    "functionary_v32": "weather\nso>>>stop\n{}",
    "minimax_m3": f'{M3}<invoke name="weather">{M3}<city>Oslo{M3}</days>{M3}</invoke>',
    "gigachat3": "<|message_sep|>\n\nfunction call<|role_sep|>\nso",
    "granite": "<|tool_call|>[]",
    "command_r": f"Action:\n```json\n[{LISTED}]```",
    "tool_calls": "<tool_calls>so</tool_calls>",
}  # fmt: skip
OWN: list[tuple[str, str, list[Part], int]] = [
    # Spellings that the families' own parsers take, and SGLang's do not or not alike.
    ("qwen3_coder", f"<function={WEATHER}</function>\n</tool_call> then", [OSLO, Text("then")], 0),
    ("qwen3_coder", f"so <function={WEATHER}</function>", [Text("so"), OSLO], 0),
    ("seed", f"<seed:tool_call>\n<function={WEATHER}\n</function>\n</seed:tool_call>", [OSLO], 0),
    ("glm45", f"<tool_call>weather{GLM}</tool_call>", [OSLO], 0),
    ("glm4", f"\nweather\n{ARGS}", [OSLO], 0),
    ("glm4", f"so<|assistant|>weather\n{ARGS}<|assistant|>stop\n{{}}", [Text("so"), OSLO, STOP], 0),
    ("glm4", "\nweather is fine", [Text("\nweather is fine")], 0),
    ("llama3", ' {"answer": 5} ', [Text(' {"answer": 5} ')], 0),
    ("mistral", f"[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{ARGS}", [OSLO], 0),
    *((name, text, parts, 0) for name, text, parts in FAMILIES),
    # Either key of the arguments is read in every family that writes JSON.
    ("hermes", f"<tool_call>{LLAMA}</tool_call>", [OSLO], 0),
    ("hermes", '<tool_call>{"name": "stop"}</tool_call>', [STOP], 0),
    ("llama3", LISTED, [OSLO], 0),
    ("mistral", f"[TOOL_CALLS][{LLAMA}]", [OSLO], 0),
    # A closing mark within a value is part of the value.
    (
        "hermes",
        f"<tool_call>\n{MARKED % ('name', 'arguments', '</tool_call>')}\n</tool_call> so",
        [call_of("</tool_call>"), Text("so")],
        0,
    ),
    (
        "hermes",
        f"<tool_call>{MARKED % ('name', 'arguments', '<tool_call></tool_call>')}</tool_call>",
        [call_of("<tool_call></tool_call>")],
        0,
    ),
    (
        "deepseek",
        f"<｜tool▁calls▁begin｜>{V31 % (CITY % '<｜tool▁call▁end｜>')}<｜tool▁calls▁end｜>",
        [call_of("<｜tool▁call▁end｜>")],
        0,
    ),
    ("kimi_k2", KIMI % ("weather", 0, CITY % "<|tool_call_end|>"), [call_of("<|tool_call_end|>")], 0),
    ("glm4", f"\nweather\n{CITY % '<|assistant|>'}<|assistant|>stop\n{{}}", [call_of("<|assistant|>"), STOP], 0),
    ("qwen3_coder", coder("weather>\n<parameter=city>\n</function>\n</parameter>"), [call_of("</function>")], 0),
    ("seed", "<function=weather><parameter=city></function></parameter></function>", [call_of("</function>")], 0),
    (
        "glm45",
        "<tool_call>weather<arg_key>city</arg_key><arg_value></tool_call></arg_value></tool_call>",
        [call_of("</tool_call>")],
        0,
    ),
    # ... and ends the block where no later one does. What follows is read as it would be without that block.
    (
        "hermes",
        f'<tool_call>{{"name": "</tool_call> so <tool_call>{LISTED}</tool_call>',
        [Text('<tool_call>{"name": "</tool_call> so'), OSLO],
        1,
    ),
    ("hermes", '<tool_call>"</tool_call> so', [Text('<tool_call>"</tool_call> so')], 1),
    (
        "hermes",
        f'<tool_call>"</tool_call> so <tool_call>{LISTED}</tool_call> "',
        [Text('<tool_call>"</tool_call> so'), OSLO, Text('"')],
        1,
    ),
    (
        "qwen3_coder",
        f"{coder('weather><parameter=city>Oslo')} so {coder(WEATHER)}",
        [Text(f"{coder('weather><parameter=city>Oslo')} so"), OSLO],
        1,
    ),
    (
        "glm45",
        f"<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</tool_call><tool_call>weather{GLM}</tool_call>",
        [Text("<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</tool_call>"), OSLO],
        1,
    ),
    # Ill-formed blocks stay text, and each is counted once.
    *((name, text, [Text(text)], 1) for name, text in ILL_FORMED.items()),
    ("qwen3_coder", coder("weather>\n<parameter=city>\nOslo"), [Text(coder("weather>\n<parameter=city>\nOslo"))], 1),
    ("qwen3_coder", "so <tool_call>\nnothing", [Text("so <tool_call>\nnothing")], 1),
    ("qwen3_coder", f"{coder(WEATHER)}\n<tool_call>", [OSLO, Text("<tool_call>")], 1),
    ("qwen3_coder", "a </tool_call> b", [Text("a </tool_call> b")], 0),
    ("glm45", "<tool_call>two words</tool_call>", [Text("<tool_call>two words</tool_call>")], 1),
    ("llama3", "<|python_tag|>print(1)", [Text("<|python_tag|>print(1)")], 1),
    ("llama3", f"<|python_tag|>{LLAMA} so", [Text(f"<|python_tag|>{LLAMA} so")], 1),
    ("glm4", f"so<|assistant|>other\n{ARGS}", [Text(f"so<|assistant|>other\n{ARGS}")], 1),
    ("mistral", "[TOOL_CALLS]weather[ARGS]{", [Text("[TOOL_CALLS]weather[ARGS]{")], 1),
    ("deepseek", f"<｜tool▁calls▁begin｜>{V31 % BROKEN}", [Text(f"<｜tool▁calls▁begin｜>{V31 % BROKEN}")], 1),
    ("kimi_k2", KIMI % ("a b", 0, "{}"), [Text(KIMI % ("a b", 0, "{}"))], 1),
]
STAYS: list[tuple[str, str, int]] = [
    *(
        (name, marks % f'{{"name": "weather", {arguments}}}', 1)
        for name, marks in JSON_MARKS.items()
        for arguments in (f'"args": {ARGS}', f'"argument": {ARGS}', f'"parameters": {ARGS}, "arguments": {{}}')
    ),
    # Nothing tells a call without a mark from an answer in JSON but a tool that was offered, and its arguments.
    ("llama3", '{"name": "Bob", "age": 5}', 0),
    ("llama3", '{"name": "Bob", "parameters": {"age": 5}}', 0),
    ("llama3", '{"name": "weather"}', 0),
    ("llama3", '{"name": "weather", "temperature": 5}', 0),
    ("llama3", f'{{"name": "weather", "parameters": {ARGS}, "age": 5}}', 0),
    ("llama3", f"[{LLAMA}]", 0),
]
"""What resembles a call stays text."""
ALL = [
    *((name, text, [Text(text)], ill_formed) for name, text, ill_formed in STAYS),
    *((name.removesuffix("_v3"), text, parts, 0) for name, one in WELL_FORMED.items() for text, parts in one.items()),
    *OWN,
]


def parsed(
    name: str, pieces: Sequence[str], thinking: str = "think", *, inside: bool = False
) -> tuple[list[Part], int]:
    parser = OutputParser(FORMATS[name], THINKING[thinking], inside, TOOLS)
    for piece in pieces:
        parser.push(piece)
    parser.end()
    return parser.parts, parser.ill_formed


@each(("name", "text", "parts", "ill_formed"), ALL)
def test_calls_of_each_family_leave_the_text(name: str, text: str, parts: list[Part], ill_formed: int) -> None:
    assert parsed(name, [text]) == (parts, ill_formed)
    assert parsed(name, text) == (parts, ill_formed)  # a character at a time
    if FORMATS[name].whole is not None:  # which tells reasoning itself
        return
    reasoned = parsed(name, [*"<think>why</think>\n\n", *text])
    assert reasoned == ([Reasoning("why"), *(dataclasses.replace(one) for one in stripped(parts))], ill_formed)


def stripped(parts: list[Part]) -> list[Part]:
    """White space behind reasoning belongs to nothing."""
    first = parts[0]
    return [Text(first.text.lstrip()), *parts[1:]] if isinstance(first, Text) else parts


@each(
    ("key", "text", "value"),
    [
        ("city", "5", "5"), ("city", "null", "null"), ("city", " a\n b ", " a\n b "), ("city", "", ""),
        ("days", "5", 5), ("days", " 5\n", 5), ("days", "five", "five"), ("days", "5.5", "5.5"),
        ("days", "null", None),
        ("share", "5", 5), ("share", "0.5", 0.5), ("share", "None", None), ("fine", "True", True),
        ("fine", "false", False),
        ("where", '{"a": [1, "b"]}', {"a": [1, "b"]}), ("where", "{a}", "{a}"), ("where", "[1]", "[1]"),
        ("either", "5", 5), ("either", "five", "five"), ("either", "null", "null"), ("kind", "2", 2),
        ("where", "[" * 254 + "]" * 254, "[" * 254 + "]" * 254),
    ],
)  # fmt: skip
def test_a_value_without_json_has_the_type_that_its_schema_says(key: str, text: str, value: Any) -> None:
    for name, call in (
        ("qwen3_coder", f"<function=weather>\n<parameter={key}>\n{text}\n</parameter>\n</function>"),
        ("glm45", f"<tool_call>weather\n<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"),
    ):
        [found], _ = parsed(name, [call])
        assert isinstance(found, ParsedCall)
        assert json.loads(found.arguments) == {key: value}


POINT = {"type": "object", "properties": {"x": {"type": "number"}}}
DEFINED = {
    "Point": POINT, "Count": {"type": "integer"}, "Colour": {"enum": ["1", "2"]}, "Many": {"items": {}},
    "Same": {"$ref": "#/$defs/Point"}, "Itself": {"anyOf": [{"$ref": "#/$defs/Itself"}, {"type": "integer"}]},
    "Wide": {"allOf": [{"$ref": "#/$defs/Wider"}, {"$ref": "#/$defs/Wider"}]}, "Wider": {"type": "object"},
    "a/b": {"type": "boolean"},
}  # fmt: skip
"""As Pydantic, FastMCP and openai-agents write what is nested."""


@each("name", ["qwen3_coder", "seed", "glm45"])
@each(
    ("schema", "text", "value"),
    [
        ({"$ref": "#/$defs/Point"}, '{"x": 1.5}', {"x": 1.5}),
        ({"$ref": "#/$defs/Same"}, '{"x": 1.5}', {"x": 1.5}),
        ({"$ref": "#/$defs/Count"}, "5", 5),
        ({"$ref": "#/$defs/a~1b"}, "true", True),
        ({"$ref": "#/$defs/Itself"}, "5", 5),
        ({"$ref": "#/$defs/Wide"}, "{}", {}),
        ({"$ref": "#/$defs/Colour"}, "1", "1"),
        ({"$ref": "#/$defs/Many"}, "[1]", [1]),
        ({"allOf": [{"$ref": "#/$defs/Point"}], "description": "d"}, "{}", {}),
        ({"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]}, '{"x": 1}', {"x": 1}),
        ({"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]}, "null", None),
        ({"oneOf": [{"$ref": "#/$defs/Count"}, {"type": "boolean"}]}, "true", True),
        ({"properties": {"x": {}}}, "{}", {}),
        ({"items": {"type": "string"}}, '["a"]', ["a"]),
        ({"const": 5}, "5", 5),
        ({"const": "5"}, "5", "5"),
        ({"minLength": 1}, "5", "5"),
        ({"type": "integer"}, "5.0", 5),
        ({"type": ["string", "null"], "anyOf": [{"minLength": 1}, {}]}, "5", "5"),
        ({"type": "integer"}, "12345678901234567890123", 12345678901234567890123),
        ({"type": "object"}, '{"id": 12345678901234567890123}', {"id": 12345678901234567890123}),
    ],
)
def test_a_type_is_found_wherever_a_schema_says_it(name: str, schema: Any, text: str, value: Any) -> None:
    call = (
        f"<tool_call>f<arg_key>p</arg_key><arg_value>{text}</arg_value></tool_call>"
        if name == "glm45"
        else f"<function=f><parameter=p>{text}</parameter></function>"
    )
    own = {"type": "object", "properties": {"p": schema}}
    for parameters in (
        own | {"$defs": DEFINED},
        {"$ref": "#/$defs/Own", "$defs": DEFINED | {"Own": own}},
        {"allOf": [{"type": "object"}, own], "$defs": DEFINED},
    ):
        parser = OutputParser(FORMATS[name], tools=[{"function": {"name": "f", "parameters": parameters}}])
        parser.push(call)
        parser.end()
        [found] = parser.parts
        assert isinstance(found, ParsedCall)
        assert (read := json.loads(found.arguments)) == {"p": value}
        assert type(read["p"]) is type(value)


def test_a_schema_that_refers_to_itself_many_times_over_is_read_at_once() -> None:
    definitions: dict[str, Any] = {f"D{at}": {"anyOf": [{"$ref": f"#/$defs/D{(at + 1) % 40}"}] * 3} for at in range(40)}
    schema = {"properties": {"p": {"$ref": "#/$defs/D0"}}, "allOf": [{"$ref": "#"}] * 3, "$defs": definitions}
    parser = OutputParser(FORMATS["qwen3_coder"], tools=[{"function": {"name": "f", "parameters": schema}}])
    parser.push("<function=f><parameter=p>5</parameter></function>")
    assert parser.parts == [ParsedCall("f", '{"p":"5"}')]


IN_JSON = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>', "mistral": "[TOOL_CALLS]f[ARGS]%s",
    "llama3": '{"name": "f", "parameters": %s}', "glm4": "\nf\n%s", "deepseek": V31.replace("weather", "f"),
    "cohere": '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": %s}]<|END_ACTION|>',
    "nemotron": '<TOOLCALL>[{"name": "f", "arguments": %s}]</TOOLCALL>',
    "apertus": '<|tools_prefix|>[{"f": %s}]<|tools_suffix|>', "functionary": "<function=f>%s</function>",
    "gpt_oss": " to=functions.f<|channel|>commentary json<|message|>%s<|call|>",
    "solar": "<|tool_call:begin|>i<|tool_call:name|>f<|tool_call:args|>%s<|tool_call:end|>",
    "deepseek_v3": V3.replace("weather", "f"), "kimi_k2": KIMI.replace("%s:%d", "f:0", 1),
}  # fmt: skip
"""How families that write arguments as JSON write a call of f."""
WHATEVER = st.recursive(
    st.booleans() | st.integers() | st.text(max_size=3) | st.sampled_from([*sorted(MARKS), '"', "\\", '\\"']),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.parametrize("name", IN_JSON)
@given(
    arguments=st.dictionaries(st.sampled_from([*sorted(MARKS), "a"]), WHATEVER, max_size=3),
    cuts=st.randoms(use_true_random=False),
)
def test_arguments_in_json_are_what_was_said_whatever_marks_and_digits_they_have(
    name: str, arguments: dict[str, Any], cuts: random.Random
) -> None:
    text = IN_JSON[name] % json.dumps(arguments, ensure_ascii=False)
    family = FORMATS[name.removesuffix("_v3")]
    tools = [{"function": {"name": "f", "parameters": {}}}]
    places = sorted(cuts.randint(0, len(text)) for _ in range(cuts.randint(0, 9)))
    parser = OutputParser(family, tools=tools)
    for start, end in itertools.pairwise([0, *places, len(text)]):
        parser.push(text[start:end])
    parser.end()
    assert parser.parts == [ParsedCall("f", json.dumps(arguments, ensure_ascii=False, separators=(",", ":")))]
    assert parser.ill_formed == 0


WORDS = {
    name: sorted({
        *(piece for each, text, *_ in ALL if each == name for piece in (text, text[: len(text) // 2])),
        *FORMATS[name].marks, *(FORMATS[name].around or ()),
        "<think>", "</think>", "a", "ü 😀", " ", "\n", "{", "weather\n", "[ARGS]", "<arg_key>",
    } - {""})
    for name in FORMATS
}  # fmt: skip


VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*"ab", "type", "anyOf", "enum", "properties", "name"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data(), schema=VALUES, value=VALUES)
def test_no_schema_and_no_output_ends_a_parser(name: str, data: st.DataObject, schema: Any, value: Any) -> None:
    parser = OutputParser(FORMATS[name], tools=[schema, {"function": {"name": "weather", "parameters": schema}}])
    for word in [*data.draw(st.lists(st.sampled_from(WORDS[name]), max_size=4)), json.dumps(value)]:
        parser.push(word)
    for body in (
        "weather[ARGS]",
        "weather\n",
        "weather>",
        "weather<|tool_call_argument_begin|>",
        "weather<｜tool▁sep｜>",
    ):
        parser.push(f"{FORMATS[name].marks.opening}{body}{json.dumps(value)}")
    parser.push("[" * 5000)
    parser.end()
    assert all(isinstance(json.loads(one.arguments), dict) for one in parser.parts if isinstance(one, ParsedCall))


@pytest.mark.parametrize("schema", [None, 5, [], {"properties": 5}, {"properties": {"a": {"type": 5, "anyOf": {}}}}])
def test_values_that_no_schema_tells_of_are_text_to_qwen_and_json_to_glm(schema: Any) -> None:
    tools = [{"function": {"name": "f", "parameters": schema}}, {"function": 5}, 5]
    for name, call, value in (
        ("qwen3_coder", "<function=f><parameter=a>5</parameter></function>", "5"),
        ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>5</arg_value></tool_call>", 5),
    ):
        parser = OutputParser(FORMATS[name], tools=tools)
        parser.push(call)
        parser.end()
        [found] = parser.parts
        assert isinstance(found, ParsedCall)
        assert json.loads(found.arguments) == {"a": value}


@each("name", THINKING)
def test_reasoning_in_each_spelling_also_where_the_prompt_opened_it(name: str) -> None:
    opening, closing = THINKING[name]
    expected = ([Reasoning("why"), Text("so")], 0)
    assert parsed("hermes", f"{opening}\nwhy\n{closing}\n\nso", name) == expected
    parser = OutputParser(FORMATS["hermes"], THINKING[name], inside=True)
    parser.push(f"why\n{closing}\n\nso")
    parser.end()
    assert parser.parts == expected[0]


def outputs(name: str) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(WORDS[name]), max_size=8).map("".join)


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data(), cuts=st.randoms(use_true_random=False))
def test_however_a_text_is_split_its_parts_are_the_same_and_stay(
    name: str, data: st.DataObject, cuts: random.Random
) -> None:
    text, inside = data.draw(outputs(name)), data.draw(st.booleans())
    places = sorted(cuts.randint(0, len(text)) for _ in range(cuts.randint(0, 9)))
    parser, given_out = OutputParser(FORMATS[name], THINKING["think"], inside, TOOLS), list[Part]()
    for start, end in itertools.pairwise([0, *places, len(text)]):
        parser.push(text[start:end])
        assert grown(given_out, parser.parts)
        given_out = [dataclasses.replace(part) for part in parser.parts]
    parser.end()
    assert grown(given_out, parser.parts)
    assert (parser.parts, parser.ill_formed) == parsed(name, [text], inside=inside)
    if FORMATS[name].whole is not None:  # the headers of its messages belong to no part
        assert all(part.text in text for part in parser.parts if not isinstance(part, ParsedCall))
    elif not any(isinstance(part, ParsedCall) for part in parser.parts):
        kept = "".join(part.text for part in parser.parts if not isinstance(part, ParsedCall))
        closed = text.replace("</think>", "", 1)
        nothing_lost = [text, closed, closed.replace("<think>", "", 1)]
        assert "".join(kept.split()) in ["".join(one.split()) for one in nothing_lost]


def grown(before: list[Part], after: list[Part]) -> bool:
    """Whether what was given out stays: only the last part of it may have grown."""
    return len(before) <= len(after) and all(
        old == new or (not isinstance(old, ParsedCall) and type(old) is type(new) and new.text.startswith(old.text))
        for old, new in zip(before, after, strict=False)
    )


@pytest.fixture(scope="session", params=[True, False], ids=["special", "plain"])
def byte_level(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TextTokens:
    """A byte-level BPE tokenizer, the families' marks among its special tokens or in pieces as any other text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text for _, text, *_ in ALL], trainer)
    marks = sorted(MARKS) if request.param else []
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in ["<|end|>", *marks]])
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id("<|end|>")
    config = {"vocab_size": tokenizer.get_vocab_size() + 8, "eos_token_id": end}
    (folder / "config.json").write_text(json.dumps(config))
    return TextTokens(folder)


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data(), cuts=st.randoms(use_true_random=False))
def test_however_tokens_come_their_parts_are_the_same_and_stay(
    byte_level: TextTokens, name: str, data: st.DataObject, cuts: random.Random
) -> None:
    ids = byte_level.encode(data.draw(outputs(name)))
    for _ in range(cuts.randint(0, 2)):  # a token out of place: parts of characters, marks, ids beyond the tokenizer
        ids.insert(cuts.randint(0, len(ids)), cuts.randrange(byte_level.vocabulary))
    stream, parser = TextStream(byte_level), OutputParser(FORMATS[name], THINKING["think"], tools=TOOLS)
    given_out, read, at = list[Part](), 0, 0
    while at < len(ids):
        size = cuts.randint(1, 5)
        text = stream.push(ids[at : at + size])
        parser.push(text[read:])
        assert grown(given_out, parser.parts)
        given_out, read, at = [dataclasses.replace(part) for part in parser.parts], len(text), at + size
    whole = byte_level.decode(ids)
    assert grown(given_out, parsed(name, [whole])[0])
    parser.push(whole[read:])
    parser.end()
    assert (parser.parts, parser.ill_formed) == parsed(name, [whole])


def test_marks_of_calls_are_no_end_of_an_output_and_not_held_back(byte_level: TextTokens) -> None:
    for mark in MARKS:
        assert TextStream(byte_level).push(byte_level.encode(mark)) == mark
        assert not any(byte_level.is_control(token) for token in byte_level.encode(mark))
    assert byte_level.is_control(byte_level.encode("<|end|>")[0])


@each(
    ("template", "calls", "thinking"),
    [
        ("{{ '<tool_call>\\n' }}", "hermes", None),
        ("{{ content }}", None, None),
        *((one, name, None) for name, told in TOLD_BY.items() if name != "glm4" for one in told),
        ("<tool_call>\n<function=example>\n<parameter=a>", "qwen3_coder", None),
        ("<think></think><tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key><|observation|>", "glm45", "think"),
        ("<|observation|>", "glm4", None),
        ('Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.',
         "llama3", None),
        ("[THINK]{{ r }}[/THINK][TOOL_CALLS]", "mistral", "mistral"),
        ("'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' </think>", "deepseek", "think"),
        ("<|tool_calls_section_begin|><|tool_call_begin|>", "kimi_k2", None),
        ("<seed:tool_call>\n<function=f>\n<parameter=a> </seed:think>", "seed", "seed"),
    ],
)  # fmt: skip
def test_a_models_formats_are_found_in_its_chat_template(
    template: str, calls: str | None, thinking: str | None
) -> None:
    assert formats_of(template) == (FORMATS[calls] if calls else None, THINKING[thinking] if thinking else None)
    assert formats_of(template, "llama3", "kimi") == (FORMATS["llama3"], THINKING["kimi"])
    assert formats_of(template, "none", "none") == (None, None)


def test_the_settings_name_every_format_and_no_other() -> None:
    hints = get_type_hints(GatewaySettings)
    assert set(get_args(hints["tool_calls"])) == {"auto", "none", *FORMATS}
    assert set(get_args(hints["reasoning"])) == {"auto", "none", *THINKING}
    assert TOLD_BY.keys() == FORMATS.keys()


def test_a_gateway_imports_no_engine_and_no_torch() -> None:
    program = "import sys, turnlog.producers.gateway.app\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert {"torch", "transformers", "sglang"}.isdisjoint(done.stdout.split())


THEIRS = """
import json, sys
from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
corpus, tools = json.load(sys.stdin)
tools = [Tool.model_validate(tool) for tool in tools]
for name, text in corpus:
    left, calls = FunctionCallParser(tools, name).parse_non_stream(text)
    print(json.dumps([left.strip(), [[call.name, json.loads(call.parameters)] for call in calls]]))
"""
"""A process of its own: torch ends one that has run pytest by a segmentation fault."""


@pytest.mark.long  # 15 to 28 s of import
def test_parsers_of_sglang_read_the_same_calls() -> None:
    named = {"hermes": "qwen25", "deepseek": "deepseekv31", "deepseek_v3": "deepseekv3"}
    corpus = [(named.get(name, name), text) for name, one in WELL_FORMED.items() for text in one]
    asked = json.dumps([corpus, TOOLS])
    done = subprocess.run([sys.executable, "-c", THEIRS], input=asked, capture_output=True, text=True, check=True)
    told = [line for line in done.stdout.splitlines() if line.startswith('["')]
    expected = [parts for one in WELL_FORMED.values() for parts in one.values()]
    for (name, _), line, parts in zip(corpus, told, expected, strict=True):
        text = "".join(part.text for part in parts if not isinstance(part, ParsedCall))
        calls = [[part.name, json.loads(part.arguments)] for part in parts if isinstance(part, ParsedCall)]
        assert json.loads(line) == [text, calls], name
