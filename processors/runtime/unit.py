"""A partition task of the assembler: partition p of every input and output topic, its transactor, its groups.

Before it folds, it reads its last commit and the content of its outputs, but only after entering its transactor: until
then the previous owner may still commit. A batch is decoded (unusable records come back as values, unavailable servers
are retried), then folded, then its outputs and input offsets are written in one transaction. After a restart the same
code folds again from the low-water marks; nothing is committed before every topic has passed what was folded before.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from time import perf_counter

from prometheus_client import Counter, Gauge, Summary

from turnlog.infra.blobs import BlobCorrupt, BlobMissing, Blobs, StoreUnavailable, externalize_payloads, inlined
from turnlog.infra.event_log import EventLog, dead_letter, passed_over, where
from turnlog.infra.history import read_range, recorded_erasures
from turnlog.infra.log import Commit, Log, Partition, Record, Transactor, check_commits, own_ends
from turnlog.infra.registry import RegistryUnavailable
from turnlog.infra.roles.health import count_tokens
from turnlog.infra.roles.measures import STAGE_S
from turnlog.names import RECORD_HEADER, ConsumerGroup, TransactionalId
from turnlog.processors.core.errors import ContentErased
from turnlog.processors.core.fold.erasure import Erasures
from turnlog.processors.core.fold.settlement import PASS
from turnlog.processors.core.fold.unit import (
    DEFECTS,
    Done,
    FoldFactory,
    FoldName,
    LogTruncated,
    LowWaterMarks,
    RecordSkipped,
    Taken,
    UnitFold,
    decode_marks,
    encode_marks,
    payloads_read,
)
from turnlog.processors.core.fold_versions import INPUTS, SPINE, outputs_of, score_record, scores_topic
from turnlog.processors.runtime.watch import GroupWatch
from turnlog.schemas import LaterKind, NotHeldYet, UndecodableRecord
from turnlog.schemas.events import Event, GroupScored, TurnTreeAssembled
from turnlog.schemas.topics import TOPIC_OF, TREES
from turnlog.schemas.types import BlobRef

PAUSES_S = (0.1, 0.5, 2.0)
"""Seconds between attempts: a blob may be new, a server unavailable. After the last attempt the process ends
uncommitted.
"""

LostPayload = BlobMissing | BlobCorrupt
"""The store is available but does not have the object that the record names."""
Decoded = Event | UndecodableRecord | LostPayload


async def decode_records(
    records: Sequence[Record],
    events: EventLog,
    blobs: Blobs,
    pauses_s: Sequence[float] = PAUSES_S,
    *,
    run_id: str,
    messages: bool = False,
) -> list[Decoded]:
    """Return per record its event, the reason to dead-letter it, or the error that stops its partition task.

    Payloads of the run's snapshots are fetched as bytes, and those of turns if the trajectory rule needs `messages`.
    Otherwise messages, like tools and evidence, stay references: only people and dashboards read them. Raises
    RegistryUnavailable, StoreUnavailable.
    """
    found: list[Decoded] = []
    for record in records:
        try:
            found.append(events.codec.decode(record.value))
        except NotHeldYet:  # needs a request to the registry or the log; records of what is held never wait
            found.append(await _decode_record(record, events, pauses_s))
        except LaterKind as later:
            passed_over(record, later)
            found.append(later)
        except UndecodableRecord as refusal:
            found.append(refusal)
    if away := [at for at, event in enumerate(found) if _refers(event, run_id, messages)]:
        inline = await asyncio.gather(*(_inline_payloads(found[at], blobs, pauses_s) for at in away))
        for at, event in zip(away, inline, strict=True):
            found[at] = event
    return found


async def _decode_record(record: Record, events: EventLog, pauses_s: Sequence[float]) -> Decoded:
    try:
        for pause_s in pauses_s:
            try:
                return await events.decode(record)
            except RegistryUnavailable:
                await asyncio.sleep(pause_s)
        return await events.decode(record)
    except UndecodableRecord as refusal:
        return refusal


def _refers(event: Decoded, run_id: str, messages: bool) -> bool:
    return BlobRef in map(type, payloads_read(event, run_id, messages=messages))


async def _inline_payloads(event: Event, blobs: Blobs, pauses_s: Sequence[float]) -> Event | LostPayload:
    for pause_s in pauses_s:
        try:
            return await inlined(event, blobs)
        except (BlobMissing, StoreUnavailable):
            await asyncio.sleep(pause_s)
        except BlobCorrupt as lost:
            return lost
    try:
        return await inlined(event, blobs)
    except (BlobMissing, BlobCorrupt) as lost:
        return lost


@dataclass(frozen=True, slots=True, kw_only=True)
class AssemblerPlan:
    """The values that all partition tasks of one assembler share."""

    run_id: str
    fold: FoldName
    factory: FoldFactory
    with_erasures: Callable[[Erasures], FoldFactory] | None = None
    """Returns a factory of folds that know sessions whose content was erased."""
    messages: bool = False
    """Whether the trajectory rule needs the messages of turns."""
    horizon_records: int = 20_000
    pauses_s: Sequence[float] = PAUSES_S
    commit_interval_s: float = 1.0
    """Seconds between commits of trees and progress; scores and their samples are committed at once."""

    @property
    def score(self) -> str:
        """Name of the record that ends a group."""
        return score_record(self.fold.version)

    @property
    def scores(self) -> str:
        """Topic of that record, in which the marks count offsets."""
        return scores_topic(self.fold.version).name

    @property
    def group(self) -> str:
        """Name of the consumer group."""
        return ConsumerGroup.ASSEMBLER.format(run=self.run_id)

    def transactional_id(self, unit: int) -> str:
        """Return the transactional id of a partition task. It is per task, not per process: initializing it fences the
        previous owner.
        """
        return TransactionalId.ASSEMBLER.format(run=self.run_id, unit=unit)


@dataclass(slots=True)
class Restored:
    """The state in which a partition task starts."""

    fold: UnitFold
    output_ends: dict[str, int]
    commits: dict[Partition, Commit]
    """The current commits."""
    erased: frozenset[str]
    """Sessions of the run whose erasure the fold knows, if they are of this partition."""


async def restore(log: Log, events: EventLog, plan: AssemblerPlan, unit: int) -> Restored:
    """Restore a partition task from its commits and outputs. Raises MigrationNeeded, BrokenMetadata, LogTruncated,
    OtherInputs, CommitsExpired, LogUnavailable.
    """
    inputs = [Partition(topic, unit) for topic in INPUTS]
    outputs = [Partition(topic, unit) for topic in outputs_of(plan.fold.version)]
    commits = await log.commits(plan.group, inputs)
    await check_commits(log, plan.group, inputs, () if commits else inputs, outputs)
    found = decode_marks({name.topic: (at.offset, at.metadata) for name, at in commits.items()}, INPUTS, plan.fold)
    marks = found or LowWaterMarks.start(INPUTS)
    starts = await log.start_offsets([*inputs, *outputs])
    ends = await log.end_offsets(inputs) | await own_ends(log, outputs)
    wanted = {**marks.low, TREES.name: marks.tree_low, plan.scores: marks.score_low}
    for name in (*inputs, *outputs):
        if starts[name] > wanted.get(name.topic, starts[name]):
            raise LogTruncated(
                f"{name.topic}[{unit}] begins at {starts[name]}, but the fold needs it from {wanted[name.topic]} on"
            )
    for name in inputs:
        if ends[name] < marks.high[name.topic]:
            raise LogTruncated(
                f"{name.topic}[{unit}] ends at {ends[name]}, but {marks.high[name.topic]} records of it were folded"
            )
    done = await _read_done(log, events, plan, marks, {name: ends[name] for name in outputs}, unit)
    erased = await erased_sessions(events)  # first, since SessionErased precedes the end of the key
    erasures = await recorded_erasures(log, events, Partition(SPINE, unit), plan.run_id)
    factory = plan.with_erasures(erasures) if erasures and plan.with_erasures is not None else plan.factory
    fold = UnitFold(marks, done, factory, run_id=plan.run_id, horizon_records=plan.horizon_records)
    return Restored(fold, {name.topic: ends[name] for name in outputs}, commits, erased)


async def erased_sessions(events: EventLog) -> frozenset[str]:
    """Return the sessions of the run whose keys are erased by now; none if the run does not encrypt content. Raises
    LogUnavailable, RegistryUnavailable."""
    if events.keys is None:
        return frozenset()
    await events.keys.refresh()
    return events.keys.erased


async def _read_done(
    log: Log, events: EventLog, plan: AssemblerPlan, marks: LowWaterMarks, ends: dict[Partition, int], unit: int
) -> Done:
    done = Done()
    trees, scores = Partition(TREES.name, unit), Partition(plan.scores, unit)
    async for record in records_between(log, trees, marks.tree_low, ends[trees], only=(TurnTreeAssembled.__name__,)):
        done.trees[(await events.decode(record)).session_id] = record.offset
    async for record in records_between(log, scores, marks.score_low, ends[scores], only=(plan.score,)):
        scored = await events.decode(record)
        if scored.floor >= marks.horizon:
            done.score(scored.group_id, scored.floor, record.offset)
    return done


async def requested_skips(log: Log, events: EventLog, run_id: str, unit: int, start: int) -> dict[tuple[str, int], str]:
    """Return {(topic, offset): reason} of the run's skip requests for this partition, in agent.sessions from `start` to
    its end.
    """
    spine = Partition(SPINE, unit)
    end = (await log.end_offsets([spine]))[spine]
    skips: dict[tuple[str, int], str] = {}
    async for record in records_between(log, spine, start, end, only=("SkipRequested",)):
        request = await events.decode(record)
        if request.partition == unit and request.run_id == run_id:
            skips[request.topic, request.offset] = request.reason
    return skips


async def records_between(
    log: Log, name: Partition, start: int, end: int, *, only: Sequence[str] = ()
) -> AsyncIterator[Record]:
    """Yield the records of [start, end) whose header names one of `only` (empty: all)."""
    wanted = {record.encode() for record in only}
    async with log.reader() as reader:
        async for record in read_range(reader, {name: start}, {name: end}):
            if not wanted or dict(record.headers).get(RECORD_HEADER) in wanted:
                yield record


RECORDS = Counter("turnlog_assembler_records", "Input records processed")
LATE = Counter("turnlog_assembler_late_records", "Records that came after their group was scored and forgotten")
OPEN_GROUPS = Gauge("turnlog_assembler_open_groups", "Groups that are not complete", ["unit"])
OPEN_SPAN = Gauge("turnlog_assembler_open_span_bytes", "Bytes that a restart folds again", ["unit"])
SESSIONS = Counter("turnlog_recipe_sessions", "Sessions that settled", ["recipe", "outcome"])
REWARD = Summary("turnlog_recipe_reward", "Rewards of sessions that settled", ["recipe"])
PASSED = Counter("turnlog_recipe_passed", "Sessions that settled with a reward of at least 1", ["recipe"])
EXCLUDED = Counter("turnlog_cheating_excluded", "Sessions that a detector keeps out of training", ["detector"])
OUTPUT = Summary("turnlog_recipe_output_tokens", "Output tokens of sessions that settled", ["recipe"])
READ_S, FOLD_S, COMMIT_S = (STAGE_S.labels("assembler", stage) for stage in ("read", "fold", "commit"))
REFOLD_SECONDS = Gauge(
    "turnlog_assembler_refold_seconds", "Time from opening the partition task to having folded all earlier records"
)

Clock = Callable[[], float]
"""Seconds; only differences matter."""


class UnitFailed(Exception):
    """A bug or a lost payload, found at one record: its partition task stops, the others continue.

    Remedy: fix the fold, restore the object, or request to skip the record (SkipRequested).
    """

    def __init__(self, record: Record, error: Exception) -> None:
        super().__init__(f"{where(record)}: {type(error).__name__}: {error}")
        self.topic = record.topic
        self.offset = record.offset


class FoldPartitionTask:
    """Folds partition `number`. Call `open`, seek the inputs to `position`, call `step` for each poll, then `close`."""

    def __init__(
        self, number: int, plan: AssemblerPlan, log: Log, events: EventLog, blobs: Blobs, *, clock: Clock,
        skips: Mapping[tuple[str, int], str],
    ) -> None:  # fmt: skip
        """`skips` maps (topic, offset) of records to skip to the reason."""
        self.number = number
        self.watch = GroupWatch()
        self.skips = skips
        self._plan = plan
        self._log = log
        self._events = events
        self._blobs = blobs
        self._clock = clock
        self._stack = AsyncExitStack()
        self._span = OpenSpan()
        self._recipes: dict[str, str] = {}
        """Recipes of sessions whose trees are not committed yet, since a tree does not name its recipe."""
        self._pending: list[Event] = []
        self._scored = False
        """Whether a score is pending."""
        self._committed_at = clock()
        self._opened_at = clock()
        self._transactor: Transactor
        self._fold: UnitFold
        self._output_ends: dict[str, int]
        self._commits: Mapping[Partition, Commit]
        self._erased: frozenset[str] = frozenset()
        self._start: dict[str, int] = {}
        self.opened = False

    async def open(self) -> None:
        """Fence the previous owner, then read what it committed. Raises LowWaterError, LogError."""
        transactional_id = self._plan.transactional_id(self.number)
        self._transactor = await self._stack.enter_async_context(self._log.transactor(transactional_id))
        restored = await restore(self._log, self._events, self._plan, self.number)
        self._fold, self._output_ends, self._commits = restored.fold, restored.output_ends, restored.commits
        self._erased = restored.erased
        self._start = dict(self.position)
        self.opened = True

    async def close(self) -> None:
        """Release the transactional id; the next owner folds again what was not committed."""
        await self._stack.aclose()

    @property
    def position(self) -> dict[str, int]:
        """Input topic -> next offset to fold."""
        return self._fold.low_water.position

    @property
    def start(self) -> dict[str, int]:
        """The low-water marks from which this owner started."""
        return self._start

    @property
    def refolding(self) -> bool:
        """Whether it has not yet folded everything that was folded before."""
        return self._fold.low_water.refolding

    def state(self) -> dict[str, object]:
        """Return a comparable value of every open group."""
        return {group: found.fold.key() for group, found in self._fold.low_water.open.items()}

    async def is_outdated(self, failure: UnitFailed) -> bool:
        """Whether content or a payload may be missing because a session was erased since `open`: opened again, the fold
        knows of the erasure. Raises LogUnavailable, RegistryUnavailable."""
        if not isinstance(failure.__cause__, ContentErased | BlobMissing):
            return False
        return await erased_sessions(self._events) != self._erased

    async def step(self, records: Sequence[Record]) -> None:
        """Fold records of this partition and commit if outputs are due or the interval has passed.

        Raises UnitFailed if this partition task must be closed; any other error must end the process.
        """
        refolding = self.refolding
        wanted = [self._fold.wants(record) for record in records]
        fresh = [record for record, wants in zip(records, wanted, strict=True) if wants]
        plan = self._plan
        started_s = perf_counter()
        found = await decode_records(
            fresh, self._events, self._blobs, plan.pauses_s, run_id=plan.run_id, messages=plan.messages
        )
        read_s = perf_counter()
        events = iter(found)
        now = self._clock()
        for record, wants in zip(records, wanted, strict=True):
            if wants:
                self._take(record, next(events), now)
            self._fold.pass_over(record)
        READ_S.observe(read_s - started_s)
        FOLD_S.observe(perf_counter() - read_s)
        self._span.add_records(records)
        RECORDS.inc(len(records))
        if refolding and not self.refolding:
            REFOLD_SECONDS.set(now - self._opened_at)
        if self.commit_is_due:
            await self.commit()

    @property
    def commit_is_due(self) -> bool:
        """Whether to commit now: scores at once, with everything else that waits; trees alone and mere progress once
        per interval.
        """
        if not self._has_news:
            return False
        return self._scored or self._clock() - self._committed_at >= self._plan.commit_interval_s

    @property
    def _has_news(self) -> bool:
        """Whether there is anything to commit."""
        return not self.refolding and bool(self._pending or self._fold.low_water.high != self.position)

    async def commit(self) -> None:
        """Write outputs and input offsets in one transaction. Does nothing while refolding, or without progress.

        The order is: store blobs and encode; begin, send, add offsets with the marks, await acknowledgements, commit.
        The marks do not wait for the acknowledgements: until then, the end that the topic had before is a lower bound
        of an output's offset.
        """
        if not self._has_news:
            return
        with COMMIT_S.time():
            await self._commit()
        self._committed_at = self._clock()
        OPEN_GROUPS.labels(str(self.number)).set(len(self._fold.low_water.open))

    async def _commit(self) -> None:
        outputs = [await externalize_payloads(event, self._blobs) for event in self._pending]
        sends = await self._events.begin(self._transactor, outputs, lambda _: self.number)
        for event in outputs:
            self._note(event, self._output_ends.get(TOPIC_OF[type(event).__name__].name, 0))
        self._commits = self._build_commits()
        await self._transactor.offsets(self._plan.group, self._commits)
        placed = await asyncio.gather(*sends)
        await self._transactor.commit()
        for event, (_, offset) in zip(outputs, placed, strict=True):
            self._note(event, offset)
            _count(event, self._recipes)
            self._output_ends[TOPIC_OF[type(event).__name__].name] = offset + 1
        self._pending, self._scored = [], False

    def _take(self, record: Record, event: Decoded, now: float) -> None:
        """Fold or dead-letter one record whose group was open before the batch. Raises UnitFailed if the partition task
        must stop.
        """
        if not self._fold.wants(record):
            return
        taken = self._take_record(record, event)
        repeated = self._fold.low_water.is_repeated(record.topic, record.offset)
        if taken.refusal is not None and not repeated:
            self._pending.append(dead_letter(record, taken.refusal, run_id=self._plan.run_id, role="assembler"))
        if taken.late and not repeated:
            LATE.inc()
        if taken.seen:
            self.watch.saw(event, now, refused=taken.refusal is not None)
        for output in taken.outputs:
            self._pending.append(output)
            if isinstance(output, TurnTreeAssembled):
                started = self.watch.find_start(output.group_id, output.session_id)
                if started is not None:
                    self._recipes[output.session_id] = started.recipe
            if isinstance(output, GroupScored):
                self.watch.forget(output.group_id)
                self._scored = True

    def _take_record(self, record: Record, event: Decoded) -> Taken:
        if (record.topic, record.offset) in self.skips:
            return Taken(refusal=RecordSkipped(f"{where(record)}: {self.skips[record.topic, record.offset]}"))
        if isinstance(event, LaterKind):
            return Taken()
        if isinstance(event, UndecodableRecord):
            return Taken(refusal=event)
        if isinstance(event, BlobMissing | BlobCorrupt):
            raise UnitFailed(record, event) from event
        try:
            return self._fold.take(record, event)
        except DEFECTS as defect:
            raise UnitFailed(record, defect) from defect

    def _note(self, event: Event, offset: int) -> None:
        if isinstance(event, TurnTreeAssembled):
            self._fold.low_water.note_tree(event.session_id, offset)
        elif type(event).__name__ == self._plan.score:
            self._fold.low_water.note_score(event.group_id, offset)

    def _build_commits(self) -> dict[Partition, Commit]:
        marks = self._fold.low_water.advance((self._output_ends[TREES.name], self._output_ends[self._plan.scores]))
        OPEN_SPAN.labels(str(self.number)).set(self._span.above(marks.low))
        metadata = {topic: encode_marks(marks, self._plan.fold, topic) for topic in INPUTS}
        places = {topic: Partition(topic, self.number) for topic in INPUTS}
        return {
            place: Commit(marks.low[topic], metadata[topic]).keeping(self._commits.get(place))
            for topic, place in places.items()
        }


def by_unit(records: Iterable[Record]) -> dict[int, list[Record]]:
    """Group the records of a poll by partition, in the order of the poll."""
    units: dict[int, list[Record]] = {}
    for record in records:
        units.setdefault(record.partition, []).append(record)
    return units


def _count(event: Event, recipes: dict[str, str]) -> None:
    """Count the session of a committed tree, by its recipe, or the tokens of a committed score."""
    if isinstance(event, GroupScored):
        books = event.books
        count_tokens("group", sampled=books.sampled, trained=books.trained, masked=books.masked)
        for flag in (flag for rollout in event.rollouts for flag in rollout.flags):
            EXCLUDED.labels(flag).inc()
    elif isinstance(event, TurnTreeAssembled) and (recipe := recipes.pop(event.session_id, None)) is not None:
        SESSIONS.labels(recipe, event.outcome.value).inc()
        OUTPUT.labels(recipe).observe(event.books.sampled)
        if event.reward is not None:
            REWARD.labels(recipe).observe(event.reward)
            PASSED.labels(recipe).inc(event.reward >= PASS)


class OpenSpan:
    """Number of bytes that a restart would fold again: those between the low-water marks and the position, at batch
    resolution.
    """

    def __init__(self) -> None:
        self._total: dict[str, int] = {}
        self._ends: dict[str, deque[tuple[int, int]]] = {}
        """Topic -> (next offset, total) after each batch."""

    def add_records(self, records: Sequence[Record]) -> None:
        """Add one batch of records."""
        last: dict[str, int] = {}
        for record in records:
            self._total[record.topic] = self._total.get(record.topic, 0) + len(record.key) + len(record.value)
            last[record.topic] = record.offset
        for topic, offset in last.items():
            self._ends.setdefault(topic, deque([(0, 0)])).append((offset + 1, self._total[topic]))

    def above(self, low: Mapping[str, int]) -> int:
        """Return the number of bytes above the marks; forget what lies below."""
        span = 0
        for topic, ends in self._ends.items():
            while len(ends) > 1 and ends[1][0] <= low[topic]:
                ends.popleft()
            span += self._total[topic] - ends[0][1]
        return span
