"""Batch files: Arrow IPC, one row per sample, memory-mappable by pyarrow, DuckDB and Hugging Face datasets.

A batch file may have a token file beside it: Parquet, one row per trained token.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
from numpy.typing import NDArray

from turnlog.processors.core.batches.draws import FormedBatch
from turnlog.processors.core.batches.rows import COLUMNS, OPTIONAL, TEXT, TOKEN, BatchRows, rows_sha256
from turnlog.processors.core.batches.weighting import check_rows
from turnlog.schemas import MasterKeyMissing, SessionIsErased
from turnlog.schemas.content import HEAD_BYTES, ContentCipher
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


SEALED = "sealed"
"""Column of a file whose tokens are encrypted: the head of the encrypted row (infra/session_keys.py). The columns
`token_ids` and `logprobs` then hold the encrypted values, as many as there are tokens."""


def write_rows(rows: BatchRows, cipher: ContentCipher | None = None) -> bytes:
    """Return the Arrow IPC file of a batch. With `cipher`, the tokens of each row are encrypted under the key of its
    session. Raises the errors of `ContentCipher.encrypt`."""
    table = rows_table(rows) if cipher is None else _sealed_table(rows, cipher)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def _sealed_table(rows: BatchRows, cipher: ContentCipher) -> pa.Table:
    heads: list[bytes] = []
    ids, logprobs = rows.token_ids.copy(), rows.logprobs.copy()
    for row, own in enumerate(_slices(rows)):
        parts = _values((ids, logprobs), own)
        head, sealed = cipher.encrypt(rows.session_ids[row], _about(rows.sample_ids[row]), parts)
        heads.append(head)
        _put_values((ids, logprobs), own, sealed)
    table = rows_table(dataclasses.replace(rows, token_ids=ids, logprobs=logprobs))
    return table.append_column(SEALED, pa.array(heads, pa.binary(HEAD_BYTES)))


def _about(sample_id: str) -> bytes:
    """Return what is authenticated with the tokens of a row."""
    return f"batch({sample_id})".encode()


def _slices(rows: BatchRows) -> Iterator[slice]:
    """Yield the place of each row in the columns of tokens."""
    return map(slice, rows.starts.tolist(), (rows.starts + rows.lengths).tolist())


def _values(columns: Iterable[NDArray[Any]], own: slice) -> list[bytes]:
    """Return the values of a row, column by column."""
    return [column[own].tobytes() for column in columns]


def _put_values(columns: Iterable[NDArray[Any]], own: slice, content: bytes) -> None:
    """Replace the values of a row by those in `content`, as `_values` gave them."""
    count, start = own.stop - own.start, 0
    for column in columns:
        column[own] = np.frombuffer(content, column.dtype, count, start)
        start += count * column.itemsize


def _decrypt_rows(rows: BatchRows, heads: Sequence[bytes], cipher: ContentCipher | None) -> OpenedRows:
    """Decrypt the tokens of each row. Raises MasterKeyMissing, and the errors of `ContentCipher.decrypt`."""
    if cipher is None:
        raise MasterKeyMissing("the tokens of a batch file are encrypted")
    ids, logprobs = rows.token_ids.copy(), rows.logprobs.copy()
    erased = np.zeros(len(rows), bool)
    for row, own in enumerate(_slices(rows)):
        parts = _values((ids, logprobs), own)
        content = cipher.decrypt(_about(rows.sample_ids[row]), heads[row], parts)
        erased[row] = content is None
        _put_values((ids, logprobs), own, content or bytes(sum(map(len, parts))))
    return OpenedRows(dataclasses.replace(rows, token_ids=ids, logprobs=logprobs), erased)


@dataclass(frozen=True, slots=True)
class OpenedRows:
    """The rows of a batch file, and those of sessions that were erased, whose tokens are 0."""

    rows: BatchRows
    erased: NDArray[np.bool_]
    """[n] True for rows of erased sessions."""


def build_batch_file(
    batch: FormedBatch,
    weighting: Weighting,
    write: Callable[[BatchRows], bytes] = write_rows,
    cipher: ContentCipher | None = None,
) -> tuple[bytes, str]:
    """Return a batch's file and the rows_sha256 of its contents, after reading it back and checking it against the
    batch's weights.

    Raises WeightsDoNotAddUp; nothing may be published then.
    """
    content = write(batch.rows) if cipher is None else write_rows(batch.rows, cipher)
    held = open_rows(content, cipher).rows
    check_rows(held, batch.weights, weighting)
    return content, rows_sha256(held)


def write_tokens(
    rows: BatchRows, figures: Mapping[str, NDArray[np.float32]], cipher: ContentCipher | None = None
) -> bytes:
    """Return the Parquet file of a batch's trained tokens, in order. Columns are the sample, the position within the
    row's token_ids, and the token's value of each of `figures` ([T] each). With `cipher`, the values of each row are
    encrypted under the key of its session, or NaN if that was erased; SEALED of the file's metadata then holds the
    heads by sample as JSON. Raises UnknownSessionKey, WrongMasterKey."""
    at = np.flatnonzero(rows.trained)
    row = np.repeat(np.arange(len(rows), dtype=np.int32), rows.lengths)[at]
    values = {name: column[at].astype("<f4") for name, column in figures.items()}
    metadata = None
    if cipher is not None:
        heads = {}
        for number, own in _runs(row):
            sample = rows.sample_ids[number]
            parts = _values(values.values(), own)
            try:
                head, sealed = cipher.encrypt(rows.session_ids[number], _about_tokens(sample, values), parts)
            except SessionIsErased:  # while the step was computed
                for column in values.values():
                    column[own] = np.nan
                continue
            heads[sample] = head.hex()
            _put_values(values.values(), own, sealed)
        metadata = {SEALED: json.dumps(heads)}
    columns: dict[str, pa.Array] = {
        "sample_id": pa.DictionaryArray.from_arrays(pa.array(row), pa.array(rows.sample_ids, pa.string())),
        "position": pa.array((at - rows.starts[row]).astype("<i4")),
        **{name: pa.array(column, pa.float32()) for name, column in values.items()},
    }
    sink = pa.BufferOutputStream()
    # A dictionary of values would make all NaN equal, of which encrypted values have many.
    table = pa.table(columns).replace_schema_metadata(metadata)
    parquet.write_table(table, sink, compression="zstd", use_dictionary=["sample_id"])
    return bytes(sink.getvalue())


def read_tokens(content: bytes, samples: Sequence[str], cipher: ContentCipher | None) -> pa.Table:
    """Return the rows of some samples in a token file, with NaN for the values of sessions that were erased. `cipher`
    must hold the keys of the others. Raises MasterKeyMissing and the errors of `ContentCipher.decrypt` if the values
    are encrypted."""
    table = parquet.read_table(pa.BufferReader(content), filters=[("sample_id", "in", list(samples))])
    metadata = table.schema.metadata or {}
    if SEALED.encode() not in metadata:
        return table
    heads = json.loads(metadata[SEALED.encode()])
    if cipher is None:
        raise MasterKeyMissing("the values of a token file are encrypted")
    encoded = table["sample_id"].cast(pa.string()).combine_chunks().dictionary_encode()
    codes, known = encoded.indices.to_numpy(), encoded.dictionary.to_pylist()
    figures = [name for name in table.column_names if name not in ("sample_id", "position")]
    values = {name: table[name].to_numpy().copy() for name in figures}
    for code, own in _runs(codes):
        sample = known[code]
        if sample not in heads:
            continue
        parts = _values(values.values(), own)
        opened = cipher.decrypt(_about_tokens(sample, values), bytes.fromhex(heads[sample]), parts)
        if opened is None:
            opened = np.full(sum(map(len, parts)) // 4, np.nan, "<f4").tobytes()
        _put_values(values.values(), own, opened)
    for name, column in values.items():
        table = table.set_column(table.column_names.index(name), name, pa.array(column, pa.float32()))
    return table


def _runs(numbers: NDArray[np.int32]) -> Iterator[tuple[int, slice]]:
    """Yield (number, slice) for each run of equal numbers."""
    bounds = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
    for start, end in itertools.pairwise(bounds if len(numbers) else ()):
        yield int(numbers[start]), slice(start, end)


def _about_tokens(sample_id: str, figures: Iterable[str]) -> bytes:
    """Return what is authenticated with the values of a row's tokens."""
    return f"tokens({','.join(figures)}){sample_id}".encode()


