"""The archive as a Log: it reads what a live log would, and writes nothing."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

from turnlog.infra.archive.files import CorruptArchive, read_range
from turnlog.infra.archive.index import ArchiveDamaged, ArchiveIndex, Cut, NoArchive, OffsetRange, ReadOnlyArchive
from turnlog.infra.blobs import Blobs
from turnlog.infra.event_log import EventLog
from turnlog.infra.log import (
    Appender,
    Assigned,
    Commit,
    GroupReader,
    OffsetOutOfRange,
    Partition,
    Reader,
    Record,
    TopicMissing,
    TopicSpec,
    Transactor,
)
from turnlog.infra.session_keys import SessionKeys
from turnlog.schemas.avsc import stored_schema
from turnlog.schemas.canonical import canonical_text
from turnlog.schemas.codec import Codec
from turnlog.schemas.content import sealable, sealed_schema
from turnlog.schemas.events import ALL

MADE_UP_IDS = 1 << 31
"""First id for schemas that no archived record was written with. Registries count from 1."""


class ArchiveLog:
    """See Log. The index is read once, by `open`. Methods that write raise ReadOnlyArchive."""

    def __init__(self, index: ArchiveIndex, schemas: Mapping[int, Mapping[str, Any]]) -> None:
        self.index = index
        self.schemas = dict(schemas)
        """All schemas with which archived records were written, by id."""

    @classmethod
    async def open(cls, blobs: Blobs, name: str) -> ArchiveLog:
        """Open the archive `name`. Raises NoArchive, ArchiveDamaged, StoreUnavailable."""
        index = ArchiveIndex(blobs, name)
        await index.load()
        if not index.topics:
            raise NoArchive(f"{index.root} is not in the store: check [archive] name, [run] id and [store]")
        return cls(index, await index.schemas())

    def events(self, *, writer: str, keys: SessionKeys | None = None) -> EventLog:
        """Return an event log that decodes the archive's records without a registry. With `keys`, which read the log of
        the cluster, it also decodes encrypted content."""
        registry = ArchiveRegistry(self.schemas)
        sealed = {} if keys is None else registry.sealed_ids()
        return EventLog(self, registry, Codec(registry.ids(), sealed_ids=sealed, cipher=keys), writer, keys=keys)

    async def close(self) -> None:
        """Do nothing: the store belongs to the caller of `open`."""

    async def cluster(self) -> str:
        """See Log. Raises ReadOnlyArchive, because an archive outlives its cluster."""
        self._refuse()

    async def topics(self, *, configs: bool = False) -> dict[str, TopicSpec]:
        """See Log. An archive has no configurations."""
        return {name: TopicSpec(name, count, 1, {}) for name, count in self.index.topics.items()}

    @asynccontextmanager
    async def reader(self, *, patient: bool = False, committed: bool = True) -> AsyncIterator[Reader]:
        """See Log. A poll at the end returns nothing after its time-out, because nothing new will come. Only committed
        records are archived."""
        yield ArchiveReader(self)

    async def start_offsets(self, partitions: Sequence[Partition]) -> dict[Partition, int]:
        return {place: (self.spans(place) or [OffsetRange(0, 0)])[0].start for place in partitions}

    async def end_offsets(self, partitions: Sequence[Partition], *, committed: bool = True) -> dict[Partition, int]:
        """See Log. Only committed records are archived."""
        return {place: (self.spans(place) or [OffsetRange(0, 0)])[-1].end for place in partitions}

    async def offset_since(self, partition: Partition, since_ms: int) -> int:
        """See Log. Raises ReadOnlyArchive: an archive is read by its spans, never from a point in time."""
        self._refuse()

    async def groups(self) -> frozenset[str]:
        """See Log. Raises ReadOnlyArchive: of all groups, only the assembler's cuts are archived."""
        self._refuse()

    async def commits(self, group: str, partitions: Sequence[Partition]) -> dict[Partition, Commit]:
        """Return the group's commits at the last archived cut."""
        found: dict[Partition, Commit] = {}
        for unit in {place.number for place in partitions}:
            cut = await self.index.newest_cut(group, unit)
            of_unit = {} if cut is None else {Partition(t, unit): Commit(*c) for t, c in cut.commits.items()}
            found |= {place: of_unit[place] for place in partitions if place in of_unit}
        return found

    async def members(self, group: str) -> tuple[str, ...]:
        """See Log. Raises ReadOnlyArchive: groups of an archive have no members."""
        self._refuse()

    async def committed_partitions(self, group: str) -> frozenset[Partition]:
        """See Log. Raises ReadOnlyArchive: no group continues from an archive."""
        self._refuse()

    async def cut(self, group: str, unit: int) -> Cut | None:
        """Return the last cut of an assembler's partition task that the archive covers, or None if there is none."""
        cut = await self.index.newest_cut(group, unit)
        if cut is None:
            return None

        def clamp_offsets(
            offsets: Mapping[str, int],
        ) -> dict[str, int]:  # offsets beyond the archived end were only markers
            return {t: min(at, self.index.end(Partition(t, unit)) or 0) for t, at in offsets.items()}

        return Cut(cut.group, unit, clamp_offsets(cut.high), clamp_offsets(cut.ends), cut.commits)

    def spans(self, place: Partition) -> list[OffsetRange]:
        """Return the archived spans of a partition, in order. Raises TopicMissing."""
        if place.topic not in self.index.topics:
            raise TopicMissing(f"{self.index.root} does not hold topic {place.topic}, which was not archived")
        if place.number not in range(self.index.topics[place.topic]):
            count = self.index.topics[place.topic]
            raise TopicMissing(f"{place.topic} has no partition {place.number}: the archive has {count} of them")
        return self.index.spans.get(place, [])

    async def create_topics(self, specs: Sequence[TopicSpec]) -> None:
        self._refuse()

    async def delete_before(self, offsets: Mapping[Partition, int]) -> None:
        self._refuse()

    def appender(self) -> AbstractAsyncContextManager[Appender]:
        self._refuse()

    def transactor(self, transactional_id: str) -> AbstractAsyncContextManager[Transactor]:
        self._refuse()

    def group_reader(
        self, group: str, topics: Sequence[str], *, assigned: Assigned, revoked: Assigned, instance: str | None = None,
        pause_s: float = 0.0,
    ) -> AbstractAsyncContextManager[GroupReader]:  # fmt: skip
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ReadOnlyArchive(f"{self.index.root} is an archive, on which no role can run: start the role on topics")


