"""Schema resolution: the rule agrees with what fastavro can really read."""

from __future__ import annotations

import io
from typing import Any

import fastavro
from hypothesis import given
from hypothesis import strategies as st

from tests.each import each
from turnlog.schemas.avsc import stored_schema
from turnlog.schemas.compatibility import incompatibilities
from turnlog.schemas.events import ALL


def _record(*fields: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "record", "name": "R", "fields": list(fields), **more}


def _field(kind: Any, name: str = "f", **more: Any) -> dict[str, Any]:
    return {"name": name, "type": kind, **more}


AB = {"type": "enum", "name": "E", "symbols": ["A", "B"]}
ABC = {**AB, "symbols": ["A", "B", "C"]}
FIXED = {"type": "fixed", "name": "F", "size": 2}
TREE = _record(_field(["null", "R"], "left"))

CASES: list[tuple[str, Any, Any, str]] = [
    ("the same record", _record(_field("int")), _record(_field("int")), ""),
    ("int becomes double", _record(_field("double")), _record(_field("int")), ""),
    ("double does not become int", _record(_field("int")), _record(_field("double")), "R.f: double cannot be read"),
    ("string becomes bytes", _record(_field("bytes")), _record(_field("string")), ""),
    ("a new field with a default", _record(_field("int"), _field("int", "g", default=1)), _record(_field("int")), ""),
    ("a new field without", _record(_field("int"), _field("int", "g")), _record(_field("int")), "R.g: new without"),
    ("a field that is gone", _record(), _record(_field("int")), ""),
    ("a renamed field with an alias", _record(_field("int", "g", aliases=["f"])), _record(_field("int")), ""),
    ("a renamed record", _record(name="S"), _record(), "cannot be read as S; add an alias"),
    ("a renamed record with an alias", _record(name="S", aliases=["R"]), _record(), ""),
    ("another namespace", _record(namespace="b"), _record(namespace="a"), ""),
    ("more symbols", _record(_field(ABC)), _record(_field(AB)), ""),
    ("fewer symbols", _record(_field(AB)), _record(_field(ABC)), "lost C and has no default"),
    ("fewer symbols with a default", _record(_field({**AB, "default": "A"})), _record(_field(ABC)), ""),
    ("a union takes one of its arms", _record(_field(["null", "int"])), _record(_field("int")), ""),
    ("a union takes a promoted arm", _record(_field(["null", "long"])), _record(_field("int")), ""),
    ("a union lacks the arm", _record(_field(["null", "int"])), _record(_field("string")), "no arm of the reader's"),
    ("every arm of a written union counts", _record(_field("int")), _record(_field(["null", "int"])), "null cannot"),
    (
        "a fixed of another size",
        _record(_field({**FIXED, "size": 3})),
        _record(_field(FIXED)),
        "fixed F(2) became F(3)",
    ),
    (
        "items",
        _record(_field({"type": "array", "items": "long"})),
        _record(_field({"type": "array", "items": "int"})),
        "",
    ),
    (
        "items that differ",
        _record(_field({"type": "array", "items": "int"})),
        _record(_field({"type": "array", "items": "string"})),
        "R.f[]: string cannot be read as int",
    ),
    (
        "values that differ",
        _record(_field({"type": "map", "values": "int"})),
        _record(_field({"type": "map", "values": "string"})),
        "R.f{}: string cannot be read as int",
    ),
    ("a record that holds itself", TREE, TREE, ""),
    (
        "a record that holds itself, with a new field",
        _record(_field(["null", "R"], "left"), _field("int", "size")),
        TREE,
        "R.size: new without a default",
    ),
    (
        "a logical type is its base",
        _record(_field({"type": "bytes", "logicalType": "x"})),
        _record(_field("bytes")),
        "",
    ),
    (
        "an array is no map",
        _record(_field({"type": "map", "values": "int"})),
        _record(_field({"type": "array", "items": "int"})),
        "array cannot be read as map",
    ),
]


@each(("reader", "writer", "why"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_the_verdict_and_its_reason(reader: Any, writer: Any, why: str) -> None:
    found = incompatibilities(reader, [writer])
    assert bool(found) == bool(why)
    assert not why or any(why in str(problem) for problem in found)


@each("name", sorted(ALL))
def test_every_record_of_the_catalogue_can_read_itself(name: str) -> None:
    assert incompatibilities(stored_schema(name), [stored_schema(name)]) == []


def test_every_writer_counts() -> None:
    reader = _record(_field("string"))
    assert len(incompatibilities(reader, [_record(_field("string")), _record(_field("int")), _record()])) == 2


KINDS: dict[str, Any] = {
    "int": 7,
    "long": 8,
    "double": 1.5,
    "string": "text",
    "bytes": b"bytes",
    "boolean": True,
}
PLAIN = st.sampled_from(sorted(KINDS))
TYPES = st.one_of(
    PLAIN, PLAIN.map(lambda kind: ["null", kind]), PLAIN.map(lambda kind: {"type": "array", "items": kind})
)


def _datum(kind: Any) -> Any:
    if isinstance(kind, list):
        return KINDS[kind[1]]
    return [KINDS[kind["items"]]] if isinstance(kind, dict) else KINDS[kind]


@given(reader=TYPES, writer=TYPES)
def test_what_is_found_compatible_can_be_read(reader: Any, writer: Any) -> None:
    """fastavro resolves a datum, not a schema: a written union is tried with its value arm alone, hence one way."""
    read, written = _record(_field(reader)), _record(_field(writer))
    if incompatibilities(read, [written]):
        return
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(written), {"f": _datum(writer)})
    stream.seek(0)
    fastavro.schemaless_reader(stream, fastavro.parse_schema(written), fastavro.parse_schema(read))
