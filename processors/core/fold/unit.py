"""The fold of one partition task, shared by all readers of its inputs: the assembler in the stream, replay over
history.

A partition task is partition p of the inputs and outputs. Four questions are answered per record: is its group still
open, is it in the right place, what does its group derive from it, and which of that is new.

RefusedRecord         the record decodes but is not folded: the assembler dead-letters it
├── ForeignRun        another run wrote it: only one run per cluster and prefix is allowed
├── KeyMismatch       the record's key is not the group of its event: it may lie in another group's partition
├── WrongTopic        the record does not belong to the topic in which it was found
└── RecordSkipped     an operator requested to skip it (SkipRequested)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from turnlog.processors.core.errors import FoldDefect, FoldError
from turnlog.processors.core.fold.low_water import Done, FoldFactory, LowWater, LowWaterMarks
from turnlog.processors.core.fold.settlement import with_figures
from turnlog.processors.core.fold_versions import SPINE
from turnlog.schemas import UndecodableRecord
from turnlog.schemas.events import Event, GroupScored, TokenSnapshot, TurnCompleted, TurnTreeAssembled
from turnlog.schemas.topics import TOPIC_OF
from turnlog.schemas.types import Payload

DEFECTS = (
    ArithmeticError, AssertionError, AttributeError, BufferError, FoldDefect, LookupError, NameError, RuntimeError,
    TypeError, ValueError,
)  # fmt: skip
"""Exceptions that indicate a bug in a fold: its partition task stops. Any other (memory, transport) ends the
process.
"""


class RefusedRecord(Exception):
    """Base of the errors above."""


class ForeignRun(RefusedRecord):
    """The record is of another run. Remedy: find its writer (header `writer`) and give that run a [kafka] prefix of its
    own.
    """

    @classmethod
    def check(cls, event: Event, run_id: str, where: str) -> None:
        """Check that a record found at `where` is of the run. Raises ForeignRun if it is not."""
        if event.run_id != run_id:
            raise cls(
                f"{where}: the {type(event).__name__} is of run {event.run_id!r}, this log is of {run_id!r}: one run "
                "per cluster and prefix; give the other one a [kafka] prefix of its own"
            )


class KeyMismatch(RefusedRecord):
    """The record's key is wrong. Remedy: its producer must use the key that the topic catalogue names."""


class WrongTopic(RefusedRecord):
    """The record is in the wrong topic. Remedy: its producer must append to the topic that the catalogue names."""


class RecordSkipped(RefusedRecord):
    """An operator requested to skip the record; the message gives the reason."""


class InputRecord(Protocol):
    """The part of a Kafka record that a fold reads."""

    @property
    def topic(self) -> str:
        """Name of the topic."""

    @property
    def partition(self) -> int:
        """Number of the partition task."""

    @property
    def offset(self) -> int:
        """Offset in the partition."""

    @property
    def key(self) -> bytes:
        """Id of the group, in UTF-8."""


@dataclass(slots=True)
class Taken:
    """The result of folding one record."""

    outputs: list[Event] = field(default_factory=list)
    """Outputs in order; each is one that the partition task has not emitted yet."""
    refusal: RefusedRecord | FoldError | UndecodableRecord | None = None
    seen: bool = False
    """True if the group fold processed the record (accepted or rejected); False if it was misplaced or late."""
    late: bool = False
    """True if its group was completed and forgotten."""


def payloads_read(event: object, run_id: str, *, messages: bool) -> tuple[Payload, ...]:
    """Return the payloads of a record that the fold of its run reads and that must be fetched before it.

    `messages` is true if the run's trajectory rule needs the messages of turns. No payload of another run's record is
    returned, since it is not folded. All other payloads stay references: only people and dashboards read them.
    """
    if isinstance(event, TokenSnapshot) and event.run_id == run_id:
        return event.delta_ids, event.output_ids, event.output_logprobs
    if messages and isinstance(event, TurnCompleted) and event.run_id == run_id:
        return event.new_messages, event.response
    return ()


class UnitFold:
    """Fold of the inputs of a partition task, those of one topic in offset order. Call `wants`, `take` and `pass_over`
    per record.
    """

    def __init__(
        self, marks: LowWaterMarks, done: Done, factory: FoldFactory, *, run_id: str, horizon_records: int
    ) -> None:
        """`run_id` is the run whose records are folded. For `horizon_records`, see LowWater."""
        self._run_id = run_id
        self.low_water = LowWater(marks, done, factory, spine=SPINE, horizon_records=horizon_records)

    def wants(self, record: InputRecord) -> bool:
        """Whether the record's group is not scored yet; otherwise the record need not be decoded."""
        return not self.low_water.is_done(_group(record))

    def take(self, record: InputRecord, event: Event) -> Taken:
        """Fold a record. Raises one of DEFECTS if the partition task must stop before it."""
        group = _group(record)
        if self.low_water.is_done(group):
            return Taken()
        try:
            check_place(record, event, self._run_id)
        except RefusedRecord as misplaced:
            return Taken(refusal=misplaced)
        fold = self.low_water.open_group(group, event.floor)
        if fold is None:
            return Taken(late=True)
        refusal = None
        try:
            outputs = fold.apply(record.topic, record.offset, event)
        except FoldError as error:
            outputs, refusal = error.outputs, error
        if outputs:
            outputs = list(with_figures([output for output in outputs if self._is_new(group, output)]))
        return Taken(outputs, refusal, seen=True)

    def pass_over(self, record: InputRecord) -> None:
        """Advance beyond a record that was folded, or that belongs to no fold."""
        self.low_water.pass_over(record.topic, record.offset)

    def _is_new(self, group: str, output: Event) -> bool:
        if isinstance(output, TurnTreeAssembled):
            return self.low_water.new_tree(output.session_id)
        if isinstance(output, GroupScored):
            self.low_water.close(group, output.floor)
        return True


def _group(record: InputRecord) -> str:
    return record.key.decode(errors="replace")


def check_place(record: InputRecord, event: Event, run_id: str) -> None:
    """Check that a record of any topic is in its place. Raises ForeignRun, KeyMismatch or WrongTopic if it is not."""
    name = type(event).__name__
    topic = TOPIC_OF[name]
    key = topic.key_of(event)
    if event.run_id == run_id and topic.name == record.topic and key == record.key:
        return  # nearly every record: build no message
    where = f"{record.topic}[{record.partition}]@{record.offset}"
    ForeignRun.check(event, run_id, where)
    if topic.name != record.topic:
        raise WrongTopic(f"{where}: {name} belongs to {topic.name}")
    if key != record.key:
        raise KeyMismatch(f"{where}: key {record.key!r}, but the {name} is of {topic.key} {key!r}")
