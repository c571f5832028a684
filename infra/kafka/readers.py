"""Readers of KafkaLog: one with explicitly assigned partitions, one whose consumer group assigns them.

A group member is two aiokafka consumers. One joins the group and fetches nothing; the other fetches and is in no group.
So positions never come from the group protocol, and a rebalance cannot discard or deliver a record unnoticed by poll().

Committed offsets are requested as stable offsets (OffsetFetch 7, KIP-447). aiokafka's own request ends at version 3,
whose answer may be older than what a reader of the topics already sees: the markers of a transaction reach the
partitions that it wrote to, the offsets partition among them, one after another.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any
from weakref import WeakSet

from aiokafka import ConsumerRebalanceListener, TopicPartition
from aiokafka.consumer.subscription_state import TopicPartitionState
from aiokafka.coordinator.assignors.range import RangePartitionAssignor
from aiokafka.errors import IllegalStateError, KafkaError, for_code

from turnlog.infra.kafka.admin import Admin
from turnlog.infra.kafka.aiokafka_changes import MendedConsumer
from turnlog.infra.kafka.connection import RETRY_S, Connection, convert_errors, parting
from turnlog.infra.kafka.extra_requests import StableOffsets
from turnlog.infra.log import HANGING_S, Assigned, BrokenAssignment, Commit, Fenced, Partition, Record, hanging
from turnlog.infra.roles.measures import BYTES, UNREAD
from turnlog.schemas.binary import constructor
from turnlog.schemas.topics import MAX_MESSAGE_BYTES

FETCH_WAIT_MS = 250
"""Milliseconds that a fetch waits at the broker for the first record. Another assignment ends the wait. A fetch that
returns nothing costs the broker 0.9 core-ms, more than one that returns records. With 500, a session of COST takes a
tenth longer; with 5,000, loaded runs stood still for seconds."""
UNTAKEN_S = 3600.0
"""Seconds for which nothing is fetched while some records are not taken. After 0.1 s, aiokafka would fetch the other
partitions alone, and those of the records would wait until that fetch returns."""
FETCH_BYTES = 4 * MAX_MESSAGE_BYTES
make_record = constructor(Record)
SLICE_S = 0.1
"""Maximum seconds that a rebalance waits for a poll() that waits for records."""

UNSTABLE_OFFSET_COMMIT = 88
"""Error code: a transaction that commits offsets of the partition is still open."""


async def stable_commits(
    admin: Admin, group: str, places: Sequence[TopicPartition] | None, *, patience_s: float = HANGING_S
) -> Mapping[TopicPartition, Commit]:
    """Return the group's commits once its coordinator is available and no open transaction commits one of `places`.

    If `places` is None, return all commits without waiting for transactions. Raises TransactionHanging after
    `patience_s`.
    """
    clock = asyncio.get_running_loop().time
    deadline = clock() + patience_s
    while True:
        try:
            answer = await admin._send_request(StableOffsets(group, places), await admin.find_coordinator(group))
            found, codes = _read(answer)
        except KafkaError as error:
            if not error.retriable:
                raise
        else:
            if not codes:
                return found
            if UNSTABLE_OFFSET_COMMIT not in codes and not all(for_code(code).retriable for code in codes):
                raise for_code(max(codes))(f"offsets of {group}")
            if UNSTABLE_OFFSET_COMMIT in codes and clock() > deadline:
                raise hanging(f"an offset of group {group} is held back")
        await asyncio.sleep(RETRY_S)


def _read(answer: Any) -> tuple[dict[TopicPartition, Commit], set[int]]:
    """Return the commits, and the error codes of the group and its partitions."""
    found: dict[TopicPartition, Commit] = {}
    codes = {answer.error_code}
    for topic, partitions, _ in answer.topics:
        for partition, offset, _, metadata, code, _ in partitions:
            codes.add(code)
            if offset >= 0:
                found[TopicPartition(topic, partition)] = Commit(offset, metadata or "")
    return found, codes - {0}


@contextlib.asynccontextmanager
async def consuming(
    connection: Connection,
    *,
    committed: bool = True,
    group: str | None = None,
    instance: str | None = None,
    pause_s: float = 0.0,
) -> AsyncIterator[MendedConsumer]:
    """Start an aiokafka consumer without a subscription, and stop it at the end. A pause of
    `pause_s` follows each fetch that returned records. Raises LogUnavailable."""
    consumer = MendedConsumer(
        **connection.options(),
        group_id=None if group is None else connection.full(group),
        group_instance_id=instance,
        enable_auto_commit=False,
        auto_offset_reset="none",
        isolation_level="read_committed" if committed else "read_uncommitted",
        max_partition_fetch_bytes=MAX_MESSAGE_BYTES,
        fetch_max_bytes=FETCH_BYTES,
        fetch_max_wait_ms=FETCH_WAIT_MS,
        partition_assignment_strategy=[RangePartitionAssignor],
        session_timeout_ms=connection.membership.session_ms,
        heartbeat_interval_ms=connection.membership.heartbeat_ms,
        rebalance_timeout_ms=connection.membership.rebalance_ms,
        max_poll_interval_ms=connection.membership.max_poll_interval_ms,
        metadata_max_age_ms=connection.membership.metadata_ms,
    )
    try:
        with convert_errors(connection, "start consumer"):
            async with asyncio.timeout(connection.answer_s):
                await consumer.start()
        consumer._fetcher.pause_s, consumer._fetcher._prefetch_backoff = pause_s, UNTAKEN_S
        yield consumer
    finally:
        async with parting(connection, consumer):
            await consumer.stop()


_readers: defaultdict[str, WeakSet[KafkaReader]] = defaultdict(WeakSet)
"""Open readers by role."""


class KafkaReader:
    """See Reader. During a broker outage polls return nothing, and the client keeps trying."""

    def __init__(self, connection: Connection, consumer: MendedConsumer) -> None:
        self._connection = connection
        self._consumer = consumer
        self._places: dict[TopicPartition, Partition] = {}
        self._states: dict[Partition, TopicPartitionState] = {}
        """aiokafka's own, whose positions pass markers and aborted records as they are skipped."""
        self._read = BYTES.labels(connection.role, "read")
        readers = _readers[connection.role]
        readers.add(self)
        UNREAD.labels(connection.role).set_function(lambda: sum(reader.unread for reader in readers))

    @property
    def unread(self) -> int:
        """Number of offsets between the position and the ends seen by fetches."""
        ends = ((state, state.highwater) for state in self._states.values())
        return sum(max(0, end - state.position) for state, end in ends if end is not None)

    def assign(self, starts: Mapping[Partition, int]) -> None:
        self._places = {self._connection.place(name): name for name in starts}
        self._consumer.assign(list(self._places))
        assignment = self._consumer._subscription.subscription.assignment
        self._states = {name: assignment.state_value(place) for place, name in self._places.items()}
        for place, name in self._places.items():  # before the client looks for a position of its own
            self._consumer.seek(place, starts[name])

    def seek(self, partition: Partition, offset: int) -> None:
        """See Reader. Raises KeyError if the partition is not assigned."""
        if partition not in self._states:
            raise KeyError(f"{partition.topic}[{partition.number}] is not assigned to this reader")
        self._consumer.seek(self._connection.place(partition), offset)

    def position(self, partition: Partition) -> int:
        return int(self._states[partition].position)

    async def poll(self, *, max_records: int = 500, timeout_s: float = 0.1) -> list[Record]:
        if not self._places:
            await asyncio.sleep(timeout_s)
            return []
        with convert_errors(self._connection, "poll"):
            batches = await self._consumer.getmany(timeout_ms=int(timeout_s * 1000), max_records=max_records)
        records = [
            make_record(
                name.topic, name.number, found.offset, found.key or b"", found.value or b"", found.headers,
                found.timestamp,
            )
            for name, batch in ((self._places[place], batch) for place, batch in batches.items())
            for found in batch
        ]  # fmt: skip
        self._read.inc(sum(len(record.key) + len(record.value) for record in records))
        return records


