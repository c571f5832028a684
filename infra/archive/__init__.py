"""The archive of a log: files of closed offset ranges in the store, their index (one small immutable object per file),
and a Log that reads them, so that every reader of topics works on an archive without Kafka and without a registry.

Names are functions of the contents, so that the successor of a killed writer writes the same names again:
  archive/NAME/topics.json                                          the first topics and their partition counts
  archive/NAME/topics/T.json                                        the partition count of any other topic
  archive/NAME/schemas/ID.json                                      a registered schema: {"subject", "schema"}
  archive/NAME/topic=T/partition=P/START-END.avro                   records of [START, END)
  archive/NAME/index/T/P/START-END.json                             an ArchivedRange: written after its file
  archive/NAME/marks/GROUP/UNIT/SUM.json                            a Cut that the files before it cover

ArchiveError
├── ArchiveDamaged    the index has a gap or an overlap, or a file is not the one that the index names
├── NoArchive         the store has no archive of that name
└── ReadOnlyArchive   an archive accepts no records
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
FIRST_TOPICS = frozenset({
    "agent.sessions", "agent.token-snapshots", "agent.tool-calls", "agent.tool-results", "agent.turns", "dead-letters",
    "engine-status", "group-requests", "group-scores", "runs", "sample-batches", "sample-scores", "segment-samples",
    "tasks", "train-steps", "turn-trees", "weight-versions",
})  # fmt: skip
"""The topics that topics.json may name. An archiver of schema release v7 or older refuses an archive whose topics.json
names a topic that it does not know, so later topics have an object each, which it does not read."""


class ArchiveError(LogError):
    """Base class of all errors of archives; see the module docstring."""


class ArchiveDamaged(ArchiveError):
    """The archive is inconsistent. Remedy: restore the object that the message names from a copy of the store."""


class NoArchive(ArchiveError):
    """The archive does not exist. Remedy: check [archive] name and [store]; `turnlog archive` writes one."""


class ReadOnlyArchive(ArchiveError):
    """An archive cannot do what only a live log can. Records are written to topics; the archive role copies them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivedRange:
    """Index entry of one file, which has every record of [start, end) of a partition.

    Offsets without a record are transaction markers and aborted records. `bytes` and `sha256` are those of the file;
    times are in ms since 1970.
    """

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
    """Name of the file in the store."""


@dataclass(frozen=True, slots=True, order=True)
class OffsetRange:
    """Offsets [start, end) of a partition that are archived, as stated in the name of an index object."""

    start: int
    end: int


class ArchiveIndex:
    """The objects of one archive: topics, schemas, files, index and cuts."""

    def __init__(self, blobs: Blobs, name: str) -> None:
        self._blobs = blobs
        self.root = f"archive/{name}"
        self.spans: dict[Partition, list[OffsetRange]] = {}
        """Archived spans by partition, in order of offset and without gaps. Spans added after `load` are included."""
        self.topics: dict[str, int] = {}

    async def load(self) -> None:
        """Read which ranges exist. Raises ArchiveDamaged, StoreUnavailable."""
        try:
            self.topics = json.loads(await self._blobs.get_named(f"{self.root}/topics.json"))
        except BlobMissing:
            self.topics = {}
        for name in await self._blobs.names(f"{self.root}/topics/"):
            topic = name.rpartition("/")[2].removesuffix(".json")
            self.topics[topic] = json.loads(await self._blobs.get_named(name))
        spans: dict[Partition, list[OffsetRange]] = {}
        for name in await self._blobs.names(f"{self.root}/index/"):
            topic, number, range_name = name.removeprefix(f"{self.root}/index/").split("/")
            start, end = range_name.removesuffix(".json").split("-")
            spans.setdefault(Partition(topic, int(number)), []).append(OffsetRange(int(start), int(end)))
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
        """Write the topics and their partition counts. Raises ArchiveDamaged if they differ from the archived ones."""
        known = [name for name in self.topics if name in FIRST_TOPICS or name in topics]  # the others a newer one wrote
        if any(self.topics[name] != topics.get(name) for name in known):
            raise ArchiveDamaged(
                f"{self.root} holds topics {self.topics}, the log has {dict(topics)}: give this log an [archive] name "
                "of its own"
            )
        added = topics.keys() - self.topics.keys()
        for topic in sorted(added - FIRST_TOPICS):
            await self._put(f"topics/{topic}.json", topics[topic])
        if added & FIRST_TOPICS:
            await self._put("topics.json", {topic: n for topic, n in topics.items() if topic in FIRST_TOPICS})
        self.topics |= topics

    async def put_schema(self, schema_id: int, schema: Mapping[str, Any]) -> None:
        """Store a schema. To be called before the first file that needs it is stored."""
        await self._put(f"schemas/{schema_id}.json", {"subject": schema.get("name"), "schema": schema})

    async def schemas(self) -> dict[int, Mapping[str, Any]]:
        """Return all schemas by id."""
        names = await self._blobs.names(f"{self.root}/schemas/")
        bodies = await asyncio.gather(*(self._blobs.get_named(name) for name in names))
        ids = [int(name.rpartition("/")[2].removesuffix(".json")) for name in names]
        return {schema_id: json.loads(body)["schema"] for schema_id, body in zip(ids, bodies, strict=True)}

    async def put_range(self, found: ArchivedRange, content: bytes, *, media_type: str) -> None:
        """Store a file, and then the index object that names it."""
        await self._blobs.put_named(found.key, content, media_type=media_type)
        place = Partition(found.topic, found.partition)
        span = OffsetRange(found.start, found.end)
        await self._put(self._entry(place, span), dataclasses.asdict(found))
        self.spans.setdefault(place, []).append(span)

    async def range(self, place: Partition, span: OffsetRange) -> ArchivedRange:
        """Return the index object of a span. Raises ArchiveDamaged."""
        name = f"{self.root}/{self._entry(place, span)}"
        try:
            return ArchivedRange(**json.loads(await self._blobs.get_named(name)))
        except (BlobMissing, ValueError, TypeError) as error:
            raise ArchiveDamaged(f"{name}: {error}") from error

    async def file(self, place: Partition, span: OffsetRange) -> bytes:
        """Return the verified file of a span. Raises ArchiveDamaged, StoreUnavailable."""
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
        """Store a cut. Later cuts have later names."""
        await self._put(f"marks/{cut.group}/{cut.unit:05d}/{cut.order:020d}.json", cut.as_json())

    async def newest_cut(self, group: str, unit: int) -> Cut | None:
        """Return the last cut of a partition task, or None if there is none."""
        names = await self._blobs.names(f"{self.root}/marks/{group}/{unit:05d}/")
        return Cut.from_json(json.loads(await self._blobs.get_named(names[-1]))) if names else None

    def end(self, place: Partition) -> int | None:
        """Return the first offset after the archived ones, or None if there are none."""
        found = self.spans.get(place)
        return found[-1].end if found else None

    def key(self, place: Partition, span: OffsetRange) -> str:
        """Return the name of a range's file."""
        folder = f"{self.root}/topic={place.topic}/partition={place.number:05d}"
        return f"{folder}/{span.start:020d}-{span.end:020d}.avro"

    def _entry(self, place: Partition, span: OffsetRange) -> str:
        return f"index/{place.topic}/{place.number:05d}/{span.start:020d}-{span.end:020d}.json"

    async def _put(self, name: str, value: object) -> None:
        body = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
        await self._blobs.put_named(f"{self.root}/{name}", body, media_type=JSON)


