"""A session for readers: its turns in order, the messages of each, tool calls with their results, and the place of each
turn in the tree. Everything comes from the index.

Messages of all APIs that the gateway supports are reduced to a few kinds of part; anything else is shown as JSON.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import Any

import orjson

from turnlog.consumers.index.reader import Index, Row, SessionView, where_of
from turnlog.plugins.dashboard.harmless import DATA_URL, raster
from turnlog.processors.core.lineages import kind_of_path
from turnlog.schemas.json_depth import deeper_than

ROLES = {
    "developer": "system", "function_call": "assistant", "reasoning": "assistant", "function_call_output": "tool",
    "custom_tool_call_output": "tool",
}  # fmt: skip
"""Chat roles, and item types of the Responses API that have no role, by the role shown to readers."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking", "summary")
TEXTS = frozenset({"text", "input_text", "output_text", "refusal"})
IMAGES = frozenset({"image", "image_url", "input_image"})
CALLS = frozenset({"tool_use", "function_call"})
RESULTS = frozenset({"tool_result", "function_call_output", "custom_tool_call_output"})
OFF_MAIN = frozenset({"sub_agent", "side_call", "compaction", "player"})
Key = tuple[str, int]
"""(epoch, turn index)"""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a message."""

    kind: str
    """text | thought | image | call | result | other"""
    text: str = ""
    """Text of the part. For an image, its name among the session's images; empty if it cannot be shown."""
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class MessageView:
    """A message."""

    role: str
    parts: Sequence[Part]
    name: str = ""

    @property
    def plain(self) -> str:
        """Text parts and results, joined by line breaks."""
        return "\n".join(part.text for part in self.parts if part.kind in ("text", "result"))


@dataclass(frozen=True, slots=True)
class ToolCallView:
    """A tool call of a response."""

    call_id: str
    tool: str
    arguments: Sequence[tuple[str, str]]
    """(name, value as text) of each argument; a single one without a name if the arguments are not an object."""
    row: Row | None
    """Row of tool_calls; None if the agent ran the call by itself."""


@dataclass(slots=True)
class TurnView:
    """A turn with its messages and its place in the tree."""

    number: int
    """Number in the session from 0, as used by `turnlog log why SESSION:TURN:TOKEN`."""
    row: Row
    snapshot: Row | None
    messages: Sequence[MessageView]
    """Messages beyond those of its base."""
    response: MessageView | None
    calls: Sequence[ToolCallView]
    base: int | None
    """Number of the turn that it continues."""
    kind: str
    """root, append or branch: how its tokens continue those of its base. sub_agent and side_call come from the
    lineage."""
    why: str
    """Reason why it is not an append."""
    lane: int = 0
    children: int = 0

    @property
    def place(self) -> str:
        return where_of(self.row["place"])


@dataclass(slots=True)
class ConversationView:
    """All turns of a session."""

    turns: Sequence[TurnView]
    lanes: int
    images: Mapping[str, bytes] = field(default_factory=dict)
    """Raster images of the messages, by sha256."""

    @property
    def masked(self) -> dict[str, int]:
        """Number of masked places in its turns, by kind."""
        total: Counter[str] = Counter()
        for turn in self.turns:
            total.update(_parse_json(turn.row["redacted"]) or {})
        return dict(sorted(total.items()))


