"""Every field of bytes or text in a record is listed as content of a session or not, also a new one."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from turnlog.schemas.avsc import field_types
from turnlog.schemas.content import content_fields, sealable
from turnlog.schemas.events import ALL
from turnlog.schemas.types import CONTENT

GOLDEN = tomllib.loads((Path(__file__).parents[2] / "golden/content.toml").read_text())
SHARED = ("event_id", "run_id", "group_id", "session_id")
"""Ids that every record of a session has."""


def inner_types(kind: Any) -> Iterator[Any]:
    """The types that an annotation is made of."""
    origin = get_origin(kind)
    if origin is Annotated:
        yield from inner_types(get_args(kind)[0])
    elif origin in (Union, UnionType, tuple, dict):
        for inner in get_args(kind):
            yield from inner_types(inner)
    else:
        yield kind


def fields(record: type, known: set[type]) -> Iterator[tuple[str, bool]]:
    """(Record.field, whether it is content) of each field of bytes or text, also of records within it."""
    if record in known:
        return
    known.add(record)
    marks = {field.name: CONTENT in field.metadata for field in dataclasses.fields(record)}
    for name, kind in field_types(record).items():
        types = set(inner_types(kind))
        if types & {bytes, str} and name not in SHARED:
            yield f"{record.__name__}.{name}", marks[name]
        for inner in types:
            if dataclasses.is_dataclass(inner) and isinstance(inner, type):
                yield from fields(inner, known)


def test_every_field_of_bytes_or_text_is_listed_as_content_or_not() -> None:
    known: set[type] = set()
    found = dict(field for record in ALL.values() for field in fields(record, known))
    assert sorted(name for name, is_content in found.items() if is_content) == GOLDEN["content"]
    assert sorted(name for name, is_content in found.items() if not is_content) == GOLDEN["clear"]


def test_every_record_with_content_names_its_session() -> None:
    for name in sealable(ALL):
        assert {"event_id", "session_id"} <= field_types(ALL[name]).keys()
        assert content_fields(ALL[name])
