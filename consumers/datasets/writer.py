"""Rows become a dataset: batches of bounded size, files, hashes, a manifest, all of it at once or nothing."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa

from turnlog.consumers.datasets.columns import VIEWS
from turnlog.consumers.datasets.errors import BadQuery, Unwritable
from turnlog.consumers.datasets.manifest import NAME, Counts, Manifest, Provenance
from turnlog.consumers.datasets.rl_rows import RlRows
from turnlog.consumers.datasets.row_hash import canonical_json, row_digests, rows_sha256
from turnlog.consumers.datasets.shards import FORMATS, SHARD_BYTES, Shards
from turnlog.consumers.datasets.staging import StagedFolder
from turnlog.schemas.events import SegmentSample

BATCH_TOKENS = 1 << 20
"""Of `rl`: tokens of one batch (about 13 bytes each in memory)."""
BATCH_BYTES = 8 << 20
"""Of the other views: bytes of JSON of one batch."""
BATCH_ROWS = 4096

Row = dict[str, Any]
"""Column -> value, every column of the view."""


class DatasetWriter:
    """Writes one dataset. Left without `close`, as by an error or Ctrl-C, it leaves nothing behind.

    with DatasetWriter(out, "rl", "parquet") as writer:
        writer.add(samples)
        manifest = writer.close(provenance)
    """

    def __init__(
        self,
        out: Path,
        view: str,
        format: str,
        *,
        overwrite: bool = False,
        shard_bytes: int = SHARD_BYTES,
        batch_tokens: int = BATCH_TOKENS,
    ) -> None:
        """`batch_tokens` bounds what `rl` holds in memory. Raises BadQuery, DatasetExists, NotADataset, Unwritable."""
        if view not in VIEWS or format not in FORMATS:
            raise BadQuery(
                f"view {view!r} in format {format!r}: views are {', '.join(VIEWS)}; formats {', '.join(FORMATS)}"
            )
        self.view, self.format = view, format
        self.rows = self.tokens = self.trained_tokens = 0
        """Of all rows added."""
        self._samples = RlRows()
        self._rows: list[Row] = []
        self._bytes = 0
        self._batch_tokens = batch_tokens
        self._thread = ThreadPoolExecutor(1, "dataset-writer")  # starts no thread before the first batch
        self._writing: Future[None] | None = None
        self._staged = StagedFolder(out, overwrite=overwrite)
        self._done = False
        try:
            self._shards = Shards(self._staged.folder, VIEWS[view], format, shard_bytes=shard_bytes)
            self._digests = tempfile.TemporaryFile(dir=self._staged.folder)  # noqa: SIM115 - closed by close or abort
        except OSError as error:
            self._staged.discard()
            raise Unwritable(f"{out}: {error}") from error

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.abort()

    def add(self, samples: Iterable[SegmentSample]) -> None:
        """Rows of the `rl` view; payloads must be inline. Raises Unwritable, and BrokenSample, after which
        the samples before it are still there."""
        for sample in samples:
            self._samples.add(sample)
            if self._samples.tokens >= self._batch_tokens or len(self._samples) >= BATCH_ROWS:
                self._flush()

    def add_rows(self, rows: Iterable[Row]) -> None:
        """Rows of the other views. Raises Unwritable."""
        for row in rows:
            self._rows.append(row)
            self._bytes += len(canonical_json(row))
            self.tokens += row["tokens"]
            if self._bytes >= BATCH_BYTES or len(self._rows) >= BATCH_ROWS:
                self._flush()

    def close(self, provenance: Provenance) -> Manifest:
        """The dataset is whole and stands at OUT. Raises Unwritable, DatasetExists (somebody was faster)."""
        try:
            self._flush()
            self._written()
            files = self._shards.close()
            manifest = Manifest(
                view=self.view,
                format=self.format,
                counts=Counts(rows=self.rows, tokens=self.tokens, trained_tokens=self.trained_tokens),
                rows_sha256=rows_sha256(self._digests, self.rows),
                files=files,
                provenance=provenance,
            )
            self._digests.close()
            with (self._staged.folder / NAME).open("w") as file:
                json.dump(manifest.to_json(), file, indent=1)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise self._unwritable(error) from error
        self._staged.publish()
        self._done = True
        self._thread.shutdown()
        return manifest

    @property
    def added(self) -> int:
        """Rows so far, those not written yet included."""
        return self.rows + len(self._samples) + len(self._rows)

    def abort(self) -> None:
        """Remove what was written, unless it was closed."""
        if not self._done:
            self._done = True
            self._thread.shutdown()
            self._shards.abort()
            self._digests.close()
            self._staged.discard()

    def _flush(self) -> None:
        """Hand what was gathered to the writing thread: pyarrow, zstd and sha256 work while the next rows are read."""
        batch: pa.RecordBatch | None = None
        if len(self._samples):
            batch = self._samples.batch()
            self.tokens += self._samples.tokens
            self.trained_tokens += self._samples.trained
            self._samples = RlRows()
        elif self._rows:
            batch = pa.RecordBatch.from_pylist(self._rows, schema=VIEWS[self.view])
            self._rows, self._bytes = [], 0
        self._written()
        if batch is not None:
            self.rows += len(batch)
            self._writing = self._thread.submit(self._write, batch)

    def _write(self, batch: pa.RecordBatch) -> None:
        self._digests.write(b"".join(row_digests(batch)))
        self._shards.write(batch)

    def _written(self) -> None:
        """Wait for the batch under way. Raises Unwritable."""
        writing, self._writing = self._writing, None
        if writing is not None:
            try:
                writing.result()
            except OSError as error:
                raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> Unwritable:
        return Unwritable(f"{self._staged.out}: {error}; nothing was changed there. Free space or choose another OUT")
