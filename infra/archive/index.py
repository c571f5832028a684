"""Where the parts of an archive stand in the store, and its index: one small immutable object per file.

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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnlog.infra.blobs import BlobMissing, Blobs
from turnlog.infra.log import Commit, Log, LogError, Partition
from turnlog.names import ConsumerGroup
from turnlog.processors.core.fold.low_water import committed_high, committed_version
from turnlog.processors.core.fold_versions import INPUTS, OUTPUTS, outputs_of
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
