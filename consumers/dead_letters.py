"""`turnlog dead-letters list|show|requeue|skip`: letters of a run, and the records that they are about; a second chance
for those, or an order to pass over one.

Requeued bytes go out as they were; what decodes the second time (a registry that is back, a fixed reader) is then taken
as any late record is. A tool call is different: its first answer stands for good, so it goes out as a call of its own.

LetterError
├── NoSuchLetter      no letter of the run has this id
├── AmbiguousLetter   several ids begin like that
├── NotRequeueable    the record is gone and the letter holds only its beginning
└── NotSkippable      no assembler unit stops at such a place
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import re
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from turnlog.infra.history import events, records
from turnlog.infra.log import Appender, Headers, Partition, Record, partition_of
from turnlog.infra.roles.role import Role, opened
from turnlog.infra.roles.terminal import Terminal, say, say_json
from turnlog.names import REQUEUED_HEADER, ExitStatus
from turnlog.schemas import UndecodableRecord, topics
from turnlog.schemas.events import DeadLetter, Event, SkipRequested, ToolCallRequested
from turnlog.schemas.ids import digest
from turnlog.schemas.topics import INLINE_LIMIT_BYTES, SESSIONS, SNAPSHOTS, TOOL_CALLS, TURNS
from turnlog.settings import Settings


class LetterError(Exception):
    """Base of the tree above."""


class NoSuchLetter(LetterError):
    """Remedy: `turnlog dead-letters list`."""


class AmbiguousLetter(LetterError):
    """Remedy: more digits of the id."""


class NotRequeueable(LetterError):
    """Remedy: `turnlog archive` may hold the record (--from archive)."""


class NotSkippable(LetterError):
    """Remedy: the place as `turnlog status` names it."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Which letters; an empty word asks for all."""

    cause: str = ""
    topic: str = ""
    role: str = ""

    def matches(self, letter: DeadLetter) -> bool:
        """True for a letter that is asked for."""
        wanted = ((self.cause, letter.cause), (self.topic, letter.topic), (self.role, letter.role))
        return all(not word or word == there for word, there in wanted)


async def read(role: Role, asked: Asked | None = None) -> dict[str, tuple[int, DeadLetter]]:
    """event_id -> (milliseconds since the epoch at which it was parked first, letter), in the order of the log."""
    found: dict[str, tuple[int, DeadLetter]] = {}
    async for record, event in events(role, topics.DEAD_LETTERS):
        if isinstance(event, DeadLetter) and (asked is None or asked.matches(event)):
            found.setdefault(event.event_id, (record.timestamp_ms, event))
    return found


def named(letters: dict[str, tuple[int, DeadLetter]], beginning: str) -> DeadLetter:
    """The one letter whose id begins so. Raises NoSuchLetter, AmbiguousLetter."""
    matching = [event_id for event_id in letters if event_id.startswith(beginning)]
    if not matching:
        raise NoSuchLetter(f"no dead letter {beginning!r} in this run; `turnlog dead-letters list` shows them")
    if len(matching) > 1:
        raise AmbiguousLetter(f"{len(matching)} letters begin with {beginning!r}: {', '.join(sorted(matching)[:5])}")
    return letters[matching[0]][1]


async def origin(role: Role, letter: DeadLetter) -> Record | None:
    """The record itself, where its topic still holds it."""
    return await record_at(role, Partition(letter.topic, letter.partition), letter.offset)


async def record_at(role: Role, place: Partition, offset: int) -> Record | None:
    """One record; None when the topic begins behind it, or ends before it."""
    start = (await role.log.start_offsets([place]))[place]
    end = (await role.log.end_offsets([place]))[place]
    if not start <= offset < end:
        return None
    async with role.log.reader() as reader:
        reader.assign({place: offset})
        while reader.position(place) <= offset:
            for record in await reader.poll(max_records=1):
                return record if record.offset == offset else None  # what stood there was an aborted transaction's
    return None


async def whole(role: Role, letter: DeadLetter) -> tuple[bytes, tuple[tuple[str, bytes], ...]]:
    """Value and headers of the letter's record. Raises NotRequeueable."""
    record = await origin(role, letter)
    if record is not None and record.value.startswith(letter.value):
        return record.value, record.headers
    if len(letter.value) >= INLINE_LIMIT_BYTES:
        raise NotRequeueable(
            f"{letter.topic}[{letter.partition}]@{letter.offset} is deleted, and the letter holds its first "
            f"{len(letter.value)} bytes only"
        )
    return letter.value, ()


