"""Archive files: Avro containers of records, whose values keep the schemas that they were written with.

Each record is an envelope whose `record` is a union of the events' schemas. A name may be defined only once in a file,
so the first of two events that share a nested type defines it and the second refers to it. The second version of a
schema gets its own namespace. Source: Apache Avro 1.11 specification, "Names" and "Unions".
"""

from __future__ import annotations

import hashlib
import io
import json
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import fastavro

from turnlog.infra.log import Partition, Record
from turnlog.schemas.codec import HEADER, MAGIC, UnsafeSchema, parsed_schema

PRIMITIVES = frozenset({"null", "boolean", "int", "long", "float", "double", "bytes", "string"})
NAMED = frozenset({"record", "error", "enum", "fixed"})
NAMESPACE = "turnlog.archive.v1"
Schema = Any
"""A parsed JSON schema: str, list or dict."""


class Unmergeable(Exception):
    """The schema cannot be part of a union: it is not a named record, or it uses a name that it does not define."""


class UnionSchema:
    """The union under construction. Arm 0 is null; each new schema gets the next arm."""

    def __init__(self) -> None:
        self.arms: list[Schema] = ["null"]
        self._defined: dict[str, Schema] = {}

    def add(self, schema_id: int, schema: Mapping[str, Any]) -> int:
        """Add a schema and return its arm. Raises Unmergeable."""
        whole = _expand_schema(dict(schema), "", {}, ())
        if not isinstance(whole, dict) or whole.get("type") != "record":
            raise Unmergeable(f"schema id {schema_id} is not a record")
        known = dict(self._defined)
        arm = _replace_defined(whole, known)
        if arm is None or isinstance(arm, str):
            space = f"{NAMESPACE}.id{schema_id}"
            known = dict(self._defined)
            arm = _replace_defined(_rename_types(whole, lambda name: f"{space}.{name.rpartition('.')[2]}"), known)
        if arm is None or isinstance(arm, str):
            raise Unmergeable(f"schema id {schema_id}: two of its types share a short name")
        self._defined = known
        self.arms.append(arm)
        return len(self.arms) - 1

    def envelope(self) -> Schema:
        """Return the schema of the file."""
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


def _expand_schema(node: Schema, space: str, names: dict[str, Schema], inside: tuple[str, ...]) -> Schema:
    """Return the schema with full names, and every reference replaced by its definition. Recursive references keep
    the name."""
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
        return [_expand_schema(arm, space, names, inside) for arm in node]
    if node["type"] not in NAMED:
        parts = [name for name in ("type", "items", "values") if name in node and node[name] not in ("array", "map")]
        return {**node, **{name: _expand_schema(node[name], space, names, inside) for name in parts}}
    full = node["name"]
    if "." not in full and (space := node.get("namespace", space)):
        full = f"{space}.{full}"
    space = full.rpartition(".")[0]
    whole = {name: value for name, value in node.items() if name != "namespace"} | {"name": full}
    if "fields" in node:
        within = (*inside, full)
        whole["fields"] = [
            {**field, "type": _expand_schema(field["type"], space, names, within)} for field in node["fields"]
        ]
    names[full] = whole
    return whole


def _replace_defined(node: Schema, defined: dict[str, Schema]) -> Schema | None:
    """Replace definitions that are already in `defined` by their names. Returns None if a name is defined
    differently there."""
    if isinstance(node, str):
        return node
    if isinstance(node, list):
        arms = [_replace_defined(arm, defined) for arm in node]
        return None if None in arms else arms
    if node["type"] in NAMED:
        if node["name"] in defined:
            return node["name"] if defined[node["name"]] == node else None
        defined[node["name"]] = node
    placed = dict(node)
    for part in ("type", "items", "values"):
        if part in node and not (part == "type" and isinstance(node[part], str)):
            placed[part] = _replace_defined(node[part], defined)
            if placed[part] is None:
                return None
    if "fields" in node:
        placed["fields"] = [{**field, "type": _replace_defined(field["type"], defined)} for field in node["fields"]]
        if any(field["type"] is None for field in placed["fields"]):
            return None
    return placed


def _rename_types(node: Schema, rename: Callable[[str], str]) -> Schema:
    if isinstance(node, str):
        return node if node in PRIMITIVES else rename(node)
    if isinstance(node, list):
        return [_rename_types(arm, rename) for arm in node]
    renamed = dict(node)
    if node["type"] in NAMED:
        renamed["name"] = rename(node["name"])
    for part in ("type", "items", "values"):
        if part in node and not isinstance(node[part], str):
            renamed[part] = _rename_types(node[part], rename)
    if "fields" in node:
        renamed["fields"] = [{**field, "type": _rename_types(field["type"], rename)} for field in node["fields"]]
    return renamed


