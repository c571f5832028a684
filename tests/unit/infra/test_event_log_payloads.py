"""An event that is too large for a record travels by reference: its payloads go to the store before it is appended."""

from __future__ import annotations

import pytest

from tests.fakes.memory_log import MemoryLog
from turnlog.infra.blobs import MemoryBlobs, inlined
from turnlog.infra.event_log import EventLog
from turnlog.infra.log import Oversized, Partition, TopicSpec
from turnlog.infra.registry import MemoryRegistry
from turnlog.schemas.events import RewardAssigned, Verifier
from turnlog.schemas.topics import INLINE_LIMIT_BYTES, MAX_MESSAGE_BYTES, SESSIONS
from turnlog.schemas.types import BlobRef


def reward(evidence: bytes, **components: float) -> RewardAssigned:
    return RewardAssigned(
        event_id="e", run_id="r", group_id="g", session_id="s", floor=0, value=1.0, components=components,
        verifier=Verifier("v", "1"), evidence=evidence,
    )  # fmt: skip


@pytest.mark.parametrize("size", [INLINE_LIMIT_BYTES, INLINE_LIMIT_BYTES + 1, MAX_MESSAGE_BYTES + 1])
async def test_a_large_payload_is_stored_and_comes_back_whole(size: int) -> None:
    log, blobs = MemoryLog(), MemoryBlobs()
    await log.create_topics([TopicSpec(SESSIONS.name, 1, 1, {})])
    event = reward(b'"' + b"x" * (size - 2) + b'"')
    async with (
        EventLog.open(log, MemoryRegistry(), writer="test", blobs=blobs) as events,
        log.reader() as reader,
    ):
        await events.append(event)
        reader.assign({Partition(SESSIONS.name, 0): 0})
        (record,) = await reader.poll()
        found = await events.decode(record)
    assert isinstance(found.evidence, BlobRef) == (size > INLINE_LIMIT_BYTES)
    assert await inlined(found, blobs) == event


async def test_what_is_no_payload_is_refused_with_its_size_and_the_limit() -> None:
    log = MemoryLog()
    await log.create_topics([TopicSpec(SESSIONS.name, 1, 1, {})])
    async with EventLog.open(log, MemoryRegistry(), writer="test", blobs=MemoryBlobs()) as events:
        with pytest.raises(Oversized, match=str(MAX_MESSAGE_BYTES)):
            await events.append(reward(b"{}", **{"x" * MAX_MESSAGE_BYTES: 1.0}))
