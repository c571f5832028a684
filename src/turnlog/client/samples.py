"""The samples of a run as one table: those on the log at the time of the call, without those of erased sessions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from turnlog.client.loop_thread import LoopThread
from turnlog.consumers.datasets.columns import RL, RlRows
from turnlog.infra.blobs import inlined
from turnlog.infra.history import events_of, partitions
from turnlog.infra.roles.role import Role, open_role
from turnlog.schemas.content import holds_erased
from turnlog.schemas.events import SegmentSample
from turnlog.schemas.topics import SAMPLES
from turnlog.settings import Settings

if TYPE_CHECKING:
    import pandas

ROWS = 1024
"""Rows of a record batch."""


class RunSamples:
    """All samples of a run but those of erased sessions, in the order of partitions and offsets, with the columns of
    the `rl` view of datasets (docs/datasets.md).
    """

    def __init__(self, settings: Settings, *, archive: bool) -> None:
        """See `ClientRun.samples`."""
        self._settings, self._archive = settings, archive

    def to_arrow(self) -> pa.Table:
        """Return the samples as a pyarrow.Table. Raises BrokenSample, NoEndpoints, LogError, BlobError, and
        ContentKeyError if the run encrypts content and its keys are missing here."""
        with LoopThread("turnlog samples") as thread:
            role = thread.enter(open_role("reader", self._settings, archive=self._archive))
            return pa.Table.from_batches(list(thread.wait(sample_batches, role)), schema=RL)

    def to_pandas(self) -> pandas.DataFrame:
        """Return the samples as a pandas.DataFrame. Raises as `to_arrow`."""
        return self.to_arrow().to_pandas()

    def to_polars(self) -> Any:
        """Return the samples as a polars.DataFrame, for which polars must be installed. Raises as `to_arrow`."""
        import polars

        return polars.from_arrow(self.to_arrow())


async def sample_batches(role: Role) -> Iterator[pa.RecordBatch]:
    """Return the rows of `RunSamples` in batches of ROWS. Raises BrokenSample, LogError, BlobError."""
    found: list[pa.RecordBatch] = []
    rows = RlRows()
    ends = await role.log.end_offsets(partitions(role, SAMPLES))
    for place, end in sorted(ends.items()):
        async for _, event in events_of(role, place, end, (SegmentSample.__name__,)):
            assert isinstance(event, SegmentSample)
            if holds_erased(event):  # its tokens are zeros
                continue
            rows.add(await inlined(event, role.blobs))
            if len(rows) == ROWS:
                found.append(rows.batch())
                rows = RlRows()
    return iter([*found, rows.batch()] if len(rows) else found)
