"""The archive of a log: files of closed ranges in the store, their index (one small immutable object per file), and a
Log that is read from them, by every reader of topics alike, without Kafka and without a registry.

Names are functions of what they hold, so a killed writer's successor writes the same names again:
  archive/NAME/topics.json                                          topics and their partition counts
  archive/NAME/schemas/ID.json                                      a registered schema: {"subject", "schema"}
  archive/NAME/topic=T/partition=P/START-END.avro                   records of [START, END)
  archive/NAME/index/T/P/START-END.json                             an ArchivedRange: written after its file
  archive/NAME/marks/GROUP/UNIT/SUM.json                            a Cut that the files before it cover

ArchiveError
├── ArchiveDamaged    the index has a gap or an overlap, or a file is not the one that the index names
├── NoArchive         nothing stands under the archive's name
└── ReadOnlyArchive   an archive takes no records
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import itertools
import json
from bisect import bisect_right
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

from turnlog.infra.archive.files import CorruptArchive, read_range
from turnlog.infra.blobs import BlobMissing, Blobs
from turnlog.infra.event_log import EventLog
from turnlog.infra.log import (
    Appender,
    Assigned,
    Commit,
    GroupReader,
    Log,
    LogError,
    OffsetOutOfRange,
    Partition,
    Reader,
    Record,
    TopicMissing,
    TopicSpec,
    Transactor,
)
from turnlog.names import ConsumerGroup
from turnlog.processors.core.fold.low_water import committed_high, committed_version
from turnlog.processors.core.fold_versions import INPUTS, OUTPUTS, outputs_of
from turnlog.schemas.avsc import stored_schema
from turnlog.schemas.codec import Codec
from turnlog.schemas.events import ALL
from turnlog.settings import Settings

JSON = "application/json"


class ArchiveError(LogError):
    """Base of the tree above."""


class ArchiveDamaged(ArchiveError):
    """Remedy: restore the object that the message names from a copy of the store."""


class NoArchive(ArchiveError):
    """Remedy: check [archive] name and [store]; `turnlog archive` writes one."""


class ReadOnlyArchive(ArchiveError):
    """Records are written to topics; the archive role copies them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivedRange:
    """One file: every record of [start, end) of a partition. Offsets between records are markers and aborted records.
    `bytes` and `sha256` are of the file, times in ms since 1970."""

    topic: str
    partition: int
    start: int
    end: int
    first_offset: int
    last_offset: int
    first_time: int
    last_time: int
    count: int
    bytes: int
    sha256: str
    key: str
    """The file's name in the store."""


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """What the name of an index object says: offsets [start, end) of a partition are archived."""

    start: int
    end: int


