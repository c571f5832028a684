"""The command line, `turnlog VERB`. turnlog.verbs has the arguments and the code of each verb."""

from __future__ import annotations

import argparse
import logging
import os
import select
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from turnlog import __version__
from turnlog.command_help import SHELLS, CommandLineParser, complete_parser, naming
from turnlog.infra.roles import ending, http_clients, leaves, log_lines
from turnlog.infra.run_folder import NAMING, check_there, newest_run, no_space_of, run_settings
from turnlog.names import TRAINING_ROLES, ExitStatus
from turnlog.settings import RunSettings, Settings, SettingsError
from turnlog.verbs import (
    archive,
    audit,
    books,
    catalogue,
    cheating,
    dashboard,
    dataset,
    dead_letters,
    engines,
    env,
    erase,
    gc,
    index,
    lineage,
    models,
    outlets,
    replay,
    roles,
    run,
    sandbox,
    session,
    start,
    status,
    trainer_plan,
)
from turnlog.verbs.old_spellings import modern_words
from turnlog.verbs.verb import Verb

NAMING_VARIABLES = {*NAMING.values(), "TURNLOG_KAFKA_BOOTSTRAP"}
"""Variables that name a run or its cluster; if one is set, the newest run is not chosen."""

ROLES = f"""\
Training needs the roles {", ".join(TRAINING_ROLES[:7])}
and feeder; the roles egress, engine and registry are servers that your own ones can replace. The others only display,
copy or export what is recorded. `turnlog up` starts what a run needs on this machine, and `turnlog run` the feeder.
Start a role by itself on another machine or in a container. docs/architecture.md follows one turn through the roles.
"""

PARENTS = (
    ("log", "VERB", "Read the log of a run: tail, query, why, books, session and more", ""),
    ("role", "ROLE", "Run one role of a run: gateway, assembler, trainer and more", ROLES),
)
"""Verbs that only group others: (name, metavar of the words below it, description, epilog)."""

EPILOG = """\
First steps:
  turnlog demo                      run the whole loop on this machine: agents act, tools run, the reward rises
  turnlog replay --verify           fold the recorded events again and compare with what was trained
  turnlog up && turnlog run         start servers and roles and train by [feeder] recipe; `turnlog down` stops them

Verbs that inspect a run use the newest one in runs/ if none is named. --run and --settings may also follow the verb.
Settings come from one TOML file; an environment variable TURNLOG_SECTION_KEY overrides it (docs/settings.md).
docs/glossary.md explains the words.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit status. A typed error ends as one line on stderr and status 2, or 75 if a server
    did not answer."""
    ending.obey()
    words, hint = modern_words(sys.argv[1:] if argv is None else argv, VERBS)
    arguments = parser().parse_args(words)
    try:
        log_lines.begin(os.environ, sys.stderr)
        if hint:
            _say(logging.WARNING, hint)
        http_clients.spare_loopback(os.environ)
        settings = _settings(arguments)
        log_lines.speaks(arguments.verb, run=settings.run.id)
        with _servers(settings, arguments):
            exit_status: int = arguments.entry.call(settings, arguments)
            sys.stdout.flush()
            return exit_status
    except KeyboardInterrupt:
        return ExitStatus.TERMINATED if ending.was_terminated() else ExitStatus.INTERRUPTED
    except BrokenPipeError as error:
        if not _reader_is_gone():
            return report_failure(arguments.verb, error)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return ExitStatus.READER_GONE
    except Exception as error:
        return report_failure(arguments.verb, error)


def _settings(arguments: argparse.Namespace) -> Settings:
    """Return the settings of the named run. If none is named, a verb that inspects a run takes the newest of runs/ and
    prints a note."""
    run_id = arguments.run_id or ""
    looks = arguments.entry.inspects(arguments)
    named = run_id or arguments.settings or NAMING_VARIABLES & os.environ.keys()
    if looks and not named and (run_id := newest_run()) not in ("", RunSettings().id):
        from turnlog.infra.roles.terminal import aside

        aside(f"run {run_id}, the newest in runs/ (choose another with --run)")
    settings = run_settings(arguments.settings, os.environ, run_id=run_id)
    if looks and arguments.verb != "status":  # which has a status of its own for that
        check_there(settings)
    return settings


