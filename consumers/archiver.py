"""The archive role: copies closed ranges of every topic into the object store, as Avro container files with an index.

Each archive has one archiver, which owns the transactional id `<name>.archive`. The end of a range is decided by
committing it to Kafka under that fence before its file is written; the content of the file then follows from the log.
So the successor of a killed archiver, or a zombie of it, writes the same bytes under the same names, and readers rely
on the index alone. The writer schemas of records are stored before any file that needs them.

ArchiveError
├── GapInArchive    the log lost records before they were archived, or is not the same log as before
└── BusyAssembler   no moment between two transactions was found
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Gauge

from turnlog.infra.archive import (
    ArchivedRange,
    ArchiveError,
    ArchiveIndex,
    Cut,
    OffsetRange,
    archive_name,
    live_cut,
    partitions_of,
)
from turnlog.infra.archive.files import MEDIA_TYPE, RangeFile
from turnlog.infra.event_log import EventLog
from turnlog.infra.history import caught_up, read_range
from turnlog.infra.log import Commit, Partition, Reader, Record, Transactor
from turnlog.infra.roles.loop import repeat
from turnlog.infra.roles.measures import STAGE_S
from turnlog.infra.roles.role import Role
from turnlog.names import ConsumerGroup, TransactionalId
from turnlog.schemas import UndecodableRecord
from turnlog.schemas.codec import HEADER, MAGIC
from turnlog.schemas.events import ALL
from turnlog.schemas.topics import ARCHIVED, SESSIONS


class WrittenSchemas:
    """Schema id -> schema, for records of the catalogue."""

    def __init__(self, events: EventLog, index: ArchiveIndex) -> None:
        self._events = events
        self._index = index
        self._known: dict[int, Mapping[str, Any]] = {}
        self._unknown: set[int] = set()
        """Ids that are not in the registry, or belong to no record of the catalogue. Such values stay raw."""

    async def of(self, record: Record) -> Mapping[int, Mapping[str, Any]]:
        """Return all known schemas, including the record's own if it can be found. Raises RegistryUnavailable,
        StoreUnavailable."""
        value = record.value
        if len(value) >= HEADER.size and value[0] == MAGIC:
            schema_id = HEADER.unpack_from(value)[1]
            if schema_id not in self._known and schema_id not in self._unknown:
                await self._learn(schema_id)
        return self._known

    async def _learn(self, schema_id: int) -> None:
        try:
            schema = await self._events.schema(schema_id)
        except (KeyError, UndecodableRecord):
            self._unknown.add(schema_id)
            return
        if not isinstance(schema, Mapping) or str(schema.get("name", "")).rpartition(".")[2] not in ALL:
            self._unknown.add(schema_id)
            return
        await self._index.put_schema(schema_id, schema)
        self._known[schema_id] = schema


log = logging.getLogger(__name__)
RANGES = Counter("turnlog_archived_ranges", "Files written")
RECORDS = Counter("turnlog_archived_records", "Records archived")
BYTES = Counter("turnlog_archived_bytes", "Bytes of files written")
TAKE_S, DECIDE_S, WRITE_S = (STAGE_S.labels("archive", stage) for stage in ("take", "decide", "write"))
HELD = Gauge("turnlog_archive_held_bytes", "Bytes of open ranges in memory")
POLL_RECORDS = 1000
ARCHIVED_NAMES = frozenset(topic.name for topic in ARCHIVED)
CUT_PATIENCE_S = 30.0
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class RangeLimits:
    """Limits at which an open range is closed before it is [archive] max_age_s old."""

    file_bytes: int = 32 * 2**20
    """Bytes of keys and values in one file: large enough for few objects, small enough for one upload without parts."""
    file_records: int = 100_000
    """Records in one file, which bounds the time to read it back."""
    buffer_bytes: int = 256 * 2**20
    """Bytes of all open ranges together; above it the largest one is closed. Eight full files fit."""


class BusyAssembler(ArchiveError):
    """Remedy: flush again."""


class GapInArchive(ArchiveError):
    """Remedy: give the log an [archive] name of its own; the missing records were deleted before they were archived."""


async def main(role: Role) -> None:
    """Archive until the role stops. The next archiver reads open ranges again.

    Raises Fenced, ArchiveError, BlobError, LogError, RegistryUnavailable, which end the process; it is then restarted.
    """
    async with _open_archiver(role, patient=True) as archiver:
        await repeat(role, archiver.turn)


async def flush(role: Role, *, limits: RangeLimits | None = None) -> int:
    """Archive everything that is on the log now, regardless of age. Return the number of files written. The archive
    role must not run at the same time, because the two would fence each other. Raises what `main` raises."""
    async with _open_archiver(role, limits=limits) as archiver:
        return await archiver.flush()


@contextlib.asynccontextmanager
async def _open_archiver(
    role: Role, *, limits: RangeLimits | None = None, patient: bool = False
) -> AsyncIterator[Archiver]:
    owner = TransactionalId.ARCHIVE.format(archive=archive_name(role.settings))
    async with role.log.transactor(owner) as transactor, role.log.reader(patient=patient) as reader:
        archiver = Archiver(role, transactor, reader, limits=limits)
        await archiver.open()
        yield archiver


class Archiver:
    """Collects one open range per partition and writes closed ranges to the archive."""

    def __init__(
        self,
        role: Role,
        transactor: Transactor,
        reader: Reader,
        *,
        clock: Clock = time.monotonic,
        topics: Collection[str] = ARCHIVED_NAMES,
        limits: RangeLimits | None = None,
    ) -> None:
        """`transactor` must be entered already, so that the previous owner of the archive is fenced."""
        self._role = role
        self._topics = topics
        self._transactor = transactor
        self._reader = reader
        self._clock = clock
        self._rules, self._limits = role.settings.archive, limits or RangeLimits()
        self.index = ArchiveIndex(role.blobs, archive_name(role.settings))
        self._group = ConsumerGroup.ARCHIVE.format(archive=archive_name(role.settings))
        self._open: dict[Partition, RangeFile] = {}
        self._opened_at: dict[Partition, float] = {}
        self._ends: dict[Partition, int] = {}
        """Start offset of the next range."""
        self._commits: dict[Partition, Commit] = {}
        """Current commits of the group."""
        self._schemas = WrittenSchemas(role.events, self.index)
        self._cuts: dict[int, Cut] = {}
        """Partition task -> cut that the index does not cover yet."""
        self._uncut: set[int] = set()
        """Partition tasks whose cut is due. One that is in a transaction is tried again."""
        self._cut_at = clock()
        self._files = 0

    async def open(self) -> None:
        """Write the ranges that the last owner decided, then continue after what is archived."""
        topics = {
            name: spec.partitions for name, spec in (await self._role.log.topics()).items() if name in self._topics
        }
        await self.index.load()
        await self.index.put_topics(topics)
        places = partitions_of(topics)
        starts, ends = await self._role.log.start_offsets(places), await self._role.log.end_offsets(places)
        self._commits = commits = await self._role.log.commits(self._group, places)
        for place in places:
            self._role.health.beat()
            await self._resume(place, commits.get(place), starts[place], ends[place])
        self._reader.assign(self._ends)

    async def turn(self) -> int:
        """Poll once, and close the ranges that are due. Return the number of records read."""
        records = await self._reader.poll(max_records=POLL_RECORDS, timeout_s=0.5)
        due: dict[Partition, int] = {}
        if records:
            with TAKE_S.time():
                due = await self._take(records)
        now = self._clock()
        old = [place for place, at in self._opened_at.items() if now - at >= self._rules.max_age_s]
        await self._close(due | {place: self._reader.position(place) for place in [*old, *self._too_much()]
                                 if place not in due})  # fmt: skip
        await self._follow_cuts(now)
        return len(records)

    async def _take(self, records: list[Record]) -> dict[Partition, int]:
        """Add records to open ranges. Return the ends of those that are full."""
        due: dict[Partition, int] = {}
        for record in records:
            place = Partition(record.topic, record.partition)
            if place in due:  # the next record belongs to a new range
                await self._close(due)
                due = {}
            await self._add(place, record)
            file = self._open[place]
            if file.bytes >= self._limits.file_bytes or file.count >= self._limits.file_records:
                due[place] = record.offset + 1
        return due

    async def flush(self) -> int:
        """Archive up to the present ends, close everything, and write a cut of each partition task. Return the number
        of files written. The ends include open transactions, since the markers of committed records may still be on
        their way."""
        units = range(self.index.topics.get(SESSIONS.name, 0))
        self._cuts = {unit: await self._patient_cut(unit) for unit in units}
        ends = await self._role.log.end_offsets(list(self._ends), committed=False)
        while not caught_up(self._reader, ends):
            await self.turn()
        await self._close({place: self._reader.position(place) for place in self._open})
        await self._put_cuts()
        return self._files

    async def _add(self, place: Partition, record: Record) -> None:
        if place not in self._open:
            self._open[place] = RangeFile(place, codec=self._rules.codec)
            self._opened_at[place] = self._clock()
        self._open[place].add(record, await self._schemas.of(record))

    def _too_much(self) -> list[Partition]:
        """Return the largest open ranges that must be closed to bring the memory of all ranges below the limit."""
        held = sum(file.held for file in self._open.values())
        HELD.set(held)
        found: list[Partition] = []
        for place in sorted(self._open, key=lambda place: -self._open[place].held):
            if held <= self._limits.buffer_bytes:
                break
            found.append(place)
            held -= self._open[place].held
        return found

    async def _close(self, ends: Mapping[Partition, int]) -> None:
        """Decide the ranges that end there in one transaction; then write each file and its index object."""
        if not ends:
            return
        with DECIDE_S.time():
            await self._decide(ends)
        for place, end in ends.items():
            del self._opened_at[place]
            with WRITE_S.time():
                await self._write(place, self._open.pop(place), OffsetRange(self._ends[place], end))

    async def _decide(self, ends: Mapping[Partition, int]) -> None:
        await self._transactor.begin()
        decided = {place: Commit(end, json.dumps({"start": self._ends[place]})) for place, end in ends.items()}
        self._commits |= {place: commit.keeping(self._commits.get(place)) for place, commit in decided.items()}
        await self._transactor.offsets(self._group, {place: self._commits[place] for place in decided})
        await self._transactor.commit()

    async def _write(self, place: Partition, file: RangeFile, span: OffsetRange) -> None:
        content = await asyncio.to_thread(file.content, span.start, span.end)
        found = ArchivedRange(
            topic=place.topic,
            partition=place.number,
            start=span.start,
            end=span.end,
            first_offset=file.first[0],
            last_offset=file.last[0],
            first_time=file.times[0],
            last_time=file.times[1],
            count=file.count,
            bytes=len(content),
            sha256=hashlib.sha256(content).hexdigest(),
            key=self.index.key(place, span),
        )
        await self.index.put_range(found, content, media_type=MEDIA_TYPE)
        self._ends[place] = span.end
        self._files += 1
        RANGES.inc()
        RECORDS.inc(file.count)
        BYTES.inc(len(content))
        log.info(
            "archived %s[%d] %d to %d: %d records, %d bytes", *place, span.start, span.end, file.count, len(content)
        )

    async def _resume(self, place: Partition, commit: Commit | None, start: int, end: int) -> None:
        """Determine where to continue. A range that was decided and is not in the index is written first."""
        archived = self.index.end(place)
        self._ends[place] = start if archived is None else archived
        decided = None if commit is None else OffsetRange(int(json.loads(commit.metadata)["start"]), commit.offset)
        if decided is not None and decided.end > self._ends[place]:
            if archived is not None and decided.start > archived:
                raise GapInArchive(
                    f"{place.topic}[{place.number}]: the index ends at {archived}, but {decided.start} offsets were "
                    f"archived; restore the objects below {self.index.root}/index from a copy of the store"
                )
            self._ends[place] = decided.start
            self._check_held(place, start, end)
            await self._write(place, await self._read(place, decided), decided)
        self._check_held(place, start, end)

    def _check_held(self, place: Partition, start: int, end: int) -> None:
        if not start <= self._ends[place] <= end:
            raise GapInArchive(
                f"{place.topic}[{place.number}] holds {start} to {end}, but archive {self.index.root} continues at "
                f"{self._ends[place]}: the records between are gone, or this is another log; give it another "
                "[archive] name"
            )

    async def _read(self, place: Partition, span: OffsetRange) -> RangeFile:
        """Read a decided range from the log again."""
        file = RangeFile(place, codec=self._rules.codec)
        async with self._role.log.reader() as reader:
            async for record in read_range(reader, {place: span.start}, {place: span.end}, max_records=POLL_RECORDS):
                file.add(record, await self._schemas.of(record))
        return file

    async def _follow_cuts(self, now: float) -> None:
        """Take a cut of each partition task from time to time, and write it once the index covers it."""
        if now - self._cut_at >= self._rules.max_age_s:
            self._cut_at = now
            self._uncut |= set(range(self.index.topics.get(SESSIONS.name, 0))) - self._cuts.keys()
        for unit in sorted(self._uncut):
            cut = await live_cut(self._role.log, self._role.settings.run.id, unit)
            if cut is not None:
                self._cuts[unit] = cut
                self._uncut.discard(unit)
        await self._put_cuts()

    async def _put_cuts(self) -> None:
        for unit, cut in list(self._cuts.items()):
            wanted = {Partition(topic, unit): at for topic, at in [*cut.high.items(), *cut.ends.items()]}
            if all(self._covers(place, at) for place, at in wanted.items()):
                await self.index.put_cut(cut)
                del self._cuts[unit]

    def _covers(self, place: Partition, offset: int) -> bool:
        """Return whether every record below `offset` is in the index. Offsets after the last record may be those of
        markers."""
        return self._ends[place] >= offset or (place not in self._open and caught_up(self._reader, {place: offset}))

    async def _patient_cut(self, unit: int) -> Cut:
        try:
            async with asyncio.timeout(CUT_PATIENCE_S):
                while True:
                    cut = await live_cut(self._role.log, self._role.settings.run.id, unit)
                    if cut is not None:
                        return cut
                    await asyncio.sleep(0.02)  # polled: another process's transaction cannot be awaited
        except TimeoutError as error:
            raise BusyAssembler(
                f"unit {unit}: a transaction of its assembler has been open for {CUT_PATIENCE_S:.0f} s; flush again "
                "once it has ended"
            ) from error
