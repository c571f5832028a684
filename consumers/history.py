"""Reads of a whole topic, from its first record to the end that stood when the read began."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from turnlog.infra.log import Partition, Record
from turnlog.infra.role import Role
from turnlog.schemas.errors import UndecodableRecord
from turnlog.schemas.events import Event
from turnlog.schemas.topics import Topic


def partitions(role: Role, topic: Topic) -> list[Partition]:
    """Every partition of a topic of the catalogue."""
    kafka = role.settings.kafka
    count = {"groups": kafka.groups, "rollouts": kafka.rollouts, "one": 1}[topic.partitions]
    return [Partition(topic.name, number) for number in range(count)]


async def records(role: Role, wanted: Sequence[Partition], ends: dict[Partition, int]) -> AsyncIterator[Record]:
    """Records of `wanted` below `ends`, in offset order per partition."""
    starts = await role.log.start_offsets(wanted)
    async with role.log.reader() as reader:
        reader.assign(starts)
        while any(reader.position(partition) < ends[partition] for partition in wanted):
            for record in await reader.poll(max_records=2000):
                if record.offset < ends[Partition(record.topic, record.partition)]:
                    yield record


async def events(role: Role, topic: Topic) -> AsyncIterator[tuple[Record, Event]]:
    """This run's events of a topic. Undecodable records are passed over: the role that owns the topic parked them."""
    wanted = partitions(role, topic)
    ends = await role.log.end_offsets(wanted)
    async for record in records(role, wanted, ends):
        try:
            event = await role.events.decode(record)
        except UndecodableRecord:
            continue
        if event.run_id == role.settings.run.id:
            yield record, event


async def all_events(role: Role, topic: Topic) -> list[Event]:
    """`events` as a list, without positions: for topics that are small by nature."""
    return [event async for _, event in events(role, topic)]
