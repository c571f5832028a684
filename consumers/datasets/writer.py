"""Writes rows as a dataset: batches of bounded size, files, hashes and a manifest, completely or not at all.

Files are written one after another, as Parquet (a row group per batch) or Arrow IPC. The folder is written beside its
destination, synced and renamed. Until then it is named `.NAME.partial-xxxx` and locked by its writer. The next writer
removes what a killed one left behind. If a writer dies after moving an existing dataset aside, the next one moves that
back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from turnlog.consumers.datasets import BadQuery, DatasetExists, NotADataset, Unwritable
from turnlog.consumers.datasets.card import CARD, card
from turnlog.consumers.datasets.columns import VIEWS, RlRows, row_digests, rows_sha256
from turnlog.consumers.datasets.manifest import NAME, DataFile, DatasetCounts, DatasetManifest, Provenance
from turnlog.infra.run_folder import sync
from turnlog.schemas.canonical import canonical_json
from turnlog.schemas.events import SegmentSample


class StagedFolder:
    """The future folder of a dataset. `folder` takes its files until `publish` or `discard`."""

    def __init__(self, out: Path, *, overwrite: bool = False) -> None:
        """Raises DatasetExists, NotADataset (OUT exists and is something else), Unwritable."""
        self.out = Path(os.path.realpath(out))  # a link stays, and its target is replaced
        self._overwrite = overwrite
        self._aside = self.out.with_name(f".{self.out.name}.replaced")
        try:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            with _alone(self.out.parent):
                self._recover()
                self._admit()
                self.folder = Path(tempfile.mkdtemp(prefix=f".{self.out.name}.partial-", dir=self.out.parent))
                self._lock = _lock_folder(self.folder)
            self.folder.chmod(0o755)
        except OSError as error:
            raise Unwritable(f"{self.out}: {error}; choose another OUT or free the space") from error

    def publish(self) -> None:
        """Move the folder to its destination and remove what was there. Raises DatasetExists, NotADataset,
        Unwritable."""
        try:
            for folder in (*(path for path in self.folder.rglob("*") if path.is_dir()), self.folder):
                sync(folder)
            with _alone(self.out.parent):
                self._admit()
                self._exchange()
        except OSError as error:
            raise Unwritable(f"{self.out}: {error}; choose another OUT or free the space") from error
        os.close(self._lock)
        shutil.rmtree(self._aside, ignore_errors=True)

    def discard(self) -> None:
        """Remove the folder, so that nothing is written."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)

    def _exchange(self) -> None:
        """Move the existing OUT aside, and back if the new one cannot take its place. Raises OSError."""
        if self.out.exists():
            self.out.rename(self._aside)
        try:
            self.folder.rename(self.out)
        except OSError:
            if self._aside.exists():
                self._aside.rename(self.out)
            raise
        sync(self.out.parent)

    def _admit(self) -> None:
        if not self.out.exists():
            return
        whole = (self.out / NAME).is_file()
        if not whole and not (self.out.is_dir() and not any(self.out.iterdir())):
            raise NotADataset(f"{self.out} exists and is not a dataset: choose another OUT")
        if whole and not self._overwrite:
            raise DatasetExists(f"{self.out} is already a dataset: choose another OUT, or use --overwrite")

    def _recover(self) -> None:
        """Undo what a killed writer of the same OUT left behind."""
        if self._aside.exists():
            if self.out.exists():
                shutil.rmtree(self._aside)
            else:
                self._aside.rename(self.out)
        for left in self.out.parent.glob(f".{self.out.name}.partial-*"):
            with contextlib.suppress(BlockingIOError):  # its writer is alive
                os.close(_lock_folder(left))
                shutil.rmtree(left)


