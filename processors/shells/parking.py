"""Records that are refused: parked in dead-letters with their cause, in the transaction that passes over them.

RefusedRecord
├── KeyMismatch       the record's key is not the group of its event: it may lie in another group's partition
├── WrongTopic        the record does not belong to the topic it stands in
└── RecordSkipped     an operator asked to pass over it (SkipRequested)
"""

from __future__ import annotations

from turnlog.infra.log import Record
from turnlog.schemas.events import DeadLetter, Event
from turnlog.schemas.ids import dead_letter_id
from turnlog.schemas.topics import INLINE_LIMIT_BYTES, TOPIC_OF


class RefusedRecord(Exception):
    """Base of the tree above."""


class KeyMismatch(RefusedRecord):
    """Remedy: its producer must use the event's group_id as the key."""


class WrongTopic(RefusedRecord):
    """Remedy: its producer must append to the topic of the catalogue."""


class RecordSkipped(RefusedRecord):
    """The operator's reason."""


def check_place(record: Record, event: Event) -> None:
    """Raises KeyMismatch, WrongTopic."""
    name = type(event).__name__
    if TOPIC_OF[name].name != record.topic:
        raise WrongTopic(f"{where(record)}: {name} belongs to {TOPIC_OF[name].name}")
    if event.group_id.encode() != record.key:
        raise KeyMismatch(f"{where(record)}: key {record.key!r}, but the {name} is of group {event.group_id}")


def where(record: Record) -> str:
    """topic[partition]@offset"""
    return f"{record.topic}[{record.partition}]@{record.offset}"


def dead_letter(record: Record, cause: Exception, *, run_id: str, role: str) -> DeadLetter:
    """The dead letter of a record: its id is its place, so that it is parked once whoever finds it.

    Bytes beyond the inline limit are cut: the record itself stays where it stands.
    """
    cut = len(record.value) > INLINE_LIMIT_BYTES
    return DeadLetter(
        event_id=dead_letter_id(record.topic, record.partition, record.offset),
        run_id=run_id,
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        key=record.key,
        value=record.value[:INLINE_LIMIT_BYTES],
        role=role,
        cause=type(cause).__name__,
        message=f"{cause}; cut to {INLINE_LIMIT_BYTES} bytes" if cut else str(cause),
    )
