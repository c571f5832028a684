"""The log in memory: the fake that passes the contract of `infra.log`, with deaths that a test can place.

A `MemoryLog` is one process's connection. `MemoryLog(log.broker)` is another process on the same log. A connection can
be told to die (`dies_at`, `abandon`): from then on each of its calls raises `Died`, its open transactions stay open
until they are fenced, and its group memberships time out, as after kill -9.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from tests.fakes.memory_broker import Fate, Group, Member, MemoryBroker, Owner, Transaction
from tests.fakes.memory_readers import MemoryGroupReader, MemoryReader, check_metadata
from turnlog.infra.log import (
    Appender,
    Assigned,
    Commit,
    Fenced,
    GroupReader,
    Headers,
    LogError,
    LogUnavailable,
    Partition,
    Reader,
    TopicSpec,
    TransactionFailed,
    Transactor,
    partition_of,
)

PATIENCE_S = 60.0
"""As an append of the real one."""


class Died(BaseException):
    """The process that owned this connection was killed at a point that a test chose."""


class MemoryLog:
    """See Log. `order` shuffles the partitions of each poll, so that a test meets every interleaving."""

    def __init__(self, broker: MemoryBroker | None = None, *, order: random.Random | None = None) -> None:
        self.broker = broker or MemoryBroker()
        self.order = order
        self.dies_at: int | None = None
        """Die at the n-th point from now: before and after each append, before begin, send and offsets, before and
        after commit."""
        self.points = 0
        """Points passed so far."""
        self.stalls_at: int | None = None
        """At this point the process stands still for `stall_s` and its sessions time out: SIGSTOP, then SIGCONT."""
        self.stall_s = 0.05
        self.dead = False
        self.patience_s = PATIENCE_S
        """For which it waits for a broker that is away."""
        self._memberships: list[tuple[str, Member]] = []

    def point(self) -> None:
        """A place where a process may die. Raises Died."""
        self.alive()
        self.points += 1
        if self.dies_at is not None and self.points >= self.dies_at:
            self.abandon()
            raise Died

    async def broker_time(self) -> None:
        """A broker takes its time, and others go on meanwhile."""
        if self.points == self.stalls_at:
            self.expire()
            await asyncio.sleep(self.stall_s)
        await asyncio.sleep(0)

    def alive(self) -> None:
        """Raises Died."""
        if self.dead:
            raise Died

    async def answers(self) -> None:
        """Return when the broker does. Raises Died, LogUnreachable."""
        self.alive()
        await self.broker.answers(self.patience_s)

    def abandon(self) -> None:
        """Kill the process: no goodbye to anybody."""
        self.dead = True
        self.expire()

    def expire(self) -> None:
        """Its sessions time out, dead or not; static members keep their place until their instance comes back."""
        for group, member in self._memberships:
            if member.instance is None or not self.dead:
                self.broker.leave(group, member)

    async def close(self) -> None:
        for group, member in self._memberships:
            if not self.dead:
                self.broker.leave(group, member)
        self._memberships = []

    async def cluster(self) -> str:
        self.alive()
        return "memory"

    async def topics(self, *, configs: bool = False) -> dict[str, TopicSpec]:
        await self.answers()
        return {name: spec if configs else replace(spec, config={}) for name, spec in self.broker.specs.items()}

    async def create_topics(self, specs: Sequence[TopicSpec]) -> None:
        self.alive()
        self.broker.create(specs)

    async def delete_before(self, offsets: Mapping[Partition, int]) -> None:
        self.alive()
        for place, offset in offsets.items():
            self.broker.truncate(place, offset)

    async def delete_topics(self, names: Sequence[str]) -> None:
        for name in names:
            self.point()
            self.broker.delete(name)

    async def delete_groups(self, groups: Sequence[str]) -> None:
        for name in groups:
            self.point()
            if self.broker.groups.get(name, Group()).members:
                raise LogUnavailable(f"group {name} has members")
            self.broker.groups.pop(name, None)

    async def members(self, group: str) -> tuple[str, ...]:
        await self.answers()
        return tuple(member.id for member in self.broker.groups.get(group, Group()).members)

    async def sizes(self, topics: Sequence[str]) -> dict[str, int]:
        self.alive()
        found = dict.fromkeys(topics, 0)
        for place, log in self.broker.logs.items():
            if place.topic in found:
                found[place.topic] += sum(len(entry.record.value) for entry in log.entries if entry.record)
        return found

    async def transactional_ids(self) -> frozenset[str]:
        self.alive()
        return frozenset(self.broker.owners)

    @asynccontextmanager
    async def appender(self) -> AsyncIterator[Appender]:
        self.alive()
        yield MemoryAppender(self)

    @asynccontextmanager
    async def transactor(self, transactional_id: str) -> AsyncIterator[Transactor]:
        self.alive()
        transactor = MemoryTransactor(self, transactional_id, self.broker.fence(transactional_id))
        try:
            yield transactor
        finally:
            transactor.leave()

    @asynccontextmanager
    async def reader(self, *, patient: bool = False, committed: bool = True) -> AsyncIterator[Reader]:
        self.alive()
        yield MemoryReader(self, committed=committed)

    @asynccontextmanager
    async def group_reader(
        self, group: str, topics: Sequence[str], *, assigned: Assigned, revoked: Assigned, instance: str | None = None,
        pause_s: float = 0.0,
    ) -> AsyncIterator[GroupReader]:  # fmt: skip
        self.alive()
        member = self.broker.join(group, topics, instance)
        self._memberships.append((group, member))
        reader = MemoryGroupReader(self, group, member, assigned, revoked)
        try:
            yield reader
        finally:
            if not self.dead:
                await reader.leave()
                self._memberships.remove((group, member))

    async def start_offsets(self, partitions: Sequence[Partition]) -> dict[Partition, int]:
        await self.answers()
        return {name: self.broker.log_of(name).start for name in partitions}

    async def end_offsets(self, partitions: Sequence[Partition], *, committed: bool = True) -> dict[Partition, int]:
        await self.answers()
        logs = {name: self.broker.log_of(name) for name in partitions}
        return {name: log.stable(name) if committed else log.end for name, log in logs.items()}

    async def offset_since(self, partition: Partition, since_ms: int) -> int:
        self.alive()
        log = self.broker.log_of(partition)
        records, _ = self.broker.read(partition, log.start, log.end - log.start)
        return next((one.offset for one in records if one.timestamp_ms >= since_ms), log.stable(partition))

    async def groups(self) -> frozenset[str]:
        await self.answers()
        return frozenset(name for name, group in self.broker.groups.items() if group.commits or group.members)

    async def commits(self, group: str, partitions: Sequence[Partition]) -> dict[Partition, Commit]:
        await self.answers()
        while self.broker.committing(group, partitions):
            await self.broker.changed(timeout_s=1.0)
        held = self.broker.group(group).commits
        return {name: held[name] for name in partitions if name in held}

    async def committed_partitions(self, group: str) -> frozenset[Partition]:
        await self.answers()
        return frozenset(self.broker.group(group).commits)


class MemoryAppender:
    """See Appender."""

    def __init__(self, log: MemoryLog) -> None:
        self._log = log

    async def append(
        self, topic: str, key: bytes, value: bytes, *, headers: Headers = (), partition: int | None = None
    ) -> tuple[int, int]:
        return await (await self.submit(topic, key, value, headers=headers, partition=partition))

    async def submit(
        self, topic: str, key: bytes, value: bytes, *, headers: Headers = (), partition: int | None = None
    ) -> Awaitable[tuple[int, int]]:
        self._log.point()
        broker = self._log.broker
        await self._log.answers()
        number = partition_of(key, broker.partitions(topic)) if partition is None else partition
        offset = broker.write(Partition(topic, number), key, value, headers)
        self._log.point()
        return _done((number, offset))


class MemoryTransactor:
    """See Transactor. Its first error is its last: every later call raises it again."""

    def __init__(self, log: MemoryLog, transactional_id: str, epoch: int) -> None:
        self._log = log
        self._id = transactional_id
        self._epoch = epoch
        self._failed: LogError | None = None

    async def begin(self) -> None:
        async with self._latched() as owner:
            if owner.transaction is not None:
                raise TransactionFailed(f"{self._id}: a transaction is open already")
            owner.transaction = Transaction()

    async def send(
        self, topic: str, partition: int, key: bytes, value: bytes, *, headers: Headers = ()
    ) -> Awaitable[tuple[int, int]]:
        async with self._latched() as owner:
            name = Partition(topic, partition)
            return _done((partition, self._log.broker.write(name, key, value, headers, self._opened(owner))))

    async def offsets(self, group: str, commits: Mapping[Partition, Commit]) -> None:
        async with self._latched() as owner:
            transaction = self._opened(owner)
            check_metadata(commits)
            transaction.commits.append((group, dict(commits)))

    async def commit(self) -> None:
        async with self._latched() as owner:
            self._opened(owner)
            self._log.broker.end(owner, Fate.committed)
        self._log.point()

    async def abort(self) -> None:
        async with self._latched() as owner:
            self._log.broker.end(owner, Fate.aborted)

    def leave(self) -> None:
        """Abort what is open, unless the process is dead or fenced."""
        if not self._log.dead:
            try:
                owner = self._log.broker.owner(self._id, self._epoch)
            except Fenced:
                return
            self._log.broker.end(owner, Fate.aborted)

    @asynccontextmanager
    async def _latched(self) -> AsyncIterator[Owner]:
        self._log.point()
        await self._log.broker_time()
        await self._log.answers()
        if self._failed is not None:
            raise self._failed
        try:
            yield self._log.broker.owner(self._id, self._epoch)
        except LogError as error:
            self._failed = error
            raise

    def _opened(self, owner: Owner) -> Transaction:
        if owner.transaction is None:
            raise TransactionFailed(f"{self._id}: call begin() first")
        return owner.transaction


def _done(where: tuple[int, int]) -> Awaitable[tuple[int, int]]:
    answer: asyncio.Future[tuple[int, int]] = asyncio.get_running_loop().create_future()
    answer.set_result(where)
    return answer
