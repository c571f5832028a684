"""`turnlog engines`: list the engines of a run, add and remove some."""

from __future__ import annotations

import argparse

from turnlog.settings import Settings
from turnlog.verbs.verb import Verb, acts

ENGINES_EPILOG = """\
Each request is recorded on the log. A new engine serves once it has the newest weights; a leaving engine takes no new
requests, and those that it still runs end within [engine] drain_s or are submitted again elsewhere (docs/engines.md).

Examples:
  turnlog engines list                            list engines, their weights, and who requested them
  turnlog engines scale 4                         let `turnlog up` host 4 engines; wait until they serve
  turnlog engines register http://sglang-7:30000  add one that you have started yourself with the model in [model] path
  turnlog engines drain http://sglang-7:30000     remove it; its name works as well
Exit status: 0 success, 2 error.
"""


def engines_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the actions of `turnlog engines`."""
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    verb.epilog = ENGINES_EPILOG
    actions = verb.add_subparsers(dest="action", required=True, metavar="ACTION")
    listed = actions.add_parser("list", help="list the engines of the run, as recorded on its log")
    listed.add_argument("--json", action="store_true")
    scaled = actions.add_parser("scale", help="host N engines")
    scaled.add_argument("count", type=int, choices=range(1, 1025), metavar="N", help="1 to 1024")
    joined = actions.add_parser("register", help="add an engine that you have started yourself")
    joined.add_argument("url", metavar="URL", help="http://host:port at which gateways and its loader reach it")
    joined.add_argument("--name", default="", metavar="ID", help="its name on the log (default: HOST:PORT)")
    gone = actions.add_parser("drain", help="remove an engine")
    gone.add_argument("engine", metavar="URL|ID", help="its address or name, as shown by `list`")
    for action in (scaled, joined, gone):
        action.add_argument("--reason", default="", metavar="TEXT", help="recorded on the log")
        action.add_argument("--no-wait", action="store_true", help="return as soon as the request is on the log")


def _engines(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.verbs.fleet import command

    return command(settings, arguments)


VERBS = (
    Verb("engines", "list the engines; add or remove some during a run", _engines, engines_arguments,
         looks=acts("list")),
)  # fmt: skip
