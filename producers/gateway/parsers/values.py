"""Values of tool calls: JSON that keeps every digit, and bare text that a tool's JSON Schema gives a type.

A schema is followed through references within it (`#/$defs/...`), `allOf`, `anyOf`, `oneOf`, `enum` and `const`; where
it names no type, its other keywords may tell one (`properties`: an object). What it leaves open counts as open, never
as the one type that some branch of it names.
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
"""Digits of an integer that may be beyond 64 bits, of which orjson makes a float."""


def exact(text: str, levels: int = MAX_DEPTH) -> Any:
    """The value of a JSON text, integers with all their digits. None for what is no JSON, or deeper than the log takes,
    and for a number that Python does not read (4,300 digits)."""
    try:
        value = None if deeper_than(text, levels) else orjson.loads(text)
        return json.loads(text) if value is not None and LONG.search(text) else value
    except ValueError:
        return None


def compact(value: Any, *, sort_keys: bool = False) -> str:
    """JSON without white space, integers with all their digits."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS if sort_keys else None).decode()
    except orjson.JSONEncodeError:  # an integer beyond 64 bits
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=sort_keys)


def leading(text: str, at: int) -> tuple[Any, int]:
    """(the JSON value that begins at a place of a text, the place behind it and behind white space); None if none."""
    while text[at : at + 1].isspace():
        at += 1
    try:
        end = DECODER.raw_decode(text, at)[1]
    except (ValueError, RecursionError):  # what is deeper than the log takes is none, wherever json gives up
        return None, at
    value = exact(text[at:end])
    while text[end : end + 1].isspace():
        end += 1
    return value, end


PYTHON = {"True": True, "False": False, "None": None}
"""What templates in Jinja write where they forget `tojson`, and so their models, too."""
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
"""Keywords of a schema without a type -> the type that they are about. JSON Schema has them bind no other type, but
whoever writes one means it."""
BRANCHES = ("allOf", "anyOf", "oneOf")


class Schema:
    """The JSON Schema of a tool's arguments. What it is may be anything: clients send what they have."""

    def __init__(self, root: Any, part: Any = None) -> None:
        """`part`: the schema within the root that is meant, where it is not the root itself."""
        self._root = root
        self._known: dict[int, frozenset[str] | None] = {}
        """Types by the identity of a schema within the root; empty where they are being looked for: schemas may refer
        to themselves, and many to one."""
        self._properties: dict[str, Any] = {}
        self._collect(root if part is None else part, set())

    def within(self, name: str) -> Schema:
        """The schema of a property, of which values have parts of their own."""
        return Schema(self._root, self._properties.get(name, {}))

    def kinds(self, name: str) -> frozenset[str] | None:
        """The JSON types that a property may have; None where the schema leaves them open."""
        return self._kinds(self._properties.get(name))

    def value(self, name: str, text: str, *, otherwise: Sequence[str]) -> Any:
        """An argument that is written without JSON: of a type that its schema allows, text where that is one of them
        and no other fits. `otherwise`: the types of what no schema tells of, any if none."""
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
        """The properties of an object, whichever part of its schema has them; the outermost counts. A list has `item`,
        of which its elements are."""
        if not isinstance(schema, dict) or id(schema) in seen:
            return
        seen.add(id(schema))
        own = schema.get("properties")
        own = own if isinstance(own, dict) else {"item": schema["items"]} if "items" in schema else {}
        self._properties = own | self._properties
        for one in (self._referred(schema), *(one for key in BRANCHES for one in _listed(schema.get(key)))):
            self._collect(one, seen)

    def _kinds(self, schema: Any) -> frozenset[str] | None:
        """The JSON types that a schema allows; None where it leaves them open."""
        if not isinstance(schema, dict):
            return None
        if id(schema) not in self._known:
            self._known[id(schema)] = frozenset()
            self._known[id(schema)] = self._found(schema)
        return self._known[id(schema)]

    def _found(self, schema: Mapping[str, Any]) -> frozenset[str] | None:
        branches = {key: [self._kinds(one) for one in _listed(schema.get(key))] for key in BRANCHES}
        bounds = [_named(schema), self._kinds(self._referred(schema)), *branches["allOf"]]
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

    def _referred(self, schema: Mapping[str, Any]) -> Any:
        """What `$ref` names within the root (RFC 6901); None without one, or where nothing stands there."""
        name = schema.get("$ref")
        if not isinstance(name, str) or not name.startswith("#"):
            return None
        at = self._root
        for step in name[1:].split("/")[1:]:
            at = at.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(at, dict) else None
        return at


def _named(schema: Mapping[str, Any]) -> frozenset[str] | None:
    """By `type`, else by the values that `enum` or `const` list."""
    said = schema.get("type")
    if kinds := frozenset(one for one in _listed(said) or [said] if isinstance(one, str)):
        return kinds
    values = _listed(schema.get("enum")) or ([schema["const"]] if "const" in schema else [])
    return frozenset(KINDS[type(one)][0] for one in values if type(one) in KINDS) or None


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