class _Rebalances(ConsumerRebalanceListener):  # type: ignore[misc]
    """Listener that stores rebalance requests of the group until poll() serves them. It runs on the coordinator's task
    and raises nothing, because aiokafka logs and swallows a listener's exceptions."""

    def __init__(self, member: MendedConsumer) -> None:
        self._member = member
        self.news = asyncio.Event()
        """Set while something waits for poll()."""
        self.gone = asyncio.Event()
        """Set once poll() has given up all partition tasks, so that the group may proceed."""
        self.gone.set()
        self.new: frozenset[TopicPartition] | None = None
        """Assignment that poll() has not taken up yet, or None."""
        self.rebalancing = True
        """True between a revocation and the next assignment."""

    async def on_partitions_revoked(self, revoked: set[TopicPartition]) -> None:
        """Delay the group until poll() has given up all partition tasks. Heartbeats continue."""
        self.rebalancing = True
        self.new = None
        self.gone.clear()
        self.news.set()
        await self.gone.wait()

    def on_partitions_assigned(self, assigned: set[TopicPartition]) -> None:
        """Store the assignment and return at once, because heartbeats start only afterwards.

        Each partition gets a position, else the client would look for a committed one, and is paused, so that the
        member never fetches.
        """
        for place in assigned:
            self._member.seek(place, 0)
        self._member.pause(*assigned)
        self.rebalancing = False
        self.new = frozenset(assigned)
        self.news.set()


