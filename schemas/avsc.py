"""Avro schemas of the event dataclasses, and the .avsc files that hold them.

`python -m turnlog.schemas.avsc` rewrites `avro/*.avsc`; a test fails if a file and its class disagree. Reference:
Apache Avro 1.11 specification.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from enum import StrEnum
from importlib import resources
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from turnlog.schemas.events import ALL
from turnlog.schemas.types import Logical

NAMESPACE = "turnlog.v1"
PRIMITIVES: dict[type, str] = {str: "string", int: "long", float: "double", bool: "boolean", bytes: "bytes"}


def avro_schema(record: type) -> dict[str, Any]:
    """Return the self-contained Avro schema of an event record."""
    schema = _named_type(record, set())
    assert isinstance(schema, dict)
    return {"type": "record", "name": record.__name__, "namespace": NAMESPACE, **schema}


@functools.cache
def field_types(record: type) -> dict[str, Any]:
    """Return field name -> annotation, including `Annotated`."""
    hints = get_type_hints(record, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(record)}


def _avro(annotation: Any, seen: set[str]) -> Any:
    origin = get_origin(annotation)
    if annotation in PRIMITIVES:
        return PRIMITIVES[annotation]
    if origin is Annotated:
        base, logical = get_args(annotation)
        assert isinstance(logical, Logical)
        return {"type": PRIMITIVES[base], "logicalType": logical.name}
    if origin in (Union, UnionType):
        arms = sorted(get_args(annotation), key=lambda arm: arm is not NoneType)
        return ["null" if arm is NoneType else _avro(arm, seen) for arm in arms]
    if origin is tuple:
        return {"type": "array", "items": _avro(get_args(annotation)[0], seen)}
    if origin is dict:
        return {"type": "map", "values": _avro(get_args(annotation)[1], seen)}
    return _named_type(annotation, seen)


def _named_type(annotation: type, seen: set[str]) -> Any:
    """Return a record or enum in full at its first occurrence, by name afterwards."""
    if annotation.__name__ in seen:
        return annotation.__name__
    seen.add(annotation.__name__)
    doc = (annotation.__doc__ or "").strip().splitlines()[0]
    if issubclass(annotation, StrEnum):
        symbols = [member.value for member in annotation]
        return {"type": "enum", "name": annotation.__name__, "doc": doc, "symbols": symbols, "default": symbols[0]}
    fields = [_field(field, kind, seen) for field, kind in _fields(annotation)]
    return {"type": "record", "name": annotation.__name__, "doc": doc, "fields": fields}


def _fields(record: type) -> list[tuple[dataclasses.Field[Any], Any]]:
    return [(field, field_types(record)[field.name]) for field in dataclasses.fields(record)]


def _field(field: dataclasses.Field[Any], annotation: Any, seen: set[str]) -> dict[str, Any]:
    kind = _avro(annotation, seen)
    schema: dict[str, Any] = {"name": field.name, "type": kind}
    if field.default == ():
        schema["default"] = []
    elif field.default is None or isinstance(field.default, bool | int | float | str):
        # Avro takes the default of a union to be of its first arm, which is null where null is an arm.
        assert field.default is None or not isinstance(kind, list), f"{field.name}: a union's default can be None only"
        schema["default"] = field.default
    elif field.default_factory is dict:
        schema["default"] = {}
    return schema


@functools.cache
def stored_schema(name: str) -> dict[str, Any]:
    """Return the schema of a record as stored in `avro/<name>.avsc`."""
    text = (resources.files("turnlog.schemas") / "avro" / f"{name}.avsc").read_text()
    schema: dict[str, Any] = json.loads(text)
    return schema


def render(record: type) -> str:
    """Return the text of a record's .avsc file."""
    return json.dumps(avro_schema(record), indent=2) + "\n"


def write_all(folder: Path) -> None:
    """Write the .avsc file of every record to `folder`."""
    for name, record in ALL.items():
        (folder / f"{name}.avsc").write_text(render(record))


if __name__ == "__main__":
    write_all(Path(__file__).resolve().parent / "avro")
