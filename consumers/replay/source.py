"""Inputs of a replay: recorded settings of the run, the offset up to which each partition was folded, records as the
fold takes them, and the moment that `--until` names.

The topics of one partition are read side by side in order of record time. Folds do not need this order, but it bounds
memory: a record read early from one topic has to wait for its counterpart in another.

ReplayError
├── NothingToReplay   the run, or the commit that records how far it was folded, does not exist
├── HistoryPruned     the topics no longer begin at offset 0
├── NoSuchMoment      `--until` names a step, a record or a time that is malformed or does not exist
├── BrokenFold        the fold hit a defect at a record that no operator asked to skip
└── BadRefold         a changed setting, or the output path, cannot be used
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from operator import itemgetter
from types import MappingProxyType, TracebackType

from turnlog.consumers.replay.unit import UnitState
from turnlog.infra.archive import ArchiveLog, Cut, live_cut
from turnlog.infra.blobs import inlined
from turnlog.infra.history import caught_up, events, read_range
from turnlog.infra.log import Log, LogError, Partition, Reader, Record
from turnlog.infra.roles.role import Role
from turnlog.infra.roles.runs import Configured, nothing_recorded, recorded_configuration
from turnlog.names import ConsumerGroup
from turnlog.processors.core.errors import FoldError
from turnlog.processors.core.fold.erasure import Erasures
from turnlog.processors.core.fold.group import GroupFold
from turnlog.processors.core.fold.settlement import with_figures
from turnlog.processors.core.fold.unit import DEFECTS, LowWaterMarks, UnitFold, payloads_read
from turnlog.processors.core.fold_versions import INPUTS, OUTPUTS
from turnlog.processors.core.methods.rules import FoldRules
from turnlog.schemas import UndecodableRecord, topics
from turnlog.schemas.events import Event, SkipRequested, StepCompleted
from turnlog.schemas.types import BlobRef


class ReplayError(Exception):
    """Base of the tree above."""


class NothingToReplay(ReplayError):
    """Remedy: check [run] id and [kafka] prefix; for an archive, run `turnlog log archive flush` while the topics
    exist."""


class HistoryPruned(ReplayError):
    """Remedy: `turnlog replay --from archive`."""


class NoSuchMoment(ReplayError):
    """Remedy: write a time as 2026-01-31T08:00, `step:N` of a completed step, or a record as `agent.turns[0]@17`."""


class BrokenFold(ReplayError):
    """Remedy: fix the fold. If the assembler stopped at the same record, write a SkipRequested."""


class BadRefold(ReplayError):
    """Remedy: see the message."""


POLL_RECORDS = 100


class Merge:
    """A reader that merges partitions into chunks of records.

    Each partition keeps its offset order; partitions are interleaved by record time, to within one poll. Where the
    times of a partition go backwards, the latest time so far counts. Memory holds one poll per partition.
    """

    def __init__(
        self,
        log: Log,
        starts: Mapping[Partition, int],
        ends: Mapping[Partition, int],
        *,
        until_ms: int | None = None,
        poll_records: int = POLL_RECORDS,
    ) -> None:
        """A partition ends before its first record that is later than `until_ms`, if it is given."""
        self._log = log
        self._poll_records = poll_records
        self._starts = dict(starts)
        self._ends = dict(ends)
        self._until_ms = until_ms
        self._readers: dict[Partition, Reader] = {}
        self._ready: dict[Partition, deque[tuple[int, Record]]] = {place: deque() for place in starts}
        self._times = dict.fromkeys(starts, 0)
        self._stack = AsyncExitStack()
        self.passed: dict[Partition, int] = dict(starts)
        """First offset of each partition that no chunk has returned yet."""

    async def __aenter__(self) -> Merge:
        opening = [asyncio.create_task(self._open(place)) for place in self._starts]
        try:
            await asyncio.gather(*opening)
        except BaseException:
            for task in opening:
                task.cancel()
            await asyncio.wait(opening)
            await self._stack.aclose()
            raise
        return self

    async def _open(self, place: Partition) -> None:
        """Open a reader for one partition. Partitions are opened concurrently, because opening mostly waits for the
        broker."""
        reader = await self._stack.enter_async_context(self._log.reader())
        reader.assign({place: self._starts[place]})
        self._readers[place] = reader

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def chunk(self) -> list[Record]:
        """Return the next records, or an empty list at the end. Raises LogError."""
        await asyncio.gather(*(self._fill(place) for place, ready in self._ready.items() if not ready))
        waiting = {place: ready for place, ready in self._ready.items() if ready}
        if not waiting:
            return []
        limit = min(ready[-1][0] for ready in waiting.values())
        found: list[tuple[int, Record]] = []
        for place, ready in waiting.items():
            before = len(found)
            while ready and ready[0][0] <= limit:
                found.append(ready.popleft())
            if len(found) > before:
                self.passed[place] = found[-1][1].offset + 1
        found.sort(key=itemgetter(0))  # stable: a partition's own order stays
        return [record for _, record in found]

    async def _fill(self, place: Partition) -> None:
        reader, end, ready = self._readers[place], self._ends[place], self._ready[place]
        while not ready and not caught_up(reader, {place: end}):
            time_ms = self._times[place]
            for record in await reader.poll(max_records=self._poll_records):
                if record.timestamp_ms > time_ms:
                    time_ms = record.timestamp_ms
                if self._until_ms is not None and time_ms > self._until_ms:
                    self._ends[place] = end = min(end, record.offset)
                if record.offset < end:
                    ready.append((time_ms, record))
            self._times[place] = time_ms
        if not ready:
            self.passed[place] = max(self.passed[place], self._ends[place])


STEP = re.compile(r"step:(\d+)")
PLACE = re.compile(r"([\w.-]+)\[(\d+)\]@(\d+)")


@dataclass(frozen=True, slots=True)
class Until:
    """End of a replay: records up to `time_ms`, and batches up to `batch_index` if it is known."""

    time_ms: int
    batch_index: int | None = None


async def moment(role: Role, text: str) -> Until:
    """Parse `--until`: a time (ISO 8601, UTC unless it has an offset, or milliseconds since 1970), `step:N`, or a
    record as `topic[partition]@offset`. Raises NoSuchMoment."""
    if found := STEP.fullmatch(text):
        return await _step(role, int(found[1]))
    if found := PLACE.fullmatch(text):
        return await _record(role, Partition(found[1], int(found[2])), int(found[3]))
    if text.isdigit():
        return Until(int(text))
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        raise NoSuchMoment(f"--until {text}: {error}; write TIME, step:N or topic[partition]@offset") from error
    return Until(int((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1000))


async def _step(role: Role, number: int) -> Until:
    found: Until | None = None
    incarnation, last = -1, 0
    async for record, event in events(role, topics.STEPS):
        if not isinstance(event, StepCompleted):
            continue
        last = max(last, event.step)
        if event.step == number and event.incarnation >= incarnation:
            incarnation, found = event.incarnation, Until(record.timestamp_ms, event.batch_index)
    if found is None:
        raise NoSuchMoment(f"--until step:{number}: the last step of run {role.settings.run.id} on the log is {last}")
    return found


async def _record(role: Role, place: Partition, offset: int) -> Until:
    try:
        ends = await role.log.end_offsets([place])
        async with role.log.reader() as reader:
            async for record in read_range(reader, {place: offset}, ends, max_records=1):
                return Until(record.timestamp_ms)
    except LogError as error:
        raise NoSuchMoment(f"--until {place.topic}[{place.number}]@{offset}: {error}") from error
    raise NoSuchMoment(f"--until {place.topic}[{place.number}]@{offset}: the partition ends at {ends[place]}")


PATIENCE_S = 30.0
"""Seconds to wait for a live assembler that is still catching up. After that, the cut is what it has folded by then."""
Placed = Callable[[Event], Event]
Skips = frozenset[tuple[str, int]]
"""(topic, offset) of records that an operator asked to skip."""


async def recorded_run(role: Role) -> Configured:
    """Return the recorded configuration of the run. Raises NothingToReplay, RecordedSettingsError."""
    found = await recorded_configuration(role)
    if found is None:
        raise NothingToReplay(await nothing_recorded(role))
    return found


async def erased_sessions(role: Role) -> frozenset[str]:
    """Return the sessions of the run that are erased by now. Raises LogUnavailable."""
    if role.events.keys is None:
        return frozenset()
    await role.events.keys.refresh()
    return role.events.keys.erased


async def cut_of(role: Role, unit: int, *, patience_s: float = PATIENCE_S) -> Cut:
    """Return how far a partition is folded and where the outputs of that part end. Waits for a live assembler that is
    still catching up. Raises NothingToReplay, HistoryPruned."""
    log, run_id = role.log, role.settings.run.id
    if isinstance(log, ArchiveLog):
        archived = await log.cut(ConsumerGroup.ASSEMBLER.format(run=run_id), unit)
        if archived is None:
            raise NothingToReplay(
                f"{log.index.root} does not say how far unit {unit} of run {run_id} was folded: "
                "run `turnlog log archive flush` while its topics live"
            )
        return archived
    inputs = [Partition(topic, unit) for topic in INPUTS]
    await _whole(role, unit)
    ends = await log.end_offsets(inputs)
    clock = asyncio.get_running_loop().time
    deadline = clock() + patience_s
    while clock() < deadline + patience_s:
        cut = await live_cut(log, run_id, unit)
        late = clock() > deadline
        if cut is not None and (late or all(cut.high[place.topic] >= ends[place] for place in inputs)):
            return cut
        await asyncio.sleep(0.02 if late else 0.2)  # poll: another process's commit cannot be awaited
    raise NothingToReplay(f"unit {unit}: a transaction of its assembler has been open for {patience_s:.0f} s")


async def _whole(role: Role, unit: int) -> None:
    places = [Partition(topic, unit) for topic in (*INPUTS, *OUTPUTS)]
    for place, start in (await role.log.start_offsets(places)).items():
        if start:
            raise HistoryPruned(f"{place.topic}[{unit}] begins at {start}: earlier records are only in the archive")


class Inputs:
    """Decoder of input records for one fold, without the records that an operator asked to skip."""

    def __init__(
        self, role: Role, rules: FoldRules, unit: int, skips: Skips = frozenset(), placed: Placed | None = None,
        erasures: Erasures = MappingProxyType({}), *, messages: bool = False,
    ) -> None:  # fmt: skip
        """`placed` replaces an event by another, for this fold alone. `erasures` are the sessions of the partition
        whose content was erased. `messages`: also fetch the messages of turns, for a reader that needs them although
        the fold does not."""
        self.erasures = erasures
        self._placed = placed
        self._role = role
        self._rules = rules
        self._messages = messages or rules.needs_messages
        self._unit = unit
        self.skips = skips

    async def event(self, record: Record) -> Event | None:
        """Return the event with the payloads that the fold reads inline. Return None for a skipped record, and for one
        that the assembler dead-letters because it cannot be decoded or belongs to another run. Raises BlobError,
        RegistryUnavailable."""
        if self.skips and (record.topic, record.offset) in self.skips:
            return None
        try:
            event = await self._role.events.decode_fast(record)
        except UndecodableRecord:
            return None
        if event.run_id != self._role.settings.run.id:
            return None
        if self._placed is not None:
            event = self._placed(event)
        payloads = payloads_read(event, self._rules.run_id, messages=self._messages)
        return await inlined(event, self._role.blobs) if BlobRef in map(type, payloads) else event

    async def fold(self, fold: UnitFold, record: Record) -> Sequence[Event]:
        """Fold one record and return its outputs. Raises SkipsFound if the fold hits a defect at a record that an
        operator asked to skip, BrokenFold at any other defect."""
        outputs: Sequence[Event] = ()
        if fold.wants(record):
            event = await self.event(record)
            if event is not None:
                try:
                    outputs = fold.take(record, event).outputs
                except DEFECTS as defect:
                    await self._look_for_skips(record, defect)
        fold.pass_over(record)
        return outputs

    async def fold_group(self, group: LoneGroup, ends: Mapping[Partition, int]) -> None:
        """Fold the records of a group below `ends`, a map of all inputs of the partition. Raises SkipsFound and
        BrokenFold as `fold` does."""
        starts = await self._role.log.start_offsets(list(ends))
        async with Merge(self._role.log, starts, ends) as merge:
            while chunk := await merge.chunk():
                for record in chunk:
                    wanted = record.key == group.group_id.encode() and not (group.fold and group.fold.complete)
                    event = await self.event(record) if wanted else None
                    if event is None:
                        continue
                    fold = group.fold or GroupFold(group.group_id, event.floor, self._rules, self.erasures)
                    group.fold = fold
                    try:
                        group.outputs += with_figures(fold.apply(record.topic, record.offset, event))
                    except FoldError as refusal:
                        group.outputs += with_figures(refusal.outputs)
                    except DEFECTS as defect:
                        await self._look_for_skips(record, defect)

    async def _look_for_skips(self, record: Record, defect: Exception) -> None:
        where = f"{record.topic}[{record.partition}]@{record.offset}"
        found = await self.read_skips()
        if (record.topic, record.offset) in found - self.skips:
            raise SkipsFound(found) from defect
        raise BrokenFold(f"the fold stops at {where}: {type(defect).__name__}: {defect}") from defect

    async def read_skips(self) -> Skips:
        """Return the records of the partition that an operator asked to skip."""
        spine = Partition(topics.SESSIONS.name, self._unit)
        end = await self._role.log.end_offsets([spine])
        found: set[tuple[str, int]] = set()
        async with Merge(self._role.log, await self._role.log.start_offsets([spine]), end) as merge:
            while chunk := await merge.chunk():
                for record in chunk:
                    event = await self.event(record)
                    if isinstance(event, SkipRequested) and event.partition == self._unit:
                        found.add((event.topic, event.offset))
        return frozenset(found)


@dataclass(slots=True)
class LoneGroup:
    """A group that is folded alone."""

    group_id: str
    fold: GroupFold | None = None
    """State of the group; None before its first record."""
    outputs: list[Event] = field(default_factory=list)


class SkipsFound(Exception):
    """Raised to restart the fold of a partition from its start without these records, as its assembler did."""

    def __init__(self, skips: Skips) -> None:
        super().__init__(f"{len(skips)} records to skip")
        self.skips = skips


async def fresh(role: Role, cut: Cut) -> UnitState:
    """Return the state of a partition task at the start of its topics. Raises LogError."""
    starts = await role.log.start_offsets([Partition(topic, cut.unit) for topic in (*INPUTS, *cut.ends)])
    low = {topic: starts[Partition(topic, cut.unit)] for topic in INPUTS}
    outputs = {place.topic: offset for place, offset in starts.items() if place.topic not in INPUTS}
    return UnitState(LowWaterMarks(low=low, high=low), outputs=outputs)


def places(unit: int, offsets: Mapping[str, int]) -> dict[Partition, int]:
    """Convert offsets by topic to offsets by partition, all with number `unit`."""
    return {Partition(topic, unit): offset for topic, offset in offsets.items()}
