"""`turnlog log dead-letters`: list, show, requeue and skip records that a role refused."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from turnlog.infra.roles import ending
from turnlog.names import ExitStatus
from turnlog.settings import Settings
from turnlog.verbs.verb import Verb, acts, add_json, add_source

if TYPE_CHECKING:
    from turnlog.consumers.dead_letters import DeadLetterFilter
    from turnlog.infra.roles.role import Role
    from turnlog.schemas.events import DeadLetter

DEAD_LETTERS_EPILOG = """\
Examples:
  turnlog log dead-letters list --cause AttemptsExhausted     tool calls that crashed their sandbox too often
  turnlog log dead-letters show 4f1c                          one letter: its cause, its remedy, and its record
  turnlog log dead-letters requeue 4f1c                       append its record to its topic again, once
  turnlog log dead-letters requeue --cause UndecodableRecord  all with one cause; asks first, unless --yes
  turnlog log dead-letters skip 'agent.turns[0]@1' --reason "gateway bug, fixed"
                                                          let a stopped partition task of the assembler skip one record

A letter is named by its id or a unique prefix of it. A requeued tool call is a new call: the first answer of the old
one stands, so the new one runs under a new call_id, on the same workspace.
Exit status: 0 success, also if `list` finds none; 1 nothing to requeue; 2 error.
"""


def dead_letters_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the actions of `turnlog log dead-letters`."""
    verb.epilog = DEAD_LETTERS_EPILOG
    actions = verb.add_subparsers(dest="action", required=True, metavar="ACTION")
    listed = actions.add_parser("list", help="list letters, oldest first")
    _choosing(listed)
    listed.add_argument("--limit", type=int, default=50, metavar="N", help="show the N newest (default 50)")
    add_json(listed, "print one JSON object per letter and line")
    add_source(listed)
    shown = actions.add_parser("show", help="show one letter in full")
    shown.add_argument("id", metavar="ID", help="id of the letter, or its beginning")
    add_json(shown)
    add_source(shown)
    again = actions.add_parser("requeue", help="append the records of letters to their topics again")
    again.add_argument("ids", nargs="*", metavar="ID", help="ids of letters, or their beginnings")
    _choosing(again)
    again.add_argument("--again", action="store_true", help="include letters that were requeued before")
    again.add_argument("--yes", action="store_true", help="requeue without asking for confirmation")
    passed = actions.add_parser("skip", help="let a stopped partition task of the assembler skip one record")
    passed.add_argument("place", metavar="TOPIC[PARTITION]@OFFSET", help="the record, as shown in `turnlog status`")
    passed.add_argument("--reason", required=True, metavar="TEXT", help="recorded on the log")


def _choosing(action: argparse.ArgumentParser) -> None:
    for name, what in (("cause", "error class"), ("topic", "topic of the record"), ("role", "role that refused it")):
        action.add_argument(f"--{name}", default="", metavar=name.upper(), help=f"only this {what}")


def _dead_letters(settings: Settings, arguments: argparse.Namespace) -> int:
    return ending.run_verb(_act(settings, arguments))


async def _act(settings: Settings, arguments: argparse.Namespace) -> int:
    """Run one action on the topics or the archive of the run."""
    from turnlog.infra.access.audit import audit_command
    from turnlog.infra.roles.role import open_role

    archive = getattr(arguments, "source", "topics") == "archive"
    async with open_role("dead-letters", settings, archive=archive) as role:
        if arguments.action in ("list", "show"):
            about = (arguments.id,) if arguments.action == "show" else ()
            await audit_command(role, "look", "dead-letters", about)
        return await ACTIONS[arguments.action](role, arguments)


async def _skip(role: Role, arguments: argparse.Namespace) -> int:
    from turnlog.consumers import dead_letters
    from turnlog.infra.roles.terminal import say

    order = await dead_letters.skip(role, arguments.place, arguments.reason)
    say(f"{order.topic}[{order.partition}]@{order.offset} will be skipped; restart the assembler if it stopped")
    return 0


async def _list(role: Role, arguments: argparse.Namespace) -> int:
    from rich.table import Table

    from turnlog.consumers import dead_letters
    from turnlog.infra.roles.terminal import Terminal, say, say_json

    letters = await dead_letters.read(role, _letter_filter(arguments))
    newest = list(letters.values())[-max(0, arguments.limit) :]
    if arguments.json:
        for parked_ms, letter in newest:
            say_json(_body(letter, parked_ms), indent=None)
        return ExitStatus.DONE
    if not newest:
        only = "" if _letter_filter(arguments) == dead_letters.DeadLetterFilter() else " that match"
        say(f"run {role.settings.run.id!r} has no dead letters{only}")
        return ExitStatus.DONE
    table = Table(title=f"dead letters of {role.settings.run.id}: {len(newest)} of {len(letters)}")
    for heading in ("id", "parked", "record", "by", "cause", "message"):
        table.add_column(heading, overflow="fold")
    for parked_ms, letter in newest:
        place = f"{letter.topic}[{letter.partition}]@{letter.offset}"
        table.add_row(letter.event_id[:10], _time(parked_ms), place, letter.role, letter.cause, letter.message[:200])
    Terminal().print(table)
    return ExitStatus.DONE


