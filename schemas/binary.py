"""Readers and writers of the event records' Avro bodies: straight-line Python generated from their annotations.

They handle plain bodies of the current schemas. Anything that is not plain (a negative block, an overlong number, a
value of another type, broken bytes) raises one of NOT_PLAIN, and the codec leaves the decision to fastavro. So only
fastavro's verdict counts, and the tests run both over the same events and bytes. Measured against fastavro and its
dicts, in us: TurnCompleted 39 -> 8 read and 39 -> 5 written, TokenSnapshot of 1,024 tokens 27 -> 8 and 32 -> 4,
SegmentSample of 8,192 tokens 66 -> 22 and 73 -> 13, TurnTreeAssembled of 8 turns 99 -> 32 and 130 -> 17. Reference:
Apache Avro 1.11 specification, "Binary Encoding".

A frozen dataclass sets each field by a function call. Its twin, with the same bases and slots, takes plain assignments,
and then its instance is switched to the record's class: 0.5 instead of 6.3 us for the 26 fields of a TurnCompleted, 0.4
instead of 1.3 for the 8 of a TreeNode. This is meant for the few records that are written once per turn.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
from collections.abc import Callable
from enum import StrEnum
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from turnlog.schemas.avsc import avro_schema, field_types, stored_schema
from turnlog.schemas.events import ALL
from turnlog.schemas.types import CONTENT

Record = TypeVar("Record")


@functools.cache
def twin(record: type) -> type:
    """Return a class with the same bases and slots, whose instances can be switched to the class `record`. Raises
    TypeError for a class that is not a slotted dataclass, or that has a `__post_init__`."""
    if not dataclasses.is_dataclass(record) or "__slots__" not in vars(record) or hasattr(record, "__post_init__"):
        raise TypeError(f"{record.__name__} is no slotted dataclass without checks of its own")
    plain = {name: getattr(object, name) for name in ("__init__", "__setattr__", "__delattr__")}
    return type(f"{record.__name__}Twin", record.__bases__, {"__slots__": vars(record)["__slots__"], **plain})


def constructor(record: type[Record]) -> Callable[..., Record]:
    """Return a function that creates a record from all its fields, in their order and without defaults."""
    names = [field.name for field in dataclasses.fields(record)]  # type: ignore[arg-type]
    lines = [f"def make({', '.join(names)}):", "    made = Twin()"]
    lines += [f"    made.{name} = {name}" for name in names]
    lines += ["    made.__class__ = Record", "    return made"]
    found: dict[str, Any] = {"Twin": twin(record), "Record": record}  # type: ignore[arg-type]
    exec(compile("\n".join(lines), f"<{__name__}.{record.__name__}>", "exec"), found)
    return found["make"]  # type: ignore[no-any-return]


NOT_PLAIN = (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError, struct.error)
Read = Callable[[bytes, int], tuple[Any, int]]
"""(bytes, start of the body) -> (event, end of the body). The caller checks that the body ends where the bytes do."""
Write = Callable[[Any, Callable[[bytes], None]], None]
"""(event, append): appends the body part by part."""


@functools.cache
def reader(name: str) -> Read | None:
    """Return the generated reader of a record, or None if its class and its stored schema differ."""
    code = _Code()
    code.line("def read(b, p):")
    _read(code, ALL[name], "event", 1)
    code.line("return event, p", 1)
    return code.function("read", READING) if avro_schema(ALL[name]) == stored_schema(name) else None


WriteContent = Callable[[Any, list[bytes], Callable[[tuple[int, str, bool]], None]], None]
"""(event, parts, found): appends the body part by part, and calls `found` with the place of each content field that is
not empty (turnlog.schemas.content.Found)."""


@functools.cache
def content_writer(name: str) -> WriteContent:
    """Return the generated writer of a record that also tells where its content fields are."""
    assert avro_schema(ALL[name]) == stored_schema(name), f"{name}.avsc is not the schema of its class: make schemas"
    code = _Code()
    code.line("def write(event, parts, found):")
    code.line("    a = parts.append")
    _write(code, ALL[name], "event", 1, path="")
    return code.function("write", WRITING)  # type: ignore[no-any-return]


@functools.cache
def writer(name: str) -> Write | None:
    """Return the generated writer of a record, or None if its class and its stored schema differ."""
    code = _Code()
    code.line("def write(event, a):")
    _write(code, ALL[name], "event", 1)
    return code.function("write", WRITING) if avro_schema(ALL[name]) == stored_schema(name) else None


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Return (number, still zigzag-coded, and the offset behind it). Raises ValueError above 64 bits, IndexError at the
    end of the data."""
    number = shift = 0
    while (byte := data[at]) & 128:
        number |= (byte & 127) << shift
        shift += 7
        at += 1
        if shift > 63:
            raise ValueError("a number of more than 10 bytes")
    number |= byte << shift
    if number >> 64:
        raise ValueError("a number of more than 64 bits")
    return number, at + 1


