"""`turnlog dashboard`: show a run in a browser."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import stat
import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from turnlog.names import ExitStatus
from turnlog.settings import AccessRole, Settings
from turnlog.verbs.verb import Verb, add_source, always

log = logging.getLogger(__name__)
NAME = "dashboard"
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
  turnlog dashboard link --role reader    print one for somebody who may only look (docs/access.md)
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
    _role_argument(verb)


def _role_argument(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--role", type=AccessRole, choices=list(AccessRole), default=AccessRole.OWNER, metavar="ROLE",
        help="role of whoever opens the link: reader, operator or owner (default owner)",
    )  # fmt: skip


def dashboard_role_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments with which a dashboard serves."""
    verb.set_defaults(action="serve", role=AccessRole.OWNER)
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
    from turnlog.infra.roles import event_loop
    from turnlog.infra.roles.terminal import say
    from turnlog.plugins.dashboard.server import link_of_running

    if arguments.action == "link":
        say(link_of_running(settings, arguments.role))
        return ExitStatus.DONE
    own = settings.dashboard
    host, port = arguments.host or own.host, own.port if arguments.port is None else arguments.port
    settings = dataclasses.replace(settings, dashboard=dataclasses.replace(own, host=host, port=port))
    archive = arguments.source == "archive"
    event_loop.run(NAME, _serve(settings, archive=archive, against=arguments.against, role=arguments.role))
    return ExitStatus.DONE


async def _serve(settings: Settings, *, archive: bool, against: Sequence[str], role: AccessRole) -> None:
    """Print how to log in, and serve until stopped. Raises CannotListen, NoIndex, NotADataset."""
    from turnlog.infra.roles.health import Health, serve_health
    from turnlog.infra.roles.probe import health_address, is_loopback
    from turnlog.infra.roles.role import Role, open_role
    from turnlog.infra.roles.starting import stop_on_signals
    from turnlog.infra.roles.terminal import say
    from turnlog.plugins.dashboard.server import link, serving, store_address

    stopping, health = stop_on_signals(), Health(NAME)

    def connect() -> AbstractAsyncContextManager[Role]:
        return open_role(NAME, settings, archive=archive, health=health, stopping=stopping)

    async with (
        serve_health(health, health_address(os.environ)),
        serving(settings, connect, stopping=stopping, against=against) as (url, keys),
    ):
        with store_address(Path(settings.run.directory), url):
            login = f"log in once: {link(keys, url, role)}"
            if _is_kept():
                login = f"log in: `turnlog --run {settings.run.id} dashboard link` prints a single-use link"
            say(f"dashboard of run {settings.run.id}: {url}", login)
            if not is_loopback(settings.dashboard.host):
                log.warning("%s is reachable from outside without encryption: put a TLS proxy in front of it", url)
            health.mark_started()
            await stopping.wait()


def _is_kept() -> bool:
    """Return whether the output goes to a file. Files are kept, and more people read logs than may act: no login link
    is printed there."""
    try:
        return stat.S_ISREG(os.fstat(sys.stdout.fileno()).st_mode)
    except (OSError, ValueError):  # stdout is not a file at all
        return False


VERBS = (
    Verb("dashboard", "show the run in a browser: sessions, tokens, curves", _dashboard, dashboard_arguments,
         looks=always),
    Verb("dashboard", "show the run in a browser, as `turnlog dashboard` does", _dashboard, dashboard_role_arguments,
         looks=always, under="role"),
)  # fmt: skip
