"""Readers of tool calls by their syntax; `formats` names the model families that use each.

A reader gets the text between a family's marks, and returns its calls, or None if it is not exactly what the family's
template writes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from typing import Any

from turnlog.producers.gateway.parsers.parser import ParsedCall, Part, Reasoning, Schema, Text, compact, exact, leading
from turnlog.schemas.json_depth import MAX_DEPTH

Reader = Callable[[str, Sequence[Any]], Sequence[ParsedCall] | None]
NAME = re.compile(r"[^\s<>{}\[\]\"]+")


def schemas(tools: Sequence[Any]) -> dict[str, Any]:
    """Return the parameter schemas of the offered tools, by name."""
    functions = [one.get("function") for one in tools if isinstance(one, dict)]
    named = [one for one in functions if isinstance(one, dict) and isinstance(one.get("name"), str)]
    return {one["name"]: one.get("parameters") for one in named}


def call(name: str, arguments: Any, named: Any = "") -> ParsedCall | None:
    """Make a call, with an id `named` that the model wrote; None if there is no name, or if the arguments are no
    object."""
    if not name or not isinstance(arguments, dict):
        return None
    return ParsedCall(name, compact(arguments), named if isinstance(named, str) else "")


def pairs(text: str, pair: str, closing: str) -> list[tuple[str, str]] | None:
    """Return keys and values, with nothing but white space between them; None if the text holds anything else. `pair`
    is a pattern with the groups `key` and `value`."""
    *pieces, last = text.split(closing)
    found = [re.fullmatch(pair, piece, re.DOTALL) for piece in pieces]
    values = [(one["key"].strip(), one["value"]) for one in found if one]
    return values if all(found) and not last.strip() else None


def by_schema(
    name: str, values: list[tuple[str, str]] | None, tools: Sequence[Any], otherwise: Sequence[str]
) -> list[ParsedCall] | None:
    """Return a call whose values are typed by the tool's schema; None if it is malformed."""
    if values is None or not NAME.fullmatch(name):
        return None
    schema = Schema(schemas(tools).get(name))
    found = call(name, {key: schema.value(key, text, otherwise=otherwise) for key, text in values})
    return [found] if found else None


def tagged_reader(name_ends: str, pair: str, closing: str) -> Reader:
    """Return a reader of NAME, `name_ends`, and parameters that match `pair`, each up to `closing`. The schema types
    their values."""

    def read(body: str, tools: Sequence[Any]) -> Sequence[ParsedCall] | None:
        name, ends, rest = body.partition(name_ends)
        return by_schema(name.strip(), pairs(rest, pair, closing) if ends else None, tools, ("string",))

    return read


def dsml(body: str, _: Sequence[Any]) -> Sequence[ParsedCall] | None:
    """Read NAME"> and parameters, each of which states whether it is text or JSON."""
    name, ends, rest = body.partition('">')
    pair = r'\s*<｜DSML｜parameter name="(?P<key>[^"]+" string="(?:true|false))">(?P<value>.*)'
    found = pairs(rest, pair, "</｜DSML｜parameter>") if ends else None
    values: dict[str, Any] = {}
    for key, text in found or ():
        named, _, kind = key.partition('" string="')
        if kind == "false" and (value := exact(text)) is None and text.strip() != "null":
            return None
        values[named] = text if kind == "true" else value
    made = None if found is None else call(name, values)
    return [made] if made else None


def objects(body: str) -> list[Any] | None:
    """Return JSON values from a list of them, or from a sequence; None for malformed JSON."""
    found, at = list[Any](), 0
    body = body.strip()
    while at < len(body):
        value, end = leading(body, at)
        if value is None or end <= at:
            return None
        found.append(value)
        at = end
    return found[0] if len(found) == 1 and isinstance(found[0], list) else found


def keyed_by_name(body: str, _: Sequence[Any]) -> Sequence[ParsedCall] | None:
    """Read [{NAME: arguments}, ...]."""
    found = []
    for one in objects(body) or [None]:
        if not isinstance(one, dict) or len(one) != 1:
            return None
        found += [call(name, arguments) for name, arguments in one.items()]
    return [one for one in found if one] if all(found) else None


def pythonic(body: str, _: Sequence[Any]) -> Sequence[ParsedCall] | None:
    """Read a Python list of calls with keyword arguments: [NAME(key='text', other=1), ...]."""
    try:
        tree = ast.parse(body.strip(), mode="eval").body
        listed = tree.elts if isinstance(tree, ast.List) else [tree]
        found = []
        for one in listed:
            if not isinstance(one, ast.Call) or one.args or not all(each.arg for each in one.keywords):
                return None
            arguments = {str(each.arg): _literal(each.value) for each in one.keywords}
            found.append(call(ast.unparse(one.func), arguments))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return [one for one in found if one] if found and all(found) else None


