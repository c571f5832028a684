"""Readers of calls by their syntax; `formats` names the families that write them so.

Each reads what stands between a family's marks, and gives its calls, or None where that is none as the family's
template writes it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from typing import Any

from turnlog.producers.gateway.parsers.parser import Call, Part, Reasoning, Text
from turnlog.producers.gateway.parsers.values import Schema, compact, exact, leading
from turnlog.schemas.json_depth import MAX_DEPTH

Reader = Callable[[str, Sequence[Any]], Sequence[Call] | None]
NAME = re.compile(r"[^\s<>{}\[\]\"]+")


def schemas(tools: Sequence[Any]) -> dict[str, Any]:
    """Parameters of the tools that were offered, by name."""
    functions = [one.get("function") for one in tools if isinstance(one, dict)]
    named = [one for one in functions if isinstance(one, dict) and isinstance(one.get("name"), str)]
    return {one["name"]: one.get("parameters") for one in named}


def call(name: str, arguments: Any) -> Call | None:
    """None where there is no name, or where the arguments are no object."""
    return Call(name, compact(arguments)) if name and isinstance(arguments, dict) else None


def pairs(text: str, pair: str, closing: str) -> list[tuple[str, str]] | None:
    """Keys and values, with white space between them and nothing else; `pair` names its groups so."""
    *pieces, last = text.split(closing)
    found = [re.fullmatch(pair, piece, re.DOTALL) for piece in pieces]
    values = [(one["key"].strip(), one["value"]) for one in found if one]
    return values if all(found) and not last.strip() else None


def by_schema(
    name: str, values: list[tuple[str, str]] | None, tools: Sequence[Any], otherwise: Sequence[str]
) -> list[Call] | None:
    """A call whose values are read by what its tool's schema says of them."""
    if values is None or not NAME.fullmatch(name):
        return None
    schema = Schema(schemas(tools).get(name))
    found = call(name, {key: schema.value(key, text, otherwise=otherwise) for key, text in values})
    return [found] if found else None


def tagged(name_ends: str, pair: str, closing: str) -> Reader:
    """NAME, what ends it, and parameters that `pair` fits, each up to `closing`; the schema types their values."""

    def read(body: str, tools: Sequence[Any]) -> Sequence[Call] | None:
        name, ends, rest = body.partition(name_ends)
        return by_schema(name.strip(), pairs(rest, pair, closing) if ends else None, tools, ("string",))

    return read


def dsml(body: str, _: Sequence[Any]) -> Sequence[Call] | None:
    """NAME"> and parameters that say themselves whether they are text or JSON."""
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
    """JSON values: a list of them, or one behind the other."""
    found, at = list[Any](), 0
    body = body.strip()
    while at < len(body):
        value, end = leading(body, at)
        if value is None or end <= at:
            return None
        found.append(value)
        at = end
    return found[0] if len(found) == 1 and isinstance(found[0], list) else found


def keyed_by_name(body: str, _: Sequence[Any]) -> Sequence[Call] | None:
    """[{NAME: arguments}, ...]"""
    found = []
    for one in objects(body) or [None]:
        if not isinstance(one, dict) or len(one) != 1:
            return None
        found += [call(name, arguments) for name, arguments in one.items()]
    return [one for one in found if one] if all(found) else None


def pythonic(body: str, _: Sequence[Any]) -> Sequence[Call] | None:
    """A Python list of calls with keywords: [NAME(key='text', other=1), ...]"""
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
    """A value of Python's, or of JSON's. Raises ValueError."""
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
"""What stands around texts in Gemma 4's calls."""
BARE = re.compile(r"[^,{}\[\]:]+")


def gemma(body: str, _: Sequence[Any]) -> Sequence[Call] | None:
    """call:NAME{key:value, ...}, texts between marks of their own."""
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
    """(the value at a place, the place behind it). Raises ValueError, IndexError."""
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
"""What stands before every tag of MiniMax M3's calls, and in no value."""
TAG = re.compile(r"<(?P<ends>/?)(?P<key>[^<>]+)>(?P<text>.*)", re.DOTALL)


def elements(body: str, tools: Sequence[Any]) -> Sequence[Call] | None:
    """NAME"> and an element for each argument: objects have one for each key, lists one `item` for each of theirs."""
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
    """The value of an argument or of a part of one, of the type that the schema of what it is part of allows."""
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
"""An answer of Kimi K3's; the prompt may have opened its first element."""
XTML_CALL = re.compile(r'<\|open\|>call tool="(?P<name>[^"]+)" index="\d+"<\|sep\|>(?P<arguments>.*)', re.DOTALL)
XTML_ARGUMENT = r'<\|open\|>argument key="(?P<key>[^"]*" type="\w+)"<\|sep\|>(?P<value>.*)'
XTML_JSON = re.compile(r'<\|open\|>json type="object"<\|sep\|>(?P<text>.*)<\|close\|>json<\|sep\|>', re.DOTALL)


def xtml(answer: str, tools: Sequence[Any]) -> Sequence[Part] | None:
    """A whole answer: what was thought, the response, and calls, of which every argument says its type."""
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


def _xtml_call(block: str) -> Call | None:
    said = XTML_CALL.fullmatch(block.strip())
    if said is None:
        return None
    if whole := XTML_JSON.fullmatch(said["arguments"]):
        return call(_unescaped(said["name"]), exact(whole["text"]))
    values: dict[str, Any] = {}
    found = pairs(said["arguments"], XTML_ARGUMENT, "<|close|>argument<|sep|>")
    for named, text in found or ():
        key, _, kind = named.partition('" type="')
        values[_unescaped(key)] = value = text if kind == "string" else exact(text)
        if value is None and kind != "null":
            return None
    return None if found is None else call(_unescaped(said["name"]), values)


def _unescaped(attribute: str) -> str:
    return attribute.replace("&quot;", '"').replace("&amp;", "&")


def recipients(answer: str, tools: Sequence[Any]) -> Sequence[Part] | None:
    """A whole answer of messages with >>> between them, each to whoever its first line names: `all`, or a tool that was
    offered, by its arguments. What names nobody is part of the message before it, as text may hold >>>, too."""
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
"""A message of an answer, behind its role."""


def harmony(answer: str, tools: Sequence[Any]) -> Sequence[Part] | None:
    """A whole answer of several messages: analysis is reasoning, commentary to a function a call, and what is final, or
    commentary to nobody, text. Without tools nothing is a call."""
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
