"""Chat messages made comparable, for trajectory rules that route turns by their messages (docs/folds.md, Policies).

The equality is that of the gateway, applied to what TurnCompleted stores. A string equals one text block; None, "" and
[] are equal. Tool arguments are compared parsed with sorted keys, or as text if they are not a JSON object of at most
MAX_DEPTH levels. Call ids, indexes and cache marks are ignored. Reasoning that an echo omits matches any; if present,
it must match after a strip.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from turnlog.processors.core.errors import BaseUnknown, BrokenMessages, PayloadNotFetched
from turnlog.processors.core.turns import TurnKey, key_of
from turnlog.schemas.canonical import canonical_text
from turnlog.schemas.events import TurnCompleted
from turnlog.schemas.json_depth import MAX_DEPTH, deeper_than
from turnlog.schemas.types import Payload

ROLE_OF_ITEM = {
    "function_call": "assistant",
    "reasoning": "assistant",
    "function_call_output": "tool",
    "custom_tool_call_output": "tool",
}
"""Role of Responses API items that carry a type in place of a role."""
SAME_ROLE = {"developer": "system"}
BILLING = "x-anthropic-billing-header:"
MARKS = frozenset({"cache_control", "id", "index", "call_id", "tool_call_id", "tool_use_id", "type", "status"})
"""Keys of a block that carry no content."""


class NotMessages(ValueError):
    """The payload is not a JSON list of message objects, or is nested too deeply."""


@dataclass(frozen=True, slots=True)
class ComparableMessage:
    """The comparable parts of one message."""

    role: str
    digest: bytes
    """16-byte digest of everything that is compared except reasoning."""
    reasoning: str

    def echoes(self, own: ComparableMessage) -> bool:
        """Whether this message, as a client sent it, equals `own`, as it was recorded."""
        return self.digest == own.digest and (not self.reasoning or self.reasoning == own.reasoning)


def messages(payload: bytes) -> tuple[ComparableMessage, ...]:
    """Parse the messages of a request. Raises NotMessages."""
    raw = _parse_json(payload)
    if not isinstance(raw, list):
        raise NotMessages(f"messages are a {type(raw).__name__}, not a list")
    return tuple(message(one) for one in raw)


def response(payload: bytes) -> ComparableMessage:
    """Parse the assistant's message. Raises NotMessages."""
    raw = _parse_json(payload)
    return message({"role": "assistant", **raw} if isinstance(raw, dict) else raw)


def message(raw: Any) -> ComparableMessage:
    """Parse one message in the shape of any served API. Raises NotMessages."""
    if not isinstance(raw, dict):
        raise NotMessages(f"a message is a {type(raw).__name__}, not an object")
    role = str(raw.get("role") or ROLE_OF_ITEM.get(str(raw.get("type")), "user"))
    said = _Said()
    said.content(raw.get("content") if raw.get("content") else raw.get("output"))
    item = raw.get("type") == "function_call"
    said.call(raw) if item else said.calls(raw.get("tool_calls"))
    said.reasoning(raw.get("reasoning_content") or raw.get("reasoning") or raw.get("summary"))
    role = SAME_ROLE.get(role, role)
    name = "" if item else str(raw.get("name") or "")
    about = [role, "\n".join(said.texts), name, said.found, said.others]
    digest = hashlib.blake2b(canonical_text(about, spaces=True).encode(), digest_size=16).digest()
    return ComparableMessage(role, digest, "\n".join(said.thoughts).strip())


def _parse_json(payload: bytes) -> Any:
    try:
        text = payload.decode(json.detect_encoding(payload), "surrogatepass")
        deep = deeper_than(text)
        parsed = None if deep else json.loads(text)
    except ValueError as error:
        raise NotMessages(f"not JSON: {error}") from error
    if deep:
        raise NotMessages(f"nested deeper than {MAX_DEPTH} levels")
    return parsed


class _Said:
    """The content of one message's blocks, by kind."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.found: list[list[Any]] = []
        """Tool calls: [name, arguments]."""
        self.others: list[Any] = []
        self.thoughts: list[str] = []

    def content(self, content: Any) -> None:
        """Add a string, a list of blocks, or nothing."""
        for block in _blocks(content):
            kind = block.get("type")
            if isinstance(block.get("text"), str):
                if not block["text"].startswith(BILLING):
                    self.texts.append(block["text"])
            elif kind == "thinking":
                self.thoughts.append(str(block.get("thinking", "")))
            elif kind == "tool_use":
                self.call(block)
            elif kind == "tool_result":
                self.content(block.get("content"))
                self.others.append(["tool_result", bool(block.get("is_error"))])
            else:
                self.others.append({key: value for key, value in block.items() if key not in MARKS})

    def calls(self, raw: Any) -> None:
        """Add OpenAI's tool calls."""
        for one in _blocks(raw):
            self.call(one["function"] if isinstance(one.get("function"), dict) else one)

    def call(self, raw: dict[str, Any]) -> None:
        """Add one tool call, in any API's shape."""
        self.found.append([str(raw.get("name")), _arguments(raw.get("arguments", raw.get("input")))])

    def reasoning(self, raw: Any) -> None:
        """Add reasoning, as text or as the summary blocks of the Responses API."""
        self.thoughts += [str(block.get("text", "")) for block in _blocks(raw)]


def _blocks(content: Any) -> Iterable[dict[str, Any]]:
    if not content:
        return ()
    many = content if isinstance(content, list) else [content]
    return [block if isinstance(block, dict) else {"text": str(block)} for block in many]


def _arguments(raw: Any) -> Any:
    if not isinstance(raw, str):
        return raw or {}
    try:
        parsed = None if deeper_than(raw) else json.loads(raw or "{}")
    except ValueError:
        return raw.strip()
    return parsed if isinstance(parsed, dict) else raw.strip()


@dataclass(frozen=True, slots=True, eq=False)
class Dialogue:
    """A turn's request, as what it adds to its base's dialogue, and the response to it."""

    base: Dialogue | None
    new: tuple[ComparableMessage, ...]
    response: ComparableMessage

    @property
    def silent(self) -> bool:
        """True if the request has no message, neither its own nor a base's."""
        return self.base is None and not self.new


class Dialogues:
    """Dialogues by turn. A base's record precedes those of its continuations in agent.turns."""

    def __init__(self) -> None:
        self._of: dict[TurnKey, Dialogue] = {}

    def add(self, event: TurnCompleted) -> None:
        """Store the first record of a turn.

        Raises BrokenMessages if its messages are not JSON, BaseUnknown if its base has no readable record before it,
        and PayloadNotFetched for a BlobRef.
        """
        base = None
        if event.base_turn is not None:
            base = self._of.get(key_of(event.base_turn))
            if base is None:
                raise BaseUnknown(
                    event.session_id, event.turn, f"base_turn {event.base_turn} has no readable record before it",
                    "a base's TurnCompleted stands before its continuation's in agent.turns",
                )  # fmt: skip
        try:
            new = messages(_inline(event, "new_messages", event.new_messages))
            said = response(_inline(event, "response", event.response))
        except NotMessages as error:
            raise BrokenMessages(
                event.session_id, event.turn, str(error), "new_messages is a JSON list, response a JSON object"
            ) from error
        self._of[key_of(event.turn)] = Dialogue(base, new, said)

    def __getitem__(self, turn: TurnKey) -> Dialogue:
        """Return the dialogue of a turn whose record was not rejected."""
        return self._of[turn]


def _inline(event: TurnCompleted, field: str, payload: Payload) -> bytes:
    if not isinstance(payload, bytes):
        raise PayloadNotFetched(event.session_id, field)
    return payload
