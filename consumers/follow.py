"""Attach your own consumer: events of topics as they arrive, at least once, under a consumer group of your own.

    async with follow("segment-samples", group="my-report") as events:
        async for event in events:
            ...

No other part of turnlog needs to know about it. It registers no schema, appends nothing and takes part in no
transaction. An event is committed after its iteration of the loop has ended, so a crash repeats a few events and skips
none. Store your results under one of the event's ids (rollout_id, sample_id, event_id): then a repeated event changes
nothing.

FollowError
├── UnknownTopic      not a topic of the catalogue
└── MixedPartitions   topics with separately configured numbers of partitions cannot share a group
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from turnlog.infra.event_log import EventLog
from turnlog.infra.history import caught_up
from turnlog.infra.log import PATIENT_S, Commit, GroupReader, Log, Partition, Record
from turnlog.infra.registry import Registry
from turnlog.infra.roles.role import session_keys
from turnlog.infra.run_folder import resolve_endpoints, run_settings
from turnlog.infra.session_keys import SessionKeys
from turnlog.schemas import UndecodableRecord
from turnlog.schemas.codec import Codec
from turnlog.schemas.events import Event
from turnlog.schemas.topics import BY_NAME
from turnlog.settings import KafkaSettings, Settings

log = logging.getLogger(__name__)
POLL_S = 0.5


class FollowError(Exception):
    """Base of the tree above."""


class UnknownTopic(FollowError):
    """Remedy: docs/events.md lists the topics."""


class MixedPartitions(FollowError):
    """Remedy: call `follow` once per kind of key, each with a group of its own."""


class Events:
    """An async iterator of decoded events. Several iterators may share a group; each then receives whole partitions of
    the topics."""

    def __init__(self, client: Log, events: EventLog, *, topics: Sequence[str], group: str, commit_s: float) -> None:
        self.record: Record | None = None
        """Record of the current event, with its offset, timestamp and headers."""
        self.undecodable = 0
        """Number of skipped records. The role that owns their topic dead-letters them."""
        self._log = client
        self._events = events
        self._topics = topics
        self._group = group
        self._commit_s = commit_s
        self._committed_at = time.monotonic()
        self._ready: deque[Record] = deque()
        self._done: dict[Partition, int] = {}
        """Offset to commit, for partitions that advanced since the last commit."""
        self._batch: dict[Partition, int] = {}
        """Offset to commit once the current event or list is done."""
        self._ends: dict[Partition, int] = {}
        """Offset at which to stop, for each assigned partition."""
        self._held = False
        self.until_end = False
        self.reader: GroupReader

    def __aiter__(self) -> Events:
        return self

    async def __anext__(self) -> Event:
        """Return the next event and mark the previous one as done. Raises LogError, RegistryUnavailable, and
        ContentKeyError for content that this process cannot decrypt."""
        while await self._more():
            if (event := await self._decode_next()) is not None:
                return event
        raise StopAsyncIteration

    async def batches(self) -> AsyncIterator[list[Event]]:
        """Yield the same events in lists of what is available, so that their results can be stored in one transaction.
        A list is done when the next one is requested. Raises what `__anext__` raises."""
        while await self._more():
            events = []
            while self._ready:
                if (event := await self._decode_next()) is not None:
                    events.append(event)
                self._in_hand()
            if events:
                yield events

    async def _more(self) -> bool:
        """Mark the current event or list as done, commit if that is due, and wait for records. Return False at the
        end."""
        self.mark_done()
        while True:
            if time.monotonic() - self._committed_at >= self._commit_s:
                await self.commit()
            if self._ready:
                return True
            if self.until_end and self._held and caught_up(self.reader, self._ends):
                return False
            self._ready.extend(await self.reader.poll(timeout_s=POLL_S))

    async def _decode_next(self) -> Event | None:
        """Return the event of the next record, or None if it cannot be decoded."""
        self.record = self._ready.popleft()
        try:
            return await self._events.decode(self.record)
        except UndecodableRecord as error:
            log.warning("skipped: %s", error)
            self.undecodable += 1
            return None

    def _in_hand(self) -> None:
        if self.record is not None:
            self._batch[Partition(self.record.topic, self.record.partition)] = self.record.offset + 1
            self.record = None

    def mark_done(self) -> None:
        """Allow the current event or list to be committed."""
        self._in_hand()
        self._done |= self._batch
        self._batch.clear()

    async def commit(self) -> None:
        """Commit every event that is done. Raises Fenced if the group has given its partitions to another member."""
        done, self._done = self._done, {}
        if done:
            await self.reader.commit({name: Commit(offset) for name, offset in done.items()})
        self._committed_at = time.monotonic()

    async def on_assigned(self, units: frozenset[int]) -> None:
        """Begin at the group's commits, or at the beginning of the log."""
        names = [Partition(topic, unit) for topic in self._topics for unit in units]
        commits, starts = await self._log.commits(self._group, names), await self._log.start_offsets(names)
        for name in names:
            offset = commits[name].offset if name in commits else starts[name]
            if offset < starts[name]:
                log.warning("%s[%d]: records %d to %d are gone from the log", *name, offset, starts[name])
            self.reader.seek(name, max(offset, starts[name]))
        self._ends = await self._log.end_offsets(names)
        self._held = True

    async def on_revoked(self, units: frozenset[int]) -> None:
        """Forget what was not delivered; the next owner begins at the last commit."""
        self._held = False
        self._done, self._batch = (
            {name: offset for name, offset in known.items() if name.number not in units}
            for known in (self._done, self._batch)
        )


