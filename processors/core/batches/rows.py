"""A batch as columns: what the batcher writes, the trainer reads and replay recomputes, with its canonical hash."""

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
    """n rows in canonical order (group, rollout_index, segment); T tokens in all rows together.

    Token columns are aligned with `token_ids`: entry t is about token t, so a trainer that predicts token t from the
    tokens before it shifts by one. The loss of a step is the sum over trained tokens of token loss / weight_divisor.
    """

    sample_ids: tuple[str, ...]
    group_ids: tuple[str, ...]
    session_ids: tuple[str, ...]
    rollout_index: NDArray[np.int32]
    segment_index: NDArray[np.int32]
    lengths: NDArray[np.int32]
    """[n] tokens per row; sums to T."""
    token_ids: NDArray[np.int32]
    """[T]"""
    trained: NDArray[np.uint8]
    """[T] 1 where the token carries loss."""
    logprobs: NDArray[np.float32]
    """[T] the engine's log-probs, 0 where the token was not sampled in this row."""
    advantages: NDArray[np.float32]
    """[T] 0 where not trained."""
    weight_divisor: NDArray[np.int64]
    """[n] each trained token of the row weighs 1 / weight_divisor."""
    temperature: NDArray[np.float32]
    rewards: NDArray[np.float32]
    version_min: NDArray[np.int32]
    """[n] oldest weight version among the row's trained tokens; -1 without one."""
    version_max: NDArray[np.int32]
    old_cache: NDArray[np.uint8] | None = None
    """[T] 1 where the token was sampled on a cache that older weights filled than sampled it; None: nowhere."""

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
        """The least rows version that has all of it."""
        return 1 if self.old_cache is None else 2

    @property
    def starts(self) -> NDArray[np.int64]:
        """[n] where each row's tokens start."""
        return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])[:-1]

    def columns(self) -> dict[str, Any]:
        """By name: what rows that hold more beside them are made of."""
        return {name: getattr(self, name) for name, _, _ in COLUMNS}

    def trained_per_row(self) -> NDArray[np.int64]:
        """[n] trained tokens of each row."""
        edges = np.concatenate([[0], np.cumsum(self.trained, dtype=np.int64)])
        counts: NDArray[np.int64] = edges[self.starts + self.lengths] - edges[self.starts]
        return counts

    def among(self, kept: NDArray[np.bool_]) -> Self:
        """The rows of `kept` [n], in their order."""
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
        """Versions that trained tokens come from: of each row the oldest, the newest, and the `known` between."""
        trained = self.trained_per_row() > 0
        spans = set(zip(self.version_min[trained].tolist(), self.version_max[trained].tolist(), strict=True))
        between = {version for version in known for oldest, newest in spans if oldest < version < newest}
        return between.union(*spans)

    def known_of(self, version: int) -> NDArray[np.bool_]:
        """[T] tokens that these weights sampled for sure: those of rows that name no other version, and of rows that
        name the one before, too, those on an older cache: weights change before such a token, never behind it."""
        newest = self.version_max == version
        known: NDArray[np.bool_] = np.repeat(newest & (self.version_min == version), self.lengths)
        if self.old_cache is not None:
            known |= np.repeat(newest & (self.version_min == version - 1), self.lengths) & (self.old_cache > 0)
        return known


def _columns() -> tuple[tuple[str, str, str | None], ...]:
    tokens = {"token_ids", "trained", "logprobs", "advantages", "old_cache"}
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
OPTIONAL = frozenset({"old_cache"})
"""Columns that rows need not have."""
_FIRST = tuple(name for name, _, _ in COLUMNS if name not in OPTIONAL)
ROWS_VERSIONS = {1: _FIRST, 2: (*_FIRST, "old_cache")}
"""Version of rows, as a manifest says it -> the columns that the hash covers, in this order. A list never changes: a
column that is new stands in a new one, and batches of older lists are read without it."""


def rows_sha256(rows: BatchRows, version: int | None = None) -> str:
    """Hex sha256 over the columns of a version (None: that of `rows`): name and bytes, each length-prefixed,
    little-endian; of a column that they lack no bytes.

    Framing of the file (Arrow) is left out on purpose. Raises ValueError for NaN, which has many byte forms.
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
