"""Incremental parser of an output's text, into parts that only grow: an answer that is not streamed is the fold of the
same stream.

Text and reasoning are emitted as soon as nothing that follows can change them, a call when it closes. A malformed call,
or one that never closes, stays text: nothing that was sampled is lost or causes a failure. White space around reasoning
and calls belongs to neither.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from turnlog.schemas.json_depth import MAX_DEPTH, deeper_than

DECODER = json.JSONDecoder()
LONG = re.compile(r"[0-9]{19}")
"""Matches the digits of an integer that may exceed 64 bits, which orjson reads as a float."""


def exact(text: str, levels: int = MAX_DEPTH) -> Any:
    """Return the value of a JSON text, with integers in full. None for malformed JSON, for JSON nested deeper than the
    log accepts, and for a number too long for Python (4,300 digits)."""
    try:
        value = None if deeper_than(text, levels) else orjson.loads(text)
        return json.loads(text) if value is not None and LONG.search(text) else value
    except ValueError:
        return None


def compact(value: Any, *, sort_keys: bool = False) -> str:
    """Return JSON without white space, with integers in full."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS if sort_keys else None).decode()
    except orjson.JSONEncodeError:  # an integer beyond 64 bits
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=sort_keys)


def leading(text: str, at: int) -> tuple[Any, int]:
    """Return (the JSON value that begins at a position, the position after it and after white space); the value is None
    if there is none."""
    while text[at : at + 1].isspace():
        at += 1
    try:
        end = DECODER.raw_decode(text, at)[1]
    except (ValueError, RecursionError):  # what is deeper than the log accepts is no value, wherever json gives up
        return None, at
    value = exact(text[at:end])
    while text[end : end + 1].isspace():
        end += 1
    return value, end


PYTHON = {"True": True, "False": False, "None": None}
"""Python constants that Jinja templates write without `tojson`, and that their models therefore write as well."""
KINDS: Mapping[type, tuple[str, ...]] = {
    bool: ("boolean",), int: ("integer", "number"), float: ("number",), dict: ("object",), list: ("array",),
    type(None): ("null",), str: ("string",),
}  # fmt: skip
TELLING: Mapping[str, str] = {
    **dict.fromkeys(("properties", "additionalProperties", "patternProperties", "required"), "object"),
    **dict.fromkeys(("items", "prefixItems", "minItems", "maxItems", "uniqueItems"), "array"),
    **dict.fromkeys(("pattern", "minLength", "maxLength", "format"), "string"),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), "number"),
}
"""Keyword of a schema without a type -> the type that it implies. By JSON Schema it constrains no other type, but
whoever writes it means this type."""
BRANCHES = ("allOf", "anyOf", "oneOf")


