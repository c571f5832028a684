"""State of one partition in a worker: its unanswered calls, the positions of the other calls' answers, and the records
that the worker writes about a call.

A worker that is assigned the partition recovers this state from the last commit and from the results after the position
that the commit names.

Parked                  a record of agent.tool-calls that goes to the dead letters
├── AttemptsExhausted   the call took its sandbox down too often: look at its arguments
└── UnexpectedRecord    the record belongs into another topic: its producer is wrong
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import heapq
import json
from collections import OrderedDict, deque
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from turnlog.infra.event_log import EventLog
from turnlog.infra.history import caught_up, read_range
from turnlog.infra.log import Commit, Log, OffsetOutOfRange, Partition, Reader, Record, check_commits
from turnlog.infra.roles.role import Role
from turnlog.sandbox_workers.inside.interpreter import ENDED
from turnlog.sandbox_workers.outside import NoSandbox
from turnlog.sandbox_workers.placements import Placement
from turnlog.sandbox_workers.protocol import Execution, FileRefused, Sandbox, Verdict
from turnlog.sandbox_workers.tools import Refusal
from turnlog.schemas import UndecodableRecord
from turnlog.schemas.events import (
    EgressRequest,
    Event,
    ToolCallCancelled,
    ToolCallCompleted,
    ToolCallRequested,
    ToolCallStarted,
    ToolStatus,
)
from turnlog.schemas.ids import digest
from turnlog.schemas.topics import TOOL_CALLS, TOOL_RESULTS
from turnlog.schemas.types import BlobRef

SESSIONS = 1024
"""Durable sessions remembered per partition. A worker has far fewer slots to keep sessions in."""

KEPT = 65_536
"""Answers per partition whose position a worker remembers while it owns the partition."""
RECALLED = 8_192
"""Minimum number of answers per partition that its next owner knows: it reads that many results before it serves."""


@dataclass(slots=True)
class Pending:
    """A request that is not answered yet."""

    request: ToolCallRequested
    record: Record
    placement: Placement | Refusal | None = None
    """Placement or refusal of the call; None until it is first computed."""
    cancelled: bool = False
    begun: bool = False
    """True once its ToolCallStarted is being written, or is on the log."""
    dropped: bool = False
    """True if its session was erased, so that no answer is written."""
    sent: bool = False
    """True once its answer is being written: a client that repeats the request from now on may miss it."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when nothing more will be done about the call."""
    lease_timeout: asyncio.Timeout | None = None
    """Time-out that ends its wait for a sandbox."""
    sandbox: Sandbox | NoSandbox | None = None
    """Sandbox in which the call runs now."""
    again: bool = False
    """True if the call runs again, in a new sandbox that was alive just before."""
    deaths: int = 0
    """Number of such new sandboxes that have gone away under this call."""
    died: bool = False
    """True if any sandbox went away under this call."""
    stateful: bool = False
    """True if its sandbox had a live interpreter for it to use."""

    async def cancel(self) -> None:
        """Cancel the call, wherever it is: waiting for a sandbox or running."""
        self.cancelled = True
        if self.lease_timeout is not None and not self.lease_timeout.expired():
            self.lease_timeout.reschedule(asyncio.get_running_loop().time())
        if self.sandbox is not None:
            await self.sandbox.cancel()


