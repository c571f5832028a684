"""Chat messages made comparable: what a client echoes must be found again although its shape has changed.

A string equals one text block; None, "" and [] are equal; tool arguments are compared parsed with sorted keys; call ids
and indexes, cache marks and billing lines do not count. Reasoning that an echo leaves out matches any. A policy's text
has its tool calls as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from turnlog.producers.gateway import BadRequest
from turnlog.producers.gateway.images import Picture, picture
from turnlog.schemas.json_depth import deeper_than

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
BILLING = "x-anthropic-billing-header:"


@dataclass(frozen=True, slots=True)
class Message:
    """One message: what the chat template is given, and what it is compared by."""

    role: str
    template: dict[str, Any]
    """For the chat template: content as text, tool arguments parsed."""
    digest: bytes
    """Of everything that counts but reasoning."""
    reasoning: str
    pictures: tuple[Picture, ...] = ()
    """In order; the template has a part {"type": "image"} for each."""


def listed(raw: Any) -> list[Any]:
    """The messages of a request as they came. Raises BadRequest."""
    if not isinstance(raw, list) or not raw:
        raise BadRequest("messages must be a list of at least one message", param="messages")
    return raw


def normalised(raw: Any) -> tuple[Message, ...]:
    """Messages. Raises BadRequest naming the message."""
    return tuple([message(one, f"messages[{index}]") for index, one in enumerate(listed(raw))])


def message(raw: Any, where: str) -> Message:
    """One message in OpenAI's shape. Raises BadRequest."""
    if not isinstance(raw, dict) or not isinstance(raw.get("role"), str) or raw["role"] not in ROLES:
        raise BadRequest(f"{where} must be an object whose role is one of {', '.join(ROLES)}", param=where)
    role = ROLES[raw["role"]]
    content, pictures = _content(raw.get("content"), where)
    reasoning = str(raw.get("reasoning_content") or raw.get("reasoning") or "").strip()
    template: dict[str, Any] = {"role": role, "content": content}
    canonical: list[Any] = [role, content, *(one.ref.sha256 for one in pictures)]
    if raw.get("name"):
        template["name"] = raw["name"]
        canonical.append(["name", str(raw["name"])])
    if role == "assistant" and raw.get("tool_calls"):
        template["tool_calls"] = _calls(raw["tool_calls"], where)
        canonical.append([_canonical(call["function"]) for call in template["tool_calls"]])
    if role == "tool" and raw.get("tool_call_id"):
        template["tool_call_id"] = raw["tool_call_id"]
    if reasoning:
        template["reasoning_content"] = reasoning
    digest = hashlib.blake2b(orjson.dumps(canonical, option=orjson.OPT_SORT_KEYS), digest_size=16).digest()
    return Message(role, template, digest, reasoning, pictures)


def joined(prefill: Message, response: Mapping[str, Any]) -> tuple[dict[str, Any], Message]:
    """A prefill and the response to it as the one message that an echo has: as it comes, and to compare."""
    raw = {**response, "content": prefill.template["content"] + (response["content"] or "")}
    if prefill.reasoning:
        raw["reasoning_content"] = prefill.reasoning
    return raw, message(raw, "response")


def system_digest(messages: Sequence[Message]) -> str:
    """Hex sha256 of the system messages before the first message of another role."""
    hashed = hashlib.sha256()
    for one in messages:
        if one.role != "system":
            break
        hashed.update(one.digest)
    return hashed.hexdigest()


def tools_digest(tools: Any) -> str:
    """Hex sha256 of the tool schemas in canonical JSON; none and an empty list are equal."""
    return hashlib.sha256(orjson.dumps(tools or [], option=orjson.OPT_SORT_KEYS)).hexdigest()


def _content(content: Any, where: str) -> tuple[Any, tuple[Picture, ...]]:
    """(text, no images), or the parts of a message with images and those images."""
    if not content:
        return "", ()
    if isinstance(content, str):
        return content, ()
    if not isinstance(content, list):
        raise BadRequest(f"{where}.content must be text or a list of text blocks", param=where)
    texts: list[str] = []
    parts: list[dict[str, str]] = []
    pictures: list[Picture] = []
    for block in content:
        if isinstance(block, dict) and block.get("type") == "image_url":
            pictures.append(picture(block, where))
            parts.append({"type": "image"})
            continue
        text = block if isinstance(block, str) else block.get("text") if isinstance(block, dict) else None
        if not isinstance(text, str):
            kind = block.get("type") if isinstance(block, dict) else type(block).__name__
            raise BadRequest(
                f"{where}.content has a block of type {kind!r}; text and image_url are served", param=where
            )
        if not text.startswith(BILLING):
            texts.append(text)
            parts.append({"type": "text", "text": text})
    return (parts, tuple(pictures)) if pictures else ("\n".join(texts), ())


def _calls(raw: Any, where: str) -> list[dict[str, Any]]:
    calls = []
    for index, one in enumerate(raw if isinstance(raw, list) else [raw]):
        function = one.get("function") if isinstance(one, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequest(f"{where}.tool_calls[{index}] must have function.name", param=where)
        call = {"type": "function", "function": {"name": function["name"], "arguments": _arguments(function)}}
        calls.append({"id": one["id"], **call} if one.get("id") else call)
    return calls


def _canonical(function: dict[str, Any]) -> list[str]:
    """Name and arguments, these as a text of their own: so they may be as deep as a whole body."""
    return [function["name"], orjson.dumps(function["arguments"], option=orjson.OPT_SORT_KEYS).decode()]


def _arguments(function: dict[str, Any]) -> Any:
    arguments = function.get("arguments") or {}
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = None if deeper_than(arguments) else orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments.strip()
    return parsed if isinstance(parsed, dict) else arguments.strip()


OPEN, CLOSE = "<tool_call>", "</tool_call>"
BLOCK = re.compile(re.escape(OPEN) + r"(.*?)" + re.escape(CLOSE), re.DOTALL)


@dataclass(frozen=True, slots=True)
class Call:
    """One call; `arguments` is compact JSON text."""

    name: str
    arguments: str


def split_calls(text: str) -> tuple[str, tuple[Call, ...]]:
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
