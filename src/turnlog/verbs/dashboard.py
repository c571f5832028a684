"""`turnlog dashboard`: show a run in a browser."""

from __future__ import annotations

import argparse
import dataclasses

from turnlog.names import ExitStatus
from turnlog.settings import Settings
from turnlog.verbs.verb import Verb, add_source, always

DASHBOARD_EPILOG = """\
The dashboard reads the file that `turnlog role index` writes, and the log or the archive only for tokens and single
records.
It listens on the loopback interface; [dashboard] host opens it to others, who must then log in. docs/dashboard.md shows
its pages.

Examples:
  turnlog dashboard                       serve until Ctrl-C; the first lines show the URL and how to log in
  turnlog dashboard --port 8080           on a port of your choice
  turnlog dashboard --from archive        if the topics are gone
  turnlog dashboard link                  print another login link for the running dashboard
  turnlog dashboard --against datasets/rloo
                                          compare with a refold: settings and samples that differ
"""


def dashboard_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `turnlog dashboard`."""
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    verb.epilog = DASHBOARD_EPILOG
    verb.add_argument(
        "action", nargs="?", choices=("serve", "link"), default="serve", help="serve (default), or print a login link"
    )
    dashboard_role_arguments(verb)


def dashboard_role_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments with which a dashboard serves."""
    verb.set_defaults(action="serve")
    verb.add_argument("--host", default="", metavar="ADDRESS", help="listen on ADDRESS (default: [dashboard] host)")
    verb.add_argument(
        "--port", type=int, default=None, metavar="N", help="listen on port N; 0 picks one (default: [dashboard] port)"
    )
    verb.add_argument(
        "--against", action="append", default=[], metavar="RUN|FOLDER",
        help="compare with another run's index, or with a refold (`turnlog replay --out`); may be repeated",
    )  # fmt: skip
    add_source(verb)


def _dashboard(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.consumers.dashboard.server import NAME, link_of_running, serve_dashboard
    from turnlog.infra.roles import event_loop
    from turnlog.infra.roles.terminal import say

    if arguments.action == "link":
        say(link_of_running(settings))
        return ExitStatus.DONE
    own = settings.dashboard
    host, port = arguments.host or own.host, own.port if arguments.port is None else arguments.port
    settings = dataclasses.replace(settings, dashboard=dataclasses.replace(own, host=host, port=port))
    archive = arguments.source == "archive"
    event_loop.run(NAME, serve_dashboard(settings, archive=archive, against=arguments.against))
    return ExitStatus.DONE


VERBS = (
    Verb("dashboard", "show the run in a browser: sessions, tokens, curves", _dashboard, dashboard_arguments,
         looks=always),
    Verb("dashboard", "show the run in a browser, as `turnlog dashboard` does", _dashboard, dashboard_role_arguments,
         looks=always, under="role"),
)  # fmt: skip