class ToolCallPartitionTask:
    """State of partition `number` of agent.tool-calls and of the partition of agent.tool-results that holds its
    answers."""

    def __init__(self, number: int, *, next_offset: int, next_result: int, last: Commit | None = None) -> None:
        """Create the state. `last` is the commit at which the previous owner stopped."""
        self.number = number
        self._last = last
        self.next_offset = next_offset
        """Offset in agent.tool-calls of the first record that was not taken."""
        self.next_result = next_result
        """First position in agent.tool-results beyond all records that are known to be written."""
        self.strays: set[int] = set()
        """Positions below `next_result` that nobody has looked at: another worker wrote there while this one had the
        partition."""
        self.attempts: dict[str, int] = {}
        """Highest attempt on the log by call_id, for unanswered calls."""
        self.pending: dict[str, Pending] = {}
        self.answers = Answered()
        self._open: set[int] = set()
        self._records: dict[str, list[int]] = {}
        self._begun_at: dict[str, int] = {}
        self._sessions: dict[str, None] = {}

    # -- records of agent.tool-calls

    def take(self, offset: int) -> bool:
        """Take the record at `offset` of agent.tool-calls as unfinished. Return False if it was taken before."""
        if offset < self.next_offset:
            return False
        self.next_offset = offset + 1
        self._open.add(offset)
        return True

    def belongs(self, offset: int, call_id: str) -> None:
        """Finish the record at `offset` together with the call."""
        self._records.setdefault(call_id, []).append(offset)

    def finish(self, offset: int) -> None:
        """Mark the record at `offset` as finished."""
        self._open.discard(offset)

    def session(self, request: ToolCallRequested | ToolCallCancelled) -> str:
        """Return this worker's name for the request's session. The same id in two partitions makes two sessions, since
        neither partition knows of the other's calls."""
        return f"{self.number}/{request.session_id}"

    def durable(self, session: str) -> None:
        """Remember a session, by this worker's name for it, for which a sandbox may be retained."""
        self._sessions.pop(session, None)
        self._sessions[session] = None
        if len(self._sessions) > SESSIONS:
            del self._sessions[next(iter(self._sessions))]

    def sessions(self) -> tuple[str, ...]:
        """Return the remembered durable sessions."""
        return tuple(self._sessions)

    # -- records of agent.tool-results

    def saw(self, position: int) -> None:
        """Note that `position` of agent.tool-results holds a known record."""
        if position >= self.next_result:
            self.strays.update(range(self.next_result, position))
            self.next_result = position + 1
        else:
            self.strays.discard(position)

    def began(self, started: ToolCallStarted, position: int) -> None:
        """Note that a ToolCallStarted is at `position`."""
        self.saw(position)
        if self.answers.find(started.call_id) is None:
            self.attempts[started.call_id] = max(started.attempt, self.attempts.get(started.call_id, 0))
            self._begun_at.setdefault(started.call_id, position)

    def note_answer(self, completed: ToolCallCompleted, position: int) -> None:
        """Note that a ToolCallCompleted is at `position`; the first one of a call is effective."""
        self.saw(position)
        self.answers.add(completed.call_id, position)
        self.attempts.pop(completed.call_id, None)
        self._begun_at.pop(completed.call_id, None)
        self.pending.pop(completed.call_id, None)
        self._open.difference_update(self._records.pop(completed.call_id, ()))

    def drop(self, pending: Pending) -> None:
        """Finish the records of a call that gets no answer, because its session was erased."""
        pending.dropped = True
        call_id = pending.request.call_id
        self.attempts.pop(call_id, None)
        self._begun_at.pop(call_id, None)
        self.pending.pop(call_id, None)
        self._open.difference_update(self._records.pop(call_id, ()))

    def commit(self) -> Commit:
        """Return the commit: the low-water mark of the calls. Its metadata has the position from which a restarted
        worker reads the results and, for those who ask for unread records, how far the calls were taken and how many of
        them are not finished."""
        needed = [position for call_id, position in self._begun_at.items() if call_id in self.pending]
        needed += [*self.strays, self.answers.recalled_from(self.next_result)]
        low = min(self._open, default=self.next_offset)
        mark = Commit.low_water(low, high=self.next_offset, under_way=len(self._open), results=min(needed))
        return mark.keeping(self._last)


def results_from(commit: Commit | None) -> int | None:
    """Return the position in a commit's metadata, or None if there is none."""
    if commit is None or not commit.metadata:
        return None
    return int(json.loads(commit.metadata)["results"])


@dataclass(slots=True)
class SessionQueue:
    """Waiting calls of one session, smallest call_seq first; one runs at a time."""

    unit: ToolCallPartitionTask
    waiting: list[tuple[int, int, Pending]] = field(default_factory=list)
    current: Pending | None = None
    task: asyncio.Task[None] | None = None

    def push(self, pending: Pending) -> None:
        """Queue a call."""
        heapq.heappush(self.waiting, (pending.request.call_seq, pending.record.offset, pending))

    def pop(self) -> Pending:
        """Remove and return the next call. Raises IndexError if none waits."""
        self.current = heapq.heappop(self.waiting)[2]
        return self.current

    def next(self) -> Pending | None:
        """Return the call that follows the current one, or None."""
        return self.waiting[0][2] if self.waiting else None