def _literal(node: ast.expr) -> Any:
    """Return a Python literal or a JSON value. Raises ValueError."""
    constants = {"true": True, "false": False, "null": None}
    if isinstance(node, ast.Name) and node.id in constants:
        return constants[node.id]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else _literal(key) for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("JSON has texts as keys")
        return {str(key): _literal(value) for key, value in zip(keys, node.values, strict=True)}
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(one) for one in node.elts]
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError("no value of JSON")
    return value


QUOTE = '<|"|>'
"""Delimiter of texts in Gemma 4's calls."""
BARE = re.compile(r"[^,{}\[\]:]+")


def gemma(body: str, _: Sequence[Any]) -> Sequence[ParsedCall] | None:
    """Read call:NAME{key:value, ...}, with texts between delimiters of their own."""
    started = re.match(r"\s*call:([^\s{}]+)(?=\{)", body)
    if started is None:
        return None
    try:
        arguments, at = _gemma_value(body, started.end(), 0)
    except (ValueError, IndexError):
        return None
    found = call(started[1], arguments) if not body[at:].strip() else None
    return [found] if found else None


def _gemma_value(text: str, at: int, depth: int) -> tuple[Any, int]:
    """Return (the value at a position, the position after it). Raises ValueError, IndexError."""
    if depth > 100:
        raise ValueError("too deep")
    if text.startswith(QUOTE, at):
        end = text.index(QUOTE, at + len(QUOTE))
        return text[at + len(QUOTE) : end], end + len(QUOTE)
    if text[at] in "{[":
        closing, mapping = "}]"["{[".index(text[at])], dict[str, Any]()
        listed, keyed, at = list[Any](), text[at] == "{", at + 1
        while text[at] != closing:
            if keyed:
                key, at = _gemma_key(text, at)
                mapping[key], at = _gemma_value(text, at + 1, depth + 1)
            else:
                value, at = _gemma_value(text, at, depth + 1)
                listed.append(value)
            if text[at] == ",":
                at += 1
            elif text[at] != closing:
                raise ValueError("neither a comma nor an end")
        return (mapping if keyed else listed), at + 1
    bare = BARE.match(text, at)
    if bare is None:
        raise ValueError("no value")
    word = bare[0].strip()
    value = None if word in ("null", "None") else exact(word)
    if value is None and word not in ("null", "None"):
        raise ValueError("no value")
    return value, bare.end()


def _gemma_key(text: str, at: int) -> tuple[str, int]:
    if text.startswith(QUOTE, at):
        end = text.index(QUOTE, at + len(QUOTE))
        key, at = text[at + len(QUOTE) : end], end + len(QUOTE)
    else:
        end = text.index(":", at)
        key, at = text[at:end], end
    if text[at] != ":":
        raise ValueError("no key")
    return key, at


NAMESPACE = "]<]minimax[>["
"""Prefix of every tag in MiniMax M3's calls, which occurs in no value."""
TAG = re.compile(r"<(?P<ends>/?)(?P<key>[^<>]+)>(?P<text>.*)", re.DOTALL)


def elements(body: str, tools: Sequence[Any]) -> Sequence[ParsedCall] | None:
    """Read NAME"> and an element for each argument. An object has an element for each key, a list an `item` for each
    entry."""
    name, ends, rest = body.partition('">')
    between, *tags = rest.split(NAMESPACE)
    if not ends or between.strip():
        return None
    opened: list[tuple[str, str, list[tuple[str, Any]], Schema]] = [
        ("", "", [], Schema(schemas(tools).get(name.strip())))
    ]
    for tag in tags:
        found = TAG.fullmatch(tag)
        if found is None or len(opened) > MAX_DEPTH:
            return None
        if not found["ends"]:
            opened.append((found["key"], found["text"], [], opened[-1][3].within(found["key"])))
            continue
        key, text, inner, _ = opened.pop()
        if key != found["key"] or not opened or found["text"].strip() or (inner and text.strip()):
            return None
        opened[-1][2].append((key, _element(opened[-1][3], key, text, inner)))
    made = call(name.strip(), dict(opened[0][2])) if len(opened) == 1 else None
    return [made] if made else None


def _element(schema: Schema, key: str, text: str, inner: list[tuple[str, Any]]) -> Any:
    """Return the value of an argument or of a part of one, of a type that the schema of the enclosing value allows."""
    kinds = schema.kinds(key) or frozenset()
    if inner:
        listed = "object" not in kinds and all(each == "item" for each, _ in inner)
        return [value for _, value in inner] if listed else dict(inner)
    if not text and kinds and kinds <= {"array", "object", "null"}:
        return [] if "array" in kinds else {}
    return schema.value(key, text, otherwise=("string",))


