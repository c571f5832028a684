"""Partitions of one unit, read side by side in order of time, so that no topic runs far ahead of another.

Folds do not need the order; memory does: what one topic tells early must wait for what another tells late.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from contextlib import AsyncExitStack
from types import TracebackType

from turnlog.infra.log import Log, Partition, Reader, Record

POLL_RECORDS = 100


class Merge:
    """Chunks of records, each partition in offset order, partitions by record time to within a poll.

    Where times of one partition go backwards, the latest so far counts. Holds one poll per partition.
    """

    def __init__(
        self, log: Log, starts: Mapping[Partition, int], ends: Mapping[Partition, int], *, until_ms: int | None = None
    ) -> None:
        """`until_ms`: a partition ends before its first record that is later than that."""
        self._log = log
        self._starts = dict(starts)
        self._ends = dict(ends)
        self._until_ms = until_ms
        self._readers: dict[Partition, Reader] = {}
        self._ready: dict[Partition, deque[tuple[int, Record]]] = {}
        self._times: dict[Partition, int] = {}
        self._stack = AsyncExitStack()
        self.passed: dict[Partition, int] = dict(starts)
        """Next offset that no chunk has given."""

    async def __aenter__(self) -> Merge:
        for place, start in self._starts.items():
            reader = await self._stack.enter_async_context(self._log.reader())
            reader.assign({place: start})
            self._readers[place] = reader
            self._ready[place] = deque()
            self._times[place] = 0
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def chunk(self) -> list[Record]:
        """The next records; none at the end. Raises LogError."""
        await asyncio.gather(*(self._fill(place) for place, ready in self._ready.items() if not ready))
        waiting = {place: ready for place, ready in self._ready.items() if ready}
        if not waiting:
            return []
        limit = min(ready[-1][0] for ready in waiting.values())
        found: list[tuple[int, Record]] = []
        for place, ready in waiting.items():
            while ready and ready[0][0] <= limit:
                found.append(ready.popleft())
                self.passed[place] = found[-1][1].offset + 1
        found.sort(key=lambda timed: timed[0])  # stable: a partition's own order stays
        return [record for _, record in found]

    async def _fill(self, place: Partition) -> None:
        reader, end, ready = self._readers[place], self._ends[place], self._ready[place]
        while not ready and reader.position(place) < end:
            for record in await reader.poll(max_records=POLL_RECORDS):
                self._times[place] = max(self._times[place], record.timestamp_ms)
                if self._until_ms is not None and self._times[place] > self._until_ms:
                    self._ends[place] = end = min(end, record.offset)
                if record.offset < end:
                    ready.append((self._times[place], record))
        if not ready:
            self.passed[place] = max(self.passed[place], self._ends[place])