@dataclass(slots=True)
class _Place:
    """Reading state of one partition: the next offset, and records that were read but not delivered."""

    position: int
    end: int = 0
    """End of the range that is being read; 0 if none is."""
    blocks: Iterator[list[Record]] = field(default_factory=lambda: iter(()))
    ready: deque[Record] = field(default_factory=deque)


class ArchiveReader:
    """See Reader. It has at most one file per partition in memory."""

    def __init__(self, log: ArchiveLog) -> None:
        self._log = log
        self._places: dict[Partition, _Place] = {}
        self._turn = 0

    def assign(self, starts: Mapping[Partition, int]) -> None:
        self._places = {place: _Place(offset) for place, offset in starts.items()}

    def seek(self, partition: Partition, offset: int) -> None:
        """See Reader. Raises KeyError if the partition is not assigned."""
        if partition not in self._places:
            raise KeyError(f"{partition.topic}[{partition.number}] is not assigned to this reader")
        self._places[partition] = _Place(offset)

    def position(self, partition: Partition) -> int:
        return self._places[partition].position

    async def poll(self, *, max_records: int = 500, timeout_s: float = 0.1) -> list[Record]:
        """See Reader. Raises OffsetOutOfRange, ArchiveDamaged, StoreUnavailable."""
        found: list[Record] = []
        names = list(self._places)
        if names:  # rotate, so that no partition starves another
            self._turn = (self._turn + 1) % len(names)
        for name in names[self._turn :] + names[: self._turn]:
            if len(found) < max_records:
                found += await self._take(name, self._places[name], max_records - len(found))
        await asyncio.sleep(0 if found else timeout_s)
        return found

    async def _take(self, name: Partition, place: _Place, limit: int) -> list[Record]:
        """Return up to `limit` records of one partition, or none at its end."""
        while not place.ready and await self._more(name, place):
            pass
        found: list[Record] = []
        while place.ready and len(found) < limit:
            found.append(place.ready.popleft())
            place.position = found[-1].offset + 1
        if not place.ready and found:
            await self._more(name, place)
        return found

    async def _more(self, name: Partition, place: _Place) -> bool:
        """Load the next block. At the end of a range, move to its end offset. Returns False at the end of the
        archive."""
        if place.end:
            try:
                block = next(place.blocks, None)
            except CorruptArchive as error:
                raise ArchiveDamaged(f"{self._log.index.root}: {error}; restore the object from a copy") from error
            if block is None:
                place.position, place.end = max(place.position, place.end), 0
                return True
            place.ready.extend(record for record in block if record.offset >= place.position)
            return True
        span = self._span(name, place.position)
        if span is None:
            return False
        place.blocks = read_range(await self._log.index.file(name, span), name)
        place.end = span.end
        return True

    def _span(self, name: Partition, offset: int) -> OffsetRange | None:
        spans = self._log.spans(name) or [OffsetRange(0, 0)]
        if not spans[0].start <= offset <= spans[-1].end:
            raise OffsetOutOfRange(
                f"{name.topic}[{name.number}]: offset {offset} was requested, but the archive holds {spans[0].start} "
                f"to {spans[-1].end}"
            )
        found = spans[bisect_right(spans, offset, key=lambda span: span.start) - 1]
        return found if offset < found.end else None


class ArchiveRegistry:
    """See Registry. Its schemas are those with which archived records were written."""

    def __init__(self, schemas: Mapping[int, Mapping[str, Any]]) -> None:
        self._schemas = schemas
        self._by_text = {_text(schema): schema_id for schema_id, schema in schemas.items()}

    def ids(self) -> dict[str, int]:
        """Return record name -> archived id of its present schema, or a made-up id if that was not archived."""
        return {name: self._by_text.get(_text(stored_schema(name)), MADE_UP_IDS + at) for at, name in enumerate(ALL)}

    def sealed_ids(self) -> dict[str, int]:
        """Return record name -> archived id of its schema with encrypted content, or a made-up id."""
        names, first = sealable(ALL), MADE_UP_IDS + len(ALL)
        return {name: self._by_text.get(_text(sealed_schema(name)), first + at) for at, name in enumerate(names)}

    async def register(self, subject: str, schema: Mapping[str, Any]) -> int:
        """See Registry, but nothing is registered. Raises ReadOnlyArchive if the schema is not archived."""
        try:
            return self._by_text[_text(schema)]
        except KeyError:
            raise ReadOnlyArchive(f"{subject}: the archive does not have this schema, and is read-only") from None

    async def schema(self, schema_id: int) -> Mapping[str, Any]:
        return self._schemas[schema_id]

    async def close(self) -> None:
        """Do nothing: there are no connections."""


def _text(schema: Mapping[str, Any]) -> str:
    return canonical_text(schema, spaces=True)
