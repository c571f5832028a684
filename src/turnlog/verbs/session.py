"""`turnlog log session`: show one session, run its calls again, or write sessions to files."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from turnlog.infra.roles import ending
from turnlog.names import ExitStatus
from turnlog.settings import Settings
from turnlog.verbs.verb import Verb, acts, add_json, add_source

if TYPE_CHECKING:
    from turnlog.consumers.index.reader import Index

SESSION_EPILOG = """\
Examples:
  turnlog log session show 4f1c               the calls of a session: status, duration, workspace, requests
  turnlog log session rerun 4f1c              execute them again in a fresh sandbox of this machine and compare
  turnlog log session rerun 4f1c --call 3     only the call with call_seq 3, on the workspace it had
  turnlog log session rerun 4f1c --ignore '0x[0-9a-f]+' --ignore '\\d+\\.\\d+s'
  turnlog log session export 4f1c --html session.html     a page in one file, with its tokens (docs/dashboard.md)
  turnlog log session export 4f1c --atif session.json     an ATIF 1.8 trajectory
  turnlog log session export --all --recipe calc --trace traces    the sessions of a recipe, for the Hub's trace viewer

A session is named by its id, or by a beginning of it that is unique. A rerun writes nothing to the log or to the object
store, and sends nothing to the network: each request gets its recorded response.
Exit status of rerun: 0 every call gave the recorded result, 1 one did not, 2 a call cannot be run again.
"""
EXPORTS = {
    "html": "write an HTML page, with the tokens",
    "json": "write the JSON that docs/dashboard.md describes",
    "atif": "write an ATIF 1.8 trajectory, with the tokens",
    "trace": "write JSON lines for the trace viewer of the Hugging Face Hub (STS-Format)",
}
"""Formats of `export` by option, with their help."""
FILTERS = (
    ("--recipe", "recipe", str, "only sessions of this recipe"),
    ("--task", "task_id", str, "only sessions of this task id"),
    ("--group", "group_id", str, "only sessions of this group"),
    ("--purpose", "purpose", str, "only train, eval or other sessions"),
    ("--outcome", "outcome", str, "only sessions with this outcome"),
    ("--min-reward", "min_reward", float, "only sessions with at least this reward"),
    ("--max-reward", "max_reward", float, "only sessions with at most this reward"),
)
"""(flag, field of SessionFilter, type, help)."""
COLOURS = {"same": "green", "differs": "red", "cannot": "red", "not_run": "yellow"}
"""Colour of a call's line by verdict."""
SHOWN = 60
"""Maximum characters of a call's arguments."""
COLUMNS = {
    "seq": 3, "call": 8, "tool": 6, "status": 6, "seconds": 7, "tries": 5, "files": 5, "arguments": 16, "requests": 8,
}  # fmt: skip
"""Minimum width in characters by heading; together they fit a terminal of 80."""


def _session_arguments(verb: argparse.ArgumentParser) -> None:
    verb.epilog = SESSION_EPILOG
    actions = verb.add_subparsers(dest="action", required=True, metavar="ACTION")
    again = actions.add_parser("rerun", help="execute the recorded calls again and compare")
    _add_session_arguments(again)
    again.add_argument("--call", dest="call_seq", type=int, metavar="N", help="only the call with this call_seq")
    again.add_argument(
        "--ignore", action="append", default=[], metavar="REGEX",
        help="parts of outputs that may differ; may be repeated",
    )  # fmt: skip
    again.add_argument(
        "--keep-going", action=argparse.BooleanOptionalAction, default=True,
        help="continue after a call that differs (default: yes)",
    )  # fmt: skip
    again.add_argument(
        "--strict", action="store_true", help="a different environment (environment_sha256) counts as a difference, too"
    )
    shown = actions.add_parser("show", help="list the recorded calls; with --tree, also the turns, from the index")
    _add_session_arguments(shown)
    shown.add_argument(
        "--tree", action="store_true", help="show turns, each below the turn that it continues, and calls"
    )
    shown.add_argument(
        "--tokens", action="store_true", help="show the tree, with the tokens of each turn by disposition"
    )
    export = actions.add_parser("export", help="write sessions to files: pages, JSON, ATIF or traces for the Hub")
    which = export.add_mutually_exclusive_group(required=True)
    which.add_argument("id", metavar="ID", nargs="?", help="id of the session, or its beginning")
    which.add_argument(
        "--all", dest="every", action="store_true",
        help="write every session that passes the filters, as SESSION.json and the like; FILE is then a folder",
    )  # fmt: skip
    into = export.add_mutually_exclusive_group(required=True)
    for kind, help in EXPORTS.items():
        into.add_argument(f"--{kind}", dest=f"{kind}_file", metavar="FILE", help=help)
    for flag, field, parse, help in FILTERS:
        export.add_argument(flag, dest=field, type=parse, metavar=flag[2:].upper(), help=f"with --all: {help}")
    add_source(export)


