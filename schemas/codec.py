"""Conversion of events to and from the Confluent wire format: byte 0, 4-byte big-endian schema id, Avro body.

Plain bodies of the current schemas go through `binary`. fastavro handles everything else and has the last word on input
that is not plain. avro-python3 is the reference implementation that the conformance tests read with
(docs/decisions/0005). Source of the framing: Confluent Schema Registry, "Wire format".

A writer's schema is checked first (`parsed_schema`): the work of reading a record must be bounded by the length of its
bytes, whatever schema was registered. fastavro reads as many items as a count in the bytes says, follows recursive
types on the C stack, and reads a named type anew wherever it is referenced. So a value that takes no bytes can be
repeated 2^62 times within ten bytes, a record of one megabyte can overflow the stack, and forty record types that each
hold the previous one twice are 2^40 values. Schemas that allow this are rejected; none of the catalogue comes near the
limits.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import operator
import struct
from collections.abc import Callable, Mapping, Set
from enum import StrEnum
from types import NoneType, UnionType
from typing import Annotated, Any, Final, NamedTuple, NoReturn, Union, get_args, get_origin

import fastavro
from fastavro.schema import fingerprint
from fastavro.schema import to_parsing_canonical_form as canonical

from turnlog.schemas import (
    LaterKind,
    MasterKeyMissing,
    UndecodableRecord,
    UnknownRecord,
    UnknownSchemaId,
    WrittenTooSoon,
    binary,
)
from turnlog.schemas.avsc import NAMESPACE, avro_schema, field_types, stored_schema
from turnlog.schemas.content import SEALED, ContentCipher, Found, HiddenContent, holds_content, seal, unseal
from turnlog.schemas.events import ALL, UNWRITTEN, Event
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


MAGIC = 0
HEADER = struct.Struct(">bI")
Convert = Callable[[Any], Any]


class Codec:
    """Encodes with the schema ids that the registry assigned and decodes every id whose schema it holds. Not
    thread-safe."""

    def __init__(
        self,
        ids: Mapping[str, int],
        *,
        unwritten: Set[str] = UNWRITTEN,
        sealed_ids: Mapping[str, int] | None = None,
        cipher: ContentCipher | None = None,
    ) -> None:
        """Create a codec. `ids` maps each record name to the schema id of its current schema. `unwritten` names kinds
        and union arms that `encode` rejects, and kinds that `decode` skips. `sealed_ids` maps the names of records with
        content to the ids of their sealed schemas: with them, `cipher` encrypts what `encode` writes. Without a
        `cipher`, sealed records cannot be decoded."""
        self._cipher = cipher
        sealed = sealed_ids or {}
        assert cipher is not None or not sealed
        self._unwritten = unwritten
        self._present = {name: fastavro.parse_schema(stored_schema(name)) for name in ALL}
        self._headers = {name: HEADER.pack(MAGIC, schema_id) for name, schema_id in {**ids, **sealed}.items()}
        self._seals = frozenset(sealed)
        """Records that `encode` encrypts."""
        self._sealed = set(sealed.values())
        """Ids of sealed schemas."""
        both = (*ids.items(), *sealed.items())
        self._written = {schema_id: (name, self._present[name]) for name, schema_id in both}
        self._fingerprints: dict[int, str] = {}
        self._readers: dict[bytes, binary.Read | None] = {}
        """Header -> generated reader, added with its first record; None if its schema differs from the current one."""
        self._later: dict[int, str] = {}
        """Schema id -> record kind that a newer release added."""
        self._refused: dict[int, str] = {}
        """Schema id -> reason why its records are rejected."""

    def hide_content(self) -> None:
        """Decode encrypted content as if it were erased from now on, if this codec has no cipher."""
        self._cipher = self._cipher or HiddenContent()

    def hold(self, schema_id: int, schema: object) -> None:
        """Add a writer's schema, which may be any JSON. Raises UndecodableRecord if it is not the schema of a record of
        the catalogue, or if it does not bound the work of its readers; every record with this id is then rejected in
        the same way."""
        self._readers.pop(HEADER.pack(MAGIC, schema_id), None)
        for known in (self._written, self._later, self._refused):
            known.pop(schema_id, None)
        self._sealed.discard(schema_id)
        given = schema if isinstance(schema, Mapping) else {}
        name = str(given.get("name", "")).rpartition(".")[2]
        if name not in ALL and given.get("namespace") == NAMESPACE:
            self._later[schema_id] = name
        elif name not in ALL:
            self._refuse(schema_id, f"schema id {schema_id} is of {name[:100]!r}, which is no record of turnlog")
        else:
            try:
                self._written[schema_id] = (name, parsed_schema(schema))
                if SEALED in given:
                    self._sealed.add(schema_id)
            except UnsafeSchema as error:
                self._refuse(schema_id, f"schema id {schema_id} of {name} is refused: {error}", error)

    def _refuse(self, schema_id: int, why: str, cause: Exception | None = None) -> NoReturn:
        self._refused[schema_id] = why
        raise UndecodableRecord(why) from cause

    def encode(self, event: Event, *, sealed: bool = True) -> bytes:
        """Encode an event. Raises UnknownRecord for a class outside the catalogue, WrittenTooSoon, and ValueError for a
        field that does not fit. If content is encrypted, raises UnknownSessionKey (fetch it, try again),
        SessionIsErased. Without `sealed`, content is never encrypted, for comparisons within this process."""
        name = type(event).__name__
        if name not in self._headers:
            raise UnknownRecord(f"{name} is not a record of the catalogue")
        if self._unwritten and (held := self._unwritten & _types(event)):
            raise WrittenTooSoon(
                f"{name} holds {', '.join(sorted(held))}, which the last release cannot read: this release reads it, "
                "the next one may write it (turnlog.schemas.events.UNWRITTEN)"
            )
        if sealed and name in self._seals and self._cipher is not None:
            return self._encode_sealed(name, event, self._cipher)
        return self._encode(name, event)

    def _encode_sealed(self, name: str, event: Event, cipher: ContentCipher) -> bytes:
        """Encode an event with its content encrypted."""
        write = binary.content_writer(name)
        try:
            parts, found = [self._headers[name]], list[Found]()
            write(event, parts, found.append)
        except binary.NOT_PLAIN:  # fastavro knows how to write it, or says what is wrong with it
            datum = fastavro.schemaless_reader(
                io.BytesIO(self._encode(name, event)[HEADER.size :]), self._present[name]
            )
            parts, found = [self._headers[name]], []
            write(_from_avro(ALL[name])(datum), parts, found.append)
        if found or holds_content(event):  # what holds none needs no key, and may also be written after an erasure
            seal(event, parts, found, cipher)
        return b"".join(parts)

    def _encode(self, name: str, event: Event) -> bytes:
        if (write := binary.writer(name)) is not None:
            parts = [self._headers[name]]
            try:
                write(event, parts.append)
                return b"".join(parts)
            except binary.NOT_PLAIN:
                pass  # fastavro knows how to write it, or says what is wrong with it
        out = io.BytesIO()
        out.write(self._headers[name])
        fastavro.schemaless_writer(out, self._present[name], _to_avro(ALL[name])(event), strict=True)
        return out.getvalue()

    def is_erased(self, event: Event) -> bool:
        """Return whether the event is of a kind with content, and its session is known to be erased. `encode` refuses
        such an event if it holds content."""
        seals = type(event).__name__ in self._seals
        return seals and self._cipher is not None and self._cipher.is_erased(event.session_id)

    def decode(self, data: bytes) -> Event:
        """Decode a framed record. Raises UnknownSchemaId (fetch the schema, `hold` it, try again), LaterKind (skip the
        record) or UndecodableRecord (dead-letter it); for encrypted content also UnknownSessionKey (fetch the key, try
        again), MasterKeyMissing and WrongMasterKey."""
        read = self._readers.get(data[: HEADER.size])
        event, end = None, -1
        if read is not None:
            try:
                event, end = read(data, HEADER.size)
            except binary.NOT_PLAIN:
                end = -1  # fastavro knows how to read it, or says what is wrong with it
        if end != len(data):
            event = self._decode(data)
        return self._with_content(data, event) if self._sealed else event

    def _decode(self, data: bytes) -> Event:
        """Decode with fastavro."""
        name, written = self._frame(data)
        stream = io.BytesIO(data)  # shares the bytes, where a slice would copy them
        stream.seek(HEADER.size)
        try:
            datum = fastavro.schemaless_reader(stream, written, self._present[name])
            event = _from_avro(ALL[name])(datum)
        # fastavro raises whatever its Python or C code meets in bytes that are not of their schema.
        except Exception as error:
            raise UndecodableRecord(f"{name}: the Avro body is broken ({type(error).__name__}: {error})") from error
        if stream.read(1):
            raise UndecodableRecord(f"{name}: bytes follow the Avro body")
        header = data[: HEADER.size]
        if header not in self._readers:
            same = written is self._present[name] or canonical(written) == canonical(self._present[name])
            self._readers[header] = binary.reader(name) if same else None
        return event

    def _with_content(self, data: bytes, event: Event) -> Event:
        """Return the event with its content decrypted, if its schema says that it is encrypted."""
        if HEADER.unpack_from(data)[1] not in self._sealed:
            return event
        if self._cipher is None:
            raise MasterKeyMissing(f"the content of {type(event).__name__} {event.event_id} is encrypted")
        try:
            unseal(event, self._cipher)
        except ValueError as error:
            raise UndecodableRecord(
                f"{type(event).__name__} {event.event_id}: a content field is not valid ciphertext ({error})"
            ) from error
        return event

    def frame(self, data: bytes) -> tuple[str, bytes]:
        """Return (record name, Avro body) of framed bytes without decoding the body. Raises the errors of `decode`."""
        return self._frame(data)[0], data[HEADER.size :]

    def identify_writer(self, data: bytes) -> tuple[str, str]:
        """Return (record name, hex sha256 of the writer's schema in parsing canonical form) of framed bytes without
        decoding the body. Raises the errors of `decode`. Source: Avro specification, "Parsing Canonical Form for
        Schemas"."""
        name, schema = self._frame(data)
        schema_id = HEADER.unpack_from(data)[1]
        if schema_id not in self._fingerprints:
            self._fingerprints[schema_id] = fingerprint(canonical(schema), "SHA-256")
        return name, self._fingerprints[schema_id]

    def _frame(self, data: bytes) -> tuple[str, Any]:
        if len(data) < HEADER.size or data[0] != MAGIC:
            raise UndecodableRecord(f"no Confluent frame: starts with {data[:5].hex() or 'nothing'}")
        schema_id = HEADER.unpack_from(data)[1]
        if schema_id in self._later:
            raise LaterKind(self._later[schema_id])
        if schema_id in self._refused:
            raise UndecodableRecord(self._refused[schema_id])
        if schema_id not in self._written:
            raise UnknownSchemaId(schema_id)
        name, schema = self._written[schema_id]
        if name in self._unwritten:
            raise LaterKind(name)
        return name, schema


def plain(event: Event) -> Any:
    """Return the event as the dict that Avro writers accept (enums as symbols, nested records as dicts)."""
    return _to_avro(ALL[type(event).__name__])(event)


def _types(value: object) -> set[str]:
    """Return the names of the records that an event is made of."""
    if dataclasses.is_dataclass(value):
        inner = (_types(getattr(value, field.name)) for field in dataclasses.fields(value))
        return {type(value).__name__}.union(*inner)
    if isinstance(value, tuple):
        return set().union(*map(_types, value))
    return set()


@functools.cache
def _to_avro(record: type) -> Convert:
    """Return a function from the record to its datum. The conversions of its fields are looked up only once, here."""
    names = tuple(field_types(record))
    values = operator.attrgetter(*names) if len(names) > 1 else lambda event: (getattr(event, names[0]),)
    others = tuple((name, convert) for name, kind in field_types(record).items() if (convert := _writes(kind)))

    def to_dict(event: Any) -> dict[str, Any]:
        datum = dict(zip(names, values(event), strict=True))
        for name, convert in others:
            datum[name] = convert(datum[name])
        return datum

    return to_dict


@functools.cache
def _from_avro(record: type) -> Convert:
    """Return the inverse of `_to_avro`; it modifies the datum that it gets."""
    others = tuple((name, convert) for name, kind in field_types(record).items() if (convert := _reads(kind)))

    def from_dict(datum: dict[str, Any]) -> Any:
        for name, convert in others:
            datum[name] = convert(datum[name])
        return record(**datum)

    return from_dict


def _writes(kind: Any) -> Convert | None:
    """Return the conversion of a value of this annotation to an Avro datum, or None if the value is one already."""
    match _shape(kind):
        case ("record", record):
            return _to_avro(record)
        case ("optional", record):
            to_dict = _to_avro(record)
            return lambda value: to_dict(value) if type(value) is record else value
        case ("array", item):
            convert = _writes(item)
            return list if convert is None else lambda values: [convert(value) for value in values]
        case _:
            return None


def _reads(kind: Any) -> Convert | None:
    """Return the inverse of `_writes`."""
    match _shape(kind):
        case ("record", record):
            return _from_avro(record)
        case ("optional", record):
            from_dict = _from_avro(record)
            return lambda datum: from_dict(datum) if type(datum) is dict else datum
        case ("array", item):
            convert = _reads(item)
            return tuple if convert is None else lambda data: tuple([convert(datum) for datum in data])
        case ("enum", enum):
            return {member.value: member for member in enum}.__getitem__
        case _:
            return None


def _shape(kind: Any) -> tuple[str, Any]:
    origin = get_origin(kind)
    if origin is Annotated:
        return "plain", None
    if origin in (Union, UnionType):
        records = [arm for arm in get_args(kind) if arm is not NoneType and dataclasses.is_dataclass(arm)]
        return ("optional", records[0]) if records else ("plain", None)
    if origin is tuple:
        return "array", get_args(kind)[0]
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return "enum", kind
    if dataclasses.is_dataclass(kind):
        return "record", kind
    return "plain", None


__all__ = ["HEADER", "Codec", "avro_schema", "plain"]
