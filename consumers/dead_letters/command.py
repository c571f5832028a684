"""`turnlog dead-letters list|show|requeue|skip`."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from rich.table import Table

from turnlog.consumers.dead_letters.letters import (
    Asked,
    LetterError,
    event_of,
    first_places,
    named,
    read,
    requeue,
    requeued,
    skip,
    whole,
)
from turnlog.infra.roles.role import Role, opened
from turnlog.infra.roles.terminal import Terminal, say, say_json
from turnlog.names import ExitStatus
from turnlog.schemas.errors import UndecodableRecord
from turnlog.schemas.events import DeadLetter
from turnlog.settings import Settings

SHOWN_BYTES = 2000
"""Of a value that is no text, or of one field."""


async def command(settings: Settings, arguments: argparse.Namespace) -> int:
    """One action on the run's topics, or its archive; the exit status."""
    archive = getattr(arguments, "source", "topics") == "archive"
    async with opened("dead-letters", settings, archive=archive) as role:
        return await ACTIONS[arguments.action](role, arguments)


async def _skip(role: Role, arguments: argparse.Namespace) -> int:
    order = await skip(role, arguments.place, arguments.reason)
    say(f"{order.topic}[{order.partition}]@{order.offset} will be passed over; restart the assembler if it stopped")
    return 0


async def _list(role: Role, arguments: argparse.Namespace) -> int:
    letters = await read(role, _asked(arguments))
    newest = list(letters.values())[-max(0, arguments.limit) :]
    if arguments.json:
        for parked_ms, letter in newest:
            say_json(_body(letter, parked_ms), indent=None)
        return ExitStatus.DONE if newest else ExitStatus.DIFFERS
    table = Table(title=f"dead letters of {role.settings.run.id}: {len(newest)} of {len(letters)}")
    for heading in ("id", "parked", "record", "by", "cause", "message"):
        table.add_column(heading, overflow="fold")
    for parked_ms, letter in newest:
        place = f"{letter.topic}[{letter.partition}]@{letter.offset}"
        table.add_row(letter.event_id[:10], _time(parked_ms), place, letter.role, letter.cause, letter.message[:200])
    Terminal().print(table)
    return ExitStatus.DONE if newest else ExitStatus.DIFFERS


async def _show(role: Role, arguments: argparse.Namespace) -> int:
    letters = await read(role)
    letter = named(letters, arguments.id)
    body = _body(letter, letters[letter.event_id][0])
    try:
        value, headers = await whole(role, letter)
        body["record"] = await _record(role, letter, value)
    except LetterError as error:
        headers, body["record"] = (), str(error)
    body["headers"] = {name: content.decode(errors="replace") for name, content in headers}
    if arguments.source != "archive":
        places = first_places([letter])
        body["requeued"] = (await requeued(role, places)).get(letter.event_id, 0)
    say_json(body, indent=None if arguments.json else 2)
    return 0


async def _requeue(role: Role, arguments: argparse.Namespace) -> int:
    letters = await read(role, _asked(arguments))
    chosen = [named(letters, beginning) for beginning in arguments.ids]
    if not arguments.ids:
        if _asked(arguments) == Asked():
            raise LetterError("requeue takes letters by ID, or --cause, --topic or --role")
        chosen = [letter for _, letter in letters.values()]
    times = await requeued(role, first_places(chosen))
    todo = [letter for letter in chosen if arguments.again or not times.get(letter.event_id)]
    for letter in chosen:
        if letter not in todo:
            say(f"{letter.event_id[:10]} was requeued {times[letter.event_id]} times; --again does it once more")
    if not todo:
        say("nothing to requeue")
        return ExitStatus.DIFFERS
    if not (arguments.ids or arguments.yes or _agreed(len(todo))):
        return ExitStatus.DIFFERS
    async with role.log.appender() as appender:
        for letter in todo:
            place, offset = await requeue(role, appender, letter, times=times.get(letter.event_id, 0))
            say(f"{letter.event_id[:10]} {letter.cause}: now at {place.topic}[{place.number}]@{offset}")
    return 0


def _agreed(count: int) -> bool:
    if not sys.stdin.isatty():
        raise LetterError(f"{count} letters match: --yes requeues them without a terminal to ask on")
    return input(f"requeue {count} records? [y/N] ").strip().lower() in ("y", "yes")


def _asked(arguments: argparse.Namespace) -> Asked:
    return Asked(arguments.cause, arguments.topic, arguments.role)


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
    """The event as JSON where it decodes, else its first bytes."""
    try:
        event = await event_of(role, letter, value)
    except UndecodableRecord as error:
        return {"undecodable": str(error), "bytes": len(value), "begins": value[:256].hex(" ", 4)}
    return {type(event).__name__: _plain(dataclasses.asdict(event))}


def _plain(value: Any) -> Any:
    """What JSON can hold: bytes as text where they are text, else as hex; cut to SHOWN_BYTES."""
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