class ArchiveIndex:
    """The objects of one archive."""

    def __init__(self, blobs: Blobs, name: str) -> None:
        self._blobs = blobs
        self.root = f"archive/{name}"
        self.spans: dict[Partition, list[Span]] = {}
        """In order of offset, without gaps; as of `load`, with what was added since."""
        self.topics: dict[str, int] = {}

    async def load(self) -> None:
        """Read which ranges exist. Raises ArchiveDamaged, StoreUnavailable."""
        try:
            self.topics = json.loads(await self._blobs.get_named(f"{self.root}/topics.json"))
        except BlobMissing:
            self.topics = {}
        spans: dict[Partition, list[Span]] = {}
        for name in await self._blobs.names(f"{self.root}/index/"):
            topic, number, range_name = name.removeprefix(f"{self.root}/index/").split("/")
            start, end = range_name.removesuffix(".json").split("-")
            spans.setdefault(Partition(topic, int(number)), []).append(Span(int(start), int(end)))
        for place, found in spans.items():
            found.sort()
            for before, after in itertools.pairwise(found):
                if before.end != after.start:
                    what = "overlap" if before.end > after.start else "leave a gap"
                    raise ArchiveDamaged(
                        f"{self.root}/index/{place.topic}/{place.number}: {before} and {after} {what}; restore the "
                        "index objects from a copy of the store"
                    )
        self.spans = spans

    async def put_topics(self, topics: Mapping[str, int]) -> None:
        """Name the topics and their partition counts. Raises ArchiveDamaged when they are others than before."""
        if any(self.topics[name] != topics.get(name) for name in self.topics):
            raise ArchiveDamaged(
                f"{self.root} holds topics {self.topics}, the log has {dict(topics)}: give this log an [archive] name "
                "of its own"
            )
        if self.topics != topics:
            self.topics = dict(topics)
            await self._put("topics.json", self.topics)

    async def put_schema(self, schema_id: int, schema: Mapping[str, Any]) -> None:
        """Keep a schema, before the first file that needs it."""
        await self._put(f"schemas/{schema_id}.json", {"subject": schema.get("name"), "schema": schema})

    async def schemas(self) -> dict[int, Mapping[str, Any]]:
        """Every schema by id."""
        names = await self._blobs.names(f"{self.root}/schemas/")
        bodies = await asyncio.gather(*(self._blobs.get_named(name) for name in names))
        ids = [int(name.rpartition("/")[2].removesuffix(".json")) for name in names]
        return {schema_id: json.loads(body)["schema"] for schema_id, body in zip(ids, bodies, strict=True)}

    async def put_range(self, found: ArchivedRange, content: bytes, *, media_type: str) -> None:
        """File first, then the index object that names it."""
        await self._blobs.put_named(found.key, content, media_type=media_type)
        place = Partition(found.topic, found.partition)
        span = Span(found.start, found.end)
        await self._put(self._entry(place, span), dataclasses.asdict(found))
        self.spans.setdefault(place, []).append(span)

    async def range(self, place: Partition, span: Span) -> ArchivedRange:
        """The index object of a span. Raises ArchiveDamaged."""
        name = f"{self.root}/{self._entry(place, span)}"
        try:
            return ArchivedRange(**json.loads(await self._blobs.get_named(name)))
        except (BlobMissing, ValueError, TypeError) as error:
            raise ArchiveDamaged(f"{name}: {error}") from error

    async def file(self, place: Partition, span: Span) -> bytes:
        """The verified file of a span. Raises ArchiveDamaged, StoreUnavailable."""
        found = await self.range(place, span)
        try:
            content = await self._blobs.get_named(found.key)
        except BlobMissing as error:
            raise ArchiveDamaged(str(error)) from error
        if len(content) != found.bytes or hashlib.sha256(content).hexdigest() != found.sha256:
            raise ArchiveDamaged(
                f"{found.key}: {len(content)} bytes are not the {found.bytes} that the index names; restore the object "
                "from a copy of the store"
            )
        return content

    async def put_cut(self, cut: Cut) -> None:
        """Keep a cut; later ones have later names."""
        await self._put(f"marks/{cut.group}/{cut.unit:05d}/{cut.order:020d}.json", cut.as_json())

    async def newest_cut(self, group: str, unit: int) -> Cut | None:
        """The last cut of a unit; None when there is none."""
        names = await self._blobs.names(f"{self.root}/marks/{group}/{unit:05d}/")
        return Cut.from_json(json.loads(await self._blobs.get_named(names[-1]))) if names else None

    def end(self, place: Partition) -> int | None:
        """First offset behind the archived ones; None when there are none."""
        found = self.spans.get(place)
        return found[-1].end if found else None

    def key(self, place: Partition, span: Span) -> str:
        """The name of a range's file."""
        folder = f"{self.root}/topic={place.topic}/partition={place.number:05d}"
        return f"{folder}/{span.start:020d}-{span.end:020d}.avro"

    def _entry(self, place: Partition, span: Span) -> str:
        return f"index/{place.topic}/{place.number:05d}/{span.start:020d}-{span.end:020d}.json"

    async def _put(self, name: str, value: object) -> None:
        body = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
        await self._blobs.put_named(f"{self.root}/{name}", body, media_type=JSON)


def archive_name(settings: Settings) -> str:
    """[archive] name, or the run's id."""
    return settings.archive.name or settings.run.id


def partitions_of(topics: Mapping[str, int], only: Iterable[str] = ()) -> Sequence[Partition]:
    """Every partition of `topics`, or of those in `only`."""
    wanted = set(only) or set(topics)
    return [Partition(name, number) for name in sorted(wanted) for number in range(topics[name])]


@dataclass(frozen=True, slots=True)
class Cut:
    """Offsets by topic: `high`, the first input that is not folded; `ends`, where the outputs of what is folded end."""

    group: str
    unit: int
    high: Mapping[str, int]
    ends: Mapping[str, int]
    commits: Mapping[str, tuple[int, str]]
    """Input topic -> (committed offset, metadata), as the assembler wrote them."""

    @property
    def order(self) -> int:
        """Grows with every later cut of the unit."""
        return sum(self.high.values()) + sum(self.ends.values())

    def as_json(self) -> dict[str, Any]:
        """What `from_json` takes."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Cut:
        """The inverse of `as_json`."""
        commits = {topic: (offset, metadata) for topic, (offset, metadata) in value["commits"].items()}
        return cls(**{**value, "commits": commits})


async def live_cut(log: Log, run_id: str, unit: int) -> Cut | None:
    """The unit's present cut; None while a transaction is under way. Raises LogError, BrokenMetadata."""
    group = ConsumerGroup.ASSEMBLER.format(run=run_id)
    inputs = [Partition(topic, unit) for topic in INPUTS]
    before = await log.commits(group, inputs)
    versions = {committed_version(commit.metadata) for commit in before.values()}
    outputs = [Partition(topic, unit) for topic in (outputs_of(versions.pop()) if versions else OUTPUTS)]
    ends = await log.end_offsets(outputs)
    if ends != await log.end_offsets(outputs, committed=False):
        return None
    if before != await log.commits(group, inputs):
        return None
    return _cut(group, unit, before, ends)


