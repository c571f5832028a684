"""Objects of the store that hold what one session said or saw: which of them `turnlog erase` may delete.

Objects are named by their content, so several sessions, runs and recordings may refer to one. Deletable is what lies in
the run's own folder, also in its trash, and is referred to by records of this session alone. All records of the run's
log and of every archive in the bucket are searched, as by `turnlog gc`. Logs of other runs are not: those write into
folders of their own, which are left alone, and so are `blobs/` and the recordings of network answers, which runs share.

A writer may name an object that it has seen within REUSED_S without storing it again. Younger objects therefore wait,
as for `turnlog gc`, but no copy of what is deleted is retained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable
from dataclasses import dataclass, field

from turnlog.consumers import gc
from turnlog.infra.archive import ArchiveLog
from turnlog.infra.blobs import KEY, OWNED, TRASH, Blobs, Listed
from turnlog.infra.event_log import EventLog
from turnlog.infra.history import read_range
from turnlog.infra.log import Log, Partition, Record
from turnlog.infra.roles.role import Role
from turnlog.schemas import LaterKind, OtherRegistry, SchemaError, UndecodableRecord, topics
from turnlog.schemas.events import DeadLetter, SessionStarted


@dataclass(frozen=True, slots=True)
class SessionObjects:
    """Objects to which the records of a session lead, directly or through lists of other objects."""

    deletable: tuple[Listed, ...] = ()
    """Objects that only this session refers to. Those that list others come last, so that an interruption between two
    removals leaves the lists."""
    waiting: tuple[str, ...] = ()
    """Names of objects that only this session refers to, but that a writer may be about to name, and of their lists."""
    shared: tuple[str, ...] = ()
    """Names of the other objects, which stay."""
    records: dict[str, int] = field(default_factory=dict)
    """Topic -> number of records of the session."""


async def find_objects(role: Role, folder: str, started: SessionStarted, sessions: Collection[str]) -> SessionObjects:
    """Find the objects of a session; `folder` is that of the run's blobs, and `sessions` are those that are erased
    together. Raises LogError, BlobError, ArchiveError, RegistryUnavailable."""
    blobs = role.blobs
    listings = [await blobs.list_objects(prefix) for prefix in (OWNED, "blobs/", TRASH)]
    objects = {one: match for listing in listings for one in listing.objects if (match := KEY.fullmatch(one.name))}
    recordings = {name: name.split("/")[2] for name in await blobs.names(gc.RECORDINGS) if name.count("/") > 2}
    wanted = {*(match[3] for match in objects.values()), *recordings.values()}
    own, others, records = gc.ReferenceMarks(wanted), gc.ReferenceMarks(wanted), Counter[str]()
    async for topic, record, events in _all_records(role):
        is_own = await _is_of_session(events, record, started, sessions)
        (own if is_own else others).take(record.value)
        records[topic] += is_own
    await gc.mark_recordings(blobs, others)
    named_by_records = frozenset(own.lists)
    folders = sorted({match[2] for match in objects.values() if match[2]})
    await gc.follow(blobs, folders, own)
    await gc.follow(blobs, folders, others)
    only = own.seen - others.seen
    alone = {one: match[3] for one, match in objects.items() if match[3] in only and folder and match[2] == folder}
    born = min(listing.now for listing in listings) - gc.LEAST_GRACE_S
    waiting = {one for one in alone if one.modified > born}
    if waiting:  # without their lists, nothing would lead to them any more
        waiting |= {one for one, sha256 in alone.items() if sha256 in own.lists}

    def order(one: Listed) -> tuple[bool, bool, str]:
        return alone[one] in named_by_records, alone[one] in own.lists, one.name

    deletable = tuple(sorted(alone.keys() - waiting, key=order))
    shared = [one.name for one, match in objects.items() if match[3] in own.seen and one not in alone]
    shared += [name for name, request in recordings.items() if request in own.seen]
    return SessionObjects(
        deletable, tuple(sorted(one.name for one in waiting)), tuple(sorted(shared)),
        {topic: count for topic, count in sorted(records.items()) if count},
    )  # fmt: skip


async def delete_objects(blobs: Blobs, objects: Iterable[Listed]) -> tuple[str, ...]:
    """Delete objects in the order given, but for those that were stored again since they were listed, and return the
    names of those that are there. Raises StoreUnavailable."""
    left = []
    for one in objects:
        if one in (await blobs.list_objects(one.name)).objects:
            await blobs.remove(one.name)
        if await blobs.names(one.name):
            left.append(one.name)
    return tuple(left)


async def _is_of_session(events: EventLog, record: Record, started: SessionStarted, sessions: Collection[str]) -> bool:
    """Return whether a record belongs to the sessions, so that what it refers to is deleted with it. A dead letter
    belongs to the session of the record in it. Bytes that cannot be decoded do if they contain the session's id and
    have the key of its group or rollout."""
    if not any(session.encode() in record.value for session in sessions):
        return False
    try:
        event = await events.decode(record)
    except (LaterKind, OtherRegistry):
        return False
    except UndecodableRecord:
        return record.key in (started.group_id.encode(), started.rollout_id.encode())
    except SchemaError:  # of another run, whose keys are not ours
        return False
    if event.run_id != started.run_id:
        return False
    if isinstance(event, DeadLetter):
        inner = Record(event.topic, event.partition, event.offset, event.key, event.value, (), record.timestamp_ms)
        return await _is_of_session(events, inner, started, sessions)
    return getattr(event, "session_id", None) in sessions


async def _all_records(role: Role) -> AsyncIterator[tuple[str, Record, EventLog]]:
    """Yield (topic, record, its decoder) of every record of the log and of all archives; topics of archives are named
    as such."""
    sources: list[tuple[Log, EventLog, str]] = [(role.log, role.events, "")]
    for name in await gc.archives(role.blobs):
        archive = await ArchiveLog.open(role.blobs, name)
        sources.append((archive, archive.events(writer=role.instance, keys=role.events.keys), "archive "))
    for log, events, prefix in sources:
        there = await log.topics()
        for topic in topics.CATALOGUE:
            if topic.name not in there:
                continue
            places = [Partition(topic.name, number) for number in range(there[topic.name].partitions)]
            starts, ends = await log.start_offsets(places), await log.end_offsets(places)
            async with log.reader() as reader:
                async for record in read_range(reader, starts, ends, max_records=2000):
                    yield prefix + topic.name, record, events
