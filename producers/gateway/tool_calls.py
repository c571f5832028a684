"""Tool calls in a policy's text: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen)."""

from __future__ import annotations

import re
from dataclasses import dataclass

import orjson

from turnlog.schemas.json_depth import deeper_than

OPEN, CLOSE = "<tool_call>", "</tool_call>"
BLOCK = re.compile(re.escape(OPEN) + r"(.*?)" + re.escape(CLOSE), re.DOTALL)


@dataclass(frozen=True, slots=True)
class Call:
    """One call; `arguments` is compact JSON text."""

    name: str
    arguments: str


def parse(text: str) -> tuple[str, tuple[Call, ...]]:
    """(content, calls). What is not a well-formed call, or is nested too deeply, stays in the content: nothing that was
    sampled is lost, or a failure."""
    content, at = "", 0
    calls: list[Call] = []
    for match in BLOCK.finditer(text):
        call = _call(match[1])
        if call is None:
            continue
        outside = text[at : match.start()]
        content += outside.strip() if calls else outside.rstrip()
        calls.append(call)
        at = match.end()
    if not calls:
        return text, ()
    return content + text[at:].strip(), tuple(calls)


def settled(text: str) -> int:
    """How many characters of a growing text are content, whatever comes: none of a call that may be beginning, nor
    white space that a call would take away."""
    at = text.find(OPEN)
    if at < 0:
        at = len(text)
        for size in range(min(len(OPEN) - 1, at), 0, -1):
            if text.endswith(OPEN[:size]):
                at -= size
                break
    return len(text[:at].rstrip())


def _call(body: str) -> Call | None:
    if deeper_than(body):
        return None
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):
        return Call(value["name"], arguments)
    return Call(value["name"], orjson.dumps(arguments).decode()) if isinstance(arguments, dict) else None
