"""Which offsets a fold of the log may forget: the bookkeeping of one unit, without I/O.

A unit folds partition p of its input topics into groups. It commits, per input topic, the low-water mark (the first
record that an open group still needs) and, as metadata, what a restart must know. After a restart the same groups are
folded again from the low-water marks; what the outputs already hold does not come out twice.

LowWaterError
├── MigrationNeeded    the commit was made by another fold version or other settings
├── BrokenMetadata     the commit's metadata is not ours: another program uses this consumer group
└── LogTruncated       the log no longer holds what the commit points at
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from turnlog.schemas.events import Event

METADATA_LIMIT_BYTES = 4096


class LowWaterError(Exception):
    """Base of the tree above."""


class MigrationNeeded(LowWaterError):
    """Open groups belong to another fold than the run recorded: something else commits into its consumer group.
    Remedy: as of BrokenMetadata."""


class BrokenMetadata(LowWaterError):
    """Remedy: give this run a consumer group of its own ([run] id, [kafka] prefix)."""


class LogTruncated(LowWaterError):
    """Remedy: restore the topics from the archive, or start a new run; going on would lose groups silently."""


class Fold(Protocol):
    """The state of one group; `GroupFold` is the real one."""

    first: dict[str, int]
    """Topic -> first offset that this group still needs."""
    complete: bool
    """Its last output is out: the group may be forgotten."""

    def apply(self, topic: str, offset: int, event: Event) -> list[Event]:
        """Fold one record; outputs in order. Raises FoldError to have the record parked."""
        ...

    def trees(self) -> frozenset[str]:
        """Session ids whose tree came out of this state."""
        ...

    def key(self) -> object:
        """A comparable value of the whole state."""
        ...


FoldFactory = Callable[[str, int], Fold]
"""(group_id, floor) -> a group without records."""


@dataclass(frozen=True, slots=True)
class FoldName:
    """What a fold's results depend on besides its inputs."""

    version: str
    settings_sha256: str


@dataclass(frozen=True, slots=True)
class Marks:
    """What one commit says. Offsets by topic."""

    low: Mapping[str, int]
    """Inputs: where to begin to fold."""
    high: Mapping[str, int]
    """Inputs: the first record that was not folded yet."""
    tree_low: int = 0
    """First tree of a group that is open."""
    score_low: int = 0
    """First score of a group that is remembered."""
    horizon: int = 0
    """A position of the spine: groups admitted below it are over, and forgotten."""

    @classmethod
    def start(cls, topics: Iterable[str]) -> Marks:
        """Of a unit that never committed."""
        zeros = dict.fromkeys(topics, 0)
        return cls(low=zeros, high=zeros)


def encode_marks(marks: Marks, fold: FoldName, topic: str) -> str:
    """Commit metadata of one input topic: compact JSON, at most 4,096 bytes."""
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


