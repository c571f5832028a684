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
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from prometheus_client import Gauge

from turnlog.infra.blobs import Blobs
from turnlog.infra.tensors.files import Written
from turnlog.schemas.events import WeightFile, WeightVersionPublished
from turnlog.trainer import ExportFailed
from turnlog.trainer.calls import RanksCall
from turnlog.trainer.checkpoints.state import unwritten
from turnlog.trainer.learner import Learner
from turnlog.trainer.weights import LastExport, Of, WeightDelta, upload

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