class MessageReader:
    """Reader of messages that collects their images."""

    def __init__(self) -> None:
        self.images: dict[str, bytes] = {}

    def messages(self, text: str | None) -> list[MessageView]:
        """Parse the messages of a request. Messages of large records are not in the index."""
        if text is None:
            return [MessageView("stored apart", [Part("other", "too large for the index: see the record")])]
        raw = _parse_json(text)
        if not isinstance(raw, list):
            return [MessageView("unreadable", [Part("other", text)])] if text else []
        return [self.message(each) for each in raw]

    def message(self, raw: Any, role: str = "user") -> MessageView:
        """Parse one message."""
        if not isinstance(raw, dict):
            return MessageView(role, [Part("other", _json(raw))])
        said = str(raw.get("role") or ROLES.get(str(raw.get("type")), role))
        parts = [Part("thought", str(raw[key])) for key in THOUGHTS if isinstance(raw.get(key), str) and raw[key]][:1]
        content = raw["content"] if raw.get("content") is not None else raw.get("output")
        if raw.get("type") in CALLS:
            content = [raw]
        answers = str(raw.get("tool_call_id") or (raw.get("call_id") if raw.get("type") in RESULTS else "") or "")
        parts += [
            Part("result", part.text, answers) if answers and part.kind == "text" else part
            for part in self._parts(content)
        ]
        return MessageView(ROLES.get(said, said), parts, str(raw.get("name") or ""))

    def _parts(self, content: Any) -> Iterator[Part]:
        if isinstance(content, str):
            if content:
                yield Part("text", content)
            return
        for block in content if isinstance(content, list) else [] if content is None else [content]:
            yield from self._part(block)

    def _part(self, block: Any) -> Iterator[Part]:
        if isinstance(block, str):
            yield Part("text", block)
            return
        kind = block.get("type") if isinstance(block, dict) else None
        if kind in TEXTS and isinstance(block.get("text"), str):
            yield Part("text", block["text"])
        elif kind == "thinking":
            yield Part("thought", str(block.get("thinking", "")))
        elif kind in IMAGES:
            yield Part("image", self._image(block))
        elif kind in CALLS:
            yield Part("call", "", str(block.get("call_id") or block.get("id") or ""))
        elif kind in RESULTS:
            answers = str(block.get("tool_use_id") or block.get("call_id") or "")
            inner = block.get("content") if block.get("content") is not None else block.get("output")
            for part in self._parts(inner):
                yield Part("result", part.text, answers) if part.kind == "text" else part
        else:
            yield Part("other", _json(block))

    def _image(self, block: Mapping[str, Any]) -> str:
        """Store an image and return its name. Return "" for an image at a URL, and for content that is not a raster
        image."""
        url = block.get("image_url")
        url = url.get("url") if isinstance(url, dict) else url
        source = block.get("source")
        data = source.get("data") if isinstance(source, dict) else None
        if isinstance(url, str) and (found := DATA_URL.fullmatch(url)):
            data = found[1]
        if not isinstance(data, str):
            return ""
        try:
            content = base64.b64decode(data, validate=False)
        except binascii.Error:
            return ""
        if raster(content) is None:
            return ""
        name = hashlib.sha256(content).hexdigest()
        self.images[name] = content
        return name


def conversation(view: SessionView) -> ConversationView:
    """Build the conversation of a session. Turns are numbered in the order of their snapshots; those without one come
    last."""
    reader = MessageReader()
    snapshots: dict[Key, Row] = {_key(row): row for row in view.snapshots}
    rank = {key: number for number, key in enumerate(snapshots)}
    rows = sorted(view.turns, key=lambda row: (rank.get(_key(row), len(rank)), row["place"]))
    numbers = {_key(row): number for number, row in enumerate(rows)}
    kinds = _lineages(view)
    calls = {row["call_id"]: row for row in view.calls}
    turns = [_turn(reader, row, snapshots.get(_key(row)), numbers, kinds, calls) for row in rows]
    for turn in turns:
        if turn.base is not None:
            turns[turn.base].children += 1
    return ConversationView(turns, _lanes(turns), reader.images)


def prompts(index: Index, sessions: Sequence[str], *, most: int | None = None) -> dict[str, str]:
    """Return the last user text in the first request of each session, cut to `most` characters. Sessions without one
    are left out, and so are those whose request is too large for the index."""
    marks = ",".join("?" * len(sessions))
    rows = index.rows(
        f"SELECT session_id, messages FROM turns WHERE session_id IN ({marks}) AND base_index IS NULL "
        "AND messages IS NOT NULL ORDER BY place DESC",
        *sessions,
    )
    found = {}
    for row in rows:  # newest first: the first request of a session overwrites the others
        asked = [one.plain for one in MessageReader().messages(row["messages"]) if one.role == "user" and one.plain]
        if asked:
            found[row["session_id"]] = asked[-1][:most]
    return found


def align_turns(left: Sequence[TurnView], right: Sequence[TurnView]) -> list[tuple[TurnView | None, TurnView | None]]:
    """Align the turns of two sessions in their order: turns of the main lineage by their number in it, and turns of a
    sub-agent beside those of the other session if both called it at that point."""
    a, b = ([(turn.kind in OFF_MAIN, turn.row["agent_path"]) for turn in side] for side in (left, right))
    found: list[tuple[TurnView | None, TurnView | None]] = []
    for _, i, j, k, m in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        found += zip_longest(left[i:j], right[k:m])
    return found


