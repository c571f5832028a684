"""The disposition of each token of a session, and the chain of records that decided it.

The index names the records. Ids and log-probs are read from them: from topics or, if those were pruned, from the
archive. Masks are computed again by the code of the fold and the batcher (processors/core), so that the tokens of a
session, counted by reason, equal its token accounting.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from turnlog.consumers.index import RecordGone
from turnlog.consumers.index.reader import Index, Row, SessionView, where_of
from turnlog.consumers.index.schema import place_of, standing
from turnlog.consumers.replay.source import recorded_run
from turnlog.infra.archive import NoArchive
from turnlog.infra.blobs import inlined
from turnlog.infra.event_log import EventLog
from turnlog.infra.history import archive_role
from turnlog.infra.log import Log, Partition, Record
from turnlog.infra.roles.role import Role
from turnlog.processors.core.batches.draws import DrawRules, PlacedSample, trim
from turnlog.processors.core.errors import FoldError
from turnlog.processors.core.fold.session import WHOLE, SessionRecords, SessionTree, assemble, named_turns
from turnlog.processors.core.fold.settlement import untrained_reason
from turnlog.processors.core.fold.spine import ControlStreamFold, SessionFoldState
from turnlog.processors.core.messages import Dialogues
from turnlog.processors.core.methods.rules import FoldRules
from turnlog.processors.core.turns import TurnKey, TurnTokenDelta, key_of
from turnlog.processors.core.views.progress import recorded_version
from turnlog.schemas.content import is_erased
from turnlog.schemas.events import Event, MaskReason, SegmentSample, SessionErased, TokenSnapshot, TurnCompleted
from turnlog.schemas.types import float32s, int32s

POLL_RECORDS = 100
NEAR = 200
"""Maximum gap in offsets that is read over; larger gaps are skipped by a seek."""
TRAINED = ""
"""Stands in place of a mask reason for tokens that were trained."""


@dataclass(frozen=True, slots=True, eq=False)
class TurnTokens:
    """Tokens of one turn. Arrays have one entry per output token unless stated otherwise."""

    turn: TurnKey
    """(epoch, index) of the turn."""
    place: int
    """Place of its snapshot."""
    context: int
    """Number of prompt tokens that its storage parent already holds."""
    delta: NDArray[np.int32]
    """Prompt tokens after those of the storage parent."""
    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    reasons: tuple[str, ...]
    """Mask reason of each token; "" if it was trained."""
    segment: int | None
    """Index of the segment that trains the turn."""
    sample_id: str | None
    positions: tuple[int, ...]
    """Position of each token in the row of its sample; empty if no sample holds them."""
    advantage: float | None
    batch: int | None
    step: int | None
    temperature: float
    logprob_kind: str

    def body(self) -> dict[str, Any]:
        """Return the tokens as a JSON object."""
        return {
            "turn": list(self.turn), "at": where_of(self.place), "context": self.context, "delta": self.delta.tolist(),
            "ids": self.ids.tolist(), "logprobs": [float(f"{each:.6g}") for each in self.logprobs],
            "versions": self.versions.tolist(), "reasons": list(self.reasons), "segment": self.segment,
            "sample_id": self.sample_id, "advantage": self.advantage, "batch": self.batch, "step": self.step,
            "temperature": self.temperature, "logprob_kind": self.logprob_kind,
        }  # fmt: skip


async def events_at(role: Role, places: Iterable[int]) -> dict[int, Event]:
    """Return the events at places, with payloads fetched. Raises RecordGone, BlobMissing, LogError, ArchiveError."""
    wanted: dict[Partition, list[int]] = {}
    for place in sorted(set(places)):
        partition, offset = standing(place)
        wanted.setdefault(partition, []).append(offset)
    if not wanted:
        return {}
    starts = await role.log.start_offsets(list(wanted))
    live = {place: [at for at in offsets if at >= starts[place]] for place, offsets in wanted.items()}
    pruned = {place: [at for at in offsets if at < starts[place]] for place, offsets in wanted.items()}
    found = await _read(role.log, role.events, live)
    if any(pruned.values()):
        try:
            archived = await archive_role(role)
        except NoArchive as error:
            raise RecordGone(f"{_first_position(pruned)} is pruned from its topic: {error}") from error
        found |= await _read(archived.log, archived.events, pruned)
    return {place: await inlined(event, role.blobs) for place, event in found.items()}


async def _read(log: Log, events: EventLog, wanted: Mapping[Partition, list[int]]) -> dict[int, Event]:
    ends = await log.end_offsets([place for place, offsets in wanted.items() if offsets])
    found: dict[int, Event] = {}
    async with log.reader() as reader:
        for place, offsets in wanted.items():
            left = deque(offsets)
            if left:
                reader.assign({place: left[0]})
            while left:
                if left[0] >= ends[place] or reader.position(place) > left[0]:
                    raise RecordGone(f"{place.topic}[{place.number}]@{left[0]} is not on the log")
                if left[0] - reader.position(place) > NEAR:
                    reader.seek(place, left[0])
                for record in await reader.poll(max_records=POLL_RECORDS):
                    if left and record.offset == left[0]:
                        found[place_of(record.topic, record.partition, record.offset)] = await events.decode(record)
                        left.popleft()
    return found


def _first_position(wanted: Mapping[Partition, list[int]]) -> str:
    place, offsets = next((place, offsets) for place, offsets in wanted.items() if offsets)
    return f"{place.topic}[{place.number}]@{offsets[0]}"


class _FoldedSession:
    """Records of one session and its group, folded."""

    def __init__(self, view: SessionView, rules: FoldRules, draw_rules: DrawRules) -> None:
        self.view = view
        self.rules = rules
        self.draw_rules = draw_rules
        self.records = SessionRecords()
        self.snapshots: dict[TurnKey, tuple[int, TokenSnapshot]] = {}
        self.samples: list[tuple[int, SegmentSample]] = []
        self.dialogues: Dialogues | None = Dialogues() if rules.cutting.needs_messages else None
        self.spine = ControlStreamFold(rules.version)
        self.erasures: dict[str, SessionErased] = {}

    def take(self, place: int, event: Event) -> None:
        """Fold a record. Records of one topic must come in offset order; those that the fold rejects stay rejected."""
        with contextlib.suppress(FoldError):
            match event:
                case TokenSnapshot():
                    self.snapshots[key_of(event.turn)] = place, event
                    self.records.add_snapshot(standing(place)[1], event)
                case TurnCompleted():
                    self.records.add_turn(event)
                    if self.dialogues is not None and not is_erased(event.response):
                        self.dialogues.add(event)
                case SegmentSample():
                    self.samples.append((place, event))
                case _:
                    if isinstance(event, SessionErased) and event.turns:
                        self.erasures.setdefault(event.session_id, event)
                    self.spine.fold(standing(place)[1], event)

    def session(self) -> SessionFoldState | None:
        """Return the state of the session in the session control stream."""
        return self.spine.sessions.get(self.view.row.session_id)

    def tree(self) -> SessionTree | None:
        """Assemble the session's tree. Return None if its tree is not on the log."""
        session = self.session()
        if self.view.tree is None or session is None or not session.settled:
            return None
        return assemble(session, self.records, self.rules, self.dialogues, self.erasures)


