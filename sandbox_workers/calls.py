"""What a worker knows of one partition: calls that are not answered yet, and where the answers of the others stand."""

from __future__ import annotations

import asyncio
import heapq
import json
from dataclasses import dataclass, field

from turnlog.infra.log import Commit, Record
from turnlog.sandbox_workers.answered import Answered
from turnlog.sandbox_workers.plans import Plan
from turnlog.sandbox_workers.protocol import Sandbox
from turnlog.sandbox_workers.tools import Refusal
from turnlog.schemas.events import ToolCallCompleted, ToolCallRequested, ToolCallStarted

SESSIONS = 1024
"""Durable sessions of a partition that are remembered: a worker has far fewer slots to hold any in."""


@dataclass(slots=True)
class Pending:
    """A request on its way to an answer."""

    request: ToolCallRequested
    record: Record
    plan: Plan | Refusal | None = None
    """How it will be run, once somebody has asked."""
    cancelled: bool = False
    begun: bool = False
    """Its ToolCallStarted is being written, or is on the log."""
    sent: bool = False
    """Its answer is being written: who asks again from now on may not see it."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Nothing more will be done about it."""
    waits: asyncio.Timeout | None = None
    """Ends its wait for a sandbox."""
    sandbox: Sandbox | None = None
    """Where it runs now."""
    again: bool = False
    """It runs again, in a new sandbox that was alive just before."""
    deaths: int = 0
    """Of such sandboxes, under this call."""
    died: bool = False
    """Any sandbox went away under it."""
    stateful: bool = False
    """Its sandbox had an interpreter for it to go on in."""

    async def cancel(self) -> None:
        """Nobody waits for it any more, whatever it is doing."""
        self.cancelled = True
        if self.waits is not None and not self.waits.expired():
            self.waits.reschedule(asyncio.get_running_loop().time())
        if self.sandbox is not None:
            await self.sandbox.cancel()


class Unit:
    """Partition `number` of agent.tool-calls, and the partition of agent.tool-results that holds its answers."""

    def __init__(self, number: int, *, next_offset: int, next_result: int) -> None:
        self.number = number
        self.next_offset = next_offset
        """Of agent.tool-calls: the first record that was not taken."""
        self.next_result = next_result
        """Of agent.tool-results: the first position beyond all that are known to be written."""
        self.strays: set[int] = set()
        """Positions below that nobody has looked at: another worker wrote there while this one had the partition."""
        self.attempts: dict[str, int] = {}
        """call_id of an unanswered call -> the highest attempt on the log."""
        self.pending: dict[str, Pending] = {}
        self.answers = Answered()
        self._open: set[int] = set()
        self._records: dict[str, list[int]] = {}
        self._begun_at: dict[str, int] = {}
        self._sessions: dict[str, None] = {}

    # -- records of agent.tool-calls

    def take(self, offset: int) -> bool:
        """A record of agent.tool-calls is in hand, unfinished; False when it was before."""
        if offset < self.next_offset:
            return False
        self.next_offset = offset + 1
        self._open.add(offset)
        return True

    def belongs(self, offset: int, call_id: str) -> None:
        """The record at `offset` is finished when the call is."""
        self._records.setdefault(call_id, []).append(offset)

    def finish(self, offset: int) -> None:
        """Nothing is left to do about the record at `offset`."""
        self._open.discard(offset)

    def session(self, request: ToolCallRequested) -> str:
        """What this worker calls the request's session: an id in two partitions is two sessions, since neither knows
        of the other's calls."""
        return f"{self.number}/{request.session_id}"

    def durable(self, session: str) -> None:
        """A session, as this worker calls it, that a sandbox may be held for."""
        self._sessions.pop(session, None)
        self._sessions[session] = None
        if len(self._sessions) > SESSIONS:
            del self._sessions[next(iter(self._sessions))]

    def sessions(self) -> tuple[str, ...]:
        """Those sessions."""
        return tuple(self._sessions)

    # -- records of agent.tool-results

    def saw(self, position: int) -> None:
        """A record at `position` of agent.tool-results is known."""
        if position >= self.next_result:
            self.strays.update(range(self.next_result, position))
            self.next_result = position + 1
        else:
            self.strays.discard(position)

    def began(self, started: ToolCallStarted, position: int) -> None:
        """A ToolCallStarted stands at `position`."""
        self.saw(position)
        if self.answers.find(started.call_id) is None:
            self.attempts[started.call_id] = max(started.attempt, self.attempts.get(started.call_id, 0))
            self._begun_at.setdefault(started.call_id, position)

    def answered(self, completed: ToolCallCompleted, position: int) -> None:
        """A ToolCallCompleted stands at `position`; the first one counts."""
        self.saw(position)
        self.answers.add(completed.call_id, position)
        self.attempts.pop(completed.call_id, None)
        self._begun_at.pop(completed.call_id, None)
        self.pending.pop(completed.call_id, None)
        self._open.difference_update(self._records.pop(completed.call_id, ()))

    def commit(self) -> Commit:
        """Low-water mark of the calls; metadata: from where a restarted worker reads the results."""
        needed = [position for call_id, position in self._begun_at.items() if call_id in self.pending]
        needed += [*self.strays, self.answers.recalled_from(self.next_result)]
        return Commit(min(self._open, default=self.next_offset), json.dumps({"results": min(needed)}))


def results_from(commit: Commit | None) -> int | None:
    """The position in a commit's metadata; None when there is none."""
    if commit is None or not commit.metadata:
        return None
    return int(json.loads(commit.metadata)["results"])


@dataclass(slots=True)
class Session:
    """Calls of one session that wait, smallest call_seq first; one runs at a time."""

    unit: Unit
    waiting: list[tuple[int, int, Pending]] = field(default_factory=list)
    current: Pending | None = None
    task: asyncio.Task[None] | None = None

    def push(self, pending: Pending) -> None:
        """Queue a call."""
        heapq.heappush(self.waiting, (pending.request.call_seq, pending.record.offset, pending))

    def pop(self) -> Pending:
        """The next one. Raises IndexError when none waits."""
        self.current = heapq.heappop(self.waiting)[2]
        return self.current

    def next(self) -> Pending | None:
        """The one that comes after the current one."""
        return self.waiting[0][2] if self.waiting else None
