"""A session as a reader expects it: its turns in order, what was said in each, the calls with what came of them, and
where each turn hangs in the tree. From the index alone.

Messages of every API that the gateway speaks come down to a few kinds of part; what is none of them is shown as JSON.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import Any

import orjson

from turnlog.consumers.dashboard.harmless import DATA_URL, raster
from turnlog.consumers.index.reader import Index, Row, SessionView, where_of
from turnlog.schemas.json_depth import deeper_than

ROLES = {
    "developer": "system", "function_call": "assistant", "reasoning": "assistant", "function_call_output": "tool",
    "custom_tool_call_output": "tool",
}  # fmt: skip
"""Roles, and types of the Responses API that stand in place of one, by what a reader calls them."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking", "summary")
TEXTS = frozenset({"text", "input_text", "output_text", "refusal"})
IMAGES = frozenset({"image", "image_url", "input_image"})
CALLS = frozenset({"tool_use", "function_call"})
RESULTS = frozenset({"tool_result", "function_call_output", "custom_tool_call_output"})
OFF_MAIN = frozenset({"sub_agent", "side_call"})
Key = tuple[str, int]
"""(epoch, turn index)"""


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a message."""

    kind: str
    """text | thought | image | call | result | other"""
    text: str = ""
    """An image's is its name among the session's images; empty where it is none that can be shown."""
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class Said:
    """One message."""

    role: str
    parts: Sequence[Part]
    name: str = ""

    @property
    def plain(self) -> str:
        """Its texts."""
        return "\n".join(part.text for part in self.parts if part.kind in ("text", "result"))


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call of a response."""

    call_id: str
    tool: str
    arguments: Sequence[tuple[str, str]]
    """(name, value as text); one without a name where they are no object."""
    row: Row | None
    """Of tool_calls; None where the agent ran it by itself."""


@dataclass(slots=True)
class Turn:
    """One turn."""

    number: int
    """In the session, from 0: `turnlog why SESSION:TURN:TOKEN` counts so."""
    row: Row
    snapshot: Row | None
    messages: Sequence[Said]
    """Beyond those of its base."""
    response: Said | None
    calls: Sequence[Call]
    base: int | None
    """Number of the turn that it continues."""
    kind: str
    """root | append | branch, as its tokens continue the base's; sub_agent and side_call by lineage."""
    why: str
    """Why it is no append."""
    lane: int = 0
    children: int = 0

    @property
    def place(self) -> str:
        return where_of(self.row["place"])


@dataclass(slots=True)
class Conversation:
    """All of a session's turns."""

    turns: Sequence[Turn]
    lanes: int
    images: Mapping[str, bytes] = field(default_factory=dict)
    """By sha256: pictures that messages held, of raster formats alone."""


class MessageReader:
    """Reads messages, and keeps their pictures."""

    def __init__(self) -> None:
        self.images: dict[str, bytes] = {}

    def messages(self, text: str | None) -> list[Said]:
        """Of a request; where the record is large its messages stand apart."""
        if text is None:
            return [Said("stored apart", [Part("other", "too large for the index: the record holds it")])]
        raw = _parsed(text)
        if not isinstance(raw, list):
            return [Said("unreadable", [Part("other", text)])] if text else []
        return [self.message(each) for each in raw]

    def message(self, raw: Any, role: str = "user") -> Said:
        """One message."""
        if not isinstance(raw, dict):
            return Said(role, [Part("other", _json(raw))])
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
        return Said(ROLES.get(said, said), parts, str(raw.get("name") or ""))

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
        """The name under which it is kept; empty for one of a URL, and for what is no picture of pixels."""
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


