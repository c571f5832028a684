"""What every Log promises, on the fake in memory and on a real Apache Kafka."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
from aiokafka.partitioner import DefaultPartitioner, murmur2
from prometheus_client import REGISTRY

from tests.fakes.memory_log import MemoryLog
from turnlog.consumers.archiver import Archiver, RangeLimits
from turnlog.infra import log as ours
from turnlog.infra.archive import ArchiveLog, ReadOnlyArchive
from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.event_log import EventLog
from turnlog.infra.history import read_range
from turnlog.infra.kafka import KafkaLog
from turnlog.infra.kafka.connection import Membership
from turnlog.infra.kafka.security import Login
from turnlog.infra.log import (
    Commit,
    Fenced,
    GroupReader,
    Log,
    LogError,
    OffsetOutOfRange,
    Oversized,
    Partition,
    Reader,
    Record,
    TopicMissing,
    TopicSpec,
    TransactionFailed,
    TransactionHanging,
    own_ends,
)
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.role import Role
from turnlog.schemas.codec import Codec
from turnlog.schemas.topics import MAX_MESSAGE_BYTES
from turnlog.settings import KafkaSettings, Settings

UNITS = 4
ALL_UNITS = frozenset(range(UNITS))
PATIENCE_S = 60.0
"""Nothing here waits by the clock: this only ends a test that hangs."""
CONFIG = {"max.message.bytes": str(MAX_MESSAGE_BYTES), "retention.ms": "-1"}
IN = Partition("in", 1)
OUT = Partition("out", 1)

Connect = Callable[[], Log]


async def read(reader: Reader, count: int) -> list[Record]:
    """Poll until `count` records came."""
    found: list[Record] = []
    async with asyncio.timeout(PATIENCE_S):
        while len(found) < count:
            found += await reader.poll(max_records=count - len(found))
    return found


async def read_to_end(log: Log, partition: Partition, start: int = 0) -> list[Record]:
    """What a fresh reader sees of one partition up to the committed end, which its position must reach."""
    end = (await log.end_offsets([partition]))[partition]
    async with log.reader() as reader, asyncio.timeout(PATIENCE_S):
        return [record async for record in read_range(reader, {partition: start}, {partition: end})]


class Owner:
    """A group member that seeks every unit to its start when it gets it, as a role would, and remembers what it saw."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.units: frozenset[int] = frozenset()
        self.calls: list[tuple[str, frozenset[int]]] = []
        self.records: list[Record] = []
        self.reader: GroupReader

    async def assigned(self, units: frozenset[int]) -> None:
        self.calls.append(("assigned", units))
        self.units = units
        for unit in units:
            self.reader.seek(Partition("in", unit), 0)
            self.reader.seek(Partition("side", unit), 0)

    async def revoked(self, units: frozenset[int]) -> None:
        self.calls.append(("revoked", units))
        assert units == self.units
        self.units = frozenset()

    async def join(self, log: Log, stack: AsyncExitStack, instance: str | None = None) -> Owner:
        member = log.group_reader(
            "owners", ["in", "side"], assigned=self.assigned, revoked=self.revoked, instance=instance
        )
        self.reader = await stack.enter_async_context(member)
        return self

    async def poll(self) -> None:
        for record in await self.reader.poll(timeout_s=0.02):
            assert record.partition in self.units
            self.records.append(record)


async def poll_until(done: Callable[[], bool], *owners: Owner) -> None:
    """Let the members poll, each as its own process would, until `done`."""
    async with asyncio.timeout(PATIENCE_S):
        while not done():
            await asyncio.gather(*(owner.poll() for owner in owners))


