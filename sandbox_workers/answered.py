"""Which calls of a partition are answered, and where: digests in memory, the answers read back from the log."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict, deque
from contextlib import AsyncExitStack

from turnlog.infra.event_log import EventLog
from turnlog.infra.log import Log, OffsetOutOfRange, Partition, Reader, Record
from turnlog.schemas.errors import UndecodableRecord
from turnlog.schemas.events import Event
from turnlog.schemas.topics import TOOL_RESULTS

KEPT = 65_536
"""Answers of a partition whose place a worker knows as long as it holds the partition."""
RECALLED = 8_192
"""Answers of a partition that its next holder knows at the least: it reads so many results before it serves."""


class Answered:
    """call_id -> position of its effective answer in agent.tool-results; the latest `kept`."""

    def __init__(self, *, kept: int = KEPT, recalled: int = RECALLED) -> None:
        self._kept = kept
        self._places: OrderedDict[int, int] = OrderedDict()
        self._latest: deque[int] = deque(maxlen=recalled)

    def add(self, call_id: str, position: int) -> None:
        """An answer stands there; the first in the log is the effective one."""
        name = _name(call_id)
        first = self._places.get(name)
        if first is None or position < first:
            self._places[name] = position
            self._latest.append(position)
        if len(self._places) > self._kept:
            self._places.popitem(last=False)

    def find(self, call_id: str) -> int | None:
        """Where its answer stands."""
        return self._places.get(_name(call_id))

    def recalled_from(self, end: int) -> int:
        """Where the next holder begins to read; `end` when nothing is answered."""
        return min(self._latest, default=end)


def _name(call_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(call_id.encode(), digest_size=16).digest(), "big")


class Results:
    """Reads single records of agent.tool-results again."""

    def __init__(self, log: Log, events: EventLog) -> None:
        self._log = log
        self._events = events
        self._stack = AsyncExitStack()
        self._reader: Reader | None = None
        self._one = asyncio.Lock()

    async def between(self, number: int, first: int, end: int) -> list[tuple[int, Event]]:
        """(position, event) of every record of a partition from `first` up to `end`; what cannot be decoded or is not
        there any more is left out. Raises LogUnavailable, RegistryUnavailable."""
        place = Partition(TOOL_RESULTS.name, number)
        found: list[Record] = []
        async with self._one:
            if self._reader is None:
                self._reader = await self._stack.enter_async_context(self._log.reader())
            try:
                self._reader.assign({place: first})
                while self._reader.position(place) < end:
                    found += await self._reader.poll(max_records=max(1, end - first))
            except OffsetOutOfRange:  # the archive holds it, and nobody has asked for so long
                return []
            finally:
                self._reader.assign({})
        decoded = [(record.offset, await self._decoded(record)) for record in found if record.offset < end]
        return [(position, event) for position, event in decoded if event is not None]

    async def at(self, number: int, position: int) -> Event | None:
        """The event there; None when it is gone. Raises as `between`."""
        found = await self.between(number, position, position + 1)
        return found[0][1] if found else None

    async def close(self) -> None:
        """Release the reader."""
        await self._stack.aclose()

    async def _decoded(self, record: Record) -> Event | None:
        try:
            return await self._events.decode(record)
        except UndecodableRecord:  # parked when it was met first
            return None
