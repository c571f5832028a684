"""The Avro schema of an archive file: an envelope whose `record` is a union of the events' schemas as written.

A name may be defined once in a file, so a nested type that two events share is defined by the first and named by the
second; the second version of a schema gets a namespace of its own.
Source: Apache Avro 1.11 specification, "Names" and "Unions".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

PRIMITIVES = frozenset({"null", "boolean", "int", "long", "float", "double", "bytes", "string"})
NAMED = frozenset({"record", "error", "enum", "fixed"})
NAMESPACE = "turnlog.archive.v1"
Schema = Any
"""A parsed JSON schema: str, list or dict."""


class Unmergeable(Exception):
    """A schema that no union can hold: not a named record, or a name that it does not define."""


class UnionSchema:
    """The union under construction: arm 0 is null, each schema gets the next one when it first comes."""

    def __init__(self) -> None:
        self.arms: list[Schema] = ["null"]
        self._defined: dict[str, Schema] = {}

    def add(self, schema_id: int, schema: Mapping[str, Any]) -> int:
        """The schema's arm. Raises Unmergeable."""
        whole = _expanded(dict(schema), "", {}, ())
        if not isinstance(whole, dict) or whole.get("type") != "record":
            raise Unmergeable(f"schema id {schema_id} is no record")
        known = dict(self._defined)
        arm = _placed(whole, known)
        if arm is None or isinstance(arm, str):
            space = f"{NAMESPACE}.id{schema_id}"
            known = dict(self._defined)
            arm = _placed(_renamed(whole, lambda name: f"{space}.{name.rpartition('.')[2]}"), known)
        if arm is None or isinstance(arm, str):
            raise Unmergeable(f"schema id {schema_id}: two of its types share a short name")
        self._defined = known
        self.arms.append(arm)
        return len(self.arms) - 1

    def envelope(self) -> Schema:
        """The schema of the file."""
        header = {
            "type": "record",
            "name": "Header",
            "fields": [{"name": "name", "type": "string"}, {"name": "value", "type": "bytes"}],
        }
        return {
            "type": "record",
            "name": "ArchivedRecord",
            "namespace": NAMESPACE,
            "doc": "A record of the log. Its value is byte 0, the schema id in 4 bytes (big-endian) and the Avro body "
            "of `record`, which takes body_bytes bytes here; or `raw`, as it stood, when it could not be decoded.",
            "fields": [
                {"name": "offset", "type": "long"},
                {"name": "timestamp", "type": {"type": "long", "logicalType": "timestamp-millis"}},
                {"name": "key", "type": "bytes"},
                {"name": "headers", "type": {"type": "array", "items": header}},
                {"name": "schema_id", "type": ["null", "long"]},
                {"name": "body_bytes", "type": "long"},
                {"name": "record", "type": self.arms},
                {"name": "raw", "type": ["null", "bytes"]},
            ],
        }


def _expanded(node: Schema, space: str, names: dict[str, Schema], inside: tuple[str, ...]) -> Schema:
    """The schema with full names and every reference replaced by what it names; a recursive one keeps its name."""
    if isinstance(node, str):
        if node in PRIMITIVES:
            return node
        full = node if "." in node or not space else f"{space}.{node}"
        if full in inside:
            return full
        if full not in names:
            raise Unmergeable(f"{full} is not defined")
        return names[full]
    if isinstance(node, list):
        return [_expanded(arm, space, names, inside) for arm in node]
    if node["type"] not in NAMED:
        parts = [name for name in ("type", "items", "values") if name in node and node[name] not in ("array", "map")]
        return {**node, **{name: _expanded(node[name], space, names, inside) for name in parts}}
    full = node["name"]
    if "." not in full and (space := node.get("namespace", space)):
        full = f"{space}.{full}"
    space = full.rpartition(".")[0]
    whole = {name: value for name, value in node.items() if name != "namespace"} | {"name": full}
    if "fields" in node:
        within = (*inside, full)
        whole["fields"] = [
            {**field, "type": _expanded(field["type"], space, names, within)} for field in node["fields"]
        ]
    names[full] = whole
    return whole


def _placed(node: Schema, defined: dict[str, Schema]) -> Schema | None:
    """An expanded schema with names for what is `defined` already; None when a name means something else there."""
    if isinstance(node, str):
        return node
    if isinstance(node, list):
        arms = [_placed(arm, defined) for arm in node]
        return None if None in arms else arms
    if node["type"] in NAMED:
        if node["name"] in defined:
            return node["name"] if defined[node["name"]] == node else None
        defined[node["name"]] = node
    placed = dict(node)
    for part in ("type", "items", "values"):
        if part in node and not (part == "type" and isinstance(node[part], str)):
            placed[part] = _placed(node[part], defined)
            if placed[part] is None:
                return None
    if "fields" in node:
        placed["fields"] = [{**field, "type": _placed(field["type"], defined)} for field in node["fields"]]
        if any(field["type"] is None for field in placed["fields"]):
            return None
    return placed


def _renamed(node: Schema, rename: Callable[[str], str]) -> Schema:
    if isinstance(node, str):
        return node if node in PRIMITIVES else rename(node)
    if isinstance(node, list):
        return [_renamed(arm, rename) for arm in node]
    renamed = dict(node)
    if node["type"] in NAMED:
        renamed["name"] = rename(node["name"])
    for part in ("type", "items", "values"):
        if part in node and not isinstance(node[part], str):
            renamed[part] = _renamed(node[part], rename)
    if "fields" in node:
        renamed["fields"] = [{**field, "type": _renamed(field["type"], rename)} for field in node["fields"]]
    return renamed
