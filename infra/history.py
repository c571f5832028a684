"""Reads of what the log already contains: of partitions up to an end offset, and of whole topics, from the first record
to the end at the time when the read began.

The caller takes the end offsets before it reads (`Log.end_offsets`; `own_ends` if only it writes there), and decides
when it opens the reader whether records of open and of aborted transactions are delivered (`Log.reader`). The position
of a reader passes transaction markers, aborted records and other gaps, so a read ends even if no record lies before the
end. Polls may return nothing, as during an outage, which does not end a read either.

Whole topics are read from `role.log`, which is either the topics or an archive, depending on how the role was opened.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from turnlog.infra.event_log import EventLog, check_written, is_configuration
from turnlog.infra.log import Log, Partition, Reader, Record
from turnlog.infra.roles.role import Role
from turnlog.infra.session_keys import KeyLog
from turnlog.names import RECORD_HEADER
from turnlog.schemas import OtherRegistry, UndecodableRecord, UnknownSchemaId
from turnlog.schemas.events import Event, SessionErased
from turnlog.schemas.topics import RUNS, Topic


async def assign_from_start(log: Log, reader: Reader, places: Sequence[Partition]) -> dict[Partition, int]:
    """Assign `places` from their first retained records, and return their end offsets as of now. Raises TopicMissing,
    LogUnavailable."""
    reader.assign(await log.start_offsets(places))
    return await log.end_offsets(places)


def caught_up(reader: Reader, ends: Mapping[Partition, int]) -> bool:
    """Return whether every record below `ends` was delivered. An owner that goes on with the same reader polls until
    this is true and keeps the later records that those polls return."""
    return all(reader.position(place) >= end for place, end in ends.items())


async def read_range(
    reader: Reader, starts: Mapping[Partition, int], ends: Mapping[Partition, int], *, max_records: int = 500,
    timeout_s: float = 0.1,
) -> AsyncGenerator[Record, None]:  # fmt: skip
    """Assign `starts` and yield the records of [start, end) of each of these partitions, in offset order per partition.

    Records at or after the ends are dropped, and the position of the reader lies after them: assign or seek before it
    is used again. The read may be abandoned at any record; the reader belongs to the caller, who closes it. `ends` may
    contain more partitions. `max_records` and `timeout_s` are those of each poll. Raises OffsetOutOfRange if records
    after a start were pruned, and what `Reader.poll` raises.
    """
    ends = {place: ends[place] for place in starts}
    reader.assign(starts)
    while not caught_up(reader, ends):
        for record in await reader.poll(max_records=max_records, timeout_s=timeout_s):
            if record.offset < ends[Partition(record.topic, record.partition)]:
                yield record


EVERY_RUN = "any"
"""Matches the events of every run where run ids are expected."""


async def archive_role(role: Role) -> Role:
    """Return the role as a reader of the archive of its run, in place of the topics. Raises NoArchive, ArchiveDamaged,
    StoreUnavailable."""
    from turnlog.infra.archive import ArchiveLog, archive_name  # 0.1 s, which few readers of history need

    log = await ArchiveLog.open(role.blobs, archive_name(role.settings))
    return dataclasses.replace(role, log=log, events=log.events(writer=role.instance, keys=role.events.keys))


async def recorded_erasures(
    log: Log, events: EventLog, spine: Partition, run_id: str, *, archive: EventLog | None = None
) -> dict[str, SessionErased]:
    """Return {session: SessionErased} of the erased sessions in a partition of agent.sessions: the first record with
    the structure of a tree, else the first one. With `archive`, its records are read as well, and if `log` is an
    archive, those of the topic, which it may not have yet. Nothing is read unless the run encrypts content and a
    session was erased. Raises LogUnavailable, RegistryUnavailable."""
    if events.keys is None:
        return {}
    await events.keys.refresh()
    if not events.keys.erased:
        return {}
    found: dict[str, SessionErased] = {}
    sources: dict[Log, KeyLog] = {log: events}
    for decoder in (archive, events.keys.source):
        if decoder is not None:
            sources.setdefault(decoder.log, decoder)
    for part, decoder in sources.items():
        starts, ends = await part.start_offsets([spine]), await part.end_offsets([spine])
        async with part.reader() as reader:
            async for record in read_range(reader, starts, ends, max_records=2000):
                if (RECORD_HEADER, SessionErased.__name__.encode()) in record.headers:
                    event = await decoder.decode_known(record)
                    if event is not None and event.run_id == run_id:
                        known = found.setdefault(event.session_id, event)
                        if event.has_structure and not known.has_structure:
                            found[event.session_id] = event
    return found


@dataclass(slots=True)
class ReadStatistics:
    """Statistics of a read: offsets, schemas, and records that could not be decoded."""

    read: dict[Partition, tuple[int, int]] = field(default_factory=dict)
    """Partition -> [start, end) of the offsets read."""
    schemas: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(record name, sha256 of its writer's schema) -> events decoded."""
    undecodable: Counter[str] = field(default_factory=Counter)
    """Topic -> number of records that are not events."""


