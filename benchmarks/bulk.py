"""Append a long history fast: batches of thousands of records per partition, their offsets known before they are sent.

One client that writes alone knows where each record will stand; so nothing waits for an acknowledgement, and what
refers to an offset (marks, manifests) can be made at once. Every acknowledgement is compared with what was foretold.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from turnlog.infra.kafka.aiokafka_changes import MendedProducer
from turnlog.infra.kafka.security import Login
from turnlog.infra.log import Headers, Partition, partition_of
from turnlog.infra.roles.role import Role
from turnlog.schemas.events import Event
from turnlog.schemas.topics import TOPIC_OF

BATCH_BYTES = 1 << 20
partition_of_key = lru_cache(maxsize=1024)(partition_of)
"""A group's records have one key."""


@dataclass(frozen=True, slots=True)
class Placed:
    """An event where it stands, as a fold reads it."""

    topic: str
    partition: int
    offset: int
    key: bytes


class NotAlone(Exception):
    """Somebody else wrote to a partition meanwhile."""


@dataclass(slots=True)
class Bulk:
    """What is not yet sent, and what is not yet acknowledged."""

    role: Role
    producer: MendedProducer
    ends: dict[Partition, int]
    """Offset of the next record; partitions that are not in it are empty."""
    _open: dict[Partition, tuple[Any, int]] = field(default_factory=dict)
    """aiokafka's batch, and the offset of its first record."""
    _full: list[tuple[Partition, Any, int]] = field(default_factory=list)

    def add(self, event: Event) -> Placed:
        """Encode; it leaves with the next `send`."""
        kafka, topic = self.role.settings.kafka, TOPIC_OF[type(event).__name__]
        key = topic.key_of(event)
        count = 1 if topic.partitions == "one" else getattr(kafka, topic.partitions)
        place = Partition(topic.name, 0 if count == 1 else partition_of_key(key, count))
        events = self.role.events
        offset = self.add_raw(place, key, events.codec.encode(event), events.headers(event))
        return Placed(place.topic, place.number, offset, key)

    def add_raw(self, place: Partition, key: bytes, value: bytes, headers: Headers = ()) -> int:
        """A record as it stands; its offset."""
        offset = self.ends.get(place, 0)
        record = {"timestamp": None, "key": key, "value": value, "headers": list(headers)}
        batch, _ = self._open.get(place) or self._begun(place, offset)
        if batch.append(**record) is None:  # it is full
            self._full.append((place, *self._open[place]))
            self._begun(place, offset)[0].append(**record)
        self.ends[place] = offset + 1
        return offset

    def add_all(self, events: Iterable[Event]) -> list[tuple[Event, Placed]]:
        """In this order."""
        return [(event, self.add(event)) for event in events]

    async def send(self) -> None:
        """Everything that was added, acknowledged. Raises NotAlone."""
        leaving = [*self._full, *((place, *begun) for place, begun in self._open.items())]
        self._full, self._open = [], {}
        acks = [
            await self.producer.send_batch(batch, self.role.settings.kafka.prefix + place.topic, partition=place.number)
            for place, batch, _ in leaving
        ]
        for (place, _, foretold), found in zip(leaving, await asyncio.gather(*acks), strict=True):
            if found.offset != foretold:
                raise NotAlone(f"{place.topic}[{place.number}]: a batch stands at {found.offset}, not at {foretold}")

    def _begun(self, place: Partition, offset: int) -> tuple[Any, int]:
        self._open[place] = (self.producer.create_batch(), offset)
        return self._open[place]


@asynccontextmanager
async def bulk(role: Role, ends: dict[Partition, int]) -> AsyncIterator[Bulk]:
    """Sends what is left when the block ends. `ends` goes on with what is appended."""
    kafka = role.settings.kafka
    async with MendedProducer(
        bootstrap_servers=kafka.bootstrap, enable_idempotence=True, max_batch_size=BATCH_BYTES, **Login(kafka).options()
    ) as producer:
        appending = Bulk(role, producer, ends)
        yield appending
        await appending.send()
