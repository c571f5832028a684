"""`turnlog role archive` and `turnlog log archive`: copy topics into the object store, and delete what is archived."""

from __future__ import annotations

import argparse

from turnlog.settings import Settings
from turnlog.verbs.verb import Verb

ARCHIVE_EPILOG = """\
`turnlog role archive` archives closed ranges of every topic until it is stopped.

Examples:
  turnlog log archive flush         archive everything that is on the log now; stop the role first
  turnlog log archive status        show per topic what is archived and what is not yet
  turnlog log archive prune --before 2026-01-31T08:00 show what may be deleted from topics; --yes deletes it
"""


def archive_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `turnlog log archive`."""
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
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
    from turnlog.consumers.archive import command

    return command(settings, arguments)


def _role(settings: Settings, _: argparse.Namespace) -> int:
    from turnlog.consumers.archiver import main
    from turnlog.infra.roles.runs import serve

    return serve("archive", main, settings)


VERBS = (
    Verb("archive", "archive what is on the log now; show or prune it", _archive, archive_arguments, under="log"),
    Verb("archive", "copy topics into the object store", _role, under="role"),
)