class KafkaGroupReader(KafkaReader):
    """See GroupReader. Guarantees:

    * Both callbacks run inside poll(), on its caller's task, before it fetches. So whatever the caller does between two
      polls (a batch and its transaction) ends before its partition tasks are given up: no batch straddles a rebalance.
    * The group waits for this member's next poll(), for at most `Membership.rebalance_ms`, before it assigns them to
      another member.
    * After `assigned`, nothing is delivered until `seek` was called for every assigned partition.
    * An error of a callback, and BrokenAssignment, are raised by that poll() and by every later one.
    * A member that the group expelled finds out at its next poll (`revoked`, then `assigned`). Until then it may work
      on partition tasks that another member owns. Only the fence of a Transactor keeps its writes out.
    """

    def __init__(
        self,
        connection: Connection,
        consumer: MendedConsumer,
        member: MendedConsumer,
        topics: Sequence[str],
        assigned: Assigned,
        revoked: Assigned,
        *,
        units: int,
    ) -> None:
        """`member` is started and joins the group; `consumer` reads. `units` is the number of partition tasks at the
        start."""
        super().__init__(connection, consumer)
        self._member = member
        self._topics, self._units = frozenset(topics), units
        self._assigned = assigned
        self._revoked = revoked
        self._held: frozenset[int] = frozenset()
        self._unsought: set[Partition] = set()
        self._failed: BaseException | None = None
        self._rebalances = _Rebalances(member)
        member.subscribe([connection.full(topic) for topic in topics], listener=self._rebalances)

    def seek(self, partition: Partition, offset: int) -> None:
        super().seek(partition, offset)
        self._unsought.discard(partition)
        self._consumer.resume(self._connection.place(partition))

    async def poll(self, *, max_records: int = 500, timeout_s: float = 0.1) -> list[Record]:
        """See Reader. Serves rebalances first."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_s
        while True:
            await self._serve()
            left = deadline - clock()
            if self._rebalances.rebalancing or self._unsought or not self._held:
                if left <= 0 or not await self._news(left):
                    return []
                continue
            records = await super().poll(max_records=max_records, timeout_s=min(SLICE_S, max(0.0, left)))
            if records or left <= SLICE_S:
                return records

    async def commit(self, commits: Mapping[Partition, Commit]) -> None:
        """See GroupReader. Raises Fenced if the group continued without this member. Raises Oversized,
        LogUnavailable."""
        places = self._connection.commits(commits)
        with convert_errors(self._connection, "commit offsets"):
            try:
                async with asyncio.timeout(self._connection.answer_s):
                    await self._member.commit(places)
            except IllegalStateError as error:
                raise Fenced(
                    f"commit offsets: {error}; another member owns these partitions; this process must exit"
                ) from error

    async def leave(self) -> None:
        """Give up all partition tasks, which runs the callback, and leave the group at once, even during a
        rebalance."""
        try:
            await self._give_up()
        finally:
            await self._member.stop_coordination()
            if self._rebalances.rebalancing and self._rebalances.gone.is_set():
                # A join is unanswered and the broker reads nothing after it: a LeaveGroup would wait as long.
                self._member.drop_membership()
            else:
                async with parting(self._connection):
                    await self._member.send_goodbye()

    async def _serve(self) -> None:
        """Run the pending callbacks. Raises their errors, BrokenAssignment, and the coordinator's errors."""
        if self._failed is not None:
            raise self._failed
        try:
            while self._rebalances.news.is_set():
                self._rebalances.news.clear()
                if not self._rebalances.gone.is_set():
                    await self._give_up()
                    self._rebalances.gone.set()
                if (new := self._rebalances.new) is not None:
                    self._rebalances.new = None
                    await self._take_up(new)
            with convert_errors(self._connection, "group"):
                self._member.check_group()  # a member that may not join would wait for ever
                if not self._rebalances.rebalancing:  # during a rebalance this call would wait for its end
                    await self._member.getmany(timeout_ms=0)
        except BaseException as error:
            self._failed = error
            self._rebalances.gone.set()
            raise

    async def _give_up(self) -> None:
        held, self._held = self._held, frozenset()
        self._unsought = set()
        self.assign({})
        if held:
            await self._revoked(held)

    async def _take_up(self, places: frozenset[TopicPartition]) -> None:
        await self._give_up()
        names = {Partition(self._connection.short(place.topic), place.partition) for place in places}
        units = frozenset(name.number for name in names)
        if names != {Partition(topic, unit) for topic in self._topics for unit in units}:
            raise BrokenAssignment(
                f"{sorted(names)} are not whole partition tasks of {sorted(self._topics)}: their partition counts "
                "must be equal and every member must subscribe to the same topics; see `turnlog topics check`"
            )
        if more := sorted(unit for unit in units if unit >= self._units):
            raise BrokenAssignment(
                f"{sorted(self._topics)} had {self._units} partitions when this process started, and now have {more}: "
                "keys map to other partitions now; see `turnlog topics check`"
            )
        self.assign(dict.fromkeys(names, 0))
        self._consumer.pause(*self._places)
        self._held, self._unsought = units, set(names)
        await self._assigned(units)

    async def _news(self, timeout_s: float) -> bool:
        """Wait for something to serve. Returns False after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                return await self._rebalances.news.wait()
        return False
