"""Garbage collection: move objects of the store that nothing references any more into its trash, and remove them for
good one grace period later.

References are collected over all owners of the bucket together (decision 34). Every record of every log and archive is
searched for what looks like a sha256, so that records of later releases, rejected records and records of open
transactions count, too. Objects younger than the grace period are left alone, because their writer may be about to
reference them.

Files of a checkpoint that has no manifest after a grace period are removed at once, since that checkpoint was never
complete. A complete checkpoint stays, however old it is: its trainer removes it.

Nothing relies on a lock. Each step can be interrupted or repeated: an object is copied into the trash before it is
removed, checked again before that, and put back if a later mark phase or a reader finds that it is needed.

GcError
├── UnknownOwner    the owner of an object may need it, and cannot be queried
├── GraceTooShort   shorter than writers and transactions may take
└── MarkTooOld      deletion came too late after the mark phase that it relies on
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from turnlog.infra.archive import ArchiveLog
from turnlog.infra.blobs import (
    CHECKPOINT,
    CHECKPOINTS,
    KEY,
    MANIFEST,
    OWNED,
    OWNERS,
    REUSED_S,
    TRASH,
    BlobMissing,
    Blobs,
    Listed,
    Owner,
    key,
)
from turnlog.infra.history import read_range
from turnlog.infra.kafka import KafkaLog
from turnlog.infra.log import Log, Partition
from turnlog.kafka_settings import KafkaSettings
from turnlog.names import RECORD_HEADER
from turnlog.schemas import topics

LEAST_GRACE_S = 2 * REUSED_S
"""Minimum grace period in seconds. A blob is referenced within REUSED_S of its put. The same time again allows for the
transaction that references it (10 s at most) and for slow processes."""
AT_ONCE = 16
"""Number of concurrent requests."""
HASHES = re.compile(rb"[0-9a-f]{64,}")
NESTED = re.compile(rb"\x80\x01([0-9a-f]{64}).{2,12}application/[\w.+-]{1,80}\+json", re.DOTALL)
"""A BlobRef in Avro: length and text of the hash, size, media type. A blob with a JSON media type references other
blobs: the packs of a workspace, the body of an answer."""
RECORDINGS = "egress/"
"""Beginning of the names of recorded answers, `egress/CACHE/REQUEST/PLACE`."""
TOPICS = "/topics.json"
"""End of the name of an archive's index object."""
Connect = Callable[[str], Log]
"""Function from a prefix to the log below it, on one cluster."""


class GcError(Exception):
    """Base of the tree above."""


class UnknownOwner(GcError):
    """Remedy: name the settings of its log with --also, or use --retired if its log is gone for good."""


class GraceTooShort(GcError):
    """Remedy: a longer --grace."""


class MarkTooOld(GcError):
    """Nothing is lost. Remedy: run the command again."""


class ObjectState(StrEnum):
    """State of an object."""

    REACHABLE = "reachable"
    YOUNG = "young: not referenced yet"
    GARBAGE = "garbage: to be moved to the trash"
    UNOWNED = "unowned: not referenced, owner unknown"
    WAITS = "in the trash"
    NEEDED = "in the trash, but referenced: to be restored"
    DUE = "in the trash: to be deleted for good"
    WHOLE = "of complete checkpoints"
    UNFINISHED = "of incomplete checkpoints: to be deleted for good"


@dataclass(frozen=True, slots=True)
class Found:
    """An object in the store: a blob, or a file of a checkpoint."""

    at: Listed
    folder: str
    sha256: str
    trashed: bool
    state: ObjectState


@dataclass(frozen=True, slots=True)
class Marked:
    """Result of the mark phase: the objects of the store, and what references them."""

    now: float
    """The store's clock when it was listed, before anything was marked."""
    grace_s: float
    found: tuple[Found, ...]
    owners: tuple[Owner, ...]
    read: Mapping[str, int]
    """Number of records read, by source."""
    absent: int
    """Number of blobs with lists of other blobs that are referenced but missing."""


