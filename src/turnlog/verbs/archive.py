"""`turnlog archive`: copy topics into the object store, and delete what is archived."""

from __future__ import annotations

import argparse

from turnlog.settings import Settings
from turnlog.verbs.verb import Verb

ARCHIVE_EPILOG = """\
Examples:
  turnlog archive                   run the role: archive closed ranges of every topic until it is stopped
  turnlog archive flush             archive everything that is on the log now; stop the role first
  turnlog archive status            show per topic what is archived and what is not yet
  turnlog archive prune --before 2026-01-31T08:00     show what may be deleted from topics; --yes deletes it
"""


def archive_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `turnlog archive`."""
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    verb.epilog = ARCHIVE_EPILOG
    verb.add_argument(
        "action", nargs="?", choices=("run", "flush", "status", "prune"), default="run",
        help="run the role (default), archive everything and exit, show, or delete archived records from topics",
    )  # fmt: skip
    verb.add_argument(
        "--before", metavar="TIME", default=None,
        help="prune: only files whose records are all older; ISO 8601 (UTC unless it names a zone) or milliseconds",
    )  # fmt: skip
    verb.add_argument("--yes", action="store_true", help="prune: delete instead of only showing")


def _archive(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.consumers.archive import command

    return command(settings, arguments)


VERBS = (Verb("archive", "role: copy topics into the object store; flush, prune", _archive, archive_arguments),)
