"""The columns of each view as Arrow schemas, the rows of `rl`, and hashes of rows over canonical bytes.

Parquet and Arrow files contain exactly these columns. Rows of `rl` depend on the samples alone, so that a refold
produces the same rows. Equal rows have equal hashes, regardless of file format, batch and order.

The hash of a row is the sha256 of: the sha256 of the columns' names and types, then the content of each column in
schema order. The content of n values of one type is one validity byte each, followed by
    numbers   little-endian, 0 if absent (list items have no validity bytes: they are never absent)
    text      n lengths in bytes (int32), then UTF-8
    lists     n lengths (int32), then the content of all their items
    structs   the content of each member
The hash of several rows is the sha256 of the row hashes in ascending order.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from turnlog.consumers.datasets import BrokenSample
from turnlog.schemas.events import SegmentSample
from turnlog.schemas.types import BlobRef, float32s, int32s

TEXT, INT, LONG, REAL, FLAG = pa.string(), pa.int32(), pa.int64(), pa.float64(), pa.bool_()

BLOB = [("sha256", TEXT), ("size", LONG), ("media_type", TEXT)]
SPAN = pa.struct(
    [("start", INT), ("length", INT), ("epoch", TEXT), ("turn", INT), ("version", LONG), ("trained", FLAG),
     ("advantage", REAL)]
)  # fmt: skip
"""The output of one turn by one weight version. `advantage` is null if the row's advantage applies."""
EXPERT = pa.struct([*BLOB, ("row_start", LONG), ("row_count", LONG), ("target_start", LONG)])
IMAGE = pa.struct([*BLOB, ("position", LONG), ("tokens", LONG)])

CALL = pa.struct([("id", TEXT), ("type", TEXT), ("function", pa.struct([("name", TEXT), ("arguments", TEXT)]))])
"""A tool call in OpenAI's format. `arguments` is JSON text, as in the API, because a column has one type and arguments
do not."""
MESSAGE = pa.struct(
    [("role", TEXT), ("content", TEXT), ("reasoning_content", TEXT), ("name", TEXT), ("tool_call_id", TEXT),
     ("tool_calls", pa.list_(CALL))]
)  # fmt: skip
MESSAGES = pa.list_(MESSAGE)

GROUP = [("run_id", TEXT), ("group_id", TEXT), ("task_id", TEXT), ("recipe", TEXT), ("purpose", TEXT)]
TASK = [("dataset", TEXT), ("task_type", TEXT)]
"""Null if no RolloutRequested of the group is on the log; `task_type` also if the dataset row has no type."""

RL = pa.schema(
    [
        *GROUP,
        ("session_id", TEXT),
        ("rollout_id", TEXT),
        ("sample_id", TEXT),
        ("rollout_index", INT),
        ("segment_index", INT),
        ("segment_count", INT),
        ("is_anchor", FLAG),
        ("outcome", TEXT),
        ("reward", REAL),
        ("advantage", REAL),
        ("temperature", REAL),
        ("logprob_kind", TEXT),
        ("weight_version_min", LONG),
        ("weight_version_max", LONG),
        ("trained_tokens", LONG),
        ("token_ids", pa.list_(INT)),
        ("trained", pa.list_(pa.uint8())),
        ("logprobs", pa.list_(pa.float32())),
        ("advantages", pa.list_(pa.float32())),
        ("spans", pa.list_(SPAN)),
        ("experts", pa.list_(EXPERT)),
        ("experts_gap", TEXT),
        ("images", pa.list_(IMAGE)),
    ]
)
"""Each row is a SegmentSample. The four token columns are aligned: entry t belongs to token t."""

SFT = pa.schema(
    [
        *GROUP,
        *TASK,
        ("session_id", TEXT),
        ("rollout_id", TEXT),
        ("rollout_index", INT),
        ("outcome", TEXT),
        ("reward", REAL),
        ("agent", TEXT),
        ("model", TEXT),
        ("environment", TEXT),
        ("environment_version", TEXT),
        ("finish_reason", TEXT),
        ("weight_version_min", LONG),
        ("weight_version_max", LONG),
        ("turns", INT),
        ("tokens", LONG),
        ("messages", MESSAGES),
        ("tools", TEXT),
    ]
)
"""Each row is a conversation. `tools` is the JSON list of tool schemas that the request of the last turn contained."""

