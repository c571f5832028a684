"""Batch files: Arrow IPC, one row per sample, memory-mappable by pyarrow, DuckDB and Hugging Face datasets.

A batch file may have a token file beside it: Parquet, one row per trained token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
from numpy.typing import NDArray

from turnlog.processors.core.batches.draws import FormedBatch
from turnlog.processors.core.batches.rows import COLUMNS, OPTIONAL, TEXT, TOKEN, BatchRows, rows_sha256
from turnlog.processors.core.batches.weighting import check_rows
from turnlog.schemas.events import Weighting

MEDIA_TYPE = "application/vnd.apache.arrow.file"
PARQUET = "application/vnd.apache.parquet"
ARROW = {"<i4": pa.int32(), "<i8": pa.int64(), "|u1": pa.uint8(), "<f4": pa.float32()}


class CorruptBatch(Exception):
    """The bytes are not a batch file, or its columns are not those of this version. Remedy: form the batch again from
    its manifest (`turnlog replay` recomputes it), or restore the object in the store."""


def rows_table(rows: BatchRows) -> pa.Table:
    """Return the table of a batch, one row per sample."""
    ends = np.cumsum(rows.lengths, dtype=np.int32)
    offsets = pa.array(np.concatenate([[0], ends]).astype(np.int32))
    columns: dict[str, pa.Array] = {}
    for name, kind, dtype in COLUMNS:
        column = getattr(rows, name)
        if column is None:
            continue
        if kind == TEXT:
            columns[name] = pa.array(column, pa.string())
        elif kind == TOKEN:
            columns[name] = pa.ListArray.from_arrays(offsets, pa.array(column, ARROW[str(dtype)]))
        elif name != "lengths":  # the list columns imply the lengths
            columns[name] = pa.array(column, ARROW[str(dtype)])
    return pa.table(columns)


def write_rows(rows: BatchRows) -> bytes:
    """Return the Arrow IPC file of a batch."""
    table = rows_table(rows)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def build_batch_file(
    batch: FormedBatch, weighting: Weighting, write: Callable[[BatchRows], bytes] = write_rows
) -> tuple[bytes, str]:
    """Return a batch's file and the rows_sha256 of its contents, after reading it back and checking it against the
    batch's weights.

    Raises WeightsDoNotAddUp; nothing may be published then.
    """
    content = write(batch.rows)
    held = read_rows(content)
    check_rows(held, batch.weights, weighting)
    return content, rows_sha256(held)


def write_tokens(rows: BatchRows, figures: Mapping[str, NDArray[np.float32]]) -> bytes:
    """Return the Parquet file of a batch's trained tokens, in order. Columns are the sample, the position within the
    row's token_ids, and the token's value of each of `figures` ([T] each)."""
    at = np.flatnonzero(rows.trained)
    row = np.repeat(np.arange(len(rows), dtype=np.int32), rows.lengths)[at]
    columns: dict[str, pa.Array] = {
        "sample_id": pa.DictionaryArray.from_arrays(pa.array(row), pa.array(rows.sample_ids, pa.string())),
        "position": pa.array((at - rows.starts[row]).astype("<i4")),
        **{name: pa.array(column[at], pa.float32()) for name, column in figures.items()},
    }
    sink = pa.BufferOutputStream()
    parquet.write_table(pa.table(columns), sink, compression="zstd")
    return bytes(sink.getvalue())


def read_rows(content: bytes) -> BatchRows:
    """Read the rows of an Arrow IPC file. Raises CorruptBatch if the bytes are anything else. The hash of the bytes
    must have been checked before, because Arrow's own checks abort the process on some malformed files."""
    try:
        return _rows(_table(content))
    # Arrow and numpy raise SystemError, TypeError, UnicodeDecodeError and more for bytes that are not their files.
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise CorruptBatch(f"not a batch file ({len(content)} bytes): {why}") from error


def _table(content: bytes) -> pa.Table:
    """Return our columns, with their types, all offsets and all texts checked. Raises ValueError, ArrowException."""
    schema = pa.ipc.open_file(pa.BufferReader(content)).schema
    ours = [(name, kind, dtype) for name, kind, dtype in COLUMNS if name != "lengths" and name in schema.names]
    for name, kind, dtype in ours:
        wanted = pa.string() if dtype is None else pa.list_(ARROW[dtype]) if kind == TOKEN else ARROW[dtype]
        if (found := schema.field(name).type) != wanted:
            raise ValueError(f"column {name} is {found}, wanted {wanted}")
    options = pa.ipc.IpcReadOptions(included_fields=[schema.names.index(name) for name, _, _ in ours])
    table = pa.ipc.open_file(pa.BufferReader(content), options=options).read_all()
    table.validate(full=True)  # numpy would follow offsets beyond the end of their buffer
    return table


def _rows(table: pa.Table) -> BatchRows:
    values: dict[str, object] = {}
    for name, kind, dtype in COLUMNS:
        if name == "lengths":
            lists = table["token_ids"].combine_chunks()
            values[name] = np.diff(_list_array(lists).offsets.to_numpy()).astype("<i4")
            continue
        if name in OPTIONAL and name not in table.column_names:
            continue
        column = table[name].combine_chunks()
        if kind == TEXT:
            values[name] = tuple(column.to_pylist())
        else:
            flat = _list_array(column).flatten() if kind == TOKEN else column
            if isinstance(flat, pa.ChunkedArray):
                flat = pa.concat_arrays(flat.chunks)
            values[name] = np.ascontiguousarray(flat.to_numpy(zero_copy_only=False).astype(dtype))
    return BatchRows(**values)  # type: ignore[arg-type]


def _list_array(column: pa.Array | pa.ChunkedArray) -> pa.ListArray:
    array = pa.concat_arrays(column.chunks) if isinstance(column, pa.ChunkedArray) else column
    if not isinstance(array, pa.ListArray):
        raise ValueError("a token column is not a list column")
    return array
