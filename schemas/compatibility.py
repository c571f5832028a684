"""Whether data written with one Avro schema can be read with another. Source: Avro 1.11, "Schema Resolution".

No library that we hold has this check (fastavro finds out while it decodes a datum), and the rule must be known before
a schema is registered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

PROMOTIONS: dict[str, frozenset[str]] = {
    "int": frozenset({"long", "float", "double"}),
    "long": frozenset({"float", "double"}),
    "float": frozenset({"double"}),
    "string": frozenset({"bytes"}),
    "bytes": frozenset({"string"}),
}
"""Writer's primitive -> the reader's that it may become."""
NAMED = ("record", "error", "enum", "fixed")

Schema = str | Mapping[str, Any] | list[Any]


def incompatibilities(reader: Schema, writers: Iterable[Schema]) -> list[str]:
    """Why `reader` cannot read what each of `writers` wrote, a line each; empty when it can.

    BACKWARD_TRANSITIVE is `incompatibilities(new, every_earlier_one)`. The schemas must be valid by themselves.
    """
    return [line for writer in writers for line in _Pair(_names(reader), _names(writer)).differences(reader, writer)]


def _names(schema: Schema) -> dict[str, Mapping[str, Any]]:
    """Full name -> definition of every named type of a schema."""
    found: dict[str, Mapping[str, Any]] = {}

    def collect(part: Schema, namespace: str) -> None:
        if isinstance(part, list):
            for arm in part:
                collect(arm, namespace)
        if not isinstance(part, Mapping):
            return
        kind = part["type"]
        if kind in NAMED:
            name = _full_name(str(part["name"]), str(part.get("namespace", namespace)))
            found[name] = {**part, "name": name}
            for member in part.get("fields", ()):
                collect(member["type"], name.rpartition(".")[0])
            return
        for inner in (part.get("items"), part.get("values"), kind):
            if isinstance(inner, Mapping | list):
                collect(inner, namespace)

    collect(schema, "")
    return found


def _full_name(name: str, namespace: str) -> str:
    return name if "." in name or not namespace else f"{namespace}.{name}"


@dataclass(frozen=True, slots=True)
class _Pair:
    """A reader's and a writer's named types, and the pairs of records that are being compared already."""

    reader_names: Mapping[str, Mapping[str, Any]]
    writer_names: Mapping[str, Mapping[str, Any]]
    begun: set[tuple[str, str]] = field(default_factory=set)

    def differences(
        self, reader: Schema, writer: Schema, path: str = "", namespaces: tuple[str, str] = ("", "")
    ) -> Iterator[str]:
        """Every reason, each with the path of its field. `namespaces`: those in force for reader and writer."""
        read = _definition(reader, self.reader_names, namespaces[0])
        written = _definition(writer, self.writer_names, namespaces[1])
        if isinstance(written, list):
            for arm in written:
                yield from self.differences(read, arm, path, namespaces)
        elif isinstance(read, list):
            if not any(self._matches(arm, written, path, namespaces) for arm in read):
                yield f"{path or 'the schema'}: no arm of the reader's union takes {_kind(written)}"
        else:
            yield from self._same_shape(read, written, path, namespaces)

    def _matches(self, reader: Schema, writer: Schema, path: str, namespaces: tuple[str, str]) -> bool:
        trial = _Pair(self.reader_names, self.writer_names, set(self.begun))
        return next(trial.differences(reader, writer, path, namespaces), None) is None

    def _same_shape(
        self, read: Mapping[str, Any], written: Mapping[str, Any], path: str, namespaces: tuple[str, str]
    ) -> Iterator[str]:
        where, kinds = path or "the schema", (read["type"], written["type"])
        match kinds:
            case ("record" | "error", "record" | "error"):
                yield from self._records(read, written, where)
            case ("enum", "enum"):
                yield from _enums(read, written, where)
            case ("fixed", "fixed"):
                if not _same_name(read, written) or read["size"] != written["size"]:
                    yield f"{where}: fixed {written['name']}({written['size']}) became {read['name']}({read['size']})"
            case ("array", "array"):
                yield from self.differences(read["items"], written["items"], f"{where}[]", namespaces)
            case ("map", "map"):
                yield from self.differences(read["values"], written["values"], f"{where}{{}}", namespaces)
            case (now, before) if now != before and now not in PROMOTIONS.get(before, ()):
                yield f"{where}: {before} cannot be read as {now}"

    def _records(self, read: Mapping[str, Any], written: Mapping[str, Any], where: str) -> Iterator[str]:
        if not _same_name(read, written):
            yield f"{where}: record {written['name']} cannot be read as {read['name']}; add an alias"
            return
        pair = (str(read["name"]), str(written["name"]))
        if pair in self.begun:
            return
        self.begun.add(pair)
        namespaces = (pair[0].rpartition(".")[0], pair[1].rpartition(".")[0])
        there = {member["name"]: member for member in written["fields"]}
        for member in read["fields"]:
            name = next((name for name in (member["name"], *member.get("aliases", ())) if name in there), None)
            path = f"{read['name']}.{member['name']}"
            if name is not None:
                yield from self.differences(member["type"], there[name]["type"], path, namespaces)
            elif "default" not in member:
                yield f"{path}: new without a default; give it one"


def _definition(schema: Schema, names: Mapping[str, Mapping[str, Any]], namespace: str) -> Any:
    """A union as its list of arms, anything else as a mapping with `type`."""
    if isinstance(schema, list):
        return schema
    if isinstance(schema, str):
        return names.get(_full_name(schema, namespace)) or names.get(schema) or {"type": schema}
    if schema["type"] in NAMED:
        return names[_full_name(str(schema["name"]), str(schema.get("namespace", namespace)))]
    return _definition(schema["type"], names, namespace) if isinstance(schema["type"], Mapping | list) else schema


def _same_name(read: Mapping[str, Any], written: Mapping[str, Any]) -> bool:
    """Unqualified names decide, as the specification recommends; a reader's aliases count."""
    names = {str(name).rpartition(".")[2] for name in (read["name"], *read.get("aliases", ()))}
    return str(written["name"]).rpartition(".")[2] in names


def _enums(read: Mapping[str, Any], written: Mapping[str, Any], where: str) -> Iterator[str]:
    if not _same_name(read, written):
        yield f"{where}: enum {written['name']} cannot be read as {read['name']}; add an alias"
    lost = [symbol for symbol in written["symbols"] if symbol not in read["symbols"]]
    if lost and "default" not in read:
        yield f"{where}: enum {read['name']} lost {', '.join(lost)} and has no default"


def _kind(schema: Any) -> str:
    return str(schema.get("name", schema["type"]))
