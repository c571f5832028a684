"""A topic that somebody gave more partitions: nothing is acknowledged into one that nobody reads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from uuid import uuid4

import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions

from turnlog.infra.kafka import KafkaLog
from turnlog.infra.kafka.connection import Membership
from turnlog.infra.log import BrokenAssignment, GroupReader, Partition, PartitionsChanged
from turnlog.infra.roles.starting import RUNS, _kafka, _look
from turnlog.infra.topics_admin import apply
from turnlog.schemas.topics import SESSIONS, TURNS
from turnlog.settings import KafkaSettings, Settings

pytestmark = pytest.mark.kafka
PATIENCE_S = 60.0
TOLD = r"agent\.sessions has 4 partitions, but the settings ask for 2 .*\[kafka\] groups"


@pytest.fixture
async def settings(kafka: str) -> Settings:
    settings = Settings(kafka=KafkaSettings(bootstrap=kafka, prefix=f"t{uuid4().hex[:8]}-", groups=2, rollouts=2))
    log = KafkaLog.of(settings.kafka)
    await apply(log, settings)
    await log.close()
    return settings


@pytest.fixture
async def log(settings: Settings) -> AsyncIterator[KafkaLog]:
    log = KafkaLog.of(settings.kafka, Membership(metadata_ms=500))
    yield log
    await log.close()


async def give_more(settings: Settings, *topics: str) -> None:
    """Give each topic four partitions, and return once the broker's own metadata show them."""
    names = [f"{settings.kafka.prefix}{topic}" for topic in topics]
    admin = AIOKafkaAdminClient(bootstrap_servers=settings.kafka.bootstrap)
    await admin.start()
    await admin.create_partitions({name: NewPartitions(4) for name in names})
    async with asyncio.timeout(PATIENCE_S):
        while {len(topic["partitions"]) for topic in await admin.describe_topics(names)} != {4}:
            pass  # the broker answers the request before its metadata have changed
    await admin.close()


async def test_nothing_is_written_to_a_topic_with_more_partitions_than_the_settings_say(
    settings: Settings, log: KafkaLog
) -> None:
    await give_more(settings, SESSIONS.name)
    async with log.appender() as appender, log.transactor("t") as transactor:
        with pytest.raises(PartitionsChanged, match=TOLD):
            await appender.append(SESSIONS.name, b"k", b"v")
        await transactor.begin()
        with pytest.raises(PartitionsChanged, match=TOLD):
            await transactor.send(SESSIONS.name, 3, b"k", b"v")
        await appender.append(TURNS.name, b"k", b"v")
    with pytest.raises(PartitionsChanged, match=TOLD):
        async with log.group_reader("g", [SESSIONS.name], assigned=_nothing, revoked=_nothing):
            pass
    whole = [Partition(SESSIONS.name, number) for number in range(4)]
    assert await log.end_offsets(whole) == dict.fromkeys(whole, 0), "what is there can be read"


async def test_a_role_says_on_readyz_that_a_topic_has_got_more_and_writes_as_before(
    settings: Settings, log: KafkaLog
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        looked_at = _kafka(stack, settings, RUNS)
        assert await _look(looked_at) is None
        appender = await stack.enter_async_context(log.appender())
        before = [await appender.append(SESSIONS.name, bytes([key]), b"v") for key in range(16)]
        await give_more(settings, SESSIONS.name)
        async with asyncio.timeout(PATIENCE_S):
            while (said := await _look(looked_at)) is None:
                pass  # the role looks at its own copy of the metadata, which is renewed every half second
        assert "agent.sessions has 4 partitions, but the settings ask for 2" in said
        after = [await appender.append(SESSIONS.name, bytes([key]), b"v") for key in range(16)]
        assert [place for place, _ in after] == [place for place, _ in before]


async def test_a_member_that_is_given_new_partitions_ends(settings: Settings, log: KafkaLog) -> None:
    held = asyncio.Event()

    async def seek(units: frozenset[int]) -> None:
        for unit in units:
            member.seek(Partition(SESSIONS.name, unit), 0)
        held.set()

    async with asyncio.timeout(PATIENCE_S):
        async with log.group_reader("g", [SESSIONS.name], assigned=seek, revoked=_nothing) as member:
            while not held.is_set():
                await member.poll(timeout_s=0.1)
            await give_more(settings, SESSIONS.name)
            with pytest.raises(BrokenAssignment, match=r"now have \[2, 3\]"):
                await polled_for_ever(member)


async def polled_for_ever(member: GroupReader) -> None:
    while True:
        await member.poll(timeout_s=0.1)


async def _nothing(_: frozenset[int]) -> None:
    pass
