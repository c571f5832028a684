"""A real broker compacts an erased key away: its folder then holds neither the key nor what was encrypted under it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.fakes.sealed_events import MASTER, PLANTED, event_of
from turnlog.infra.embedded.broker import Broker
from turnlog.infra.event_log import EventLog
from turnlog.infra.history import read_range
from turnlog.infra.kafka import KafkaLog
from turnlog.infra.log import TopicSpec
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.session_keys import PLACE, MasterKeys, SessionKeys
from turnlog.schemas.events import SessionKeyCreated
from turnlog.schemas.topics import SESSION_KEYS, TURNS

QUICK = {
    "cleanup.policy": "compact", "segment.ms": "200", "max.compaction.lag.ms": "200",
    "min.cleanable.dirty.ratio": "0.001", "file.delete.delay.ms": "0",
}  # fmt: skip
"""As the catalogue configures the topic, in less time."""


def found_in(folder: Path, content: bytes) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.is_file() and content in path.read_bytes()]


@pytest.mark.kafka
@pytest.mark.long
async def test_an_erased_key_leaves_the_folder_of_the_broker(tmp_path: Path) -> None:
    with Broker(tmp_path / "kafka", properties="log.cleaner.backoff.ms=200\n") as broker:
        log, keys = KafkaLog(broker.bootstrap), SessionKeys(MasterKeys(MASTER), "run")
        await log.create_topics(
            [TopicSpec(TURNS.name, 1, 1, TURNS.config()), TopicSpec(SESSION_KEYS.name, 1, 1, QUICK)]
        )
        async with EventLog.open(log, MemoryRegistry(), writer="test", keys=keys) as events:
            await events.append(event_of("TurnCompleted", "gone"))
            await events.append(event_of("TurnCompleted", "kept", "event-2"))
            ends = await log.end_offsets([PLACE])
            async with log.reader() as reader:
                records = [record async for record in read_range(reader, {PLACE: 0}, ends)]
            created = [await events.decode(record) for record in records]
            wrapped = {key.session_id: key.wrapped for key in created if isinstance(key, SessionKeyCreated)}
            assert found_in(tmp_path, wrapped["gone"])
            assert not found_in(tmp_path, PLANTED)
            async with asyncio.timeout(90):
                while found_in(tmp_path, wrapped["gone"]):
                    await keys.erase("gone", "an operator")  # each record closes the segment before it
                    await asyncio.sleep(0.5)  # poll: nobody tells when the broker has compacted
        await log.close()
    assert found_in(tmp_path, wrapped["kept"])
    assert not found_in(tmp_path, PLANTED)
