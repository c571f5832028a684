"""`turnlog dataset build OUT`, and `verify OUT`: the files, their rows and counts held against the manifest."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import hashlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from turnlog.consumers.datasets.build import build
from turnlog.consumers.datasets.columns import VIEWS, row_digests, rows_sha256
from turnlog.consumers.datasets.errors import DatasetDamaged
from turnlog.consumers.datasets.manifest import Counts, DataFile, Manifest, read_manifest
from turnlog.consumers.datasets.query import Query
from turnlog.infra.roles.role import opened
from turnlog.infra.roles.terminal import Terminal, say
from turnlog.settings import Settings

CHUNK = 1 << 20


def verify(dataset: Path) -> Manifest:
    """The manifest, when files and rows are what it says; one row group in memory at a time.

    Raises NotADataset, DatasetDamaged naming the first file that differs."""
    manifest = read_manifest(dataset)
    rows = tokens = trained = 0
    with tempfile.TemporaryFile() as digests:
        for file in manifest.files:
            _same_bytes(dataset / file.name, file)
            for batch in _batches(dataset / file.name, manifest):
                digests.write(b"".join(row_digests(batch)))
                rows += len(batch)
                tokens += _tokens(batch)
                trained += _trained(batch)
        counts = Counts(rows=rows, tokens=tokens, trained_tokens=trained)
        if counts != manifest.counts:
            raise DatasetDamaged(f"{dataset}: the files hold {counts}, the manifest says {manifest.counts}")
        found = rows_sha256(digests, rows)
    if found != manifest.rows_sha256:
        raise DatasetDamaged(f"{dataset}: the rows hash to {found}, the manifest says {manifest.rows_sha256}")
    return manifest


def _same_bytes(path: Path, file: DataFile) -> None:
    running, size = hashlib.sha256(), 0
    try:
        with path.open("rb") as content:
            while chunk := content.read(CHUNK):
                running.update(chunk)
                size += len(chunk)
    except FileNotFoundError:
        raise DatasetDamaged(f"{path} is in the manifest and not on disk: build the dataset again") from None
    if running.hexdigest() != file.sha256:
        raise DatasetDamaged(f"{path}: its {size} bytes are not the {file.size} that were written; build again")


def _batches(path: Path, manifest: Manifest) -> Iterator[pa.RecordBatch]:
    """Its rows under the schema of the view. Raises DatasetDamaged."""
    wanted = VIEWS[manifest.view]
    reader: Any
    try:
        if manifest.format == "parquet":
            reader = pq.ParquetFile(path)
            found = (reader.read_row_group(group) for group in range(reader.num_row_groups))
        else:
            reader = pa.ipc.open_file(pa.memory_map(str(path)))
            found = (pa.Table.from_batches([reader.get_batch(at)]) for at in range(reader.num_record_batches))
        for table in found:
            yield from table.select(wanted.names).cast(wanted).combine_chunks().to_batches()
    except (pa.ArrowException, KeyError) as error:
        raise DatasetDamaged(f"{path}: not a file of the view {manifest.view}: {error}") from error


def _tokens(batch: pa.RecordBatch) -> int:
    if "token_ids" in batch.schema.names:
        return len(batch["token_ids"].flatten())
    return int(batch["tokens"].to_numpy().sum())


def _trained(batch: pa.RecordBatch) -> int:
    return int(batch["trained_tokens"].to_numpy().sum()) if "trained_tokens" in batch.schema.names else 0


def run(settings: Settings, arguments: argparse.Namespace) -> int:
    """Build or verify; 0 when the dataset stands as it should. Raises DatasetError."""
    if arguments.action == "verify":
        manifest = verify(arguments.out)
        say(f"{arguments.out}: whole, {_said(manifest)}")
        return 0
    manifest = asyncio.run(_built(settings, arguments))
    came = manifest.provenance
    say(f"{arguments.out}: {_said(manifest)}")
    for name, count in came.removed.most_common():
        say(f"  removed by {name}: {count:,}")
    for topic, count in came.reading.undecodable.most_common():
        say(f"  {topic}: {count:,} records are no event and were passed over")
    return 0


def query_of(arguments: argparse.Namespace) -> Query:
    """The query that the arguments ask for; `any` purpose is no filter."""
    given: dict[str, Any] = {
        field.name: tuple(value) if isinstance(value, list) else value
        for field in dataclasses.fields(Query)
        if (value := getattr(arguments, field.name)) is not None
    }
    if "any" in given.get("purposes", ()):
        given["purposes"] = ()
    return Query(**given)


async def _built(settings: Settings, arguments: argparse.Namespace) -> Manifest:
    console = Terminal(stderr=True)
    out: Path = arguments.out
    query = query_of(arguments)
    query.check(arguments.view)
    columns = (TextColumn("reading"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading", total=None)
        async with opened("dataset", settings, archive=arguments.source == "archive") as role:
            return await build(
                role,
                query,
                out,
                view=arguments.view,
                format=arguments.format,
                overwrite=arguments.overwrite,
                source=arguments.source,
                progress=lambda passed, total: bar.update(task, completed=passed, total=total),
            )


def _said(manifest: Manifest) -> str:
    counts = manifest.counts
    trained = f", {counts.trained_tokens:,} trained" if manifest.view == "rl" else ""
    return (
        f"{counts.rows:,} rows of {manifest.view}, {counts.tokens:,} tokens{trained}, rows {manifest.rows_sha256[:16]}"
    )
