"""`turnlog log dead-letters list|show|requeue|skip`: show dead letters of a run and their records; requeue a record, or
order a partition task to skip one.

A requeued record has the same bytes as before. If it can be decoded this time (the registry is back, the reader is
fixed), it is treated like any late record. Tool calls differ: the first answer of a call is final, so the request is
requeued as a new call.

LetterError
├── NoSuchLetter      no letter of the run has this id
├── AmbiguousLetter   several ids begin with it
├── NotRequeueable    the record is gone, and the letter holds only its beginning
└── NotSkippable      no partition task of the assembler can stop at this place
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

from turnlog.infra.follow import read_range
from turnlog.infra.history import events, records
from turnlog.infra.log import Appender, Headers, Partition, Record, partition_of
from turnlog.infra.roles.role import Role, open_role
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
    """Remedy: `turnlog log dead-letters list`."""


class AmbiguousLetter(LetterError):
    """Remedy: give more digits of the id."""


class NotRequeueable(LetterError):
    """Remedy: `turnlog role archive` may hold the record (--from archive)."""


class NotSkippable(LetterError):
    """Remedy: give the place as `turnlog status` names it."""


@dataclass(frozen=True, slots=True)
class DeadLetterFilter:
    """Filter of letters; an empty string matches all."""

    cause: str = ""
    topic: str = ""
    role: str = ""

    def matches(self, letter: DeadLetter) -> bool:
        """Return True if the letter passes the filter."""
        wanted = ((self.cause, letter.cause), (self.topic, letter.topic), (self.role, letter.role))
        return all(not word or word == there for word, there in wanted)


async def read(role: Role, asked: DeadLetterFilter | None = None) -> dict[str, tuple[int, DeadLetter]]:
    """Return event_id -> (time of the first dead-lettering in milliseconds since 1970, letter), in the order of the
    log."""
    found: dict[str, tuple[int, DeadLetter]] = {}
    async for record, event in events(role, topics.DEAD_LETTERS):
        if isinstance(event, DeadLetter) and (asked is None or asked.matches(event)):
            found.setdefault(event.event_id, (record.timestamp_ms, event))
    return found


def find_letter(letters: dict[str, tuple[int, DeadLetter]], beginning: str) -> DeadLetter:
    """Return the only letter whose id begins with `beginning`. Raises NoSuchLetter, AmbiguousLetter."""
    matching = [event_id for event_id in letters if event_id.startswith(beginning)]
    if not matching:
        raise NoSuchLetter(f"no dead letter {beginning!r} in this run; `turnlog log dead-letters list` shows them")
    if len(matching) > 1:
        raise AmbiguousLetter(f"{len(matching)} letters begin with {beginning!r}: {', '.join(sorted(matching)[:5])}")
    return letters[matching[0]][1]


async def origin(role: Role, letter: DeadLetter) -> Record | None:
    """Return the original record if its topic still holds it, else None."""
    return await record_at(role, Partition(letter.topic, letter.partition), letter.offset)


async def record_at(role: Role, place: Partition, offset: int) -> Record | None:
    """Return one record, or None if the topic begins after it or ends before it, or if it was aborted."""
    start = (await role.log.start_offsets([place]))[place]
    end = (await role.log.end_offsets([place]))[place]
    if not start <= offset < end:
        return None
    async with role.log.reader() as reader:
        return await anext(read_range(reader, {place: offset}, {place: offset + 1}, max_records=1), None)


async def whole(role: Role, letter: DeadLetter) -> tuple[bytes, tuple[tuple[str, bytes], ...]]:
    """Return value and headers of the letter's record. Raises NotRequeueable."""
    record = await origin(role, letter)
    if record is not None and record.value.startswith(letter.value):
        return record.value, record.headers
    if len(letter.value) >= INLINE_LIMIT_BYTES:
        raise NotRequeueable(
            f"{letter.topic}[{letter.partition}]@{letter.offset} is deleted, and the letter holds only its "
            f"first {len(letter.value)} bytes"
        )
    return letter.value, ()


async def event_of(role: Role, letter: DeadLetter, value: bytes) -> Event:
    """Decode `value` as the letter's event. Raises UndecodableRecord."""
    record = Record(letter.topic, letter.partition, letter.offset, letter.key, value, (), 0)
    return await role.events.decode(record)


async def count_requeues(role: Role, places: Mapping[Partition, int]) -> dict[str, int]:
    """Return event_id of a letter -> how often its record was requeued. Reads each partition in `places` from its
    offset."""
    counts: Counter[str] = Counter()
    ends = await role.log.end_offsets(list(places))
    async for record in records(role, list(places), ends, since=places):
        if mark := dict(record.headers).get(REQUEUED_HEADER):
            counts[mark.decode()] += 1
    return counts


