"""`--until`: the moment up to which a replay reads."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime

from turnlog.consumers.replay.errors import NoSuchMoment
from turnlog.infra.history import events
from turnlog.infra.log import LogError, Partition
from turnlog.infra.role import Role
from turnlog.schemas import topics
from turnlog.schemas.events import StepCompleted

STEP = re.compile(r"step:(\d+)")
PLACE = re.compile(r"([\w.-]+)\[(\d+)\]@(\d+)")


@dataclass(frozen=True, slots=True)
class Until:
    """Records up to `time_ms`, batches up to `batch_index` where it is known."""

    time_ms: int
    batch_index: int | None = None


async def moment(role: Role, text: str) -> Until:
    """What `text` means: a time (ISO 8601, UTC unless it says otherwise, or milliseconds), `step:N`, or a record as
    `topic[partition]@offset`. Raises NoSuchMoment."""
    if found := STEP.fullmatch(text):
        return await _step(role, int(found[1]))
    if found := PLACE.fullmatch(text):
        return await _record(role, Partition(found[1], int(found[2])), int(found[3]))
    if text.isdigit():
        return Until(int(text))
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        raise NoSuchMoment(f"--until {text}: {error}; write TIME, step:N or topic[partition]@offset") from error
    return Until(int((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1000))


async def _step(role: Role, number: int) -> Until:
    found: Until | None = None
    incarnation, last = -1, 0
    async for record, event in events(role, topics.STEPS):
        if not isinstance(event, StepCompleted):
            continue
        last = max(last, event.step)
        if event.step == number and event.incarnation >= incarnation:
            incarnation, found = event.incarnation, Until(record.timestamp_ms, event.batch_index)
    if found is None:
        raise NoSuchMoment(f"--until step:{number}: the last step of run {role.settings.run.id} on the log is {last}")
    return found


async def _record(role: Role, place: Partition, offset: int) -> Until:
    try:
        end = (await role.log.end_offsets([place]))[place]
        async with role.log.reader() as reader:
            reader.assign({place: offset})
            while reader.position(place) < end:
                for record in await reader.poll(max_records=1):
                    return Until(record.timestamp_ms)
    except LogError as error:
        raise NoSuchMoment(f"--until {place.topic}[{place.number}]@{offset}: {error}") from error
    raise NoSuchMoment(f"--until {place.topic}[{place.number}]@{offset}: the partition ends at {end}")