@asynccontextmanager
async def follow(
    *topics: str, group: str, settings: Settings | None = None, until_end: bool = False, commit_s: float = 1.0
) -> AsyncIterator[Events]:
    """Follow `topics` of a run. Without `settings`, the environment names the run (`run_settings`).

    `group` is the consumer group whose progress is committed; a new one begins at the first record. With `until_end`
    the loop ends at what was on the log when the partitions were assigned. If the run encrypts content, [erasure]
    master_keys must hold its keys; content of erased sessions has values that stand for it (`content.holds_erased`).
    Raises FollowError, NoEndpoints, LogError, RegistryUnavailable.
    """
    from turnlog.infra.kafka import KafkaLog  # clients of real machines are imported where they are opened
    from turnlog.infra.registry import HttpRegistry

    settings = resolve_endpoints(settings or run_settings(None, os.environ))
    check(topics, settings.kafka)
    async with AsyncExitStack() as stack:
        kafka = KafkaLog.of(settings.kafka)
        stack.push_async_callback(kafka.close)
        registry = HttpRegistry(settings.registry)
        stack.push_async_callback(registry.close)
        opened = follow_on(
            kafka, registry, topics, group=group, until_end=until_end, commit_s=commit_s, keys=session_keys(settings)
        )
        yield await stack.enter_async_context(opened)


@asynccontextmanager
async def follow_on(
    client: Log, registry: Registry, topics: Sequence[str], *, group: str, until_end: bool, commit_s: float,
    keys: SessionKeys | None = None,
) -> AsyncIterator[Events]:  # fmt: skip
    """Run `follow` on an open log. Schemas are read from the registry by the ids in the records. `keys`, which are
    closed at the end, decrypt content."""
    decoding = EventLog(client, registry, Codec({}, cipher=keys), group, keys=keys)
    events = Events(client, decoding, topics=topics, group=group, commit_s=commit_s)
    events.until_end = until_end
    # Half a second of delay is acceptable, and a few large fetches are cheaper than many small ones.
    member = client.group_reader(
        group, topics, assigned=events.on_assigned, revoked=events.on_revoked, pause_s=PATIENT_S
    )
    async with AsyncExitStack() as stack:
        if keys is not None:
            keys.attach(decoding)
            stack.push_async_callback(keys.close)
        events.reader = await stack.enter_async_context(member)
        yield events
        events.mark_done()  # not reached after an error, so that event is delivered again
        await events.commit()


def check(topics: Sequence[str], kafka: KafkaSettings) -> None:
    """Check that the topics exist and can share a group. Raises UnknownTopic, MixedPartitions."""
    for topic in topics:
        if topic not in BY_NAME:
            raise UnknownTopic(f"{topic!r} is not a topic; docs/events.md lists them")
    if len({kafka.count(BY_NAME[topic].partitions) for topic in topics}) != 1:
        kinds = ", ".join(f"{topic} by {BY_NAME[topic].key}" for topic in topics) or "no topic"
        raise MixedPartitions(f"one consumer group cannot follow {kinds}: their numbers of partitions differ")
