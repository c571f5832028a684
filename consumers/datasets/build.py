"""Building datasets, and verifying them: files, rows and counts are compared with the manifest.

A dataset is built from the topics or the archive of a run. It is read with bounded memory, filtered, and written
completely or not at all. The `rl` view is segment-samples in offset order, partition task by partition task; a sample
is not held longer than its batch.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from turnlog.consumers.datasets import BrokenSample, DatasetDamaged, NothingMatched
from turnlog.consumers.datasets.columns import VIEWS, row_digests, rows_sha256
from turnlog.consumers.datasets.conversations import write_conversations
from turnlog.consumers.datasets.manifest import DataFile, DatasetCounts, DatasetManifest, Provenance, read_manifest
from turnlog.consumers.datasets.query import Facts, Filters, Query, Seen
from turnlog.consumers.datasets.source import DatasetInput, Placed, Progress
from turnlog.consumers.datasets.writer import DatasetWriter
from turnlog.infra.log import Partition, Record
from turnlog.infra.roles.role import Role
from turnlog.schemas import topics
from turnlog.schemas.events import GroupScored, SegmentSample, SessionStarted
from turnlog.schemas.topics import Topic

BROKEN = "broken_sample"
"""Counter for samples whose spans, log-probs and tokens do not fit, or that contain NaN."""


async def write_samples(source: DatasetInput, unit: int, writer: DatasetWriter, filters: Filters, seen: Seen) -> None:
    """Write the samples of one partition task that the query admits. Raises MissingContent, Unwritable."""
    expired = await _find_expired(source, unit, filters)
    place = Partition(topics.SAMPLES.name, unit)
    async for record, event in source.read(place, SegmentSample, GroupScored):
        if isinstance(event, GroupScored):
            source.provenance.settings_sha256.add(event.settings_sha256)
            source.provenance.fold_versions.add(event.fold_version)
            continue
        assert isinstance(event, SegmentSample)
        if not _is_admitted(record, event, filters, expired.get(event.session_id)):
            continue
        where = f"{record.topic}[{record.partition}]@{record.offset}: sample {event.sample_id}"
        whole = await source.inline_payloads(event, where)
        assert isinstance(whole.token_ids, bytes)
        if seen.admits(whole.task_id, whole.group_id, whole.token_ids):
            try:
                writer.add([whole])
            except BrokenSample:
                filters.count_removal(BROKEN)


async def _find_expired(source: DatasetInput, unit: int, filters: Filters) -> dict[str, str]:
    """Return the environment filter that each session fails."""
    found: dict[str, str] = {}
    if source.query.joins_environments:
        place = Partition(topics.SESSIONS.name, unit)
        async for _, event in source.read(place, SessionStarted):
            reason = filters.check_environment(event.environment)
            if reason is not None:
                found[event.session_id] = reason
    return found


def _is_admitted(record: Record, sample: SegmentSample, filters: Filters, expired: str | None) -> bool:
    facts = Facts(
        sample.group_id, sample.task_id, sample.purpose, sample.outcome, sample.reward, record.timestamp_ms,
        sample.sample_id,
    )  # fmt: skip
    return (
        filters.admits(facts)
        and filters.admits_recipe(sample.recipe)
        and filters.count_removal(expired)
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
    placed: Placed | None = None,
    provenance: Provenance | None = None,
) -> DatasetManifest:
    """Write the rows of `view` that `query` admits, read from `role.log`, to `out`.

    `source` names the origin in the manifest; `provenance` holds more entries for it. Raises BadQuery, DatasetExists,
    NotADataset, NothingMatched, MissingContent, Unwritable, and the errors of log and store; then `out` is unchanged.
    """
    query.check(view)
    provenance = provenance or Provenance()
    provenance.query |= {"source": source, **query.non_default_values()}
    with DatasetWriter(out, view, format, overwrite=overwrite) as writer:
        reads = await DatasetInput.open(role, query, provenance, _plan(query, view), progress, placed)
        joined = await reads.read_joined(always_tasks=view != "rl")
        filters, seen = Filters(query, joined, provenance.removed), Seen(query.dedupe, provenance.removed)
        for unit in range(role.settings.kafka.groups):
            if view == "rl":
                await write_samples(reads, unit, writer, filters, seen)
            else:
                await write_conversations(reads, unit, writer, filters, seen, joined)
        if not writer.rows_added:
            raise NothingMatched(_nothing(role, provenance))
        return writer.close(provenance)


def _plan(query: Query, view: str) -> list[Topic]:
    """Return the topics in the order of their passes."""
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


def remove_session(dataset: Path, session_id: str) -> int:
    """Write a dataset anew without the rows of a session, in the place of the old one, and return their number. If
    there are none, nothing is changed. The manifest counts them as removed. Raises NotADataset, DatasetDamaged,
    Unwritable."""
    manifest = verify(dataset)
    columns = [name for name in VIEWS[manifest.view].names if name.endswith("session_id")]
    removed = sum(int(_of_session(batch, columns, session_id).sum()) for batch in _all_batches(dataset, manifest))
    if not removed:
        return 0
    with DatasetWriter(dataset, manifest.view, manifest.format, overwrite=True) as writer:
        for batch in _all_batches(dataset, manifest):
            kept = batch.filter(pa.array(~_of_session(batch, columns, session_id)))
            if len(kept):
                writer.add_batch(kept)
        provenance = manifest.provenance
        provenance.removed["erased"] += removed
        writer.close(provenance)
    return removed


def _all_batches(dataset: Path, manifest: DatasetManifest) -> Iterator[pa.RecordBatch]:
    return (batch for file in manifest.files for batch in _batches(dataset / file.name, manifest))


def _of_session(batch: pa.RecordBatch, columns: Sequence[str], session_id: str) -> NDArray[np.bool_]:
    """Return [rows] True where one of the columns names the session."""
    found = np.zeros(len(batch), bool)
    for name in columns:
        found |= np.array([value == session_id for value in batch[name].to_pylist()], bool)
    return found


def verify(dataset: Path) -> DatasetManifest:
    """Check that files and rows match the manifest, and return the manifest. Holds one row group in memory at a time.

    Raises NotADataset, or DatasetDamaged, which names the first file that differs.
    """
    manifest = read_manifest(dataset)
    rows = tokens = trained = 0
    with tempfile.TemporaryFile() as digests:
        for file in manifest.files:
            _same_bytes(dataset / file.name, file)
            for batch in _batches(dataset / file.name, manifest):
                digests.write(b"".join(row_digests(batch)))
                rows += len(batch)
                tokens += _tokens(batch)
                trained += int(batch["trained_tokens"].to_numpy().sum()) if manifest.view == "rl" else 0
        counts = DatasetCounts(rows=rows, tokens=tokens, trained_tokens=trained)
        if counts != manifest.counts:
            raise DatasetDamaged(f"{dataset}: the files hold {counts}, the manifest says {manifest.counts}")
        found = rows_sha256(digests, rows)
    if found != manifest.rows_sha256:
        raise DatasetDamaged(f"{dataset}: the rows hash to {found}, the manifest says {manifest.rows_sha256}")
    return manifest


def _same_bytes(path: Path, file: DataFile) -> None:
    try:
        with path.open("rb") as content:
            sha256, size = hashlib.file_digest(content, "sha256").hexdigest(), content.tell()
    except FileNotFoundError:
        raise DatasetDamaged(f"{path} is in the manifest but not on disk: build the dataset again") from None
    if sha256 != file.sha256:
        raise DatasetDamaged(f"{path}: its {size} bytes are not the {file.size} that were written; build again")


SESSIONS_OF = {
    "rl": (("session_id", "trained_tokens"),),
    "sft": (("session_id", "tokens"),),
    "preference": (("chosen_session_id", None), ("rejected_session_id", None)),
}
"""Columns of each view that hold the id of a session and its number of tokens. None: the tokens of a pair are not
counted by session."""


def session_rows(dataset: Path, manifest: DatasetManifest) -> Iterator[list[tuple[str, str, int]]]:
    """Yield, for each row of a dataset, (run id, session id, tokens) of each of its sessions. Tokens are the trained
    ones of `rl`, all of `sft`, and 0 of `preference`. Raises DatasetDamaged."""
    sides = SESSIONS_OF[manifest.view]
    names = ["run_id", *(name for side in sides for name in side if name is not None)]
    for file in manifest.files:
        for batch in _batches(dataset / file.name, manifest, names):
            runs = batch["run_id"].to_pylist()
            columns = [
                (batch[name].to_pylist(), [0] * len(batch) if count is None else batch[count].to_pylist())
                for name, count in sides
            ]
            for row, run in enumerate(runs):
                yield [(run, sessions[row], tokens[row]) for sessions, tokens in columns]


def _batches(path: Path, manifest: DatasetManifest, columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file under the schema of the view, or only some of its columns. Raises DatasetDamaged."""
    whole = VIEWS[manifest.view]
    wanted = whole if columns is None else pa.schema([whole.field(name) for name in columns])
    reader: Any
    try:
        if manifest.format == "parquet":
            reader = pq.ParquetFile(path)
            found = (reader.read_row_group(group, columns) for group in range(reader.num_row_groups))
        else:
            reader = pa.ipc.open_file(pa.memory_map(str(path)))
            found = (pa.Table.from_batches([reader.get_batch(at)]) for at in range(reader.num_record_batches))
        for table in found:
            yield from table.select(wanted.names).cast(wanted).combine_chunks().to_batches()
    except (pa.ArrowException, KeyError, FileNotFoundError) as error:
        raise DatasetDamaged(f"{path}: not a file of the view {manifest.view}: {error}") from error


def _tokens(batch: pa.RecordBatch) -> int:
    if "token_ids" in batch.schema.names:
        return len(batch["token_ids"].flatten())
    return int(batch["tokens"].to_numpy().sum())
