"""The options of `turnlog fold`; argparse alone, since `turnlog --help` imports it."""

from __future__ import annotations

import argparse

ARCHIVE = "archive"


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """The options of `turnlog fold`."""
    verb.add_argument(
        "--policy", default="", metavar="A", help="prefix, slime, last-turn or your own (default: the run's)"
    )
    verb.add_argument("--against", default="", metavar="B", help="compare with this policy")
    verb.add_argument("--fork-threshold", type=int, metavar="N", help="of slime, in place of the run's")
    verb.add_argument(
        "--session", default="", metavar="ID", help="this session alone; the beginning of its id is enough"
    )
    verb.add_argument("--group", default="", metavar="ID", help="this group alone")
    verb.add_argument("--show", default="", metavar="SESSION", help="draw the segments of one session")
    verb.add_argument("--top", type=int, default=20, metavar="N", help="sessions to list, those that differ most first")
    verb.add_argument("--from", dest="source", choices=("topics", ARCHIVE), default="topics")
    verb.add_argument("--json", action="store_true")
