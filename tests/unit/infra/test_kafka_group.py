"""What only a real group coordinator does: broken assignments, expelled members, and a cluster that is not there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from uuid import uuid4

import pytest
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.records_to_delete import RecordsToDelete

from turnlog.infra.embedded.ports import HOST, free_ports
from turnlog.infra.kafka import KafkaLog
from turnlog.infra.kafka.connection import Membership
from turnlog.infra.log import (
    BrokenAssignment,
    Commit,
    Fenced,
    GroupReader,
    LogUnavailable,
    OffsetOutOfRange,
    Partition,
    TopicSpec,
)

UNITS = 4
PATIENCE_S = 60.0
IN = Partition("in", 0)


@pytest.fixture
def prefix() -> str:
    return f"t{uuid4().hex[:8]}-"


@pytest.fixture
async def log(kafka: str, prefix: str) -> AsyncIterator[KafkaLog]:
    log = KafkaLog(kafka, prefix=prefix)
    try:
        await log.create_topics([TopicSpec(name, UNITS, 1, {}) for name in ("in", "side")])
        yield log
    finally:
        await log.close()


class Units:
    """Remembers what a member holds and seeks it to the start."""

    def __init__(self, *topics: str) -> None:
        self.topics = topics
        self.held: frozenset[int] = frozenset()
        self.reader: GroupReader

    async def assigned(self, units: frozenset[int]) -> None:
        self.held = units
        for topic in self.topics:
            for unit in units:
                self.reader.seek(Partition(topic, unit), 0)

    async def revoked(self, units: frozenset[int]) -> None:
        self.held = frozenset()

    async def join(self, log: KafkaLog, stack: AsyncExitStack) -> Units:
        member = log.group_reader("g", self.topics, assigned=self.assigned, revoked=self.revoked)
        self.reader = await stack.enter_async_context(member)
        return self


async def until(done: Callable[[], bool], *members: Units) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not done():
            await asyncio.gather(*(member.reader.poll(timeout_s=0.02) for member in members))


@pytest.mark.kafka
async def test_members_with_different_subscriptions_break_units_and_are_told(log: KafkaLog) -> None:
    async with AsyncExitStack() as stack:
        both = await Units("in", "side").join(log, stack)
        one = await Units("in").join(log, stack)
        with pytest.raises(BrokenAssignment, match="whole partition tasks"):
            await until(lambda: False, both, one)


@pytest.mark.kafka
async def test_a_member_that_the_group_expelled_cannot_commit_and_learns_it(
    kafka: str, prefix: str, log: KafkaLog
) -> None:
    hasty = KafkaLog(kafka, prefix=prefix, membership=Membership(rebalance_ms=1000))
    another = KafkaLog(kafka, prefix=prefix, membership=Membership(rebalance_ms=1000))
    try:
        async with AsyncExitStack() as stack:
            zombie = await Units("in", "side").join(hasty, stack)
            await until(lambda: len(zombie.held) == UNITS, zombie)
            await zombie.reader.commit({IN: Commit(0, "mine")})
            owner = await Units("in", "side").join(another, stack)
            await until(lambda: len(owner.held) == UNITS, owner)  # the zombie does not poll: the group goes on
            await owner.reader.commit({IN: Commit(0, "owner")})
            with pytest.raises(Fenced, match=r"continued without this member|another member owns"):
                await zombie.reader.commit({IN: Commit(0, "zombie")})
            assert await log.commits("g", [IN]) == {IN: Commit(0, "owner")}
            assert len(zombie.held) == UNITS  # it cannot know before it polls
            await until(lambda: len(zombie.held) == len(owner.held) == UNITS // 2, zombie, owner)
    finally:
        await another.close()
        await hasty.close()


@pytest.mark.kafka
async def test_a_member_that_died_gives_its_units_up_after_its_session(log: KafkaLog, kafka: str, prefix: str) -> None:
    """A closed connection without a goodbye is what a kill leaves behind."""
    dead = KafkaLog(kafka, prefix=prefix, membership=Membership(session_ms=1000, heartbeat_ms=200))
    async with AsyncExitStack() as stack:
        gone = AsyncExitStack()
        member = await Units("in", "side").join(dead, gone)
        await until(lambda: len(member.held) == UNITS, member)
        member.reader._member._coordinator.reset_generation()  # nothing to say goodbye with
        await gone.aclose()
        await dead.close()
        heir = await Units("in", "side").join(log, stack)
        await until(lambda: len(heir.held) == UNITS, heir)


@pytest.mark.kafka
async def test_an_offset_that_was_deleted_is_out_of_range(log: KafkaLog, kafka: str, prefix: str) -> None:
    async with log.appender() as appender:
        for _ in range(5):
            await appender.append("in", b"k", b"v", partition=0)
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka)
    await admin.start()
    try:
        await admin.delete_records({TopicPartition(f"{prefix}in", 0): RecordsToDelete(before_offset=3)})
    finally:
        await admin.close()
    assert await log.start_offsets([IN]) == {IN: 3}
    async with log.reader() as reader:
        reader.assign({IN: 1})
        with pytest.raises(OffsetOutOfRange):
            await read_one(reader)
        reader.seek(IN, 3)
        assert (await read_one(reader)).offset == 3


async def read_one(reader):
    async with asyncio.timeout(PATIENCE_S):
        while True:
            for record in await reader.poll():
                return record


@pytest.mark.parametrize("client", ["appender", "reader", "topics", "commits", "transactor"])
async def test_a_cluster_that_is_not_there_is_unavailable_and_names_the_setting(
    client: str,
) -> None:
    log = KafkaLog(f"{HOST}:{free_ports(1)[0]}")

    async def enter(made) -> None:
        async with made:
            pass

    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "appender": lambda: enter(log.appender()),
        "reader": lambda: enter(log.reader()),
        "topics": log.topics,
        "commits": lambda: log.commits("g", [IN]),
        "transactor": lambda: enter(log.transactor("t")),
    }
    with pytest.raises(LogUnavailable, match=r"\[kafka\] bootstrap"):
        await calls[client]()
    await log.close()
