"""Records that a producer role reads and refuses are parked in dead-letters with their cause."""

from __future__ import annotations

from turnlog.infra.log import Record
from turnlog.infra.role import Role
from turnlog.schemas.events import DeadLetter
from turnlog.schemas.ids import dead_letter_id
from turnlog.schemas.topics import INLINE_LIMIT_BYTES


def dead_letter(record: Record, cause: Exception, *, role: Role) -> DeadLetter:
    """The dead letter of a record: its id is its place, so that it is parked once, whoever finds it. Bytes beyond the
    inline limit are cut: the record itself stays where it stands."""
    return DeadLetter(
        event_id=dead_letter_id(record.topic, record.partition, record.offset),
        run_id=role.settings.run.id,
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        key=record.key,
        value=record.value[:INLINE_LIMIT_BYTES],
        role=role.name,
        cause=type(cause).__name__,
        message=str(cause),
    )
