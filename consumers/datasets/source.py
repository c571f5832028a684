"""Source of a dataset build: every topic up to a fixed end, partition task by partition task, and joins that hold ids
but no tokens.

Scores, sessions and trees (ids and numbers) decide which conversations of a partition task are wanted; no message is
read for that.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import orjson

from turnlog.consumers.datasets import MissingContent
from turnlog.consumers.datasets.manifest import Provenance
from turnlog.consumers.datasets.query import Facts, Filters, Joined, Query, TaskFacts, short
from turnlog.infra.blobs import BlobCorrupt, BlobMissing, inlined
from turnlog.infra.history import events_of, partitions
from turnlog.infra.log import Partition, Record
from turnlog.infra.roles.role import Role
from turnlog.schemas import topics
from turnlog.schemas.events import (
    Event,
    GroupScored,
    Outcome,
    Purpose,
    RolloutRequested,
    SampleBatchFormed,
    SegmentSample,
    SessionStarted,
    TurnTreeAssembled,
)
from turnlog.schemas.topics import Topic
from turnlog.schemas.types import TurnId

TOPICS = (topics.BATCHES, topics.SAMPLES, topics.TREES, topics.SESSIONS, topics.TURNS, topics.TASKS)
"""Topics that views read, derived topics first: everything that a record depends on was on the log before it."""

Progress = Callable[[int, int], None]
"""Called with (records passed, total number of records) from time to time."""
Placed = Callable[[Event], Event | None]
"""Function that returns the replacement of an event, or None if the build must skip it."""
TELL_EVERY = 256
E = TypeVar("E")


@dataclass(slots=True)
class DatasetInput:
    """Input of one build."""

    role: Role
    query: Query
    provenance: Provenance
    progress: Progress | None
    ends: dict[Partition, int]
    total: int = 0
    """Number of records in all planned passes."""
    placed: Placed | None = None
    passed: int = field(default=0)

    @classmethod
    async def open(
        cls, role: Role, query: Query, provenance: Provenance, plan: Sequence[Topic], progress: Progress | None,
        placed: Placed | None = None,
    ) -> DatasetInput:  # fmt: skip
        """Open a source. `plan` lists the topics to read, with one entry per pass.

        The ends of all topics are determined here, once. For trees they include open transactions, because samples of a
        transaction may become readable before its trees do.
        """
        ends: dict[Partition, int] = {}
        for topic in TOPICS:
            if topic in plan:
                ends |= await role.log.end_offsets(partitions(role, topic), committed=topic is not topics.TREES)
        starts = await role.log.start_offsets(list(ends))
        total = sum(ends[place] - starts[place] for topic in plan for place in partitions(role, topic))
        return cls(role, query, provenance, progress, ends, total, placed)

    async def read(self, place: Partition, *kinds: type[E]) -> AsyncIterator[tuple[Record, E]]:
        """Yield the events of these types in one partition."""
        began, start, names = self.passed, 0, [kind.__name__ for kind in kinds]
        reading = self.provenance.reading
        found = events_of(self.role, place, self.ends[place], names, runs=self.query.runs, reading=reading)
        async for record, event in found:
            start = reading.read[place][0]
            self.passed = began + record.offset - start
            if record.offset % TELL_EVERY == 0:
                if self.progress is not None:
                    self.progress(self.passed, self.total)
                await asyncio.sleep(0)  # lets Ctrl-C interrupt even if no poll has to wait
            if self._is_erased(event):
                continue
            self.provenance.runs.add(event.run_id)
            stands = event if self.placed is None else self.placed(event)
            if stands is not None:
                yield record, stands
        self.passed = began + self.ends[place] - reading.read[place][0]
        if self.progress is not None:
            self.progress(self.passed, self.total)

    def _is_erased(self, event: Event) -> bool:
        """Return whether the event belongs to a session that was erased; its samples are counted as removed."""
        keys = self.role.events.keys
        if keys is None or not keys.is_erased(getattr(event, "session_id", "")):
            return False
        self.provenance.removed["erased"] += isinstance(event, SegmentSample)
        return True

    async def inline_payloads(self, event: E, where: str) -> E:
        """Return the event with its payloads. Raises MissingContent, which names the object and the record."""
        try:
            whole: E = await inlined(event, self.role.blobs)
            return whole
        except (BlobMissing, BlobCorrupt) as gone:
            raise MissingContent(
                f"{where}: {gone}. Restore the object, or leave its rows out (--task, --since, --until, --max-step)"
            ) from gone

    async def tasks(self) -> dict[str, TaskFacts]:
        """Return the dataset and task type of every group that a RolloutRequested names."""
        found: dict[str, TaskFacts] = {}
        known: dict[TaskFacts, TaskFacts] = {}  # interned: many groups share a few values
        for place in partitions(self.role, topics.TASKS):
            async for record, event in self.read(place, RolloutRequested):
                if event.group_id not in found:
                    where = f"{record.topic}[{record.partition}]@{record.offset}"
                    task = TaskFacts(event.dataset, _task_type(await self._task_row(event, where)))
                    found[event.group_id] = known.setdefault(task, task)
        return found

    async def _task_row(self, event: RolloutRequested, where: str) -> object:
        """Return the dataset row, or None if it is missing and no filter needs its type. Raises MissingContent if one
        does."""
        try:
            whole = await self.inline_payloads(event, where)
        except MissingContent:
            if self.query.task_types:
                raise
            return None
        return whole.task

    async def trained_ids(self) -> set[bytes]:
        """Return `short` ids of the samples and sessions that the selected steps trained."""
        found: set[bytes] = set()
        least, most = self.query.min_step or 0, self.query.max_step
        for place in partitions(self.role, topics.BATCHES):
            async for _, event in self.read(place, SampleBatchFormed):
                if event.batch_index >= least and (most is None or event.batch_index <= most):
                    for row in event.samples:
                        found |= {short(row.sample_id), short(row.session_id)}
        return found

    async def read_joined(self, *, always_tasks: bool) -> Joined:
        """Read what the query needs from topics with other keys."""
        wants_tasks = always_tasks or self.query.joins_tasks
        return Joined(
            tasks=await self.tasks() if wants_tasks else {},
            trained=await self.trained_ids() if self.query.joins_steps else set(),
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


@dataclass(slots=True)
class Candidate:
    """A scored session. Its conversation ends at `last`, the last turn of its anchor."""

    run_id: str
    group_id: str
    session_id: str
    rollout_id: str
    task_id: str
    purpose: Purpose
    outcome: Outcome
    reward: float
    recipe: str = ""
    rollout_index: int = -1
    """-1 until its SessionStarted has been read."""
    agent: str = ""
    model: str = ""
    environment: str = ""
    environment_version: str = ""
    last: TurnId | None = None
    version_min: int = -1
    version_max: int = -1
    tokens: int = 0
    """Number of tokens of the last turn, prompt and output."""
    finish_reason: str = ""


Pair = tuple[str, str]
"""(session chosen, session rejected)"""


async def candidates(source: DatasetInput, unit: int, filters: Filters) -> dict[str, Candidate]:
    """Return the sessions of one partition task that the query admits, by session id, with what the log records about
    them."""
    found = await _read_candidates(source, unit, filters)
    await _add_starts(source, unit, filters, found)
    await _add_trees(source, unit, filters, found)
    for name in [name for name, each in found.items() if each.last is None or each.rollout_index < 0]:
        filters.count_removal("no_conversation")
        del found[name]
    return found


def best_of_groups(found: dict[str, Candidate], best: int, filters: Filters) -> dict[str, Candidate]:
    """Keep the `best` highest rewards of each group; ties are broken by rollout_index. The other sessions are counted
    as removed."""
    kept: dict[str, Candidate] = {}
    for members in _groups(found):
        ranked = sorted(members, key=lambda each: (-each.reward, each.rollout_index))
        kept |= {each.session_id: each for each in ranked[:best]}
        for _ in ranked[best:]:
            filters.count_removal("best_of_group")
    return kept


def pairs_of(found: dict[str, Candidate], query: Query, filters: Filters) -> dict[str, list[Pair]]:
    """Return the pairs of each group whose rewards differ by at least `min_margin`. Groups without unequal rewards, and
    pairs below the margin, are counted as removed."""
    pairs: dict[str, list[Pair]] = {}
    for members in _groups(found):
        ranked = sorted(members, key=lambda each: (-each.reward, each.rollout_index))
        worst_first = sorted(members, key=lambda each: (each.reward, each.rollout_index))
        proposed = list(itertools.combinations(ranked, 2)) if query.pairs == "all" else [(ranked[0], worst_first[0])]
        unequal = [(best, worst) for best, worst in proposed if best.reward > worst.reward]
        if not unequal:
            filters.count_removal("no_pair")
            continue
        for best, worst in unequal:
            if best.reward - worst.reward >= query.min_margin:
                pairs.setdefault(best.group_id, []).append((best.session_id, worst.session_id))
            else:
                filters.count_removal("min_margin")
    return pairs


def _groups(found: dict[str, Candidate]) -> list[list[Candidate]]:
    groups: dict[str, list[Candidate]] = defaultdict(list)
    for each in found.values():
        groups[each.group_id].append(each)
    return list(groups.values())


async def _read_candidates(source: DatasetInput, unit: int, filters: Filters) -> dict[str, Candidate]:
    found: dict[str, Candidate] = {}
    place = Partition(topics.SAMPLES.name, unit)
    async for record, event in source.read(place, GroupScored):
        source.provenance.settings_sha256.add(event.settings_sha256)
        source.provenance.fold_versions.add(event.fold_version)
        for each in event.rollouts:
            if each.reward is None or each.excluded_reason is not None:
                filters.count_removal("excluded")  # infrastructure failed, or there is no reward: not an example
                continue
            facts = Facts(
                event.group_id, event.task_id, event.purpose, each.outcome, each.reward, record.timestamp_ms,
                each.session_id,
            )  # fmt: skip
            if filters.admits(facts):
                found[each.session_id] = Candidate(
                    event.run_id, event.group_id, each.session_id, each.rollout_id, event.task_id, event.purpose,
                    each.outcome, each.reward,
                )  # fmt: skip
    return found


async def _add_starts(source: DatasetInput, unit: int, filters: Filters, found: dict[str, Candidate]) -> None:
    async for _, event in source.read(Partition(topics.SESSIONS.name, unit), SessionStarted):
        candidate = found.get(event.session_id)
        if candidate is None or candidate.rollout_index >= 0:
            continue
        candidate.rollout_index = event.rollout_index
        candidate.recipe, candidate.agent, candidate.model = map(
            sys.intern, (event.recipe, event.agent.name, event.model)
        )
        candidate.environment = sys.intern(event.environment.name)
        candidate.environment_version = sys.intern(event.environment.version)
        if not (
            filters.admits_recipe(event.recipe) and filters.count_removal(filters.check_environment(event.environment))
        ):
            del found[event.session_id]


async def _add_trees(source: DatasetInput, unit: int, filters: Filters, found: dict[str, Candidate]) -> None:
    async for _, event in source.read(Partition(topics.TREES.name, unit), TurnTreeAssembled):
        candidate = found.get(event.session_id)
        if candidate is None or event.anchor_segment is None:
            continue
        nodes = {node.turn: node for node in event.nodes}
        last = nodes[event.segments[event.anchor_segment].turns[-1]]
        candidate.last, candidate.tokens = last.turn, last.prompt_tokens + last.output_tokens
        candidate.finish_reason = last.finish_reason.value
        line = [last]
        while (base := line[-1].base) is not None:
            line.append(nodes[base])
        candidate.version_min = min((each.version_min for each in line if each.version_min >= 0), default=-1)
        candidate.version_max = max(each.version_max for each in line)
        if not filters.admits_versions(candidate.version_min, candidate.version_max):
            del found[event.session_id]
