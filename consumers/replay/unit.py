"""Comparison of one partition, folded again, with what was emitted for it: a symmetric difference, empty if all is
equal.

Emitted records are read as the fold produces outputs to match, so few of either wait. Values beyond HELD_BYTES wait as
hashes, so memory does not grow with the history. Finished groups are forgotten by the assembler's own rule
(`LowWater`). The first difference is explained in words: which field, which token of which turn.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from turnlog.infra.blobs import payload_fields
from turnlog.infra.log import Record
from turnlog.processors.core.fold.erasure import Erasures
from turnlog.processors.core.fold.group import GroupFold
from turnlog.processors.core.fold.unit import Done, InputRecord, LowWaterMarks, Taken, UnitFold
from turnlog.processors.core.methods.rules import FoldRules
from turnlog.schemas import UndecodableRecord
from turnlog.schemas.codec import HEADER, Codec
from turnlog.schemas.events import Event, GroupScored, SegmentSample, TurnTreeAssembled
from turnlog.schemas.topics import INLINE_LIMIT_BYTES
from turnlog.schemas.types import BlobRef, float32s, int32s


def about(event: Event) -> str:
    """Describe an output in words: its type, and its session or group."""
    name = type(event).__name__
    if isinstance(event, SegmentSample):
        return f"{name} of session {event.session_id}, segment {event.segment_index}"
    session = getattr(event, "session_id", None)
    return f"{name} of " + (f"session {session}" if session else f"group {event.group_id}")


def first_difference(emitted: Event, folded: Event) -> str:
    """Describe the first field, in schema order, whose values differ."""
    if type(emitted) is not type(folded):
        return f"a {type(emitted).__name__} as emitted, a {type(folded).__name__} as folded"
    if isinstance(emitted, SegmentSample):
        for name in ("token_ids", "logprobs"):
            if getattr(emitted, name) != getattr(folded, name):
                return _array_difference(name, emitted, folded)
    return _difference(emitted, folded, "") or "its encoding alone"


def _difference(emitted: Any, folded: Any, path: str) -> str | None:
    if emitted == folded and repr(emitted) == repr(folded):  # -0.0 == 0.0, but their encodings differ
        return None
    if dataclasses.is_dataclass(emitted) and type(emitted) is type(folded):
        names = [field.name for field in dataclasses.fields(emitted)]
        pairs = [(f"{path}.{name}" if path else name, getattr(emitted, name), getattr(folded, name)) for name in names]
    elif isinstance(emitted, tuple) and isinstance(folded, tuple) and len(emitted) == len(folded):
        pairs = [(f"{path}[{at}]", one, other) for at, (one, other) in enumerate(zip(emitted, folded, strict=True))]
    elif isinstance(emitted, dict) and isinstance(folded, dict) and list(emitted) == list(folded):
        pairs = [(f"{path}.{key}", emitted[key], folded[key]) for key in emitted]
    elif isinstance(emitted, tuple) and isinstance(folded, tuple):
        return f"{path}: {len(emitted)} entries as emitted, {len(folded)} as folded"
    else:
        return f"{path}: {_shorten_repr(emitted)} as emitted, {_shorten_repr(folded)} as folded"
    return next((words for at, one, other in pairs if (words := _difference(one, other, at)) is not None), None)


def _array_difference(name: str, emitted: SegmentSample, folded: SegmentSample) -> str:
    read: Callable[[bytes], np.ndarray[Any, Any]] = int32s if name == "token_ids" else float32s
    what = "tokens" if name == "token_ids" else "entries"
    payloads = getattr(emitted, name), getattr(folded, name)
    assert all(isinstance(payload, bytes) for payload in payloads), "payloads are inline here"
    ours, theirs = map(read, payloads)
    common = min(len(ours), len(theirs))
    differ = np.flatnonzero(ours[:common].view("<i4") != theirs[:common].view("<i4"))
    if not len(differ):
        return f"{name}: {len(ours)} {what} as emitted, {len(theirs)} as folded; they agree as far as both go"
    at = int(differ[0])
    position = at if name == "token_ids" else _position(folded, at)
    where = f"token {position} ({_where(folded, position)})"
    if name == "logprobs":
        where = f"entry {at}, {where}"
    return f"{name}: {where} is {ours[at]!s} as emitted, {theirs[at]!s} as folded"


def _where(sample: SegmentSample, position: int) -> str:
    """Describe which turn a token belongs to."""
    for span in sample.spans:
        if position < span.start:
            return f"in the prompt of turn {span.turn.index}"
        if position < span.start + span.length:
            return f"token {position - span.start} of the output of turn {span.turn.index}, version {span.version}"
    return "behind the last turn's output"


def _position(sample: SegmentSample, entry: int) -> int:
    """Return the position in the segment of the n-th sampled token."""
    for span in sample.spans:
        if entry < span.length:
            return span.start + entry
        entry -= span.length
    return -1


def _shorten_repr(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


MOST_AHEAD = 10_000
"""Maximum number of emitted records that wait for the fold. Beyond it, none are read until the fold has advanced."""
MOST_WAITING = 200_000
"""Maximum number of fold outputs that wait for their record. Beyond it, the two sides cannot be of the same history."""


HELD_BYTES = 16 << 20
"""Maximum bytes of values that wait unhashed. Hashing a sample on both sides costs a quarter of its fold."""


class Content(NamedTuple):
    """A record's value or its hash."""

    content: bytes
    is_digest: bool

    @property
    def digest(self) -> bytes:
        return self.content if self.is_digest else _digest(self.content)

    def equals(self, other: Content) -> bool:
        """Return whether both stand for the same value."""
        if self.is_digest == other.is_digest:
            return self.content == other.content
        return self.digest == other.digest

    @classmethod
    def from_digest(cls, digest: str) -> Content:
        """Return the content for a hash in hexadecimal, as a saved state stores it."""
        return cls(bytes.fromhex(digest), is_digest=True)


