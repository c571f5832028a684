"""A sealed batch, as arrays and tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from turnlog.infra.batch_files import rows_table
from turnlog.processors.core.batches.rows import COLUMNS, ROW, TOKEN, BatchRows
from turnlog.schemas.events import SampleBatchFormed


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """A batch of a run. It is one part of a rollout batch ([batcher] updates_per_draw)."""

    manifest: SampleBatchFormed
    rows: BatchRows
    """Checked against the manifest's hash. The loss of a step is the sum over trained tokens of token loss /
    weight_divisor."""
    offset: int
    """Offset after the manifest."""

    def __len__(self) -> int:
        return len(self.rows)

    def table(self) -> pa.Table:
        """Return one row per sample, with the columns of a batch file (docs/attach.md)."""
        return rows_table(self.rows)

    def flatten(self, padded: NDArray[Any]) -> NDArray[Any]:
        """Return values of tokens [T] of what is [rows, tokens], padded as `pad` does; [T] is returned as it is. Raises
        ValueError if the shape does not fit.
        """
        padded = np.asarray(padded)
        if padded.ndim == 1:
            return padded
        longest = int(self.rows.lengths.max(initial=0))
        if padded.ndim != 2 or len(padded) != len(self.rows) or padded.shape[1] < longest:
            raise ValueError(f"values of shape {padded.shape} for {len(self.rows)} rows of up to {longest} tokens")
        return padded[np.arange(padded.shape[1]) < self.rows.lengths[:, None]]

    def pad(self, *, pad_token_id: int = 0, multiple: int = 1) -> dict[str, NDArray[Any]]:
        """Return the numeric columns by name, token columns as [rows, tokens] and the others as [rows].

        Rows are padded on the right with `pad_token_id`, and with 0 in all other columns, to the longest row, rounded
        up to a `multiple`. `mask` [rows, tokens] is True where a token is, `position` its place in the row. Entry t of
        a row describes token t, which a model predicts from the tokens before it: logits [:, :-1] belong to [:, 1:].
        dtypes are those of BatchRows; token_ids are int64, as embeddings take them.
        """
        rows = self.rows
        longest = int(rows.lengths.max(initial=0))
        width = -(-longest // multiple) * multiple
        mask = np.arange(width) < rows.lengths[:, None]
        found: dict[str, NDArray[Any]] = {"mask": mask, "position": np.where(mask, np.arange(width), 0)}
        for name, kind, _ in COLUMNS:
            column = getattr(rows, name)
            if column is None:
                continue
            if kind == TOKEN:
                fill = pad_token_id if name == "token_ids" else 0
                padded = np.full((len(rows), width), fill, np.int64 if name == "token_ids" else column.dtype)
                padded[mask] = column
                found[name] = padded
            elif kind == ROW:
                found[name] = column
        return found
