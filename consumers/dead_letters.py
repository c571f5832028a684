"""Dead letters of a run and their records: read them, requeue a record, or order a partition task to skip one.

A requeued record has the same bytes as before. If it can be decoded this time (the registry is back, the reader is
fixed), it is treated like any late record. Tool calls differ: the first answer of a call is final, so the request is
requeued as a new call. If the run encrypts content, whoever erases the session of the original erases the new call as
well.

LetterError
├── NoSuchLetter      no letter of the run has this id
├── AmbiguousLetter   several ids begin with it
├── NotRequeueable    the record is gone, and the letter holds only its beginning; or its session was erased
└── NotSkippable      no partition task of the assembler can stop at this place
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from turnlog.infra.history import events, read_range, records
from turnlog.infra.log import Appender, Headers, Partition, Record, partition_of
from turnlog.infra.roles.role import Role
from turnlog.names import REQUEUED_HEADER
from turnlog.schemas import SessionIsErased, UndecodableRecord, topics
from turnlog.schemas.content import holds_erased
from turnlog.schemas.events import DeadLetter, Event, SkipRequested, ToolCallRequested
from turnlog.schemas.ids import digest
from turnlog.schemas.topics import INLINE_LIMIT_BYTES, SESSIONS, SNAPSHOTS, TOOL_CALLS, TURNS


class LetterError(Exception):
    """Base of the tree above."""


class NoSuchLetter(LetterError):
    """Remedy: `turnlog log dead-letters list`."""


class AmbiguousLetter(LetterError):
    """Remedy: give more digits of the id."""


class NotRequeueable(LetterError):
    """Remedy: `turnlog role archive` may hold the record (--from archive), unless its session was erased."""


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
    record = await record_at(role, Partition(letter.topic, letter.partition), letter.offset)
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
    NotRequeueable, LogUnavailable, RegistryUnavailable, and ContentKeyError for an encrypted call whose key this
    process cannot read."""
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
    their answers. Raises NotRequeueable."""
    try:
        event = await event_of(role, letter, value)
    except UndecodableRecord:
        return value
    if not isinstance(event, ToolCallRequested):
        return value
    if holds_erased(event):
        raise NotRequeueable(f"session {event.session_id}, which made the call, was erased")
    call_id = digest("requeued", letter.event_id, times)
    again = dataclasses.replace(
        event,
        event_id=digest("ToolCallRequested", call_id),
        call_id=call_id,
        session_id=digest("requeued", event.session_id, call_id),
    )
    try:
        if role.events.keys is not None:
            await role.events.keys.prepare(again.session_id, origin=event.session_id)
        return await role.events.encode(again)
    except SessionIsErased as error:
        raise NotRequeueable(str(error)) from error


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
