"""`turnlog archive run|flush|status|prune`."""

from __future__ import annotations

import argparse
import asyncio
from datetime import UTC, datetime

from rich.table import Table

from turnlog.consumers.archive.archiver import flush, main
from turnlog.consumers.archive.prune import prunable
from turnlog.infra.archive.index import ArchiveError, ArchiveIndex, archive_name
from turnlog.infra.log import Partition
from turnlog.infra.roles.role import opened
from turnlog.infra.roles.runs import serve
from turnlog.infra.roles.terminal import Terminal, say
from turnlog.settings import Settings


class BadMoment(ArchiveError):
    """`--before` is no time. Remedy: 2026-01-31T08:00, or milliseconds since 1970."""


def command(settings: Settings, arguments: argparse.Namespace) -> int:
    """Run one action; the exit status."""
    match arguments.action:
        case "run":
            return serve("archive", main, settings)
        case "flush":
            return asyncio.run(flush_all(settings))
        case "status":
            return asyncio.run(status(settings))
        case _:
            return asyncio.run(prune(settings, arguments.before, delete=arguments.yes))


async def flush_all(settings: Settings) -> int:
    """Archive what is there; say how many files that made."""
    async with opened("archive", settings) as role:
        files = await flush(role)
    say(f"{files} files written: everything on the log is in archive/{archive_name(settings)}")
    return 0


async def status(settings: Settings) -> int:
    """Print what is archived per topic, and how many offsets are not."""
    async with opened("archive", settings) as role:
        index = ArchiveIndex(role.blobs, archive_name(settings))
        await index.load()
        table = Table("topic", "files", "offsets archived", "behind", title=index.root)
        for topic, count in index.topics.items():
            places = [Partition(topic, number) for number in range(count)]
            ends = await role.log.end_offsets(places)
            spans = [index.spans.get(place, []) for place in places]
            covered = sum(each[-1].end - each[0].start for each in spans if each)
            behind = sum(ends[place] - (index.end(place) or 0) for place in places)
            table.add_row(topic, f"{sum(map(len, spans)):,}", f"{covered:,}", f"{behind:,}")
    Terminal().print(table)
    return 0


async def prune(settings: Settings, before: str | None, *, delete: bool) -> int:
    """Print what may be deleted from topics and, where asked for, delete it. Raises BadMoment."""
    if before is None:
        raise BadMoment("prune needs --before TIME: only older records are deleted")
    limit = _milliseconds(before)
    async with opened("archive", settings) as role:
        index = ArchiveIndex(role.blobs, archive_name(settings))
        await index.load()
        found = await prunable(role, index, limit)
        starts = await role.log.start_offsets(list(found))
        for place, keep in sorted(found.items()):
            say(f"{place.topic}[{place.number}]: offsets {starts[place]} to {keep - 1}")
        if delete and found:
            await role.log.delete_before(found)
    say("deleted; `turnlog replay --from archive` still reads them" if delete else "nothing was deleted; --yes does it")
    return 0


def _milliseconds(text: str) -> int:
    if text.isdigit():
        return int(text)
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        raise BadMoment(f"--before {text}: {error}; write 2026-01-31T08:00 or milliseconds") from error
    return int((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1000)