def read_rows(content: bytes) -> BatchRows:
    """Read the rows of a file whose tokens are not encrypted. Raises CorruptBatch, MasterKeyMissing."""
    return open_rows(content, None).rows


def open_rows(content: bytes, cipher: ContentCipher | None) -> OpenedRows:
    """Read the rows of an Arrow IPC file. Raises CorruptBatch if the bytes are anything else. The hash of the bytes
    must have been checked before, because Arrow's own checks abort the process on some malformed files. Raises
    MasterKeyMissing and the errors of `ContentCipher.decrypt` if the tokens are encrypted."""
    try:
        table = _table(content)
        rows = _rows(table)
        heads = table[SEALED].to_pylist() if SEALED in table.column_names else None
    # Arrow and numpy raise SystemError, TypeError, UnicodeDecodeError and more for bytes that are not their files.
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise CorruptBatch(f"not a batch file ({len(content)} bytes): {why}") from error
    return OpenedRows(rows, np.zeros(len(rows), bool)) if heads is None else _decrypt_rows(rows, heads, cipher)


def _table(content: bytes) -> pa.Table:
    """Return our columns, with their types, all offsets and all texts checked. Raises ValueError, ArrowException."""
    schema = pa.ipc.open_file(pa.BufferReader(content)).schema
    ours = [(name, kind, dtype) for name, kind, dtype in COLUMNS if name != "lengths" and name in schema.names]
    for name, kind, dtype in ours:
        wanted = pa.string() if dtype is None else pa.list_(ARROW[dtype]) if kind == TOKEN else ARROW[dtype]
        if (found := schema.field(name).type) != wanted:
            raise ValueError(f"column {name} is {found}, wanted {wanted}")
    wanted_names = [name for name, _, _ in ours]
    if SEALED in schema.names:
        if schema.field(SEALED).type != pa.binary(HEAD_BYTES):
            raise ValueError(f"column {SEALED} is {schema.field(SEALED).type}")
        wanted_names.append(SEALED)
    options = pa.ipc.IpcReadOptions(included_fields=[schema.names.index(name) for name in wanted_names])
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