@dataclass(slots=True)
class ReferenceMarks:
    """References to the `wanted` hashes found so far."""

    wanted: Collection[str]
    seen: set[str] = field(default_factory=set)
    lists: set[str] = field(default_factory=set)
    """Referenced blobs that must be read as well, since they reference others."""
    read: Counter[str] = field(default_factory=Counter)

    def take(self, content: bytes, where: str = "") -> None:
        """Add everything in `content` that looks like a hash, at any position of a longer run of digits."""
        for run in HASHES.finditer(content):
            digits = run.group().decode()
            self.seen.update(
                digits[at : at + 64] for at in range(len(digits) - 63) if digits[at : at + 64] in self.wanted
            )
        self.lists.update(match.decode() for match in NESTED.findall(content))
        if where:
            self.read[where] += 1


async def mark_objects(
    blobs: Blobs, clusters: Mapping[str, Connect], *, grace_s: float, roots: Collection[tuple[str, str]] = (),
    retired: Collection[str] = (), unowned: bool = False, told: Callable[[str], None] = lambda _: None,
) -> Marked:  # fmt: skip
    """Run the mark phase without changing anything.

    `clusters` is keyed by Kafka's cluster id. `roots` are (cluster, prefix) of logs that may have no owner in the
    store. `retired` are folders of owners whose log is gone for good. `unowned`: whether objects outside any owner's
    folder may be removed, too, because every log that wrote some is known here. Raises UnknownOwner, LogError,
    StoreUnavailable.
    """
    listings = [await blobs.list_objects(prefix) for prefix in (OWNED, "blobs/", TRASH)]
    objects = [one for listing in listings for one in listing.objects]
    matches = [(match, one) for one in objects if (match := KEY.fullmatch(one.name))]
    parts = [(match, one) for one in objects if (match := CHECKPOINT.fullmatch(one.name))]
    folders = {match[2] for match, _ in (*matches, *parts) if match[2]}
    owners = await owners_of(blobs, folders, clusters, retired)
    marks = ReferenceMarks({match[3] for match, _ in matches})
    logs = {*roots, *((owner.cluster, owner.prefix) for owner in owners if owner.folder not in retired)}
    for cluster, prefix in sorted(logs):
        whose = [owner for owner in owners if (owner.cluster, owner.prefix) == (cluster, prefix)]
        await mark_log(clusters[cluster](prefix), prefix, [o for o in whose if o.folder not in retired], folders, marks)
        told(f"read the log below prefix {prefix!r} of cluster {cluster}: {marks.read.total()} records so far")
    for archive in await archives(blobs):
        await mark_archive(blobs, archive, marks)
        told(f"read archive {archive}: {marks.read[f'archive/{archive}{TOPICS}']} records")
    await mark_recordings(blobs, marks)
    absent = await follow(blobs, [owner.folder for owner in owners], marks)
    now = min(listing.now for listing in listings)
    live = {one.name: one for match, one in matches if not match[1]}
    found = tuple(
        Found(one, match[2] or "", match[3], bool(match[1]), _state(one, match, live, marks, now, grace_s, unowned))
        for match, one in matches
    )
    checkpoints = tuple(_of_checkpoints(parts, now, grace_s))
    return Marked(now, grace_s, (*found, *checkpoints), tuple(owners), dict(marks.read), absent)


def _of_checkpoints(parts: Sequence[tuple[re.Match[str], Listed]], now: float, grace_s: float) -> Iterator[Found]:
    """Yield the files of checkpoints. An incomplete checkpoint is as young as its youngest file."""
    whole = {match[1] for match, one in parts if one.name == f"{match[1]}/{MANIFEST}"}
    youngest: defaultdict[str, float] = defaultdict(float)
    for match, one in parts:
        youngest[match[1]] = max(youngest[match[1]], one.modified)
    for match, one in parts:
        old = now - youngest[match[1]] >= grace_s
        state = ObjectState.WHOLE if match[1] in whole else ObjectState.UNFINISHED if old else ObjectState.YOUNG
        yield Found(one, f"{match[2]}/{CHECKPOINTS}", "", trashed=False, state=state)


