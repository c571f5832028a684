"""Dead letters of a run, and the records that they are about; a second chance for those, or an order to pass over one.

Requeued bytes go out as they were; what decodes the second time (a registry that is back, a fixed reader) is then taken
as any late record is. A tool call is different: its first answer stands for good, so it goes out as a call of its own.

LetterError
├── NoSuchLetter      no letter of the run has this id
├── AmbiguousLetter   several ids begin like that
├── NotRequeueable    the record is gone and the letter holds only its beginning
└── NotSkippable      no assembler unit stops at such a place
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from turnlog.infra.history import events, records
from turnlog.infra.log import Appender, Headers, Partition, Record, partition_of
from turnlog.infra.roles.role import Role
from turnlog.names import REQUEUED_HEADER
from turnlog.schemas import topics
from turnlog.schemas.errors import UndecodableRecord
from turnlog.schemas.events import DeadLetter, Event, SkipRequested, ToolCallRequested
from turnlog.schemas.ids import digest
from turnlog.schemas.topics import INLINE_LIMIT_BYTES, SESSIONS, SNAPSHOTS, TOOL_CALLS, TURNS


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


PLACE = re.compile(r"(?P<topic>[a-z.-]+)\[(?P<partition>\d+)\]@(?P<offset>\d+)")
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
