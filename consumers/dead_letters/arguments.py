"""The arguments of `turnlog dead-letters`; argparse alone, so that --help stays instant."""

from __future__ import annotations

import argparse

EPILOG = """\
Examples:
  turnlog dead-letters list --cause AttemptsExhausted     tool calls that took their sandbox down too often
  turnlog dead-letters show 4f1c                          one letter: cause, remedy, the record as far as it can be read
  turnlog dead-letters requeue 4f1c                       append its record to its topic again, once
  turnlog dead-letters requeue --cause UndecodableRecord  all of one cause (asks first; --yes does not)
  turnlog dead-letters skip 'agent.turns[0]@1' --reason "gateway bug, mended"
                                                          let a stopped assembler unit pass one record

A letter is named by its id or any beginning of it that only one letter has. A requeued tool call is a call of its own:
the first answer of the old one stands, so it runs under a new call_id, on the workspace that it named.
Exit status: 0 done, 1 nothing matched, 2 cannot.
"""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """Give the verb its actions."""
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    verb.epilog = EPILOG
    actions = verb.add_subparsers(dest="action", required=True, metavar="ACTION")
    listed = actions.add_parser("list", help="letters, oldest first")
    _choosing(listed)
    listed.add_argument("--limit", type=int, default=50, metavar="N", help="the N newest (default 50)")
    listed.add_argument("--json", action="store_true", help="one JSON object per letter and line")
    _source(listed)
    shown = actions.add_parser("show", help="one letter in full")
    shown.add_argument("id", metavar="ID")
    shown.add_argument("--json", action="store_true")
    _source(shown)
    again = actions.add_parser("requeue", help="append the records of letters to their topics again")
    again.add_argument("ids", nargs="*", metavar="ID")
    _choosing(again)
    again.add_argument("--again", action="store_true", help="also those that were requeued before")
    again.add_argument("--yes", action="store_true", help="do not ask")
    passed = actions.add_parser("skip", help="let a stopped assembler unit pass one record")
    passed.add_argument("place", metavar="TOPIC[PARTITION]@OFFSET", help="as the unit names it in `turnlog status`")
    passed.add_argument("--reason", required=True, metavar="TEXT", help="kept on the log")


def _choosing(action: argparse.ArgumentParser) -> None:
    for name, what in (("cause", "error class"), ("topic", "topic of the record"), ("role", "who refused it")):
        action.add_argument(f"--{name}", default="", metavar=name.upper(), help=f"only this {what}")


def _source(action: argparse.ArgumentParser) -> None:
    action.add_argument("--from", dest="source", choices=("topics", "archive"), default="topics", help="default topics")