def _state(
    one: Listed, match: re.Match[str], live: Mapping[str, Listed], marks: ReferenceMarks, now: float, grace_s: float,
    unowned: bool,
) -> ObjectState:  # fmt: skip
    """Return the state of one object. A trashed copy of a needed object stays until the restored object has existed for
    a grace period: by then nobody acts on an earlier mark phase any more."""
    named, old = match[3] in marks.seen, now - one.modified >= grace_s
    if match[1]:
        there = live.get(one.name.removeprefix(TRASH))
        if named and there is None:
            return ObjectState.NEEDED
        return (
            ObjectState.DUE if old and (not named or (there and now - there.modified >= grace_s)) else ObjectState.WAITS
        )
    if named:
        return ObjectState.REACHABLE
    if not old:
        return ObjectState.YOUNG
    return ObjectState.GARBAGE if match[2] or unowned else ObjectState.UNOWNED


async def owners_of(
    blobs: Blobs, folders: Collection[str], clusters: Mapping[str, Connect], retired: Collection[str]
) -> list[Owner]:
    """Return every owner. Raises UnknownOwner if the log of one cannot be queried, or a folder has no owner;
    BlobCorrupt."""
    owners = [Owner.parse(name, await blobs.get_named(name)) for name in await blobs.names(OWNERS)]
    if strange := sorted({*folders, *retired} - {owner.folder for owner in owners}):
        raise UnknownOwner(
            f"{strange[0]} is a folder without an owner: {OWNERS} holds no object for it; restore that from a "
            "copy, or write it again with `turnlog run configure` of the run"
        )
    for owner in owners:
        if owner.cluster not in clusters and owner.folder not in retired:
            raise UnknownOwner(
                f"{owner.folder} belongs to run {owner.run!r} (prefix {owner.prefix!r}) of Kafka cluster "
                f"{owner.cluster}, these settings reach {', '.join(sorted(clusters))}: name that run's settings with "
                f"--also FILE, or, if its log is gone for good and only its archive counts, --retired {owner.folder}"
            )
    return owners


async def mark_log(
    log: Log, prefix: str, owners: Sequence[Owner], folders: Collection[str], marks: ReferenceMarks
) -> None:
    """Mark everything that a record below the prefix references; records of open transactions count. Raises
    UnknownOwner, LogError."""
    try:
        there = await log.topics()
        if lacking := sorted({topic.name for topic in topics.CATALOGUE} - there.keys()):
            raise UnknownOwner(
                f"{len(lacking)} topics below prefix {prefix!r} are not visible, for example {lacking[0]}: "
                "`turnlog topics apply` creates them, `turnlog topics acls` prints the rights to read them, and "
                f"--retired {owners[0].folder if owners else 'FOLDER'} is for a log that is gone for good"
            )
        run = None
        for topic in topics.CATALOGUE:
            places = [Partition(topic.name, number) for number in range(there[topic.name].partitions)]
            async for key_, value, kind in values(log, places):
                marks.take(value, f"{prefix}{topic.name}")
                if run is None and topic is topics.RUNS and kind == b"RunConfigured":
                    run = key_.decode()
    finally:
        await log.close()
    for owner in owners:
        if owner.run != run and owner.folder in folders:
            raise UnknownOwner(
                f"{owner.folder} belongs to run {owner.run!r}, but the log below prefix {prefix!r} is that of {run!r}: "
                f"if the log of {owner.run!r} is gone for good, add --retired {owner.folder}"
            )


async def values(log: Log, places: Sequence[Partition]) -> AsyncIterator[tuple[bytes, bytes, bytes]]:
    """Yield (key, value, kind) of every present record that was not aborted. Records above the last stable offset are
    included, because they may yet be committed."""
    starts, stable = await log.start_offsets(places), await log.end_offsets(places)
    ends = await log.end_offsets(places, committed=False)
    for committed, begin, end in ((True, starts, stable), (False, stable, ends)):
        begin = {place: offset for place, offset in begin.items() if offset < end[place]}
        async with log.reader(committed=committed) as reader:
            async for record in read_range(reader, begin, end, max_records=2000):
                yield record.key, record.value, dict(record.headers).get(RECORD_HEADER, b"")


