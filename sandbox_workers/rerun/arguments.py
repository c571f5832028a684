"""The arguments of `turnlog session`; argparse alone, so that --help stays instant."""

from __future__ import annotations

import argparse

EPILOG = """\
Examples:
  turnlog session show 4f1c               the calls of a session: status, duration, workspace, requests
  turnlog session rerun 4f1c              execute them again in a fresh sandbox of this machine and compare
  turnlog session rerun 4f1c --call 3     only the call with call_seq 3, on the workspace it had
  turnlog session rerun 4f1c --ignore '0x[0-9a-f]+' --ignore '\\d+\\.\\d+s'

A session is named by its id or any beginning of it that only one session has. Nothing is written, neither to the log
nor to the object store, and nothing goes out to the network: its recorded answers are given again.
Exit status of rerun: 0 every call came out as recorded, 1 one did not, 2 cannot.
"""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """Give the verb its actions."""
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    verb.epilog = EPILOG
    actions = verb.add_subparsers(dest="action", required=True, metavar="ACTION")
    again = actions.add_parser("rerun", help="execute the recorded calls again and compare")
    _named(again)
    again.add_argument("--call", dest="call_seq", type=int, metavar="N", help="only the call with this call_seq")
    again.add_argument(
        "--ignore", action="append", default=[], metavar="REGEX", help="parts of outputs that may differ; repeatable"
    )
    again.add_argument(
        "--keep-going",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="go on after a call that differs (default: yes)",
    )
    again.add_argument("--strict", action="store_true", help="other surroundings (environment_sha256) count as well")
    shown = actions.add_parser("show", help="list the recorded calls")
    _named(shown)


def _named(action: argparse.ArgumentParser) -> None:
    action.add_argument("id", metavar="ID", help="the session")
    action.add_argument("--json", action="store_true")
    action.add_argument("--from", dest="source", choices=("topics", "archive"), default="topics", help="default topics")
