"""`turnlog log books` and `turnlog log report`: the token accounting and the summary of a run."""

from __future__ import annotations

import argparse

from turnlog.infra.roles import ending
from turnlog.settings import Settings
from turnlog.verbs.verb import Verb, add_source, always


def books_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `turnlog log books`."""
    verb.add_argument("--by", choices=("session", "group", "batch", "run"), default="run", help="level (default run)")
    verb.add_argument("--id", default="", metavar="ID", help="show only this account of that level")
    verb.add_argument("--limit", type=int, default=20, metavar="N", help="show the N largest (default 20)")
    verb.add_argument("--json", action="store_true")
    add_source(verb)


def _books(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.verbs.accounts import AccountingArguments, show

    archive = arguments.source == "archive"
    asked = AccountingArguments(
        arguments.by, arguments.id, as_json=arguments.json, limit=arguments.limit, archive=archive
    )
    return ending.run_verb(show(settings, asked))


def report_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `turnlog log report`."""
    verb.add_argument("--json", action="store_true", help="print the content of report.json")


def _report(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.verbs.report import write

    return ending.run_verb(write(settings, as_json=arguments.json))


VERBS = (
    Verb("books", "show the token accounting: sampled = trained + masked, by reason", _books, books_arguments,
         reads=always, under="log"),
    Verb("report", "write runs/ID/report.json and print the summary", _report, report_arguments,
         reads=always, under="log"),
)  # fmt: skip
