"""What a unit must know before it folds: its last commit, and what its outputs hold already.

Read only after the unit's transactor was entered: until then the last owner may still commit.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from turnlog.infra.event_log import EventLog
from turnlog.infra.log import Log, Partition, Record
from turnlog.names import RECORD_HEADER, ConsumerGroup, TransactionalId
from turnlog.processors.core.fold.low_water import Done, FoldFactory, FoldName, LogTruncated, Marks, decode_marks
from turnlog.processors.core.fold.unit import UnitFold
from turnlog.processors.core.fold_versions import INPUTS, SPINE, outputs_of, score_record, scores_topic
from turnlog.schemas.topics import TREES


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What all units of one assembler share."""

    run_id: str
    fold: FoldName
    factory: FoldFactory
    messages: bool = False
    """Whether the fold's policy needs the messages of turns."""
    horizon_records: int = 20_000
    commit_interval_s: float = 1.0
    """Trees and progress are committed this often; scores and their samples at once."""

    @property
    def score(self) -> str:
        """The record that ends a group."""
        return score_record(self.fold.version)

    @property
    def scores(self) -> str:
        """Its topic: the marks count its offsets."""
        return scores_topic(self.fold.version).name

    @property
    def group(self) -> str:
        """The consumer group."""
        return ConsumerGroup.ASSEMBLER.format(run=self.run_id)

    def transactional_id(self, unit: int) -> str:
        """One id per unit, not per process: starting it is what fences the last owner."""
        return TransactionalId.ASSEMBLER.format(run=self.run_id, unit=unit)


@dataclass(slots=True)
class Restored:
    """Where a unit begins."""

    fold: UnitFold
    output_ends: dict[str, int]


async def restore(log: Log, events: EventLog, plan: Plan, unit: int) -> Restored:
    """Raises MigrationNeeded, BrokenMetadata, LogTruncated, LogUnavailable."""
    inputs = [Partition(topic, unit) for topic in INPUTS]
    outputs = [Partition(topic, unit) for topic in outputs_of(plan.fold.version)]
    commits = await log.commits(plan.group, inputs)
    found = decode_marks({name.topic: (at.offset, at.metadata) for name, at in commits.items()}, INPUTS, plan.fold)
    marks = found or Marks.start(INPUTS)
    starts = await log.start_offsets([*inputs, *outputs])
    ends = await log.end_offsets([*inputs, *outputs])
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
    done = await _done(log, events, plan, marks, {name: ends[name] for name in outputs}, unit)
    fold = UnitFold(marks, done, plan.factory, run_id=plan.run_id, horizon_records=plan.horizon_records)
    return Restored(fold, {name.topic: ends[name] for name in outputs})


async def _done(log: Log, events: EventLog, plan: Plan, marks: Marks, ends: dict[Partition, int], unit: int) -> Done:
    done = Done()
    trees, scores = Partition(TREES.name, unit), Partition(plan.scores, unit)
    async for record in records_between(log, trees, marks.tree_low, ends[trees]):
        done.trees[(await events.decode(record)).session_id] = record.offset
    async for record in records_between(log, scores, marks.score_low, ends[scores], only=(plan.score,)):
        scored = await events.decode(record)
        if scored.floor >= marks.horizon:
            done.score(scored.group_id, scored.floor, record.offset)
    return done


async def requested_skips(log: Log, events: EventLog, run_id: str, unit: int, start: int) -> dict[tuple[str, int], str]:
    """{(topic, offset): reason} of the run's requests for this unit in agent.sessions from `start` to its end."""
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
    """Records of [start, end) whose header names one of `only` (empty: all)."""
    wanted = {record.encode() for record in only}
    async with log.reader() as reader:
        reader.assign({name: start})
        while reader.position(name) < end:
            for record in await reader.poll():
                if record.offset < end and (not wanted or dict(record.headers).get(RECORD_HEADER) in wanted):
                    yield record
