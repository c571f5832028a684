"""Dead letters of a run, and the records that they are about.

LetterError
├── NoSuchLetter      no letter of the run has this id
├── AmbiguousLetter   several ids begin like that
├── NotRequeueable    the record is gone and the letter holds only its beginning
└── NotSkippable      no assembler unit stops at such a place
"""

from __future__ import annotations

from dataclasses import dataclass

from turnlog.infra.history import events
from turnlog.infra.log import Partition, Record
from turnlog.infra.roles.role import Role
from turnlog.schemas import topics
from turnlog.schemas.events import DeadLetter, Event
from turnlog.schemas.topics import INLINE_LIMIT_BYTES


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