PREFERENCE = pa.schema(
    [
        *GROUP,
        *TASK,
        ("chosen_session_id", TEXT),
        ("rejected_session_id", TEXT),
        ("chosen_outcome", TEXT),
        ("rejected_outcome", TEXT),
        ("chosen_reward", REAL),
        ("rejected_reward", REAL),
        ("margin", REAL),
        ("tokens", LONG),
        ("prompt", MESSAGES),
        ("chosen", MESSAGES),
        ("rejected", MESSAGES),
        ("tools", TEXT),
    ]
)
"""Each row is a pair of sessions of a group. prompt + chosen and prompt + rejected are the two conversations."""

VIEWS: dict[str, pa.Schema] = {"rl": RL, "sft": SFT, "preference": PREFERENCE}


TOKEN_COLUMNS = {"token_ids": np.int32, "trained": np.uint8, "logprobs": np.float32, "advantages": np.float32}
PLAIN = tuple(
    name
    for name in RL.names
    if name not in TOKEN_COLUMNS and name not in ("trained_tokens", "spans", "experts", "images")
)
"""Columns that are copied unchanged from a field of the sample."""

SPANS = ("start", "length", "turn.epoch", "turn.index", "version", "trained", "advantage")
"""Attributes of a SampleSpan, in the order of the members of SPAN. EXPERTS and IMAGES have the same form."""
EXPERTS = ("rows.sha256", "rows.size", "rows.media_type", "row_start", "row_count", "target_start")
IMAGES = ("image.sha256", "image.size", "image.media_type", "position", "tokens")


class RlRows:
    """Collects rows for one batch. Payloads must be inline."""

    def __init__(self) -> None:
        self._samples: list[SegmentSample] = []
        self._columns: list[dict[str, NDArray[Any]]] = []
        self.tokens = 0
        """Number of tokens in the collected rows."""
        self.trained = 0

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, sample: SegmentSample) -> None:
        """Add a row. Raises BrokenSample if spans and log-probs do not fit the tokens."""
        columns = token_columns(sample)
        self._samples.append(sample)
        self._columns.append(columns)
        self.tokens += len(columns["token_ids"])
        self.trained += int(columns["trained"].sum())

    def batch(self) -> pa.RecordBatch:
        """Return the collected rows as columns in schema order."""
        found: dict[str, pa.Array] = {}
        for name in PLAIN:
            found[name] = pa.array([getattr(sample, name) for sample in self._samples], RL.field(name).type)
        ends = np.cumsum([0, *(len(columns["token_ids"]) for columns in self._columns)])
        offsets = pa.array(ends, pa.int32())
        for name in TOKEN_COLUMNS:
            values = np.concatenate([columns[name] for columns in self._columns])
            found[name] = pa.ListArray.from_arrays(offsets, pa.array(values))
        found["trained_tokens"] = pa.array([int(each["trained"].sum()) for each in self._columns], pa.int64())
        found["spans"] = _lists([sample.spans for sample in self._samples], SPANS, "spans")
        found["experts"] = _lists([sample.experts for sample in self._samples], EXPERTS, "experts")
        found["images"] = _lists([sample.images for sample in self._samples], IMAGES, "images")
        return pa.RecordBatch.from_arrays([found[name] for name in RL.names], schema=RL)


