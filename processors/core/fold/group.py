"""The fold of one group: agent.sessions, agent.turns and agent.token-snapshots to trees, samples and a score.

agent.sessions, in offset order, decides; the other topics supply data. Every interleaving of the topics therefore gives
the same outputs, and repeated records change nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from turnlog.processors.core.cheating.actions import TurnText, turn_text
from turnlog.processors.core.errors import FoldError, MisplacedRecord
from turnlog.processors.core.fold.erasure import Erasures
from turnlog.processors.core.fold.flags import flags
from turnlog.processors.core.fold.session import SessionRecords, SessionTree, assemble, named_turns, tree_event
from turnlog.processors.core.fold.settlement import score
from turnlog.processors.core.fold.spine import ControlStreamFold, SessionFoldState
from turnlog.processors.core.messages import Dialogues
from turnlog.processors.core.methods.rules import FoldRules
from turnlog.processors.core.turns import TurnKey, key_of
from turnlog.schemas.content import is_erased
from turnlog.schemas.events import Event, TokenSnapshot, TurnCompleted
from turnlog.schemas.topics import SESSIONS, SNAPSHOTS, TURNS

Need = tuple[str, TurnKey]
"""(topic, turn) of a record that a settled session waits for."""
DATA: dict[str, type] = {TURNS.name: TurnCompleted, SNAPSHOTS.name: TokenSnapshot}
"""Topic -> its kind of record, for the topics that supply data."""


class GroupFold:
    """The state of one group. Payloads must be inline: the role fetches blobs before it folds."""

    def __init__(self, group_id: str, floor: int, rules: FoldRules, erasures: Erasures = MappingProxyType({})) -> None:
        """`erasures` is for the fold of a history some of whose content was erased since."""
        self.group_id = group_id
        self.floor = floor
        self.first: dict[str, int] = {}
        """Topic -> offset of the group's first record in it, from which a refold must start."""
        self.complete = False
        """True once GroupScored was emitted; the group may be forgotten."""
        self._rules = rules
        self._erasures = erasures
        self._last: dict[str, int] = {}
        self._spine = ControlStreamFold(rules.version)
        self._records: dict[str, SessionRecords] = {}
        self._listens = rules.cutting.needs_messages
        self._dialogues: dict[str, Dialogues] = {}
        """Dialogues by session, if the trajectory rule needs messages."""
        self._detects = bool(rules.detectors)
        self._texts: dict[str, dict[TurnKey, TurnText]] = {}
        """Messages of turns by session, if detectors of cheating exclude."""
        self._waiting: dict[str, set[Need]] = {}
        """Settled session -> records that it still needs; in order of settlement."""
        self._trees: dict[str, SessionTree] = {}

    def apply(self, topic: str, offset: int, event: Event) -> list[Event]:
        """Fold one record and return the events that became due, in order.

        The outputs are a TurnTreeAssembled once a session is settled and all records that it needs have been folded,
        and, once per group, its SegmentSamples and GroupScored: when the group is settled and every session that
        settled before it (or that the reaper's close names) has its records. Records of one topic must come in offset
        order; a repeated record is ignored. Raises FoldError if the record is rejected: dead-letter it and emit
        `error.outputs` in its place; the state is then as if the record had been folded as rejected. Raises FoldDefect
        if the partition task must stop.
        """
        if self.complete or offset <= self._last.get(topic, -1):
            return []
        self._last[topic] = offset
        if topic not in self.first:
            self.first[topic] = offset
        try:
            self._fold(topic, offset, event)
        except FoldError as refusal:
            refusal.outputs = self._due()
            raise
        return self._due() if self._waiting or self._spine.members is not None else []

    def trees(self) -> frozenset[str]:
        """Return the sessions whose TurnTreeAssembled was emitted."""
        return frozenset(self._trees)

    @property
    def settled(self) -> bool:
        """Whether the group is settled: its members are final."""
        return self._spine.members is not None

    def session(self, session_id: str) -> SessionFoldState | None:
        """Return the state of a session in the control stream, or None if the stream does not mention it."""
        return self._spine.sessions.get(session_id)

    def tree(self, session_id: str) -> SessionTree | None:
        """Return the tree of a session, or None while it is not assembled."""
        return self._trees.get(session_id)

    def key(self) -> object:
        """Return a canonical, comparable value of the whole state."""
        return (
            self.group_id, self.floor, tuple(sorted(self.first.items())), tuple(sorted(self._last.items())),
            self._spine.key(), tuple(sorted((session, own.key()) for session, own in self._records.items())),
            tuple(sorted(self._trees)), self.complete,
        )  # fmt: skip

    def _fold(self, topic: str, offset: int, event: Event) -> None:
        if topic == SESSIONS.name:
            self._fold_spine(offset, event)
            return
        kind = type(event)
        if kind is not DATA.get(topic):
            raise MisplacedRecord(f"{topic} offset {offset}", f"holds a {kind.__name__}", "write it to its topic")
        records = self._of(event.session_id)
        if self._detects and kind is TurnCompleted:
            self._texts.setdefault(event.session_id, {}).setdefault(key_of(event.turn), turn_text(event))
        try:
            if kind is TokenSnapshot:
                records.add_snapshot(offset, event)
            elif self._listens:
                self._add_heard_turn(records, event)
            else:
                records.add_turn(event)
        finally:
            if self._waiting:
                self._got(topic, event)

    def _fold_spine(self, offset: int, event: Event) -> None:
        known = len(self._spine.settled)
        try:
            self._spine.fold(offset, event)
        finally:
            for session_id in self._spine.settled[known:]:
                self._waiting[session_id] = self._needs(session_id)

    def _needs(self, session_id: str) -> set[Need]:
        records, turns = self._of(session_id), named_turns(self._spine.sessions[session_id])
        named = [key_of(turn) for turn in turns]
        completed = {(TURNS.name, turn) for turn in named if turn not in records.kinships}
        return completed | {(SNAPSHOTS.name, turn) for turn in named if turn not in records.snapshots}

    def _of(self, session_id: str) -> SessionRecords:
        records = self._records.get(session_id)
        if records is None:
            recorded = self._erasures.get(session_id)
            refused = frozenset(map(key_of, recorded.refused_turns)) if recorded is not None else frozenset()
            records = self._records[session_id] = SessionRecords(refused)
        return records

    def _add_heard_turn(self, records: SessionRecords, event: TurnCompleted) -> None:
        """Fold the conversation data of a turn and its messages. If either is rejected, the whole turn is."""
        turn = key_of(event.turn)
        known = turn in records.kinships
        records.add_turn(event)
        if not known and not is_erased(event.response):
            try:
                self._dialogues.setdefault(event.session_id, Dialogues()).add(event)
            except FoldError:
                records.kinships[turn] = None
                raise

    def _got(self, topic: str, event: TurnCompleted | TokenSnapshot) -> None:
        if event.session_id in self._waiting:
            self._waiting[event.session_id].discard((topic, key_of(event.turn)))

    def _due(self) -> list[Event]:
        """Emit every tree whose records are complete, then the score if nothing is missing."""
        outputs: list[Event] = []
        if self._spine.named_by_reaper is not None:
            self._waiting = {s: needs for s, needs in self._waiting.items() if s in self._spine.named_by_reaper}
        for session_id in [session for session, needs in self._waiting.items() if not needs]:
            del self._waiting[session_id]
            dialogues = self._dialogues.get(session_id)
            session, records = self._spine.sessions[session_id], self._of(session_id)
            tree = assemble(session, records, self._rules, dialogues, self._erasures)
            if self._detects:
                texts = self._texts.pop(session_id, {})
                recorded = None if not records.erased or tree.refused else self._erasures[session_id].flags
                tree = replace(tree, flags=flags(tree, texts, self._rules) if recorded is None else recorded)
            self._trees[session_id] = tree
            outputs.append(tree_event(self.group_id, tree, self._rules))
        if self._spine.members is not None and not self._waiting:
            named = self._spine.named_by_reaper
            trees = {s: tree for s, tree in self._trees.items() if named is None or s in named}
            outputs += score(self.group_id, self._floor(), self._spine, self._records, trees, self._rules)
            self.complete = True
        return outputs

    def _floor(self) -> int:
        """Return the start offset named by the first SessionStarted, so that the score does not depend on which topic
        is read first.
        """
        return self._spine.task.floor if self._spine.task else self.floor


Recorded = tuple[str, int, int, Event]
"""(topic, partition, offset, event); payloads are inline."""


@dataclass(frozen=True, slots=True)
class FoldedHistory:
    """The result of folding a recorded history."""

    outputs: list[Event] = field(default_factory=list)
    """Each event_id once; group by group in order of completion if the records of a group are adjacent."""
    refused: list[tuple[str, int, int, FoldError]] = field(default_factory=list)
    """(topic, partition, offset, error) of records that a stream would have dead-lettered."""
    open: dict[str, GroupFold] = field(default_factory=dict)
    """Groups that the history does not complete."""


def fold_history(records: Iterable[Recorded], rules: FoldRules) -> FoldedHistory:
    """Fold records: those of one topic and partition in offset order, topics interleaved in any way."""
    history = FoldedHistory()
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
    """Return the outputs of a recorded history, each event_id once."""
    return fold_history(records, rules).outputs
