"""`turnlog log audit`: who looked at a run, exported from it, acted on it or logged in."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from turnlog.infra.roles import ending
from turnlog.names import ExitStatus
from turnlog.settings import Settings
from turnlog.verbs.verb import Verb, add_json, add_source, always

if TYPE_CHECKING:
    from turnlog.consumers.audit import AuditEntry

AUDIT_EPILOG = """\
Examples:
  turnlog log audit                             the newest records, oldest first
  turnlog log audit --session 4f1c2e --json     everybody who looked at a session or exported it
  turnlog log audit --subject ann --action export
  turnlog log audit --denied --limit 1000

Records are written if [access] audit is on (docs/access.md).
"""


def _audit_arguments(verb: argparse.ArgumentParser) -> None:
    verb.epilog = AUDIT_EPILOG
    verb.add_argument("--subject", default="", metavar="NAME", help="only this subject")
    verb.add_argument("--session", dest="about", default="", metavar="ID", help="only this session, or another id")
    verb.add_argument("--kind", default="", metavar="KIND", help="only this kind of page or command, such as session")
    verb.add_argument("--action", default="", choices=("look", "export", "act", "login"), help="only this action")
    verb.add_argument("--denied", action="store_true", help="only what was denied")
    verb.add_argument("--limit", type=int, default=200, metavar="N", help="show the N newest (default 200)")
    add_json(verb, "print one JSON object per record and line")
    add_source(verb)


def _audit(settings: Settings, arguments: argparse.Namespace) -> int:
    return ending.run_verb(_show(settings, arguments))


async def _show(settings: Settings, arguments: argparse.Namespace) -> int:
    """Print the records that pass. Raises LogError."""
    from collections import deque

    from turnlog.consumers.audit import AuditFilter, entries
    from turnlog.infra.roles.role import open_role
    from turnlog.infra.roles.terminal import say, say_json

    fields = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(AuditFilter)}
    newest = deque["AuditEntry"](maxlen=max(0, arguments.limit))
    async with open_role("audit", settings, archive=arguments.source == "archive") as role:
        async for entry in entries(role, AuditFilter(**fields)):
            newest.append(entry)
    if arguments.json:
        for entry in newest:
            say_json(body_of_entry(entry), indent=None)
    elif newest:
        _print_table(settings.run.id, list(newest))
    else:
        say(f"run {settings.run.id!r} has no audit record{_hint(settings, arguments)}")
    return ExitStatus.DONE


def body_of_entry(entry: AuditEntry) -> dict[str, object]:
    """Return a record of the audit trail as a JSON object."""
    body = {**dataclasses.asdict(entry.access), "time_ms": entry.time_ms, "offset": entry.offset}
    return {name: value for name, value in body.items() if name not in ("event_id", "run_id")}


def _hint(settings: Settings, arguments: argparse.Namespace) -> str:
    asked = arguments.subject or arguments.about or arguments.kind or arguments.action or arguments.denied
    return " that matches" if asked else "" if settings.access.audit else ": set [access] audit to write them"


def _print_table(run_id: str, shown: list[AuditEntry]) -> None:
    from datetime import UTC, datetime

    from rich.table import Table
    from rich.text import Text

    from turnlog.infra.roles.log_lines import escape_controls
    from turnlog.infra.roles.terminal import Terminal

    table = Table(title=f"audit trail of {run_id}")
    for heading in ("at (UTC)", "who", "login", "role", "action", "what", "ids", "from", "allowed"):
        table.add_column(heading, overflow="fold")
    for entry in shown:
        of = entry.access
        at = datetime.fromtimestamp(entry.time_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
        who = f"{of.name} ({of.subject})" if of.name else of.subject or "no login"
        what = f"{of.kind} as {of.form}" if of.form else of.kind
        row = (at, who, of.login, of.role, of.action, what, " ".join(of.about), of.address,
               "yes" if of.allowed else "denied")  # fmt: skip
        table.add_row(*(Text(escape_controls(word)) for word in row))
    Terminal().print(table)


VERBS = (
    Verb("audit", "show who looked at a run, exported from it or acted on it", _audit, _audit_arguments, reads=always,
         under="log"),
)  # fmt: skip
