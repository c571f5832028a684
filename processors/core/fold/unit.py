"""The fold of one unit, as every reader of its inputs does it: the assembler in the stream, replay over its history.

A unit is partition p of the inputs and outputs. Per record: is its group still open, does it stand in its place, what
does its group make of it, which of that is new.

RefusedRecord         a record that decodes, and is not folded all the same: the assembler parks it
├── ForeignRun        another run wrote it: one run per cluster and prefix
├── KeyMismatch       the record's key is not the group of its event: it may lie in another group's partition
├── WrongTopic        the record does not belong to the topic it stands in
└── RecordSkipped     an operator asked to pass over it (SkipRequested)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from turnlog.processors.core import FoldDefect, FoldError
from turnlog.processors.core.fold.low_water import Done, FoldFactory, LowWater, Marks
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
"""What a defect in a fold looks like: its unit stops there. Everything else (memory, transport) ends the process."""


class RefusedRecord(Exception):
    """Base of the tree above."""


class ForeignRun(RefusedRecord):
    """Remedy: find who writes it (header `writer`); give that run a [kafka] prefix of its own."""

    @classmethod
    def check(cls, event: Event, run_id: str, where: str) -> None:
        """Raises ForeignRun for a record that stands `where` and is not of the run."""
        if event.run_id != run_id:
            raise cls(
                f"{where}: the {type(event).__name__} is of run {event.run_id!r}, this log is of {run_id!r}: one run "
                "per cluster and prefix; give the other one a [kafka] prefix of its own"
            )


class KeyMismatch(RefusedRecord):
    """Remedy: its producer must use as the key what the catalogue says."""


class WrongTopic(RefusedRecord):
    """Remedy: its producer must append to the topic of the catalogue."""


class RecordSkipped(RefusedRecord):
    """The operator's reason."""


class InputRecord(Protocol):
    """A record of the log, as far as a fold looks at it."""

    @property
    def topic(self) -> str:
        """Its name."""

    @property
    def partition(self) -> int:
        """The unit."""

    @property
    def offset(self) -> int:
        """In the partition."""

    @property
    def key(self) -> bytes:
        """The group, in UTF-8."""


@dataclass(slots=True)
class Taken:
    """What came of one record."""

    outputs: list[Event] = field(default_factory=list)
    """In order; each is one that the unit has not given yet."""
    refusal: RefusedRecord | FoldError | UndecodableRecord | None = None
    seen: bool = False
    """Its group took it or refused it; else it stood in a wrong place, or came late."""
    late: bool = False
    """Its group is over and forgotten."""


def payloads_read(event: object, run_id: str, *, messages: bool) -> tuple[Payload, ...]:
    """The payloads of a record that the fold of its run reads, to be fetched before it; `messages`: its policy needs
    those. None of another run's, which is not folded.

    What else is a reference stays one: only people and dashboards read it.
    """
    if isinstance(event, TokenSnapshot) and event.run_id == run_id:
        return event.delta_ids, event.output_ids, event.output_logprobs
    if messages and isinstance(event, TurnCompleted) and event.run_id == run_id:
        return event.new_messages, event.response
    return ()


class UnitFold:
    """Folds the inputs of a unit, those of one topic in offset order. Use: `wants`, `take`, `pass_over` per record."""

    def __init__(self, marks: Marks, done: Done, factory: FoldFactory, *, run_id: str, horizon_records: int) -> None:
        """`run_id`: whose records are folded. `horizon_records`: see LowWater."""
        self._run_id = run_id
        self.low_water = LowWater(marks, done, factory, spine=SPINE, horizon_records=horizon_records)

    def wants(self, record: InputRecord) -> bool:
        """Whether its group is not scored yet; else nobody needs to decode it."""
        return not self.low_water.is_done(_group(record))

    def take(self, record: InputRecord, event: Event) -> Taken:
        """Fold a record. Raises one of DEFECTS: the unit must stop before it."""
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
        """The record was folded, or is no part of any fold."""
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
    """Of a record of any topic. Raises ForeignRun, KeyMismatch, WrongTopic."""
    name = type(event).__name__
    topic = TOPIC_OF[name]
    key = topic.key_of(event)
    if event.run_id == run_id and topic.name == record.topic and key == record.key:
        return  # of nearly every record: no words are made
    where = f"{record.topic}[{record.partition}]@{record.offset}"
    ForeignRun.check(event, run_id, where)
    if topic.name != record.topic:
        raise WrongTopic(f"{where}: {name} belongs to {topic.name}")
    if key != record.key:
        raise KeyMismatch(f"{where}: key {record.key!r}, but the {name} is of {topic.key} {key!r}")
