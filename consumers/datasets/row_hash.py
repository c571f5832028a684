"""Hashes of rows over canonical bytes: equal rows hash equal whatever file format, batch or order they came in.

A row is sha256 over: sha256 of the columns' names and types, then each column's content in schema order. Content of n
values of one type: a byte each that says whether it is there, then
    numbers   little-endian, 0 where absent (list items: no validity bytes, they are never absent)
    text      n lengths in bytes (int32), then UTF-8
    lists     n lengths (int32), then the content of all their items
    structs   the content of each member
Rows are sha256 over the row hashes in ascending order.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator
from typing import IO, Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

DIGEST_BYTES = 32
ROWS_PER_PASS = 1 << 20
"""Row hashes sorted in memory at once."""
Slice = Callable[[int, int], list[Any]]
"""(start, stop) -> pieces of bytes: the content of those values."""


def row_digests(batch: pa.RecordBatch) -> list[bytes]:
    """32 bytes per row. Raises ValueError for NaN, which has many byte forms, and for an absent list item."""
    columns = [_slice(column) for column in batch.columns]
    shape = ",".join(f"{field.name}:{_kind(field.type)}" for field in batch.schema)
    head = hashlib.sha256(shape.encode()).digest()
    digests = []
    for row in range(len(batch)):
        pieces = [head]
        for column in columns:
            pieces += column(row, row + 1)
        digests.append(hashlib.sha256(b"".join(pieces)).digest())
    return digests


def rows_sha256(digests: IO[bytes], rows: int) -> str:
    """Hex sha256 over the row hashes in `digests` (a file of 32 bytes per row), sorted; 32 MiB at a time."""
    passes = 1
    while passes < 256 and rows > passes * ROWS_PER_PASS:
        passes *= 2
    running = hashlib.sha256()
    for low in range(0, 256, 256 // passes):
        found = [chunk[(chunk[:, 0] >= low) & (chunk[:, 0] < low + 256 // passes)] for chunk in _chunks(digests)]
        chosen = np.concatenate(found) if found else np.zeros((0, DIGEST_BYTES), np.uint8)
        words = np.ascontiguousarray(chosen).view(">u8")
        order = np.lexsort(words.T[::-1])
        running.update(chosen[order].tobytes())
    return running.hexdigest()


def canonical_json(value: object) -> bytes:
    """JSON with sorted keys, no spaces: what contents are compared by."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def _chunks(digests: IO[bytes]) -> Iterator[NDArray[np.uint8]]:
    digests.seek(0)
    while content := digests.read(DIGEST_BYTES * ROWS_PER_PASS):
        yield np.frombuffer(content, np.uint8).reshape(-1, DIGEST_BYTES)


@functools.cache
def _kind(kind: pa.DataType) -> str:
    """The type as text, without what files change (names of list items, nullability)."""
    if pa.types.is_list(kind):
        return f"list({_kind(kind.value_type)})"
    if pa.types.is_struct(kind):
        return f"struct({','.join(f'{field.name}:{_kind(field.type)}' for field in kind)})"
    return str(kind)


def _slice(values: pa.Array) -> Slice:
    """Slices of the content of `values`."""
    kind = values.type
    there = np.asarray(values.is_valid()).astype(np.uint8).data
    if pa.types.is_list(kind):
        lengths = np.asarray(pc.list_value_length(values).fill_null(0)).astype("<i4")
        ends = _ends(lengths)
        item = kind.value_type
        of_items = _plain(values.flatten()) if _is_fixed(item) else _slice(values.flatten())
        return lambda start, stop: [
            there[start:stop], lengths[start:stop].data, *of_items(ends[start], ends[stop])
        ]  # fmt: skip
    if pa.types.is_struct(kind):
        members = [_slice(member) for member in values.flatten()]
        return lambda start, stop: [there[start:stop], *(piece for each in members for piece in each(start, stop))]
    if pa.types.is_string(kind):
        filled = values.fill_null("") if values.null_count else values
        lengths = np.asarray(pc.binary_length(filled)).astype("<i4")
        ends, text = _ends(lengths), memoryview(_text(filled))
        return lambda start, stop: [there[start:stop], lengths[start:stop].data, text[ends[start] : ends[stop]]]
    zero = False if pa.types.is_boolean(kind) else 0
    of_values = _plain(values.fill_null(zero) if values.null_count else values)
    return lambda start, stop: [there[start:stop], *of_values(start, stop)]


def _plain(values: pa.Array) -> Slice:
    """Slices of numbers that are all there."""
    if values.null_count:
        raise ValueError("a list item is absent")
    numbers = np.asarray(values)
    if numbers.dtype == bool:
        numbers = numbers.astype(np.uint8)
    if numbers.dtype.kind == "f" and np.isnan(numbers).any():
        raise ValueError("NaN has no canonical form")
    content = np.ascontiguousarray(numbers, dtype=numbers.dtype.newbyteorder("<"))
    width, raw = content.itemsize, content.view(np.uint8).data
    return lambda start, stop: [raw[start * width : stop * width]]


def _is_fixed(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _ends(lengths: NDArray[np.int32]) -> list[int]:
    """Where each value begins, and the end."""
    ends: list[int] = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).tolist()
    return ends


def _text(values: pa.StringArray) -> bytes:
    """The UTF-8 of all values, one after another."""
    data = values.buffers()[2]
    if data is None:
        return b""
    offsets = np.frombuffer(values.buffers()[1], np.int32)[values.offset : values.offset + len(values) + 1]
    return bytes(data[int(offsets[0]) : int(offsets[-1])]) if len(offsets) else b""