class Schema:
    """The JSON Schema of a tool's arguments, which types bare text. It may be anything that a client sends.

    It is followed through internal references (`#/$defs/...`), `allOf`, `anyOf`, `oneOf`, `enum` and `const`. If it
    names no type, its other keywords may imply one (`properties`: an object). A type that it leaves open stays open,
    and is never taken from a single branch."""

    def __init__(self, root: Any, part: Any = None) -> None:
        """`part` is the schema within `root` to use, if it is not `root` itself."""
        self._root = root
        self._known: dict[int, frozenset[str] | None] = {}
        """Types by the identity of a schema within the root; empty while they are being computed, because schemas may
        refer to themselves, and many to one."""
        self._properties: dict[str, Any] = {}
        self._collect(root if part is None else part, set())

    def within(self, name: str) -> Schema:
        """Return the schema of a property whose values have parts of their own."""
        return Schema(self._root, self._properties.get(name, {}))

    def kinds(self, name: str) -> frozenset[str] | None:
        """Return the JSON types that a property may have; None if the schema leaves them open."""
        return self._kinds(self._properties.get(name))

    def value(self, name: str, text: str, *, otherwise: Sequence[str]) -> Any:
        """Return the value of an argument written without JSON. It gets a type that its schema allows: text only if
        that is allowed and no other type fits. `otherwise` holds the types to assume if the schema names none; empty
        for any type."""
        kinds = self.kinds(name) or frozenset(otherwise) or None
        bare = text.strip()
        if kinds == frozenset({"string"}):
            return text
        value = PYTHON[bare] if bare in PYTHON else exact(bare, MAX_DEPTH - 1)
        if value is None:
            null = kinds is None or "null" in kinds or "string" not in kinds
            return None if bare in ("null", "None") and null else text
        if kinds is None or (type(value) is not str and not kinds.isdisjoint(KINDS[type(value)])):
            return value
        if isinstance(value, float) and value.is_integer() and "integer" in kinds:
            return int(value)
        return text

    def _collect(self, schema: Any, seen: set[int]) -> None:
        """Collect the properties of an object from all parts of its schema; the outermost wins. A list has the property
        `item`, which is the schema of its elements."""
        if not isinstance(schema, dict) or id(schema) in seen:
            return
        seen.add(id(schema))
        own = schema.get("properties")
        own = own if isinstance(own, dict) else {"item": schema["items"]} if "items" in schema else {}
        self._properties = own | self._properties
        for one in (self._resolve_ref(schema), *(one for key in BRANCHES for one in _as_list(schema.get(key)))):
            self._collect(one, seen)

    def _kinds(self, schema: Any) -> frozenset[str] | None:
        """Return the JSON types that a schema allows; None if it leaves them open."""
        if not isinstance(schema, dict):
            return None
        if id(schema) not in self._known:
            self._known[id(schema)] = frozenset()
            self._known[id(schema)] = self._compute_kinds(schema)
        return self._known[id(schema)]

    def _compute_kinds(self, schema: Mapping[str, Any]) -> frozenset[str] | None:
        branches = {key: [self._kinds(one) for one in _as_list(schema.get(key))] for key in BRANCHES}
        bounds = [_stated_kinds(schema), self._kinds(self._resolve_ref(schema)), *branches["allOf"]]
        for key in ("anyOf", "oneOf"):
            known = [one for one in branches[key] if one is not None]
            bounds.append(frozenset().union(*known) if known and len(known) == len(branches[key]) else None)
        kinds: frozenset[str] = frozenset()
        for bound in bounds:
            if bound:
                kinds = kinds & bound or bound
        kinds = kinds or frozenset(kind for key, kind in TELLING.items() if key in schema)
        if not kinds:
            return kinds if kinds in bounds else None
        return kinds | {"integer"} if "number" in kinds else kinds

    def _resolve_ref(self, schema: Mapping[str, Any]) -> Any:
        """Return the schema that `$ref` names within the root (RFC 6901); None without `$ref`, or if it names
        nothing."""
        name = schema.get("$ref")
        if not isinstance(name, str) or not name.startswith("#"):
            return None
        at = self._root
        for step in name[1:].split("/")[1:]:
            at = at.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(at, dict) else None
        return at


def _stated_kinds(schema: Mapping[str, Any]) -> frozenset[str] | None:
    """Return the types from `type`, or else from the values that `enum` or `const` list."""
    said = schema.get("type")
    if kinds := frozenset(one for one in _as_list(said) or [said] if isinstance(one, str)):
        return kinds
    values = _as_list(schema.get("enum")) or ([schema["const"]] if "const" in schema else [])
    return frozenset(KINDS[type(one)][0] for one in values if type(one) in KINDS) or None


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


@dataclass(slots=True)
class Text:
    """Content. Only the last part of a running output grows."""

    text: str