def said_alike(left: TurnView | None, right: TurnView | None) -> bool:
    """Return whether two turns have equal messages and responses. Ids of tool calls are ignored, because they differ by
    session."""
    return left is not None and right is not None and _words(left) == _words(right)


def _words(turn: TurnView) -> list[Any]:
    said = [*turn.messages, *([turn.response] if turn.response else [])]
    spoken = [(one.role, [(part.kind, part.text) for part in one.parts]) for one in said]
    return [spoken, [(call.tool, call.arguments) for call in turn.calls]]


def _turn(
    reader: MessageReader, row: Row, snapshot: Row | None, numbers: Mapping[Key, int], kinds: Mapping[Key, str],
    calls: Mapping[str, Row],
) -> TurnView:  # fmt: skip
    key = _key(row)
    raw = _parse_json(row["response"])
    response = None if raw is None else reader.message(raw, "assistant")
    base = numbers.get((row["base_epoch"], row["base_index"])) if row["base_epoch"] is not None else None
    kind = kinds.get(key, "main")
    if kind == "main":
        kind = snapshot["boundary"] if snapshot else "append" if base is not None else "root"
    why = "" if snapshot is None or snapshot["boundary"] == "append" else snapshot["boundary_reason"]
    return TurnView(
        numbers[key], row, snapshot, reader.messages(row["messages"]), response, list(_calls(raw, calls)), base, kind,
        why,
    )  # fmt: skip


def _calls(response: Any, rows: Mapping[str, Row]) -> Iterator[ToolCallView]:
    if not isinstance(response, dict):
        return
    content = response.get("content")
    blocks = [each for each in content if isinstance(each, dict)] if isinstance(content, list) else []
    asked = response.get("tool_calls")
    for raw in [*(asked if isinstance(asked, list) else []), *(each for each in blocks if each.get("type") in CALLS)]:
        if not isinstance(raw, dict):
            continue
        function = raw.get("function") if isinstance(raw.get("function"), dict) else raw
        assert isinstance(function, dict)
        identity = str(raw.get("call_id") or raw.get("id") or "")
        given = function.get("arguments") if function.get("arguments") is not None else function.get("input")
        yield ToolCallView(identity, str(function.get("name") or "?"), arguments(given), rows.get(identity))


def arguments(raw: Any) -> list[tuple[str, str]]:
    """Return the arguments of a tool call as (name, text)."""
    value = _parse_json(raw) if isinstance(raw, str) else raw
    if isinstance(value, dict):
        return [(str(name), each if isinstance(each, str) else _json(each)) for name, each in value.items()]
    return [("", raw if isinstance(raw, str) else _json(raw))] if raw not in (None, "") else []


def _lineages(view: SessionView) -> dict[Key, str]:
    """Return the lineage kind of each turn: from the tree, or from what the harness reported if no tree was
    assembled."""
    found = {
        _key(row): kind_of_path(row["agent_path"]) for row in view.turns if row["agent_path"] not in (None, "", "main")
    }
    if view.tree is not None:
        names = orjson.loads(view.tree["lineages"])
        for node in orjson.loads(view.tree["nodes"]):
            epoch, index = node["turn"]
            found[epoch, index] = str(names[node["lineage"]])
    return found


def _lanes(turns: Sequence[TurnView]) -> int:
    """Assign a lane to each turn, and return the number of lanes. The first turn that continues its base takes the
    base's lane; others take the first lane that no later turn continues."""
    left = [turn.children for turn in turns]
    ends: list[int] = []
    """Last turn of each lane."""
    for turn in turns:
        if turn.base is not None:
            left[turn.base] -= 1
        lane = next((lane for lane, end in enumerate(ends) if end == turn.base), None)
        if lane is None:
            lane = next((lane for lane, end in enumerate(ends) if left[end] == 0 and lane > 0), None)
        if lane is None:
            lane = len(ends)
            ends.append(turn.number)
        turn.lane = lane
        ends[lane] = turn.number
    return len(ends)


def _key(row: Row) -> Key:
    return row["epoch"], row["turn_index"]


def _parse_json(text: str | None) -> Any:
    """Parse JSON. Return None if it is malformed or too deeply nested."""
    if not text or deeper_than(text.encode()):
        return None
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


def _json(value: Any) -> str:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()
