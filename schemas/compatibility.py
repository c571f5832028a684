"""Check whether data written with one Avro schema can be read with another. Source: Avro 1.11, "Schema Resolution".

No library among our dependencies has this check (fastavro notices only while it decodes a datum), and the result is
needed before a schema is registered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

PROMOTIONS: dict[str, frozenset[str]] = {
    "int": frozenset({"long", "float", "double"}),
    "long": frozenset({"float", "double"}),
    "float": frozenset({"double"}),
    "string": frozenset({"bytes"}),
    "bytes": frozenset({"string"}),
}
"""Writer's primitive type -> the reader's types that it may be promoted to."""
NAMED = ("record", "error", "enum", "fixed")

Schema = str | Mapping[str, Any] | list[Any]


class CompatibilityRule(StrEnum):
    """Rules that a change of a schema can break. The first six are Avro's, the others turnlog's own (releases.py)."""

    new_without_default = "new_without_default"
    type_changed = "type_changed"
    name_changed = "name_changed"
    union_arm_lost = "union_arm_lost"
    fixed_size_changed = "fixed_size_changed"
    enum_symbol_lost = "enum_symbol_lost"
    enum_without_default = "enum_without_default"
    enum_default_moved = "enum_default_moved"
    packing_changed = "packing_changed"
    field_removed = "field_removed"
    record_removed = "record_removed"
    written_too_soon = "written_too_soon"
    golden_unreadable = "golden_unreadable"
    release_altered = "release_altered"


@dataclass(frozen=True, slots=True)
class Problem:
    """A reason to reject a schema."""

    where: str
    """Record and field, or the file."""
    rule: CompatibilityRule
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


def incompatibilities(reader: Schema, writers: Iterable[Schema]) -> list[Problem]:
    """Return the reasons why `reader` cannot read what each of `writers` wrote; empty if it can.

    BACKWARD_TRANSITIVE is `incompatibilities(new, every_earlier_one)`. Each schema must be valid on its own.
    """
    return [
        problem
        for writer in writers
        for problem in _Pair(named_types(reader), named_types(writer)).differences(reader, writer)
    ]


def named_types(schema: Schema) -> dict[str, Mapping[str, Any]]:
    """Return full name -> definition of every record, enum and fixed of a schema."""
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
    """The named types of a reader and a writer, and the pairs of records whose comparison has begun."""

    reader_names: Mapping[str, Mapping[str, Any]]
    writer_names: Mapping[str, Mapping[str, Any]]
    begun: set[tuple[str, str]] = field(default_factory=set)

    def differences(
        self, reader: Schema, writer: Schema, path: str = "", namespaces: tuple[str, str] = ("", "")
    ) -> Iterator[Problem]:
        """Yield every incompatibility with the path of its field. `namespaces` are those in force for reader and
        writer."""
        read = _definition(reader, self.reader_names, namespaces[0])
        written = _definition(writer, self.writer_names, namespaces[1])
        if isinstance(written, list):
            for arm in written:
                yield from self.differences(read, arm, path, namespaces)
        elif isinstance(read, list):
            if not any(self._matches(arm, written, path, namespaces) for arm in read):
                what = f"no arm of the reader's union takes {_kind(written)}"
                yield Problem(path or "the schema", CompatibilityRule.union_arm_lost, what)
        else:
            yield from self._same_shape(read, written, path, namespaces)

    def _matches(self, reader: Schema, writer: Schema, path: str, namespaces: tuple[str, str]) -> bool:
        trial = _Pair(self.reader_names, self.writer_names, set(self.begun))
        return next(trial.differences(reader, writer, path, namespaces), None) is None

    def _same_shape(
        self, read: Mapping[str, Any], written: Mapping[str, Any], path: str, namespaces: tuple[str, str]
    ) -> Iterator[Problem]:
        where, kinds = path or "the schema", (read["type"], written["type"])
        match kinds:
            case ("record" | "error", "record" | "error"):
                yield from self._records(read, written, where)
            case ("enum", "enum"):
                yield from _enums(read, written, where)
            case ("fixed", "fixed"):
                if not _same_name(read, written) or read["size"] != written["size"]:
                    what = f"fixed {written['name']}({written['size']}) became {read['name']}({read['size']})"
                    yield Problem(where, CompatibilityRule.fixed_size_changed, what)
            case ("array", "array"):
                yield from self.differences(read["items"], written["items"], f"{where}[]", namespaces)
            case ("map", "map"):
                yield from self.differences(read["values"], written["values"], f"{where}{{}}", namespaces)
            case (now, before) if now != before and now not in PROMOTIONS.get(before, ()):
                yield Problem(where, CompatibilityRule.type_changed, f"{before} cannot be read as {now}")

    def _records(self, read: Mapping[str, Any], written: Mapping[str, Any], where: str) -> Iterator[Problem]:
        if not _same_name(read, written):
            yield _rename_problem("record", read, written, where)
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
                yield Problem(path, CompatibilityRule.new_without_default, "new without a default; give it one")


def _definition(schema: Schema, names: Mapping[str, Mapping[str, Any]], namespace: str) -> Any:
    """Return a union as its list of arms, and any other type as a mapping with `type`."""
    if isinstance(schema, list):
        return schema
    if isinstance(schema, str):
        return names.get(_full_name(schema, namespace)) or names.get(schema) or {"type": schema}
    if schema["type"] in NAMED:
        return names[_full_name(str(schema["name"]), str(schema.get("namespace", namespace)))]
    return _definition(schema["type"], names, namespace) if isinstance(schema["type"], Mapping | list) else schema


def _same_name(read: Mapping[str, Any], written: Mapping[str, Any]) -> bool:
    """Compare unqualified names, as the specification recommends; the reader's aliases count."""
    names = {str(name).rpartition(".")[2] for name in (read["name"], *read.get("aliases", ()))}
    return str(written["name"]).rpartition(".")[2] in names


def _enums(read: Mapping[str, Any], written: Mapping[str, Any], where: str) -> Iterator[Problem]:
    if not _same_name(read, written):
        yield _rename_problem("enum", read, written, where)
    lost = [symbol for symbol in written["symbols"] if symbol not in read["symbols"]]
    if lost and "default" not in read:
        what = f"enum {read['name']} lost {', '.join(lost)} and has no default"
        yield Problem(where, CompatibilityRule.enum_symbol_lost, what)


def _rename_problem(kind: str, read: Mapping[str, Any], written: Mapping[str, Any], where: str) -> Problem:
    what = f"{kind} {written['name']} cannot be read as {read['name']}; add an alias"
    return Problem(where, CompatibilityRule.name_changed, what)


def _kind(schema: Any) -> str:
    return str(schema.get("name", schema["type"]))
