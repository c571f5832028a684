"""The sessions on the log: who owns them, which are finished, and their conversations rebuilt.

`SessionTail` follows agent.sessions forever. It starts at the end of the log and reads back to the start offset
(`floor`) of an older session when one is requested. All who wait for "everything up to now" share one end-offset read.
`ConversationRecovery` rebuilds a conversation from agent.turns and agent.token-snapshots, with the same tokens on any
gateway. Those topics are not indexed by session, so a scan begins at the earliest offset that can hold the session's
records, found by timestamp, and serves all sessions that wait for one.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import orjson

from turnlog.infra.blobs import Blobs, inlined
from turnlog.infra.event_log import EventLog
from turnlog.infra.history import read_range
from turnlog.infra.log import Log, Partition, Record, partition_of
from turnlog.names import RECORD_HEADER
from turnlog.processors.core.fold.spine import Tenure
from turnlog.producers.gateway.conversation import Conversation, RecordedTurn, above, extend_hash
from turnlog.producers.gateway.messages import normalise_messages
from turnlog.schemas.events.sessions import SessionAdopted, SessionFinished, SessionStarted
from turnlog.schemas.events.turns import TokenSnapshot, TurnCompleted
from turnlog.schemas.topics import SESSIONS, SNAPSHOTS, TURNS
from turnlog.schemas.types import TurnId, int32s

WANTED = frozenset({b"SessionStarted", b"SessionAdopted", b"SessionFinished"})
POLL_RECORDS = 2000
FINISHED_KEPT = 512
"""Number of finished sessions that the tail remembers; for older ones the log is read again on request."""


@dataclass(frozen=True, slots=True)
class OwnershipTerm:
    """Ownership term of one gateway."""

    offset: int
    id: str
    writer_url: str


@dataclass(slots=True)
class SessionControlRecords:
    """The records of one session in agent.sessions."""

    started: SessionStarted | None = None
    started_ms: int = 0
    epochs: list[OwnershipTerm] = field(default_factory=list)
    finishes: list[tuple[int, SessionFinished]] = field(default_factory=list)

    @property
    def effective_finish(self) -> SessionFinished | None:
        """The SessionFinished that counts by the rule of the fold, or None."""
        tenure = Tenure()
        epochs = iter(self.epochs)
        following = next(epochs, None)
        for offset, event in sorted(self.finishes, key=lambda finish: finish[0]):
            while following is not None and following.offset < offset:
                tenure.open_epoch(following.id)
                following = next(epochs, None)
            if tenure.counts(event):
                return event
        return None

    @property
    def end(self) -> int:
        """Offset after its last record."""
        return 1 + max([*(epoch.offset for epoch in self.epochs), *(offset for offset, _ in self.finishes)])

    def add(self, record: Record, event: SessionStarted | SessionAdopted | SessionFinished) -> None:
        """Fold one record. Records may arrive in any order and more than once."""
        if isinstance(event, SessionFinished):
            if all(offset != record.offset for offset, _ in self.finishes):
                self.finishes.append((record.offset, event))
            return
        if isinstance(event, SessionStarted):
            self.started, self.started_ms = self.started or event, self.started_ms or record.timestamp_ms
        known = {epoch.id: epoch for epoch in self.epochs}
        if event.event_id not in known or known[event.event_id].offset > record.offset:
            known[event.event_id] = OwnershipTerm(record.offset, event.event_id, event.writer_url)
            self.epochs = sorted(known.values(), key=lambda epoch: epoch.offset)


class SessionTail:
    """Follows agent.sessions in `run`; the other methods answer from what it has read."""

    def __init__(
        self,
        log_: Log,
        events: EventLog,
        partitions: int,
        *,
        beat: Callable[[], None] = lambda: None,
        finished_kept: int = FINISHED_KEPT,
    ) -> None:
        """`beat` is called on each iteration of the read loop."""
        self._log = log_
        self._beat = beat
        self._events = events
        self._partitions = [Partition(SESSIONS.name, number) for number in range(partitions)]
        self._spines: dict[str, SessionControlRecords] = {}
        self._finished: OrderedDict[str, Partition] = OrderedDict()
        """Finished sessions among `_spines`; the one read or requested last is at the end."""
        self._finished_kept = finished_kept
        self._covered: dict[Partition, int] = {}
        """Offset from which on everything was read and is remembered."""
        self._positions: dict[Partition, int] = {}
        self._asking: list[asyncio.Future[dict[Partition, int]]] = []
        self._asked = asyncio.Event()
        self._waiting: dict[Partition, list[tuple[int, asyncio.Future[None]]]] = {}
        self._back = {partition: asyncio.Lock() for partition in self._partitions}
        self.ready = asyncio.Event()

    def partition(self, group_id: str) -> Partition:
        """Return the partition of a group's records."""
        return self._partitions[partition_of(group_id.encode(), len(self._partitions))]

    async def run(self) -> None:
        """Follow all partitions and serve end-offset reads until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow())
            tasks.create_task(self._answer())

    async def end_offset(self, partition: Partition) -> int:
        """Return the partition's end offset as of now or later. One read serves all who wait."""
        asked: asyncio.Future[dict[Partition, int]] = asyncio.get_running_loop().create_future()
        self._asking.append(asked)
        self._asked.set()
        return (await asked)[partition]

    async def session(self, session_id: str, group_id: str, floor: int) -> SessionControlRecords | None:
        """Return the session's records as of this moment, or None if it was never started."""
        partition = self.partition(group_id)
        await self.wait_for_offset(partition, await self.end_offset(partition))
        seen = self._spines.get(session_id)
        if seen is None or seen.started is None:  # an adoption after our start may be all that was read so far
            await self._read_back(partition, floor)
        if session_id in self._finished:
            self._finished.move_to_end(session_id)
        return self._spines.get(session_id)

    def find_records(self, session_id: str) -> SessionControlRecords | None:
        """Return the session's records that were read so far."""
        return self._spines.get(session_id)

    async def wait_for_offset(self, partition: Partition, offset: int) -> None:
        """Wait until everything below `offset` was read."""
        if self._positions.get(partition, -1) >= offset:
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(partition, []).append((offset, done))
        await done

    async def _follow(self) -> None:
        starts = await self._log.end_offsets(self._partitions)
        self._covered = dict(starts)
        async with self._log.reader() as reader:
            reader.assign(starts)
            self._positions = dict(starts)
            self.ready.set()
            while True:
                self._beat()
                for record in await reader.poll(max_records=POLL_RECORDS, timeout_s=0.5):
                    await self._take(record)
                for partition in self._partitions:
                    self._advance(partition, reader.position(partition))
                self._forget()

    async def _answer(self) -> None:
        while True:
            await self._asked.wait()
            self._asked.clear()
            asking, self._asking = self._asking, []
            ends = await self._log.end_offsets(self._partitions)
            for asked in asking:
                if not asked.done():
                    asked.set_result(ends)

    def _advance(self, partition: Partition, position: int) -> None:
        self._positions[partition] = position
        waiting = self._waiting.pop(partition, [])
        for offset, done in waiting:
            if offset > position:
                self._waiting.setdefault(partition, []).append((offset, done))
            elif not done.done():
                done.set_result(None)

    async def _read_back(self, partition: Partition, floor: int) -> None:
        """Read from `floor` to where coverage begins. Concurrent requests for one partition share the read."""
        if floor >= self._covered[partition]:  # as for nearly every session that begins: nothing to ask the broker
            return
        async with self._back[partition]:
            covered = self._covered[partition]
            first = max(floor, (await self._log.start_offsets([partition]))[partition])
            if first >= covered:
                return
            async with self._log.reader() as reader:
                async for record in read_range(
                    reader, {partition: first}, {partition: covered}, max_records=POLL_RECORDS, timeout_s=0.5
                ):
                    await self._take(record)
            self._covered[partition] = first

    async def _take(self, record: Record) -> None:
        if dict(record.headers).get(RECORD_HEADER) not in WANTED:
            return
        event = await self._events.decode_known(record)
        if event is None:
            return
        spine = self._spines.setdefault(event.session_id, SessionControlRecords())
        spine.add(record, event)
        if event.session_id not in self._finished and spine.effective_finish is not None:
            self._finished[event.session_id] = Partition(record.topic, record.partition)

    def _forget(self) -> None:
        """Drop finished sessions beyond `finished_kept`. Coverage then begins after their last record, so that a
        request for one reads it again. Nothing is dropped during a read-back, since the requested session may be among
        those."""
        while len(self._finished) > self._finished_kept and not any(lock.locked() for lock in self._back.values()):
            session_id, partition = self._finished.popitem(last=False)
            self._covered[partition] = max(self._covered[partition], self._spines.pop(session_id).end)


