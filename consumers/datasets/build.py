"""Builds a dataset from a run's topics or archive: reads in bounded memory, filters, writes, all or nothing."""

from __future__ import annotations

from pathlib import Path

from turnlog.consumers.datasets.conversations_view import write_conversations
from turnlog.consumers.datasets.errors import NothingMatched
from turnlog.consumers.datasets.filters import Filters, Seen
from turnlog.consumers.datasets.manifest import Manifest, Provenance
from turnlog.consumers.datasets.query import Query
from turnlog.consumers.datasets.rl_view import write_samples
from turnlog.consumers.datasets.source import Progress, Source
from turnlog.consumers.datasets.writer import DatasetWriter
from turnlog.infra.role import Role
from turnlog.schemas import topics
from turnlog.schemas.topics import Topic


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