def size(data: bytes, at: int) -> tuple[int, int]:
    """Return (a length or count, and the offset behind it). Raises ValueError if it is negative or larger than the
    length of the data."""
    number, at = varint(data, at)
    if number & 1 or number >> 1 > len(data):
        raise ValueError("a negative or absurd length")
    return number >> 1, at


@functools.lru_cache(maxsize=1 << 14, typed=True)
def long(number: int) -> bytes:
    """Encode an int as Avro int or long. Raises OverflowError beyond 64 bits, TypeError for anything but an int."""
    if type(number) is not int:
        raise TypeError(f"{number!r} is no int")
    if not -(1 << 63) <= number < 1 << 63:
        raise OverflowError(f"{number} does not fit 64 bits")
    left, out = (number << 1) ^ (number >> 63), bytearray()
    while left > 127:
        out.append(left & 127 | 128)
        left >>= 7
    out.append(left)
    return bytes(out)


SMALL = tuple(long(number) for number in range(1024))
DOUBLE = struct.Struct("<d")
ZIGZAG = tuple((coded >> 1) ^ -(coded & 1) for coded in range(128))
"""Zigzag-coded number of one byte -> the number."""
READING = {
    "varint": varint, "size": size, "double": DOUBLE.unpack_from, "BOOLEANS": (False, True), "ZIGZAG": ZIGZAG,
}  # fmt: skip
WRITING = {"long": long, "SMALL": SMALL, "double": DOUBLE.pack, "BOOLEANS": {False: b"\0", True: b"\1"}}


class _Code:
    """Lines of a function under construction, and the constants that they refer to."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._names: dict[str, Any] = {}
        self._count = 0

    def line(self, text: str, depth: int = 0) -> None:
        self._lines.append("    " * depth + text)

    def name(self) -> str:
        """Return a variable name that no other line uses."""
        self._count += 1
        return f"v{self._count}"

    def constant(self, value: Any) -> str:
        """Return a global name for `value`."""
        name = f"C{len(self._names)}"
        self._names[name] = value
        return name

    def function(self, name: str, names: dict[str, Any]) -> Any:
        found = {**names, **self._names}
        exec(compile("\n".join(self._lines), f"<{__name__}.{name}>", "exec"), found)
        return found[name]


def _read(code: _Code, kind: Any, target: str, depth: int) -> None:
    """Emit lines that read a value of this annotation at p into `target` and advance p."""
    origin = get_origin(kind)
    if origin is Annotated:
        _read(code, get_args(kind)[0], target, depth)
    elif kind in SCALARS:
        for text in SCALARS[kind]:
            code.line(text.format(target), depth)
    elif origin in (Union, UnionType):
        code.line("n = b[p]; p += 1", depth)
        for index, arm in enumerate(_arms(kind)):
            code.line(f"{'elif' if index else 'if'} n == {2 * index}:", depth)
            _read(code, arm, target, depth + 1)
        code.line("else: raise ValueError(n)", depth)
    elif origin in (tuple, dict):
        _read_blocks(code, kind, target, depth)
    elif issubclass(kind, StrEnum):
        members = code.constant({2 * index: member for index, member in enumerate(kind)})
        code.line(f"{target} = {members}[b[p]]; p += 1", depth)
    else:
        record = code.name()
        code.line(f"{record} = {code.constant(twin(kind))}()", depth)
        for field, annotation in field_types(kind).items():
            _read(code, annotation, f"{record}.{field}", depth)
        code.line(f"{record}.__class__ = {code.constant(kind)}; {target} = {record}", depth)


SIZE = (
    "n = b[p]",
    "if n & 129:",
    "    m = b[p + 1]",
    "    if n & 1 or m & 128: n, p = size(b, p)",
    "    else: n = (n & 127) >> 1 | m << 6; p += 2",
    "else: n >>= 1; p += 1",
)
"""Reads a length of up to two bytes without a call: turnlog's ids have 64 characters, and every record has several."""
SCALARS: dict[Any, tuple[str, ...]] = {
    str: (*SIZE, "q = p + n; {} = b[p:q].decode(); p = q"),
    bytes: (*SIZE, "q = p + n; {} = b[p:q]; p = q"),
    int: (
        "n = b[p]",
        "if n < 128: {0} = ZIGZAG[n]; p += 1",
        "else:",
        "    m = b[p + 1]",
        "    if m & 128: n, p = varint(b, p)",
        "    else: n = n & 127 | m << 7; p += 2",
        "    {0} = (n >> 1) ^ -(n & 1)",
    ),
    float: ("{} = double(b, p)[0]; p += 8",),
    bool: ("{} = BOOLEANS[b[p]]; p += 1",),
    NoneType: ("{} = None",),
}
"""Lines that read a scalar. A slice beyond the end is short, and the end of the body then fails the caller's check."""


