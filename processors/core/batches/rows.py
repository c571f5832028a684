"""A batch as columns, with its canonical hash: written by the batcher, read by the trainer, recomputed by replay."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

TEXT, ROW, TOKEN = "text", "row", "token"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchRows:
    """n rows in canonical order (group, rollout_index, segment), with T tokens in all rows together.

    Token columns are aligned with `token_ids`: entry t describes token t, so a trainer that predicts token t from the
    tokens before it shifts by one. The loss of a step is the sum over trained tokens of token loss / weight_divisor.
    """

    sample_ids: tuple[str, ...]
    """[n] ids of the SegmentSamples."""
    group_ids: tuple[str, ...]
    """[n] groups of the rows."""
    session_ids: tuple[str, ...]
    """[n] sessions of the rows; rows of one session are one trajectory."""
    rollout_index: NDArray[np.int32]
    """[n] index of the rollout in its group."""
    segment_index: NDArray[np.int32]
    """[n] index of the segment in its session."""
    lengths: NDArray[np.int32]
    """[n] tokens per row; the sum is T."""
    token_ids: NDArray[np.int32]
    """[T] token ids of all rows, one row after the other."""
    trained: NDArray[np.uint8]
    """[T] 1 where the token has a loss."""
    logprobs: NDArray[np.float32]
    """[T] the engine's log-probs, 0 where the token was not sampled in this row."""
    advantages: NDArray[np.float32]
    """[T] advantages, 0 where not trained."""
    weight_divisor: NDArray[np.int64]
    """[n] inverse weight: each trained token of the row weighs 1 / weight_divisor."""
    temperature: NDArray[np.float32]
    """[n] sampling temperature; 0 for greedy rows."""
    rewards: NDArray[np.float32]
    """[n] reward of the row's session, before any transform."""
    version_min: NDArray[np.int32]
    """[n] oldest weight version among the row's trained tokens; -1 without trained tokens."""
    version_max: NDArray[np.int32]
    """[n] newest weight version among the row's trained tokens; -1 without one."""
    old_cache: NDArray[np.uint8] | None = None
    """[T] 1 where the token was sampled on a KV cache filled by older weights than those that sampled it. None: no
    token was.
    """
    engine_kind: NDArray[np.uint8] | None = None
    """[T] number in ENGINE_KINDS of the kind of engine that sampled the token in this row; 0 where the token was not
    sampled or its record does not name the kind. None: no record names one.
    """

    def __post_init__(self) -> None:
        rows, tokens = len(self.sample_ids), int(self.lengths.sum())
        for name, kind, dtype in COLUMNS:
            column = getattr(self, name)
            if column is None and name in OPTIONAL:
                continue
            wanted = tokens if kind == TOKEN else rows
            if len(column) != wanted:
                raise ValueError(f"column {name} has {len(column)} entries, wanted {wanted}")
            if dtype is not None and column.dtype != dtype:
                raise ValueError(f"column {name} is {column.dtype}, wanted {dtype}")

    def __len__(self) -> int:
        return len(self.sample_ids)

    @property
    def version(self) -> int:
        """The lowest rows version that has all the columns present."""
        present = {name for name, _, _ in COLUMNS if getattr(self, name) is not None}
        return min(version for version, names in ROWS_VERSIONS.items() if present <= set(names))

    @property
    def starts(self) -> NDArray[np.int64]:
        """[n] index of each row's first token."""
        return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])[:-1]

    def columns(self) -> dict[str, Any]:
        """Return the columns by name, so that a type with more columns can be built from them."""
        return {name: getattr(self, name) for name, _, _ in COLUMNS}

    def trained_per_row(self) -> NDArray[np.int64]:
        """Return [n] the number of trained tokens of each row."""
        edges = np.concatenate([[0], np.cumsum(self.trained, dtype=np.int64)])
        counts: NDArray[np.int64] = edges[self.starts + self.lengths] - edges[self.starts]
        return counts

    def among(self, kept: NDArray[np.bool_]) -> Self:
        """Return the rows where `kept` [n] is true, in the same order."""
        of_kind = {ROW: kept, TOKEN: np.repeat(kept, self.lengths)}
        columns: dict[str, Any] = {}
        for name, kind, _ in COLUMNS:
            column = getattr(self, name)
            if kind == TEXT:
                columns[name] = tuple(itertools.compress(column, kept))
            elif column is not None:
                columns[name] = column[of_kind[kind]]
        return dataclasses.replace(self, **columns)

    def sampled_by(self, known: Iterable[int]) -> set[int]:
        """Return the versions that trained tokens come from: of each row the oldest and the newest, and all `known`
        ones between.
        """
        trained = self.trained_per_row() > 0
        spans = set(zip(self.version_min[trained].tolist(), self.version_max[trained].tolist(), strict=True))
        between = {version for version in known for oldest, newest in spans if oldest < version < newest}
        return between.union(*spans)

    def known_of(self, version: int) -> NDArray[np.bool_]:
        """Return a [T] mask of the tokens that the weights of `version` certainly sampled.

        These are all tokens of rows that name no other version, and, in rows that also name the version before it, the
        tokens on an older cache: weights change before such a token, never after it.
        """
        newest = self.version_max == version
        known: NDArray[np.bool_] = np.repeat(newest & (self.version_min == version), self.lengths)
        if self.old_cache is not None:
            known |= np.repeat(newest & (self.version_min == version - 1), self.lengths) & (self.old_cache > 0)
        return known