@dataclass(slots=True)
class Reasoning:
    """Reasoning. Only the last part of a running output grows."""

    text: str


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A tool call; `arguments` is compact JSON text."""

    name: str
    arguments: str
    id: str = field(default="", compare=False)
    """Id that the model wrote, in families that write one."""


Part = Text | Reasoning | ParsedCall


class Delimiters(NamedTuple):
    """Opening and closing text around an element of the output."""

    opening: str
    closing: str


JSON_STRING = Delimiters('"', '"')
IN_STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
"""Matches a JSON string up to its end, or up to a backslash whose escape is incomplete."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The way in which a family of models writes calls: a block between marks, which `read` turns into calls."""

    marks: Delimiters
    """Marks of a block. An empty closing mark stands for the end of the output."""
    read: Callable[[str, Sequence[Any]], Sequence[ParsedCall] | None]
    """(text between the marks, schemas of the offered tools) -> its calls; None if the text is malformed."""
    around: Delimiters | None = None
    """Optional marks around blocks, which belong to the text only if there is no block."""
    bare: Callable[[Sequence[Any]], Sequence[str]] = lambda _: ()
    """Schemas of the tools -> possible beginnings of an answer that as a whole is one block without marks."""
    read_bare: Callable[[str, Sequence[Any]], Sequence[ParsedCall] | None] | None = None
    """Reader of such a block, with the signature of `read`; None: `read` itself."""
    values: Delimiters | None = JSON_STRING
    """Delimiters of a value in which a block's closing mark is part of the value. None: no value can contain the
    mark."""
    around_arguments: tuple[str, str] | None = None
    """Text before and after the arguments of an answer's only call, with NAME for the tool's name, if the family writes
    arguments as JSON. A grammar holds answers to it."""
    ids: Callable[[str, int, str], str] | None = None
    """(tool, number of earlier calls, a client's id) -> the id that the chat template shows, if the template accepts no
    other or the model writes ids itself. It stands for an id that is not known to be written by the model. The tool is
    empty for a result that answers no call. None: the client's id."""
    whole: Callable[[str, Sequence[Any]], Sequence[Part] | None] | None = None
    """Parses a whole answer at its end, for a family that writes messages instead of blocks. The result is None if the
    text is no such answer."""


