"""The sandbox worker: runs the calls of agent.tool-calls in sandboxes and answers them on agent.tool-results.

Order of effects for a call: ToolCallStarted is acknowledged; the tool runs; a durable session's files are stored;
ToolCallCompleted is acknowledged; the committed offset passes the call. So after a crash an unanswered call runs again
as the next attempt, an answered one never does, and every committed call has an answer. The first ToolCallCompleted of
a call_id on the log is the effective one."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from prometheus_client import Gauge

from turnlog.infra.event_log import where
from turnlog.infra.log import GroupReader, LogError, Partition, Record
from turnlog.infra.roles import now_s
from turnlog.infra.roles.ending import drain_s
from turnlog.infra.roles.role import Role
from turnlog.names import ConsumerGroup
from turnlog.processors.core.fold.unit import ForeignRun
from turnlog.sandbox_workers.call_runner import CallRunner
from turnlog.sandbox_workers.calls import (
    CallOutcome,
    PartitionRecovery,
    Pending,
    SessionQueue,
    ToolCallPartitionTask,
    ToolResultReader,
    UnexpectedRecord,
    apply_event,
    make_completed_event,
    unrun,
)
from turnlog.sandbox_workers.placements import Placement
from turnlog.sandbox_workers.pooling import SandboxPools
from turnlog.sandbox_workers.pooling.pool import Pool
from turnlog.sandbox_workers.protocol import Shape
from turnlog.schemas import SessionIsErased, UndecodableRecord
from turnlog.schemas.content import holds_erased
from turnlog.schemas.events import ToolCallCancelled, ToolCallCompleted, ToolCallRequested, ToolStatus
from turnlog.schemas.events.tools import SESSION_OVER
from turnlog.schemas.topics import TOOL_CALLS

if TYPE_CHECKING:
    from turnlog.sandbox_workers.egress import Egress

log = logging.getLogger(__name__)

COMMIT_S = 0.5
"""Seconds between commits. A restart may read the records of this time again."""
DRAIN_S = 5.0
"""Seconds that running calls get to finish when their partitions move; the rebalance of the consumer group waits for
it."""
POLL_S = 0.2
EXPECT_S = 0.1
"""Seconds between looks at the queue for prewarming."""
ISOLATED = Gauge("turnlog_sandbox_isolated", "1: bubblewrap; 0: tools run as plain processes", ["backend"])


async def main(role: Role) -> None:
    """Serve until `role.stopping`. Raises BackendUnavailable, EgressError, LogError, RegistryError,
    StoreUnavailable."""
    settings = role.settings
    async with AsyncExitStack() as stack:
        egress = None
        if settings.egress.allow:
            from turnlog.sandbox_workers.egress import Egress

            egress = await stack.enter_async_context(Egress.open_temporary(settings.egress, role.blobs))
        pools = await stack.enter_async_context(SandboxPools.open(settings, ca=egress.ca if egress else None))
        role.health.expose("pools", pools.snapshot)
        await SandboxWorker(role, pools, egress=egress).run()


class SandboxWorker:
    """Serves the partitions of agent.tool-calls that are assigned to this process."""

    def __init__(
        self,
        role: Role,
        pools: SandboxPools,
        *,
        egress: Egress | None = None,
        clock: Callable[[], float] = now_s,
        commit_s: float = COMMIT_S,
        move_s: float = DRAIN_S,
        stop_s: float | None = None,
    ) -> None:
        """Create a worker. `clock` returns seconds since the epoch, as in the records' timestamps. `commit_s` is the
        pause between commits. `move_s` and `stop_s` are the seconds that running calls get when their partitions move
        and when the role stops (None: as long as one call may take)."""
        self._commit_s, self._move_s = commit_s, move_s
        self._stop_s = drain_s("sandbox", role.settings) if stop_s is None else stop_s
        self._role = role
        self._pools = pools
        self._runner = CallRunner(role, pools, self._catch_up, clock, egress)
        self._group = ConsumerGroup.SANDBOX.format(run=role.settings.run.id)
        self._results = ToolResultReader(role.log, role.events)
        self._recovery = PartitionRecovery(role, self._group)
        self._units: dict[int, ToolCallPartitionTask] = {}
        self._sessions: dict[str, SessionQueue] = {}
        self._left: dict[int, tuple[str, ...]] = {}
        """Durable sessions of partitions that were revoked just now, by partition."""
        self._committed: dict[int, object] = {}
        self._expected: dict[Pool, Counter[Shape]] = {}
        self._reader: GroupReader | None = None
        name = pools.local.provider.name
        ISOLATED.labels(name).set(name == "bubblewrap")

    async def run(self) -> None:
        """Poll, dispatch and commit until the role stops; then drain."""
        try:
            async with self._join_group() as reader, asyncio.TaskGroup() as self._tasks:
                self._reader = reader
                await self._serve(reader)
        except BaseExceptionGroup as group:  # report the first error as itself, with its cause
            raise group.exceptions[0] from group.exceptions[0].__cause__
        finally:
            await self._runner.close()
            await self._results.close()

    @asynccontextmanager
    async def _join_group(self) -> AsyncIterator[GroupReader]:
        async with self._role.log.group_reader(
            self._group,
            [TOOL_CALLS.name],
            assigned=self._on_assigned,
            revoked=self._on_revoked,
            instance=self._role.instance,
        ) as reader:
            yield reader

    async def _serve(self, reader: GroupReader) -> None:
        due = expect = time.monotonic()
        while not self._role.stopping.is_set():
            self._role.health.beat()
            for record in await reader.poll(timeout_s=POLL_S):
                await self._take(record)
            self._role.health.mark_started()
            now = time.monotonic()
            if now >= expect:
                self._expect()
                expect = now + EXPECT_S
            if now >= due:
                await self._commit(self._units)
                self._runner.connections.sweep()
                due = time.monotonic() + self._commit_s
        await self._drain(reader)
        await self._commit(self._units)

    async def _drain(self, reader: GroupReader) -> None:
        """Let calls that have begun finish, for as long as one may take; start none. The consumer group is served
        meanwhile, and gets partitions that move after DRAIN_S. New records are left to the next owner."""
        tasks = [queue.task for queue in self._hush(self._units).values() if queue.task]
        deadline = time.monotonic() + self._stop_s
        while not all(task.done() for task in tasks) and time.monotonic() < deadline:
            await reader.poll(timeout_s=POLL_S)
        await self._quiet(self._units)

    # -- partitions come and go

    async def _on_assigned(self, numbers: frozenset[int]) -> None:
        assert self._reader is not None
        for unit in await self._recovery.units(sorted(numbers)):
            self._units[unit.number] = unit
            self._reader.seek(Partition(TOOL_CALLS.name, unit.number), unit.next_offset)
        left, self._left = self._left, {}
        for number, sessions in left.items():
            if number not in numbers:
                self._runner.connections.release(number)
            for session in sessions:
                if number in numbers:  # the partition came back in the same rebalance, so its sandboxes are still valid
                    self._units[number].durable(session)
                else:
                    self._pools.release(session)

    async def _on_revoked(self, numbers: frozenset[int]) -> None:
        await self._quiet(numbers)
        try:
            await self._commit(numbers)
        except LogError as error:  # the next owner recovers our work from the results
            log.info("partition tasks %s were revoked without a final commit: %s", sorted(numbers), error)
        for number in numbers:
            unit = self._units.pop(number, None)
            self._committed.pop(number, None)
            if unit is not None:
                self._left[number] = unit.sessions()

    async def _commit(self, numbers: Iterable[int]) -> None:
        assert self._reader is not None
        commits = {number: self._units[number].commit() for number in numbers if number in self._units}
        news = {number: commit for number, commit in commits.items() if self._committed.get(number) != commit}
        if news:
            await self._reader.commit({Partition(TOOL_CALLS.name, number): commit for number, commit in news.items()})
            self._committed.update(news)

    def _hush(self, numbers: Iterable[int]) -> dict[str, SessionQueue]:
        """Keep the waiting calls of these partitions from starting. Return their queues; each may still have one call
        running."""
        held = set(numbers)
        queues = {name: queue for name, queue in self._sessions.items() if queue.unit.number in held}
        for queue in queues.values():
            queue.waiting.clear()
            if queue.task and not (queue.current and queue.current.begun):
                queue.task.cancel()
        return queues

    async def _quiet(self, numbers: Iterable[int]) -> None:
        """Stop all calls of these partitions: those that have begun get DRAIN_S to finish, the others never start."""
        queues = self._hush(numbers)
        tasks = [queue.task for queue in queues.values() if queue.task]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=self._move_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for name in queues:  # a task that is cancelled before its first step never reaches its `finally`
            self._sessions.pop(name, None)

    # -- records

    async def _take(self, record: Record) -> None:
        unit = self._units[record.partition]
        if not unit.take(record.offset):
            return
        try:
            event = await self._role.events.decode(record)
            ForeignRun.check(event, self._role.settings.run.id, where(record))
        except (UndecodableRecord, ForeignRun) as error:
            await self._role.park(record, error)
            unit.finish(record.offset)
            return
        if isinstance(event, ToolCallRequested) and (event.caller or holds_erased(event)):
            unit.finish(record.offset)  # the worker that wrote it runs it; an erased one has no arguments any more
            return
        if isinstance(event, ToolCallRequested):
            self._request(unit, event, record)
            return
        if isinstance(event, ToolCallCancelled):
            if (pending := unit.pending.get(event.call_id)) is not None:
                await pending.cancel()
            if event.reason == SESSION_OVER:
                self._runner.release(unit.session(event))
        else:
            stray = UnexpectedRecord(f"{type(event).__name__} does not belong in {record.topic}")
            await self._role.park(record, stray)
        unit.finish(record.offset)

    def _request(self, unit: ToolCallPartitionTask, request: ToolCallRequested, record: Record) -> None:
        known = unit.pending.get(request.call_id)
        if (known is not None and known.sent) or unit.answers.find(request.call_id) is not None:
            self._tasks.create_task(self._repeat(unit, record, request, known))
            return
        unit.belongs(record.offset, request.call_id)
        if known is not None:
            return
        pending = unit.pending[request.call_id] = Pending(request, record)
        name = unit.session(request)
        session = self._sessions.setdefault(name, SessionQueue(unit))
        session.push(pending)
        if request.sandbox.durable_workspace:
            unit.durable(name)
        if session.task is None:
            session.task = self._tasks.create_task(self._work_off(name, session))

    async def _repeat(
        self, unit: ToolCallPartitionTask, record: Record, request: ToolCallRequested, pending: Pending | None
    ) -> None:
        """Publish a stored answer again: a client that repeats the request after it was written did not see it."""
        if pending is not None:
            await pending.settled.wait()
        if pending is not None and pending.dropped:
            unit.finish(record.offset)
            return
        await self._catch_up(unit)
        position = unit.answers.find(request.call_id)
        if position is None or self._units.get(unit.number) is not unit:
            return  # the partition is being revoked with this record unfinished
        stored = await self._results.at(unit.number, position)
        if not isinstance(stored, ToolCallCompleted):
            gone = unrun(ToolStatus.infra_error, "answer_gone", f"the answer at {position} is not on the log any more")
            outcome = CallOutcome(execution=gone, workspace=None)
            stored = make_completed_event(request, outcome, attempt=0, queue_s=0.0, worker=self._role.instance)
        again = dataclasses.replace(stored, cached=True)
        with contextlib.suppress(SessionIsErased):
            unit.note_answer(again, (await self._role.events.append(again))[1])
        unit.finish(record.offset)

    async def _work_off(self, name: str, session: SessionQueue) -> None:
        """Answer the session's calls one after the other."""
        try:
            while session.waiting:
                pending = session.pop()
                try:
                    await self._runner.answer(session.unit, pending)
                finally:
                    pending.settled.set()
        finally:
            del self._sessions[name]

    async def _catch_up(self, unit: ToolCallPartitionTask) -> None:
        """Read the records that other workers wrote into the results of this partition."""
        while unit.strays:
            first, end = min(unit.strays), max(unit.strays) + 1
            for position, event in await self._results.between(unit.number, first, end):
                apply_event(unit, event, position)
            unit.strays.difference_update(range(first, end))

    # -- prewarming

    def _expect(self) -> None:
        """Tell the pools which calls follow the running ones, so that sandboxes of their shapes are made ready."""
        demand: dict[Pool, Counter[Shape]] = {pool: Counter() for pool in self._expected}
        for session in self._sessions.values():
            following = session.next()
            if following is not None and not following.request.sandbox.durable_workspace:
                placement = self._runner.placement(following)
                if isinstance(placement, Placement):
                    demand.setdefault(placement.pool, Counter())[placement.shape] += 1
        for pool, shapes in demand.items():
            if self._expected.get(pool) != shapes:
                pool.expect(shapes)
        self._expected = demand
