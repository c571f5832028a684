"""Dead letters: a record that is refused is parked with its place, its bytes and its cause."""

from __future__ import annotations

from prometheus_client import Counter

from turnlog.infra.log import Record
from turnlog.schemas.events import DeadLetter
from turnlog.schemas.ids import dead_letter_id
from turnlog.schemas.topics import INLINE_LIMIT_BYTES

PARKED = Counter("turnlog_dead_letters", "Records parked in dead-letters", ["role", "cause"])


def where(record: Record) -> str:
    """topic[partition]@offset"""
    return f"{record.topic}[{record.partition}]@{record.offset}"


def dead_letter(record: Record, cause: Exception, *, run_id: str, role: str) -> DeadLetter:
    """The dead letter of a record, counted: its id is its place, so that it is parked once whoever finds it.

    The cause is named by its type and said in its words. Bytes beyond the inline limit are cut: the record itself stays
    where it stands.
    """
    PARKED.labels(role, type(cause).__name__).inc()
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
