"""The resident reader of agent.sessions: which sessions exist, who owns them, which are finished.

It starts at the end of the log and reads back to the floor of an older session when one is asked for. All who wait for
"everything up to now" share one end-offset read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from turnlog.infra.event_log import EventLog
from turnlog.infra.log import Log, Partition, Record
from turnlog.infra.murmur2 import partition_of
from turnlog.names import RECORD_HEADER
from turnlog.processors.core.fold.spine import Tenure
from turnlog.schemas.errors import UndecodableRecord
from turnlog.schemas.events.sessions import SessionAdopted, SessionFinished, SessionStarted
from turnlog.schemas.topics import SESSIONS

log = logging.getLogger(__name__)

WANTED = frozenset({b"SessionStarted", b"SessionAdopted", b"SessionFinished"})
POLL_RECORDS = 2000


@dataclass(frozen=True, slots=True)
class Epoch:
    """One gateway's tenure."""

    offset: int
    id: str
    writer_url: str


@dataclass(slots=True)
class Spine:
    """What agent.sessions says of one session."""

    started: SessionStarted | None = None
    started_ms: int = 0
    epochs: list[Epoch] = field(default_factory=list)
    finishes: list[tuple[int, SessionFinished]] = field(default_factory=list)

    @property
    def finished(self) -> SessionFinished | None:
        """The one that counts, as the fold says it."""
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

    def add(self, record: Record, event: SessionStarted | SessionAdopted | SessionFinished) -> None:
        """Fold one record; records may come in any order and more than once."""
        if isinstance(event, SessionFinished):
            if all(offset != record.offset for offset, _ in self.finishes):
                self.finishes.append((record.offset, event))
            return
        if isinstance(event, SessionStarted):
            self.started, self.started_ms = self.started or event, self.started_ms or record.timestamp_ms
        known = {epoch.id: epoch for epoch in self.epochs}
        if event.event_id not in known or known[event.event_id].offset > record.offset:
            known[event.event_id] = Epoch(record.offset, event.event_id, event.writer_url)
            self.epochs = sorted(known.values(), key=lambda epoch: epoch.offset)


class SessionTail:
    """`run` reads for ever; the other methods answer from what it has read."""

    def __init__(
        self, log_: Log, events: EventLog, partitions: int, *, beat: Callable[[], None] = lambda: None
    ) -> None:
        """`beat` is called whenever the reader comes round."""
        self._log = log_
        self._beat = beat
        self._events = events
        self._partitions = [Partition(SESSIONS.name, number) for number in range(partitions)]
        self._spines: dict[str, Spine] = {}
        self._covered: dict[Partition, int] = {}
        """Offset from which on everything was read."""
        self._positions: dict[Partition, int] = {}
        self._asking: list[asyncio.Future[dict[Partition, int]]] = []
        self._asked = asyncio.Event()
        self._waiting: dict[Partition, list[tuple[int, asyncio.Future[None]]]] = {}
        self._back = {partition: asyncio.Lock() for partition in self._partitions}
        self.ready = asyncio.Event()

    def partition(self, group_id: str) -> Partition:
        """Where a group's records stand."""
        return self._partitions[partition_of(group_id.encode(), len(self._partitions))]

    async def run(self) -> None:
        """Follow all partitions and serve end-offset reads until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow())
            tasks.create_task(self._answer())

    async def end_offset(self, partition: Partition) -> int:
        """The partition's end as of now or later; one read serves all who wait."""
        asked: asyncio.Future[dict[Partition, int]] = asyncio.get_running_loop().create_future()
        self._asking.append(asked)
        self._asked.set()
        return (await asked)[partition]

    async def session(self, session_id: str, group_id: str, floor: int) -> Spine | None:
        """What the log says of a session at this moment; None when it was never started."""
        partition = self.partition(group_id)
        await self.reached(partition, await self.end_offset(partition))
        if session_id not in self._spines:
            await self._read_back(partition, floor)
        return self._spines.get(session_id)

    def known(self, session_id: str) -> Spine | None:
        """What was read of a session so far."""
        return self._spines.get(session_id)

    async def reached(self, partition: Partition, offset: int) -> None:
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
        """Read from `floor` to where coverage begins; those who ask for one partition at once share the read."""
        async with self._back[partition]:
            covered = self._covered[partition]
            first = max(floor, (await self._log.start_offsets([partition]))[partition])
            if first >= covered:
                return
            async with self._log.reader() as reader:
                reader.assign({partition: first})
                while reader.position(partition) < covered:
                    for record in await reader.poll(max_records=POLL_RECORDS, timeout_s=0.5):
                        await self._take(record)
            self._covered[partition] = first

    async def _take(self, record: Record) -> None:
        if dict(record.headers).get(RECORD_HEADER) not in WANTED:
            return
        try:
            event = await self._events.decode(record)
        except UndecodableRecord as error:
            log.warning("passed over %s[%d]@%d: %s", record.topic, record.partition, record.offset, error)
            return
        self._spines.setdefault(event.session_id, Spine()).add(record, event)
