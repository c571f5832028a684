"""The `rl` view: SegmentSamples as columns, a function of the samples alone, so that a refold gives the same rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from turnlog.consumers.datasets.columns import RL
from turnlog.consumers.datasets.errors import BrokenSample
from turnlog.schemas.events import SegmentSample
from turnlog.schemas.types import BlobRef, float32s, int32s

TOKEN_COLUMNS = {"token_ids": np.int32, "trained": np.uint8, "logprobs": np.float32, "advantages": np.float32}
PLAIN = tuple(
    name
    for name in RL.names
    if name not in TOKEN_COLUMNS and name not in ("trained_tokens", "spans", "experts", "images")
)
"""Columns that are a field of the sample as it is."""

Members = Mapping[str, Callable[[Any], Any]]
SPANS: Members = {
    "start": attrgetter("start"), "length": attrgetter("length"), "epoch": attrgetter("turn.epoch"),
    "turn": attrgetter("turn.index"), "version": attrgetter("version"), "trained": attrgetter("trained"),
    "advantage": attrgetter("advantage"),
}  # fmt: skip
"""Struct members, in order, and where they are in a SampleSpan; likewise for the two below."""
EXPERTS: Members = {
    "sha256": attrgetter("rows.sha256"), "size": attrgetter("rows.size"), "media_type": attrgetter("rows.media_type"),
    "row_start": attrgetter("row_start"), "row_count": attrgetter("row_count"),
    "target_start": attrgetter("target_start"),
}  # fmt: skip
IMAGES: Members = {
    "sha256": attrgetter("image.sha256"), "size": attrgetter("image.size"),
    "media_type": attrgetter("image.media_type"), "position": attrgetter("position"), "tokens": attrgetter("tokens"),
}  # fmt: skip


class RlRows:
    """Rows gathered until they are worth a batch. Payloads must be inline."""

    def __init__(self) -> None:
        self._samples: list[SegmentSample] = []
        self._columns: list[dict[str, NDArray[Any]]] = []
        self.tokens = 0
        """Of the rows gathered."""
        self.trained = 0

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, sample: SegmentSample) -> None:
        """Raises BrokenSample when spans and log-probs do not fit the tokens."""
        columns = token_columns(sample)
        self._samples.append(sample)
        self._columns.append(columns)
        self.tokens += len(columns["token_ids"])
        self.trained += int(columns["trained"].sum())

    def batch(self) -> pa.RecordBatch:
        """The rows gathered, as columns in the order of the schema."""
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
    """token_ids int32, trained uint8, logprobs float32 (0 where not sampled in this row), advantages float32 (0 where
    not trained): [tokens] each. Raises BrokenSample when spans and log-probs do not fit the tokens, or for NaN."""
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


def _lists(lists: Sequence[Sequence[Any]], members: Members, name: str) -> pa.Array:
    """A list column of structs, member by member: many times faster than from dicts."""
    kind = RL.field(name).type
    flat = [each for row in lists for each in row]
    arrays = [pa.array([of(each) for each in flat], kind.value_type.field(key).type) for key, of in members.items()]
    offsets = pa.array(np.cumsum([0, *(len(row) for row in lists)]), pa.int32())
    structs = pa.StructArray.from_arrays(arrays, fields=list(kind.value_type))
    return pa.ListArray.from_arrays(offsets, structs, type=kind)
