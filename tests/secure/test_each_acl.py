"""Of every role and verb, each right that `turnlog topics acls` prints: taken away, what it is for is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from uuid import uuid4

import pytest

from tests.secured import SUPER, Secured
from turnlog.infra.kafka import KafkaLog
from turnlog.infra.log import (
    ClusterNotAuthorized,
    NotAuthorized,
    Partition,
    TopicMissing,
    TopicNotAuthorized,
    TopicSpec,
    TransactionalIdNotAuthorized,
)
from turnlog.infra.topics_admin import INTERNAL, ROLES, Acl, acls
from turnlog.settings import KafkaSettings, RunSettings, Settings

pytestmark = pytest.mark.kafka
Use = Callable[[KafkaLog, str, str], Awaitable[object]]
"""(log of the holder, what the right is on, a topic that the holder reads) -> the right is used, once."""


async def with_log(kafka: KafkaSettings, work: Callable[[KafkaLog], Any]) -> Any:
    """What `work` returns."""
    log = KafkaLog.of(kafka)
    try:
        return await work(log)
    finally:
        await log.close()


async def read(log: KafkaLog, name: str, _: str) -> None:
    async with log.reader() as reader:
        reader.assign(await log.start_offsets([Partition(name, 0)]))
        await reader.poll(timeout_s=0.5)


async def write(log: KafkaLog, name: str, _: str) -> None:
    async with log.appender() as appender:
        await appender.append(name, b"k", b"v")


async def look(log: KafkaLog, name: str, _: str) -> TopicSpec:
    there = await log.topics(configs=True) | await log.internal_topics()
    if name not in there:
        raise TopicMissing(name)
    return there[name]


async def configuration(log: KafkaLog, name: str, _: str) -> None:
    if not (await look(log, name, "")).config:  # which is no error: managed clusters tell nobody
        raise TopicNotAuthorized(name)


async def brokers(log: KafkaLog, name: str, _: str) -> None:
    if not all((await log.brokers()).values()):
        raise ClusterNotAuthorized(name)


async def join(log: KafkaLog, name: str, topic: str) -> None:
    held = asyncio.Event()

    async def assigned(_: frozenset[int]) -> None:
        held.set()

    async with log.group_reader(name, [topic], assigned=assigned, revoked=lambda _: asyncio.sleep(0)) as reader:
        while not held.is_set():
            await reader.poll(timeout_s=0.2)


async def own(log: KafkaLog, name: str, _: str) -> None:
    async with log.transactor(name):
        pass


async def known(log: KafkaLog, name: str, _: str) -> None:
    if name not in await log.transactional_ids():  # which is no error: Kafka tells of those that one may see
        raise TransactionalIdNotAuthorized(name)


async def sizes(log: KafkaLog, name: str, topic: str) -> None:
    if not await log.sizes([topic]):
        raise ClusterNotAuthorized(name)


async def produce(log: KafkaLog, _: str, __: str) -> None:
    async with log.appender():
        pass


USES: Mapping[tuple[str, str], Use] = {
    ("topic", "Read"): read,
    ("topic", "Write"): write,
    ("topic", "Describe"): look,
    ("topic", "DescribeConfigs"): configuration,
    ("topic", "Create"): lambda log, name, _: log.create_topics([TopicSpec(name, 1, 1, {})]),
    ("topic", "Delete"): lambda log, name, _: log.delete_before({Partition(name, 0): 0}),
    ("group", "Read"): join,
    ("group", "Delete"): lambda log, name, _: log.delete_groups([name]),
    ("transactional-id", "Describe"): known,
    ("cluster", "Describe"): sizes,
    ("group", "Describe"): lambda log, name, topic: log.commits(name, [Partition(topic, 0)]),
    ("transactional-id", "Write"): own,
    ("cluster", "IdempotentWrite"): produce,
    ("cluster", "DescribeConfigs"): brokers,
}


async def misses_each(secured: Secured, role: str) -> None:
    """With all its rights a role does what each is for; with each of them taken away, it does not."""
    prefix = f"t{uuid4().hex[:8]}-"
    everything = secured.scram(SUPER, prefix=prefix, groups=1, rollouts=1)
    rights = acls(Settings(run=RunSettings(id="r"), kafka=everything), role)

    def name(acl: Acl) -> str:
        return acl.name.removeprefix(prefix) + ("x" if acl.pattern == "prefixed" else "")

    readable = next((name(acl) for acl in rights if (acl.resource, acl.operation) == ("topic", "Read")), "")
    wanted = {name(acl) for acl in rights if acl.resource == "topic"} - set(INTERNAL)

    async def prepared(log: KafkaLog) -> None:
        await log.create_topics([TopicSpec(topic, 1, 1, {}) for topic in wanted])
        for owner in {"t", *(name(acl) for acl in rights if acl.resource == "transactional-id")}:
            async with log.transactor(owner) as transactor:  # now Kafka's own topics are there, too
                await transactor.begin()
                await transactor.offsets("g", {})
                await transactor.commit()

    async def uses(acl: Acl) -> None:
        use, held = USES[acl.resource, acl.operation], secured.scram(role, prefix=prefix)
        async with asyncio.timeout(60):
            await with_log(held, lambda log: use(log, name(acl), readable))

    await with_log(everything, prepared)
    secured.grant(rights)
    for acl in rights:
        await uses(acl)
    for acl in rights:
        secured.revoke(acl)
        with pytest.raises((NotAuthorized, TopicMissing)):
            await uses(acl)
        secured.grant([acl])


@pytest.mark.parametrize("role", ROLES)
async def test_a_right_that_is_taken_away_is_missed(secured: Secured, role: str) -> None:
    await misses_each(secured, role)
