"""Why a record that decodes is refused all the same; it is parked in the transaction that passes over it.

RefusedRecord
├── KeyMismatch       the record's key is not the group of its event: it may lie in another group's partition
├── WrongTopic        the record does not belong to the topic it stands in
└── RecordSkipped     an operator asked to pass over it (SkipRequested)
"""

from __future__ import annotations

from turnlog.infra.dead_letters import where
from turnlog.infra.log import Record
from turnlog.schemas.events import Event
from turnlog.schemas.topics import TOPIC_OF


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
