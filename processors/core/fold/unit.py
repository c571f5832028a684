"""The fold of one partition task, shared by all readers of its inputs: the assembler in the stream, replay over
history.

A partition task is partition p of the inputs and outputs. Four questions are answered per record: is its group still
open, is it in the right place, what does its group derive from it, and which of that is new.

Per input topic it commits the low-water mark (the first record that an open group still needs) and, as metadata, what a
restart must know. After a restart the same groups are folded again from the low-water marks; events that the outputs
already contain are not emitted twice.

LowWaterError
├── MigrationNeeded   the commit was made under another fold version or other settings
├── BrokenMetadata    the commit's metadata is not ours: another program uses this consumer group
└── LogTruncated      the log no longer contains what the commit refers to

RefusedRecord         the record decodes but is not folded: the assembler dead-letters it
├── ForeignRun        another run wrote it: only one run per cluster and prefix is allowed
├── KeyMismatch       the record's key is not the group of its event: it may lie in another group's partition
├── WrongTopic        the record does not belong to the topic in which it was found
└── RecordSkipped     an operator requested to skip it (SkipRequested)
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from turnlog.processors.core.errors import FoldDefect, FoldError
from turnlog.processors.core.fold.settlement import with_figures
from turnlog.processors.core.fold_versions import SPINE
from turnlog.schemas import UndecodableRecord
from turnlog.schemas.events import Event, GroupScored, TokenSnapshot, TurnCompleted, TurnTreeAssembled
from turnlog.schemas.topics import TOPIC_OF
from turnlog.schemas.types import Payload

METADATA_LIMIT_BYTES = 4096


class LowWaterError(Exception):
    """Base of the errors above."""


class MigrationNeeded(LowWaterError):
    """The committed open groups belong to another fold than the run recorded: another program commits into its consumer
    group. Remedy: see BrokenMetadata.
    """


class BrokenMetadata(LowWaterError):
    """The commit's metadata is not ours. Remedy: give this run a consumer group of its own ([run] id, [kafka]
    prefix).
    """


class LogTruncated(LowWaterError):
    """The log no longer holds what the commit needs. Remedy: restore the topics from the archive, or start a new run;
    to go on would lose groups silently.
    """


class Fold(Protocol):
    """The state of one group; `GroupFold` implements it."""

    first: dict[str, int]
    """Topic -> first offset that this group still needs."""
    complete: bool
    """True once its last output was emitted: the group may be forgotten."""

    def apply(self, topic: str, offset: int, event: Event) -> list[Event]:
        """Fold one record and return its outputs in order. Raises FoldError if the record must be dead-lettered."""
        ...

    def trees(self) -> frozenset[str]:
        """Return the ids of sessions whose tree this state emitted."""
        ...

    def key(self) -> object:
        """Return a comparable value of the whole state."""
        ...


FoldFactory = Callable[[str, int], Fold]
"""Creates the state of a group without records from (group_id, start offset)."""


@dataclass(frozen=True, slots=True)
class FoldName:
    """Everything that a fold's results depend on besides its inputs."""

    version: str
    settings_sha256: str


@dataclass(frozen=True, slots=True)
class LowWaterMarks:
    """The content of one commit; offsets by topic."""

    low: Mapping[str, int]
    """Input topic -> offset from which to fold."""
    high: Mapping[str, int]
    """Input topic -> offset of the first record that was not folded yet."""
    tree_low: int = 0
    """Offset of the first tree of an open group."""
    score_low: int = 0
    """Offset of the first score of a group that is remembered."""
    horizon: int = 0
    """Position of the session control stream (agent.sessions): groups admitted below it are complete and forgotten."""

    @classmethod
    def start(cls, topics: Iterable[str]) -> LowWaterMarks:
        """Return the marks of a partition task that never committed."""
        zeros = dict.fromkeys(topics, 0)
        return cls(low=zeros, high=zeros)


def encode_marks(marks: LowWaterMarks, fold: FoldName, topic: str) -> str:
    """Encode the commit metadata of one input topic as compact JSON. Raises BrokenMetadata if it exceeds 4,096
    bytes.
    """
    values = {
        "fold": fold.version,
        "settings": fold.settings_sha256,
        "high": marks.high[topic],
        "trees": marks.tree_low,
        "scores": marks.score_low,
        "horizon": marks.horizon,
    }
    text = json.dumps(values, separators=(",", ":"))
    if len(text.encode()) > METADATA_LIMIT_BYTES:
        raise BrokenMetadata(f"commit metadata of {len(text)} bytes: shorten the fold version {fold.version[:40]!r}")
    return text


