"""Files of rows, one after another: Parquet (a row group per batch) or Arrow IPC, hashed as they are written."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from turnlog.consumers.datasets.manifest import DataFile

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