def _add_session_arguments(action: argparse.ArgumentParser) -> None:
    action.add_argument("id", metavar="ID", help="id of the session, or its beginning")
    add_json(action)
    add_source(action)


def _session(settings: Settings, arguments: argparse.Namespace) -> int:
    if arguments.action == "show" and (arguments.tree or arguments.tokens):
        from turnlog.verbs.console import show_session

        return show_session(settings, arguments)
    if arguments.action == "export":
        return ending.run_verb(_export(settings, arguments))
    return ending.run_verb(show_or_rerun(settings, arguments))


async def show_or_rerun(settings: Settings, arguments: argparse.Namespace) -> int:
    """Run one action on the run's topics, or its archive; return the exit status. Raises RerunError, and the errors
    that keep sandboxes from starting."""
    from turnlog.infra.access.audit import audit_command
    from turnlog.infra.roles.role import open_role
    from turnlog.infra.roles.terminal import say_json
    from turnlog.sandbox_workers.console.recorded import load_session, session_body
    from turnlog.sandbox_workers.console.rerun import RerunOptions, exit_status, patterns, rerun

    async with open_role("session", settings, archive=arguments.source == "archive") as role:
        session = await load_session(role, arguments.id)
        await audit_command(role, "look", "session", (session.session_id,))
        if arguments.action == "show":
            say_json(session_body(session)) if arguments.json else print_session(session_body(session))
            return 0
        options = RerunOptions(
            call=arguments.call_seq,
            ignored=patterns(arguments.ignore),
            keep_going=arguments.keep_going,
            strict=arguments.strict,
        )
        reports = await rerun(role, session, options)
    status = exit_status(reports)
    if arguments.json:
        body = {"session_id": session.session_id, "exit": status, "calls": [report.body() for report in reports]}
        say_json(body)
    else:
        print_report(session.session_id, [report.body() for report in reports])
    return status