class Folded(NamedTuple):
    """A fold output whose record was not found on the log yet."""

    value: Content
    group_id: str
    about: str


class Emitted(NamedTuple):
    """A record on the log that the fold has not produced yet."""

    value: Content
    topic: str
    offset: int


@dataclass(frozen=True, slots=True)
class Suspect:
    """A record and a fold output with the same event_id but different bytes. They may still be equal up to schema
    version or blob references."""

    event_id: str
    folded: Folded
    topic: str
    offset: int


@dataclass(slots=True)
class ReplayCounts:
    """Counts of records that were compared and equal, and of tokens that were folded."""

    records: int = 0
    samples: int = 0
    tokens: int = 0
    folded_tokens: int = 0
    """Tokens of the samples that the fold produced."""


@dataclass(slots=True)
class UnitState:
    """Everything that the comparison of a partition needs to resume after a kill."""

    marks: LowWaterMarks
    done: Done = field(default_factory=Done)
    outputs: dict[str, int] = field(default_factory=dict)
    """Output topic -> next offset to compare."""
    folded: dict[str, Folded] = field(default_factory=dict)
    emitted: dict[str, Emitted] = field(default_factory=dict)
    counts: ReplayCounts = field(default_factory=ReplayCounts)

    def to_json(self) -> dict[str, Any]:
        """Return the state as plain JSON values."""
        return {
            "marks": dataclasses.asdict(self.marks),
            "trees": list(self.done.trees),
            "scores": [[group, floor] for floor, group in self.done.floors],
            "outputs": self.outputs,
            "folded": {key: [found.value.digest.hex(), *found[1:]] for key, found in self.folded.items()},
            "emitted": {key: [found.value.digest.hex(), *found[1:]] for key, found in self.emitted.items()},
            "counts": dataclasses.asdict(self.counts),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> UnitState:
        """The inverse of `to_json`."""
        done = Done(trees=dict.fromkeys(value["trees"], 0))
        for group, floor in value["scores"]:
            done.score(group, floor, 0)
        return cls(
            marks=LowWaterMarks(**value["marks"]),
            done=done,
            outputs=value["outputs"],
            folded={key: Folded(Content.from_digest(v[0]), *v[1:]) for key, v in value["folded"].items()},
            emitted={key: Emitted(Content.from_digest(v[0]), *v[1:]) for key, v in value["emitted"].items()},
            counts=ReplayCounts(**value["counts"]),
        )


class HistoryFold(UnitFold):
    """The fold of a partition without commits: its outputs count as written as soon as they are produced."""

    def __init__(
        self,
        state: UnitState,
        rules: FoldRules,
        group_fold: type[GroupFold] = GroupFold,
        erasures: Erasures = MappingProxyType({}),
    ) -> None:
        """`erasures` are the sessions of the partition whose content was erased."""

        def factory(group_id: str, floor: int) -> GroupFold:
            return group_fold(group_id, floor, rules, erasures)

        super().__init__(state.marks, state.done, factory, run_id=rules.run_id, horizon_records=rules.horizon_records)

    def take(self, record: InputRecord, event: Event) -> Taken:
        """Fold a record, and note its outputs as written. See UnitFold."""
        taken = super().take(record, event)
        for output in taken.outputs:
            if isinstance(output, TurnTreeAssembled):
                self.low_water.note_tree(output.session_id, 0)
            elif isinstance(output, GroupScored):
                self.low_water.note_score(output.group_id, 0)
        return taken

    @property
    def position(self) -> dict[str, int]:
        """Next offset to fold, by topic."""
        return self.low_water.position

    def advance(self) -> LowWaterMarks | None:
        """Forget finished groups and return the marks where a successor starts. Return None while records below the
        last marks are being folded again."""
        return None if self.low_water.refolding else self.low_water.advance((0, 0))


class OutputMatcher:
    """Matching of fold outputs with emitted records, whichever of a pair comes first."""

    def __init__(self, state: UnitState, codec: Codec, run_id: str, *, held_bytes: int = HELD_BYTES) -> None:
        self.state = state
        self._codec = codec
        self._run_id = run_id
        self._room = held_bytes

    def match_output(self, output: Event) -> Suspect | None:
        """Match a fold output with its record. Return both if their bytes differ."""
        state = self.state
        value = encode_output(self._codec, output)
        state.counts.folded_tokens += tokens_of(output)
        theirs = state.emitted.pop(output.event_id, None)
        if theirs is None:
            state.folded[output.event_id] = Folded(self._waiting(value), output.group_id, about(output))
            return None
        self._waits_no_more(theirs.value)
        return self._compare_pair(
            output.event_id, Folded(Content(value, is_digest=False), output.group_id, about(output)), theirs
        )

    def match_record(self, record: Record, *, keep: bool) -> Suspect | None:
        """Match an emitted record with its fold output. Return both if their bytes differ. `keep`: store the record,
        because its output may still come. Raises UndecodableRecord."""
        state = self.state
        event_id, run_id = lead(record.value)
        if run_id != self._run_id:
            return None
        mine = state.folded.pop(event_id, None)
        if mine is None:
            if keep:
                theirs = Emitted(self._waiting(record.value), record.topic, record.offset)
                state.emitted[event_id + "!" * (event_id in state.emitted)] = theirs
            return None
        self._waits_no_more(mine.value)
        return self._compare_pair(
            event_id, mine, Emitted(Content(record.value, is_digest=False), record.topic, record.offset)
        )

    def _waiting(self, value: bytes) -> Content:
        if len(value) > self._room:
            return Content(_digest(value), is_digest=True)
        self._room -= len(value)
        return Content(value, is_digest=False)

    def _waits_no_more(self, value: Content) -> None:
        if not value.is_digest:
            self._room += len(value.content)

    def same(self, folded: Folded, tokens: int = 0) -> None:
        """Count a pair that is equal."""
        self.state.counts.records += 1
        if folded.about.startswith(SegmentSample.__name__):
            self.state.counts.samples += 1
        self.state.counts.tokens += tokens

    @property
    def wants_records(self) -> bool:
        """True if outputs wait for their records, and fewer than MOST_AHEAD records wait for the fold."""
        return bool(self.state.folded) and len(self.state.emitted) < MOST_AHEAD

    @property
    def has_excess_outputs(self) -> bool:
        """True if more fold outputs are unmatched than any order of topics explains."""
        return len(self.state.folded) > MOST_WAITING

    def _compare_pair(self, event_id: str, mine: Folded, theirs: Emitted) -> Suspect | None:
        if mine.value.equals(theirs.value):
            self.same(mine)
            return None
        return Suspect(event_id, mine, theirs.topic, theirs.offset)


def tokens_of(output: Event) -> int:
    """Return the number of tokens of a sample; 0 for other events."""
    return (
        len(output.token_ids) // 4 if isinstance(output, SegmentSample) and isinstance(output.token_ids, bytes) else 0
    )


def digest_of(codec: Codec, event: Event) -> bytes:
    """Return the hash of the record value as the assembler would write it: payloads above the inline limit are
    references."""
    return _digest(encode_output(codec, event))


def encode_output(codec: Codec, event: Event) -> bytes:
    """Return the value of an output's record. Content that stands for erased content is not encrypted, since its key is
    gone: such a value is compared after decoding."""
    return codec.encode(as_written(event), sealed=not codec.is_erased(event))


def as_written(event: Event) -> Event:
    """Return the event with large payloads replaced by references, without storing them (see `blobs.externalized`)."""
    large = {
        name: BlobRef(hashlib.sha256(value).hexdigest(), len(value))
        for name in payload_fields(event.__class__)
        if isinstance(value := getattr(event, name), bytes) and len(value) > INLINE_LIMIT_BYTES
    }
    return dataclasses.replace(event, **large) if large else event


def lead(value: bytes) -> tuple[str, str]:
    """Return (event_id, run_id), the first two fields of every record, without decoding the rest. Raises
    UndecodableRecord."""
    try:
        event_id, at = _text(value, HEADER.size)
        return event_id, _text(value, at)[0]
    except (IndexError, ValueError) as error:
        raise UndecodableRecord(f"starts with {value[:16].hex()}: no event_id and run_id") from error


def _text(value: bytes, at: int) -> tuple[str, int]:
    size = shift = 0
    while True:
        byte = value[at]
        at += 1
        size |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            break
    end = at + (size >> 1)
    if size & 1 or end > len(value):
        raise ValueError("a string's length")
    return value[at:end].decode(), end


def _digest(value: bytes) -> bytes:
    return hashlib.blake2b(value, digest_size=16).digest()