async def event_of(role: Role, letter: DeadLetter, value: bytes) -> Event:
    """The event that `value` is. Raises UndecodableRecord."""
    record = Record(letter.topic, letter.partition, letter.offset, letter.key, value, (), 0)
    return await role.events.decode(record)


"""Header of a requeued record: the event_id of its letter."""


async def requeued(role: Role, places: Mapping[Partition, int]) -> dict[str, int]:
    """event_id of a letter -> how often its record was requeued, of the partitions in `places`, read from there."""
    counts: Counter[str] = Counter()
    ends = await role.log.end_offsets(list(places))
    async for record in records(role, list(places), ends, since=places):
        if mark := dict(record.headers).get(REQUEUED_HEADER):
            counts[mark.decode()] += 1
    return counts


def first_places(letters: list[DeadLetter]) -> dict[Partition, int]:
    """Partition -> the lowest offset of a letter there: a requeued record stands behind its origin."""
    places: dict[Partition, int] = {}
    for letter in letters:
        place = Partition(letter.topic, letter.partition)
        places[place] = min(letter.offset, places.get(place, letter.offset))
    return places


async def requeue(role: Role, appender: Appender, letter: DeadLetter, *, times: int) -> tuple[Partition, int]:
    """Append the letter's record once more and return where it stands; `times`: how often that was done before.
    Raises NotRequeueable, LogUnavailable."""
    value, headers = await whole(role, letter)
    kept: Headers = tuple(header for header in headers if header[0] != REQUEUED_HEADER)
    if letter.topic == TOOL_CALLS.name:
        value = await _as_new_call(role, letter, value, times)
    partition, offset = await appender.append(
        letter.topic,
        letter.key,
        value,
        headers=(*kept, (REQUEUED_HEADER, letter.event_id.encode())),
        partition=letter.partition,
    )
    return Partition(letter.topic, partition), offset


async def _as_new_call(role: Role, letter: DeadLetter, value: bytes, times: int) -> bytes:
    """A request under another call_id, in a session of its own: the old session's calls stay as they were answered."""
    try:
        event = await event_of(role, letter, value)
    except UndecodableRecord:
        return value
    if not isinstance(event, ToolCallRequested):
        return value
    call_id = digest("requeued", letter.event_id, times)
    again = dataclasses.replace(
        event,
        event_id=digest("ToolCallRequested", call_id),
        call_id=call_id,
        session_id=digest("requeued", event.session_id, call_id),
    )
    return role.events.codec.encode(again)


PLACE = re.compile(r"(?P<topic>[a-z.-]+)\[(?P<partition>\d{1,9})\]@(?P<offset>\d{1,18})")
FOLDED = (SESSIONS.name, TURNS.name, SNAPSHOTS.name)
"""What assembler units read: only there a unit stops at a record."""


def parsed(text: str) -> tuple[Partition, int]:
    """The place that `topic[partition]@offset` names. Raises NotSkippable."""
    found = PLACE.fullmatch(text)
    if found is None or found["topic"] not in FOLDED:
        raise NotSkippable(f"{text!r} is no TOPIC[PARTITION]@OFFSET of {', '.join(FOLDED)}: units stop nowhere else")
    return Partition(found["topic"], int(found["partition"])), int(found["offset"])


async def skip(role: Role, text: str, reason: str) -> SkipRequested:
    """Write the order. Raises NotSkippable where there is no such partition or record."""
    place, offset = parsed(text)
    groups = role.settings.kafka.groups
    if place.number >= groups:
        raise NotSkippable(f"{text}: {place.topic} has {groups} partitions ([kafka] groups), from 0")
    record = await record_at(role, place, offset)
    if record is None:
        raise NotSkippable(f"{text}: there is no record (yet, or any more)")
    event = SkipRequested(
        event_id=digest("SkipRequested", place.topic, place.number, offset),
        run_id=role.settings.run.id,
        group_id=_group_of_unit(record.key, place.number, groups),
        floor=0,
        topic=place.topic,
        partition=place.number,
        offset=offset,
        reason=reason,
    )
    await role.events.append(event)
    return event


def _group_of_unit(key: bytes, unit: int, groups: int) -> str:
    """A group id that leads to the unit's partition of agent.sessions: the record's own, unless its key is what is
    wrong with it."""
    try:
        if partition_of(key, groups) == unit:
            return key.decode()
    except UnicodeDecodeError:
        pass  # a name of ours instead
    names = (f"skip-{number}" for number in itertools.count())
    return next(name for name in names if partition_of(name.encode(), groups) == unit)


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
        return ExitStatus.DONE
    if not newest:
        only = "" if _asked(arguments) == Asked() else " that match"
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