async def archives(blobs: Blobs) -> list[str]:
    """Return the names of the archives in the bucket. Raises StoreUnavailable."""
    found = [name.removeprefix("archive/") for name in await blobs.names("archive/") if name.endswith(TOPICS)]
    return [name.removesuffix(TOPICS) for name in found]


async def mark_archive(blobs: Blobs, archive: str, marks: ReferenceMarks) -> None:
    """Mark everything that a record of the archive references. Raises ArchiveError, StoreUnavailable."""
    log = await ArchiveLog.open(blobs, archive)
    for topic, spec in (await log.topics()).items():
        async for _, value, _ in values(log, [Partition(topic, number) for number in range(spec.partitions)]):
            marks.take(value, f"archive/{archive}{TOPICS}")


async def mark_recordings(blobs: Blobs, marks: ReferenceMarks) -> None:
    """Mark everything that a recording of the egress proxy references, and the blobs that hold the same answers:
    whoever replays a recording names them without storing them again. Raises StoreUnavailable."""
    recordings = await blobs.names(RECORDINGS)
    for some in _some(recordings):
        for content in await asyncio.gather(*map(blobs.get_named, some)):
            marks.take(content, RECORDINGS)
            marks.take(hashlib.sha256(content).hexdigest().encode())


async def follow(blobs: Blobs, folders: Sequence[str], marks: ReferenceMarks) -> int:
    """Read the blobs that reference other blobs, and return how many of them are missing."""
    absent, read = 0, set[str]()

    async def content(sha256: str) -> bytes | None:
        for name in (trash + key(sha256, folder) for trash in ("", TRASH) for folder in ("", *folders)):
            try:
                return await blobs.get_named(name)
            except BlobMissing:
                continue
        return None

    while left := sorted(marks.lists - read):
        read.update(left)
        for some in _some(left):
            for found in await asyncio.gather(*map(content, some)):
                absent += found is None
                marks.take(found or b"")
    return absent


def _some(everything: Sequence[str]) -> Iterator[Sequence[str]]:
    return (everything[at : at + AT_ONCE] for at in range(0, len(everything), AT_ONCE))


async def sweep_objects(blobs: Blobs, plan: Marked) -> Counter[ObjectState]:
    """Carry out `plan` and return the number of objects moved or removed, by state. Raises MarkTooOld,
    StoreUnavailable."""
    done: Counter[ObjectState] = Counter()
    acts = {ObjectState.GARBAGE, ObjectState.NEEDED, ObjectState.DUE, ObjectState.UNFINISHED}
    todo = [found for found in plan.found if found.state in acts]
    for at in range(0, len(todo), AT_ONCE):
        some = todo[at : at + AT_ONCE]
        for found, did in zip(some, await asyncio.gather(*(_act(blobs, plan, one) for one in some)), strict=True):
            done[found.state] += did
    return done


async def _act(blobs: Blobs, plan: Marked, found: Found) -> bool:
    """Carry out one step of the plan. Return False if another process was faster, or the object was written again."""
    name, listing = found.at.name, await blobs.list_objects(found.at.name)
    if listing.now - plan.now > plan.grace_s:
        raise MarkTooOld(
            f"{listing.now - plan.now:.0f} s have passed since the store was listed, more than the grace period "
            f"of {plan.grace_s:g} s: the listing may be outdated; nothing more is moved, run `turnlog gc` again"
        )
    if found.at not in listing.objects:
        return False
    if found.state is ObjectState.UNFINISHED and await blobs.names(f"{name.rpartition('/')[0]}/{MANIFEST}"):
        return False
    try:
        if found.state is ObjectState.GARBAGE:
            await blobs.copy(name, TRASH + name)
        elif found.state is ObjectState.NEEDED:
            await blobs.copy(name, name.removeprefix(TRASH))
    except BlobMissing:
        return False
    if found.state is not ObjectState.NEEDED:
        await blobs.remove(name)
    return True


def log_of(kafka: KafkaSettings, prefix: str) -> Log:
    """Open the log below a prefix. It is a Connect once `kafka` is bound."""
    return KafkaLog.of(dataclasses.replace(kafka, prefix=prefix))
