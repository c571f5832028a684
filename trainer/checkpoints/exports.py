"""Files of weight versions, which each sending rank writes on its own machine.

    begun        the bytes of all tensors are in files (in the page cache); then the ranks may take the next step
    exported     each rank has hashed its files, compared them with those of its last export, and uploaded them, in a
                 thread while training goes on

No collective operation waits for a disk. A rank's thread reports to rank 0 through the TCPStore of torch at which the
ranks met, so that rank 0 learns of a finished export while a step is under way.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import shutil
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from turnlog.infra.tensors import adapters, deltas
from turnlog.infra.tensors.digests import bucket_offsets
from turnlog.infra.tensors.files import (
    MODEL,
    SHARD_BYTES,
    SUFFIX,
    Shards,
    TensorSpec,
    Written,
    header_of,
    index_of,
    read_checksums,
    shards,
)
from turnlog.schemas.events import WeightFile
from turnlog.schemas.types import BlobRef
from turnlog.trainer import ExportFailed, mcore
from turnlog.trainer.checkpoints.places import RunBlobs, file_sha256
from turnlog.trainer.checkpoints.state import LOOK_S, of_ranks, unwritten
from turnlog.trainer.export import ExportBucket, ExportedWeights, WeightExport
from turnlog.trainer.weight_records import WeightDelta

log = logging.getLogger(__name__)
AT_ONCE = 4
"""Number of pieces of a bucket that a rank writes concurrently."""
HOST_BUFFERS = 2
"""Number of pinned buffers of a rank."""
WRITE_BYTES = 8 << 20
"""Bytes that one thread writes at once."""
EVERY_S = 0.05
"""Pause between two looks at the reports of ranks."""


@dataclass(frozen=True, slots=True)
class ExportedVersion:
    """An export that all ranks have finished."""

    written: Written
    stored: tuple[WeightFile, ...]
    """The uploaded files, some of which hold changes in place of tensors; empty if ranks upload nothing."""
    difference: WeightDelta | None


@dataclass(slots=True)
class _RankReport:
    """The report of one rank."""

    sha256: dict[str, str] = field(default_factory=dict)
    checksums: dict[str, str] = field(default_factory=dict)
    stored: dict[str, BlobRef] = field(default_factory=dict)
    base: int | None = None
    changes: frozenset[str] = frozenset()
    unchanged: deltas.Unchanged = field(default_factory=deltas.Unchanged)


class LastExport:
    """A rank's files of the last export, which stay on disk so that those of the next one can be compared with them. A
    trainer generation begins without any.
    """

    def __init__(self, *, chain: int) -> None:
        """`chain` is the maximum number of consecutive versions with changes; with 0 there are none, and no file is
        retained.
        """
        self._chain, self._count = chain, 0
        self._last: tuple[int, Path, dict[str, str]] | None = None

    @property
    def folder(self) -> Path | None:
        """Folder of the last export, if its files were retained."""
        return None if self._last is None else self._last[1]

    def difference(self, folder: Path, sha256: Mapping[str, str]) -> tuple[int | None, list[str], deltas.Unchanged]:
        """Return the version of the last export, the names of files, written into `folder`, with the changes since, and
        counts of unchanged values.

        There is no change file for a file that no longer equals what was published, or whose changes are no smaller,
        and none in every (chain + 1)-th version.
        """
        unchanged, found = deltas.Unchanged(), list[str]()
        if self._last is None or not self._chain:
            return None, found, unchanged
        version, base, was = self._last
        for name in (name for name in sha256 if name.endswith(SUFFIX)):
            if name not in was or file_sha256(base / name) != was[name]:
                log.warning(
                    "%s differs from what was published as version %d: publishing it whole", base / name, version
                )
                continue
            out = folder / (name + deltas.SUFFIX)
            deltas.write_delta(base / name, folder / name, out, unchanged)
            if self._count % (self._chain + 1) and out.stat().st_size < (folder / name).stat().st_size:
                found.append(name)
            else:
                out.unlink()
        return version, found, unchanged

    def keep(self, version: int, folder: Path, sha256: Mapping[str, str]) -> None:
        """Retain the files of an export that was stored, and remove the previous ones."""
        for name in sha256:
            (folder / (name + deltas.SUFFIX)).unlink(missing_ok=True)
        if self._last is not None:
            _remove_files(self._last[1], self._last[2])
        self._last = (version, folder, {name: one for name, one in sha256.items() if name.endswith(SUFFIX)})
        self._count += 1
        _remove_files(folder, [name for name in sha256 if not name.endswith(SUFFIX)])
        if not self._chain:
            _remove_files(folder, sha256)
            self._last = None


def _remove_files(folder: Path, names: Iterable[str]) -> None:
    """Remove this rank's files, and the folder once no rank of this machine has any there."""
    for name in names:
        (folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


class Exports:
    """The exports of a rank, one at a time. All methods but `find_export` are collective."""

    def __init__(self, store: RunBlobs | None, *, chain: int) -> None:
        """`store` is where ranks upload their files; None leaves them in the folder. For `chain`, see LastExport."""
        self._store, self._last = store, LastExport(chain=chain)
        self._number = 0
        self._thread: threading.Thread | None = None
        self._specs: tuple[TensorSpec, ...] = ()

    def begin(
        self,
        export: WeightExport,
        folder: Path,
        of: ExportedWeights,
        version: int,
        blobs: str,
        *,
        beside: Mapping[str, bytes],
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        """Write all tensors into files of `folder`, which each rank makes on its machine, and `beside`, further files
        of rank 0; then begin to hash them and to upload them into the run's folder `blobs`. Raises ExportFailed on
        every rank.
        """
        stem, shard_bytes = (adapters.STEM, sys.maxsize) if of == "adapter" else (MODEL, shard_bytes)
        planned = shards([export.sent_by(sender) for sender in range(len(export.senders))], shard_bytes, stem)
        own = set() if export.own_sender is None else {spec.name for spec in export.sent_by(export.own_sender)}
        mine = [(name, specs) for name, specs in planned if specs[0].name in own]
        small = {**index_of(planned), **beside} if dist.get_rank() == 0 else {}
        names = [*small, *(name for name, _ in mine)]
        try:
            of_ranks(None, _write_files(export, folder, mine, self._prepare(folder, small)))
        except ExportFailed:
            _remove_files(folder, names)
            raise
        self._number, self._specs = self._number + 1, tuple(export.specs)
        self._begin_report(lambda: self._finish_files(folder, names, version, blobs), folder)

    def _begin_report(self, work: Callable[[], _RankReport], folder: Path) -> None:
        store: Any = _get_default_store()
        key = _key(self._number, dist.get_rank())
        store.delete_key(_key(self._number - 1, dist.get_rank()))

        def report() -> None:
            outcome: tuple[_RankReport | None, Exception | None]
            try:
                outcome = work(), None
            except OSError as error:
                outcome = None, ExportFailed(unwritten(folder, error))
            except Exception as error:  # rank 0 raises it
                outcome = None, error
            store.set(key, pickle.dumps(outcome))

        self._thread = threading.Thread(target=report, name="export", daemon=True)
        self._thread.start()

    def _prepare(self, folder: Path, small: Mapping[str, bytes]) -> OSError | None:
        """Make the folder and write small files, and return why that failed."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for old in folder.parent.iterdir() if self._store is not None else ():
                if old not in (folder, self._last.folder):  # from an earlier generation, or a failed export
                    shutil.rmtree(old, ignore_errors=True)
            for name, content in small.items():
                (folder / name).write_bytes(content)
        except OSError as error:
            return error
        return None

    def _finish_files(self, folder: Path, names: Sequence[str], version: int, blobs: str) -> _RankReport:
        part = _RankReport()
        with ThreadPoolExecutor(1, "sha256") as pool:
            of_files = pool.map(lambda name: (name, file_sha256(folder / name)), names)
            for name in names:
                if name.endswith(SUFFIX):
                    part.checksums |= {spec.name: found for spec, found in read_checksums(folder / name)}
            part.sha256 = dict(of_files)
        if self._store is not None:
            part.base, changed, part.unchanged = self._last.difference(folder, part.sha256)
            part.changes = frozenset(name + deltas.SUFFIX for name in changed)
            files = {folder / name: sha256 for name, sha256 in part.sha256.items() if name not in changed}
            files |= {folder / (name + deltas.SUFFIX): "" for name in changed}
            part.stored = self._store.put_files(files, blobs)
            self._last.keep(version, folder, part.sha256)
        return part

    def find_export(self, wait_s: float = 0.0) -> ExportedVersion | None:
        """Return the export once every rank has finished its files, else None after at most `wait_s`. For rank 0 alone,
        from any thread, also beside other calls. Raises the failure of any rank: ExportFailed, BlobError.
        """
        store, keys = _get_default_store(), [_key(self._number, rank) for rank in range(dist.get_world_size())]
        over = threading.Event()
        while not store.check(keys):
            if wait_s <= 0.0 or over.wait(EVERY_S):
                return None
            wait_s -= EVERY_S
        parts: list[_RankReport] = []
        for key in keys:
            part, failure = pickle.loads(store.get(key))  # written by our own ranks
            if failure is not None:
                raise failure
            parts.append(part)
        return self._join_parts(parts)

    def finish(self, *, wait: bool) -> ExportedVersion | None:
        """Return the export at rank 0 once every rank has finished its files, else None; `wait` waits for that.

        Raises at rank 0 what `find_export` raises.
        """
        while not self._is_finished(LOOK_S if wait else 0.0):
            if not wait:
                return None
        if dist.get_rank() != 0:
            return None
        while (
            done := self.find_export(LOOK_S)
        ) is None:  # a report is sent without an answer, and may still be on its way
            pass
        return done

    def _is_finished(self, wait_s: float) -> bool:
        """Return whether every rank has finished its files, after waiting for this one's at most `wait_s`. Collective,
        as Save._is_written is: ranks must not wait for each other's disks in it, because it has a time-out.
        """
        if self._thread is not None:
            self._thread.join(wait_s)
        finished = torch.tensor([int(self._thread is None or not self._thread.is_alive())], device=mcore.DEVICE)
        dist.all_reduce(finished, op=dist.ReduceOp.MIN)
        return bool(finished.item())

    def _join_parts(self, parts: Sequence[_RankReport]) -> ExportedVersion:
        sha256, checksums, stored, unchanged = (
            dict[str, str](),
            dict[str, str](),
            list[WeightFile](),
            deltas.Unchanged(),
        )
        for part in parts:
            sha256 |= part.sha256
            checksums |= part.checksums
            stored += [WeightFile(name, ref) for name, ref in part.stored.items()]
            unchanged += part.unchanged
        bases = {part.base for part in parts} - {None}
        difference = None
        for base in bases:
            changes = frozenset(name for part in parts for name in part.changes)
            difference = WeightDelta(int(base or 0), changes, unchanged.shares())
        return ExportedVersion(Written(sha256, checksums, self._specs), tuple(stored), difference)


def _key(number: int, rank: int) -> str:
    return f"turnlog/exports/{number}/{rank}"


class _OpenFile:
    """A safetensors file whose header is written, and the position of each tensor in it."""

    def __init__(self, path: Path, specs: Sequence[TensorSpec]) -> None:
        self.descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        header = header_of(specs)
        write_at(self.descriptor, 0, struct.pack("<Q", len(header)) + header)
        self.positions, offset = dict[str, int](), 8 + len(header)
        for spec in specs:
            self.positions[spec.name] = offset
            offset += spec.nbytes


def write_at(descriptor: int, offset: int, content: bytes | memoryview) -> None:
    """Write all bytes at `offset`. Raises OSError."""
    while content:
        written = os.pwrite(descriptor, content, offset)
        content, offset = content[written:], offset + written


def _write_files(export: WeightExport, folder: Path, mine: Shards, failure: OSError | None) -> ExportFailed | None:
    """Write this rank's files, unless something has failed before, and return why it could not. Other ranks wait for
    its shares, so it takes part to the end in any case."""
    found = [] if failure is None else [failure]
    with contextlib.ExitStack() as stack:
        places: dict[str, tuple[int, int]] = {}
        try:
            for name, specs in mine if failure is None else ():
                file = _OpenFile(folder / name, specs)
                stack.callback(os.close, file.descriptor)
                places |= {tensor: (file.descriptor, offset) for tensor, offset in file.positions.items()}
        except OSError as error:
            found.append(error)
        with ThreadPoolExecutor(AT_ONCE, "export") as pool:
            copies = (_DeviceCopies if mcore.DEVICE.type == "cuda" else _HostCopies)(pool, places)
            for bucket, values in export.stream(release=copies.release):
                if not found and not copies.failures:
                    copies.write(bucket, values)
            found += copies.drain()
    return ExportFailed(unwritten(folder, found[0])) if found else None


class _HostCopies:
    """Writes buckets from where they are, on a CPU."""

    def __init__(self, pool: ThreadPoolExecutor, places: Mapping[str, tuple[int, int]]) -> None:
        """`places` has the open file and the position of each tensor."""
        self.failures: list[OSError] = []
        self._pool, self._places = pool, places
        self._writing: dict[ExportBucket, list[Future[None]]] = {}

    def write(self, bucket: ExportBucket, values: torch.Tensor) -> None:
        """Begin to write."""
        self._begin(bucket, values, lambda: None)

    def release(self, bucket: ExportBucket) -> None:
        """Wait until the bucket's buffer is no longer needed."""
        self._await(bucket)

    def drain(self) -> list[OSError]:
        """Wait until all is written, and return what went wrong."""
        for bucket in list(self._writing):
            self._await(bucket)
        return self.failures

    def _begin(self, bucket: ExportBucket, host: torch.Tensor, ready: Callable[[], None]) -> None:
        content, begun = host.numpy().data, list[Future[None]]()

        def write(descriptor: int, position: int, start: int, end: int) -> None:
            ready()
            write_at(descriptor, position, content[start:end])

        for spec, start in zip(bucket.specs, bucket_offsets(bucket.specs), strict=False):
            descriptor, position = self._places[spec.name]
            for at in range(0, spec.nbytes, WRITE_BYTES):
                end = min(at + WRITE_BYTES, spec.nbytes)
                begun.append(self._pool.submit(write, descriptor, position + at, start + at, start + end))
        self._writing[bucket] = begun

    def _await(self, bucket: ExportBucket) -> None:
        for future in self._writing.pop(bucket, ()):
            if isinstance(error := future.exception(), OSError):
                self.failures.append(error)
            else:
                future.result()


_cuda: Any = torch.cuda


class _DeviceCopies(_HostCopies):
    """Copies buckets into pinned memory on a CUDA stream of its own, and writes them from there while the next one is
    copied.
    """

    def __init__(self, pool: ThreadPoolExecutor, places: Mapping[str, tuple[int, int]]) -> None:
        super().__init__(pool, places)
        self._stream = _cuda.Stream()
        self._copied: dict[ExportBucket, Any] = {}
        self._host: deque[tuple[ExportBucket, torch.Tensor]] = deque()

    def write(self, bucket: ExportBucket, values: torch.Tensor) -> None:
        host = torch.empty(0, dtype=torch.uint8)
        if len(self._host) == HOST_BUFFERS:
            before, host = self._host.popleft()
            self._await(before)
        if len(host) < len(values):
            host = torch.empty(len(values), dtype=torch.uint8, pin_memory=True)
        self._host.append((bucket, host))
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            host[: len(values)].copy_(values, non_blocking=True)
            self._copied[bucket] = copied = _cuda.Event()
            copied.record(self._stream)
        self._begin(bucket, host, copied.synchronize)

    def release(self, bucket: ExportBucket) -> None:
        if (copied := self._copied.pop(bucket, None)) is not None:
            torch.cuda.current_stream().wait_event(copied)

    def drain(self) -> list[OSError]:
        for copied in self._copied.values():
            copied.synchronize()
        return super().drain()