def _cut(group: str, unit: int, commits: Mapping[Partition, Commit], ends: Mapping[Partition, int]) -> Cut:
    return Cut(
        group=group,
        unit=unit,
        high=dict.fromkeys(INPUTS, 0) | {p.topic: committed_high(c.metadata) for p, c in commits.items()},
        ends={place.topic: end for place, end in ends.items()},
        commits={place.topic: (commit.offset, commit.metadata) for place, commit in commits.items()},
    )


MADE_UP_IDS = 1 << 31
"""Ids of schemas that no archived record was written with; registries count from 1."""


class ArchiveLog:
    """See Log; the index is read once, by `open`. What writes raises ReadOnlyArchive."""

    def __init__(self, index: ArchiveIndex, schemas: Mapping[int, Mapping[str, Any]]) -> None:
        self.index = index
        self.schemas = dict(schemas)
        """Every schema that an archived record was written with, by its id."""

    @classmethod
    async def open(cls, blobs: Blobs, name: str) -> ArchiveLog:
        """Raises NoArchive, ArchiveDamaged, StoreUnavailable."""
        index = ArchiveIndex(blobs, name)
        await index.load()
        if not index.topics:
            raise NoArchive(f"{index.root} is not in the store: check [archive] name, [run] id and [store]")
        return cls(index, await index.schemas())

    def events(self, *, writer: str) -> EventLog:
        """The events of the archive: decodes without a registry."""
        registry = ArchiveRegistry(self.schemas)
        return EventLog(self, registry, Codec(registry.ids()), writer)

    async def close(self) -> None:
        """Nothing to release: the store belongs to who opened it."""

    async def cluster(self) -> str:
        """Raises ReadOnlyArchive: it outlives its cluster."""
        self._refuse()

    async def topics(self, *, configs: bool = False) -> dict[str, TopicSpec]:
        """See Log. An archive keeps no configuration."""
        return {name: TopicSpec(name, count, 1, {}) for name, count in self.index.topics.items()}

    @asynccontextmanager
    async def reader(self, *, patient: bool = False, committed: bool = True) -> AsyncIterator[Reader]:
        """See Log. A poll at the end waits: nothing new will come. Only committed records are archived."""
        yield ArchiveReader(self)

    async def start_offsets(self, partitions: Sequence[Partition]) -> dict[Partition, int]:
        return {place: (self.spans(place) or [Span(0, 0)])[0].start for place in partitions}

    async def end_offsets(self, partitions: Sequence[Partition], *, committed: bool = True) -> dict[Partition, int]:
        """See Log. Only committed records are archived."""
        return {place: (self.spans(place) or [Span(0, 0)])[-1].end for place in partitions}

    async def offset_since(self, partition: Partition, since_ms: int) -> int:
        """Raises ReadOnlyArchive: an archive is read from its spans, never from a moment on."""
        self._refuse()

    async def groups(self) -> frozenset[str]:
        """See Log. Raises ReadOnlyArchive: of groups, only the assembler's marks are archived."""
        self._refuse()

    async def commits(self, group: str, partitions: Sequence[Partition]) -> dict[Partition, Commit]:
        """The group's commits at the last cut that was archived."""
        found: dict[Partition, Commit] = {}
        for unit in {place.number for place in partitions}:
            cut = await self.index.newest_cut(group, unit)
            of_unit = {} if cut is None else {Partition(t, unit): Commit(*c) for t, c in cut.commits.items()}
            found |= {place: of_unit[place] for place in partitions if place in of_unit}
        return found

    async def members(self, group: str) -> tuple[str, ...]:
        """See Log. Raises ReadOnlyArchive: nobody is in a group of an archive."""
        self._refuse()

    async def committed(self, group: str) -> frozenset[Partition]:
        """See Log. Raises ReadOnlyArchive: nobody goes on from an archive."""
        self._refuse()

    async def cut(self, group: str, unit: int) -> Cut | None:
        """The last cut of an assembler's unit that the archive covers; None when there is none."""
        cut = await self.index.newest_cut(group, unit)
        if cut is None:
            return None

        def held(offsets: Mapping[str, int]) -> dict[str, int]:  # what stood behind it were markers
            return {t: min(at, self.index.end(Partition(t, unit)) or 0) for t, at in offsets.items()}

        return Cut(cut.group, unit, held(cut.high), held(cut.ends), cut.commits)

    def spans(self, place: Partition) -> list[Span]:
        """Archived spans of a partition, in order. Raises TopicMissing."""
        if place.topic not in self.index.topics:
            raise TopicMissing(f"{self.index.root} holds no topic {place.topic}: it was not archived")
        if place.number not in range(self.index.topics[place.topic]):
            count = self.index.topics[place.topic]
            raise TopicMissing(f"{place.topic} has no partition {place.number}: it was archived with {count}")
        return self.index.spans.get(place, [])

    async def create_topics(self, specs: Sequence[TopicSpec]) -> None:
        """Raises ReadOnlyArchive."""
        self._refuse()

    async def delete_before(self, offsets: Mapping[Partition, int]) -> None:
        """Raises ReadOnlyArchive."""
        self._refuse()

    def appender(self) -> AbstractAsyncContextManager[Appender]:
        """Raises ReadOnlyArchive."""
        self._refuse()

    def transactor(self, transactional_id: str) -> AbstractAsyncContextManager[Transactor]:
        """Raises ReadOnlyArchive."""
        self._refuse()

    def group_reader(
        self, group: str, topics: Sequence[str], *, assigned: Assigned, revoked: Assigned, instance: str | None = None,
        patient: bool = False,
    ) -> AbstractAsyncContextManager[GroupReader]:  # fmt: skip
        """Raises ReadOnlyArchive."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ReadOnlyArchive(f"{self.index.root} is an archive: start the role on topics")


@dataclass(slots=True)
class _Place:
    """Where one partition stands: the next offset, and records that were read and not delivered."""

    position: int
    end: int = 0
    """Of the range under way; 0 when none is."""
    blocks: Iterator[list[Record]] = field(default_factory=lambda: iter(()))
    ready: deque[Record] = field(default_factory=deque)


class ArchiveReader:
    """See Reader. Holds at most one file per partition."""

    def __init__(self, log: ArchiveLog) -> None:
        self._log = log
        self._places: dict[Partition, _Place] = {}
        self._turn = 0

    def assign(self, starts: Mapping[Partition, int]) -> None:
        self._places = {place: _Place(offset) for place, offset in starts.items()}

    def seek(self, partition: Partition, offset: int) -> None:
        """See Reader. Raises KeyError for a partition that is not assigned."""
        if partition not in self._places:
            raise KeyError(f"{partition.topic}[{partition.number}] is not assigned to this reader")
        self._places[partition] = _Place(offset)

    def position(self, partition: Partition) -> int:
        return self._places[partition].position

    async def poll(self, *, max_records: int = 500, timeout_s: float = 0.1) -> list[Record]:
        """See Reader. Raises OffsetOutOfRange, ArchiveDamaged, StoreUnavailable."""
        found: list[Record] = []
        names = list(self._places)
        if names:  # no partition starves another
            self._turn = (self._turn + 1) % len(names)
        for name in names[self._turn :] + names[: self._turn]:
            if len(found) < max_records:
                found += await self._take(name, self._places[name], max_records - len(found))
        await asyncio.sleep(0 if found else timeout_s)
        return found

    async def _take(self, name: Partition, place: _Place, limit: int) -> list[Record]:
        """Up to `limit` records of one partition, none when it is at its end."""
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
        """Make the next block ready; at the end of a range step behind it. False at the end of the archive."""
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

    def _span(self, name: Partition, offset: int) -> Span | None:
        spans = self._log.spans(name) or [Span(0, 0)]
        if not spans[0].start <= offset <= spans[-1].end:
            raise OffsetOutOfRange(
                f"{name.topic}[{name.number}]: offset {offset} was asked for, the archive holds {spans[0].start} to "
                f"{spans[-1].end}"
            )
        found = spans[bisect_right(spans, offset, key=lambda span: span.start) - 1]
        return found if offset < found.end else None


class ArchiveRegistry:
    """See Registry; the schemas that archived records were written with."""

    def __init__(self, schemas: Mapping[int, Mapping[str, Any]]) -> None:
        self._schemas = schemas
        self._by_text = {_text(schema): schema_id for schema_id, schema in schemas.items()}

    def ids(self) -> dict[str, int]:
        """Record name -> the archived id of its present schema, or a made-up one where none was archived."""
        return {name: self._by_text.get(_text(stored_schema(name)), MADE_UP_IDS + at) for at, name in enumerate(ALL)}

    async def register(self, subject: str, schema: Mapping[str, Any]) -> int:
        """See Registry; nothing is registered. Raises ReadOnlyArchive for a schema that is not archived."""
        try:
            return self._by_text[_text(schema)]
        except KeyError:
            raise ReadOnlyArchive(f"{subject}: the archive holds no such schema and takes none") from None

    async def schema(self, schema_id: int) -> Mapping[str, Any]:
        return self._schemas[schema_id]

    async def close(self) -> None:
        """Nothing to release."""


def _text(schema: Mapping[str, Any]) -> str:
    return json.dumps(schema, sort_keys=True)
