"""Rows become a dataset: batches of bounded size, files, hashes, a manifest, all of it at once or nothing.

Files come one after another: Parquet (a row group per batch) or Arrow IPC, hashed as they are written. The folder is
written beside its place, synced and renamed: until then it is `.NAME.partial-xxxx`, locked by its writer. What a killed
writer left behind is removed by the next one; a dataset that was moved aside when its writer died is put back.
"""

from __future__ import annotations

import contextlib
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
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from turnlog.consumers.datasets import BadQuery, DatasetExists, NotADataset, Unwritable
from turnlog.consumers.datasets.columns import VIEWS, RlRows, canonical_json, row_digests, rows_sha256
from turnlog.consumers.datasets.manifest import NAME, Counts, DataFile, Manifest, Provenance
from turnlog.infra.run_folder import sync
from turnlog.schemas.events import SegmentSample


class StagedFolder:
    """Where a dataset will stand. `folder` takes its files until `publish` or `discard`."""

    def __init__(self, out: Path, *, overwrite: bool = False) -> None:
        """Raises DatasetExists, NotADataset (something else stands at OUT), Unwritable."""
        self.out = Path(os.path.realpath(out))  # a link stays, and what it leads to is replaced
        self._overwrite = overwrite
        self._aside = self.out.with_name(f".{self.out.name}.replaced")
        try:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            with _alone(self.out.parent):
                self._recover()
                self._admit()
                self.folder = Path(tempfile.mkdtemp(prefix=f".{self.out.name}.partial-", dir=self.out.parent))
                self._lock = _locked(self.folder)
            self.folder.chmod(0o755)
        except OSError as error:
            raise Unwritable(f"{self.out}: {error}; choose another OUT or free the space") from error

    def publish(self) -> None:
        """The folder takes its place; what stood there goes. Raises DatasetExists, Unwritable."""
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
        """Nothing was written."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)

    def _exchange(self) -> None:
        """What stands at OUT steps aside, and back when the new one cannot take its place. Raises OSError."""
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
            raise NotADataset(f"{self.out} is there and is no dataset: choose another OUT")
        if whole and not self._overwrite:
            raise DatasetExists(f"{self.out} is a dataset already: choose another OUT, or --overwrite")

    def _recover(self) -> None:
        """Undo what a killed writer of this place left."""
        if self._aside.exists():
            if self.out.exists():
                shutil.rmtree(self._aside)
            else:
                self._aside.rename(self.out)
        for left in self.out.parent.glob(f".{self.out.name}.partial-*"):
            with contextlib.suppress(BlockingIOError):  # its writer lives
                os.close(_locked(left))
                shutil.rmtree(left)


@contextlib.contextmanager
def _alone(parent: Path) -> Iterator[None]:
    """One at a time among the writers of a folder's datasets."""
    descriptor = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _locked(folder: Path) -> int:
    """An exclusive lock on a folder, as the descriptor that holds it. Raises BlockingIOError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


FORMATS = ("parquet", "arrow")
SHARD_BYTES = 512 << 20
"""A file that reached this size is closed and the next one begun."""


class Shards:
    """Writes batches below `folder/data`. Final names tell how many there are (Hugging Face's convention, which makes
    `load_dataset(OUT)` work)."""

    def __init__(self, folder: Path, schema: pa.Schema, format: str, *, shard_bytes: int = SHARD_BYTES) -> None:
        self._folder = folder / "data"
        self._folder.mkdir()
        self._schema = schema
        self._format = format
        self._shard_bytes = shard_bytes
        self._open: _Shard | None = None
        self._closed: list[_Shard] = []

    def write(self, batch: pa.RecordBatch) -> None:
        """Raises OSError."""
        if self._open is None:
            path = self._folder / f"{len(self._closed)}.unnamed"
            self._open = _Shard(path, self._schema, self._format)
        self._open.write(batch)
        if self._open.sink.size >= self._shard_bytes:
            self._finish()

    def close(self) -> tuple[DataFile, ...]:
        """The files, synced and named; at least one, so that an empty view still has its columns. Raises OSError."""
        if self._open is None and not self._closed:
            self.write(pa.RecordBatch.from_pylist([], schema=self._schema))
        self._finish()
        files = []
        for number, shard in enumerate(self._closed):
            named = self._folder / f"train-{number:05}-of-{len(self._closed):05}.{self._format}"
            shard.path.rename(named)
            size, sha256 = shard.sink.size, shard.sink.running.hexdigest()
            files.append(DataFile(name=f"data/{named.name}", rows=shard.rows, size=size, sha256=sha256))
        return tuple(files)

    def abort(self) -> None:
        """Release the open file; what it holds is thrown away with the folder."""
        if self._open is not None:
            self._open.abort()
            self._open = None

    def _finish(self) -> None:
        if self._open is not None:
            self._open.close()
            self._closed.append(self._open)
            self._open = None


class _Shard:
    """One file under construction."""

    def __init__(self, path: Path, schema: pa.Schema, format: str) -> None:
        self.path = path
        self.rows = 0
        self.sink = _HashedFile(path)
        self._writer: Any
        if format == "parquet":
            texts = [field.name for field in schema if pa.types.is_string(field.type)]
            plain = [field.name for field in schema if not pa.types.is_nested(field.type)]
            # Ids repeat, so dictionaries pay; token columns would only fill them up first.
            self._writer = pq.ParquetWriter(
                self.sink, schema, compression="zstd", compression_level=1, use_dictionary=texts, write_statistics=plain
            )
        else:
            self._writer = pa.ipc.new_file(pa.PythonFile(self.sink, mode="w"), schema)

    def write(self, batch: pa.RecordBatch) -> None:
        """Raises OSError."""
        self._writer.write_batch(batch)
        self.rows += len(batch)

    def close(self) -> None:
        """Complete on disk. Raises OSError."""
        self._writer.close()
        self.sink.sync()

    def abort(self) -> None:
        """Release the file. pyarrow's writers write their footer when they are dropped: into nothing."""
        self.sink.discard()
        self._writer.close()


class _HashedFile:
    """A file written front to back that knows its size and sha256; what pyarrow asks of a Python file."""

    def __init__(self, path: Path) -> None:
        self.file: BinaryIO = path.open("wb", buffering=0)  # pyarrow writes in large pieces
        self.running = hashlib.sha256()
        self.size = 0
        self.closed = False
        """As pyarrow asks it."""

    def write(self, content: Any) -> int:
        """All of `content`. Raises OSError."""
        view = memoryview(content).cast("B")
        if self.closed:
            return len(view)
        self.running.update(view)
        written = 0
        while written < len(view):
            written += self.file.write(view[written:]) or 0
        self.size += written
        return written

    def tell(self) -> int:
        """Bytes written."""
        return self.size

    def flush(self) -> None:
        """Nothing is held back."""

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def close(self) -> None:
        """pyarrow is done; `sync` closes."""

    def discard(self) -> None:
        """Closed; what is still written goes nowhere."""
        self.closed = True
        self.file.close()

    def sync(self) -> None:
        """On disk, and closed. Raises OSError."""
        os.fsync(self.file.fileno())
        self.file.close()
        self.closed = True


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