def _servers(settings: Settings, arguments: argparse.Namespace) -> AbstractContextManager[None]:
    """Return a context with the servers that a verb needs to read the log of a run that is down."""
    if not arguments.entry.reads(arguments):
        return nullcontext()
    if getattr(arguments, "source", "") == "archive" and settings.store.endpoint:
        return nullcontext()
    from turnlog.infra.embedded.up import readable
    from turnlog.infra.roles.terminal import aside

    return readable(settings, aside)


def _reader_is_gone() -> bool:
    """Return True if nobody reads standard output any more. A BrokenPipeError alone does not prove it, since it may
    come from another connection."""
    pipe = select.poll()
    pipe.register(sys.stdout, 0)
    return any(events & select.POLLERR for _, events in pipe.poll(0))


def report_failure(verb: str, error: Exception) -> int:
    """Return the exit status for a verb that ended with an error, after printing the first error of the tasks that ran
    together. Raises the error itself if one of them is not a turnlog error, or if TURNLOG_TRACEBACK is set."""
    errors = [no_space_of(each) or each for each in leaves(error)]
    if not all(map(_is_ours, errors)) or os.environ.get("TURNLOG_TRACEBACK"):
        raise error
    _say(logging.ERROR, f"turnlog {verb}: {type(errors[0]).__name__}: {errors[0]}")
    return _status_of(error)


def _say(level: int, text: str) -> None:
    """Print to stderr, or log where the log is JSON."""
    if os.environ.get("TURNLOG_LOG_FORMAT") == "json":
        logging.getLogger("turnlog").log(level, "%s", text)
        return
    from turnlog.infra.roles.terminal import aside

    aside(*text.split("\n"))


def _is_ours(error: BaseException) -> bool:
    """Return True for turnlog's own errors: their message states what, where and the remedy, so a traceback would only
    hide it."""
    return type(error).__module__.startswith("turnlog.")


def _status_of(error: Exception) -> int:
    """Return 75 if a server did not answer, since a supervisor restarts such a role for as long as it takes, else 2."""
    from turnlog.infra.roles import is_unreachable

    return ExitStatus.UNREACHABLE if is_unreachable(error) else ExitStatus.FAILED


def parser() -> argparse.ArgumentParser:
    """Build the parser of every verb with its help."""
    top: argparse.ArgumentParser = CommandLineParser(
        prog="turnlog",
        description="Event-sourced data plane and training loop for agentic RL.",
        epilog=EPILOG,
    )
    top.add_argument("--version", action="version", version=__version__)
    naming(top)
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    homes = {"": verbs}
    for name, metavar, what, epilog in PARENTS:
        parent = verbs.add_parser(name, description=f"{what}.", epilog=epilog)
        homes[name] = parent.add_subparsers(dest="verb", required=True, metavar=metavar)
    for verb in VERBS:
        what = f"{verb.help[0].upper()}{verb.help[1:]}."
        listed: dict[str, Any] = {"help": verb.help} if verb.under else {}  # complete_parser lists the others
        below = homes[verb.under].add_parser(verb.name, description=what, **listed)
        verb.add_arguments(below)
        below.set_defaults(entry=verb)
    complete_parser(top)
    return top


def _completion_arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("shell", choices=SHELLS, help="the shell; for example: source <(turnlog completion bash)")


def _completion(_: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.command_help import command

    return command(parser(), arguments.shell)


FAMILIES = (
    start, run, status, dashboard, books, audit, session, index, lineage, models, dataset, replay, archive, engines,
    dead_letters, env, catalogue, cheating, gc, erase, roles, sandbox, outlets, trainer_plan,
)  # fmt: skip
VERBS: tuple[Verb, ...] = (
    *(verb for family in FAMILIES for verb in family.VERBS),
    Verb(
        "completion", "print a script that completes this command line in a shell", _completion, _completion_arguments
    ),
)

__all__ = ["SettingsError", "main"]

if __name__ == "__main__":
    raise SystemExit(main())