def _read_blocks(code: _Code, kind: Any, target: str, depth: int) -> None:
    """Emit lines that read an array or a map: blocks of a count and that many items, then 0."""
    many, item, key = code.name(), code.name(), code.name()
    is_map = get_origin(kind) is dict
    code.line(f"{many} = {'{}' if is_map else '[]'}", depth)
    code.line("while b[p]:", depth)
    for text in SIZE:
        code.line(text, depth + 1)
    code.line("for _ in range(n):", depth + 1)
    if is_map:
        _read(code, str, key, depth + 2)
    _read(code, get_args(kind)[int(is_map)], item, depth + 2)
    code.line(f"{many}[{key}] = {item}" if is_map else f"{many}.append({item})", depth + 2)
    code.line(f"p += 1; {target} = {many if is_map else f'tuple({many})'}", depth)


def _write(code: _Code, kind: Any, value: str, depth: int, *, path: str | None = None, content: bool = False) -> None:
    """Emit lines that append the expression `value` of this annotation. With `path`, the names of the fields around it,
    they also tell the places of content."""
    origin = get_origin(kind)
    if origin is Annotated:
        _write(code, get_args(kind)[0], value, depth, path=path, content=content)
    elif kind in WRITTEN:
        first, *others = WRITTEN[kind]
        code.line(first.format(value), depth)
        if path is not None and content and kind is not NoneType:
            code.line(f"if v: found((len(parts), {path[:-1]!r}, {kind is str}))", depth)
        for text in others:
            code.line(text.format(value), depth)
    elif origin in (Union, UnionType):
        found = code.name()
        code.line(f"{found} = {value}", depth)
        for index, arm in enumerate(_arms(kind)):
            python = get_args(arm)[0] if get_origin(arm) is Annotated else arm
            code.line(f"{'elif' if index else 'if'} type({found}) is {code.constant(python)}:", depth)
            code.line(f"a({long(index)!r})", depth + 1)
            _write(code, arm, found, depth + 1, path=path, content=content)
        code.line(f"else: raise TypeError({found})", depth)
    elif origin in (tuple, dict):
        _write_blocks(code, kind, value, depth, path)
    elif issubclass(kind, StrEnum):
        indexes = code.constant({member: long(index) for index, member in enumerate(kind)})
        code.line(f"a({indexes}[{value}])", depth)
    else:
        record = code.name()
        code.line(f"{record} = {value}", depth)
        for field, annotation in zip(dataclasses.fields(kind), field_types(kind).values(), strict=True):
            inner = None if path is None else f"{path}{field.name}."
            _write(code, annotation, f"{record}.{field.name}", depth, path=inner, content=CONTENT in field.metadata)


COUNTED = ("n = len(v)", "a(SMALL[n] if n < 1024 else long(n))")
WRITTEN: dict[Any, tuple[str, ...]] = {
    str: ("v = {}.encode()", *COUNTED, "a(v)"),
    bytes: ("v = {}", "if type(v) is not bytes: raise TypeError(v)", *COUNTED, "a(v)"),
    int: ("v = {}", "a(SMALL[v] if 0 <= v < 1024 else long(v))"),
    float: ("a(double({}))",),
    bool: ("a(BOOLEANS[{}])",),
    NoneType: ("pass",),
}


def _write_blocks(code: _Code, kind: Any, value: str, depth: int, path: str | None) -> None:
    """Emit lines that append an array or a map as one block, as fastavro does."""
    many, item, key = code.name(), code.name(), code.name()
    is_map = get_origin(kind) is dict
    code.line(f"{many} = {value}", depth)
    code.line(f"if {many}:", depth)
    code.line(f"n = len({many})", depth + 1)
    code.line(COUNTED[1], depth + 1)
    code.line(f"for {key}, {item} in {many}.items():" if is_map else f"for {item} in {many}:", depth + 1)
    if is_map:
        _write(code, str, key, depth + 2)
    _write(code, get_args(kind)[int(is_map)], item, depth + 2, path=path)
    code.line(r"a(b'\0')", depth)


def _arms(kind: Any) -> list[Any]:
    """Return the arms of a union in the order of its schema: null first."""
    return sorted(get_args(kind), key=lambda arm: arm is not NoneType)
