"""The formats in which families of models write tool calls and reasoning.

Sources: the models' chat templates, which show the format to the model. If a family writes values without JSON (bare
strings, and so bare values of any kind), the tool's schema types them. Text that is not exactly what a template writes
is no call.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from turnlog.producers.gateway.parsers.families import (
    NAMESPACE,
    QUOTE,
    by_schema,
    call,
    dsml,
    elements,
    gemma,
    harmony,
    keyed_by_name,
    objects,
    pairs,
    pythonic,
    recipients,
    schemas,
    tagged_reader,
    xtml,
)
from turnlog.producers.gateway.parsers.parser import JSON_STRING, CallFormat, Delimiters, ParsedCall, exact, leading


def _json_calls(body: str, _: Sequence[Any]) -> Sequence[ParsedCall] | None:
    """Read objects of {"name", "arguments"}, in a list or one after the other."""
    return _calls(objects(body)) or None


def _cohere(body: str, _: Sequence[Any]) -> Sequence[ParsedCall] | None:
    """Read a list of {"tool_call_id", "tool_name", "parameters"}."""
    found = objects(body) or [None]
    if not all(isinstance(one, dict) and one.keys() <= {"tool_call_id", "tool_name", "parameters"} for one in found):
        return None
    return _calls([{"name": one.get("tool_name"), "parameters": one.get("parameters")} for one in found])


def _solar(body: str, _: Sequence[Any]) -> Sequence[ParsedCall] | None:
    """Read ID, a mark, NAME, a mark, the arguments."""
    _, _, rest = body.partition("<|tool_call:name|>")
    name, _, arguments = rest.partition("<|tool_call:args|>")
    made = call(name.strip(), exact(arguments))
    return [made] if made else None


def _function(body: str, _: Sequence[Any]) -> Sequence[ParsedCall] | None:
    """Read NAME>{...}."""
    name, _, arguments = body.partition(">")
    made = call(name.strip(), exact(arguments))
    return [made] if made else None


def _hermes(body: str, _: Sequence[Any]) -> Sequence[ParsedCall] | None:
    """Read {"name", "arguments"}."""
    return _calls(exact(body))


def _llama(body: str, _: Sequence[Any]) -> Sequence[ParsedCall] | None:
    """Read {"name", "parameters"}, or several separated by `;`."""
    found, at = list[ParsedCall](), 0
    body = body.strip()
    while at < len(body):
        value, at = leading(body, at)
        calls = _calls(value)
        if calls is None or body[at : at + 1] not in ("", ";"):
            return None
        found += calls
        at += 1
    return found or None


def _llama_bare(body: str, tools: Sequence[Any]) -> Sequence[ParsedCall] | None:
    """Read the same as a whole answer without a mark. Only the name of an offered tool, with arguments beside it,
    distinguishes it from an answer in JSON."""
    value = exact(body)
    if not isinstance(value, dict) or len(value.keys() - BESIDE) != 1:
        return None
    found = _calls(value)
    return found if found and all(one.name in schemas(tools) for one in found) else None


CODER = tagged_reader(">", r"\s*<parameter=(?P<key>[^<>\s]+)>\n?(?P<value>.*?)\n?", "</parameter>")


def _glm(body: str, tools: Sequence[Any]) -> Sequence[ParsedCall] | None:
    """Read NAME <arg_key>KEY</arg_key> <arg_value>value</arg_value> ..."""
    name, key, rest = body.partition("<arg_key>")
    values = pairs(key + rest, r"\s*<arg_key>(?P<key>[^<>]+)</arg_key>\s*<arg_value>(?P<value>.*)", "</arg_value>")
    return by_schema(name.strip(), values, tools, otherwise=())


def _glm4(body: str, tools: Sequence[Any]) -> Sequence[ParsedCall] | None:
    """Read NAME, a new line and the arguments, or several calls separated by <|assistant|>. The name must be that of an
    offered tool, because nothing else distinguishes a call from text."""
    offered, found, at = schemas(tools), list[ParsedCall](), 0
    body = body.strip()
    while at < len(body):
        name, _, _ = body[at:].partition("\n")
        arguments, end = leading(body, at + len(name))
        made = call(name.strip() if name.strip() in offered else "", arguments)
        if not made or not (end == len(body) or body.startswith("<|assistant|>", end)):
            return None
        found.append(made)
        at = end + len("<|assistant|>")
        while body[at : at + 1].isspace():
            at += 1
    return found or None


def _mistral(body: str, _: Sequence[Any]) -> Sequence[ParsedCall] | None:
    """Read a list of {"name", "arguments"}, or NAME[ARGS]{...}, or several of those separated by [TOOL_CALLS]."""
    if body.lstrip().startswith("["):
        return _calls(exact(body))
    found, at = list[ParsedCall](), 0
    while at < len(body):
        arguments = body.find("[ARGS]", at)
        value, end = leading(body, arguments + len("[ARGS]"))
        name, _, named = body[at : max(at, arguments)].partition("[CALL_ID]")
        made = call(name.strip(), value, named.strip())
        if not made or not (end == len(body) or body.startswith("[TOOL_CALLS]", end)):
            return None
        found.append(made)
        at = end + len("[TOOL_CALLS]")
    return found or None


def _deepseek(body: str, _: Sequence[Any]) -> Sequence[ParsedCall] | None:
    """Read NAME, a separator, the arguments (V3.1); or "function", a separator, NAME, the arguments in a fence (V3,
    R1)."""
    name, _, arguments = body.partition("<｜tool▁sep｜>")
    if "\n```json\n" in arguments and arguments.rstrip().endswith("\n```"):
        name, _, arguments = arguments.rstrip()[:-3].partition("\n```json\n")
    made = call(name.strip(), exact(arguments))
    return [made] if made else None


def _kimi(body: str, _: Sequence[Any]) -> Sequence[ParsedCall] | None:
    """Read functions.NAME:COUNT, a mark, the arguments."""
    name, _, arguments = body.partition("<|tool_call_argument_begin|>")
    named = re.fullmatch(r"(?:functions\.)?([\w.-]+):\d+", name.strip())
    made = call(named[1] if named else "", exact(arguments), name.strip())
    return [made] if made else None


def _mistral_id(_: str, __: int, given: str) -> str:
    """Return nine letters and digits; Mistral's templates refuse other ids."""
    return hashlib.sha256(given.encode()).hexdigest()[:9]