async def session_events(role: Role, view: SessionView) -> dict[int, Event]:
    """Return the turns, snapshots and samples of a session by place. Raises what `events_at` raises."""
    return await events_at(role, (row["place"] for row in (*view.turns, *view.snapshots, *view.samples)))


async def tokens(
    role: Role, index: Index, view: SessionView, found: Mapping[int, Event] | None = None
) -> list[TurnTokens]:
    """Return every turn of a session that has a snapshot, in log order. `found` are its `session_events`, if they were
    read already. Raises RecordGone, NothingToReplay, and what `events_at` raises."""
    run = await recorded_run(role)
    told = _FoldedSession(view, run.rules(), run.draw_rules())
    group = view.row.group_id
    for row in index.rows(f"{STANDING} WHERE group_id = ? ORDER BY place", group):
        place, offset = standing(row["place"])
        record = Record(place.topic, place.number, offset, group.encode(), row["value"], (), row["time_ms"])
        told.take(row["place"], await role.events.decode(record))
    found = await session_events(role, view) if found is None else found
    for at in sorted(found):
        told.take(at, found[at])
    return list(_tokens(told, _end(index, told)))


STANDING = "SELECT place, time_ms, value FROM session_events_records"


def _end(index: Index, told: _FoldedSession) -> int:
    """Return the place of the last snapshot that a tree of the session's group needs."""
    group = told.view.row.group_id
    assembled = {row["session_id"] for row in index.rows("SELECT session_id FROM trees WHERE group_id = ?", group)}
    needed = {
        (name, turn.epoch, turn.index)
        for name, session in told.spine.sessions.items()
        if name in assembled
        for turn in named_turns(session)
    }
    places = [0]
    for name in assembled:
        found = index.rows("SELECT epoch, turn_index, place FROM snapshots WHERE session_id = ?", name)
        places += [row["place"] for row in found if (name, row["epoch"], row["turn_index"]) in needed]
    return max(places)


