"""Sessions of one process, without log, gateway and engine: the runner's own code, with the sandboxes of this machine.

`LocalEvents` runs the requested calls at once in place of sending them to a worker; `ScriptedGateway` takes the turns
from a script in place of an engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final

from turnlog.infra.blobs import Blobs
from turnlog.infra.environments.episodes import Message
from turnlog.infra.environments.tasks import Task
from turnlog.infra.log import Record
from turnlog.infra.redaction.redactor import Redactor
from turnlog.infra.roles.credentials import CredentialKeys
from turnlog.infra.roles.health import Health
from turnlog.infra.session_keys import SessionKeys
from turnlog.producers.gateway_client import (
    Completion,
    GatewayClient,
    OpenSession,
    RequestRejected,
    SessionState,
    Speaker,
)
from turnlog.producers.tool_calls import ToolResults
from turnlog.sandbox_workers.call_runner import CallRunner
from turnlog.sandbox_workers.calls import Pending, ToolCallPartitionTask
from turnlog.sandbox_workers.egress import Egress
from turnlog.sandbox_workers.pooling import SandboxPools
from turnlog.schemas import ids
from turnlog.schemas.events import (
    Event,
    Outcome,
    RewardAssigned,
    RewardFailed,
    RolloutRequested,
    ToolCallCancelled,
    ToolCallCompleted,
    ToolCallRequested,
    ToolCallStarted,
)
from turnlog.schemas.events.tools import SESSION_OVER
from turnlog.schemas.topics import TOOL_CALLS
from turnlog.schemas.types import TurnId
from turnlog.settings import Settings

EPOCH: Final = "local"
"""Ownership term of the turns, which no gateway owns."""
MOST_ATTEMPTS: Final = 3
"""Number of attempts after which a rollout that finds no sandbox ends."""


@dataclass(frozen=True, slots=True)
class LocalHost:
    """Parts of a role that its calls need."""

    settings: Settings
    events: LocalEvents
    blobs: Blobs
    health: Health
    instance: str

    async def park(self, record: Record, cause: Exception) -> None:
        """Do nothing: the call is answered with the cause, and there are no dead letters."""


class LocalEvents:
    """Takes the records of runner and worker in one process: it runs calls, and keeps rewards."""

    def __init__(self, settings: Settings, pools: SandboxPools, blobs: Blobs, egress: Egress | None) -> None:
        self.redactor: Redactor | None = None
        self.keys: SessionKeys | None = None
        """Nothing is recorded here, so nothing needs to be masked or encrypted."""
        self.results = ToolResults()
        self.rewards: dict[str, RewardAssigned | RewardFailed] = {}
        """First reward of each session."""
        self._unit = ToolCallPartitionTask(0, next_offset=0, next_result=0)
        self._pending: dict[str, Pending] = {}
        self._offsets = count()
        self._tasks: set[asyncio.Task[None]] = set()
        host = LocalHost(settings, self, blobs, Health("sandbox"), "env")
        self._clock = asyncio.get_running_loop().time
        self._runner = CallRunner(host, pools, self._catch_up, self._clock, egress)

    async def append(self, event: Event) -> tuple[int, int]:
        """Take an event. Raises what running a call raises, later, in `close`."""
        return await (await self.submit(event))

    async def submit(self, event: Event) -> Awaitable[tuple[int, int]]:
        """Take an event, and return an awaitable for its position."""
        match event:
            case ToolCallRequested() if event.call_id not in self._pending:
                self._begin(event)
            case ToolCallCancelled():
                await self._cancel(event)
            case ToolCallStarted():
                self.results.record_start(event, 0.0)
            case ToolCallCompleted():
                self.results.feed(event)
            case RewardAssigned() | RewardFailed():
                self.rewards.setdefault(event.session_id, event)
        done: asyncio.Future[tuple[int, int]] = asyncio.get_running_loop().create_future()
        done.set_result((0, next(self._offsets)))
        return done

    async def close(self) -> None:
        """Wait for the calls that were cancelled, and close connections and servers. Raises what running a call
        raised."""
        try:
            await asyncio.gather(*self._tasks)
        finally:
            await self._runner.close()

    def _begin(self, request: ToolCallRequested) -> None:
        stamp = int(self._clock() * 1000)
        record = Record(TOOL_CALLS.name, 0, next(self._offsets), b"", b"", (), stamp)
        pending = self._pending[request.call_id] = Pending(request, record)
        task = asyncio.create_task(self._runner.answer(self._unit, pending), name=f"call {request.call_id}")
        self._tasks.add(task)

    async def _cancel(self, event: ToolCallCancelled) -> None:
        """Cancel a call, and give up what is kept for its session if that is over."""
        if (pending := self._pending.get(event.call_id)) is not None:
            await pending.cancel()
        if event.reason == SESSION_OVER:
            self._runner.release(self._unit.session(event))

    async def _catch_up(self, unit: ToolCallPartitionTask) -> None:
        """Do nothing: no other worker writes here."""


@dataclass(slots=True)
class Script:
    """The turns of one session, and how it ended."""

    messages: Sequence[Message] = ()
    """Assistant messages in the order of the turns; beyond them the policy says nothing."""
    taken: int = 0
    outcome: Outcome | None = None
    reason: str = ""


@dataclass(slots=True)
class ScriptedGateway(GatewayClient):
    """Plays a script in place of the policy, for the session of each rollout."""

    settings: Settings
    url: str
    """Address for agents that request their turns themselves: an endpoint that answers nothing."""
    model: str = "policy"
    scripts: dict[str, Script] = field(default_factory=dict)
    """Script by rollout_id, which is also the id of its only session."""

    async def open(self, request: RolloutRequested, task: Task, attempt: int) -> OpenSession:
        """Return the session of the rollout, whose script begins anew. Raises RequestRejected."""
        if attempt >= MOST_ATTEMPTS:
            raise RequestRejected(f"no sandbox was free in {attempt} attempts: see [sandbox] slots")
        self.scripts[request.rollout_id].taken = 0
        return OpenSession(request.rollout_id, self.url, "", "local")

    def seal_token(self, session: OpenSession, call_id: str) -> str:
        """Return the token, sealed for the worker in this process."""
        keys = CredentialKeys(self.settings.sandbox.credential_key, Path(self.settings.run.directory))
        return keys.encrypt_token(session.agent_token, call_id)

    async def state(self, session: OpenSession) -> SessionState:
        """Return the number of turns that were taken, at least one."""
        # A program or a function that took no turn counts as one that did not act, whereas here it need not.
        turns = max(1, self.scripts[session.session_id].taken)
        names = tuple(TurnId(EPOCH, index) for index in range(turns))
        return SessionState(False, Outcome.completed, (), "", None, turns=turns, turn_ids=names, players={})

    async def glimpse(self, session: OpenSession) -> SessionState | None:
        """Return the same as `state`."""
        return await self.state(session)

    async def complete(
        self, session: OpenSession, messages: list[Message], tools: Any, *, step: int, speaker: Speaker | None = None
    ) -> Completion:
        """Return the next turn of the script, or an empty message. Players share the script."""
        script = self.scripts[session.session_id]
        said = dict(script.messages[script.taken]) if script.taken < len(script.messages) else {"content": ""}
        turn = TurnId(EPOCH, script.taken)
        calls = [
            {**call, "id": ids.call_id(session.session_id, turn.epoch, turn.index, index, "agent")}
            for index, call in enumerate(said.get("tool_calls") or ())
        ]
        script.taken += 1
        message = {**said, "role": "assistant", **({"tool_calls": calls} if calls else {})}
        return Completion(message, "tool_calls" if calls else "stop", turn)

    async def finish(
        self,
        session: OpenSession,
        outcome: Outcome,
        reason: str,
        *,
        final: bool,
        reward: bool,
        judged: TurnId | Sequence[TurnId] | None,
        step_rewards: int = 0,
        players: Sequence[str] = (),
    ) -> None:
        """Note how the session ended."""
        script = self.scripts[session.session_id]
        script.outcome, script.reason = outcome, reason