def _kimi_id(tool: str, before: int, given: str) -> str:
    """Return the id in the form that the model writes."""
    return f"functions.{tool}:{before}" if tool else given


PARAMETER = Delimiters("<parameter=", "</parameter>")
FORMATS: Mapping[str, CallFormat] = {
    "seed": CallFormat(
        Delimiters("<function=", "</function>"), CODER, Delimiters("<seed:tool_call>", "</seed:tool_call>"),
        values=PARAMETER,
    ),
    "qwen3_coder": CallFormat(
        Delimiters("<function=", "</function>"), CODER, Delimiters("<tool_call>", "</tool_call>"), values=PARAMETER
    ),
    "glm45": CallFormat(
        Delimiters("<tool_call>", "</tool_call>"), _glm, values=Delimiters("<arg_value>", "</arg_value>")
    ),
    "glm4": CallFormat(
        Delimiters("<|assistant|>", ""), _glm4, bare=lambda tools: [f"{name}\n" for name in schemas(tools)],
        around_arguments=("NAME\n", ""),
    ),
    "llama3": CallFormat(
        Delimiters("<|python_tag|>", ""), _llama, bare=lambda _: ("{",), read_bare=_llama_bare,
        around_arguments=('{"name": "NAME", "parameters": ', "}"),
    ),
    "mistral": CallFormat(
        Delimiters("[TOOL_CALLS]", ""), _mistral, ids=_mistral_id,
        around_arguments=('[TOOL_CALLS][{"name": "NAME", "arguments": ', "}]"),
    ),
    "deepseek": CallFormat(
        Delimiters("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"), _deepseek,
        Delimiters("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    "kimi_k2": CallFormat(
        Delimiters("<|tool_call_begin|>", "<|tool_call_end|>"), _kimi,
        Delimiters("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"), ids=_kimi_id,
    ),
    "gpt_oss": CallFormat(Delimiters(" to=functions.", ""), lambda _, __: None, whole=harmony),
    "kimi_k3": CallFormat(Delimiters("<|open|>call", ""), lambda _, __: None, whole=xtml),
    "functionary_v32": CallFormat(Delimiters(">>>", ""), lambda _, __: None, whole=recipients),
    "minimax_m3": CallFormat(
        Delimiters(f'{NAMESPACE}<invoke name="', f"{NAMESPACE}</invoke>"), elements,
        Delimiters(f"{NAMESPACE}<tool_call>", f"{NAMESPACE}</tool_call>"), values=None,
    ),
    "minimax_m2": CallFormat(
        Delimiters('<invoke name="', "</invoke>"),
        tagged_reader('">', r'\s*<parameter name="(?P<key>[^"]+)">(?P<value>.*)', "</parameter>"),
        Delimiters("<minimax:tool_call>", "</minimax:tool_call>"),
        values=Delimiters('<parameter name="', "</parameter>"),
    ),
    "deepseek_v32": CallFormat(
        Delimiters('<｜DSML｜invoke name="', "</｜DSML｜invoke>"), dsml,
        Delimiters("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
        values=Delimiters('<｜DSML｜parameter name="', "</｜DSML｜parameter>"),
    ),
    "deepseek_v4": CallFormat(
        Delimiters('<｜DSML｜invoke name="', "</｜DSML｜invoke>"), dsml,
        Delimiters("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
        values=Delimiters('<｜DSML｜parameter name="', "</｜DSML｜parameter>"),
    ),
    "gemma4": CallFormat(Delimiters("<|tool_call>", "<tool_call|>"), gemma, values=Delimiters(QUOTE, QUOTE)),
    "lfm2": CallFormat(Delimiters("<|tool_call_start|>", "<|tool_call_end|>"), pythonic, values=Delimiters("'", "'")),
    "cohere": CallFormat(Delimiters("<|START_ACTION|>", "<|END_ACTION|>"), _cohere),
    "nemotron": CallFormat(Delimiters("<TOOLCALL>", "</TOOLCALL>"), _json_calls),
    "apertus": CallFormat(Delimiters("<|tools_prefix|>", "<|tools_suffix|>"), keyed_by_name),
    "hunyuan": CallFormat(
        Delimiters("<tool_call:opensource>", "</tool_call:opensource>"),
        tagged_reader(
            "<tool_sep:opensource>",
            r"\s*<arg_key:opensource>(?P<key>[^<>]+)</arg_key:opensource>\s*<arg_value:opensource>(?P<value>.*)",
            "</arg_value:opensource>",
        ),
        Delimiters("<tool_calls:opensource>", "</tool_calls:opensource>"),
        values=Delimiters("<arg_value:opensource>", "</arg_value:opensource>"),
    ),
    "minicpm": CallFormat(
        Delimiters('<function name="', "</function>"),
        tagged_reader(
            '">', r'\s*<param name="(?P<key>[^"]+)">(?P<cdata><!\[CDATA\[)?(?P<value>.*?)(?(cdata)\]\]>)', "</param>"
        ),
        values=Delimiters('<param name="', "</param>"),
    ),
    "muse": CallFormat(
        Delimiters('<atem:invoke name="', "</atem:invoke>"),
        tagged_reader('">', r'\s*<atem:parameter name="(?P<key>[^"]+)">(?P<value>.*)', "</atem:parameter>"),
        Delimiters("<atem:function_calls>", "</atem:function_calls>"),
        values=Delimiters('<atem:parameter name="', "</atem:parameter>"),
    ),
    "solar": CallFormat(
        Delimiters("<|tool_call:begin|>", "<|tool_call:end|>"), _solar, Delimiters("<|tool_calls|>", "<|calls|>")
    ),
    "gigachat": CallFormat(Delimiters("<|function_call|>", ""), _hermes),
    "gigachat3": CallFormat(Delimiters("<|message_sep|>\n\nfunction call<|role_sep|>\n", ""), _hermes),
    "granite": CallFormat(Delimiters("<|tool_call|>", ""), _json_calls),
    "command_r": CallFormat(Delimiters("Action:\n```json\n", "```"), _cohere),
    "functionary": CallFormat(Delimiters("<function=", "</function>"), _function),
    "tool_calls": CallFormat(Delimiters("<tool_calls>", "</tool_calls>"), _json_calls),
    "hermes": CallFormat(
        Delimiters("<tool_call>", "</tool_call>"), _hermes,
        around_arguments=('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>"),
    ),
}  # fmt: skip
"""Call formats by their names in [gateway] tool_calls."""
TOLD_BY: Mapping[str, tuple[str, ...]] = {
    "gpt_oss": ("<|start|>assistant<|channel|>",),
    "kimi_k3": ("<|open|>call tool=",),
    "functionary_v32": (">>>${recipient}",),
    "minimax_m3": (NAMESPACE,),
    "seed": ("<seed:tool_call>",),
    "minimax_m2": ("<minimax:tool_call>",),
    "deepseek_v32": ("<｜DSML｜function_calls>",),
    "deepseek_v4": ("<｜DSML｜tool_calls>",),
    "gemma4": ("<|tool_call>call:",),
    "lfm2": ("<|tool_call_start|>", "<|tool_list_start|>"),
    "granite": ("<|tool_call|>",),
    "command_r": ('"tool_name": title of the tool',),
    "cohere": ("<|START_ACTION|>",),
    "nemotron": ("<TOOLCALL>",),
    "apertus": ("<|tools_prefix|>",),
    "hunyuan": ("<tool_call:opensource>",),
    "minicpm": ("<param name=",),
    "muse": ("<atem:invoke name=",),
    "solar": ("<|tool_call:begin|>",),
    "gigachat": ("<|function_call|>",),
    "gigachat3": ("function call<|role_sep|>",),
    "qwen3_coder": ("<parameter=",),
    "functionary": ("<function=",),
    "glm45": ("<arg_key>",),
    "glm4": ("<|observation|>",),
    "llama3": ("dictionary of argument name and its value",),
    "mistral": ("[TOOL_CALLS]",),
    "deepseek": ("<｜tool▁call▁begin｜>",),
    "kimi_k2": ("<|tool_call_begin|>",),
    "tool_calls": ("<tool_calls>",),
    "hermes": ("<tool_call>",),
}
"""Marks that reveal a model's format, in its chat template or in what that writes; the first match wins. A model
without any of them writes no calls in a known format."""
THINKING: Mapping[str, Delimiters] = {
    "think": Delimiters("<think>", "</think>"),
    "thinking": Delimiters("<thinking>", "</thinking>"),
    "thought": Delimiters("<thought>", "</thought>"),
    "reasoning": Delimiters("<reasoning>", "</reasoning>"),
    "seed": Delimiters("<seed:think>", "</seed:think>"),
    "mistral": Delimiters("[THINK]", "[/THINK]"),
    "kimi": Delimiters("◁think▷", "◁/think▷"),
    "cohere": Delimiters("<|START_THINKING|>", "<|END_THINKING|>"),
    "gemma4": Delimiters("<|channel>thought\n", "<channel|>"),
    "minimax": Delimiters("<mm:think>", "</mm:think>"),
    "hunyuan": Delimiters("<think:opensource>", "</think:opensource>"),
}
"""Marks of reasoning by their names in [gateway] reasoning. A model has the first whose closing mark is in its chat
template."""
HERMES, THINK = FORMATS["hermes"], THINKING["think"]
MARKS = frozenset(
    [
        *itertools.chain(*THINKING.values()),
        *(
            mark
            for one in FORMATS.values()
            for mark in (*one.marks, *(one.around or ()), *(one.values or ()))
            if mark and mark not in JSON_STRING
        ),
        *("<arg_key>", "</arg_key>", "[ARGS]", "[CALL_ID]", "<|channel>", "<tool_sep:opensource>"),
        *(
            "<｜tool▁sep｜>",
            "<|tool_call_argument_begin|>",
            NAMESPACE,
            "<|channel|>",
            "<|open|>",
            "<|sep|>",
            "<|close|>",
        ),
    ]
)
"""Marks that appear in outputs as ordinary text, though tokenizers may declare them special."""


def formats_of(
    template: str, tool_calls: str = "auto", reasoning: str = "auto"
) -> tuple[CallFormat | None, Delimiters | None]:
    """Return how a model writes calls and reasoning; None for each that it lacks. `template` is its chat template
    together with what that writes; the other two are [gateway] tool_calls and reasoning."""
    if tool_calls == "auto":
        tool_calls = next((name for name, told in TOLD_BY.items() if any(one in template for one in told)), "none")
    if reasoning == "auto":
        reasoning = next((name for name, marks in THINKING.items() if marks.closing in template), "none")
    return FORMATS.get(tool_calls), THINKING.get(reasoning)


def only_call(
    calls: CallFormat | None,
    tools: Sequence[Any],
    wanted: str,
    thinking: Delimiters | None = None,
    *,
    inside: bool = False,
) -> str | None:
    """Return the structural tag, as JSON, of an answer that consists of optional reasoning and one call of the tool
    `wanted` ("" for any). `inside`: the model is reasoning already. None if there is no such tool, or if the family
    writes no JSON."""
    offered = {name: schema for name, schema in schemas(tools).items() if wanted in ("", name)}
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


def only_json(schema: str, thinking: Delimiters, *, inside: bool = False) -> str:
    """Return the structural tag of an answer that consists of optional reasoning and JSON that fits a schema; see
    only_call."""
    return _tag(thinking, {"type": "json_schema", "json_schema": orjson.loads(schema)}, inside=inside)


def _tag(thinking: Delimiters | None, answer: dict[str, Any], *, inside: bool) -> str:
    """Return the tag as SGLang takes it (xgrammar, `structural_tag`)."""
    elements = [answer]
    if thinking is not None:
        opening = "" if inside else thinking.opening
        thought = {"type": "tag", "begin": opening, "content": {"type": "any_text"}, "end": thinking.closing}
        thought = thought if inside else {"type": "optional", "content": thought}
        # White space as JSON defines it. xgrammar's \s also includes a vertical tab, before which no JSON parser
        # begins.
        elements = [thought, {"type": "regex", "pattern": r"[ \t\r\n]*"}, *elements]
    return orjson.dumps({"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}).decode()


ARGUMENTS = ("arguments", "parameters")
"""Keys of a call in JSON. Templates of one family write the first, others the second, and models mix them up. If only
one is present, it counts. No family writes `args` or `input`, so text with those is no call."""
BESIDE = frozenset({"name", "id", "type"})
"""Keys that carry no arguments."""


def _calls(value: Any) -> list[ParsedCall] | None:
    """Read a call in JSON, or a list of calls. A call may lack its arguments, but not have them under another key."""
    found: list[ParsedCall | None] = []
    for one in value if isinstance(value, list) else [value]:
        if not isinstance(one, dict) or not isinstance(one.get("name"), str):
            return None
        keys = [key for key in ARGUMENTS if key in one]
        if len(keys) > 1 or (not keys and not BESIDE.issuperset(one)):
            return None
        arguments: Any = one[keys[0]] if keys else {}
        name: str = one["name"]
        found.append(
            ParsedCall(name, arguments) if isinstance(arguments, str) else call(name, arguments, one.get("id"))
        )
    return [one for one in found if one] if all(found) else None
