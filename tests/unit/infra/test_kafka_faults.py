"""Whatever breaks under a client of Kafka, wherever it breaks, comes out as an error of our tree, and passes."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from uuid import uuid4

import pytest

from tests.fakes.broken_connections import KINDS, Breaker
from turnlog.infra.kafka import KafkaLog
from turnlog.infra.log import Commit, LogError, LogUnavailable, Partition, TopicSpec, TransactionFailed
from turnlog.infra.roles import is_unreachable

PLACE = Partition("in", 0)
ANSWER_S = 0.5
PATIENCE_S = 60.0


async def read(log: KafkaLog) -> None:
    async with log.reader() as reader:
        reader.assign({PLACE: 0})
        await reader.poll(timeout_s=0.1)


async def append(log: KafkaLog) -> None:
    async with log.appender() as appender:
        await appender.append("in", b"key", b"value", partition=0)


async def transact(log: KafkaLog) -> None:
    async with log.transactor("owner") as transactor:
        await transactor.begin()
        await transactor.send("in", 0, b"key", b"value")
        await transactor.offsets("group", {PLACE: Commit(1)})
        await transactor.commit()


async def join(log: KafkaLog) -> None:
    held = list[Partition]()

    async def seek(units: frozenset[int]) -> None:
        for unit in units:
            held.append(Partition("in", unit))
            reader.seek(held[-1], 0)

    async def leave(_: frozenset[int]) -> None:
        pass

    async with log.group_reader("members", ["in"], assigned=seek, revoked=leave) as reader:
        await reader.poll(timeout_s=0.2)
        if held:
            await reader.commit(dict.fromkeys(held, Commit(0)))


CALLS: dict[str, Callable[[KafkaLog], Awaitable[object]]] = {
    "cluster": KafkaLog.cluster,
    "topics": lambda log: log.topics(configs=True),
    "brokers": KafkaLog.brokers,
    "create": lambda log: log.create_topics([TopicSpec("in", 1, 1, {})]),
    "delete": lambda log: log.delete_topics(["gone"]),
    "start": lambda log: log.start_offsets([PLACE]),
    "end": lambda log: log.end_offsets([PLACE]),
    "since": lambda log: log.offset_since(PLACE, 1),
    "groups": KafkaLog.groups,
    "commits": lambda log: log.commits("group", [PLACE]),
    "committed": lambda log: log.committed_partitions("group"),
    "members": lambda log: log.members("group"),
    "forget": lambda log: log.delete_groups(["nobody"]),
    "sizes": lambda log: log.sizes(["in"]),
    "ids": KafkaLog.transactional_ids,
    "replicas": lambda log: log.check_replicas("in"),
    "read": read,
    "append": append,
    "transact": transact,
    "join": join,
}
USUAL = ("writing: uvloop", "answering: end in the middle", "connecting: lost in the handshake")
USUAL_CALLS = ("start", "commits", "append", "transact")
"""`make test-long` runs every call under every kind."""


@pytest.fixture
async def breaker() -> AsyncIterator[Breaker]:
    breaker = Breaker()
    with breaker.around(asyncio.get_running_loop()):
        yield breaker


async def working(log: KafkaLog) -> None:
    """Return once the client has an answer: on a busy machine one may take longer than ANSWER_S."""
    while True:
        try:
            await log.topics()
            return
        except LogUnavailable:
            continue


def is_usual(kind: str, call: str, lasting: bool) -> bool:
    """A transaction that breaks for good takes up to 20 s of waits: one kind has it in the suite."""
    return kind in USUAL and call in USUAL_CALLS and (kind == USUAL[1] or call != "transact" or not lasting)


@pytest.mark.kafka
@pytest.mark.parametrize(
    ("kind", "call", "lasting"),
    [
        pytest.param(
            *case, id=f"{case[0]}-{case[1]}-{'lasting' if case[2] else 'once'}",
            marks=() if is_usual(*case) else pytest.mark.long,
        )
        for case in itertools.product(KINDS, CALLS, (False, True))
    ],
)  # fmt: skip
async def test_a_connection_that_breaks_anywhere_is_an_error_of_the_log(
    kafka: str, breaker: Breaker, kind: str, call: str, lasting: bool
) -> None:
    """Once: it passes by itself, or is typed. Lasting: it is typed, and the same client works when the broker does."""
    prefix = f"t{uuid4().hex[:8]}-"
    whole = KafkaLog(kafka, prefix=prefix)
    await whole.create_topics([TopicSpec("in", 1, 1, {})])
    await append(whole)
    async with asyncio.timeout(PATIENCE_S):
        for at in itertools.count():
            log = KafkaLog(kafka, prefix=prefix, answer_s=ANSWER_S, close_s=ANSWER_S, request_ms=1000)
            breaker.arm(kind, at, lasting=lasting)
            found: LogError | None = None
            try:
                await CALLS[call](log)
            except LogError as error:
                found = error
            passes = found is None or is_unreachable(found) or isinstance(found, LogUnavailable | TransactionFailed)
            assert passes, repr(found)
            broke = breaker.heal()
            await working(log)
            await log.close()
            if not broke:
                break
    await whole.close()
    gc.collect()  # what a client left open is reported here, and not in some later test
