"""Data of samples that is not in a batch's file: the experts that the engine recorded, and how trajectories ended.

Batch files do not contain experts, which would be most of their bytes. A sample refers to them by content hash, so that
its record is as immutable as a column. A sample without any (an engine died, a gateway did not request them) leaves its
row unrouted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict

import numpy as np
from numpy.typing import NDArray
from prometheus_client import Counter

from turnlog.infra.blobs import Blobs, expert_rows
from turnlog.infra.event_log import EventLog
from turnlog.infra.history import read_range
from turnlog.infra.log import Log, Partition
from turnlog.processors.core.batches.rows import BatchRows
from turnlog.schemas.events import Outcome, SampleBatchFormed, SegmentSample
from turnlog.schemas.topics import SAMPLES
from turnlog.trainer import ExpertsUnfit
from turnlog.trainer.models.experts import attach_experts
from turnlog.trainer.shape import ModelShape

UNROUTED = Counter(
    "turnlog_trainer_unrouted_rows", "Rows for a mixture-of-experts model that came without recorded experts"
)
NAMED = 5
"""Number of samples that a warning names for each cause."""
_said = logging.getLogger(__name__)


async def with_experts(
    manifest: SampleBatchFormed, rows: BatchRows, shape: ModelShape, log: Log, events: EventLog, blobs: Blobs
) -> BatchRows:
    """Return the rows of a batch with the experts of those that have some.

    Raises BrokenExperts, ExpertsDoNotCover, BlobError, LogError, and ExpertsUnfit if samples have different shapes of
    experts or experts that are not the model's.
    """
    named = await samples_of(manifest, log, events)
    _tell_unrouted(manifest, named)
    recorded = np.array([bool(sample.experts) for sample in named], bool)
    if not recorded.any():
        return rows
    found = await asyncio.gather(*(expert_rows(sample, blobs) for sample in named if sample.experts))
    return await asyncio.to_thread(_join_experts, manifest, rows, shape, recorded, found)


def _join_experts(
    manifest: SampleBatchFormed,
    rows: BatchRows,
    shape: ModelShape,
    recorded: NDArray[np.bool_],
    found: list[NDArray[np.int32]],
) -> BatchRows:
    if len(widths := {each.shape[1:] for each in found}) > 1:
        raise ExpertsUnfit(f"batch {manifest.batch_index}: its samples have experts of shapes {sorted(widths)}")
    largest = max(int(each.max(initial=0)) for each in found)
    narrow = "u1" if largest <= np.iinfo("u1").max else "<u2"
    whole = np.zeros((len(rows.token_ids), *widths.pop()), narrow)
    for row, each in zip(np.flatnonzero(recorded).tolist(), found, strict=True):
        start, inputs = int(rows.starts[row]), int(rows.lengths[row]) - 1
        whole[start : start + inputs] = each[:inputs]  # the rollout batch may have cut the sample's tail
    return attach_experts(rows, whole, shape, recorded)


def _tell_unrouted(manifest: SampleBatchFormed, named: list[SegmentSample]) -> None:
    causes: dict[str, list[str]] = defaultdict(list)
    for sample in named:
        if not sample.experts:
            causes[sample.experts_gap or "none were recorded"].append(sample.sample_id)
    for cause, samples in causes.items():
        UNROUTED.inc(len(samples))
        more = f" and {len(samples) - NAMED} more" if len(samples) > NAMED else ""
        _said.warning(
            "batch %d: %d of %d rows have no recorded experts (%s): samples %s%s",
            manifest.batch_index, len(samples), len(named), cause, ", ".join(samples[:NAMED]), more,
        )  # fmt: skip


async def read_truncation_flags(manifest: SampleBatchFormed, log: Log, events: EventLog) -> NDArray[np.bool_]:
    """Return [n] whether the trajectory of each row was truncated. Raises ExpertsUnfit, LogError."""
    return np.array([one.outcome is Outcome.truncated for one in await samples_of(manifest, log, events)], bool)


async def samples_of(manifest: SampleBatchFormed, log: Log, events: EventLog) -> list[SegmentSample]:
    """Return the samples of a batch, in order of its rows. Raises ExpertsUnfit if a sample is not where the manifest
    says.
    """
    wanted: dict[int, dict[int, str]] = {}
    for row in manifest.samples:
        wanted.setdefault(row.partition, {})[row.offset] = row.sample_id
    found: dict[str, SegmentSample] = {}
    async with log.reader() as reader:
        for partition, ids in wanted.items():
            place = Partition(SAMPLES.name, partition)
            async for record in read_range(reader, {place: min(ids)}, {place: max(ids) + 1}):
                event = await events.decode_known(record) if record.offset in ids else None
                if isinstance(event, SegmentSample) and event.sample_id == ids[record.offset]:
                    found[event.sample_id] = event
    for row in manifest.samples:
        if row.sample_id not in found:
            place_said = f"{SAMPLES.name}[{row.partition}]@{row.offset}"
            raise ExpertsUnfit(
                f"sample {row.sample_id} does not stand at {place_said}, where batch {manifest.batch_index} says"
            )
    return [found[row.sample_id] for row in manifest.samples]