def decode_marks(commits: Mapping[str, tuple[int, str]], topics: Sequence[str], fold: FoldName) -> LowWaterMarks | None:
    """Return the marks in a partition task's commits, {topic: (offset, metadata)}; None if no topic has a commit.

    Raises BrokenMetadata if the metadata is not ours or incomplete, MigrationNeeded if it is of another fold.
    """
    if not commits:
        return None
    missing = [topic for topic in topics if topic not in commits]
    if missing:
        raise BrokenMetadata(f"{', '.join(missing)} has no commit, {', '.join(commits)} has: they commit together")
    high: dict[str, int] = {}
    shared: set[tuple[int, int, int]] = set()
    for topic in topics:
        values = _values(topic, commits[topic][1])
        _same_fold(values, fold)
        high[topic] = values["high"]
        shared.add((values["trees"], values["scores"], values["horizon"]))
    if len(shared) != 1:
        raise BrokenMetadata(f"the commits of {', '.join(topics)} are not of one transaction: {sorted(shared)}")
    trees, scores, horizon = shared.pop()
    low = {topic: commits[topic][0] for topic in topics}
    return LowWaterMarks(low, high, tree_low=trees, score_low=scores, horizon=horizon)


def committed_version(metadata: str) -> str:
    """Return the fold version of a commit. Raises BrokenMetadata."""
    return str(_values("the input", metadata)["fold"])


def committed_high(metadata: str) -> int:
    """Return the offset of the first input record that was not folded at this commit. Raises BrokenMetadata."""
    return _values("the input", metadata)["high"]


def _values(topic: str, metadata: str) -> dict[str, int]:
    try:
        values: dict[str, int] = json.loads(metadata)
        if {"fold", "settings", "high", "trees", "scores", "horizon"} <= values.keys():
            return values
    except (ValueError, AttributeError):
        pass
    raise BrokenMetadata(f"{topic}: the committed metadata {metadata[:80]!r} was not written by an assembler")


def _same_fold(values: Mapping[str, object], fold: FoldName) -> None:
    for name, ours in (("fold", fold.version), ("settings", fold.settings_sha256)):
        if values[name] != ours:
            what = "fold version" if name == "fold" else "settings_sha256"
            raise MigrationNeeded(
                f"the log was folded with {what} {values[name]}, the run recorded {ours}: give the run a consumer "
                "group of its own ([run] id, and on a shared cluster [kafka] prefix)"
            )


@dataclass(frozen=True, slots=True)
class OpenGroup:
    """A group that is not complete."""

    floor: int
    fold: Fold


@dataclass(slots=True)
class Done:
    """Content of the outputs: session -> offset of its tree, group -> offset of its score (None: not sent yet)."""

    trees: dict[str, int | None] = field(default_factory=dict)
    scores: dict[str, int | None] = field(default_factory=dict)
    """Group -> offset of its score, in order of offset."""
    floors: list[tuple[int, str]] = field(default_factory=list)
    """(start offset, group) of `scores`, as a heap."""

    def score(self, group: str, floor: int, offset: int | None) -> None:
        """Remember a scored group."""
        self.scores[group] = offset
        heapq.heappush(self.floors, (floor, group))

    def forget(self, horizon: int) -> None:
        """Drop the groups admitted below the horizon."""
        while self.floors and self.floors[0][0] < horizon:
            self.scores.pop(heapq.heappop(self.floors)[1], None)