CLOCK_SKEW_MS = 60_000
"""Assumed maximum difference between the clocks of gateways, in milliseconds."""


@dataclass(frozen=True, slots=True)
class Sought:
    """A session to rebuild."""

    session_id: str
    group_id: str
    since_ms: int


@dataclass(slots=True)
class _SessionRecords:
    turns: dict[TurnId, TurnCompleted] = field(default_factory=dict)
    snapshots: dict[TurnId, TokenSnapshot] = field(default_factory=dict)


class ConversationRecovery:
    """Reads conversations back. Sessions of one partition that are requested while a scan runs share the next one."""

    def __init__(self, log_: Log, events: EventLog, blobs: Blobs) -> None:
        self._log = log_
        self._events = events
        self._blobs = blobs
        self._sought: dict[int, list[tuple[Sought, asyncio.Future[_SessionRecords]]]] = {}
        self._busy: dict[int, asyncio.Lock] = {}

    async def conversation(self, sought: Sought, partition: int) -> Conversation:
        """Return every turn of the session that has both its records on the log now."""
        waiting: asyncio.Future[_SessionRecords] = asyncio.get_running_loop().create_future()
        self._sought.setdefault(partition, []).append((sought, waiting))
        async with self._busy.setdefault(partition, asyncio.Lock()):
            if not waiting.done():
                await self._scan(partition, self._sought.pop(partition))
        return _rebuilt(await waiting)

    async def _scan(self, number: int, wanted: list[tuple[Sought, asyncio.Future[_SessionRecords]]]) -> None:
        found = {sought.session_id: _SessionRecords() for sought, _ in wanted}
        keys = {sought.group_id.encode() for sought, _ in wanted}
        since = min(sought.since_ms for sought, _ in wanted) - CLOCK_SKEW_MS
        for topic in (TURNS.name, SNAPSHOTS.name):
            partition = Partition(topic, number)
            ends = await self._log.end_offsets([partition])
            async with self._log.reader() as reader:
                starts = {partition: await self._log.offset_since(partition, since)}
                async for record in read_range(reader, starts, ends, timeout_s=0.5):
                    if record.key in keys:
                        await self._take(record, found)
        for sought, waiting in wanted:
            if not waiting.done():
                waiting.set_result(found[sought.session_id])

    async def _take(self, record: Record, found: dict[str, _SessionRecords]) -> None:
        event = await self._events.decode_known(record)
        mine = None if event is None else found.get(event.session_id)
        if mine is None:
            return
        event = await inlined(event, self._blobs)
        if isinstance(event, TurnCompleted):
            mine.turns.setdefault(event.turn, event)
        else:
            mine.snapshots.setdefault(event.turn, event)


