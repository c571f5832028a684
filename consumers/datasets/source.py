"""The log as a build reads it: every topic up to one end, unit by unit, and joins that hold ids, never tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import orjson

from turnlog.consumers.datasets.errors import MissingContent
from turnlog.consumers.datasets.filters import Joined, Task, short
from turnlog.consumers.datasets.manifest import Provenance
from turnlog.consumers.datasets.query import Query
from turnlog.infra.blobs import BlobCorrupt, BlobMissing
from turnlog.infra.history import events_of, partitions
from turnlog.infra.log import Partition, Record
from turnlog.infra.payloads import inlined
from turnlog.infra.role import Role
from turnlog.schemas import topics
from turnlog.schemas.events import Event, RolloutRequested, SampleBatchFormed
from turnlog.schemas.topics import Topic

TOPICS = (topics.BATCHES, topics.SAMPLES, topics.TREES, topics.SESSIONS, topics.TURNS, topics.TASKS)
"""What views read, derived topics first: whatever a record rests on was on the log before it."""

Progress = Callable[[int, int], None]
"""Told (records passed, records in all), now and then."""
TELL_EVERY = 256


@dataclass(slots=True)
class Source:
    """What one build reads."""

    role: Role
    query: Query
    provenance: Provenance
    progress: Progress | None
    ends: dict[Partition, int]
    total: int = 0
    """Records of all passes planned."""
    passed: int = field(default=0)

    @classmethod
    async def open(
        cls, role: Role, query: Query, provenance: Provenance, plan: Sequence[Topic], progress: Progress | None
    ) -> Source:
        """`plan`: the topics to be read, one entry per pass. Their ends are taken here, once: that of the trees behind
        open transactions, since the samples of one may be readable before its trees are."""
        ends: dict[Partition, int] = {}
        for topic in TOPICS:
            if topic in plan:
                ends |= await role.log.end_offsets(partitions(role, topic), committed=topic is not topics.TREES)
        starts = await role.log.start_offsets(list(ends))
        total = sum(ends[place] - starts[place] for topic in plan for place in partitions(role, topic))
        return cls(role, query, provenance, progress, ends, total)

    async def read(self, place: Partition, *names: str) -> AsyncIterator[tuple[Record, Event]]:
        """Events of one partition whose record is one of `names`."""
        began, start = self.passed, 0
        reading = self.provenance.reading
        found = events_of(self.role, place, self.ends[place], names, runs=self.query.runs, reading=reading)
        async for record, event in found:
            start = reading.read[place][0]
            self.passed = began + record.offset - start
            if record.offset % TELL_EVERY == 0:
                if self.progress is not None:
                    self.progress(self.passed, self.total)
                await asyncio.sleep(0)  # Ctrl-C is heard here, too, not only when records must be waited for
            self.provenance.runs.add(event.run_id)
            yield record, event
        self.passed = began + self.ends[place] - reading.read[place][0]
        if self.progress is not None:
            self.progress(self.passed, self.total)

    async def inlined(self, event: Event, where: str) -> Event:
        """The event with its payloads. Raises MissingContent naming object and record."""
        try:
            return await inlined(event, self.role.blobs)
        except (BlobMissing, BlobCorrupt) as gone:
            raise MissingContent(
                f"{where}: {gone}. Restore the object, or leave its rows out (--task, --since, --until, --max-step)"
            ) from gone

    async def tasks(self) -> dict[str, Task]:
        """Dataset and task type of every group that a RolloutRequested names."""
        found: dict[str, Task] = {}
        known: dict[Task, Task] = {}  # a few values, many groups
        for place in partitions(self.role, topics.TASKS):
            async for record, event in self.read(place, RolloutRequested.__name__):
                assert isinstance(event, RolloutRequested)
                if event.group_id not in found:
                    where = f"{record.topic}[{record.partition}]@{record.offset}"
                    task = Task(event.dataset, _task_type(await self._task_row(event, where)))
                    found[event.group_id] = known.setdefault(task, task)
        return found

    async def _task_row(self, event: RolloutRequested, where: str) -> object:
        """The dataset row; None where it is gone and no filter asks for its type. Raises MissingContent."""
        try:
            whole = await self.inlined(event, where)
        except MissingContent:
            if self.query.task_types:
                raise
            return None
        assert isinstance(whole, RolloutRequested)
        return whole.task

    async def trained(self) -> set[bytes]:
        """`short` ids of the samples and sessions that the steps asked for trained."""
        found: set[bytes] = set()
        least, most = self.query.min_step or 0, self.query.max_step
        for place in partitions(self.role, topics.BATCHES):
            async for _, event in self.read(place, SampleBatchFormed.__name__):
                assert isinstance(event, SampleBatchFormed)
                if event.batch_index >= least and (most is None or event.batch_index <= most):
                    for row in event.samples:
                        found |= {short(row.sample_id), short(row.session_id)}
        return found

    async def joined(self, *, always_tasks: bool) -> Joined:
        """What the query needs from topics of other keys."""
        wants_tasks = always_tasks or self.query.joins_tasks
        return Joined(
            tasks=await self.tasks() if wants_tasks else {},
            trained=await self.trained() if self.query.joins_steps else set(),
        )


def _task_type(row: object) -> str | None:
    try:
        content = orjson.loads(row) if isinstance(row, bytes) else None
    except orjson.JSONDecodeError:
        return None  # rows of other tools need not be JSON objects
    if not isinstance(content, dict):
        return None
    found = content.get("task_type", content.get("type"))
    return found if isinstance(found, str) else None