def conversation(view: SessionView) -> Conversation:
    """Of a session that the index holds. Turns are numbered in the order of their snapshots; one that has none comes
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
    return Conversation(turns, _lanes(turns), reader.images)


def prompts(index: Index, sessions: Sequence[str], *, most: int | None = None) -> dict[str, str]:
    """Session -> the last text of a user in its first request, cut to `most` characters; a session without one, and one
    whose request is too large for the index, is left out."""
    marks = ",".join("?" * len(sessions))
    rows = index.rows(
        f"SELECT session_id, messages FROM turns WHERE session_id IN ({marks}) AND base_index IS NULL "
        "AND messages IS NOT NULL ORDER BY place DESC",
        *sessions,
    )
    found = {}
    for row in rows:  # the first request of a session comes last, and stays
        asked = [one.plain for one in MessageReader().messages(row["messages"]) if one.role == "user" and one.plain]
        if asked:
            found[row["session_id"]] = asked[-1][:most]
    return found


def aligned(left: Sequence[Turn], right: Sequence[Turn]) -> list[tuple[Turn | None, Turn | None]]:
    """Turns of two sessions beside each other, in the order of both: those of the main line by their number in it,
    those of a sub-agent beside the other's where both called it then."""
    a, b = ([(turn.kind in OFF_MAIN, turn.row["agent_path"]) for turn in side] for side in (left, right))
    found: list[tuple[Turn | None, Turn | None]] = []
    for _, i, j, k, m in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        found += zip_longest(left[i:j], right[k:m])
    return found


def said_alike(left: Turn | None, right: Turn | None) -> bool:
    """Whether two turns were asked and answered the same; ids of calls are each session's own."""
    return left is not None and right is not None and _words(left) == _words(right)


def _words(turn: Turn) -> list[Any]:
    said = [*turn.messages, *([turn.response] if turn.response else [])]
    spoken = [(one.role, [(part.kind, part.text) for part in one.parts]) for one in said]
    return [spoken, [(call.tool, call.arguments) for call in turn.calls]]


def _turn(
    reader: MessageReader, row: Row, snapshot: Row | None, numbers: Mapping[Key, int], kinds: Mapping[Key, str],
    calls: Mapping[str, Row],
) -> Turn:  # fmt: skip
    key = _key(row)
    raw = _parsed(row["response"])
    response = None if raw is None else reader.message(raw, "assistant")
    base = numbers.get((row["base_epoch"], row["base_index"])) if row["base_epoch"] is not None else None
    kind = kinds.get(key, "main")
    if kind == "main":
        kind = snapshot["boundary"] if snapshot else "append" if base is not None else "root"
    why = "" if snapshot is None or snapshot["boundary"] == "append" else snapshot["boundary_reason"]
    return Turn(
        numbers[key], row, snapshot, reader.messages(row["messages"]), response, list(_calls(raw, calls)), base, kind,
        why,
    )  # fmt: skip


def _calls(response: Any, rows: Mapping[str, Row]) -> Iterator[Call]:
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
        yield Call(identity, str(function.get("name") or "?"), arguments(given), rows.get(identity))


def arguments(raw: Any) -> list[tuple[str, str]]:
    """What a tool was given, as (name, text)."""
    value = _parsed(raw) if isinstance(raw, str) else raw
    if isinstance(value, dict):
        return [(str(name), each if isinstance(each, str) else _json(each)) for name, each in value.items()]
    return [("", raw if isinstance(raw, str) else _json(raw))] if raw not in (None, "") else []


def _lineages(view: SessionView) -> dict[Key, str]:
    """Of each turn of the tree what its lineage is; where no tree was assembled the harness's word."""
    found = {
        _key(row): "side_call" if row["agent_path"].startswith("side") else "sub_agent"
        for row in view.turns
        if row["agent_path"] not in (None, "", "main")
    }
    if view.tree is not None:
        names = orjson.loads(view.tree["lineages"])
        for node in orjson.loads(view.tree["nodes"]):
            epoch, index = node["turn"]
            found[epoch, index] = str(names[node["lineage"]])
    return found


def _lanes(turns: Sequence[Turn]) -> int:
    """Give each turn a lane: its base's where it is the first to continue it, else the first that nobody continues any
    more. The number of lanes."""
    left = [turn.children for turn in turns]
    ends: list[int] = []
    """Of each lane the last turn."""
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


def _parsed(text: str | None) -> Any:
    """What JSON says; None of what is none, or is nested too deeply."""
    if not text or deeper_than(text.encode()):
        return None
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


def _json(value: Any) -> str:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()
