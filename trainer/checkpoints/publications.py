"""Weight publisher of one trainer generation: weights are published while training continues, at most one version at a
time.

    due          after its step: it has its number, and its tensors are files (a call of the ranks)
    stored       compared with the version before it and uploaded (threads, beside the next step)
    published    WeightVersionPublished is on the log; only then may another version be due

No version is skipped or overtaken. If the trainer is killed before a version is published, the version never existed:
no record names its objects, and the next generation publishes the weights that it starts from. A failure ends the
trainer at its next check: with ExportFailed if files could not be written.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from prometheus_client import Gauge

from turnlog.infra.blobs import Blobs
from turnlog.infra.tensors import adapters, deltas
from turnlog.infra.tensors.files import DTYPES, SUFFIX, Written
from turnlog.schemas.events import WeightFile, WeightVersionPublished
from turnlog.schemas.ids import digest
from turnlog.trainer import ExportFailed
from turnlog.trainer.calls import RanksCall
from turnlog.trainer.checkpoints.cursor import Cursor
from turnlog.trainer.checkpoints.places import file_sha256
from turnlog.trainer.checkpoints.state import unwritten
from turnlog.trainer.learner import Learner
from turnlog.trainer.weights import Of, description

log = logging.getLogger(__name__)

MEDIA = {".json": "application/json", ".safetensors": "application/vnd.safetensors"}
DELTA_MEDIA = "application/vnd.turnlog.delta"
AT_ONCE = 4
"""Number of files of a version that are uploaded concurrently."""
UNCHANGED = Gauge(
    "turnlog_trainer_unchanged", "Share of values that are unchanged since the previous version", ["held"]
)


class PublicationBuilder(Protocol):
    """Builds the WeightVersionPublished of a version: `published`, bound to one cursor."""

    def __call__(
        self, written: Written, files: tuple[WeightFile, ...], *, difference: WeightDelta | None = None
    ) -> WeightVersionPublished: ...


class Publications:
    """Publisher of weight versions. Not thread-safe; must not be used within a transaction, since it commits one.

    Leaving the context abandons a version in progress.
    """

    def __init__(
        self,
        exports: LastExport,
        model: Path,
        blobs: Blobs,
        call: RanksCall,
        commit: Callable[[WeightVersionPublished], Awaitable[None]],
    ) -> None:
        """`model` is the folder whose config is uploaded with the weights. `call` calls all ranks."""
        self._exports, self._model, self._blobs, self._call, self._commit = exports, model, blobs, call, commit
        self._open: asyncio.Task[WeightVersionPublished] | None = None
        self._waited_s = 0.0

    async def __aenter__(self) -> Publications:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._open is not None:
            self._open.cancel()
            await asyncio.wait([self._open])

    async def holds(self, tensors: Mapping[str, str]) -> bool:
        """Return whether the ranks' frozen weights have these checksums."""
        folder, written = await self._export(0, "base")
        await asyncio.to_thread(shutil.rmtree, folder)
        return written.checksums == tensors

    async def begin(self, version: int, said: PublicationBuilder, of: Of = "merged") -> WeightVersionPublished:
        """Begin to publish the weights that the ranks hold now, after publishing the previous version.

        Return the record that will be written, still without its files. Raises the errors of `settle`.
        """
        await self.settle()
        folder, written = await self._export(version, of)
        self._open = asyncio.create_task(self._store_version(version, folder, written, said))
        return said(written, ())

    async def _export(self, version: int, of: Of) -> tuple[Path, Written]:
        with _writing(self._exports.directory):
            folder = await asyncio.to_thread(self._exports.create_folder, version)
            written = await self._call(Learner.export_files, folder, of)
        assert written is not None, "rank 0 has the description of the files"
        return folder, written

    async def look(self) -> None:
        """Publish a version that is stored. Raises the errors of `settle`."""
        if self._open is not None and self._open.done():
            await self.settle()

    async def beside(self, work: asyncio.Future[Any]) -> None:
        """Like `look`, repeatedly until `work` is done."""
        if self._open is not None:
            await asyncio.wait([self._open, work], return_when=asyncio.FIRST_COMPLETED)
            await self.look()

    async def settle(self) -> None:
        """Publish the version in progress, so that none is left. Raises StoreUnavailable, and the errors of
        transactions.
        """
        if self._open is not None:
            mark = time.monotonic()
            await self._commit(await self._open)
            self._open = None
            self._waited_s += time.monotonic() - mark

    def waited_s(self) -> float:
        """Return for how many seconds training waited for publications since the last call."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited

    async def _store_version(
        self, version: int, folder: Path, written: Written, said: PublicationBuilder
    ) -> WeightVersionPublished:
        with _writing(folder):
            difference = await asyncio.to_thread(self._exports.difference, folder, written)
        files = difference.files if difference and difference.files else written.sha256
        stored = await upload(folder, files, self._model, self._blobs)
        await asyncio.to_thread(self._exports.keep, version, folder, written, difference)
        for held, share in difference.unchanged.items() if difference else ():
            UNCHANGED.labels(held).set(share)
        return said(written, stored, difference=difference)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Convert an OSError while files are written to `folder`. Raises ExportFailed."""
    try:
        yield
    except OSError as error:
        raise ExportFailed(unwritten(folder, error)) from error