def _rebuilt(found: _SessionRecords) -> Conversation:
    conversation = Conversation()
    for turn_id, snapshot in found.snapshots.items():
        completed = found.turns.get(turn_id)
        if completed is not None:
            _restore(conversation, completed, snapshot)
    return conversation


def _restore(conversation: Conversation, completed: TurnCompleted, snapshot: TokenSnapshot) -> None:
    holder = conversation.turns[snapshot.parent_turn] if snapshot.parent_turn else None
    known = conversation.strands.start if holder is None else next(above(holder.place, snapshot.base_len))
    delta = int32s(_bytes(snapshot.delta_ids)).tolist()
    output = int32s(_bytes(snapshot.output_ids)).tolist()
    new_raw = orjson.loads(_bytes(completed.new_messages))
    turn = RecordedTurn.from_records(
        completed,
        snapshot,
        base=conversation.turns[completed.base_turn] if completed.base_turn else None,
        parent=holder,
        hashed=extend_hash(conversation.hash_path(known), (*delta, *output)),
        new_raw=new_raw,
        new=normalise_messages(new_raw) if new_raw else (),
        response_raw=orjson.loads(_bytes(completed.response)),
    )
    conversation.record(turn, delta, output, known)


def _bytes(payload: object) -> bytes:
    assert isinstance(payload, bytes), "payloads are fetched before"
    return payload