class LowWater:
    """The groups of one partition task and its marks.

    Per record, call `pass_over` or `open_group` and fold. Per transaction, call `note_tree` or `note_score` for each
    output, then `advance` for the marks to commit with it. Nothing may be committed while `refolding`.
    """

    def __init__(
        self, marks: LowWaterMarks, done: Done, factory: FoldFactory, *, spine: str, horizon_records: int
    ) -> None:
        """`horizon_records` is the maximum number of control-stream records between a group's admission and its first
        record.
        """
        self.position: dict[str, int] = dict(marks.low)
        """Topic -> next offset to fold."""
        self.high: dict[str, int] = dict(marks.high)
        """`position` at the last commit."""
        self._refolding = True
        self.open: dict[str, OpenGroup] = {}
        self.late = 0
        """Number of records that arrived after their group was forgotten."""
        self._done = done
        self._factory = factory
        self._spine = spine
        self._horizon = marks.horizon
        self._horizon_records = horizon_records
        self._stale_trees = True
        """True if `done` may hold trees of groups that are not open."""

    @property
    def refolding(self) -> bool:
        """Whether some topic has not yet passed what was folded before the restart. Once it is false, it stays so."""
        if self._refolding:
            self._refolding = any(self.position[topic] < high for topic, high in self.high.items())
        return self._refolding

    def is_repeated(self, topic: str, offset: int) -> bool:
        """Whether a committed transaction already folded the record; if it was rejected, it was dead-lettered then."""
        return offset < self.high[topic]

    def pass_over(self, topic: str, offset: int) -> None:
        """Advance beyond `offset`: this process will not read the record again."""
        self.position[topic] = offset + 1

    def is_done(self, group: str) -> bool:
        """Whether the group's score was emitted."""
        return group in self._done.scores

    def open_group(self, group: str, floor: int) -> Fold | None:
        """Return the group's state, created on its first record; None for a late record, which is counted.

        An unknown group that was admitted below the horizon is complete: it was scored and forgotten.
        """
        found = self.open.get(group)
        if found is None:
            if floor < self._horizon:
                self.late += 1
                return None
            found = self.open[group] = OpenGroup(floor, self._factory(group, floor))
        return found.fold

    def new_tree(self, session: str) -> bool:
        """Return True once per session: its tree must then be sent."""
        if session in self._done.trees:
            return False
        self._done.trees[session] = None
        return True

    def close(self, group: str, floor: int) -> None:
        """Mark a group as complete. Its score, which names the start offset `floor`, must be sent."""
        del self.open[group]
        self._done.score(group, floor, None)
        self._stale_trees = True

    def note_tree(self, session: str, offset: int) -> None:
        """Note a lower bound of the tree's offset in its topic. Trees that are already forgotten are ignored."""
        if session in self._done.trees:
            self._done.trees[session] = offset

    def note_score(self, group: str, offset: int) -> None:
        """Note a lower bound of the score's offset in its topic; scores are sent in the order of `close`. Groups that
        are already forgotten are ignored.
        """
        if group in self._done.scores:
            self._done.scores[group] = offset

    def advance(self, ends: tuple[int, int]) -> LowWaterMarks:
        """Return the current marks; every output must have been sent.

        `ends` holds lower bounds of the offsets of the next tree and the next score. Also forgets everything that a
        restart would not know.
        """
        floors = [group.floor for group in self.open.values()]
        self._horizon = max(self._horizon, min([*floors, self.position[self._spine] - self._horizon_records]))
        self._done.forget(self._horizon)
        if self._stale_trees:
            kept = frozenset[str]().union(*(group.fold.trees() for group in self.open.values()))
            self._done.trees = {session: at for session, at in self._done.trees.items() if session in kept}
            self._stale_trees = False
        self.high = dict(self.position)
        return LowWaterMarks(
            low={topic: self._low(topic) for topic in self.position},
            high=self.high,
            tree_low=min(_sent_offsets(self._done.trees.values()), default=ends[0]),
            score_low=next(iter(_sent_offsets(self._done.scores.values())), ends[1]),
            horizon=self._horizon,
        )

    def _low(self, topic: str) -> int:
        firsts = (group.fold.first.get(topic) for group in self.open.values())
        return min((first for first in firsts if first is not None), default=self.position[topic])


def _sent_offsets(offsets: Iterable[int | None]) -> Iterable[int]:
    for offset in offsets:
        assert offset is not None, "an output was not sent before the marks were taken"
        yield offset


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


@dataclass(frozen=True, slots=True)
class Taken:
    """The result of folding one record."""

    outputs: Sequence[Event] = ()
    """Outputs in order; each is one that the partition task has not emitted yet."""
    refusal: RefusedRecord | FoldError | UndecodableRecord | None = None
    seen: bool = False
    """True if the group fold processed the record (accepted or rejected); False if it was misplaced or late."""
    late: bool = False
    """True if its group was completed and forgotten."""


SEEN = Taken(seen=True)
"""The result of most records, which is created once: they are folded and make nothing due."""


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
        return not self.low_water.is_done(record.key.decode(errors="replace"))

    def take(self, record: InputRecord, event: Event) -> Taken:
        """Fold a record that this fold `wants`. Raises one of DEFECTS if the partition task must stop before it."""
        try:
            check_place(record, event, self._run_id)
        except RefusedRecord as misplaced:
            return Taken(refusal=misplaced)
        group: str = event.group_id  # which is the record's key
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
        return Taken(outputs, refusal, seen=True) if outputs or refusal is not None else SEEN

    def pass_over(self, record: InputRecord) -> None:
        """Advance beyond a record that was folded, or that belongs to no fold."""
        self.low_water.pass_over(record.topic, record.offset)

    def _is_new(self, group: str, output: Event) -> bool:
        if isinstance(output, TurnTreeAssembled):
            return self.low_water.new_tree(output.session_id)
        if isinstance(output, GroupScored):
            self.low_water.close(group, output.floor)
        return True


def check_place(record: InputRecord, event: Event, run_id: str) -> None:
    """Check that a record of any topic is in its place. Raises ForeignRun, KeyMismatch or WrongTopic if it is not."""
    name = type(event).__name__
    topic = TOPIC_OF[name]
    key = topic.key_of(event)
    if key == record.key and topic.name == record.topic and event.run_id == run_id:
        return  # nearly every record: build no message
    where = f"{record.topic}[{record.partition}]@{record.offset}"
    ForeignRun.check(event, run_id, where)
    if topic.name != record.topic:
        raise WrongTopic(f"{where}: {name} belongs to {topic.name}")
    if key != record.key:
        raise KeyMismatch(f"{where}: key {record.key!r}, but the {name} is of {topic.key} {key!r}")
