"""`turnlog dataset build OUT` and `turnlog dataset verify OUT`, on a terminal."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from turnlog.consumers.datasets.build import build
from turnlog.consumers.datasets.manifest import Manifest
from turnlog.consumers.datasets.query import Query
from turnlog.consumers.datasets.verify import verify
from turnlog.infra.role import opened
from turnlog.infra.terminal import Terminal, say
from turnlog.settings import Settings


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