def _tokens(told: _FoldedSession, end: int) -> Iterator[TurnTokens]:
    tree = told.tree()
    named = {} if tree is None else {key_of(turn.id): order for order, turn in enumerate(tree.turns)}
    drawn = dict(_sample_turns(told))
    steps = {row["batch_index"]: row["step"] for row in told.view.batch_rows}
    for key, (place, snapshot) in told.snapshots.items():
        assert isinstance(snapshot.output_ids, bytes)
        assert isinstance(snapshot.delta_ids, bytes)
        assert isinstance(snapshot.output_logprobs, bytes)
        ids = int32s(snapshot.output_ids)
        whole = _of_turn(told, tree, named, key, place, end)
        became = drawn.get(key) if whole is None else None
        if became is None:
            became = _Became((whole or MaskReason.unused.value,) * len(ids))
        spans = [(span.version, span.length) for span in snapshot.version_spans]
        yield TurnTokens(
            key, place, snapshot.base_len, int32s(snapshot.delta_ids), ids, float32s(snapshot.output_logprobs),
            np.repeat(np.array([v for v, _ in spans], "<i4"), [n for _, n in spans]), became.reasons, became.segment,
            became.sample_id, became.positions, became.advantage, became.batch, steps.get(became.batch),
            snapshot.temperature, snapshot.logprob_kind,
        )  # fmt: skip


def _of_turn(
    told: _FoldedSession, tree: SessionTree | None, named: Mapping[TurnKey, int], key: TurnKey, place: int, end: int
) -> str | None:
    """Return why no token of a turn trains, or None if its sample and its batch decide. The checks are in the order of
    the token accounting."""
    score, view = told.view.score, told.view
    if score is None:
        return MaskReason.unused.value
    if place > end:
        return MaskReason.late.value
    if view.row.excluded == MaskReason.erased.value:
        return MaskReason.erased.value
    if score["status"] != "trained":
        return MaskReason.discarded_group.value
    if tree is None or view.row.fate == "not_member":
        return MaskReason.late.value if tree is None else MaskReason.excluded_outcome.value
    if tree.refused:
        return MaskReason.refused.value
    if view.row.excluded is not None:
        flagged = view.row.excluded == MaskReason.flagged.value
        return (MaskReason.flagged if flagged else MaskReason.excluded_outcome).value
    if key in named:
        reason = tree.masked.get(named[key])
        if reason is None and tree.roles != WHOLE:
            reason = _of_player(told, tree.role_of(named[key]))
        return None if reason is None else reason.value
    if not isinstance(tree.records.snapshots.get(key), TurnTokenDelta):
        return MaskReason.refused.value
    assert tree.session.finish is not None
    undelivered = {key_of(turn) for turn in tree.session.finish.undelivered}
    return (MaskReason.undelivered if key in undelivered else MaskReason.not_named).value


def _of_player(told: _FoldedSession, role: str) -> MaskReason | None:
    """Return why a player of a session that trains does not, or None if it does."""
    assert told.view.score is not None
    for member in orjson.loads(told.view.score["rollouts"]):
        for player in member.get("players", ()) if member["session_id"] == told.view.row.session_id else ():
            if player["player"] == role and player["advantage"] is None:
                return untrained_reason(player["excluded"])
    return None


@dataclass(frozen=True, slots=True)
class _Became:
    """Output of a turn within a training row, and what the batch and the step made of it."""

    reasons: tuple[str, ...]
    segment: int | None = None
    sample_id: str | None = None
    positions: tuple[int, ...] = ()
    advantage: float | None = None
    batch: int | None = None


def _sample_turns(told: _FoldedSession) -> Iterator[tuple[TurnKey, _Became]]:
    """Yield the turns of samples. The spans of a sample are in token order, and those of one turn are adjacent."""
    rows = {row["sample_id"]: row for row in told.view.batch_rows}
    drops = {row["sample_id"]: row for row in told.view.drops}
    for place, sample in told.samples:
        row, drop = rows.get(sample.sample_id), drops.get(sample.sample_id)
        last, lasting = _last_word(row, drop), _trim_mask(told, place, sample, row or drop)
        reasons: dict[TurnKey, list[str]] = {}
        positions: dict[TurnKey, list[int]] = {}
        advantages: dict[TurnKey, float] = {}
        for span in sample.spans:
            key = key_of(span.turn)
            advantages[key] = sample.advantage if span.advantage is None else span.advantage
            positions.setdefault(key, []).extend(range(span.start, span.start + span.length))
            reasons.setdefault(key, []).extend(
                last if lasting is None else _of_token(position, lasting, last)
                for position in range(span.start, span.start + span.length)
            )
        batch = row["batch_index"] if row else None
        for key, found in reasons.items():
            at = tuple(positions[key])
            yield key, _Became(tuple(found), sample.segment_index, sample.sample_id, at, advantages[key], batch)


