"""docs/events.md: topics and records as people read them, generated from the catalogue and the event classes."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

from turnlog.schemas.avsc import avro_schema
from turnlog.schemas.events import ALL
from turnlog.schemas.topics import CATALOGUE

HEAD = """\
# Events and topics

Avro records, namespace `turnlog.v1`, in the Confluent wire format (byte 0, 4-byte schema id, Avro body); subject =
record name. Arrays of numbers are `bytes`, packed little-endian; `logicalType` names the packing. No topic is
compacted, nothing expires. This page is generated (`make docs`).

| topic | key | partitions | records |
|---|---|---|---|
"""


def catalogue_page() -> str:
    """The whole page."""
    rows = [
        f"| `{topic.name}` | {topic.key} | {topic.partitions} | {', '.join(topic.records)} |\n" for topic in CATALOGUE
    ]
    return HEAD + "".join(rows) + "".join(_record(name, cls) for name, cls in ALL.items())


def _record(name: str, cls: type) -> str:
    notes = _notes(cls)
    fields = [
        f"| `{field['name']}` | {_type(field['type'])} | {notes.get(field['name'], '')} |\n"
        for field in avro_schema(cls)["fields"]
    ]
    return f"\n## {name}\n\n{inspect.getdoc(cls)}\n\n| field | type | |\n|---|---|---|\n" + "".join(fields)


def _notes(cls: type) -> dict[str, str]:
    """Field -> the string literal that follows it in the class body."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    notes: dict[str, str] = {}
    for before, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name) and isinstance(after, ast.Expr):
            notes[before.target.id] = " ".join(str(ast.literal_eval(after.value)).split()).replace("|", "\\|")
    return notes


def _type(kind: Any) -> str:
    if isinstance(kind, str):
        return kind
    if isinstance(kind, list):
        return " or ".join(_type(arm) for arm in kind)
    if kind["type"] == "array":
        return f"list of {_type(kind['items'])}"
    if kind["type"] == "map":
        return f"map of {_type(kind['values'])}"
    if "logicalType" in kind:
        return f"{kind['type']} ({kind['logicalType']})"
    if kind["type"] == "enum":
        return " / ".join(kind["symbols"])
    if "fields" in kind:
        return f"{kind['name']}{{{', '.join(field['name'] for field in kind['fields'])}}}"
    return str(kind["type"])


if __name__ == "__main__":
    print(catalogue_page(), end="")
