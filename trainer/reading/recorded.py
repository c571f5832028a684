"""What the samples that a batch's manifest names say beside its file: where the rows of experts that the engine
recorded lie, and how their trajectories ended.

Batch files hold no experts, which would be most of their bytes: a sample names them by content, so that what its
record says is as fixed as a column.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnlog.infra.blobs import Blobs, expert_rows
from turnlog.infra.event_log import EventLog
from turnlog.infra.log import Log, Partition
from turnlog.processors.core.batches.rows import BatchRows
from turnlog.processors.core.experts import NoExperts
from turnlog.schemas.events import Outcome, SampleBatchFormed, SegmentSample
from turnlog.schemas.topics import SAMPLES
from turnlog.trainer import ExpertsUnfit


async def recorded_experts(
    manifest: SampleBatchFormed, rows: BatchRows, log: Log, events: EventLog, blobs: Blobs
) -> NDArray[Any]:
    """[T, layers, top_k] for `routed`, 0 at each row's last token.

    Raises NoExperts for the first row without them: rows that are replayed and rows that are not never share a step.
    Raises BrokenExperts, ExpertsDoNotCover, BlobError, LogError, and ExpertsUnfit for rows of samples of other widths.
    """
    named = await _samples(manifest, log, events)
    for sample in named:
        if not sample.experts:
            raise NoExperts(f"sample {sample.sample_id} has none ({sample.experts_gap or 'none were recorded'})")
    found = await asyncio.gather(*(expert_rows(sample, blobs) for sample in named))
    if len(widths := {each.shape[1:] for each in found}) > 1:
        raise ExpertsUnfit(f"batch {manifest.batch_index}: its samples have experts of shapes {sorted(widths)}")
    whole = np.zeros((len(rows.token_ids), *widths.pop()), "<i4")
    for start, length, each in zip(rows.starts.tolist(), rows.lengths.tolist(), found, strict=True):
        whole[start : start + length - 1] = each[: length - 1]  # a draw may have cut the sample's tail
    return whole.astype("u1" if whole.max(initial=0) <= np.iinfo("u1").max else "<u2")


async def truncated(manifest: SampleBatchFormed, log: Log, events: EventLog) -> NDArray[np.bool_]:
    """[n] whether the trajectory of each row was. Raises ExpertsUnfit, LogError."""
    return np.array([one.outcome is Outcome.truncated for one in await _samples(manifest, log, events)], bool)


async def _samples(manifest: SampleBatchFormed, log: Log, events: EventLog) -> list[SegmentSample]:
    """In order of the rows. Raises ExpertsUnfit."""
    wanted: dict[int, dict[int, str]] = {}
    for row in manifest.samples:
        wanted.setdefault(row.partition, {})[row.offset] = row.sample_id
    found: dict[str, SegmentSample] = {}
    async with log.reader() as reader:
        for partition, ids in wanted.items():
            place, last = Partition(SAMPLES.name, partition), max(ids)
            reader.assign({place: min(ids)})
            while reader.position(place) <= last:
                for record in await reader.poll():
                    event = await events.known(record) if record.offset in ids else None
                    if isinstance(event, SegmentSample) and event.sample_id == ids[record.offset]:
                        found[event.sample_id] = event
    for row in manifest.samples:
        if row.sample_id not in found:
            place_said = f"{SAMPLES.name}[{row.partition}]@{row.offset}"
            raise ExpertsUnfit(
                f"sample {row.sample_id} does not stand at {place_said}, where batch {manifest.batch_index} says"
            )
    return [found[row.sample_id] for row in manifest.samples]
