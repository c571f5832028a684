"""Sessions: opened, found again after a crash, adopted from a gateway that is gone, finished."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar

from prometheus_client import Counter, Gauge

from turnlog.infra.event_log import EventLog
from turnlog.infra.roles import now_s
from turnlog.infra.roles.event_loop import LARGE
from turnlog.producers.gateway.conversation import Conversation, RecordedTurn
from turnlog.producers.gateway.engines import Departure
from turnlog.producers.gateway.errors import (
    BadRequest,
    EpochLost,
    KeyReused,
    SessionEnded,
    SessionNotFound,
    TooMany,
    Unauthorized,
)
from turnlog.producers.gateway.owners import OwnedElsewhere, Owners
from turnlog.producers.gateway.parsers.parser import Part
from turnlog.producers.gateway.profiles import is_player
from turnlog.producers.gateway.recovery import ConversationRecovery, SessionControlRecords, SessionTail, Sought
from turnlog.producers.gateway.requests import Claims, FinishRequest, OpenRequest, RewardRequest
from turnlog.schemas.events.sessions import RewardAssigned, SessionAdopted, SessionFinished, SessionStarted
from turnlog.schemas.events.turns import CUT_OFF
from turnlog.schemas.ids import digest, reward_id
from turnlog.schemas.types import TurnId

log = logging.getLogger(__name__)
T = TypeVar("T")

OPEN = Gauge("turnlog_gateway_sessions", "Sessions held in memory")
ADOPTED = Counter("turnlog_gateway_adopted", "Sessions taken over from another gateway")

MINUTE_S = 60.0
KEPT = 256
"""Number of finished sessions kept in memory; older ones are read from the log again on request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Facts about this gateway that it writes into the sessions that it opens."""

    url: str
    """Address at which this gateway is reached."""
    instance: str
    """Unique among processes; part of the ids of its adoption records."""
    model: str
    tokenizer_sha256: str
    chat_template_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """An opened session, and the gateway that owns it."""

    session_id: str
    epoch: str
    floor: int
    url: str
    """Address of the gateway that owns it."""
    finished: bool


@dataclass(slots=True)
class Running:
    """A turn that is not on the log yet. Several clients may wait for it (repeats under one Idempotency-Key)."""

    id: TurnId
    task: asyncio.Task[RecordedTurn] = field(init=False)
    gone: Departure = field(default_factory=Departure)
    """Set while no client waits for the turn."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set, and then replaced, at each change of `parts`."""
    parts: list[Part] = field(default_factory=list)
    """Output so far, if a client streams; all of it once the task is done."""
    clients: int = 0
    began: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    own_s: Callable[[], float] = lambda: 0.0
    """Function that returns the seconds in which an engine has sampled for the turn."""
    cut_off: bool = False
    """True while the sampled part of a turn that was cut off is being recorded. A repeat of its request gets another
    turn."""

    def age_s(self) -> float:
        """Return the seconds since the turn was admitted."""
        return asyncio.get_running_loop().time() - self.began

    def wake(self) -> None:
        """Wake the clients that stream."""
        self.changed.set()
        self.changed = asyncio.Event()

    def join(self) -> None:
        """Register a waiting client. If it reconnects before the turn ends, it rejoins the running turn; generation
        that was aborted meanwhile is resumed."""
        self.clients += 1
        self.gone.clear()

    def leave(self) -> None:
        """Deregister a client that disconnected. When the last one leaves, the engine request is aborted."""
        self.clients -= 1
        if self.clients <= 0:
            self.gone.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Limits of each session, from [gateway]."""

    life_s: float = math.inf
    turns: int = 256
    turns_per_minute: int = 0


@dataclass(slots=True)
class GatewaySession:
    """A session that this gateway owns, or a finished one that it has read."""

    started: SessionStarted
    epoch: str
    began: datetime
    """Timestamp of SessionStarted on the log. Templates print dates from it, so that prompts are the same on every day
    and at every gateway."""
    limits: SessionLimits = SessionLimits()
    conversation: Conversation = field(default_factory=Conversation)
    finished: SessionFinished | None = None
    next_index: int = 0
    running: dict[int, Running] = field(default_factory=dict)
    """Turns that are not on the log yet, by index."""
    by_key: dict[str, tuple[str, Running]] = field(default_factory=dict)
    """Idempotency-Key -> (sha256 of the body, its turn)."""
    finishing: asyncio.Task[SessionFinished] | None = None
    refused: str = ""
    """Error code of the last request for a turn if the request was refused for its content; else empty."""
    failed: str = ""
    """Error code of the last turn if it failed for another reason than its content, such as no engine or an unavailable
    log; else empty."""
    begun: deque[float] = field(default_factory=deque)
    """time.monotonic() of the turns that began within the last minute, if their rate is limited."""
    large: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a large request is processed, so that a session occupies one thread at a time."""
    waiting: int = 0
    """Number of large requests that are processed or wait for that."""

    @property
    def id(self) -> str:
        return self.started.session_id

    @property
    def turns(self) -> int:
        """Number of turns that are recorded as completed, or running."""
        whole = sum(turn.finish_reason not in CUT_OFF for turn in self.conversation.turns.values())
        return whole + len(self.running)

    async def work(self, size: int, work: Callable[[], T], *, large: int = LARGE) -> T:
        """Return `work()` on `size` bytes, from `large` bytes on in a thread, so that the event loop keeps serving
        other requests. In the thread, it may read what the loop writes, but may only modify what it returns. Raises
        TooMany if as many large requests wait as the session may have turns."""
        if size < large:
            return work()
        if self.waiting >= self.limits.turns:
            raise TooMany(f"{self.waiting} requests of session {self.id} are being read: [gateway] session_turns")
        self.waiting += 1
        try:
            async with self.large:
                return await asyncio.to_thread(work)
        finally:
            self.waiting -= 1

    def admit(self) -> TurnId:
        """Return the id of a new turn. Raises SessionEnded, TooMany."""
        if self.finished or self.finishing:
            raise SessionEnded(f"session {self.id} is finished; no turn can be added")
        if len(self.running) >= self.limits.turns:
            raise TooMany(f"{len(self.running)} turns of session {self.id} are running: [gateway] session_turns")
        if most := self.limits.turns_per_minute:
            now = time.monotonic()
            while self.begun and now - self.begun[0] >= MINUTE_S:
                self.begun.popleft()
            if len(self.begun) >= most:
                raise TooMany(f"{most} turns of session {self.id} began within a minute: [gateway] "
                              "session_turns_per_minute")  # fmt: skip
            self.begun.append(now)
        turn = TurnId(self.epoch, self.next_index)
        self.next_index += 1
        return turn

    def find_repeat(
        self, request_sha256: str, key: str | None, path: str | None = None
    ) -> Running | RecordedTurn | None:
        """Return the turn that a request repeats, or None: the one under its Idempotency-Key, or the recorded one of an
        identical body by the same agent. A turn that was cut off is no answer, so its request is sampled anew. Raises
        KeyReused, SessionEnded."""
        if key is not None and key in self.by_key:
            sha256, running = self.by_key[key]
            if sha256 != request_sha256:
                raise KeyReused(f"Idempotency-Key {key!r} was already used with another body")
            if self.finishing and not running.task.done():
                raise SessionEnded(f"session {self.id} is being finished")
            if not running.cut_off:
                return running
        return self.conversation.find_repeat(request_sha256, path)

    def description(self) -> dict[str, Any]:
        """Return the body of GET /sessions/{id}: enough to continue the session, or to judge it."""
        main = self.conversation.main_line()
        messages = [raw for raw, _ in main.messages()] if main else []
        return {
            "session_id": self.id,
            "epoch": self.epoch,
            "finished": self.finished is not None,
            "outcome": self.finished.outcome.value if self.finished else None,
            "reason": self.finished.reason if self.finished else None,
            "turns": [
                {"epoch": turn.id.epoch, "index": turn.id.index, "finish_reason": turn.finish_reason.value,
                 "aborted": turn.aborted, "output_tokens": turn.output_tokens, "prompt_tokens": turn.prompt_tokens,
                 "own_s": turn.own_s, "waited_s": turn.waited_s}
                for turn in self.conversation.turns.values()
            ],
            "running": [
                {"index": index, "own_s": (own_s := running.own_s()), "waited_s": max(0.0, running.age_s() - own_s)}
                for index, running in self.running.items()
            ],
            "messages": messages,
            "last_turn": {"epoch": main.id.epoch, "index": main.id.index} if main else None,
            "refused": self.refused,
            "failed": self.failed,
            "taken_over": self.epoch != self.started.event_id,
            "call_seq": sum(message.get("role") == "tool" for message in messages),
            "players": [
                {"agent_path": path, "messages": [raw for raw, _ in turn.messages()],
                 "finish_reason": turn.finish_reason.value,
                 "last_turn": {"epoch": turn.id.epoch, "index": turn.id.index}}
                for path, turn in self.conversation.last_turns().items()
                if is_player(path)
            ],
        }  # fmt: skip


