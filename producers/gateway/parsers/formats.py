"""How families of models write tool calls and reasoning.

Sources: the models' chat templates, which show it to them. A value that a family writes without JSON (strings bare, and
so everything else, too) is typed by the tool's schema. What is not exactly as a template writes it is no call.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from turnlog.producers.gateway.parsers.parser import Call, CallFormat, Marks
from turnlog.producers.gateway.parsers.values import Schema, compact, exact, leading

NAME = re.compile(r"[^\s<>{}\[\]]+")


def _hermes(body: str, _: Sequence[Any]) -> Sequence[Call] | None:
    """{"name", "arguments"}"""
    return _calls(exact(body))


def _llama(body: str, _: Sequence[Any]) -> Sequence[Call] | None:
    """{"name", "parameters"}, several with ; between them."""
    found, at = list[Call](), 0
    body = body.strip()
    while at < len(body):
        value, at = leading(body, at)
        calls = _calls(value)
        if calls is None or body[at : at + 1] not in ("", ";"):
            return None
        found += calls
        at += 1
    return found or None


def _llama_bare(body: str, tools: Sequence[Any]) -> Sequence[Call] | None:
    """The same as a whole answer, without a mark: nothing tells it from an answer in JSON but the name of a tool that
    was offered, and arguments beside it."""
    value = exact(body)
    if not isinstance(value, dict) or len(value.keys() - BESIDE) != 1 or value.get("name") not in _schemas(tools):
        return None
    return _calls(value)


def _coder(body: str, tools: Sequence[Any]) -> Sequence[Call] | None:
    """NAME> <parameter=KEY> value </parameter> ..."""
    name, _, rest = body.partition(">")
    values = _pairs(rest, r"\s*<parameter=([^<>\s]+)>\n?(.*?)\n?", "</parameter>")
    return _typed(name, values, tools, otherwise=("string",))


def _glm(body: str, tools: Sequence[Any]) -> Sequence[Call] | None:
    """NAME <arg_key>KEY</arg_key> <arg_value>value</arg_value> ..."""
    name, key, rest = body.partition("<arg_key>")
    values = _pairs(key + rest, r"\s*<arg_key>([^<>]+)</arg_key>\s*<arg_value>(.*)", "</arg_value>")
    return _typed(name.strip(), values, tools, otherwise=())


def _glm4(body: str, tools: Sequence[Any]) -> Sequence[Call] | None:
    """NAME, a new line, the arguments; several with <|assistant|> between them. Only a tool that was offered: nothing
    else tells it from text."""
    offered, found, at = _schemas(tools), list[Call](), 0
    body = body.strip()
    while at < len(body):
        name, _, _ = body[at:].partition("\n")
        arguments, end = leading(body, at + len(name))
        call = _call(name.strip() if name.strip() in offered else "", arguments)
        if not call or not (end == len(body) or body.startswith("<|assistant|>", end)):
            return None
        found.append(call)
        at = end + len("<|assistant|>")
        while body[at : at + 1].isspace():
            at += 1
    return found or None


def _mistral(body: str, _: Sequence[Any]) -> Sequence[Call] | None:
    """A list of {"name", "arguments"}, or NAME[ARGS]{...}, several with [TOOL_CALLS] between them."""
    if body.lstrip().startswith("["):
        return _calls(exact(body))
    found, at = list[Call](), 0
    while at < len(body):
        arguments = body.find("[ARGS]", at)
        value, end = leading(body, arguments + len("[ARGS]"))
        call = _call(body[at : max(at, arguments)].partition("[CALL_ID]")[0].strip(), value)
        if not call or not (end == len(body) or body.startswith("[TOOL_CALLS]", end)):
            return None
        found.append(call)
        at = end + len("[TOOL_CALLS]")
    return found or None


def _deepseek(body: str, _: Sequence[Any]) -> Sequence[Call] | None:
    """NAME, a separator, the arguments (V3.1); "function", a separator, NAME, the arguments in a fence (V3, R1)."""
    name, _, arguments = body.partition("<｜tool▁sep｜>")
    if "\n```json\n" in arguments and arguments.rstrip().endswith("\n```"):
        name, _, arguments = arguments.rstrip()[:-3].partition("\n```json\n")
    call = _call(name.strip(), exact(arguments))
    return [call] if call else None


def _kimi(body: str, _: Sequence[Any]) -> Sequence[Call] | None:
    """functions.NAME:COUNT, a mark, the arguments."""
    name, _, arguments = body.partition("<|tool_call_argument_begin|>")
    named = re.fullmatch(r"(?:functions\.)?([\w.-]+):\d+", name.strip())
    call = _call(named[1] if named else "", exact(arguments))
    return [call] if call else None


def _mistral_id(_: str, __: int, given: str) -> str:
    """Nine letters and digits: Mistral's templates refuse others."""
    return hashlib.sha256(given.encode()).hexdigest()[:9]