def print_session(session: Mapping[str, Any]) -> None:
    """Print a row per call of a session body (sandbox_workers.console.recorded)."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from turnlog.infra.roles.log_lines import escape_controls
    from turnlog.infra.roles.terminal import Terminal

    table = Table(title=f"tool calls of session {session['session_id']}", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading, width in COLUMNS.items():
        table.add_column(heading, overflow="fold", min_width=width)
    for body in session["calls"]:
        status = body["status"] + (f" ({body['reason']})" if body["reason"] else "")
        asked = [f"{one['method']} {one['url']} {one['status']} {one['source']}" for one in body["requests"]]
        row = (
            str(body["call_seq"]), body["call_id"][:8], body["tool"], status, f"{body['duration_s']:.3f}",
            str(body["attempts"]), (body["workspace"] or "-")[:8], body["arguments"][:SHOWN],
        )  # fmt: skip
        table.add_row(*row, Text("\n".join(map(escape_controls, asked)) or "-"))
    Terminal().print(table)


def print_report(session_id: str, bodies: Sequence[Mapping[str, Any]]) -> None:
    """Print a line per call, and its differences below it."""
    from turnlog.infra.roles.terminal import Terminal

    console = Terminal(highlight=False)
    for body in bodies:
        console.print(f"call {body['call_seq']} {body['tool']}: {body['verdict']}", style=COLOURS[body["verdict"]])
        for one in body["differences"]:
            place = f" from byte {one['at']}" if "at" in one else ""
            console.print(f"  {one['what']}{place}")
            console.print(f"    recorded: {one['recorded']!r}")
            console.print(f"    now:      {one['now']!r}")
        for note in body["notes"]:
            console.print(f"  {note}")
    counts = {verdict: sum(body["verdict"] == verdict for body in bodies) for verdict in COLOURS}
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    console.print(f"session {session_id}: {said or 'no call'}")


async def _export(settings: Settings, arguments: argparse.Namespace) -> int:
    """Write the files and return the exit status. Raises IndexFailure, LogError, OSError."""
    import asyncio

    from turnlog.consumers.index.reader import Index, path_of
    from turnlog.infra.access.audit import audit_command
    from turnlog.infra.roles.role import open_role
    from turnlog.infra.roles.terminal import say
    from turnlog.plugins.dashboard.drawing import clock
    from turnlog.plugins.exporters.session_files import ENDINGS, session_files, write_files

    kind, out = next((kind, Path(file)) for kind in EXPORTS if (file := getattr(arguments, f"{kind}_file")))
    count = 0
    with Index.open(path_of(settings)) as index:
        names = list(session_ids(index, arguments))
        async with open_role("session", settings, archive=arguments.source == "archive") as role:
            for name in names:
                file = out / f"{quote(name, safe='')}.{ENDINGS[kind]}" if arguments.every else out
                await audit_command(role, "export", "session", (name,), kind)
                with index.snapshot() as as_of:
                    view = index.session(name)
                    assert view is not None, "the index deletes no session"
                    files, notes = await session_files(role, index, view, kind, file.name)
                await asyncio.to_thread(write_files, file.parent, files)
                count += len(files)
                said = f"{file} ({sum(map(len, files.values())):,} bytes)"
                say(f"session {name}, as of {clock(as_of.written_ms)}: {said}", *notes)
    if arguments.every:
        say(f"{len(names):,} sessions, {count:,} files in {out}")
    return ExitStatus.DONE


def session_ids(index: Index, arguments: argparse.Namespace) -> Iterator[str]:
    """Yield the ids of the sessions to export, oldest first. Raises BadQuestion."""
    from turnlog.consumers.index import BadQuestion
    from turnlog.consumers.index.reader import MOST_ROWS, resolve_id
    from turnlog.consumers.index.search import SessionFilter

    given = {flag: getattr(arguments, field) for flag, field, _, _ in FILTERS if getattr(arguments, field) is not None}
    if not arguments.every:
        if given:
            raise BadQuestion(f"{', '.join(given)}: filters need --all")
        kind, name = resolve_id(index, arguments.id)
        if kind != "session":
            raise BadQuestion(
                f"{name} is a group: `turnlog log why {name}` names its sessions, --all --group exports them"
            )
        yield name
        return
    wanted = SessionFilter(**{field: getattr(arguments, field) for _, field, _, _ in FILTERS})
    after, more = None, True
    while more:
        page = index.sessions(wanted, descending=False, after=after, limit=MOST_ROWS)
        yield from (row.session_id for row in page.rows)
        after, more = page.after, page.after is not None


def _reads(arguments: argparse.Namespace) -> bool:
    return arguments.action == "export" or (arguments.action == "show" and not arguments.tree)


VERBS = (
    Verb("session", "show the calls, turns and tokens of a session, or run its calls again", _session,
         _session_arguments, reads=_reads, looks=acts("show", "export"),
         under="log"),
)  # fmt: skip