def first_places(letters: list[DeadLetter]) -> dict[Partition, int]:
    """Return the lowest offset of a letter in each partition. A requeued record always follows its original."""
    places: dict[Partition, int] = {}
    for letter in letters:
        place = Partition(letter.topic, letter.partition)
        places[place] = min(letter.offset, places.get(place, letter.offset))
    return places


async def requeue(role: Role, appender: Appender, letter: DeadLetter, *, times: int) -> tuple[Partition, int]:
    """Append the letter's record again and return its new place. `times`: how often that was done before. Raises
    NotRequeueable, LogUnavailable."""
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
    """Return the request under a new call_id and in a session of its own, because the calls of the old session keep
    their answers."""
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
"""Topics that partition tasks of the assembler read; they can stop only at one of their records."""


def parse_position(text: str) -> tuple[Partition, int]:
    """Parse `topic[partition]@offset`. Raises NotSkippable."""
    found = PLACE.fullmatch(text)
    if found is None or found["topic"] not in FOLDED:
        raise NotSkippable(f"{text!r} is no TOPIC[PARTITION]@OFFSET of {', '.join(FOLDED)}, where units can stop")
    return Partition(found["topic"], int(found["partition"])), int(found["offset"])


async def skip(role: Role, text: str, reason: str) -> SkipRequested:
    """Append the order to skip a record. Raises NotSkippable if the partition or the record does not exist."""
    place, offset = parse_position(text)
    groups = role.settings.kafka.groups
    if place.number >= groups:
        raise NotSkippable(f"{text}: {place.topic} has {groups} partitions ([kafka] groups), counted from 0")
    record = await record_at(role, place, offset)
    if record is None:
        raise NotSkippable(f"{text}: no such record exists (not yet, or no longer)")
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
    """Return a group id whose partition of agent.sessions is that of the partition task: the record's own, unless its
    key is invalid."""
    try:
        if partition_of(key, groups) == unit:
            return key.decode()
    except UnicodeDecodeError:
        pass  # a made-up id follows
    names = (f"skip-{number}" for number in itertools.count())
    return next(name for name in names if partition_of(name.encode(), groups) == unit)


SHOWN_BYTES = 2000
"""Maximum number of bytes shown of a field, or of a value that is not text."""


async def command(settings: Settings, arguments: argparse.Namespace) -> int:
    """Run one action on the topics or the archive of the run, and return the exit status."""
    archive = getattr(arguments, "source", "topics") == "archive"
    async with open_role("dead-letters", settings, archive=archive) as role:
        return await ACTIONS[arguments.action](role, arguments)


async def _skip(role: Role, arguments: argparse.Namespace) -> int:
    order = await skip(role, arguments.place, arguments.reason)
    say(f"{order.topic}[{order.partition}]@{order.offset} will be skipped; restart the assembler if it stopped")
    return 0


async def _list(role: Role, arguments: argparse.Namespace) -> int:
    letters = await read(role, _letter_filter(arguments))
    newest = list(letters.values())[-max(0, arguments.limit) :]
    if arguments.json:
        for parked_ms, letter in newest:
            say_json(_body(letter, parked_ms), indent=None)
        return ExitStatus.DONE
    if not newest:
        only = "" if _letter_filter(arguments) == DeadLetterFilter() else " that match"
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
    letter = find_letter(letters, arguments.id)
    body = _body(letter, letters[letter.event_id][0])
    try:
        value, headers = await whole(role, letter)
        body["record"] = await _record(role, letter, value)
    except LetterError as error:
        headers, body["record"] = (), str(error)
    body["headers"] = {name: content.decode(errors="replace") for name, content in headers}
    if arguments.source != "archive":
        places = first_places([letter])
        body["requeued"] = (await count_requeues(role, places)).get(letter.event_id, 0)
    say_json(body, indent=None if arguments.json else 2)
    return 0


async def _requeue(role: Role, arguments: argparse.Namespace) -> int:
    letters = await read(role, _letter_filter(arguments))
    chosen = [find_letter(letters, beginning) for beginning in arguments.ids]
    if not arguments.ids:
        if _letter_filter(arguments) == DeadLetterFilter():
            raise LetterError("name letters by ID, or choose them with --cause, --topic or --role")
        chosen = [letter for _, letter in letters.values()]
    times = await count_requeues(role, first_places(chosen))
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
            place, offset = await requeue(role, appender, letter, times=times.get(letter.event_id, 0))
            say(f"{letter.event_id[:10]} {letter.cause}: now at {place.topic}[{place.number}]@{offset}")
    return 0


def _confirm_requeue(count: int) -> bool:
    if not sys.stdin.isatty():
        raise LetterError(f"{count} letters match, and there is no terminal to ask on: --yes requeues them")
    return input(f"requeue {count} records? [y/N] ").strip().lower() in ("y", "yes")


def _letter_filter(arguments: argparse.Namespace) -> DeadLetterFilter:
    return DeadLetterFilter(arguments.cause, arguments.topic, arguments.role)


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
    try:
        event = await event_of(role, letter, value)
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