def token_columns(sample: SegmentSample) -> dict[str, NDArray[Any]]:
    """Return four columns of length [tokens]: token_ids int32, trained uint8, logprobs float32 (0 if not sampled in
    this row), advantages float32 (0 if not trained). Raises BrokenSample if spans and log-probs do not fit the tokens,
    or if a value is not finite."""
    ids, logprobs_of = int32s(_inline(sample, "token_ids")), float32s(_inline(sample, "logprobs"))
    sampled = sum(span.length for span in sample.spans)
    if sampled != len(logprobs_of) or any(span.start + span.length > len(ids) for span in sample.spans):
        raise BrokenSample(
            f"sample {sample.sample_id}: {len(ids)} tokens, {len(logprobs_of)} log-probs and spans of {sampled} tokens"
        )
    trained, logprobs = np.zeros(len(ids), np.uint8), np.zeros(len(ids), np.float32)
    advantages = np.zeros(len(ids), np.float32)
    values = (sample.reward, sample.advantage, sample.temperature, *(span.advantage or 0.0 for span in sample.spans))
    if not all(map(math.isfinite, values)) or not np.isfinite(logprobs_of).all():
        raise BrokenSample(f"sample {sample.sample_id}: a reward, advantage or log-prob is not finite")
    lengths = np.array([span.length for span in sample.spans], np.int64)
    starts = np.array([span.start for span in sample.spans], np.int64)
    places = np.repeat(starts - np.cumsum(lengths) + lengths, lengths) + np.arange(sampled)
    logprobs[places] = logprobs_of
    trained[places] = np.repeat(np.array([span.trained for span in sample.spans], np.uint8), lengths)
    of_spans = [
        (sample.advantage if span.advantage is None else span.advantage) if span.trained else 0.0
        for span in sample.spans
    ]
    advantages[places] = np.repeat(np.array(of_spans, np.float32), lengths)
    return {"token_ids": ids, "trained": trained, "logprobs": logprobs, "advantages": advantages}


def _inline(sample: SegmentSample, name: str) -> bytes:
    payload: bytes | BlobRef = getattr(sample, name)
    if isinstance(payload, BlobRef):
        raise TypeError(f"sample {sample.sample_id}: {name} is still a blob reference; fetch it first")
    return payload


def _lists(lists: Sequence[Sequence[Any]], paths: Sequence[str], name: str) -> pa.Array:
    """Build a list column of structs member by member, which is many times faster than from dicts."""
    kind = RL.field(name).type
    flat = [each for row in lists for each in row]
    members = zip(paths, kind.value_type, strict=True)
    arrays = [pa.array(list(map(attrgetter(path), flat)), member.type) for path, member in members]
    offsets = pa.array(np.cumsum([0, *(len(row) for row in lists)]), pa.int32())
    structs = pa.StructArray.from_arrays(arrays, fields=list(kind.value_type))
    return pa.ListArray.from_arrays(offsets, structs, type=kind)


DIGEST_BYTES = 32
ROWS_PER_PASS = 1 << 20
"""Number of row hashes that are sorted in memory at once."""
Slice = Callable[[int, int], list[Any]]
"""Function (start, stop) -> pieces of bytes: the content of these values."""


def row_digests(batch: pa.RecordBatch) -> list[bytes]:
    """Return 32 bytes per row. Raises ValueError for NaN, which has many byte representations, and for an absent list
    item."""
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
    """Return the hex sha256 over the sorted row hashes in `digests`, a file of 32 bytes per row. Sorts about 32 MiB at
    a time."""
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


def _chunks(digests: IO[bytes]) -> Iterator[NDArray[np.uint8]]:
    digests.seek(0)
    while content := digests.read(DIGEST_BYTES * ROWS_PER_PASS):
        yield np.frombuffer(content, np.uint8).reshape(-1, DIGEST_BYTES)


@functools.cache
def _kind(kind: pa.DataType) -> str:
    """Return the type as text, without what file formats change (names of list items, nullability)."""
    if pa.types.is_list(kind):
        return f"list({_kind(kind.value_type)})"
    if pa.types.is_struct(kind):
        return f"struct({','.join(f'{field.name}:{_kind(field.type)}' for field in kind)})"
    return str(kind)


def _slice(values: pa.Array) -> Slice:
    """Return a function that slices the content of `values`."""
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
    """Return a function that slices numbers, none of which may be absent."""
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
    """Return the offsets at which the values begin, and the end of the last one."""
    ends: list[int] = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).tolist()
    return ends


def _text(values: pa.StringArray) -> bytes:
    """Return the concatenated UTF-8 of all values."""
    data = values.buffers()[2]
    if data is None:
        return b""
    offsets = np.frombuffer(values.buffers()[1], np.int32)[values.offset : values.offset + len(values) + 1]
    return bytes(data[int(offsets[0]) : int(offsets[-1])]) if len(offsets) else b""