def _kimi_id(tool: str, before: int, given: str) -> str:
    """As the model writes it."""
    return f"functions.{tool}:{before}" if tool else given


PARAMETER = Marks("<parameter=", "</parameter>")
FORMATS: Mapping[str, CallFormat] = {
    "seed": CallFormat(
        Marks("<function=", "</function>"), _coder, Marks("<seed:tool_call>", "</seed:tool_call>"), values=PARAMETER
    ),
    "qwen3_coder": CallFormat(
        Marks("<function=", "</function>"), _coder, Marks("<tool_call>", "</tool_call>"), values=PARAMETER
    ),
    "glm45": CallFormat(
        Marks("<tool_call>", "</tool_call>"), _glm, values=Marks("<arg_value>", "</arg_value>")
    ),
    "glm4": CallFormat(
        Marks("<|assistant|>", ""), _glm4, bare=lambda tools: [f"{name}\n" for name in _schemas(tools)],
        around_arguments=("NAME\n", ""),
    ),
    "llama3": CallFormat(
        Marks("<|python_tag|>", ""), _llama, bare=lambda _: ("{",), read_bare=_llama_bare,
        around_arguments=('{"name": "NAME", "parameters": ', "}"),
    ),
    "mistral": CallFormat(
        Marks("[TOOL_CALLS]", ""), _mistral, ids=_mistral_id,
        around_arguments=('[TOOL_CALLS][{"name": "NAME", "arguments": ', "}]"),
    ),
    "deepseek": CallFormat(
        Marks("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"), _deepseek,
        Marks("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    "kimi_k2": CallFormat(
        Marks("<|tool_call_begin|>", "<|tool_call_end|>"), _kimi,
        Marks("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"), ids=_kimi_id,
    ),
    "hermes": CallFormat(
        Marks("<tool_call>", "</tool_call>"), _hermes,
        around_arguments=('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>"),
    ),
}  # fmt: skip
"""By the names of [gateway] tool_calls."""
TOLD_BY: Mapping[str, str] = {
    "seed": "<seed:tool_call>",
    "qwen3_coder": "<parameter=",
    "glm45": "<arg_key>",
    "glm4": "<|observation|>",
    "llama3": "dictionary of argument name and its value",
    "mistral": "[TOOL_CALLS]",
    "deepseek": "<｜tool▁call▁begin｜>",
    "kimi_k2": "<|tool_call_begin|>",
    "hermes": "",
}
"""What tells in a chat template that its model has a format: the first that is found, else Hermes, which Qwen 2.5,
Qwen 3 and most fine-tuned models write."""
THINKING: Mapping[str, Marks] = {
    "think": Marks("<think>", "</think>"),
    "thinking": Marks("<thinking>", "</thinking>"),
    "thought": Marks("<thought>", "</thought>"),
    "reasoning": Marks("<reasoning>", "</reasoning>"),
    "seed": Marks("<seed:think>", "</seed:think>"),
    "mistral": Marks("[THINK]", "[/THINK]"),
    "kimi": Marks("◁think▷", "◁/think▷"),
    "cohere": Marks("<|START_THINKING|>", "<|END_THINKING|>"),
}
"""By the names of [gateway] reasoning. A model has the first whose closing mark is in its chat template."""
HERMES, THINK = FORMATS["hermes"], THINKING["think"]
MARKS = frozenset(
    [
        *itertools.chain(*THINKING.values()),
        *(mark for one in FORMATS.values() for mark in (*one.marks, *(one.around or ())) if mark),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "[ARGS]", "[CALL_ID]"),
        *("<｜tool▁sep｜>", "<|tool_call_argument_begin|>"),
    ]
)
"""What stands in outputs as text does, though tokenizers may hold it for special."""


def formats_of(
    template: str, tool_calls: str = "auto", reasoning: str = "auto"
) -> tuple[CallFormat | None, Marks | None]:
    """How a model with this chat template writes calls and reasoning, each None where it has none. The other two:
    [gateway] tool_calls and reasoning."""
    if tool_calls == "auto":
        tool_calls = next(name for name, told_by in TOLD_BY.items() if told_by in template)
    if reasoning == "auto":
        reasoning = next((name for name, marks in THINKING.items() if marks.closing in template), "none")
    return FORMATS.get(tool_calls), THINKING.get(reasoning)


def only_call(
    calls: CallFormat | None, tools: Sequence[Any], wanted: str, thinking: Marks | None = None, *, inside: bool = False
) -> str | None:
    """The structural tag, as JSON, of an answer that is one call of the tool that is `wanted`, "" for any, behind what
    the model thinks; `inside`: where it thinks already. None: no such tool, or a family that writes no JSON."""
    offered = {name: schema for name, schema in _schemas(tools).items() if wanted in ("", name)}
    if calls is None or calls.around_arguments is None or not offered:
        return None
    before, after = calls.around_arguments
    told = [
        {
            "type": "tag",
            "begin": before.replace("NAME", orjson.dumps(name).decode()[1:-1]),
            "content": {"type": "json_schema", "json_schema": {"type": "object", **(schema or {})}},
            "end": after,
        }
        for name, schema in offered.items()
    ]
    return _tag(thinking, {"type": "or", "elements": told}, inside=inside)


def only_json(schema: str, thinking: Marks, *, inside: bool = False) -> str:
    """The structural tag of an answer that is JSON which fits a schema, behind what the model thinks; see only_call."""
    return _tag(thinking, {"type": "json_schema", "json_schema": orjson.loads(schema)}, inside=inside)


def _tag(thinking: Marks | None, answer: dict[str, Any], *, inside: bool) -> str:
    """As SGLang takes them (xgrammar, `structural_tag`)."""
    elements = [answer]
    if thinking is not None:
        opening = "" if inside else thinking.opening
        thought = {"type": "tag", "begin": opening, "content": {"type": "any_text"}, "end": thinking.closing}
        thought = thought if inside else {"type": "optional", "content": thought}
        # what JSON calls white space: xgrammar's \s also takes a vertical tab, before which no reader of JSON begins
        elements = [thought, {"type": "regex", "pattern": r"[ \t\r\n]*"}, *elements]
    return orjson.dumps({"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}).decode()


ARGUMENTS = ("arguments", "parameters")
"""Keys of a call as JSON has it: templates of one family write the one, others the other, and models mix them up.
Whichever comes alone counts; no family writes `args` or `input`, so that who says that has said no call."""
BESIDE = frozenset({"name", "id", "type"})
"""Keys that tell nothing of the arguments."""


def _calls(value: Any) -> list[Call] | None:
    """Of a call as JSON has it, or a list of them. A call may lack its arguments, but not have them elsewhere."""
    found: list[Call | None] = []
    for one in value if isinstance(value, list) else [value]:
        if not isinstance(one, dict) or not isinstance(one.get("name"), str):
            return None
        keys = [key for key in ARGUMENTS if key in one]
        if len(keys) > 1 or (not keys and not BESIDE.issuperset(one)):
            return None
        arguments: Any = one[keys[0]] if keys else {}
        name: str = one["name"]
        found.append(Call(name, arguments) if isinstance(arguments, str) else _call(name, arguments))
    return [one for one in found if one] if all(found) else None


def _call(name: str, arguments: Any) -> Call | None:
    """None where there is no name, or where the arguments are no object."""
    return Call(name, compact(arguments)) if name and isinstance(arguments, dict) else None


def _pairs(text: str, pair: str, closing: str) -> list[tuple[str, str]] | None:
    """Keys and values, with white space between them and nothing else."""
    *pieces, last = text.split(closing)
    found = [re.fullmatch(pair, piece, re.DOTALL) for piece in pieces]
    return [(one[1].strip(), one[2]) for one in found if one] if all(found) and not last.strip() else None


def _typed(
    name: str, values: list[tuple[str, str]] | None, tools: Sequence[Any], otherwise: Sequence[str]
) -> list[Call] | None:
    """A call whose values are read by what its tool's schema says of them."""
    if values is None or not NAME.fullmatch(name):
        return None
    schema = Schema(_schemas(tools).get(name))
    call = _call(name, {key: schema.value(key, text, otherwise=otherwise) for key, text in values})
    return [call] if call else None


def _schemas(tools: Sequence[Any]) -> dict[str, Any]:
    """Parameters of the tools that were offered, by name."""
    functions = [one.get("function") for one in tools if isinstance(one, dict)]
    named = [one for one in functions if isinstance(one, dict) and isinstance(one.get("name"), str)]
    return {one["name"]: one.get("parameters") for one in named}
