"""Fold a recorded history: the same fold as the stream, without the stream."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from turnlog.processors.core.assembler import GroupFold
from turnlog.processors.core.errors import FoldError
from turnlog.processors.core.methods.rules import FoldRules
from turnlog.schemas.events import Event

Recorded = tuple[str, int, int, Event]
"""(topic, partition, offset, event), payloads inline."""


@dataclass(frozen=True, slots=True)
class History:
    """What a recorded history folds to."""

    outputs: list[Event] = field(default_factory=list)
    """Each event_id once: group by group in order of completion where the records of a group lie together."""
    refused: list[tuple[str, int, int, FoldError]] = field(default_factory=list)
    """(topic, partition, offset, error) of what a stream would have parked."""
    open: dict[str, GroupFold] = field(default_factory=dict)
    """Groups that the history does not complete."""


def fold_history(records: Iterable[Recorded], rules: FoldRules) -> History:
    """Fold records, those of one topic and partition in offset order, topics interleaved in any way."""
    history = History()
    done: set[str] = set()
    for topic, partition, offset, event in records:
        if event.group_id in done:
            continue
        group = history.open.get(event.group_id)
        if group is None:
            group = history.open[event.group_id] = GroupFold(event.group_id, event.floor, rules)
        try:
            history.outputs.extend(group.apply(topic, offset, event))
        except FoldError as refusal:
            history.outputs.extend(refusal.outputs)
            history.refused.append((topic, partition, offset, refusal))
        if group.complete:
            done.add(event.group_id)
            del history.open[event.group_id]
    return history


def offline(records: Iterable[Recorded], rules: FoldRules) -> list[Event]:
    """The outputs of a recorded history, each event_id once."""
    return fold_history(records, rules).outputs