def decode_marks(commits: Mapping[str, tuple[int, str]], topics: Sequence[str], fold: FoldName) -> Marks | None:
    """The marks in a unit's commits, {topic: (offset, metadata)}; None when there is none on any topic.

    Raises BrokenMetadata, MigrationNeeded.
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
    return Marks(low, high, tree_low=trees, score_low=scores, horizon=horizon)


def committed_version(metadata: str) -> str:
    """The fold version of this commit. Raises BrokenMetadata."""
    return str(_values("the input", metadata)["fold"])


def committed_high(metadata: str) -> int:
    """The first input record that was not folded at this commit. Raises BrokenMetadata."""
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
    """What the outputs hold already: session -> offset of its tree, group -> offset of its score (None: unsent)."""

    trees: dict[str, int | None] = field(default_factory=dict)
    scores: dict[str, int | None] = field(default_factory=dict)
    """In order of offset."""
    floors: list[tuple[int, str]] = field(default_factory=list)
    """(floor, group) of `scores`, as a heap."""

    def score(self, group: str, floor: int, offset: int | None) -> None:
        """Remember a group."""
        self.scores[group] = offset
        heapq.heappush(self.floors, (floor, group))

    def forget(self, horizon: int) -> None:
        """Drop the groups admitted below the horizon."""
        while self.floors and self.floors[0][0] < horizon:
            self.scores.pop(heapq.heappop(self.floors)[1], None)


class LowWater:
    """The groups of one unit and its marks.

    Per record: `pass_over` or `open_group`, then the caller folds; per transaction: `note_tree` or `note_score` for
    each output, then `advance` for the marks to commit with it. Nothing may be committed while `refolding`.
    """

    def __init__(self, marks: Marks, done: Done, factory: FoldFactory, *, spine: str, horizon_records: int) -> None:
        """`horizon_records`: spine records between a group's admission and its first record, at most."""
        self.position: dict[str, int] = dict(marks.low)
        """Next offset to fold, by topic."""
        self.high: dict[str, int] = dict(marks.high)
        """`position` at the last commit."""
        self.open: dict[str, OpenGroup] = {}
        self.late = 0
        """Records that came after their group was forgotten."""
        self._done = done
        self._factory = factory
        self._spine = spine
        self._horizon = marks.horizon
        self._horizon_records = horizon_records
        self._stale_trees = True
        """`done` may hold trees of groups that are not open."""

    @property
    def refolding(self) -> bool:
        """Some topic has not passed what was folded before."""
        return any(self.position[topic] < high for topic, high in self.high.items())

    def repeated(self, topic: str, offset: int) -> bool:
        """The record was folded by a committed transaction: what was refused then was parked then."""
        return offset < self.high[topic]

    def pass_over(self, topic: str, offset: int) -> None:
        """Nothing below `offset` + 1 is to be read again by this process."""
        self.position[topic] = offset + 1

    def is_done(self, group: str) -> bool:
        """The group's score is out."""
        return group in self._done.scores

    def open_group(self, group: str, floor: int) -> Fold | None:
        """The group's state, made on its first record; None for a late record, which is counted.

        A group that is unknown and was admitted below the horizon is over: it was scored and forgotten.
        """
        found = self.open.get(group)
        if found is None:
            if floor < self._horizon:
                self.late += 1
                return None
            found = self.open[group] = OpenGroup(floor, self._factory(group, floor))
        return found.fold

    def new_tree(self, session: str) -> bool:
        """True once per session: its tree must be sent."""
        if session in self._done.trees:
            return False
        self._done.trees[session] = None
        return True

    def close(self, group: str, floor: int) -> None:
        """The group is complete; its score, which says `floor`, must be sent."""
        del self.open[group]
        self._done.score(group, floor, None)
        self._stale_trees = True

    def note_tree(self, session: str, offset: int) -> None:
        """Where the tree stands in its topic, at least. Nothing is noted for one that is forgotten."""
        if session in self._done.trees:
            self._done.trees[session] = offset

    def note_score(self, group: str, offset: int) -> None:
        """Where the score stands in its topic, at least; scores stand in the order of `close`. Nothing is noted for a
        group that is forgotten."""
        if group in self._done.scores:
            self._done.scores[group] = offset

    def advance(self, ends: tuple[int, int]) -> Marks:
        """The marks as of now, when every output was sent; `ends`: where the next tree and the next score will stand,
        at least. Forgets what a restart would not be told."""
        floors = [group.floor for group in self.open.values()]
        self._horizon = max(self._horizon, min([*floors, self.position[self._spine] - self._horizon_records]))
        self._done.forget(self._horizon)
        if self._stale_trees:
            kept = frozenset[str]().union(*(group.fold.trees() for group in self.open.values()))
            self._done.trees = {session: at for session, at in self._done.trees.items() if session in kept}
            self._stale_trees = False
        self.high = dict(self.position)
        return Marks(
            low={topic: self._low(topic) for topic in self.position},
            high=self.high,
            tree_low=min(_known(self._done.trees.values()), default=ends[0]),
            score_low=next(iter(_known(self._done.scores.values())), ends[1]),
            horizon=self._horizon,
        )

    def _low(self, topic: str) -> int:
        firsts = (group.fold.first.get(topic) for group in self.open.values())
        return min((first for first in firsts if first is not None), default=self.position[topic])


def _known(offsets: Iterable[int | None]) -> Iterable[int]:
    for offset in offsets:
        assert offset is not None, "an output was not sent before the marks were taken"
        yield offset