@dataclass(slots=True)
class OutputParser:
    """Parser of one output. Without `calls` or `thinking`, the output has none of these: all is text."""

    calls: CallFormat | None
    thinking: Delimiters | None = None
    inside: bool = False
    """True while reasoning goes on; at the start, if the prompt ended in its opening mark."""
    tools: Sequence[Any] = ()
    """Schemas of the offered tools."""
    parts: list[Part] = field(default_factory=list)
    """Parts in the order of the output."""
    ill_formed: int = 0
    """Number of blocks that look like calls but are malformed."""
    _pending: str = ""
    """Text that is not assigned to a part yet."""
    _space: str = ""
    """White space after the emitted text; it belongs to the text if more text follows."""
    _bare: bool = False
    """True if white space that comes now belongs to no part."""
    _sought: int = 0
    """Position up to which a pending block was searched for its closing mark."""
    _in_value: bool = False
    """True if that position is inside a value of the block."""
    _first: int = -1
    """Position of the first closing mark in a pending block, if it is inside a value; -1 if there is none."""
    _begun: bool = False
    """True once reasoning can no longer begin."""
    _bare_block: bool | None = None
    """True if the whole answer may be a block without marks; None while undecided."""

    def push(self, text: str) -> None:
        """Parse more of the output."""
        self._pending += text
        while self._step():
            pass

    def end(self) -> None:
        """Parse what is pending; nothing follows."""
        calls, opened = self.calls, False
        if calls is not None and calls.whole is not None:
            self._messages(calls.whole(self._pending, self.tools))
            return
        while calls is not None and self._first >= 0:
            self._break(calls)
            self.push("")
        left, self._pending = self._pending, ""
        if self.inside:
            self._grow(Reasoning, left)
            return
        if calls is not None and self._bare_block:
            self._block(calls, left, left.strip())
        elif calls is not None and left.startswith(calls.marks.opening):
            self._block(calls, left, None if calls.marks.closing else left[len(calls.marks.opening) :])
        else:
            self._grow(Text, left)
        if calls is not None and calls.around is not None:
            opened = calls.around.opening in self._space
        if opened or (self._space and not any(isinstance(part, ParsedCall) for part in self.parts)):
            self._append(Text, self._space)

    def _messages(self, found: Sequence[Part] | None) -> None:
        assert self.calls is not None, "its format takes the answer apart"
        self.ill_formed += found is None and bool(self.tools) and self.calls.marks.opening in self._pending
        self.parts += [Text(self._pending)] if found is None and self._pending else found or ()
        self._pending = ""

    def _step(self) -> bool:
        """Assign the next piece of the pending text. Return whether there may be another."""
        if self.calls is not None and self.calls.whole is not None:
            return False
        if self.thinking is not None and self.inside:
            return self._reasoning(self.thinking)
        if self.thinking is not None and not self._begun:
            start = self._pending.lstrip()
            if start.startswith(self.thinking.opening):
                self._pending, self.inside, self._bare = start[len(self.thinking.opening) :], True, True
                return True
            if start.startswith(self.thinking.closing):  # an answer without reasoning may begin so (MiniMax M3)
                self._pending, self._bare, self._begun = start[len(self.thinking.closing) :], True, True
                return True
            if any(mark.startswith(start) for mark in self.thinking):
                return False
        self._begun = True
        if self.calls is not None:
            return self._content(self.calls)
        self._grow(Text, self._pending)
        self._pending = ""
        return False

    def _reasoning(self, thinking: Delimiters) -> bool:
        self._given_out(Reasoning, thinking.closing)
        if not self._pending.startswith(thinking.closing):
            return False
        self._pending = self._pending[len(thinking.closing) :]
        self._space, self._bare, self.inside, self._begun = "", True, False, True
        return True

    def _content(self, calls: CallFormat) -> bool:
        if self._bare_block is None:
            start, beginnings = self._pending.lstrip(), calls.bare(self.tools)
            if not start or any(len(start) < len(one) and one.startswith(start) for one in beginnings):
                return False
            self._bare_block = any(start.startswith(one) for one in beginnings)
        if self._bare_block:
            return False
        opening, closing = calls.marks.opening, calls.marks.closing
        self._given_out(Text, opening, calls.around)
        if not closing or not self._pending.startswith(opening):
            return False
        end = self._end_of_block(calls)
        if end is None:
            return False
        body = self._pending[len(opening) : end]
        if end < 0 or (found := calls.read(body, self.tools)) is None:
            self._break(calls)
            return True
        self._pending = self._pending[end + len(closing) :]
        self._add_calls(found)
        return True

    def _end_of_block(self, calls: CallFormat) -> int | None:
        """Return the position of the mark that closes the pending block: the first one outside values. None: not found
        yet. A negative result: the block never closed, and another follows."""
        text, (opening, closing), values = self._pending, calls.marks, calls.values
        overlap = max(map(len, (opening, closing, *(values or ()))))
        at = max(len(opening), self._sought)
        mark = text.find(closing, max(len(opening), at - overlap))
        while True:
            if not self._in_value:
                mark = text.find(closing, at) if 0 <= mark < at else mark
                value = -1 if values is None else text.find(values.opening, at)
                if mark >= 0 and not 0 <= value < mark:
                    return mark
                if value < 0 or values is None:
                    self._sought = max(at, len(text) - overlap)
                    return None
                self._in_value, at = True, value + len(values.opening)
                continue
            assert values is not None, "nothing is a value"
            end = text.find(values.closing, at)
            if values is JSON_STRING:
                at = _end_of_string(text, at)
                end = at if text.startswith(values.closing, at) else -1
            if mark >= 0 and not 0 <= end < mark and self._first < 0:
                self._first = mark
            if self._first >= 0 and values is not JSON_STRING:
                marks = {opening, values.opening} - {values.closing}
                others = (text.find(one, max(at, self._first)) for one in marks)
                if any(other >= 0 and not 0 <= end < other for other in others):
                    return -1
            if end < 0:
                self._sought = at if values is JSON_STRING else max(at, len(text) - overlap)
                return None
            self._in_value, at = False, end + len(values.closing)

    def _break(self, calls: CallFormat) -> None:
        """Turn the malformed block at the start of the pending text into text, up to its first closing mark."""
        closing = calls.marks.closing
        end = self._pending.index(closing, len(calls.marks.opening)) + len(closing)
        whole, self._pending = self._pending[:end], self._pending[end:]
        self._block(calls, whole, None)

    def _block(self, calls: CallFormat, whole: str, body: str | None) -> None:
        """Read a block `whole` whose inner text is `body`, or None if it never closed; keep a malformed block as
        text."""
        read = (calls.read_bare if self._bare_block else None) or calls.read
        found = None if body is None else read(body, self.tools)
        if found is not None:
            self._add_calls(found)
            return
        counted = calls.around is not None and calls.around.opening in self._space
        self.ill_formed += not counted and not self._bare_block
        self._sought, self._in_value, self._first = 0, False, -1
        self._grow(Text, whole)

    def _add_calls(self, found: Sequence[ParsedCall]) -> None:
        """Add the calls of a block, and reset the search state."""
        self.parts += found
        self._space, self._bare = "", True
        self._sought, self._in_value, self._first = 0, False, -1

    def _given_out(self, kind: type[Text | Reasoning], mark: str, around: Delimiters | None = None) -> None:
        """Emit the pending text before the mark, or before what may be its beginning."""
        at = beginning(self._pending, mark)
        if around is not None:
            at = min(
                at, find_partial_mark(self._pending, around.opening), find_partial_mark(self._pending, around.closing)
            )
        self._grow(kind, self._pending[:at])
        self._pending = self._pending[at:]

    def _grow(self, kind: type[Text | Reasoning], text: str) -> None:
        around = self.calls.around if self.calls is not None and kind is Text else None
        text = self._space + text
        if self._bare:
            text = text.lstrip()
            while around and self.parts and isinstance(self.parts[-1], ParsedCall) and text.startswith(around.closing):
                text = text.removeprefix(around.closing).lstrip()
        said = text.rstrip()
        while around and said.endswith(around.opening):
            said = said.removesuffix(around.opening).rstrip()
        self._space = text[len(said) :]
        if said:
            self._bare = False
            self._append(kind, said)

    def _append(self, kind: type[Text | Reasoning], text: str) -> None:
        if kind is Text and self.calls is not None and self.calls.around is not None:
            self.ill_formed += text.count(self.calls.around.opening)
        last = self.parts[-1] if self.parts else None
        if isinstance(last, kind):
            last.text += text
        else:
            self.parts.append(kind(text))


def _end_of_string(text: str, at: int) -> int:
    """Return the end of the JSON string that contains position `at`: its closing quote, or the end of the known
    text."""
    found = IN_STRING.match(text, at)
    assert found is not None, "it matches the empty text"
    return found.end()


def beginning(text: str, mark: str) -> int:
    """Return the position at which the mark begins, or may begin at the end of a growing text; the text's length if
    nowhere."""
    at = text.find(mark)
    return at if at >= 0 else find_partial_mark(text, mark)


def find_partial_mark(text: str, mark: str) -> int:
    """Return the position at which the mark may begin at the end of a growing text; the text's length if nowhere."""
    return next((len(text) - size for size in range(len(mark) - 1, 0, -1) if text.endswith(mark[:size])), len(text))


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Return (the text before the first stop sequence, that sequence); the whole text and None if it contains none."""
    at, stop = min(((found, stop) for stop in stops if (found := text.find(stop)) >= 0), default=(len(text), None))
    return text[:at], stop


def certain(text: str, stops: Sequence[str]) -> str:
    """Return the beginning of a growing text that precedes every stop sequence, whatever follows."""
    return text[: min((beginning(text, stop) for stop in stops), default=len(text))]
