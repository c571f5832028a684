"""An operator's order to pass over the record at which an assembler unit stopped."""

from __future__ import annotations

import itertools
import re

from turnlog.consumers.dead_letters.letters import NotSkippable, record_at
from turnlog.infra.log import Partition, partition_of
from turnlog.infra.roles.role import Role
from turnlog.schemas.events import SkipRequested
from turnlog.schemas.ids import digest
from turnlog.schemas.topics import SESSIONS, SNAPSHOTS, TURNS

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