def partitions(role: Role, topic: Topic) -> list[Partition]:
    """Return every partition of a topic of the catalogue."""
    return [Partition(topic.name, number) for number in range(role.settings.kafka.count(topic.partitions))]


async def records(
    role: Role,
    wanted: Sequence[Partition],
    ends: Mapping[Partition, int],
    *,
    since: Mapping[Partition, int] | None = None,
) -> AsyncGenerator[Record, None]:
    """Yield records of `wanted` below `ends` and not before `since`, in offset order per partition."""
    starts = await role.log.start_offsets(wanted)
    starts = {place: max(start, (since or {}).get(place, start)) for place, start in starts.items()}
    async with role.log.reader() as reader:
        async for record in read_range(reader, starts, ends, max_records=2000):
            yield record


async def events_of(
    role: Role, place: Partition, end: int, names: Collection[str], *,
    runs: Collection[str] = (), reading: ReadStatistics | None = None,
) -> AsyncIterator[tuple[Record, Event]]:  # fmt: skip
    """Yield the events of one partition below `end` whose record name is in `names`. Other records are skipped
    undecoded.

    `runs`: ids of the runs wanted, or `EVERY_RUN`; by default the role's own. Undecodable records are counted in
    `reading`; the role that owns the topic has dead-lettered them.
    """
    reading = ReadStatistics() if reading is None else reading
    starts = await role.log.start_offsets([place])
    reading.read[place] = (starts[place], end)
    runs = runs or (role.settings.run.id,)
    async for record in records(role, [place], {place: end}):
        try:
            name, fingerprint = await _written_schema(role, record)
            if name not in names:
                continue
            event = await role.events.decode(record)
        except UndecodableRecord as broken:
            await _check_registry(role, broken)
            reading.undecodable[record.topic] += 1
            continue
        if EVERY_RUN in runs or event.run_id in runs:
            reading.schemas[name, fingerprint] += 1
            yield record, event


async def events(
    role: Role, topic: Topic, *, since: Mapping[Partition, int] | None = None, names: Collection[str] = ()
) -> AsyncIterator[tuple[Record, Event]]:
    """Yield this run's events of a topic, not before the offsets `since`. With `names`, only records of these names are
    decoded. Undecodable records are skipped; the role that owns the topic has dead-lettered them."""
    wanted = partitions(role, topic)
    ends = await role.log.end_offsets(wanted)
    async for record in records(role, wanted, ends, since=since):
        try:
            if names and (await _written_schema(role, record))[0] not in names:
                continue
            event = await role.events.decode(record)
        except UndecodableRecord as broken:
            await _check_registry(role, broken)
            continue
        if event.run_id == role.settings.run.id:
            yield record, event


async def all_events(role: Role, topic: Topic) -> list[Event]:
    """Return `events` as a list without positions, for topics that are always small."""
    return [event async for _, event in events(role, topic)]


async def _written_schema(role: Role, record: Record) -> tuple[str, str]:
    try:
        found = role.events.codec.identify_writer(record.value)
    except UnknownSchemaId:
        await role.events.decode(record)  # asks the registry
        found = role.events.codec.identify_writer(record.value)
    check_written(record, found[0])
    return found


async def _check_registry(role: Role, broken: UndecodableRecord) -> None:
    """Raise `broken` unless it can be blamed on the record alone.

    If it suggests another registry, RunConfigured decides, because any other record may have been written by anybody.
    If RunConfigured can be decoded, the registry is the right one. Raises `broken` if it cannot be decoded or found.
    """
    if not isinstance(broken, OtherRegistry):
        return
    place = Partition(RUNS.name, 0)
    async with aclosing(records(role, [place], await role.log.end_offsets([place]))) as written:
        async for record in written:
            if is_configuration(record):
                try:
                    await role.events.decode(record)
                except UndecodableRecord:
                    raise broken from None
                return
    raise broken