class Sessions:
    """All sessions that this gateway owns or has read."""

    def __init__(
        self,
        events: EventLog,
        tail: SessionTail,
        recovery: ConversationRecovery,
        identity: Identity,
        owners: Owners | None = None,
        limits: SessionLimits = SessionLimits(),
    ) -> None:
        """`owners` reaches the other gateways, if each has an address of its own."""
        self._owners = owners
        self._limits = limits
        self._events = events
        self._tail = tail
        self._recovery = recovery
        self._identity = identity
        self.held: OrderedDict[str, GatewaySession] = OrderedDict()
        self._pending: dict[str, asyncio.Task[GatewaySession]] = {}

    async def open(self, request: OpenRequest) -> Opened:
        """Return the session of (rollout_id, attempt); start it if the log holds none."""
        floor = request.floor
        if floor is None:
            floor = await self._tail.end_offset(self._tail.partition(request.group_id))
        try:
            session = await self._once(request.session_id, lambda: self._open(request, floor))
        except OwnedElsewhere as other:
            return Opened(session_id=request.session_id, epoch=other.epoch, floor=floor, url=other.url, finished=False)
        return Opened(
            session_id=session.id, epoch=session.epoch, floor=floor, url=self._identity.url,
            finished=session.finished is not None,
        )  # fmt: skip

    async def find(self, claims: Claims) -> GatewaySession:
        """Return the session of a token; take it over if another gateway had it. Raises SessionNotFound, EpochLost,
        Unauthorized if the token has expired, OwnedElsewhere if that gateway is alive."""
        session = self.find_owned(claims.session_id)
        if session is None:
            return await self._once(claims.session_id, lambda: self._find_on_log(claims))
        self._check_age(self._tail.find_records(session.id))
        return session

    def _check_age(self, spine: SessionControlRecords | None) -> None:
        """Raise Unauthorized if the session is older than [gateway] session_s."""
        if spine is not None and now_s() - spine.started_ms / 1000 > self._limits.life_s:
            raise Unauthorized(
                f"tokens expire {self._limits.life_s:g} s after their session began: [gateway] session_s"
            )

    async def finish(self, session: GatewaySession, request: FinishRequest) -> SessionFinished:
        """Return SessionFinished with the turns that were acted on. The first call decides; others get its answer."""
        if session.finished:
            return session.finished
        if session.finishing is None:
            session.finishing = asyncio.create_task(self._finish(session, request))
        try:
            return await asyncio.shield(session.finishing)
        finally:
            if session.finishing and session.finishing.done() and session.finished is None:
                session.finishing = None

    async def reward(self, session: GatewaySession, request: RewardRequest) -> RewardAssigned:
        """Write a reward to the log. Raises BadRequest if the session was finished without expecting one."""
        expects, player = session.finished.expects if session.finished is not None else None, request.player
        if expects is not None and not (player in expects.players if player else expects.reward):
            whose = f" of player {player}" if player else ""
            raise BadRequest(f"session {session.id} was finished without expecting a reward{whose}", param="value")
        started, by = session.started, request.verifier
        event = RewardAssigned(
            event_id=reward_id(session.id, by.name, by.version, player),
            run_id=started.run_id,
            group_id=started.group_id,
            session_id=session.id,
            floor=started.floor,
            value=request.value,
            components=request.components,
            verifier=by,
            evidence=request.evidence,
            player=player,
        )
        await self._events.append(event)
        return event

    async def drain(self) -> None:
        """Wait for every running turn."""
        tasks = [running.task for session in self.held.values() for running in session.running.values()]
        await asyncio.gather(*tasks, return_exceptions=True)

    def find_owned(self, session_id: str) -> GatewaySession | None:
        """Return a session in memory if its ownership term is the latest one known from the log, or if it is finished.
        Drop it and return None if another gateway has begun a later term."""
        session = self.held.get(session_id)
        spine = self._tail.find_records(session_id)
        if session is None or spine is None or not spine.epochs or session.finished:
            return session
        if spine.epochs[-1].id == session.epoch:
            return session
        own = [epoch for epoch in spine.epochs if epoch.id == session.epoch]
        if not own:  # our own record has not been read back yet, so nothing after it has either
            return session
        del self.held[session_id]
        return None

    async def _once(self, session_id: str, work: Callable[[], Awaitable[GatewaySession]]) -> GatewaySession:
        """Run one opening or adoption of a session at a time. Everybody who asks meanwhile gets its result."""
        task = self._pending.get(session_id)
        if task is None:

            async def run() -> GatewaySession:
                return await work()

            task = self._pending[session_id] = asyncio.create_task(run())
            task.add_done_callback(lambda _: self._pending.pop(session_id, None))
        return await asyncio.shield(task)

    async def _open(self, request: OpenRequest, floor: int) -> GatewaySession:
        held = self.find_owned(request.session_id)
        if held is not None:
            return held
        spine = await self._tail.session(request.session_id, request.group_id, floor)
        if spine is not None and spine.started is not None:
            return await self._from_log(spine)
        identity = self._identity
        event = SessionStarted(
            event_id=digest("SessionStarted", request.session_id),
            run_id=request.run_id,
            group_id=request.group_id,
            session_id=request.session_id,
            floor=floor,
            task_id=request.task_id,
            group_size=request.group_size,
            rollout_id=request.rollout_id,
            rollout_index=request.rollout_index,
            attempt=request.attempt,
            purpose=request.purpose,
            recipe=request.recipe,
            agent=request.agent,
            model=identity.model,
            tokenizer_sha256=identity.tokenizer_sha256,
            chat_template_sha256=identity.chat_template_sha256,
            sampling=request.sampling,
            environment=request.environment,
            writer_url=identity.url,
        )
        _, offset = await self._events.append(event)
        await self._tail.wait_for_offset(self._tail.partition(request.group_id), offset + 1)
        known = self._tail.find_records(request.session_id)
        assert known is not None, "our own record was read back"
        if known.epochs[0].offset != offset or len(known.epochs) > 1:
            return await self._from_log(known)  # another gateway opened it between our read and our write
        return self._hold(GatewaySession(event, event.event_id, _moment(known.started_ms), self._limits))

    async def _find_on_log(self, claims: Claims) -> GatewaySession:
        spine = await self._tail.session(claims.session_id, claims.group_id, claims.floor)
        if spine is None or spine.started is None:
            raise SessionNotFound(f"the log holds no session {claims.session_id} from floor {claims.floor} on")
        self._check_age(spine)
        return await self._from_log(spine)

    async def _from_log(self, spine: SessionControlRecords) -> GatewaySession:
        """Return a finished session as it is, and adopt an open one unless its owner is alive: first write our record,
        read it back, then read the turns. Raises EpochLost, OwnedElsewhere."""
        started, finished = spine.started, spine.effective_finish
        assert started is not None
        epoch = spine.epochs[-1].id
        if finished is None:
            if self._owners is not None:
                await self._owners.check(spine.epochs[-1].writer_url, epoch)
            epoch = await self._adopt(started, epoch)
            if spine.epochs[-1].id != epoch:
                raise EpochLost(f"session {started.session_id} was adopted by {spine.epochs[-1].writer_url} meanwhile")
            finished = spine.effective_finish
        began, conversation = _moment(spine.started_ms), await self._read_conversation(started)
        return self._hold(GatewaySession(started, epoch, began, self._limits, conversation, finished))

    async def _adopt(self, started: SessionStarted, last_epoch: str) -> str:
        event = SessionAdopted(
            event_id=digest("SessionAdopted", started.session_id, last_epoch, self._identity.instance),
            run_id=started.run_id,
            group_id=started.group_id,
            session_id=started.session_id,
            floor=started.floor,
            writer_url=self._identity.url,
        )
        _, offset = await self._events.append(event)
        await self._tail.wait_for_offset(self._tail.partition(started.group_id), offset + 1)
        ADOPTED.inc()
        about = {"session_id": started.session_id, "group_id": started.group_id}
        log.info("adopted session %s", started.session_id, extra=about)
        return event.event_id

    async def _finish(self, session: GatewaySession, request: FinishRequest) -> SessionFinished:
        judged = [turn for last in request.judged for turn in await self._judged_turns(session, last)]
        for running in list(session.running.values()):
            running.gone.set()
        await asyncio.gather(*(running.task for running in session.running.values()), return_exceptions=True)
        started, turns = session.started, session.conversation.turns
        named = dict.fromkeys(turn.id for turn in turns.values() if _acted_on(turn, session.epoch))
        named |= dict.fromkeys(judged)
        event = SessionFinished(
            event_id=digest("SessionFinished", session.id, session.epoch),
            run_id=started.run_id,
            group_id=started.group_id,
            session_id=session.id,
            floor=started.floor,
            epoch=session.epoch,
            turns=(*(turn for turn in turns if turn in named), *(turn for turn in named if turn not in turns)),
            undelivered=tuple(turn for turn in turns if turn not in named),
            outcome=request.outcome,
            reason=request.reason,
            final=request.final,
            expects=request.expects,
        )
        _, offset = await self._events.append(event)
        await self._tail.wait_for_offset(self._tail.partition(started.group_id), offset + 1)
        spine = self._tail.find_records(session.id)
        counting = spine.effective_finish if spine else None
        if counting is None:
            raise EpochLost(f"session {session.id} was taken over meanwhile; finish it at its new gateway")
        session.finished = counting
        return counting

    async def _judged_turns(self, session: GatewaySession, turn_id: TurnId) -> tuple[TurnId, ...]:
        """Return the turn that the runner judged, and those that it continues. A turn that is not known is looked up on
        the log, because a gateway that had lost the session may have recorded it later. Raises BadRequest."""
        turn = session.conversation.turns.get(turn_id)
        if turn is None:
            turn = (await self._read_conversation(session.started)).turns.get(turn_id)
        if turn is None or not turn.whole:
            what = "holds no such turn of this session" if turn is None else "holds only a part of that turn"
            raise BadRequest(
                f"judged names turn {turn_id.index} of epoch {turn_id.epoch}; the log {what}", param="judged"
            )
        return tuple(each.id for each in turn.lineage())

    async def _read_conversation(self, started: SessionStarted) -> Conversation:
        """Return the session's turns that the log holds now."""
        spine = self._tail.find_records(started.session_id)
        assert spine is not None, "the session was opened or found by what the tail had read"
        sought = Sought(started.session_id, started.group_id, spine.started_ms)
        return await self._recovery.conversation(sought, self._tail.partition(started.group_id).number)

    def _hold(self, session: GatewaySession) -> GatewaySession:
        self.held[session.id] = session
        for session_id in list(self.held)[: max(0, len(self.held) - KEPT)]:
            if self.held[session_id].finished:
                self.held.pop(session_id).conversation.unlink()
        OPEN.set(len(self.held))
        return session


def _moment(milliseconds: float) -> datetime:
    return datetime.fromtimestamp(milliseconds / 1000, UTC)


def _acted_on(turn: RecordedTurn, epoch: str) -> bool:
    """Return whether the agent acted on a turn, as far as the transport shows: another turn continues it, or its last
    byte was sent. For a turn of an earlier ownership term, the log only shows whether every client had disconnected
    before its end."""
    return turn.handed_over or turn.continued or (turn.id.epoch != epoch and not turn.aborted)
