"""The objects of one archive: topics, schemas, files, their index, and cuts.

Names are functions of the contents, so that the successor of a killed writer writes the same names again:
  archive/NAME/topics.json                                          the first topics and their partition counts
  archive/NAME/topics/T.json                                        the partition count of any other topic
  archive/NAME/schemas/ID.json                                      a registered schema: {"subject", "schema"}
  archive/NAME/topic=T/partition=P/START-END.avro                   records of [START, END)
  archive/NAME/index/T/P/START-END.json                             an ArchivedRange: written after its file
  archive/NAME/marks/GROUP/UNIT/SUM.json                            a Cut that the files before it cover
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
from turnlog.processors.core.fold.unit import committed_high, committed_version
from turnlog.processors.core.fold_versions import INPUTS, OUTPUTS, outputs_of
from turnlog.schemas.canonical import canonical_text
from turnlog.settings import Settings


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


class ArchiveError(LogError):
    """Base class of all errors of archives; see the module docstring."""


class ArchiveDamaged(ArchiveError):
    """The archive is inconsistent. Remedy: restore the object that the message names from a copy of the store."""


class NoArchive(ArchiveError):
    """The archive does not exist. Remedy: check [archive] name and [store]; `turnlog role archive` writes one."""


class ReadOnlyArchive(ArchiveError):
    """An archive cannot do what only a live log can. Records are written to topics; the archive role copies them."""


JSON = "application/json"
FIRST_TOPICS = frozenset({
    "agent.sessions", "agent.token-snapshots", "agent.tool-calls", "agent.tool-results", "agent.turns", "dead-letters",
    "engine-status", "group-requests", "group-scores", "runs", "sample-batches", "sample-scores", "segment-samples",
    "tasks", "train-steps", "turn-trees", "weight-versions",
})  # fmt: skip
"""The topics that topics.json may name. An archiver of schema release v7 or older refuses an archive whose topics.json
names a topic that it does not know, so later topics have an object each, which it does not read."""


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
                f"{self.root} holds topics {self.topics}, but the log has {dict(topics)}: give this log an "
                "[archive] name of its own"
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
        body = canonical_text(value).encode()
        await self._blobs.put_named(f"{self.root}/{name}", body, media_type=JSON)


def archive_name(settings: Settings) -> str:
    """Return [archive] name, or else the run's id."""
    return settings.archive.name or settings.run.id


def partitions_of(topics: Mapping[str, int], only: Iterable[str] = ()) -> Sequence[Partition]:
    """Return every partition of `topics`, or of those in `only`."""
    wanted = set(only) or set(topics)
    return [Partition(name, number) for name in sorted(wanted) for number in range(topics[name])]
