"""Weight publisher of one trainer generation: weights are published while training continues, at most one version at a
time.

    due          after its step: it has its number, and its tensors are in files of the ranks (a call of the ranks)
    stored       hashed, compared with the version before it and uploaded by the ranks, beside the next step
    published    WeightVersionPublished is on the log; only then may another version be due

No version is skipped or overtaken. If the trainer is killed before a version is published, the version never existed:
no record names its objects, and the next generation publishes the weights that it starts from. A failure ends the
trainer at its next check: with ExportFailed if files could not be written.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from prometheus_client import Gauge

from turnlog.infra.blobs import Blobs
from turnlog.infra.tensors import adapters
from turnlog.infra.tensors.files import Written
from turnlog.schemas.events import WeightFile, WeightVersionPublished
from turnlog.trainer.calls import RanksCall
from turnlog.trainer.checkpoints.exports import ExportedVersion
from turnlog.trainer.checkpoints.places import MEDIA
from turnlog.trainer.checkpoints.state import LOOK_S
from turnlog.trainer.export import ExportedWeights
from turnlog.trainer.learner import Learner
from turnlog.trainer.weight_records import WeightDelta, description

VERSION = Gauge("turnlog_trainer_weight_version", "Newest published weight version")
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
        directory: Path,
        model: Path,
        blobs: Blobs,
        call: RanksCall,
        call_beside: RanksCall,
        commit: Callable[[WeightVersionPublished], Awaitable[None]],
    ) -> None:
        """`directory` is where each rank's machine keeps exports, `model` the folder whose config is uploaded with the
        weights. `call` calls all ranks, `call_beside` rank 0 beside such a call.
        """
        self._directory, self._model, self._blobs, self._commit = directory, model, blobs, commit
        self._call, self._call_beside = call, call_beside
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
        return await self._call(Learner.checksums, "base") == tensors

    async def begin(
        self, version: int, said: PublicationBuilder, of: ExportedWeights = "merged"
    ) -> WeightVersionPublished:
        """Begin to publish the weights that the ranks hold now, after publishing the previous version.

        Return the record that will be written, still without its files and checksums. Raises ExportFailed, and the
        errors of `settle`.
        """
        await self.settle()
        folder = self._directory / f"{version}-{secrets.token_hex(4)}"
        specs = await self._call(Learner.begin_export, folder, of, version, self._blobs.folder)
        self._open = asyncio.create_task(self._store_version(said))
        return said(Written({}, {}, tuple(specs)), ())

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
        """Publish the version in progress, so that none is left. Raises ExportFailed, BlobError, RankLost, and the
        errors of transactions.
        """
        if self._open is not None:
            mark = time.monotonic()
            if not self._open.done():  # a call of all ranks notices one that has died
                await self._call(Learner.finish_export, True)
            await self._commit(await self._open)
            self._open = None
            self._waited_s += time.monotonic() - mark

    def waited_s(self) -> float:
        """Return for how many seconds training waited for publications since the last call."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited

    async def _store_version(self, said: PublicationBuilder) -> WeightVersionPublished:
        done: ExportedVersion | None = None
        while done is None:
            done = await self._call_beside(Learner.find_export, LOOK_S)
        beside = {} if adapters.CONFIG in done.written.sha256 else description(self._model)
        files = [
            WeightFile(name, await self._blobs.put(content, media_type=MEDIA[Path(name).suffix]))
            for name, content in beside.items()
        ]
        for held, share in done.difference.unchanged.items() if done.difference else ():
            UNCHANGED.labels(held).set(share)
        return said(done.written, (*files, *done.stored), difference=done.difference)