@contextlib.contextmanager
def _alone(parent: Path) -> Iterator[None]:
    """Exclude other writers that have their datasets in the same folder."""
    descriptor = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _lock_folder(folder: Path) -> int:
    """Take an exclusive lock on a folder and return the descriptor that holds it. Raises BlockingIOError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


FORMATS = ("parquet", "arrow")
SHARD_BYTES = 512 << 20
"""Size in bytes at which a file is closed and the next one begun."""


class Shards:
    """Writes batches below `folder/data`. The final names contain the number of files (Hugging Face's convention, with
    which `load_dataset(OUT)` works)."""

    def __init__(self, folder: Path, schema: pa.Schema, format: str, *, shard_bytes: int = SHARD_BYTES) -> None:
        self._folder = folder / "data"
        self._folder.mkdir()
        self._schema = schema
        self._format = format
        self._shard_bytes = shard_bytes
        self._sink: Any = None
        self._writer: Any = None
        """Writer of the open file; None between two files."""
        self._files: list[DataFile] = []
        self._rows = 0

    def write(self, batch: pa.RecordBatch) -> None:
        """Write a batch. Raises OSError."""
        if self._writer is None:
            self._open()
        self._writer.write_batch(batch)
        self._rows += len(batch)
        if self._sink.tell() >= self._shard_bytes:
            self._finish()

    def close(self) -> tuple[DataFile, ...]:
        """Name the files, and return them. There is at least one, so that an empty view still has its columns. Raises
        OSError."""
        if self._writer is None and not self._files:
            self.write(pa.RecordBatch.from_pylist([], schema=self._schema))
        self._finish()
        named = []
        for number, file in enumerate(self._files):
            name = f"train-{number:05}-of-{len(self._files):05}.{self._format}"
            (self._folder / file.name).rename(self._folder / name)
            named.append(dataclasses.replace(file, name=f"data/{name}"))
        return tuple(named)

    def abort(self) -> None:
        """Close the open file; its content is removed with the folder."""
        if self._writer is not None:
            with contextlib.suppress(OSError):  # pyarrow's writers write their footer, for which there may be no room
                self._writer.close()
            self._sink.close()
            self._writer = None

    def _open(self) -> None:
        self._sink = pa.OSFile(str(self._folder / f"{len(self._files)}.unnamed"), "wb")
        if self._format == "parquet":
            texts = [field.name for field in self._schema if pa.types.is_string(field.type)]
            plain = [field.name for field in self._schema if not pa.types.is_nested(field.type)]
            # Ids repeat, so dictionaries save space; token columns would only fill the dictionaries first.
            self._writer = pq.ParquetWriter(
                self._sink, self._schema, compression="zstd", compression_level=1, use_dictionary=texts,
                write_statistics=plain,
            )  # fmt: skip
        else:
            self._writer = pa.ipc.new_file(self._sink, self._schema)

    def _finish(self) -> None:
        """Complete the open file on disk. Raises OSError."""
        if self._writer is None:
            return
        self._writer.close()
        self._sink.close()
        self._writer = None
        name = f"{len(self._files)}.unnamed"
        with (self._folder / name).open("rb") as file:
            os.fsync(file.fileno())
            sha256, size = hashlib.file_digest(file, "sha256").hexdigest(), file.tell()
        self._files.append(DataFile(name=name, rows=self._rows, size=size, sha256=sha256))
        self._rows = 0


BATCH_TOKENS = 1 << 20
"""View `rl`: maximum number of tokens in a batch (about 13 bytes each in memory)."""
BATCH_BYTES = 8 << 20
"""Other views: maximum size of a batch in bytes of JSON."""
BATCH_ROWS = 4096

Row = dict[str, Any]
"""Column -> value, every column of the view."""


class DatasetWriter:
    """Writes one dataset. If it is left without `close`, as after an error or Ctrl-C, nothing remains.

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
        """`batch_tokens` limits the tokens of `rl` that are held in memory. Raises BadQuery, DatasetExists,
        NotADataset, Unwritable."""
        if view not in VIEWS or format not in FORMATS:
            raise BadQuery(
                f"view {view!r} in format {format!r}: views are {', '.join(VIEWS)}; formats {', '.join(FORMATS)}"
            )
        self.view, self.format = view, format
        self.rows = self.tokens = self.trained_tokens = 0
        """Counts over all rows added."""
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
        """Add rows of the `rl` view, with inline payloads. Raises Unwritable, or BrokenSample, which leaves the samples
        before the broken one added."""
        for sample in samples:
            self._samples.add(sample)
            if self._samples.tokens >= self._batch_tokens or len(self._samples) >= BATCH_ROWS:
                self._flush()

    def add_rows(self, rows: Iterable[Row]) -> None:
        """Add rows of the other views. Raises Unwritable."""
        for row in rows:
            self._rows.append(row)
            self._bytes += len(canonical_json(row))
            self.tokens += row["tokens"]
            if self._bytes >= BATCH_BYTES or len(self._rows) >= BATCH_ROWS:
                self._flush()

    def add_batch(self, batch: pa.RecordBatch) -> None:
        """Add rows that another dataset of the same view holds. Raises Unwritable."""
        self._flush()
        is_rl = "token_ids" in batch.schema.names
        self.tokens += len(batch["token_ids"].flatten()) if is_rl else int(batch["tokens"].to_numpy().sum())
        self.trained_tokens += int(batch["trained_tokens"].to_numpy().sum()) if is_rl else 0
        self.rows += len(batch)
        self._finish_write()
        self._writing = self._thread.submit(self._write, batch)

    def close(self, provenance: Provenance) -> DatasetManifest:
        """Complete the dataset and move it to OUT. Raises Unwritable, DatasetExists (another writer was faster)."""
        try:
            self._flush()
            self._finish_write()
            files = self._shards.close()
            manifest = DatasetManifest(
                view=self.view,
                format=self.format,
                counts=DatasetCounts(rows=self.rows, tokens=self.tokens, trained_tokens=self.trained_tokens),
                rows_sha256=rows_sha256(self._digests, self.rows),
                files=files,
                provenance=provenance,
            )
            self._digests.close()
            content = f"{json.dumps(manifest.to_json(), indent=1)}\n".encode()
            for name, written in ((NAME, content), (CARD, card(manifest, content).encode())):
                with (self._staged.folder / name).open("wb") as file:
                    file.write(written)
                    file.flush()
                    os.fsync(file.fileno())
        except OSError as error:
            raise self._unwritable(error) from error
        self._staged.publish()
        self._done = True
        self._thread.shutdown()
        return manifest

    @property
    def rows_added(self) -> int:
        """Number of rows added, including those that are not written yet."""
        return self.rows + len(self._samples) + len(self._rows)

    def abort(self) -> None:
        """Remove everything written, unless the dataset was closed."""
        if not self._done:
            self._done = True
            self._thread.shutdown()
            self._shards.abort()
            self._digests.close()
            self._staged.discard()

    def _flush(self) -> None:
        """Hand the collected rows to the writing thread, so that pyarrow, zstd and sha256 work while the next rows are
        read."""
        batch: pa.RecordBatch | None = None
        if len(self._samples):
            batch = self._samples.batch()
            self.tokens += self._samples.tokens
            self.trained_tokens += self._samples.trained
            self._samples = RlRows()
        elif self._rows:
            batch = pa.RecordBatch.from_pylist(self._rows, schema=VIEWS[self.view])
            self._rows, self._bytes = [], 0
        self._finish_write()
        if batch is not None:
            self.rows += len(batch)
            self._writing = self._thread.submit(self._write, batch)

    def _write(self, batch: pa.RecordBatch) -> None:
        self._digests.write(b"".join(row_digests(batch)))
        self._shards.write(batch)

    def _finish_write(self) -> None:
        """Wait for the batch that is being written. Raises Unwritable."""
        writing, self._writing = self._writing, None
        if writing is not None:
            try:
                writing.result()
            except OSError as error:
                raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> Unwritable:
        return Unwritable(f"{self._staged.out}: {error}; nothing was changed there. Free space or choose another OUT")
