"""The sandbox worker: calls from agent.tool-calls, run in sandboxes, answered on agent.tool-results.

Order of effects for a call: ToolCallStarted is acknowledged; the tool runs; ToolCallCompleted is acknowledged; the
committed offset passes the call. So after a death an unanswered call runs again as the next attempt, an answered one
never does, and what is committed is answered. The first ToolCallCompleted of a call_id on the log is the effective one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable

from prometheus_client import Gauge

from turnlog.infra.dead_letters import dead_letter, where
from turnlog.infra.log import GroupReader, LogError, Partition, Record
from turnlog.infra.role import Role
from turnlog.sandbox_workers import answers
from turnlog.sandbox_workers.call_runner import CallRunner
from turnlog.sandbox_workers.calls import Pending, Session, Unit, results_from
from turnlog.sandbox_workers.pool import Pool, opened
from turnlog.schemas.errors import UndecodableRecord
from turnlog.schemas.events import ToolCallCancelled, ToolCallCompleted, ToolCallRequested, ToolCallStarted
from turnlog.schemas.topics import TOOL_CALLS, TOOL_RESULTS

log = logging.getLogger(__name__)

COMMIT_S = 0.5
"""Pause between commits: what a restart may read again."""
DRAIN_S = 5.0
"""How long running calls may go on when the worker stops or its partitions move."""
POLL_S = 0.2
ISOLATED = Gauge("turnlog_sandbox_isolated", "1: bubblewrap; 0: tools run as plain processes", ["backend"])


async def main(role: Role) -> None:
    """Serve until `role.stopping`. Raises SandboxUnavailable, LogError, RegistryError."""
    async with opened(role.settings.sandbox) as pool:
        await Worker(role, pool).run()


class Worker:
    """One process's share of agent.tool-calls."""

    def __init__(self, role: Role, pool: Pool, *, clock: Callable[[], float] = time.time) -> None:
        """`clock` gives seconds since the epoch, as the records' timestamps do."""
        self._role = role
        self._runner = CallRunner(role, pool, self._park, clock)
        self._group = f"{role.settings.run.id}.sandbox"
        self._units: dict[int, Unit] = {}
        self._sessions: dict[str, Session] = {}
        self._committed: dict[int, object] = {}
        self._reader: GroupReader | None = None
        ISOLATED.labels(pool.provider.name).set(pool.provider.name == "bubblewrap")

    async def run(self) -> None:
        """Poll, dispatch, commit; then drain."""
        try:
            async with (
                self._role.log.group_reader(
                    self._group,
                    [TOOL_CALLS.name],
                    assigned=self._assigned,
                    revoked=self._revoked,
                    instance=self._role.instance,
                ) as reader,
                asyncio.TaskGroup() as self._tasks,
            ):
                self._reader = reader
                await self._serve(reader)
        except BaseExceptionGroup as group:  # one cause is reported as itself
            raise group.exceptions[0] from None

    async def _serve(self, reader: GroupReader) -> None:
        due = time.monotonic() + COMMIT_S
        while not self._role.stopping.is_set():
            for record in await reader.poll(timeout_s=POLL_S):
                await self._take(record)
            self._role.health.started()
            if time.monotonic() >= due:
                await self._commit(self._units)
                due = time.monotonic() + COMMIT_S
        await self._quiet(self._units)
        await self._commit(self._units)

    # -- partitions come and go

    async def _assigned(self, numbers: frozenset[int]) -> None:
        assert self._reader is not None
        for number in sorted(numbers):
            self._units[number] = unit = await self._recovered(number)
            self._reader.seek(Partition(TOOL_CALLS.name, number), unit.next_offset)

    async def _revoked(self, numbers: frozenset[int]) -> None:
        await self._quiet(numbers)
        try:
            await self._commit(numbers)
        except LogError as error:  # the next owner reads what we did from the results
            log.info("units %s went without a last commit: %s", sorted(numbers), error)
        for number in numbers:
            self._units.pop(number, None)
            self._committed.pop(number, None)

    async def _recovered(self, number: int) -> Unit:
        """The unit as its commit and the results since then tell."""
        calls, results = Partition(TOOL_CALLS.name, number), Partition(TOOL_RESULTS.name, number)
        commit = (await self._role.log.commits(self._group, [calls])).get(calls)
        starts = await self._role.log.start_offsets([calls, results])
        end = (await self._role.log.end_offsets([results]))[results]
        first = results_from(commit)
        unit = Unit(
            number,
            next_offset=starts[calls] if commit is None else commit.offset,
            next_result=starts[results] if first is None else first,
        )
        async with self._role.log.reader() as reader:
            reader.assign({results: unit.next_result})
            while reader.position(results) < end:
                for record in await reader.poll():
                    await self._recall(unit, record)
        return unit

    async def _recall(self, unit: Unit, record: Record) -> None:
        try:
            event = await self._role.events.decode(record)
        except UndecodableRecord as error:
            await self._park(record, error)
            return
        if isinstance(event, ToolCallStarted):
            unit.began(event, record.offset)
        elif isinstance(event, ToolCallCompleted):
            unit.answered(event, record.offset)

    async def _commit(self, numbers: Iterable[int]) -> None:
        assert self._reader is not None
        commits = {number: self._units[number].commit() for number in numbers if number in self._units}
        news = {number: commit for number, commit in commits.items() if self._committed.get(number) != commit}
        if news:
            await self._reader.commit({Partition(TOOL_CALLS.name, number): commit for number, commit in news.items()})
            self._committed.update(news)

    async def _quiet(self, numbers: Iterable[int]) -> None:
        """No call of these units runs any more: those that began may end, for DRAIN_S; none begins."""
        held = set(numbers)
        sessions = [session for session in self._sessions.values() if session.unit.number in held]
        for session in sessions:
            session.waiting.clear()
            if session.task and not (session.current and session.current.begun):
                session.task.cancel()
        tasks = [session.task for session in sessions if session.task]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=DRAIN_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # -- records

    async def _take(self, record: Record) -> None:
        unit = self._units[record.partition]
        if not unit.take(record.offset):
            return
        try:
            event = await self._role.events.decode(record)
        except UndecodableRecord as error:
            await self._park(record, error)
            unit.finish(record.offset)
            return
        if isinstance(event, ToolCallRequested):
            self._request(unit, event, record)
            return
        if isinstance(event, ToolCallCancelled):
            await self._cancel(unit, event)
        else:
            stray = answers.UnexpectedRecord(f"{type(event).__name__} does not belong into {record.topic}")
            await self._park(record, stray)
        unit.finish(record.offset)

    def _request(self, unit: Unit, request: ToolCallRequested, record: Record) -> None:
        known = unit.pending.get(request.call_id)
        if unit.answer(request.call_id) or (known is not None and known.sent):
            self._tasks.create_task(self._repeat(unit, record.offset, request.call_id, known))
            return
        unit.belongs(record.offset, request.call_id)
        if known is None:
            pending = unit.pending[request.call_id] = Pending(request, record)
            session = self._sessions.setdefault(request.session_id, Session(unit))
            session.push(pending)
            if session.task is None:
                session.task = self._tasks.create_task(self._work_off(request.session_id, session))

    async def _cancel(self, unit: Unit, event: ToolCallCancelled) -> None:
        pending = unit.pending.get(event.call_id)
        if pending is not None:
            pending.cancelled = True
            if pending.sandbox is not None:
                await pending.sandbox.cancel()

    async def _repeat(self, unit: Unit, offset: int, call_id: str, pending: Pending | None) -> None:
        """Publish a stored answer again: whoever asks after it was written did not see it."""
        if pending is not None:
            await pending.settled.wait()
        stored = unit.answer(call_id)
        if stored is not None:  # else the unit is going away with this record unfinished
            again = dataclasses.replace(stored, cached=True)
            unit.answered(again, (await self._role.events.append(again))[1])
            unit.finish(offset)

    async def _work_off(self, session_id: str, session: Session) -> None:
        """Answer the session's calls one after the other."""
        try:
            while session.waiting:
                pending = session.pop()
                try:
                    await self._runner.answer(session.unit, pending)
                finally:
                    pending.settled.set()
        finally:
            del self._sessions[session_id]

    async def _park(self, record: Record, cause: Exception) -> None:
        log.warning("%s is parked: %s: %s", where(record), type(cause).__name__, cause)
        letter = dead_letter(record, cause, run_id=self._role.settings.run.id, role=self._role.name)
        await self._role.events.append(letter)
