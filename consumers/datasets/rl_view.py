"""Reads the `rl` view: segment-samples in offset order, unit by unit, each sample held no longer than its batch."""

from __future__ import annotations

from turnlog.consumers.datasets.errors import BrokenSample
from turnlog.consumers.datasets.filters import Facts, Filters, Seen
from turnlog.consumers.datasets.source import Source
from turnlog.consumers.datasets.writer import DatasetWriter
from turnlog.infra.log import Partition, Record
from turnlog.schemas import topics
from turnlog.schemas.events import GroupScored, SegmentSample, SessionStarted

BROKEN = "broken_sample"
"""Counted for a sample whose spans, log-probs and tokens do not fit, or that holds NaN."""


async def write_samples(source: Source, unit: int, writer: DatasetWriter, filters: Filters, seen: Seen) -> None:
    """Write the samples of one unit that the query admits. Raises MissingContent, Unwritable."""
    expired = await _expired(source, unit, filters)
    place = Partition(topics.SAMPLES.name, unit)
    async for record, event in source.read(place, SegmentSample.__name__, GroupScored.__name__):
        if isinstance(event, GroupScored):
            source.provenance.settings_sha256.add(event.settings_sha256)
            source.provenance.fold_versions.add(event.fold_version)
            continue
        assert isinstance(event, SegmentSample)
        if not _admitted(record, event, filters, expired.get(event.session_id)):
            continue
        where = f"{record.topic}[{record.partition}]@{record.offset}: sample {event.sample_id}"
        whole = await source.inlined(event, where)
        assert isinstance(whole, SegmentSample)
        assert isinstance(whole.token_ids, bytes)
        if seen.admits(whole.task_id, whole.group_id, whole.token_ids):
            try:
                writer.add([whole])
            except BrokenSample:
                filters.counted(BROKEN)


async def _expired(source: Source, unit: int, filters: Filters) -> dict[str, str]:
    """Session -> the environment filter that it fails."""
    found: dict[str, str] = {}
    if source.query.joins_environments:
        place = Partition(topics.SESSIONS.name, unit)
        async for _, event in source.read(place, SessionStarted.__name__):
            assert isinstance(event, SessionStarted)
            reason = filters.expired(event.environment)
            if reason is not None:
                found[event.session_id] = reason
    return found


def _admitted(record: Record, sample: SegmentSample, filters: Filters, expired: str | None) -> bool:
    facts = Facts(
        sample.group_id, sample.task_id, sample.purpose, sample.outcome, sample.reward, record.timestamp_ms,
        sample.sample_id,
    )  # fmt: skip
    return (
        filters.admits(facts)
        and filters.admits_recipe(sample.recipe)
        and filters.admits_environment(expired)
        and filters.admits_versions(sample.weight_version_min, sample.weight_version_max)
    )