class Answered:
    """Positions of the effective answers in agent.tool-results by call_id; the latest `kept` are retained."""

    def __init__(self, *, kept: int = KEPT, recalled: int = RECALLED) -> None:
        self._kept = kept
        self._places: OrderedDict[int, int] = OrderedDict()
        self._latest: deque[int] = deque(maxlen=recalled)

    def add(self, call_id: str, position: int) -> None:
        """Note an answer at `position`; the first in the log is the effective one."""
        name = _name(call_id)
        first = self._places.get(name)
        if first is None or position < first:
            self._places[name] = position
            self._latest.append(position)
        if len(self._places) > self._kept:
            self._places.popitem(last=False)

    def find(self, call_id: str) -> int | None:
        """Return the position of the call's answer, or None."""
        return self._places.get(_name(call_id))

    def recalled_from(self, end: int) -> int:
        """Return the position from which the next owner begins to read; `end` if nothing is answered."""
        return min(self._latest, default=end)


def _name(call_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(call_id.encode(), digest_size=16).digest(), "big")


class ToolResultReader:
    """Reads single records of agent.tool-results again."""

    def __init__(self, log: Log, events: EventLog) -> None:
        self._log = log
        self._events = events
        self._stack = AsyncExitStack()
        self._reader: Reader | None = None
        self._one = asyncio.Lock()

    async def between(self, number: int, first: int, end: int) -> list[tuple[int, Event]]:
        """Return (position, event) of every record of a partition from `first` up to `end`. Records that cannot be
        decoded or are gone are left out. Raises LogUnavailable, RegistryUnavailable."""
        place = Partition(TOOL_RESULTS.name, number)
        async with self._one:
            if self._reader is None:
                self._reader = await self._stack.enter_async_context(self._log.reader())
            try:
                wanted = read_range(self._reader, {place: first}, {place: end}, max_records=max(1, end - first))
                found = [record async for record in wanted]
            except OffsetOutOfRange:  # it is only in the archive now, and nobody has asked for so long
                return []
            finally:
                self._reader.assign({})
        decoded = [(record.offset, await self._decode_record(record)) for record in found]
        return [(position, event) for position, event in decoded if event is not None]

    async def at(self, number: int, position: int) -> Event | None:
        """Return the event at `position`, or None if it is gone. Raises as `between` does."""
        found = await self.between(number, position, position + 1)
        return found[0][1] if found else None

    async def close(self) -> None:
        await self._stack.aclose()

    async def _decode_record(self, record: Record) -> Event | None:
        try:
            return await self._events.decode(record)
        except UndecodableRecord:  # it was dead-lettered when it was first read
            return None


class PartitionRecovery:
    """Rebuilds the state of partitions that are newly assigned to this worker."""

    def __init__(self, role: Role, group: str) -> None:
        self._role = role
        self._group = group

    async def units(self, numbers: Sequence[int]) -> list[ToolCallPartitionTask]:
        """Return the state of the partitions, from their commits and the results since then. Raises LogError,
        RegistryUnavailable."""
        log = self._role.log
        calls = {number: Partition(TOOL_CALLS.name, number) for number in numbers}
        results = {number: Partition(TOOL_RESULTS.name, number) for number in numbers}
        commits = await log.commits(self._group, list(calls.values()))
        missing = [place for place in calls.values() if place not in commits]
        await check_commits(log, self._group, list(calls.values()), missing, list(results.values()))
        starts = await log.start_offsets([*calls.values(), *results.values()])
        ends = await log.end_offsets(list(results.values()))
        units = {}
        for number in numbers:
            commit: Commit | None = commits.get(calls[number])
            units[number] = ToolCallPartitionTask(
                number,
                next_offset=starts[calls[number]] if commit is None else commit.offset,
                next_result=max(starts[results[number]], results_from(commit) or 0),
                last=commit,
            )
        async with log.reader() as reader:
            reader.assign({results[number]: unit.next_result for number, unit in units.items()})
            while not caught_up(reader, ends):
                for record in await reader.poll():
                    await self._recall(units[record.partition], record)
        return list(units.values())

    async def _recall(self, unit: ToolCallPartitionTask, record: Record) -> None:
        unit.saw(record.offset)
        try:
            event = await self._role.events.decode(record)
        except UndecodableRecord as error:
            await self._role.park(record, error)
            return
        apply_event(unit, event, record.offset)