WITHIN = r"(?:(?!<\|(?:open|close)\|>).)*"
XTML = re.compile(
    rf"(?:(?:<\|open\|>think<\|sep\|>)?(?P<think>{WITHIN})<\|close\|>think<\|sep\|>)?"
    rf"(?:(?:<\|open\|>response<\|sep\|>)?(?P<response>{WITHIN})(?:<\|close\|>response<\|sep\|>|\Z))?"
    r"(?:<\|open\|>tools<\|sep\|>(?P<tools>.*)<\|close\|>tools<\|sep\|>)?(?:<\|close\|>message<\|sep\|>)?\s*",
    re.DOTALL,
)
"""An answer of Kimi K3; the prompt may have opened its first element."""
XTML_CALL = re.compile(r'<\|open\|>call tool="(?P<name>[^"]+)" index="\d+"<\|sep\|>(?P<arguments>.*)', re.DOTALL)
XTML_ARGUMENT = r'<\|open\|>argument key="(?P<key>[^"]*" type="\w+)"<\|sep\|>(?P<value>.*)'
XTML_JSON = re.compile(r'<\|open\|>json type="object"<\|sep\|>(?P<text>.*)<\|close\|>json<\|sep\|>', re.DOTALL)


def xtml(answer: str, tools: Sequence[Any]) -> Sequence[Part] | None:
    """Parse a whole answer: reasoning, the response, and calls, each argument of which states its type."""
    said = XTML.fullmatch(answer)
    if said is None:
        return None
    parts: list[Part] = [Reasoning(said["think"])] if said["think"] else []
    parts += [Text(said["response"])] if said["response"] else []
    if said["tools"] is None:
        return parts or None
    *blocks, last = said["tools"].split("<|close|>call<|sep|>")
    found = [_xtml_call(block) for block in blocks]
    return [*parts, *(one for one in found if one)] if tools and found and all(found) and not last.strip() else None


def _xtml_call(block: str) -> ParsedCall | None:
    said = XTML_CALL.fullmatch(block.strip())
    if said is None:
        return None
    if whole := XTML_JSON.fullmatch(said["arguments"]):
        return call(_unescape(said["name"]), exact(whole["text"]))
    values: dict[str, Any] = {}
    found = pairs(said["arguments"], XTML_ARGUMENT, "<|close|>argument<|sep|>")
    for named, text in found or ():
        key, _, kind = named.partition('" type="')
        values[_unescape(key)] = value = text if kind == "string" else exact(text)
        if value is None and kind != "null":
            return None
    return None if found is None else call(_unescape(said["name"]), values)


def _unescape(attribute: str) -> str:
    return attribute.replace("&quot;", '"').replace("&amp;", "&")


def recipients(answer: str, tools: Sequence[Any]) -> Sequence[Part] | None:
    """Parse a whole answer of messages separated by >>>. The first line of each names its recipient: `all`, or an
    offered tool, followed by its arguments. A piece that names no recipient belongs to the message before it, because
    text may contain >>> as well."""
    known = "|".join(map(re.escape, ("all", *sorted(schemas(tools), key=len, reverse=True))))
    _, *said = re.split(rf"(?:^|>>>)({known})\n", answer)
    if not re.match(rf"(?:>>>)?(?:{known})\n", answer):
        return None
    parts = list[Part]()
    for to, text in zip(said[::2], said[1::2], strict=True):
        part = Text(text) if to == "all" else call(to, exact(text))
        if part is None:
            return None
        parts.append(part)
    return parts


HARMONY = re.compile(
    r"(?: to=(?P<first>\S+?))?\s*<\|channel\|>(?P<channel>\w+)(?: to=(?P<second>[^\s<]+))?"
    r"\s*(?:(?:<\|constrain\|>)?\w+)?\s*<\|message\|>(?P<text>.*)",
    re.DOTALL,
)
"""A message of an answer, after its role."""


def harmony(answer: str, tools: Sequence[Any]) -> Sequence[Part] | None:
    """Parse a whole answer of several messages. Analysis is reasoning, commentary to a function is a call, and final
    messages, or commentary to nobody, are text. Without tools, nothing is a call."""
    parts = list[Part]()
    for one in re.split(r"<\|(?:end|call)\|>\s*<\|start\|>assistant", answer):
        said = HARMONY.fullmatch(re.sub(r"<\|(?:end|call|return)\|>\s*$", "", one))
        if said is None:
            return None
        to, text = said["first"] or said["second"] or "", said["text"]
        if said["channel"] == "analysis" and not to:
            parts.append(Reasoning(text))
        elif not to:
            parts.append(Text(text))
        else:
            found = call(to.removeprefix("functions."), exact(text)) if tools and to.startswith("functions.") else None
            if found is None:
                return None
            parts.append(found)
    return parts
