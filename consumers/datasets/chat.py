"""Recorded messages in the chat format that people train on: OpenAI's, with every column there and null where absent.

Text blocks become one text; `developer` becomes `system`; tool arguments are JSON text. What these columns cannot hold
(images, audio) makes the message unreadable rather than wrong.
"""

from __future__ import annotations

from typing import Any

import orjson

from turnlog.consumers.datasets.errors import UnreadableMessage
from turnlog.schemas.json_depth import MAX_DEPTH, deeper_than

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
Message = dict[str, Any]
"""The fields of columns.MESSAGE."""


def messages_of(content: bytes, where: str) -> list[Message]:
    """The messages of a JSON list. Raises UnreadableMessage."""
    raw = _parsed(content, where)
    if not isinstance(raw, list):
        raise UnreadableMessage(f"{where}: messages are no list")
    return [message(each, f"{where}[{index}]") for index, each in enumerate(raw)]


def response_of(content: bytes, where: str) -> Message:
    """The assistant message of a turn. Raises UnreadableMessage."""
    found = message({"role": "assistant", **_object(_parsed(content, where), where)}, where)
    if found["role"] != "assistant":
        raise UnreadableMessage(f"{where}: the response is of role {found['role']}")
    return found


def message(raw: Any, where: str) -> Message:
    """One message. Raises UnreadableMessage."""
    fields = _object(raw, where)
    role = ROLES.get(str(fields.get("role")))
    if role is None:
        raise UnreadableMessage(f"{where}: role {fields.get('role')!r} is none of {', '.join(ROLES)}")
    calls = fields.get("tool_calls") or None
    reasoning = fields.get("reasoning_content") or fields.get("reasoning")
    return {
        "role": role,
        "content": _text(fields.get("content"), where),
        "reasoning_content": None if not reasoning else str(reasoning),
        "name": None if not fields.get("name") else str(fields["name"]),
        "tool_call_id": None if not fields.get("tool_call_id") else str(fields["tool_call_id"]),
        "tool_calls": None if calls is None else [_call(each, where) for each in _list(calls, where)],
    }


def tools_json(content: bytes | None, where: str) -> str:
    """Tool schemas as canonical JSON text; "[]" for none. Raises UnreadableMessage."""
    raw = _list(_parsed(content, where) if content else [], where)
    return orjson.dumps(raw, option=orjson.OPT_SORT_KEYS).decode()


def _text(content: Any, where: str) -> str:
    if not content:
        return ""
    if isinstance(content, str):
        return content
    texts = [each if isinstance(each, str) else _object(each, where).get("text") for each in _list(content, where)]
    if not all(isinstance(text, str) for text in texts):
        raise UnreadableMessage(f"{where}: content has a block that is no text")
    return "\n".join(texts)  # type: ignore[arg-type]


def _call(raw: Any, where: str) -> dict[str, Any]:
    function = _object(_object(raw, where).get("function"), where)
    if not isinstance(function.get("name"), str):
        raise UnreadableMessage(f"{where}: a tool call has no function.name")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = orjson.dumps(arguments or {}, option=orjson.OPT_SORT_KEYS).decode()
    identity = raw.get("id")
    return {
        "id": None if identity is None else str(identity),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _parsed(content: bytes, where: str) -> Any:
    if deeper_than(content):
        raise UnreadableMessage(f"{where}: JSON nested deeper than {MAX_DEPTH} levels")
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise UnreadableMessage(f"{where}: not JSON: {error}") from error


def _object(raw: Any, where: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise UnreadableMessage(f"{where}: {type(raw).__name__} where an object was expected")
    return raw


def _list(raw: Any, where: str) -> list[Any]:
    if not isinstance(raw, list):
        raise UnreadableMessage(f"{where}: {type(raw).__name__} where a list was expected")
    return raw
