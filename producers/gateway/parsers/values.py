"""Values of tool calls: JSON that keeps every digit, and bare text that is typed by a tool's JSON Schema.

A schema is followed through internal references (`#/$defs/...`), `allOf`, `anyOf`, `oneOf`, `enum` and `const`. If it
names no type, its other keywords may imply one (`properties`: an object). A type that the schema leaves open stays
open, and is never taken from a single branch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

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
    """The JSON Schema of a tool's arguments. It may be anything, since clients send whatever they have."""

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
