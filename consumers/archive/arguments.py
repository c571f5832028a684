"""The arguments of `turnlog archive`; argparse alone, so that --help stays instant."""

from __future__ import annotations

import argparse

EPILOG = """\
Examples:
  turnlog archive                   the role: closed ranges of every topic, until it is stopped
  turnlog archive flush             everything that is on the log now; stop the role first
  turnlog archive status            what is archived, per topic, and what is not yet
  turnlog archive prune --before 2026-01-31T08:00     show what may be deleted from topics; --yes deletes it
"""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """Give the verb its actions."""
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    verb.epilog = EPILOG
    verb.add_argument(
        "action", nargs="?", choices=("run", "flush", "status", "prune"), default="run",
        help="run the role (default), archive all there is and end, show, or delete archived records from topics",
    )  # fmt: skip
    verb.add_argument(
        "--before", metavar="TIME", default=None,
        help="prune: only files whose records are all older; ISO 8601 (UTC unless it says otherwise) or milliseconds",
    )  # fmt: skip
    verb.add_argument("--yes", action="store_true", help="prune: delete, do not only show")
