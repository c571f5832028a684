"""Releases of schemas: one folder per release whose files never change, and the rules that they impose on the current
schemas.

`released/vN/` holds, for each record that was new or had changed, its schema (.avsc), golden bytes (.bin), their
contents as JSON (.json), and SHA256SUMS over all of them. `turnlog schemas release` creates the next one. Source of the
resolution rules: Avro 1.11; of BACKWARD_TRANSITIVE: Confluent Schema Registry, "Schema evolution".

NoReleases (SchemaError)   the folder does not exist
ReleaseRefused             a rule is broken: keep the field, or give it a default
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from turnlog.schemas import SchemaError
from turnlog.schemas.avsc import field_types, render, stored_schema
from turnlog.schemas.codec import Codec
from turnlog.schemas.compatibility import CompatibilityRule, Problem, Schema, incompatibilities, named_types
from turnlog.schemas.events import ALL, OF_SEALED_RUNS, UNWRITTEN
from turnlog.schemas.topics import TOPIC_OF
from turnlog.schemas.types import Logical, pack_float32s, pack_int32s

SUMS = "SHA256SUMS"


class NoReleases(SchemaError):
    """There is no folder of releases. Remedy: name the folder that holds v1."""


@dataclass(frozen=True, slots=True)
class Release:
    """A folder of released records."""

    name: str
    folder: Traversable

    @property
    def records(self) -> list[str]:
        """Names of the records in this release, sorted."""
        return sorted(path.name.removesuffix(".avsc") for path in self.folder.iterdir() if path.name.endswith(".avsc"))

    def schema(self, record: str) -> dict[str, Any]:
        """Return the schema with which the record was released."""
        schema: dict[str, Any] = json.loads((self.folder / f"{record}.avsc").read_text())
        return schema

    def golden(self, record: str) -> tuple[bytes, Any]:
        """Return (framed bytes, their contents as JSON)."""
        return (self.folder / f"{record}.bin").read_bytes(), json.loads((self.folder / f"{record}.json").read_text())


def releases(folder: Traversable | None = None) -> list[Release]:
    """Return the releases in `folder` (default: those of this package), oldest first. Raises NoReleases."""
    folder = folder or resources.files("turnlog.schemas") / "released"
    if not folder.is_dir():
        raise NoReleases(f"{folder} is no folder; releases are folders v1, v2, ... in one (schemas/released)")
    found = [Release(path.name, path) for path in folder.iterdir() if path.is_dir() and path.name[1:].isdigit()]
    return sorted(found, key=lambda release: int(release.name[1:]))


def history(record: str, past: Iterable[Release]) -> list[dict[str, Any]]:
    """Return the successive schemas of a record, oldest first; each differs from the one before."""
    return [release.schema(record) for release in past if record in release.records]


def as_of(version: str, past: Sequence[Release]) -> dict[str, dict[str, Any]]:
    """Return the schema of every record at a release, from it or an older one. Raises ValueError for an unknown
    release."""
    last = [release.name for release in past].index(version)
    return {name: release.schema(name) for release in past[: last + 1] for name in release.records}


def changed_records(past: Sequence[Release]) -> list[str]:
    """Return the records whose current schema is in no release yet."""
    return [name for name in ALL if history(name, past)[-1:] != [stored_schema(name)]]


def problems(
    present: Mapping[str, Schema], past: Sequence[Release], *, unwritten: Set[str] = UNWRITTEN
) -> list[Problem]:
    """Return the reasons why `present`, {record: schema}, must not be released after `past`; empty if it may.

    The check is transitive: every release counts, not only the last. Avro's rules are applied as FULL_TRANSITIVE
    demands: the current reader must read what was written, and the last release's reader what is written now. Further
    rules: an enum has a default, keeps it and keeps its symbols; packed arrays keep their packing, which Avro ignores;
    a released record or field stays; a new record kind, or arm of a union, is `unwritten` for one release.
    """
    found = [problem for name in present for problem in _enum_defaults(present[name])]
    for release in past:
        for name in release.records:
            if name not in present:
                found.append(
                    Problem(name, CompatibilityRule.record_removed, f"was released in {release.name}; keep its class")
                )
                continue
            old = release.schema(name)
            found += incompatibilities(present[name], [old])
            found += [*_fields(old, present[name]), *_enums(old, present[name]), *_packing(old, present[name])]
    return list(dict.fromkeys([*found, *_too_soon(present, past, unwritten)]))


def _too_soon(present: Mapping[str, Schema], past: Sequence[Release], unwritten: Set[str]) -> Iterator[Problem]:
    """Yield what roles of the last release cannot read while both releases run. A new topic has no reader of that
    release."""
    last = as_of(past[-1].name, past) if past else {}
    topics = {TOPIC_OF[name].name for name in last if name in TOPIC_OF}
    for name in present:
        if name in last:
            for problem in incompatibilities(last[name], [_written_part(present[name], unwritten)]):
                if problem.rule is CompatibilityRule.union_arm_lost:
                    what = f"{past[-1].name}: {problem.what}; read it in this release (UNWRITTEN), write it in the next"
                    yield Problem(problem.where, CompatibilityRule.written_too_soon, what)
                elif problem.rule is not CompatibilityRule.enum_symbol_lost:  # `_enums` says that better
                    yield Problem(problem.where, problem.rule, f"read by {past[-1].name}: {problem.what}")
        elif name not in unwritten | OF_SEALED_RUNS and name in TOPIC_OF and TOPIC_OF[name].name in topics:
            what = (
                f"a new kind on {TOPIC_OF[name].name}, which {past[-1].name} reads; pass it over in this release "
                "(UNWRITTEN), write it in the next, or give it a topic of its own"
            )
            yield Problem(name, CompatibilityRule.written_too_soon, what)


def _written_part(schema: Any, unwritten: Set[str]) -> Any:
    """Return the part of a schema that this release's writers use: unions without the arms that it only reads."""
    if isinstance(schema, list):
        return [_written_part(arm, unwritten) for arm in schema if _name(arm) not in unwritten]
    if isinstance(schema, Mapping):
        return {key: _written_part(value, unwritten) if key in INNER else value for key, value in schema.items()}
    return schema


