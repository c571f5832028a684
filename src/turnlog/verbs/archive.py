"""`turnlog log archive`: copy topics into the object store, and delete archived records from topics."""

from __future__ import annotations

import argparse

from turnlog.infra.roles.ending import run_verb
from turnlog.settings import Settings
from turnlog.verbs.verb import Verb, milliseconds


class BadMoment(Exception):
    """The value of `--before` is not a time. Remedy: 2026-01-31T08:00, or milliseconds since 1970."""


ARCHIVE_EPILOG = """\
`turnlog role archive` archives every topic continuously, until it is stopped.

Examples:
  turnlog log archive flush         archive everything that is on the log now; stop the role first
  turnlog log archive status        show per topic what is archived and what is not yet
  turnlog log archive prune --before 2026-01-31T08:00 show what may be deleted from topics; --yes deletes it
"""


def _archive_arguments(verb: argparse.ArgumentParser) -> None:
    verb.epilog = ARCHIVE_EPILOG
    verb.add_argument(
        "action", choices=("flush", "status", "prune"),
        help="archive everything and exit, show what is archived, or delete archived records from topics",
    )  # fmt: skip
    verb.add_argument(
        "--before", metavar="TIME", default=None,
        help="prune: only files whose records are all older; ISO 8601 (UTC unless it names a zone) or milliseconds",
    )  # fmt: skip
    verb.add_argument("--yes", action="store_true", help="prune: delete instead of only showing")


def _archive(settings: Settings, arguments: argparse.Namespace) -> int:
    match arguments.action:
        case "flush":
            return run_verb(flush_all(settings))
        case "status":
            return run_verb(status(settings))
        case _:
            return run_verb(prune(settings, arguments.before, delete=arguments.yes))


async def flush_all(settings: Settings) -> int:
    """Archive everything on the log, and print how many files were written."""
    from turnlog.consumers.archiver import flush
    from turnlog.infra.archive import archive_name
    from turnlog.infra.roles.role import open_role
    from turnlog.infra.roles.terminal import say

    async with open_role("archive", settings) as role:
        files = await flush(role)
    say(f"{files} files written: everything on the log is in archive/{archive_name(settings)}")
    return 0


async def status(settings: Settings) -> int:
    """Print what is archived per topic, and how many offsets are not archived yet."""
    from rich.table import Table

    from turnlog.infra.archive import ArchiveIndex, archive_name
    from turnlog.infra.log import Partition
    from turnlog.infra.roles.role import open_role
    from turnlog.infra.roles.terminal import Terminal

    async with open_role("archive", settings) as role:
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
    """Print what may be deleted from topics, and delete it if `delete`. Raises BadMoment."""
    from turnlog.consumers.pruning import prunable
    from turnlog.infra.archive import ArchiveIndex, archive_name
    from turnlog.infra.roles.role import open_role
    from turnlog.infra.roles.terminal import say

    if before is None:
        raise BadMoment("prune needs --before TIME: only older records are deleted")
    try:
        limit = milliseconds(before)
    except argparse.ArgumentTypeError as error:
        raise BadMoment(f"--before: {error}; write 2026-01-31T08:00 or milliseconds") from error
    async with open_role("archive", settings) as role:
        index = ArchiveIndex(role.blobs, archive_name(settings))
        await index.load()
        found = await prunable(role, index, limit)
        starts = await role.log.start_offsets(list(found))
        for place, keep in sorted(found.items()):
            say(f"{place.topic}[{place.number}]: offsets {starts[place]} to {keep - 1}")
        if delete and found:
            await role.log.delete_before(found)
    say("deleted; `turnlog replay --from archive` still reads them" if delete else "nothing was deleted; --yes deletes")
    return 0


VERBS = (
    Verb(
        "archive",
        "archive the present log, show what is archived, or prune topics",
        _archive,
        _archive_arguments,
        under="log",
    ),
)