def _columns() -> tuple[tuple[str, str, str | None], ...]:
    tokens = {"token_ids", "trained", "logprobs", "advantages", "old_cache", "engine_kind"}
    kinds = {"int32": "<i4", "int64": "<i8", "uint8": "|u1", "float32": "<f4"}
    columns: list[tuple[str, str, str | None]] = []
    for field in dataclasses.fields(BatchRows):
        annotation = str(field.type)
        if annotation.startswith("tuple"):
            columns.append((field.name, TEXT, None))
            continue
        dtype = next(code for name, code in kinds.items() if f"np.{name}]" in annotation)
        columns.append((field.name, TOKEN if field.name in tokens else ROW, dtype))
    return tuple(columns)


COLUMNS = _columns()
"""(name, kind, little-endian dtype or None for text) in schema order."""
OPTIONAL = frozenset({"old_cache", "engine_kind"})
"""Columns that may be absent."""
ENGINE_KINDS = ("", "sglang", "vllm")
"""Kinds of engines by their number in the column `engine_kind`. A number never changes: hashes cover it."""
KIND_NUMBERS = {kind: number for number, kind in enumerate(ENGINE_KINDS)}
_FIRST = tuple(name for name, _, _ in COLUMNS if name not in OPTIONAL)
ROWS_VERSIONS = {1: _FIRST, 2: (*_FIRST, "old_cache"), 3: (*_FIRST, "old_cache", "engine_kind")}
"""Rows version, as recorded in a manifest -> the columns that the hash covers, in this order.

A list never changes. A new column requires a new version; batches of older versions are read without the column.
"""


def rows_sha256(rows: BatchRows, version: int | None = None) -> str:
    """Return the hex sha256 over the columns of a version (None: that of `rows`).

    The hash covers the name and the little-endian bytes of each column, both length-prefixed; an absent column has no
    bytes. The framing of the file (Arrow) is deliberately left out. Raises ValueError for NaN, which has many byte
    forms.
    """
    running = hashlib.sha256()
    described = {name: (kind, dtype) for name, kind, dtype in COLUMNS}
    for name in ROWS_VERSIONS[version or rows.version]:
        kind, dtype = described[name]
        column = getattr(rows, name)
        if kind == TEXT:
            parts = [text.encode() for text in column]
            content = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
        elif column is None:
            content = b""
        else:
            if dtype == "<f4" and np.isnan(column).any():
                raise ValueError(f"column {name} holds NaN")
            content = np.ascontiguousarray(column, dtype=dtype).tobytes()
        for part in (name.encode(), content):
            running.update(len(part).to_bytes(8, "little"))
            running.update(part)
    return running.hexdigest()
