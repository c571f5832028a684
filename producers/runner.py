"""The agent runner: consumes tasks, runs many white-box sessions at once, answers their tool calls from the log.

It keeps nothing that the log does not hold. After a crash or a rebalance, the new owner of a task asks the gateway for
the session and continues it (rollout.py). Work is organised by partition task (`RunnerPartitionTask`): partition p of
tasks and of agent.tool-results. Its committed offsets are low-water marks: the first record of each topic that the
oldest open rollout needs.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import httpx
from prometheus_client import Counter, Gauge

from turnlog.infra.blobs import inlined
from turnlog.infra.environments.sources import task_source
from turnlog.infra.environments.verifiers import judges
from turnlog.infra.log import Commit, GroupReader, Partition, Record, check_commits
from turnlog.infra.roles.measures import STAGE_S
from turnlog.infra.roles.role import Role
from turnlog.names import RECORD_HEADER, ConsumerGroup
from turnlog.producers.gateway_client import GatewayClient, RequestRejected
from turnlog.producers.rollout import Rollout
from turnlog.producers.tool_calls import ToolResults
from turnlog.schemas import UndecodableRecord, topics
from turnlog.schemas.events import GroupEmitted, RolloutRequested, ToolCallCompleted, ToolCallStarted


@dataclass(slots=True)
class OpenRollout:
    """A rollout that was begun and is not over."""

    offset: int
    """Offset of its request in tasks."""
    results_from: int
    """Start offset in agent.tool-results: answers to its calls are at or after it."""


@dataclass(slots=True)
class RunnerPartitionTask:
    """Partition task of a runner. `tasks_end` and `results_end` are the ends of the topics at its assignment; another
    owner may have begun what lies before them."""

    number: int
    tasks_end: int
    results_end: int
    tasks_position: int
    """Position up to which tasks was read."""
    results_position: int
    results_from: int = field(init=False)
    """Position from which this owner reads agent.tool-results."""
    results: ToolResults = field(default_factory=ToolResults)
    open: dict[str, OpenRollout] = field(default_factory=dict)
    running: set[asyncio.Task[None]] = field(default_factory=set)
    caught_up: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once every answer that an earlier owner may have received is in `results`."""

    def __post_init__(self) -> None:
        self.results_from = self.results_position
        self.advance(self.tasks_position, self.results_position)

    @property
    def tasks(self) -> Partition:
        return Partition(topics.TASKS.name, self.number)

    @property
    def tool_results(self) -> Partition:
        return Partition(topics.TOOL_RESULTS.name, self.number)

    def take(self, rollout_id: str, offset: int) -> bool:
        """Open the rollout of the request at `offset`. Return True if another owner may have begun it."""
        begun = offset < self.tasks_end
        self.open[rollout_id] = OpenRollout(offset, self.results_from if begun else self.results_position)
        self.results.expect(rollout_id)
        return begun

    def close(self, rollout_id: str) -> None:
        """Close a rollout that is over."""
        del self.open[rollout_id]
        self.results.forget(rollout_id)

    def advance(self, tasks_position: int, results_position: int) -> None:
        """Record the reader's positions."""
        self.tasks_position, self.results_position = tasks_position, results_position
        if not self.caught_up.is_set() and tasks_position >= self.tasks_end and results_position >= self.results_end:
            self.results.settle()
            self.caught_up.set()

    def low_water(self) -> dict[Partition, Commit]:
        """Return the low-water marks to commit."""
        tasks = min((rollout.offset for rollout in self.open.values()), default=self.tasks_position)
        results = min((rollout.results_from for rollout in self.open.values()), default=self.results_position)
        return {
            self.tasks: Commit.low_water(tasks, high=self.tasks_position, under_way=len(self.open)),
            self.tool_results: Commit.low_water(results, high=self.results_position),
        }


log = logging.getLogger(__name__)
TOPICS = (topics.TASKS.name, topics.TOOL_RESULTS.name)
ANSWERED = tuple((RECORD_HEADER, record.__name__.encode()) for record in (ToolCallStarted, ToolCallCompleted))
COMMIT_EVERY_S = 1.0
POLL_S = 0.1
PAUSE_S = 0.005
"""Seconds between two fetches under load. A call's ToolCallStarted would otherwise cost a fetch of its own."""
OPEN = Gauge("turnlog_runner_rollouts_open", "Rollouts in progress")
CUT = Counter("turnlog_runner_rollouts_cut", "Rollouts ended because their group was scored without them")
ROLLOUT_S, SETTLE_S, COMMIT_S = (STAGE_S.labels("runner", stage) for stage in ("rollout", "settle", "commit"))
LOOK_BACK = 64
"""Number of records in each partition of group-scores that are read at start, for groups whose stragglers the
predecessor ran."""
REMEMBERED = 4096
"""Number of scored groups that are remembered. A rollout of a forgotten group continues to its own end."""


