"""What the chaos run of the sandbox worker asks for: sessions whose outputs prove order and single execution."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from servers import say

from turnlog.infra.log import LogError, Partition
from turnlog.infra.roles.role import Role
from turnlog.schemas.events import (
    SandboxLimits,
    SandboxSpec,
    ToolCallCancelled,
    ToolCallCompleted,
    ToolCallRequested,
    ToolCallStarted,
    ToolStatus,
)
from turnlog.schemas.ids import digest
from turnlog.schemas.topics import TOOL_RESULTS
from turnlog.schemas.types import BlobRef

KINDS = ("files", "files", "files", "files", "files", "files", "cells", "plain", "plain", "cancelled")
"""files: a durable workspace to which every call appends its number. cells: the same in a persistent interpreter, which
may go with its worker. plain: nothing durable. cancelled: every second call is, while it runs."""
FEWEST = 4
"""Calls of a session; more while there is still killing to be done."""
REPEATS = 0.05
"""Share of answered calls that are asked for again, as a runner does after its own restart."""
LIMITS = SandboxLimits(cpu_s=10.0, wall_s=60.0, memory_bytes=128 << 20, pids=16, disk_bytes=8 << 20)
DEADLINE_S = 3600.0
CANCEL_AFTER_S = 0.3


@dataclass(frozen=True, slots=True)
class Answer:
    """A result where it stands."""

    offset: int
    event: ToolCallCompleted


@dataclass(slots=True)
class Load:
    """What was asked and answered so far."""

    asked: dict[str, ToolCallRequested] = field(default_factory=dict)
    expected: dict[str, str] = field(default_factory=dict)
    """Output of calls that must succeed, or may only fail since their interpreter is gone."""
    first: dict[str, Answer] = field(default_factory=dict)
    started: dict[str, int] = field(default_factory=dict)
    """Worker -> ToolCallStarted of it."""
    waiting: dict[str, asyncio.Future[ToolCallCompleted]] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)
    enough: bool = False
    """No more killing: sessions may end."""


async def read(role: Role, load: Load) -> None:
    """Follow the results until cancelled, whatever happens to the broker."""
    places = [Partition(TOOL_RESULTS.name, number) for number in range(role.settings.kafka.rollouts)]
    positions = dict.fromkeys(places, 0)
    while True:
        try:
            async with role.log.reader() as reader:
                reader.assign(positions)
                while True:
                    for record in await reader.poll():
                        event = await role.events.decode(record)
                        positions[Partition(record.topic, record.partition)] = record.offset + 1
                        _seen(load, record.offset, event)
        except LogError as error:
            say(f"the reader begins again: {error}")
            await asyncio.sleep(0.5)


def _seen(load: Load, offset: int, event: object) -> None:
    if isinstance(event, ToolCallStarted):
        load.started[event.worker] = load.started.get(event.worker, 0) + 1
        waiting = load.waiting.get(f"{event.call_id} started")
    elif isinstance(event, ToolCallCompleted):
        load.first.setdefault(event.call_id, Answer(offset, event))
        waiting = load.waiting.get(event.call_id)
    else:
        return
    if waiting is not None and not waiting.done():
        waiting.set_result(load.first[event.call_id].event if isinstance(event, ToolCallCompleted) else event)  # type: ignore[arg-type]


class Session:
    """Calls one after the other, each naming the files of the one before it, as an agent runner does."""

    def __init__(self, role: Role, load: Load, number: int, rng: random.Random) -> None:
        self._role = role
        self._load = load
        self._rng = rng
        self.kind = KINDS[number % len(KINDS)]
        self._name = f"{self.kind}-{number}"
        self._workspace: BlobRef | None = None

    async def run(self) -> None:
        """Until there is enough, and at least FEWEST calls."""
        seq = 0
        while seq < FEWEST or not self._load.enough:
            await self._call(seq)
            seq += 1

    async def _call(self, seq: int) -> None:
        request = self._request(seq)
        load = self._load
        load.asked[request.call_id] = request
        cancels = self.kind == "cancelled" and seq % 2 == 1
        if cancels:
            load.cancelled.add(request.call_id)
        else:
            load.expected[request.call_id] = self._output(seq)
        answered = load.waiting[request.call_id] = asyncio.get_running_loop().create_future()
        begun = load.waiting[f"{request.call_id} started"] = asyncio.get_running_loop().create_future()
        await self._append(request)
        if cancels:
            await asyncio.wait([begun, answered], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(CANCEL_AFTER_S)
            await self._append(_cancellation(request))
        answer = await answered
        self._workspace = answer.workspace
        if self._rng.random() < REPEATS:
            await self._append(request)

    async def _append(self, event: ToolCallRequested | ToolCallCancelled) -> None:
        """Whatever happens to the broker; twice is harmless."""
        while True:
            try:
                await self._role.events.append(event)
                return
            except LogError as error:
                say(f"{self._name} writes again: {error}")
                await asyncio.sleep(0.5)

    def _request(self, seq: int) -> ToolCallRequested:
        tool, arguments = self._work(seq)
        spec = SandboxSpec(limits=LIMITS, durable_workspace=self.kind in ("files", "cells"))
        return ToolCallRequested(
            event_id=digest("chaos", self._name, seq),
            run_id=self._role.settings.run.id,
            group_id="g",
            session_id=self._name,
            floor=0,
            rollout_id=self._name,
            call_id=f"{self._name}-{seq}",
            call_seq=seq,
            tool=tool,
            arguments=json.dumps(arguments).encode(),
            sandbox=spec,
            workspace=self._workspace if spec.durable_workspace else None,
            deadline_s=DEADLINE_S,
        )

    def _work(self, seq: int) -> tuple[str, dict[str, str]]:
        pause = f"{self._rng.uniform(0.0, 0.4):.2f}"
        match self.kind:
            case "files":  # half a line is written before the pause: a death in it must leave no trace
                return "shell", {"command": f"printf {seq} >> calls; sleep {pause}; echo >> calls; cat calls"}
            case "cells":
                code = "calls = []\n" if seq == 0 else ""
                return "python_session", {
                    "code": f"{code}calls.append({seq})\nimport time; time.sleep({pause})\n"
                    "open('calls', 'a').write(f'{calls[-1]}\\n')\nprint(calls, open('calls').read().split())"
                }
            case "plain":
                return "python", {"code": f"import time, os; time.sleep({pause}); print({seq} * 7, os.listdir())"}
        return "shell", {"command": "sleep 50" if seq % 2 else f"echo {seq}"}

    def _output(self, seq: int) -> str:
        numbers = range(seq + 1)
        match self.kind:
            case "files":
                return "".join(f"{number}\n" for number in numbers)
            case "cells":
                return f"{list(numbers)} {[str(number) for number in numbers]}\n"
            case "plain":
                return f"{seq * 7} []\n"
        return f"{seq}\n"


def _cancellation(request: ToolCallRequested) -> ToolCallCancelled:
    return ToolCallCancelled(
        event_id=digest("chaos", "cancelled", request.call_id),
        run_id=request.run_id,
        group_id=request.group_id,
        session_id=request.session_id,
        floor=request.floor,
        rollout_id=request.rollout_id,
        call_id=request.call_id,
        reason="chaos",
    )


def wrong(load: Load) -> list[str]:
    """Effective answers that are not what they must be."""
    found = []
    for call_id, answer in load.first.items():
        event, request = answer.event, load.asked[call_id]
        if call_id in load.cancelled:
            right = event.status is ToolStatus.cancelled
        elif event.status is ToolStatus.ok:
            right = event.output.decode(errors="replace") == load.expected[call_id]
        else:
            right = event.status is ToolStatus.infra_error and event.reason == "interpreter_lost"
            right = right and request.tool == "python_session"
        if not right:
            what = dataclasses.replace(event, workspace=None)
            found.append(f"offset {answer.offset}: {call_id} {what.status} {what.reason} {what.output[-200:]!r}")
    return found


async def until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Whether it came to hold in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.05)
    return True
