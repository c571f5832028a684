"""Builds a dataset from a run's topics or archive: reads in bounded memory, filters, writes, all or nothing.

The `rl` view is segment-samples in offset order, unit by unit, each sample held no longer than its batch.
"""

from __future__ import annotations

from pathlib import Path

from turnlog.consumers.datasets.conversations import write_conversations
from turnlog.consumers.datasets.errors import BrokenSample, NothingMatched
from turnlog.consumers.datasets.manifest import Manifest, Provenance
from turnlog.consumers.datasets.query import Facts, Filters, Query, Seen
from turnlog.consumers.datasets.source import Progress, Source
from turnlog.consumers.datasets.writer import DatasetWriter
from turnlog.infra.log import Partition, Record
from turnlog.infra.roles.role import Role
from turnlog.schemas import topics
from turnlog.schemas.events import GroupScored, SegmentSample, SessionStarted
from turnlog.schemas.topics import Topic

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


async def build(
    role: Role,
    query: Query,
    out: Path,
    *,
    view: str,
    format: str,
    overwrite: bool = False,
    source: str = "topics",
    progress: Progress | None = None,
) -> Manifest:
    """Write the rows of `view` that `query` admits to `out`, from `role.log`; `source` says in the manifest what that
    is. Raises BadQuery, DatasetExists, NotADataset, NothingMatched, MissingContent, Unwritable and what the log and
    store raise; then `out` is as it was."""
    query.check(view)
    provenance = Provenance(query={"source": source, **query.asked()})
    with DatasetWriter(out, view, format, overwrite=overwrite) as writer:
        reads = await Source.open(role, query, provenance, _plan(query, view), progress)
        joined = await reads.joined(always_tasks=view != "rl")
        filters, seen = Filters(query, joined, provenance.removed), Seen(query.dedupe, provenance.removed)
        for unit in range(role.settings.kafka.groups):
            if view == "rl":
                await write_samples(reads, unit, writer, filters, seen)
            else:
                await write_conversations(reads, unit, writer, filters, seen, joined)
        if not writer.added:
            raise NothingMatched(_nothing(role, provenance))
        return writer.close(provenance)


def _plan(query: Query, view: str) -> list[Topic]:
    """Topics in the order of their passes."""
    plan = [topics.TASKS] if view != "rl" or query.joins_tasks else []
    plan += [topics.BATCHES] if query.joins_steps else []
    if view != "rl":
        return [*plan, topics.SAMPLES, topics.SESSIONS, topics.TREES, topics.TURNS]
    return [*plan, *([topics.SESSIONS] if query.joins_environments else []), topics.SAMPLES]


def _nothing(role: Role, provenance: Provenance) -> str:
    run = ", ".join(provenance.query.get("runs", [role.settings.run.id]))
    if not provenance.removed:
        return (
            f"no row of run {run} is on the log: check [run] id and [kafka] prefix; rows of `rl` are there once a "
            "group is scored"
        )
    removed = ", ".join(f"{name} removed {count}" for name, count in provenance.removed.most_common())
    return f"no row of run {run} passes the filters: {removed}. Nothing was written"