MEDIA_TYPE = "application/avro"
OCF_MAGIC = b"Obj\x01"
BLOCK_BYTES = 1 << 20
DEFLATE_LEVEL = 1
"""Compression level. Token ids hardly compress: level 6 takes three times as long and saves two per cent."""
DEFLATE, NULL = "deflate", "null"
NOTHING = b"\x00"


class CorruptArchive(Exception):
    """An archive file cannot be read. Remedy: restore the object in the store from a copy."""


Written = Mapping[int, Mapping[str, Any]]
"""Schema id -> schema as registered. Ids that belong to no record of the catalogue are absent."""


class RangeFile:
    """A file under construction: add records in offset order, then call `content`."""

    def __init__(self, place: Partition, *, codec: str = DEFLATE) -> None:
        self._place = place
        self._codec = codec
        self._union = UnionSchema()
        self._arms: dict[int, int | None] = {}
        self._schemas: dict[int, Mapping[str, Any]] = {}
        self._readers: dict[int, Any] = {}
        self._blocks: list[tuple[int, bytes]] = []
        self._block = bytearray()
        self._in_block = 0
        self._sync = b""
        self.count = 0
        self.bytes = 0
        """Bytes of keys and values, as on the log."""
        self.held = 0
        """Approximate memory in bytes."""
        self.first: tuple[int, int] = (0, 0)
        """(offset, timestamp) of the first record."""
        self.last: tuple[int, int] = (0, 0)
        self.times: tuple[int, int] = (0, 0)
        """Earliest and latest timestamp."""

    def add(self, record: Record, schemas: Written) -> None:
        """Append one record. `schemas` contains the schema of its id, if it is known."""
        at = (record.offset, record.timestamp_ms)
        self.first = self.first if self.count else at
        early, late = self.times if self.count else (at[1], at[1])
        self.last, self.times = at, (min(early, at[1]), max(late, at[1]))
        self.count += 1
        self.bytes += len(record.key) + len(record.value)
        arm = self._arm(record.value, schemas)
        block = self._block
        before = len(block)
        block += zigzag(record.offset) + zigzag(record.timestamp_ms) + zigzag(len(record.key)) + record.key
        block += _headers(record.headers)
        if arm is None:
            block += NOTHING + zigzag(0) + NOTHING + zigzag(1) + zigzag(len(record.value)) + record.value
        else:
            body = len(record.value) - HEADER.size
            block += zigzag(1) + zigzag(HEADER.unpack_from(record.value)[1]) + zigzag(body) + zigzag(arm)
            block += memoryview(record.value)[HEADER.size :]
            block += NOTHING
        self._in_block += 1
        self.held += len(block) - before
        if len(block) >= BLOCK_BYTES:
            self._close_block()

    def content(self, start: int, end: int) -> bytes:
        """Return the file for range [start, end). The same records give the same bytes."""
        self._close_block()
        sync = hashlib.sha256(f"{self._place.topic}/{self._place.number}/{start}/{end}".encode()).digest()[:16]
        metadata = {
            "avro.schema": json.dumps(self._union.envelope()),
            "avro.codec": self._codec,
            "turnlog.topic": self._place.topic,
            "turnlog.partition": str(self._place.number),
            "turnlog.range": f"{start}-{end}",
            "turnlog.schemas": json.dumps(
                {str(at): {"subject": str(s["name"]), "schema": s} for at, s in self._schemas.items()}
            ),
        }
        out = [OCF_MAGIC, zigzag(len(metadata))]
        for name, value in metadata.items():
            out += [_bytes(name.encode()), _bytes(value.encode())]
        out += [NOTHING, sync]
        for count, packed in self._blocks:
            out += [zigzag(count), zigzag(len(packed)), packed, sync]
        return b"".join(out)

    def _close_block(self) -> None:
        if not self._in_block:
            return
        raw = bytes(self._block)
        packed = _deflate(raw) if self._codec == DEFLATE else raw
        self._blocks.append((self._in_block, packed))
        self.held += len(packed) - len(raw)
        self._block, self._in_block = bytearray(), 0

    def _arm(self, value: bytes, schemas: Written) -> int | None:
        """Return the union's arm for a value that can be decoded with its schema, or None if it must be stored raw."""
        if len(value) < HEADER.size or value[0] != MAGIC:
            return None
        schema_id = HEADER.unpack_from(value)[1]
        schema = schemas.get(schema_id)
        if schema is None:
            return None
        if schema_id not in self._arms:
            self._open_arm(schema_id, schema)
        arm = self._arms[schema_id]
        return arm if arm is not None and _decodes(value, self._readers[schema_id]) else None

    def _open_arm(self, schema_id: int, schema: Mapping[str, Any]) -> None:
        try:
            reader = parsed_schema(schema)
            self._arms[schema_id] = self._union.add(schema_id, schema)
        except (UnsafeSchema, Unmergeable):
            self._arms[schema_id] = None
            return
        self._schemas[schema_id] = schema
        self._readers[schema_id] = reader


