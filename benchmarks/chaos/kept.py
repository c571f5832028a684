"""What an archiver and the views of a run have kept, against the log."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
from servers import say

from turnlog.consumers.archiver import flush
from turnlog.infra.archive import ArchiveIndex, ArchiveLog, archive_name, partitions_of
from turnlog.infra.embedded.ports import HOST
from turnlog.infra.history import all_events
from turnlog.infra.log import Log, Partition
from turnlog.infra.roles.role import Role
from turnlog.infra.s3 import S3Blobs
from turnlog.plugins.faust_views import view
from turnlog.processors.runtime.unit import records_between
from turnlog.schemas import topics
from turnlog.schemas.events import Event
from turnlog.settings import Settings

TABLES = {"sessions": topics.SESSIONS, "steps": topics.STEPS, "versions": topics.WEIGHTS}


async def files(settings: Settings) -> int:
    """How many the archive has."""
    blobs = S3Blobs(settings.store)
    try:
        index = ArchiveIndex(blobs, archive_name(settings))
        await index.load()
        return sum(map(len, index.spans.values()))
    finally:
        await blobs.close()


async def unlike_log(tool: Role) -> dict[str, int]:
    """Records that the archive lacks, and those that it has otherwise or once more, when the rest was archived."""
    await flush(tool)
    archive = await ArchiveLog.open(tool.blobs, archive_name(tool.settings))
    lacking = again = total = 0
    for place in partitions_of(archive.index.topics):
        here, there = [await held(log, place) for log in (tool.log, archive)]
        total += here.total()
        lacking, again = lacking + (here - there).total(), again + (there - here).total()
    spans = sum(map(len, archive.index.spans.values()))
    return {"archived": total, "files": spans, "unarchived": lacking, "archived_again": again}


async def held(log: Log, place: Partition) -> Counter[tuple[int, bytes | None, bytes | None]]:
    """Every record of a partition."""
    end = (await log.end_offsets([place]))[place]
    return Counter([(record.offset, record.key, record.value) async for record in records_between(log, place, 0, end)])


async def shown(port: int) -> int:
    """Steps that the views know of; -1 when they do not answer."""
    async with httpx.AsyncClient() as http:
        with contextlib.suppress(httpx.TransportError):
            answer = await http.get(f"http://{HOST}:{port}/views")
            if answer.is_success:
                return int(answer.json()["steps"])
    return -1


async def unlike_topics(tool: Role, *, within_s: float) -> dict[str, int]:
    """Rows of the views' tables, and those that a fold of the topics gives otherwise, once there are none of these or
    after a while. Nobody writes to the topics any more."""
    folded = {name: fold(await all_events(tool, topic)) for name, topic in TABLES.items()}
    deadline = time.monotonic() + within_s
    while True:
        found = {name: table(Path(tool.settings.run.directory), name) for name in TABLES}
        unlike = [(name, key, found[name].get(key), folded[name].get(key)) for name in TABLES
                  for key in folded[name].keys() | found[name].keys()
                  if found[name].get(key) != folded[name].get(key)]  # fmt: skip
        if not unlike or time.monotonic() > deadline:
            for row in unlike[:20]:
                say(f"views have otherwise than a fold of the topics: {row}")
            return {"rows": sum(map(len, found.values())), "unshown": len(unlike)}
        await asyncio.sleep(0.2)  # the worker writes its file when it likes


def fold(events: Iterable[Event]) -> dict[str, dict[str, Any]]:
    """Rows by key: of each the last one, but none behind one of a higher rank."""
    rows: dict[str, dict[str, Any]] = {}
    for key, value in filter(None, map(view, events)):
        if value["rank"] >= rows.get(key, value)["rank"]:
            rows[key] = value
    return rows


def table(directory: Path, name: str) -> dict[str, dict[str, Any]]:
    """As the worker has it now."""
    (file,) = directory.glob(f"views-0/**/{name}.sqlite")
    with contextlib.closing(sqlite3.connect(file)) as kept:
        return {json.loads(key): json.loads(value) for key, value in kept.execute("SELECT key, value FROM rows")}
