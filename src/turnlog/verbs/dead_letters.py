"""`turnlog log dead-letters`: list, show, requeue and skip records that a role refused."""

from __future__ import annotations

import argparse

from turnlog.infra.roles import ending
from turnlog.settings import Settings
from turnlog.verbs.verb import Verb, acts, add_source

DEAD_LETTERS_EPILOG = """\
Examples:
  turnlog log dead-letters list --cause AttemptsExhausted     tool calls that crashed their sandbox too often
  turnlog log dead-letters show 4f1c                          one letter: its cause, its remedy, and its record
  turnlog log dead-letters requeue 4f1c                       append its record to its topic again, once
  turnlog log dead-letters requeue --cause UndecodableRecord  all with one cause (asks first, except with --yes)
  turnlog log dead-letters skip 'agent.turns[0]@1' --reason "gateway bug, fixed"
                                                          let a stopped assembler unit skip one record

A letter is named by its id or a unique prefix of it. A requeued tool call is a new call: the first answer of the old
one stands, so the new one runs under a new call_id, on the same workspace.
Exit status: 0 success, also if `list` finds none; 1 nothing to requeue; 2 error.
"""


def dead_letters_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the actions of `turnlog log dead-letters`."""
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    verb.epilog = DEAD_LETTERS_EPILOG
    actions = verb.add_subparsers(dest="action", required=True, metavar="ACTION")
    listed = actions.add_parser("list", help="list letters, oldest first")
    _choosing(listed)
    listed.add_argument("--limit", type=int, default=50, metavar="N", help="show the N newest (default 50)")
    listed.add_argument("--json", action="store_true", help="print one JSON object per letter and line")
    add_source(listed)
    shown = actions.add_parser("show", help="show one letter in full")
    shown.add_argument("id", metavar="ID")
    shown.add_argument("--json", action="store_true")
    add_source(shown)
    again = actions.add_parser("requeue", help="append the records of letters to their topics again")
    again.add_argument("ids", nargs="*", metavar="ID")
    _choosing(again)
    again.add_argument("--again", action="store_true", help="include letters that were requeued before")
    again.add_argument("--yes", action="store_true", help="do not ask")
    passed = actions.add_parser("skip", help="let a stopped assembler unit skip one record")
    passed.add_argument("place", metavar="TOPIC[PARTITION]@OFFSET", help="the record, as shown in `turnlog status`")
    passed.add_argument("--reason", required=True, metavar="TEXT", help="recorded on the log")


def _choosing(action: argparse.ArgumentParser) -> None:
    for name, what in (("cause", "error class"), ("topic", "topic of the record"), ("role", "role that refused it")):
        action.add_argument(f"--{name}", default="", metavar=name.upper(), help=f"only this {what}")


def _dead_letters(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.consumers.dead_letters import command

    return ending.run_verb(command(settings, arguments))


VERBS = (
    Verb("dead-letters", "list, show, requeue, skip refused records", _dead_letters, dead_letters_arguments,
         reads=acts("list", "show"), under="log"),
)  # fmt: skip