def read_range(content: bytes, place: Partition) -> Iterator[list[Record]]:
    """Yield the records of a file, block by block, with their values as on the log. Raises CorruptArchive."""
    try:
        metadata, at = _file_header(content)
        sync, at = content[at : at + 16], at + 16
        deflated = metadata.get("avro.codec", b"null") == DEFLATE.encode()
        while at < len(content):
            count, at = _long(content, at)
            size, at = _long(content, at)
            if size < 0:  # otherwise the next block would be one that was already read
                raise CorruptArchive(f"{place.topic}[{place.number}]: a block cannot have {size} bytes")
            packed = content[at : at + size]
            if content[at + size : at + size + 16] != sync:
                raise CorruptArchive(f"{place.topic}[{place.number}]: a block has no end mark")
            yield _records(zlib.decompress(packed, -15) if deflated else packed, count, place)
            at += size + 16
    except (IndexError, ValueError, KeyError, OverflowError, MemoryError, struct.error, zlib.error) as error:
        raise CorruptArchive(f"{place.topic}[{place.number}]: the object is not an archive file ({error})") from error


def zigzag(value: int) -> bytes:
    """Encode a long as Avro does: zig-zag, variable length."""
    value = (value << 1) ^ (value >> 63)
    if value < 128:
        return bytes((value,))
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _long(data: bytes, at: int) -> tuple[int, int]:
    """Decode a long. Returns (value, next position). Raises IndexError."""
    byte = data[at]
    at += 1
    if byte < 128:
        return (byte >> 1) ^ -(byte & 1), at
    value, shift = byte & 127, 7
    while byte > 127:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
    return (value >> 1) ^ -(value & 1), at


def _bytes(value: bytes) -> bytes:
    return zigzag(len(value)) + value


def _headers(headers: Sequence[tuple[str, bytes]]) -> bytes:
    if not headers:
        return NOTHING
    parts = [zigzag(len(headers))]
    for name, value in headers:
        parts += [_bytes(name.encode()), _bytes(value)]
    return b"".join([*parts, NOTHING])


def _records(block: bytes, count: int, place: Partition) -> list[Record]:
    found: list[Record] = []
    at = 0
    topic, number = place
    for _ in range(count):
        offset, at = _long(block, at)
        timestamp, at = _long(block, at)
        size, at = _long(block, at)
        key, at = block[at : at + size], at + size
        headers, at = _read_headers(block, at)
        value, at = _value(block, at)
        found.append(Record(topic, number, offset, key, value, headers, timestamp))
    if at != len(block):
        raise CorruptArchive(f"{topic}[{number}]: bytes follow the last record of a block")
    return found


def _value(block: bytes, at: int) -> tuple[bytes, int]:
    known, at = _long(block, at)
    schema_id = 0
    if known:
        schema_id, at = _long(block, at)
    size, at = _long(block, at)
    arm, at = _long(block, at)
    if arm:
        value, at = HEADER.pack(MAGIC, schema_id) + block[at : at + size], at + size
        return value, at + 1
    _, at = _long(block, at)
    size, at = _long(block, at)
    return block[at : at + size], at + size


def _read_headers(block: bytes, at: int) -> tuple[tuple[tuple[str, bytes], ...], int]:
    count, at = _long(block, at)
    found: list[tuple[str, bytes]] = []
    for _ in range(count):
        size, at = _long(block, at)
        name, at = block[at : at + size].decode(), at + size
        size, at = _long(block, at)
        found.append((name, block[at : at + size]))
        at += size
    return tuple(found), at + bool(count)


def _file_header(content: bytes) -> tuple[dict[str, bytes], int]:
    if content[:4] != OCF_MAGIC:
        raise CorruptArchive("the object is not an Avro object container file")
    metadata: dict[str, bytes] = {}
    count, at = _long(content, 4)
    for _ in range(count):
        size, at = _long(content, at)
        name, at = content[at : at + size].decode(), at + size
        size, at = _long(content, at)
        metadata[name], at = content[at : at + size], at + size
    return metadata, at + 1


def _decodes(value: bytes, schema: Any) -> bool:
    stream = io.BytesIO(value)
    stream.seek(HEADER.size)
    try:
        fastavro.schemaless_reader(stream, schema, None)
    except Exception:  # fastavro may raise anything if bytes do not match their schema
        return False
    return not stream.read(1)


def _deflate(raw: bytes) -> bytes:
    packer = zlib.compressobj(DEFLATE_LEVEL, zlib.DEFLATED, -15)
    return packer.compress(raw) + packer.flush()