def _of_token(position: int, lasting: NDArray[np.uint8], last: str) -> str:
    if position >= len(lasting):
        return MaskReason.length_cut.value
    return last if lasting[position] else MaskReason.version_mask.value


def _last_word(row: Row | None, drop: Row | None) -> str:
    """Return the disposition of tokens that survive length cut and version mask."""
    if drop is not None:
        return str(drop["reason"])
    if row is None or row["step"] is None:
        return MaskReason.unused.value
    if row["step_skipped"]:
        return MaskReason.step_skipped.value
    return TRAINED


def _trim_mask(told: _FoldedSession, place: int, sample: SegmentSample, drawn: Row | None) -> NDArray[np.uint8] | None:
    """Return a mask over the tokens of the row, nonzero if they survive length cut and version mask. Return None for a
    sample that no rollout batch took."""
    if drawn is None or drawn["trainer_version"] is None:
        return None
    held = recorded_version(drawn["trainer_version"], orjson.loads(drawn["lags"]))
    (_, number), offset = standing(place)
    return trim(PlacedSample(sample, number, offset), held, told.draw_rules).trained


@dataclass(frozen=True, slots=True)
class Link:
    """A record of a chain, and what it decided."""

    at: str
    """topic[partition]@offset of the record."""
    kind: str
    says: str


def of_session(view: SessionView) -> list[Link]:
    """Return the records that decided about a session, in the order in which they decide."""
    row, found = view.row, [Link(where_of(each["place"]), each["kind"], _spine(view, each)) for each in view.events]
    found += [
        Link(where_of(each["place"]), "DeadLetter", f"{each['cause']}: {each['message']}") for each in view.letters
    ]
    if view.tree is not None:
        masked = _format_counts(view.tree["masked"])
        found.append(Link(
            where_of(view.tree["place"]), "TurnTreeAssembled",
            f"{view.tree['sampled']} tokens sampled, {view.tree['trained']} may train{masked}",
        ))  # fmt: skip
    found += [
        Link(where_of(each["place"]), "SegmentSample",
             f"segment {each['segment_index']}: {each['trained']} of {each['tokens']} tokens may train, advantage "
             f"{each['advantage']:.4g}")
        for each in view.samples
    ]  # fmt: skip
    if view.score is not None:
        why = f": {view.score['reason']}" if view.score["reason"] else ""
        own = f"; this session is excluded: {row.excluded}" if row.excluded else ""
        away = "; this session is not a member of it" if row.fate == "not_member" else ""
        found.append(
            Link(where_of(view.score["place"]), "GroupScored", f"group {view.score['status']}{why}{own}{away}")
        )
    found += _draws(view.batch_rows, view.drops)
    return found


def _draws(rows: Sequence[Row], drops: Sequence[Row]) -> Iterator[Link]:
    for row in rows:
        yield Link(
            where_of(row["batch_place"]), "SampleBatchFormed",
            f"batch {row['batch_index']} row {row['row']}: segment {row['segment_index']}, {row['trained_tokens']} "
            f"tokens train, each weighs 1/{row['weight_divisor']}",
        )  # fmt: skip
        if row["step"] is not None:
            what = "the gradient was not finite: nothing was learned" if row["step_skipped"] else "trained"
            yield Link(where_of(row["step_place"]), "StepCompleted", f"step {row['step']}: {what}")
    for drop in drops:
        kind = "BatchSkipped" if drop["trainer_version"] is None else "SampleBatchFormed"
        what = f"{drop['reason']}, {drop['sampled_tokens']} tokens"
        says = f"draw {drop['draw_index']} drops sample {drop['sample_id'][:12]}: {what}"
        yield Link(where_of(drop["batch_place"]), kind, says)


def _spine(view: SessionView, event: Row) -> str:
    row = view.row
    match event["kind"]:
        case "SessionStarted":
            return f"attempt {row.attempt} of rollout {row.rollout_index}, task {row.task_id}"
        case "SessionFinished":
            return f"{row.outcome}{f': {row.reason}' if row.reason else ''}{'' if row.final else ', will be retried'}"
        case "RewardAssigned":
            return f"reward {row.reward} by {row.verifier}"
        case "RewardFailed":
            return f"{row.verifier} could not judge: {row.verifier_failure}"
        case "SessionErased":
            return f"its content was erased by {row.erased_by}"
    return {"SessionAdopted": "another gateway took over"}.get(event["kind"], "")


def _format_counts(masked: str) -> str:
    return "".join(f", {count} {reason}" for reason, count in sorted(orjson.loads(masked).items()))


def tally(turns: Iterable[TurnTokens]) -> Counter[str]:
    """Count tokens by mask reason; "" counts those that were trained."""
    return Counter(reason for turn in turns for reason in turn.reasons)