async def _show(role: Role, arguments: argparse.Namespace) -> int:
    from turnlog.consumers import dead_letters
    from turnlog.infra.roles.terminal import say_json

    letters = await dead_letters.read(role)
    letter = dead_letters.find_letter(letters, arguments.id)
    body = _body(letter, letters[letter.event_id][0])
    try:
        value, headers = await dead_letters.whole(role, letter)
        body["record"] = await _record(role, letter, value)
    except dead_letters.LetterError as error:
        headers, body["record"] = (), str(error)
    body["headers"] = {name: content.decode(errors="replace") for name, content in headers}
    if arguments.source != "archive":
        places = dead_letters.first_places([letter])
        body["requeued"] = (await dead_letters.count_requeues(role, places)).get(letter.event_id, 0)
    say_json(body, indent=None if arguments.json else 2)
    return 0


async def _requeue(role: Role, arguments: argparse.Namespace) -> int:
    from turnlog.consumers import dead_letters
    from turnlog.infra.roles.terminal import say

    letters = await dead_letters.read(role, _letter_filter(arguments))
    chosen = [dead_letters.find_letter(letters, beginning) for beginning in arguments.ids]
    if not arguments.ids:
        if _letter_filter(arguments) == dead_letters.DeadLetterFilter():
            raise dead_letters.LetterError("name letters by ID, or choose them with --cause, --topic or --role")
        chosen = [letter for _, letter in letters.values()]
    times = await dead_letters.count_requeues(role, dead_letters.first_places(chosen))
    todo = [letter for letter in chosen if arguments.again or not times.get(letter.event_id)]
    for letter in chosen:
        if letter not in todo:
            say(f"{letter.event_id[:10]} was requeued {times[letter.event_id]} times; --again requeues it once more")
    if not todo:
        say("nothing to requeue")
        return ExitStatus.DIFFERS
    if not (arguments.ids or arguments.yes or _confirm_requeue(len(todo))):
        return ExitStatus.DIFFERS
    async with role.log.appender() as appender:
        for letter in todo:
            place, offset = await dead_letters.requeue(role, appender, letter, times=times.get(letter.event_id, 0))
            say(f"{letter.event_id[:10]} {letter.cause}: now at {place.topic}[{place.number}]@{offset}")
    return 0


def _confirm_requeue(count: int) -> bool:
    from turnlog.consumers import dead_letters

    if not sys.stdin.isatty():
        raise dead_letters.LetterError(
            f"{count} letters match, and there is no terminal to ask on: --yes requeues them"
        )
    return input(f"requeue {count} records? [y/N] ").strip().lower() in ("y", "yes")


def _letter_filter(arguments: argparse.Namespace) -> DeadLetterFilter:
    from turnlog.consumers import dead_letters

    return dead_letters.DeadLetterFilter(arguments.cause, arguments.topic, arguments.role)


def _body(letter: DeadLetter, parked_ms: int) -> dict[str, Any]:
    return {
        "id": letter.event_id,
        "parked": _time(parked_ms),
        "record": f"{letter.topic}[{letter.partition}]@{letter.offset}",
        "key": letter.key.decode(errors="replace"),
        "role": letter.role,
        "cause": letter.cause,
        "message": letter.message,
        "bytes": len(letter.value),
    }


async def _record(role: Role, letter: DeadLetter, value: bytes) -> Any:
    """Return the event as JSON if it can be decoded, else the first bytes of the record."""
    from turnlog.consumers import dead_letters
    from turnlog.schemas import UndecodableRecord

    try:
        event = await dead_letters.event_of(role, letter, value)
    except UndecodableRecord as error:
        return {"undecodable": str(error), "bytes": len(value), "begins": value[:256].hex(" ", 4)}
    return {type(event).__name__: _plain(dataclasses.asdict(event))}


def _plain(value: Any) -> Any:
    """Convert to JSON types: bytes become text if they are text, else hex, cut to SHOWN_BYTES."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, bytes):
        cut = value[:SHOWN_BYTES]
        more = f" ... {len(value)} bytes" if len(value) > SHOWN_BYTES else ""
        return (cut.decode() if _is_text(cut) else cut.hex(" ", 4)) + more
    return value


def _is_text(value: bytes) -> bool:
    try:
        return value.decode().isprintable() or b"\0" not in value
    except UnicodeDecodeError:
        return False


def _time(milliseconds: int) -> str:
    moment = datetime.datetime.fromtimestamp(milliseconds / 1000, datetime.UTC)
    return moment.isoformat(sep=" ", timespec="seconds")


ACTIONS: Mapping[str, Callable[[Role, argparse.Namespace], Awaitable[int]]] = {
    "list": _list,
    "show": _show,
    "requeue": _requeue,
    "skip": _skip,
}

SHOWN_BYTES = 2000
"""Maximum number of bytes shown of a field, or of a value that is not text."""

VERBS = (
    Verb("dead-letters", "list, show, requeue or skip records that a role refused", _dead_letters,
         dead_letters_arguments, reads=acts("list", "show"), under="log"),
)  # fmt: skip