def archive_name(settings: Settings) -> str:
    """Return [archive] name, or else the run's id."""
    return settings.archive.name or settings.run.id


def partitions_of(topics: Mapping[str, int], only: Iterable[str] = ()) -> Sequence[Partition]:
    """Return every partition of `topics`, or of those in `only`."""
    wanted = set(only) or set(topics)
    return [Partition(name, number) for name in sorted(wanted) for number in range(topics[name])]


@dataclass(frozen=True, slots=True)
class Cut:
    """Consistent position of a partition task. `high`: first input offset per topic that is not folded; `ends`: end
    offset per output topic of what has been folded."""

    group: str
    unit: int
    high: Mapping[str, int]
    ends: Mapping[str, int]
    commits: Mapping[str, tuple[int, str]]
    """Input topic -> (committed offset, metadata), as the assembler wrote them."""

    @property
    def order(self) -> int:
        """Number that increases with every later cut of the partition task."""
        return sum(self.high.values()) + sum(self.ends.values())

    def as_json(self) -> dict[str, Any]:
        """Return the cut as JSON, the inverse of `from_json`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Cut:
        """Parse the result of `as_json`."""
        commits = {topic: (offset, metadata) for topic, (offset, metadata) in value["commits"].items()}
        return cls(**{**value, "commits": commits})


async def live_cut(log: Log, run_id: str, unit: int) -> Cut | None:
    """Return the present cut of a partition task, or None while a transaction is open. Raises LogError,
    BrokenMetadata."""
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

    def events(self, *, writer: str) -> EventLog:
        """Return an event log that decodes the archive's records without a registry."""
        registry = ArchiveRegistry(self.schemas)
        return EventLog(self, registry, Codec(registry.ids()), writer)

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
            raise TopicMissing(f"{self.index.root} holds no topic {place.topic}: it was not archived")
        if place.number not in range(self.index.topics[place.topic]):
            count = self.index.topics[place.topic]
            raise TopicMissing(f"{place.topic} has no partition {place.number}: it was archived with {count}")
        return self.index.spans.get(place, [])

    async def create_topics(self, specs: Sequence[TopicSpec]) -> None:
        """See Log. Raises ReadOnlyArchive."""
        self._refuse()

    async def delete_before(self, offsets: Mapping[Partition, int]) -> None:
        """See Log. Raises ReadOnlyArchive."""
        self._refuse()

    def appender(self) -> AbstractAsyncContextManager[Appender]:
        """See Log. Raises ReadOnlyArchive."""
        self._refuse()

    def transactor(self, transactional_id: str) -> AbstractAsyncContextManager[Transactor]:
        """See Log. Raises ReadOnlyArchive."""
        self._refuse()

    def group_reader(
        self, group: str, topics: Sequence[str], *, assigned: Assigned, revoked: Assigned, instance: str | None = None,
        patient: bool = False,
    ) -> AbstractAsyncContextManager[GroupReader]:  # fmt: skip
        """See Log. Raises ReadOnlyArchive."""
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
    return json.dumps(schema, sort_keys=True)