class ReadingContract:
    """What whoever reads is promised, be it from topics or from the archive."""

    @pytest.fixture
    async def log(self, connect: Connect) -> Log:
        log = connect()
        names = ("in", "side", "out")
        await log.create_topics([TopicSpec(name, UNITS, 1, CONFIG) for name in names])
        return log

    async def test_records_come_back_as_they_were_written(self, log: Log) -> None:
        headers = (("writer", b"gateway-0"), ("empty", b""))
        async with log.appender() as appender:
            placed = await appender.append("in", "schlüssel".encode(), b"\x00value", headers=headers)
        (record,) = await read_to_end(log, Partition("in", placed[0]))
        assert (record.topic, record.partition, record.offset) == ("in", *placed)
        assert (record.key, record.value, record.headers) == ("schlüssel".encode(), b"\x00value", headers)
        assert record.timestamp_ms > 1_600_000_000_000

    async def test_an_empty_value_stays_empty(self, log: Log) -> None:
        async with log.appender() as appender:
            await appender.append("in", b"k", b"", partition=1)
        assert [record.value for record in await read_to_end(log, IN)] == [b""]

    async def test_the_order_of_submits_is_the_order_in_the_partition(self, log: Log) -> None:
        values = [b"%d" % number + b"." * (number % 7 * 20_000) for number in range(300)]
        async with log.appender() as appender:
            pending = [asyncio.ensure_future(appender.submit("in", b"k", value, partition=1)) for value in values]
            placed = await asyncio.gather(*[await one for one in pending])
        assert [offset for _, offset in placed] == list(range(len(values)))
        assert [record.value for record in await read_to_end(log, IN)] == values

    async def test_a_poll_groups_by_partition_and_keeps_offset_order(self, log: Log) -> None:
        async with log.appender() as appender:
            for number in range(60):
                await (await appender.submit("in", b"k", b"%d" % number, partition=number % UNITS))
        async with log.reader() as reader:
            reader.assign({Partition("in", unit): 0 for unit in ALL_UNITS})
            found = await read(reader, 60)
        for unit in ALL_UNITS:
            assert [r.offset for r in found if r.partition == unit] == list(range(15))

    async def test_a_poll_gives_at_most_what_was_asked_for(self, log: Log) -> None:
        async with log.appender() as appender:
            for _ in range(10):
                await appender.append("in", b"k", b"v", partition=1)
        async with log.reader() as reader:
            reader.assign({IN: 0})
            sizes = []
            while reader.position(IN) < 10:
                sizes.append(len(await reader.poll(max_records=3)))
        assert max(sizes) == 3
        assert sum(sizes) == 10

    async def test_a_reader_without_partitions_reads_nothing(self, log: Log) -> None:
        async with log.reader() as reader:
            assert await reader.poll(timeout_s=0.01) == []

    async def test_seek_goes_back_and_forth(self, log: Log) -> None:
        async with log.appender() as appender:
            for number in range(6):
                await appender.append("in", b"k", b"%d" % number, partition=1)
        async with log.reader() as reader:
            reader.assign({IN: 4})
            assert [r.offset for r in await read(reader, 2)] == [4, 5]
            reader.seek(IN, 1)
            assert reader.position(IN) == 1
            assert [r.offset for r in await read(reader, 5)] == [1, 2, 3, 4, 5]
            with pytest.raises(KeyError, match=r"in\[3\]"):
                reader.seek(Partition("in", 3), 0)

    async def test_assigning_anew_forgets_the_old_partitions(self, log: Log) -> None:
        async with log.appender() as appender:
            await appender.append("in", b"k", b"one", partition=1)
            await appender.append("in", b"k", b"two", partition=2)
        async with log.reader() as reader:
            reader.assign({IN: 0})
            reader.assign({Partition("in", 2): 0})
            assert [record.value for record in await read(reader, 1)] == [b"two"]
            assert await reader.poll(timeout_s=0.3) == []

    async def test_an_offset_beyond_the_log_is_out_of_range(self, log: Log) -> None:
        async with log.reader() as reader:
            reader.assign({IN: 7})
            with pytest.raises(OffsetOutOfRange, match="7"):
                await read(reader, 1)

    async def test_a_record_near_the_limit_passes_and_one_above_is_refused(self, log: Log) -> None:
        large = bytes(range(256)) * ((MAX_MESSAGE_BYTES - 4096) // 256)
        async with log.appender() as appender:
            await appender.append("in", b"k", large, partition=1)
            with pytest.raises(Oversized):
                await appender.append("in", b"k", bytes(MAX_MESSAGE_BYTES), partition=1)
            await appender.append("in", b"k", b"after", partition=1)
        assert [record.value for record in await read_to_end(log, IN)] == [large, b"after"]

    async def test_an_aborted_transaction_leaves_nothing_and_the_end_can_be_reached(self, log: Log) -> None:
        async with log.transactor("t") as transactor:
            for value, fate in ((b"a", "commit"), (b"lost", "abort"), (b"b", "commit"), (b"lost", "abort")):
                await transactor.begin()
                await transactor.send("out", 1, b"k", value)
                await getattr(transactor, fate)()
        assert [record.value for record in await read_to_end(log, OUT)] == [b"a", b"b"]

    async def test_the_end_after_an_aborted_tail_can_be_reached_from_its_middle(self, log: Log) -> None:
        async with log.transactor("t") as transactor:
            await transactor.begin()
            for _ in range(5):
                await transactor.send("out", 1, b"k", b"lost")
            await transactor.abort()
        assert await read_to_end(log, OUT, start=2) == []

    async def test_leaving_aborts_the_open_transaction(self, log: Log) -> None:
        async with log.transactor("t") as transactor:
            await transactor.begin()
            await (await transactor.send("out", 1, b"k", b"lost"))
        async with log.appender() as appender:
            await appender.append("out", b"k", b"kept", partition=1)
        assert [record.value for record in await read_to_end(log, OUT)] == [b"kept"]

    async def test_empty_transactions_commit(self, log: Log) -> None:
        async with log.transactor("t") as transactor:
            for _ in range(3):
                await transactor.begin()
                await transactor.commit()
            await transactor.begin()
            await transactor.send("out", 1, b"k", b"v")
            await transactor.commit()
        assert len(await read_to_end(log, OUT)) == 1

    async def test_transactions_back_to_back_keep_their_order_across_partitions(self, log: Log) -> None:
        async with log.transactor("t") as transactor:
            for number in range(20):
                await transactor.begin()
                for unit in ALL_UNITS:
                    await transactor.send("out", unit, b"k", b"%d" % number)
                await transactor.commit()
        for unit in ALL_UNITS:
            found = await read_to_end(log, Partition("out", unit))
            assert [record.value for record in found] == [b"%d" % number for number in range(20)]


class LogContract(ReadingContract):
    """Subclasses give `connect`: each call is another process's connection to one log that holds the topics."""

    @pytest.fixture
    def patient(self, connect: Connect) -> Connect:
        """Connections whose members keep their partitions for longer than PATIENCE_S after they were killed."""
        return connect

    # -- topics

    async def test_created_topics_exist_with_their_partitions_and_configuration(self, log: Log) -> None:
        topics = await log.topics(configs=True)
        assert set(topics) == {"in", "side", "out"}
        assert (topics["in"].name, topics["in"].partitions, topics["in"].replication) == ("in", UNITS, 1)
        assert CONFIG.items() <= topics["in"].config.items()
        assert {not topic.config for topic in (await log.topics()).values()} == {True}, "not asked for"

    async def test_creating_a_topic_again_leaves_it_as_it_is(self, log: Log) -> None:
        await log.create_topics([TopicSpec("in", UNITS + 1, 1, {})])
        assert (await log.topics())["in"].partitions == UNITS

    async def test_whoever_names_a_topic_that_does_not_exist_is_told_the_remedy(self, log: Log) -> None:
        async def nothing(_: frozenset[int]) -> None: ...

        async with log.appender() as appender, log.transactor("t") as transactor:
            await transactor.begin()
            calls: list[Callable[[], Awaitable[object]]] = [
                lambda: appender.append("absent", b"k", b"v"),
                lambda: transactor.send("absent", 0, b"k", b"v"),
                lambda: log.start_offsets([Partition("absent", 0)]),
                lambda: log.end_offsets([Partition("absent", 0)]),
                lambda: log.group_reader("g", ["absent"], assigned=nothing, revoked=nothing).__aenter__(),
            ]
            for call in calls:
                with pytest.raises(TopicMissing, match=r"turnlog topics apply"):
                    await call()

    async def test_a_partition_that_does_not_exist_is_missing(self, log: Log) -> None:
        async with log.appender() as appender:
            with pytest.raises(TopicMissing, match=f"{UNITS}"):
                await appender.append("in", b"k", b"v", partition=UNITS)
        with pytest.raises(TopicMissing, match=f"{UNITS}"):
            await log.end_offsets([Partition("in", UNITS)])

    # -- plain producers and readers

    async def test_keys_are_placed_by_murmur2_as_aiokafka_does(self, log: Log) -> None:
        keys = [b"", b"a", b"ab", b"abc", b"abcd", b"\xff" * 7, *(uuid4().hex.encode() for _ in range(40))]
        place = DefaultPartitioner()
        async with log.appender() as appender:
            placed = [await (await appender.submit("in", key, b"v")) for key in keys]
        assert [partition for partition, _ in placed] == [place(key, list(ALL_UNITS), list(ALL_UNITS)) for key in keys]

    async def test_an_acknowledgement_that_nobody_awaits_is_still_sent(self, log: Log) -> None:
        async with log.appender() as appender:
            await appender.submit("in", b"k", b"v", partition=1)
        assert len(await read_to_end(log, IN)) == 1

    async def test_an_idle_poll_is_empty_and_wakes_for_a_new_record(self, log: Log) -> None:
        async with log.reader() as reader, log.appender() as appender:
            reader.assign({IN: 0})
            assert await reader.poll(timeout_s=0.01) == []
            waiting = asyncio.ensure_future(reader.poll(timeout_s=PATIENCE_S))
            await appender.append("in", b"k", b"v", partition=1)
            assert [record.value for record in await waiting] == [b"v"]

    async def test_start_and_end_offsets_of_an_empty_and_a_written_partition(self, log: Log) -> None:
        async with log.appender() as appender:
            await appender.append("in", b"k", b"v", partition=1)
        both = [IN, Partition("in", 2)]
        assert await log.start_offsets(both) == dict.fromkeys(both, 0)
        for committed in (True, False):
            assert await log.end_offsets(both, committed=committed) == {IN: 1, both[1]: 0}

    async def test_the_first_record_since_a_moment_and_the_end_after_the_last_moment(self, log: Log) -> None:
        async with log.appender() as appender:
            assert await log.offset_since(IN, 0) == 0
            await appender.append("in", b"k", b"v", partition=1)
            [first] = await read_to_end(log, IN)
            while (await read_to_end(log, IN))[-1].timestamp_ms == first.timestamp_ms:
                await appender.append("in", b"k", b"v", partition=1)
        records = await read_to_end(log, IN)
        assert await log.offset_since(IN, first.timestamp_ms) == 0
        assert await log.offset_since(IN, first.timestamp_ms + 1) == records[-1].offset
        assert await log.offset_since(IN, records[-1].timestamp_ms + 1) == len(records)

    async def test_records_below_an_offset_are_deleted_and_the_rest_keeps_its_offsets(self, log: Log) -> None:
        async with log.appender() as appender:
            for number in range(5):
                await appender.append("in", b"k", b"%d" % number, partition=1)
        await log.delete_before({IN: 3})
        assert await log.start_offsets([IN]) == {IN: 3}
        assert [record.value for record in await read_to_end(log, IN, start=3)] == [b"3", b"4"]
        async with log.reader() as reader:
            reader.assign({IN: 2})
            with pytest.raises(OffsetOutOfRange):
                await read(reader, 1)

    # -- transactions

    async def test_a_transaction_is_invisible_until_it_commits(self, log: Log) -> None:
        async with log.transactor("t") as transactor, log.reader() as reader:
            reader.assign({OUT: 0})
            await transactor.begin()
            await (await transactor.send("out", 1, b"k", b"one"))
            assert await reader.poll(timeout_s=0.3) == []
            assert await log.end_offsets([OUT]) == {OUT: 0}
            assert await log.end_offsets([OUT], committed=False) == {OUT: 1}
            await transactor.send("out", 1, b"k", b"two", headers=[("h", b"1")])
            await transactor.commit()
            found = await read(reader, 2)
        assert [(r.key, r.value, r.headers) for r in found] == [(b"k", b"one", ()), (b"k", b"two", (("h", b"1"),))]

    async def test_ends_of_ones_own_are_told_once_nothing_below_them_is_hidden(self, log: Log) -> None:
        async with log.transactor("t") as transactor:
            await transactor.begin()
            await (await transactor.send("out", 1, b"k", b"one"))
            with pytest.raises(TransactionHanging, match=r"out\[1\] from 0 .* find-hanging"):
                await own_ends(log, [OUT], patience_s=0.0)
            asking = asyncio.create_task(own_ends(log, [IN, OUT]))
            await asyncio.wait({asking}, timeout=0.3)
            assert not asking.done()
            await transactor.commit()
            async with asyncio.timeout(PATIENCE_S):
                assert await asking == await log.end_offsets([IN, OUT])

    async def test_a_call_outside_a_transaction_fails_and_the_transactor_stays_failed(self, log: Log) -> None:
        async with log.transactor("t") as transactor:
            with pytest.raises(TransactionFailed, match="begin"):
                await transactor.send("out", 1, b"k", b"v")
            with pytest.raises(TransactionFailed, match="begin"):
                await transactor.begin()
        async with log.transactor("u") as transactor:
            await transactor.begin()
            with pytest.raises(TransactionFailed, match="open already"):
                await transactor.begin()

    async def test_offsets_and_metadata_are_committed_with_the_records(self, log: Log) -> None:
        both = {IN: Commit(5, "1:9:abc"), Partition("side", 1): Commit(7, "größe")}
        async with log.transactor("t") as transactor:
            await transactor.begin()
            await transactor.send("out", 1, b"k", b"v")
            await transactor.offsets("g", both)
            await transactor.commit()
        async with log.transactor("t"):  # ownership first, then the commits
            assert await log.commits("g", [*both, Partition("in", 2)]) == both
            assert await log.commits("another", list(both)) == {}

    async def test_offsets_alone_make_a_transaction_and_may_go_backwards(self, log: Log) -> None:
        async with log.transactor("t") as transactor:
            for offset in (9, 3):
                await transactor.begin()
                await transactor.offsets("g", {IN: Commit(offset, str(offset))})
                await transactor.commit()
        async with log.transactor("t"):
            assert await log.commits("g", [IN]) == {IN: Commit(3, "3")}

    async def test_a_group_is_named_once_it_has_committed_also_without_a_member(self, log: Log) -> None:
        assert await log.groups() == frozenset()
        async with log.transactor("t") as transactor:
            await transactor.begin()
            await transactor.offsets("alone", {IN: Commit(1)})
            await transactor.commit()
        assert (await log.commits("alone", [IN]))[IN] == Commit(1)  # its markers are written, so the group is listed
        assert await log.groups() == {"alone"}

    async def test_all_commits_of_a_group_are_told_whatever_is_under_way(self, log: Log) -> None:
        async with log.transactor("t") as transactor:
            await transactor.begin()
            await transactor.offsets("g", {IN: Commit(5, ""), Partition("side", 1): Commit(1, "")})
            await transactor.commit()
            await transactor.begin()
            await transactor.offsets("g", {IN: Commit(6, ""), OUT: Commit(6, "")})
            async with asyncio.timeout(PATIENCE_S):
                assert await log.committed_partitions("g") == {IN, Partition("side", 1)}
            assert await log.committed_partitions("another") == frozenset()
            await transactor.abort()

    async def test_offsets_of_an_aborted_transaction_are_not_committed(self, log: Log) -> None:
        async with log.transactor("t") as transactor:
            await transactor.begin()
            await transactor.offsets("g", {IN: Commit(5, "lost")})
            await transactor.abort()
        async with log.transactor("t"):
            assert await log.commits("g", [IN]) == {}

    async def test_commits_are_told_when_the_transaction_that_makes_them_is_over(self, log: Log) -> None:
        """Its outputs and its offsets become readable one after another: who has seen the first waits for the rest."""
        async with log.transactor("t") as transactor:
            for number, ends in enumerate((transactor.commit, transactor.commit, transactor.abort), start=1):
                await transactor.begin()
                await transactor.offsets("g", {IN: Commit(number, "")})
                asking = asyncio.create_task(log.commits("g", [IN]))
                answered, _ = await asyncio.wait({asking}, timeout=0.3)
                assert not answered
                assert await log.commits("another", [IN]) == {}
                await ends()
                async with asyncio.timeout(PATIENCE_S):
                    assert await asking == {IN: Commit(min(number, 2), "")}

    async def test_metadata_at_the_limit_passes_and_above_it_is_refused(self, log: Log) -> None:
        async with log.transactor("t") as transactor:
            await transactor.begin()
            await transactor.offsets("g", {IN: Commit(1, "é" * 2048)})
            await transactor.commit()
            await transactor.begin()
            with pytest.raises(Oversized, match="4096"):
                await transactor.offsets("g", {IN: Commit(2, "é" * 2048 + "!")})
        async with log.transactor("t"):
            assert await log.commits("g", [IN]) == {IN: Commit(1, "é" * 2048)}

    # -- fencing

    async def test_a_new_owner_aborts_what_the_old_one_left_open(self, log: Log, connect: Connect) -> None:
        async with AsyncExitStack() as stack:
            old = await stack.enter_async_context(log.transactor("t"))
            await old.begin()
            await (await old.send("out", 1, b"k", b"zombie"))
            await old.offsets("g", {IN: Commit(3, "zombie")})
            another = connect()
            new = await stack.enter_async_context(another.transactor("t"))
            assert await another.commits("g", [IN]) == {}
            await new.begin()
            await new.send("out", 1, b"k", b"owner")
            await new.commit()
            with pytest.raises(Fenced):
                await old.commit()
            with pytest.raises(Fenced):
                await old.begin()
        assert [record.value for record in await read_to_end(log, OUT)] == [b"owner"]

    async def test_a_fenced_owner_can_neither_send_nor_commit_offsets(self, log: Log, connect: Connect) -> None:
        async with AsyncExitStack() as stack:
            for number, doing in enumerate(("send", "offsets", "both")):
                old = await stack.enter_async_context(log.transactor(f"t{number}"))
                await old.begin()
                await old.commit()
                await stack.enter_async_context(connect().transactor(f"t{number}"))
                with pytest.raises(Fenced):
                    await self._work(old, doing)
        assert await read_to_end(log, OUT) == []
        assert await log.commits("g", [IN]) == {}

    @staticmethod
    async def _work(transactor, doing: str) -> None:
        await transactor.begin()
        if doing != "offsets":
            await transactor.send("out", 1, b"k", b"zombie")
        if doing != "send":
            await transactor.offsets("g", {IN: Commit(3, "zombie")})
        await transactor.commit()

    async def test_a_takeover_reads_the_commit_of_the_owner_before_it(self, log: Log, connect: Connect) -> None:
        """Each owner commits one more and is abandoned with a transaction open: the next sees exactly the committed."""
        async with AsyncExitStack() as stack:
            for number in range(6):
                another = connect()
                owner = await stack.enter_async_context(another.transactor("t"))
                found = await another.commits("g", [IN])
                assert found == ({IN: Commit(number, str(number))} if number else {})
                await owner.begin()
                await owner.send("out", 1, b"k", b"%d" % number)
                await owner.offsets("g", {IN: Commit(number + 1, str(number + 1))})
                await owner.commit()
                await owner.begin()
                await owner.send("out", 1, b"k", b"lost")
                await owner.offsets("g", {IN: Commit(99, "lost")})
        assert [record.value for record in await read_to_end(log, OUT)] == [b"%d" % number for number in range(6)]

    # -- groups

    async def test_one_member_gets_every_unit_and_nothing_is_delivered_before_seek(self, log: Log) -> None:
        got: list[frozenset[int]] = []

        async def assigned(units: frozenset[int]) -> None:
            got.append(units)

        async def revoked(units: frozenset[int]) -> None:
            got.append(units)

        async with log.appender() as appender:
            await appender.append("in", b"k", b"v", partition=1)
        async with log.group_reader("g", ["in", "side"], assigned=assigned, revoked=revoked) as reader:
            async with asyncio.timeout(PATIENCE_S):
                while not got:
                    assert await reader.poll(timeout_s=0.02) == []
            assert got == [ALL_UNITS]
            *most, last = [Partition(topic, unit) for topic in ("in", "side") for unit in ALL_UNITS]
            for partition in most:
                reader.seek(partition, 0)
            assert await reader.poll(timeout_s=0.3) == []
            reader.seek(last, 0)
            assert [record.value for record in await read(reader, 1)] == [b"v"]
            assert reader.position(IN) == 1
        assert got == [ALL_UNITS, ALL_UNITS]  # leaving gives up what is held

    async def test_a_member_starts_where_it_seeks_whatever_the_group_committed(self, log: Log) -> None:
        async with log.appender() as appender:
            for number in range(4):
                await appender.append("in", b"k", b"%d" % number, partition=1)
        async with AsyncExitStack() as stack:
            owner = await Owner("a").join(log, stack)
            await poll_until(lambda: len(owner.records) == 4, owner)
            await owner.reader.commit({IN: Commit(3, "note"), Partition("side", 2): Commit(0)})
            assert await log.commits("owners", [IN, Partition("side", 2), OUT]) == {
                IN: Commit(3, "note"),
                Partition("side", 2): Commit(0, ""),
            }
        async with AsyncExitStack() as stack:
            again = await Owner("b").join(log, stack)
            await poll_until(lambda: len(again.records) == 4, again)
            assert [record.offset for record in again.records] == [0, 1, 2, 3]

    async def test_plain_commit_refuses_metadata_above_the_limit(self, log: Log) -> None:
        async with AsyncExitStack() as stack:
            owner = await Owner("a").join(log, stack)
            await poll_until(lambda: owner.units == ALL_UNITS, owner)
            with pytest.raises(Oversized, match="4096"):
                await owner.reader.commit({IN: Commit(0, "x" * 4097)})
            await owner.reader.commit({IN: Commit(0, "x" * 4096)})

    async def test_two_members_share_whole_units_and_one_takes_over(self, log: Log, connect: Connect) -> None:
        async with log.appender() as appender:
            for number in range(40):
                await appender.append("in", b"k", b"%d" % number, partition=number % UNITS)
                await appender.append("side", b"k", b"%d" % number, partition=number % UNITS)
        async with AsyncExitStack() as first, AsyncExitStack() as second:
            a = await Owner("a").join(log, first)
            await poll_until(lambda: len(a.records) == 80, a)
            b = await Owner("b").join(connect(), second)
            await poll_until(lambda: len(a.units) == len(b.units) == 2 and len(a.records + b.records) == 160, a, b)
            assert a.units | b.units == ALL_UNITS
            assert [call for call, _ in a.calls] == ["assigned", "revoked"] * (len(a.calls) // 2) + ["assigned"]
            of_b = sorted((r.topic, r.partition, r.offset) for r in b.records)
            assert of_b == sorted(itertools.product(("in", "side"), b.units, range(10)))
            await second.aclose()
            assert b.units == frozenset()
            await poll_until(lambda: a.units == ALL_UNITS, a)

    async def test_more_members_than_units_leave_one_without(self, log: Log, connect: Connect) -> None:
        async with AsyncExitStack() as stack:
            owners = [await Owner(str(n)).join(connect(), stack) for n in range(UNITS + 1)]
            await poll_until(
                lambda: (
                    sorted(len(o.units) for o in owners) == [0, 1, 1, 1, 1]
                    and frozenset().union(*(o.units for o in owners)) == ALL_UNITS
                ),
                *owners,
            )

    async def test_records_that_come_later_reach_the_owner_of_their_unit(self, log: Log, connect: Connect) -> None:
        async with AsyncExitStack() as stack, log.appender() as appender:
            a, b = await Owner("a").join(log, stack), await Owner("b").join(connect(), stack)
            await poll_until(lambda: len(a.units) == len(b.units) == 2, a, b)
            for unit in ALL_UNITS:
                await appender.append("side", b"k", b"late", partition=unit)
            await poll_until(lambda: len(a.records) == len(b.records) == 2, a, b)

    async def test_a_static_member_that_leaves_in_order_gives_its_units_up_at_once(
        self, log: Log, patient: Connect
    ) -> None:
        async with AsyncExitStack() as stack:
            a = await Owner("a").join(patient(), stack, instance="static-a")
            gone = AsyncExitStack()
            b = await Owner("b").join(patient(), gone, instance="static-b")
            await poll_until(lambda: len(a.units) == len(b.units) == UNITS // 2, a, b)
            await gone.aclose()
            await poll_until(lambda: a.units == ALL_UNITS, a)

    async def test_a_static_member_that_comes_back_gets_its_units_and_the_other_keeps_its_own(
        self, log: Log, connect: Connect
    ) -> None:
        async with AsyncExitStack() as stack:
            a = await Owner("a").join(log, stack, instance="static-a")
            gone = AsyncExitStack()
            b = await Owner("b").join(connect(), gone, instance="static-b")
            await poll_until(lambda: len(a.units) == len(b.units) == 2, a, b)
            kept, held = b.units, a.units
            await gone.aclose()
            again = await Owner("b").join(connect(), stack, instance="static-b")
            await poll_until(lambda: len(a.units) == len(again.units) == 2, a, again)
            assert (a.units, again.units) == (held, kept)

    async def test_what_a_callback_raises_comes_out_of_poll_for_ever(self, log: Log) -> None:
        async def assigned(_: frozenset[int]) -> None:
            raise LookupError("no state for this unit")

        async def revoked(_: frozenset[int]) -> None: ...

        async with log.group_reader("g", ["in"], assigned=assigned, revoked=revoked) as reader:
            for _ in range(2):
                with pytest.raises(LookupError, match="no state"):
                    await self._poll_for_ever(reader)

    @staticmethod
    async def _poll_for_ever(reader: GroupReader) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                await reader.poll(timeout_s=0.02)

    async def test_topics_whose_partition_counts_differ_are_refused(self, log: Log) -> None:
        await log.create_topics([TopicSpec("odd", UNITS + 1, 1, {})])

        async def nothing(_: frozenset[int]) -> None: ...

        with pytest.raises(LogError, match="odd"):
            async with log.group_reader("g", ["in", "odd"], assigned=nothing, revoked=nothing):
                pass


class TestMemoryLog(LogContract):
    @pytest.fixture
    async def connect(self) -> AsyncIterator[Connect]:
        first = MemoryLog()
        logs = [first]

        def make() -> Log:
            logs.append(MemoryLog(first.broker))
            return logs[-1]

        yield make
        for log in logs:
            await log.close()


class ReadFromArchive(MemoryLog):
    """Records are written to topics in memory; whoever reads finds them in the archive, which has just copied them."""

    def __init__(self) -> None:
        super().__init__()
        self.blobs = MemoryBlobs()

    async def archived(self) -> ArchiveLog:
        settings, limits = Settings(), RangeLimits(file_records=7)
        topics = {name: spec.partitions for name, spec in self.broker.specs.items()}
        archiver_log = MemoryLog(self.broker)
        events = EventLog(archiver_log, MemoryRegistry(), Codec({}), "archive")
        role = Role("archive", "archive", settings, archiver_log, events, self.blobs, Health("archive"))
        async with archiver_log.transactor("archive") as transactor, archiver_log.reader() as reader:
            archiver = Archiver(role, transactor, reader, topics=topics, limits=limits)
            await archiver.open()
            await archiver.flush()
        return await ArchiveLog.open(self.blobs, settings.run.id)

    @asynccontextmanager
    async def reader(self, *, patient: bool = False) -> AsyncIterator[Reader]:
        async with (await self.archived()).reader() as reader:
            yield reader

    async def start_offsets(self, partitions: Sequence[Partition]) -> dict[Partition, int]:
        return await (await self.archived()).start_offsets(partitions)

    async def end_offsets(self, partitions: Sequence[Partition], *, committed: bool = True) -> dict[Partition, int]:
        return await (await self.archived()).end_offsets(partitions)


class TestArchiveLog(ReadingContract):
    @pytest.fixture
    def connect(self) -> Connect:
        return ReadFromArchive

    async def test_what_writes_is_refused(self, log: ReadFromArchive) -> None:
        archive = await log.archived()
        for refused in (archive.appender, lambda: archive.transactor("t")):
            with pytest.raises(ReadOnlyArchive):
                refused()
        with pytest.raises(ReadOnlyArchive):
            await archive.create_topics([])

    async def test_a_topic_that_was_not_archived_is_missing(self, log: ReadFromArchive) -> None:
        archive = await log.archived()
        with pytest.raises(TopicMissing, match="absent"):
            await archive.end_offsets([Partition("absent", 0)])
        with pytest.raises(TopicMissing, match=f"{UNITS}"):
            await archive.end_offsets([Partition("in", UNITS)])


@asynccontextmanager
async def connections(wanted: KafkaSettings, membership: Membership) -> AsyncIterator[Connect]:
    """Yield a function that connects to the broker."""
    async with AsyncExitStack() as stack:

        def make() -> Log:
            log = KafkaLog.of(wanted, membership)
            stack.push_async_callback(log.close)
            return log

        yield make


@pytest.mark.kafka
class TestKafkaLog(LogContract):
    @pytest.fixture
    def wanted(self, kafka: str) -> KafkaSettings:
        return KafkaSettings(bootstrap=kafka)

    @pytest.fixture
    def prefix(self) -> str:
        return f"t{uuid4().hex[:8]}-"

    @pytest.fixture
    async def connect(self, wanted: KafkaSettings, prefix: str) -> AsyncIterator[Connect]:
        async with connections(replace(wanted, prefix=prefix), Membership()) as make:
            yield make

    @pytest.fixture
    async def patient(self, wanted: KafkaSettings, prefix: str) -> AsyncIterator[Connect]:
        session_ms = int(2 * PATIENCE_S * 1000)
        async with connections(replace(wanted, prefix=prefix), Membership(session_ms=session_ms)) as make:
            yield make

    async def test_a_commit_that_is_held_back_for_long_is_told_with_the_remedy(
        self, log: KafkaLog, wanted: KafkaSettings
    ) -> None:
        impatient = KafkaLog(
            wanted.bootstrap, prefix=log._connection.prefix, login=Login(wanted), answer_s=6.0, close_s=3.0
        )
        async with log.transactor("t") as transactor:
            await transactor.begin()
            await transactor.offsets("g", {IN: Commit(1, "")})
            with pytest.raises(TransactionHanging, match=r"group .*g is held back .* find-hanging"):
                await impatient.commits("g", [IN])
        await impatient.close()

    async def test_what_a_role_writes_reads_and_has_not_read_is_counted_under_its_name(
        self, log: KafkaLog, wanted: KafkaSettings
    ) -> None:
        name = log._connection.prefix

        def counted(family: str, **labels: str) -> float | None:
            return REGISTRY.get_sample_value(family, {"role": name, **labels})

        own = KafkaLog.of(replace(wanted, prefix=name), role=name)
        async with own.appender() as appender, own.transactor("t") as transactor, own.reader() as reader:
            for _ in range(10):
                await appender.append("in", b"key", b"value", partition=1)
            await transactor.begin()
            await transactor.send("in", 1, b"", b"12")
            await transactor.commit()
            reader.assign({IN: 0})
            await reader.poll(max_records=3, timeout_s=PATIENCE_S)
            assert counted("turnlog_log_bytes_total", direction="written") == 82
            assert counted("turnlog_log_bytes_total", direction="read") == 24
            assert counted("turnlog_log_unread_records") >= 7
            await read(reader, 8)
            assert counted("turnlog_log_bytes_total", direction="read") == 82
        await own.close()

    @pytest.mark.parametrize("sends", [1, 12])
    async def test_a_fenced_owner_leaves_no_error_that_nobody_retrieves(
        self, log: Log, connect: Connect, sends: int
    ) -> None:
        reported: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
        async with log.transactor("t") as older:
            await older.begin()
            await (await older.send("out", 0, b"k", b"v"))
            async with connect().transactor("t"):
                waiting = [asyncio.create_task(older.send("out", at % 2, b"k", bytes(700_000))) for at in range(sends)]
                await asyncio.wait(waiting)
                with pytest.raises(Fenced):
                    await older.commit()
            for task in waiting:
                task.exception()
        del older, waiting, task
        for _ in range(3):
            await asyncio.sleep(0)
            gc.collect()
        assert reported == []


def test_our_murmur2_is_the_one_of_aiokafka() -> None:
    for length in range(40):
        key = bytes((length * 37 + at * 101) % 256 for at in range(length))
        assert ours.murmur2(key) == murmur2(key) & 0xFFFFFFFF