async def main(role: Role) -> None:
    """Run rollouts until the role stops. Open ones are left to the next owner, who continues them.

    Raises whatever a rollout raised (GatewayUnavailable, GatewayRefused, LogUnavailable, a bug). The process then ends,
    and the committed low-water marks lie before all open work."""
    async with GatewayClient(role.settings) as gateway, judges.client() as http:
        runner = Runner(role, gateway, http)
        async with role.log.group_reader(
            ConsumerGroup.RUNNER.format(run=role.settings.run.id),
            TOPICS,
            assigned=runner.on_assigned,
            revoked=runner.on_revoked,
            instance=role.instance,
            pause_s=PAUSE_S,
        ) as reader:
            following = asyncio.create_task(runner.follow_scores())
            try:
                await runner.run(reader)
            finally:
                while not following.done():  # a wait_for may lose a cancellation (CPython 3.11, gh-86296)
                    following.cancel()
                    await asyncio.wait({following}, timeout=0.5)


class Runner:
    """Partition tasks of this process and the rollouts in them."""

    def __init__(self, role: Role, gateway: GatewayClient, http: httpx.AsyncClient) -> None:
        self._role = role
        self._gateway = gateway
        self._http = http
        self._group = ConsumerGroup.RUNNER.format(run=role.settings.run.id)
        self._units: dict[int, RunnerPartitionTask] = {}
        self._slots = asyncio.Semaphore(role.settings.runner.concurrency)
        self._reader: GroupReader | None = None
        self._failure: BaseException | None = None
        self._committed: dict[Partition, Commit] = {}
        self._acting: dict[str, set[Rollout]] = {}
        """Acting rollouts by group."""
        self._scored: dict[str, None] = {}
        """Groups that were scored most recently."""

    async def follow_scores(self) -> None:
        """Cut the open rollouts of groups that are scored, until cancelled; nobody trains on them any more."""
        try:
            await self._follow_scores()
        except Exception as error:  # the process ends with it, as with what a rollout raises
            self._failure = self._failure or error

    async def _follow_scores(self) -> None:
        log_ = self._role.log
        spec = (await log_.topics()).get(topics.GROUP_SCORES.name)
        places = [Partition(topics.GROUP_SCORES.name, number) for number in range(spec.partitions if spec else 0)]
        if not places:
            log.warning("no topic %s: stragglers run to their end", topics.GROUP_SCORES.name)
            return
        starts, ends = await log_.start_offsets(places), await log_.end_offsets(places)
        async with log_.reader(patient=True) as reader:
            reader.assign({place: max(starts[place], ends[place] - LOOK_BACK) for place in places})
            while True:
                for record in await reader.poll(timeout_s=1.0):
                    try:
                        event = await self._role.events.decode(record)
                    except UndecodableRecord:  # the feeder dead-letters it
                        continue
                    if isinstance(event, GroupEmitted):
                        self._cut(event.group_id)

    def _cut(self, group_id: str) -> None:
        self._scored[group_id] = None
        if len(self._scored) > REMEMBERED:
            del self._scored[next(iter(self._scored))]
        for rollout in self._acting.get(group_id, ()):
            rollout.cut()

    async def run(self, reader: GroupReader) -> None:
        """Poll, feed answers, start rollouts and commit, until the role stops."""
        self._reader = reader
        self._role.health.mark_started()
        last_commit = time.monotonic()
        try:
            while not self._role.stopping.is_set():
                self._role.health.beat()
                await self._take(await reader.poll(timeout_s=POLL_S))
                if self._failure is not None:
                    raise self._failure
                if time.monotonic() - last_commit > COMMIT_EVERY_S:
                    await self._commit(self._units.values())
                    last_commit = time.monotonic()
        finally:
            await self._cancel(self._units.values())
        await self._commit(self._units.values())

    async def on_assigned(self, numbers: frozenset[int]) -> None:
        """Start the assigned partition tasks at their low-water marks."""
        partitions = [Partition(topic, number) for number in sorted(numbers) for topic in TOPICS]
        log_ = self._role.log
        commits = await log_.commits(self._group, partitions)
        missing = [place for place in partitions if place not in commits]
        spines = [Partition(topics.SESSIONS.name, number) for number in range(self._role.settings.kafka.groups)]
        await check_commits(log_, self._group, partitions, missing, spines)
        self._committed |= commits
        starts = await log_.start_offsets(partitions)
        ends = await log_.end_offsets(partitions)
        assert self._reader is not None
        for number in sorted(numbers):
            tasks, results = (Partition(topic, number) for topic in TOPICS)
            positions = [commits[p].offset if p in commits else starts[p] for p in (tasks, results)]
            self._units[number] = RunnerPartitionTask(number, ends[tasks], ends[results], positions[0], positions[1])
            self._reader.seek(tasks, positions[0])
            self._reader.seek(results, positions[1])
        log.info("units %s assigned", sorted(numbers))

    async def on_revoked(self, numbers: frozenset[int]) -> None:
        """Stop the rollouts of the revoked partition tasks; the next owner continues them."""
        units = [self._units.pop(number) for number in sorted(numbers) if number in self._units]
        await self._cancel(units)
        await self._commit(units)
        log.info("units %s revoked", sorted(numbers))

    async def _take(self, records: list[Record]) -> None:
        for record in records:
            if record.topic == topics.TASKS.name:
                await self._task(record)
            elif any(header in record.headers for header in ANSWERED):
                await self._result(record)
        assert self._reader is not None
        for unit in self._units.values():
            unit.advance(self._reader.position(unit.tasks), self._reader.position(unit.tool_results))

    async def _result(self, record: Record) -> None:
        try:
            event = await self._role.events.decode(record)
        except UndecodableRecord as cause:
            await self._role.park(record, cause)
            return
        results = self._units[record.partition].results
        if isinstance(event, ToolCallStarted):
            results.record_start(event, time.time() - record.timestamp_ms / 1000)
        else:
            results.feed(event)

    async def _task(self, record: Record) -> None:
        try:
            event = await self._role.events.decode(record)
        except UndecodableRecord as cause:
            await self._role.park(record, cause)
            return
        unit = self._units[record.partition]
        if event.run_id != self._role.settings.run.id or event.rollout_id in unit.open:
            return
        begun = unit.take(event.rollout_id, record.offset)
        task = asyncio.create_task(self._rollout(unit, record, event, begun), name=f"rollout {event.rollout_id}")
        unit.running.add(task)
        task.add_done_callback(functools.partial(self._over, unit, event.rollout_id))
        OPEN.inc()

    async def _rollout(self, unit: RunnerPartitionTask, record: Record, request: RolloutRequested, begun: bool) -> None:
        if begun:
            await unit.caught_up.wait()
        async with self._slots:
            if request.group_id in self._scored:
                CUT.inc()
                log.info("rollout %s: its group was scored without it, before it began", request.rollout_id)
                return
            role = self._role
            rollout = Rollout(
                await inlined(request, role.blobs),
                task_source(request.recipe),
                role.settings.runner,
                self._gateway,
                role.events,
                unit.results,
                role.blobs,
                self._http,
            )
            acting = self._acting.setdefault(request.group_id, set())
            acting.add(rollout)
            try:
                with ROLLOUT_S.time():
                    owed = await rollout.run(resume=begun)
            except RequestRejected as cause:  # no session of it can be opened, and the next owner would fare no better
                await role.park(record, cause)
                return
            finally:
                acting.discard(rollout)
                if not acting:
                    self._acting.pop(request.group_id, None)
                CUT.inc(rollout.was_cut)
        if owed is not None:  # it stays open without a slot, so that a slow judge delays no agent
            with SETTLE_S.time():
                await rollout.settle(owed)

    def _over(self, unit: RunnerPartitionTask, rollout_id: str, task: asyncio.Task[None]) -> None:
        OPEN.dec()
        unit.running.discard(task)
        if task.cancelled():
            return  # the rollout is still open: whoever reads its request next continues it
        error = task.exception()
        if error is None:
            unit.close(rollout_id)
        elif self._failure is None:
            self._failure = error

    async def _cancel(self, units: Iterable[RunnerPartitionTask]) -> None:
        running = [task for unit in units for task in unit.running]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _commit(self, units: Iterable[RunnerPartitionTask]) -> None:
        """Commit the low-water marks that moved."""
        assert self._reader is not None
        marks = {p: mark.keeping(self._committed.get(p)) for unit in units for p, mark in unit.low_water().items()}
        moved = {p: mark for p, mark in marks.items() if self._committed.get(p) != mark}
        if moved:
            with COMMIT_S.time():
                await self._reader.commit(moved)
            self._committed |= moved
