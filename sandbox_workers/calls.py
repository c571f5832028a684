"""What a worker knows of one partition: calls that are not answered yet, answers that may be asked for again."""

from __future__ import annotations

import asyncio
import heapq
import json
from collections import OrderedDict
from dataclasses import dataclass, field

from turnlog.infra.log import Commit, Record
from turnlog.sandbox_workers.protocol import Sandbox
from turnlog.schemas.events import ToolCallCompleted, ToolCallRequested, ToolCallStarted

KEPT = 1024
"""Answers kept per partition for repeated requests; a runner repeats a call only right after its own restart."""


@dataclass(slots=True)
class Pending:
    """A request on its way to an answer."""

    request: ToolCallRequested
    record: Record
    cancelled: bool = False
    begun: bool = False
    """Its ToolCallStarted is being written, or is on the log."""
    sent: bool = False
    """Its answer is being written: who asks again from now on may not see it."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Nothing more will be done about it."""
    sandbox: Sandbox | None = None
    """Where it runs now."""


class Unit:
    """Partition `number` of agent.tool-calls, and the partition of agent.tool-results that holds its answers."""

    def __init__(self, number: int, *, next_offset: int, next_result: int) -> None:
        self.number = number
        self.next_offset = next_offset
        """Of agent.tool-calls: the first record that was not taken."""
        self.next_result = next_result
        """Of agent.tool-results: the first position that is not known."""
        self.attempts: dict[str, int] = {}
        """call_id of an unanswered call -> the highest attempt on the log."""
        self.pending: dict[str, Pending] = {}
        self._open: dict[int, str] = {}
        self._begun_at: dict[str, int] = {}
        self._answers: OrderedDict[str, tuple[int, ToolCallCompleted]] = OrderedDict()

    def take(self, offset: int) -> bool:
        """A record of agent.tool-calls is in hand, unfinished; False when it was before."""
        if offset < self.next_offset:
            return False
        self.next_offset = offset + 1
        self._open[offset] = ""
        return True

    def belongs(self, offset: int, call_id: str) -> None:
        """The record at `offset` is finished when the call is."""
        self._open[offset] = call_id

    def finish(self, offset: int) -> None:
        """Nothing is left to do about the record at `offset`."""
        self._open.pop(offset, None)

    def answer(self, call_id: str) -> ToolCallCompleted | None:
        """The effective answer, if it is known."""
        found = self._answers.get(call_id)
        return found[1] if found else None

    def began(self, started: ToolCallStarted, position: int) -> None:
        """A ToolCallStarted stands at `position` of agent.tool-results."""
        self._saw(position)
        if started.call_id not in self._answers:
            self.attempts[started.call_id] = max(started.attempt, self.attempts.get(started.call_id, 0))
            self._begun_at.setdefault(started.call_id, position)

    def answered(self, completed: ToolCallCompleted, position: int) -> None:
        """A ToolCallCompleted stands at `position`; the first one counts."""
        self._saw(position)
        self._answers.setdefault(completed.call_id, (position, completed))
        while len(self._answers) > KEPT:
            self._answers.popitem(last=False)
        self.attempts.pop(completed.call_id, None)
        self._begun_at.pop(completed.call_id, None)
        self.pending.pop(completed.call_id, None)
        self._open = {offset: call_id for offset, call_id in self._open.items() if call_id != completed.call_id}

    def _saw(self, position: int) -> None:
        self.next_result = max(self.next_result, position + 1)

    def commit(self) -> Commit:
        """Low-water mark of the calls; metadata: from where a restarted worker reads the results."""
        needed = [position for position, _ in self._answers.values()]
        needed += [position for call_id, position in self._begun_at.items() if call_id in self.pending]
        metadata = json.dumps({"results": min(needed, default=self.next_result)})
        return Commit(min(self._open, default=self.next_offset), metadata)


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
