"""Safety check of a writer's schema: the work of reading a record must be bounded by the length of its bytes, whatever
schema was registered.

fastavro reads as many items as a count in the bytes says, follows recursive types on the C stack, and reads a named
type anew wherever it is referenced. So a value that takes no bytes can be repeated 2^62 times within ten bytes, a
record of one megabyte can overflow the stack, and forty record types that each hold the previous one twice are 2^40
values. Schemas that allow this are rejected; none of the catalogue comes near the limits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import fastavro

from turnlog.schemas.json_depth import MAX_DEPTH

MAX_LEVELS: Final = 64
"""Maximum depth of types inside one another."""
MAX_VALUES: Final = 10_000
"""Maximum number of types in a record, counted at each reference."""


class UnsafeSchema(Exception):
    """The value is not an Avro schema, or lets a few bytes cost much work. The message names type and reason."""


class _Size(NamedTuple):
    levels: int
    values: int


LEAF = _Size(1, 1)


def parsed_schema(schema: object) -> Any:
    """Parse any JSON as an Avro schema, without logical types: they would turn numbers and texts of an event into
    dates, decimals and UUIDs. Raises UnsafeSchema."""
    if _nested_too_deep(schema):
        raise UnsafeSchema(f"it is no Avro schema: its JSON is nested deeper than {MAX_DEPTH} levels")
    try:
        parsed = fastavro.parse_schema(_without_logical_types(schema))
        _size(parsed, "", {})
    except UnsafeSchema:
        raise
    # fastavro raises AttributeError, TypeError and more for schemas that are none.
    except Exception as error:
        raise UnsafeSchema(f"it is no Avro schema: {type(error).__name__}: {error}") from error
    return parsed


def _nested_too_deep(schema: object) -> bool:
    """Check level by level, since a recursive check would overflow the stack before it could report the depth."""
    level: list[object] = [schema]
    for _ in range(MAX_DEPTH + 1):
        level = [
            inner
            for part in level
            if isinstance(part, Mapping | list)
            for inner in (part.values() if isinstance(part, Mapping) else part)
        ]
        if not level:
            return False
    return True


def _without_logical_types(schema: Any) -> Any:
    if isinstance(schema, Mapping):
        return {key: _without_logical_types(part) for key, part in schema.items() if key != "logicalType"}
    return [_without_logical_types(part) for part in schema] if isinstance(schema, list) else schema


def _size(part: Any, where: str, known: dict[str, _Size | None]) -> _Size:
    """Return the size of a type in a schema parsed by fastavro, in which all names are full. `known` maps names to
    sizes; None marks a type that is being walked. Raises UnsafeSchema."""
    if isinstance(part, list):
        arms = [arm for arm in part if arm not in ("null", {"type": "null"})]
        return _around([_size(arm, where, known) for arm in arms], where)
    kind = part if isinstance(part, str) else part["type"]
    if not isinstance(kind, str):
        return _size(kind, where, known)
    match kind:
        case "null":
            raise UnsafeSchema(f"{where} is null, which takes no bytes: only a union may have it")
        case "record" | "error":
            return _size_of_record(part, known)
        case "array":
            return _around([_size(part["items"], f"{where}[]", known)], where)
        case "map":
            return _around([_size(part["values"], f"{where}{{}}", known)], where)
        case "enum":
            known[part["name"]] = LEAF
        case "fixed":
            if part["size"] < 1:
                raise UnsafeSchema(f"{part['name']} is fixed({part['size']}), which takes no bytes")
            known[part["name"]] = LEAF
        case name if name in known:
            found = known[name]
            if found is None:
                raise UnsafeSchema(f"{name} holds itself, at {where}")
            return found
    return LEAF


def _size_of_record(record: Mapping[str, Any], known: dict[str, _Size | None]) -> _Size:
    name = record["name"]
    if not record["fields"]:
        raise UnsafeSchema(f"record {name} has no fields, and so takes no bytes")
    known[name] = None
    fields = [_size(field["type"], f"{name}.{field['name']}", known) for field in record["fields"]]
    known[name] = found = _around(fields, name)
    return found


def _around(inner: list[_Size], where: str) -> _Size:
    found = _Size(
        1 + max((size.levels for size in inner), default=0),
        1 + sum(size.values for size in inner),
    )
    if found.levels > MAX_LEVELS or found.values > MAX_VALUES:
        raise UnsafeSchema(
            f"{where} has {found.levels} types inside one another and {found.values} in all, {MAX_LEVELS} and "
            f"{MAX_VALUES} at most"
        )
    return found