def apply_event(unit: ToolCallPartitionTask, event: Event, position: int) -> None:
    """Update the partition's state from the event at `position` of its results."""
    if isinstance(event, ToolCallCompleted) and event.caller:
        unit.saw(position)
        return
    if isinstance(event, ToolCallStarted):
        unit.began(event, position)
    elif isinstance(event, ToolCallCompleted):
        unit.note_answer(event, position)


class Parked(Exception):
    """Base class of the errors listed in the module docstring."""


class AttemptsExhausted(Parked):
    """The call took its sandbox down too often. It is answered with infra_error as well; it is not the agent's
    fault."""


class UnexpectedRecord(Parked):
    """The record does not belong into its topic. Remedy: its producer must append to the topic of the catalogue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOutcome:
    """The outcome of a call: its execution, the files after it, and its network requests."""

    execution: Execution
    workspace: BlobRef | None
    """Workspace from which the session's next call starts."""
    requests: tuple[EgressRequest, ...] = ()
    full_output: BlobRef | None = None


def make_started_event(
    request: ToolCallRequested, *, attempt: int, worker: str, environment_sha256: str
) -> ToolCallStarted:
    """Build the record that is written before execution."""
    return ToolCallStarted(
        event_id=digest("tool-call-started", request.call_id, attempt),
        run_id=request.run_id,
        group_id=request.group_id,
        session_id=request.session_id,
        floor=request.floor,
        rollout_id=request.rollout_id,
        call_id=request.call_id,
        attempt=attempt,
        worker=worker,
        environment_sha256=environment_sha256,
    )


def make_completed_event(
    request: ToolCallRequested, outcome: CallOutcome, *, attempt: int, queue_s: float, worker: str
) -> ToolCallCompleted:
    """Build the record that is written after execution."""
    execution = outcome.execution
    return ToolCallCompleted(
        event_id=digest("tool-call-completed", request.call_id, attempt),
        run_id=request.run_id,
        group_id=request.group_id,
        session_id=request.session_id,
        floor=request.floor,
        rollout_id=request.rollout_id,
        call_id=request.call_id,
        call_seq=request.call_seq,
        status=execution.status,
        reason=execution.reason,
        exit_code=execution.exit_code,
        output=execution.output,
        full_output=outcome.full_output,
        duration_s=execution.duration_s,
        queue_s=queue_s,
        workspace=outcome.workspace,
        attempt=attempt,
        worker=worker,
        cached=False,
        requests=outcome.requests,
        caller=request.caller,
    )


def unrun(status: ToolStatus, reason: str, text: str = "") -> Execution:
    """Return the execution of a call that was not run, or whose end nobody observed."""
    return Execution(status, reason, None, text.encode(errors="replace"), 0.0, 0.0)


def unkept(execution: Execution, error: FileRefused) -> Execution:
    """Return the execution of a call that ran but whose files cannot be stored. The session goes on with the files from
    before it."""
    return _apply_verdict(
        execution, (ToolStatus.resource_limit, "workspace"), f"the files of this call are not kept: {error}"
    )


def mark_sandbox_ended(execution: Execution, verdict: Verdict) -> Execution:
    """Return the execution of a call that took its sandbox down. The session goes on with the files from before it."""
    keeps = execution.status in (ToolStatus.ok, ToolStatus.tool_error) and not execution.reason
    verdict = verdict if keeps else (execution.status, execution.reason)
    return _apply_verdict(
        execution, verdict, "the call has ended its sandbox: its files and its interpreter are not kept"
    )


def without_interpreter(execution: Execution) -> Execution:
    """Return the execution of a call that ran again in a new sandbox; the session's interpreter was lost with the old
    one."""
    return dataclasses.replace(execution, output=execution.output + b"\n" + ENDED)


def _apply_verdict(execution: Execution, verdict: Verdict, said: str) -> Execution:
    status, reason = verdict
    output = execution.output + f"\n[{said}]\n".encode(errors="replace")
    return dataclasses.replace(execution, status=status, reason=reason, exit_code=None, output=output)
