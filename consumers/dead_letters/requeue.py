"""A second chance: the record of a letter is appended to its topic again, marked so that nobody does it twice.

The bytes go out as they were; what decodes the second time (a registry that is back, a fixed reader) is then taken as
any late record is. A tool call is different: its first answer stands for good, so it goes out as a call of its own.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping

from turnlog.consumers.dead_letters.letters import event_of, whole
from turnlog.infra.history import records
from turnlog.infra.log import Appender, Headers, Partition
from turnlog.infra.roles.role import Role
from turnlog.names import REQUEUED_HEADER
from turnlog.schemas.errors import UndecodableRecord
from turnlog.schemas.events import DeadLetter, ToolCallRequested
from turnlog.schemas.ids import digest
from turnlog.schemas.topics import TOOL_CALLS

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