INNER = ("type", "items", "values", "fields")


def _name(arm: Any) -> str:
    return str(arm.get("name", "") if isinstance(arm, Mapping) else arm)


def altered_files(release: Release) -> list[Problem]:
    """Return the files of a release that differ from its SHA256SUMS."""
    said = dict(line.split("  ")[::-1] for line in (release.folder / SUMS).read_text().splitlines())
    there = {path.name: sha256(path) for path in release.folder.iterdir() if path.is_file() and path.name != SUMS}
    return [
        Problem(
            f"{release.name}/{name}",
            CompatibilityRule.release_altered,
            "differs from SHA256SUMS; what was released stays",
        )
        for name in sorted(said.keys() | there.keys())
        if said.get(name) != there.get(name)
    ]


def sha256(path: Traversable) -> str:
    """Return the hex sha256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _enums_of(schema: Schema) -> dict[str, Mapping[str, Any]]:
    return {name: kind for name, kind in named_types(schema).items() if kind["type"] == "enum"}


def _enum_defaults(schema: Schema) -> Iterator[Problem]:
    for name, enum in _enums_of(schema).items():
        if enum.get("default") not in enum["symbols"]:
            yield Problem(
                name, CompatibilityRule.enum_without_default, "an older reader must know what a newer symbol means"
            )


def _fields(old: Schema, new: Schema) -> Iterator[Problem]:
    """Yield the fields that were removed. A reader of the release needs them, and cannot decode without those that have
    no default."""
    present = named_types(new)
    for name, kind in named_types(old).items():
        fields = present.get(name, kind).get("fields", ())
        known = {field for member in fields for field in (member["name"], *member.get("aliases", ()))}
        for member in kind.get("fields", ()):
            if member["name"] not in known:
                yield Problem(
                    f"{name}.{member['name']}",
                    CompatibilityRule.field_removed,
                    "was released; keep it, with its default",
                )


def _enums(old: Schema, new: Schema) -> Iterator[Problem]:
    """Apply the FULL rules: an old reader reads new data by its default, a new reader reads old data by its own
    symbols."""
    known = _enums_of(old)
    for name, enum in _enums_of(new).items():
        if name not in known:
            continue
        added = [symbol for symbol in enum["symbols"] if symbol not in known[name]["symbols"]]
        if added and "default" not in known[name]:
            what = f"gained {', '.join(added)}, for which readers of the release have no default"
            yield Problem(name, CompatibilityRule.enum_without_default, what)
        gone = [symbol for symbol in known[name]["symbols"] if symbol not in enum["symbols"]]
        if gone:
            yield Problem(
                name, CompatibilityRule.enum_symbol_lost, f"lost {', '.join(gone)}: old data would change its meaning"
            )
        if enum.get("default") != known[name].get("default"):
            what = f"the default became {enum.get('default')}: unknown symbols would change their meaning"
            yield Problem(name, CompatibilityRule.enum_default_moved, what)


def _packing(old: Schema, new: Schema) -> Iterator[Problem]:
    known = _logical_types(old)
    for field, packing in _logical_types(new).items():
        if known.get(field, packing) != packing:
            what = f"{known[field]} became {packing}: the same bytes would be read as other numbers"
            yield Problem(field, CompatibilityRule.packing_changed, what)


def _logical_types(schema: Schema) -> dict[str, str]:
    """Return field -> logical types of its arms; "none" for a field without one."""
    found = {}
    for name, kind in named_types(schema).items():
        for field in kind.get("fields", ()):
            arms = field["type"] if isinstance(field["type"], list) else [field["type"]]
            logical = [arm["logicalType"] for arm in arms if isinstance(arm, Mapping) and "logicalType" in arm]
            found[f"{name}.{field['name']}"] = ", ".join(logical) or "none"
    return found


FOLDER = Path(__file__).resolve().parent / "released"
PACKED = {
    "turnlog-int32-le": pack_int32s([0, 338, 383, 2**31 - 1]),
    "turnlog-float32-le": pack_float32s([-0.125, -2.5, 0.0]),
    "turnlog-json": '{"role":"assistant","content":"5 × 7 = 35"}'.encode(),
}


class ReleaseRefused(SchemaError):
    """The released schemas do not allow the current ones; the message lists every reason."""


def check(past: Sequence[Release]) -> list[Problem]:
    """Apply every rule to the current schemas: resolution, enums, packing, the files of the releases, and their golden
    bytes."""
    found = problems({name: stored_schema(name) for name in ALL}, past)
    return [*found, *(problem for release in past for problem in (*altered_files(release), *_unreadable(release)))]


def cut(folder: Path = FOLDER) -> tuple[str, list[str]]:
    """Write the next release and return its name and its records, or ("", []) if nothing has changed. Raises
    ReleaseRefused."""
    past = releases(folder)
    if found := check(past):
        raise ReleaseRefused("; ".join(f"{problem} (rule {problem.rule})" for problem in found))
    names = changed_records(past)
    if not names:
        return "", []
    number = int(past[-1].name[1:]) + 1 if past else 1
    release = folder / f"v{number}"
    release.mkdir(parents=True)
    codec = Codec({name: 100 * number + place for place, name in enumerate(sorted(ALL))}, unwritten=frozenset())
    for name in names:
        event = example(ALL[name])
        (release / f"{name}.avsc").write_text(render(ALL[name]))
        (release / f"{name}.bin").write_bytes(codec.encode(event))
        (release / f"{name}.json").write_text(json.dumps(to_json(event), indent=2, ensure_ascii=False) + "\n")
    write_sums(release)
    return release.name, names


def write_sums(release: Path) -> None:
    """Write SHA256SUMS over every file of a release, in the format of sha256sum(1)."""
    files = sorted(path for path in release.iterdir() if path.name != SUMS)
    (release / SUMS).write_text("".join(f"{sha256(path)}  {path.name}\n" for path in files))


def example(record: type) -> Any:
    """Return an event with every optional field set, in which unions take their arms in turn. The result is always the
    same."""
    count = itertools.count(1)
    return _record(record, count)


def to_json(value: Any) -> Any:
    """Return an event as JSON: bytes as {"hex": ...}, enums as their symbols."""
    if dataclasses.is_dataclass(value):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    return value.value if isinstance(value, Enum) else value


def golden_codec(release: Release) -> Codec:
    """Return a codec with the schemas of a release under the ids in its golden bytes."""
    codec = Codec({}, unwritten=frozenset())
    for name in release.records:
        codec.hold(int.from_bytes(release.golden(name)[0][1:5], "big"), release.schema(name))
    return codec


def contains(value: Any, said: Any) -> bool:
    """Return True if `value` contains everything in `said`; records may have gained fields since."""
    if isinstance(said, dict) and isinstance(value, dict):
        return all(name in value and contains(value[name], inner) for name, inner in said.items())
    if isinstance(said, list) and isinstance(value, list):
        return len(value) == len(said) and all(map(contains, value, said))
    return bool(value == said)


def _unreadable(release: Release) -> list[Problem]:
    codec, found = golden_codec(release), []
    for name in release.records:
        framed, said = release.golden(name)
        try:
            why = "" if contains(to_json(codec.decode(framed)), said) else "reads as another record than it was"
        except SchemaError as error:
            why = str(error)
        if why:
            found.append(Problem(f"{release.name}/{name}.bin", CompatibilityRule.golden_unreadable, why))
    return found


def _record(record: Any, count: itertools.count[int]) -> Any:
    return record(**{name: _value(name, kind, count) for name, kind in field_types(record).items()})


def _value(name: str, kind: Any, count: itertools.count[int]) -> Any:
    origin, number = get_origin(kind), next(count)
    if origin is Annotated:
        logical = get_args(kind)[1]
        assert isinstance(logical, Logical)
        return PACKED[logical.name]
    if origin in (Union, UnionType):
        arms = [arm for arm in get_args(kind) if arm is not NoneType]
        return _value(name, arms[number % len(arms)], count)
    if origin is tuple:
        return tuple(_value(name, get_args(kind)[0], count) for _ in range(2))
    if origin is dict:
        return {key: _value(name, get_args(kind)[1], count) for key in ("first", "second")}
    if dataclasses.is_dataclass(kind):
        return _record(kind, count)
    if issubclass(kind, Enum):
        members = list(kind)
        return members[number % len(members)]
    return _scalar(name, kind, number)


def _scalar(name: str, kind: type, number: int) -> Any:
    match kind.__name__:
        case "str":
            return f"{name}-{number}"
        case "bytes":
            return bytes([0, number % 256, 255])
        case "bool":
            return number % 2 == 1
        case "float":
            return number / 8
        case "int":
            return number if number % 5 else -number
        case other:
            raise TypeError(f"{name}: no example for {other}")