async def upload(folder: Path, files: Mapping[str, str], model: Path, blobs: Blobs) -> tuple[WeightFile, ...]:
    """Store files of the folder, {name: sha256 if known}, with the config files of the `model` folder.

    An adapter has its own config instead. Unchanged files keep their names. Raises StoreUnavailable.
    """
    limit = asyncio.Semaphore(AT_ONCE)

    async def one(name: str, sha256: str) -> WeightFile:
        async with limit:
            media_type = MEDIA.get(Path(name).suffix, DELTA_MEDIA)
            return WeightFile(name, await blobs.put_file(folder / name, sha256=sha256, media_type=media_type))

    beside = [
        WeightFile(name, await blobs.put(content, media_type=MEDIA[".json"]))
        for name, content in ({} if adapters.CONFIG in files else description(model)).items()
    ]
    return (*beside, *await asyncio.gather(*(one(name, sha256) for name, sha256 in files.items())))


@dataclass(frozen=True, slots=True)
class WeightDelta:
    """The difference of weights from the previously published version."""

    base: int
    """Number of that version."""
    files: Mapping[str, str]
    """Files in the folder of the newer weights, to be published instead of their tensors; empty if they are no
    smaller.
    """
    unchanged: Mapping[str, float]
    """Shares of unchanged values; see WeightVersionPublished."""


class LastExport:
    """The trainer's last export, which stays on disk so that the next one can be compared with it. A trainer generation
    begins without one.
    """

    def __init__(self, directory: Path, *, chain: int) -> None:
        """`chain` is the maximum number of consecutive differences; with 0 there are none, and no export is
        retained.
        """
        self.directory, self._chain = directory, chain
        self._last: tuple[int, Path, Written] | None = None
        self._links = 0
        shutil.rmtree(directory, ignore_errors=True)

    def create_folder(self, version: int) -> Path:
        """Return an empty folder to export into."""
        self.directory.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f"{version}-", dir=self.directory))

    def difference(self, folder: Path, written: Written) -> WeightDelta | None:
        """Compute the difference from the last export; None if there is none, or if it no longer equals what was
        published.
        """
        if self._last is None or not self._chain:
            return None
        version, base, was = self._last
        found, unchanged, size, whole = dict[str, str](), deltas.Unchanged(), 0, 0
        for name, sha256 in written.sha256.items():
            if not name.endswith(SUFFIX):
                found[name] = sha256
                continue
            if file_sha256(base / name) != was.sha256[name]:
                log.warning(
                    "%s differs from what was published as version %d: publishing all tensors", base / name, version
                )
                return None
            out = folder / (name + deltas.SUFFIX)
            deltas.write_delta(base / name, folder / name, out, unchanged)
            found[out.name] = ""
            size, whole = size + out.stat().st_size, whole + (folder / name).stat().st_size
        if size >= whole or self._links >= self._chain:
            found = {}
        return WeightDelta(version, found, unchanged.shares())

    def keep(self, version: int, folder: Path, written: Written, difference: WeightDelta | None) -> None:
        """Retain a version that was stored, and remove the previous one."""
        if not self._chain:
            shutil.rmtree(folder)
            return
        for path in folder.glob(f"*{deltas.SUFFIX}"):
            path.unlink()
        if self._last is not None:
            shutil.rmtree(self._last[1])
        self._last, self._links = (version, folder, written), self._links + 1 if difference and difference.files else 0


def version_event(
    written: Written,
    files: tuple[WeightFile, ...],
    *,
    run_id: str,
    version: int,
    incarnation: int,
    cursor: Cursor,
    checkpoint: str | None,
    difference: WeightDelta | None = None,
    adapts: int | None = None,
) -> WeightVersionPublished:
    """Return the event of weights at `cursor`; `adapts` is the version that an adapter is based on."""
    base = difference.base if difference and difference.files else adapts
    types = {spec.name: DTYPES[spec.code] for spec in written.specs}
    several = len(set(types.values())) > 1
    return WeightVersionPublished(
        event_id=digest("WeightVersionPublished", run_id, version),
        run_id=run_id,
        version=version,
        step=cursor.step,
        batch_index=cursor.next_batch - 1,
        incarnation=incarnation,
        kind="full" if base is None else "delta" if adapts is None else "adapter",
        base_version=base,
        files=files,
        dtype="+".join(sorted(set(types.values()))),
        checksums=dict(sorted(written.checksums.items())),
        checkpoint=checkpoint,
        dtypes=types if several else {},
        unchanged=dict(difference.unchanged) if difference else {},
    )
