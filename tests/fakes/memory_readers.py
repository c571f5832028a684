"""Readers of the log in memory: one that reads what it is told to, one that reads what its group gives it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Mapping
from typing import Protocol

from tests.fakes.memory_broker import Member, MemoryBroker
from turnlog.infra.log import Assigned, Commit, Oversized, Partition, Record

METADATA_LIMIT_BYTES = 4096
"""Kafka's default `offset.metadata.max.bytes`."""


class Process(Protocol):
    """The connection that a reader belongs to."""

    broker: MemoryBroker
    order: random.Random | None

    def alive(self) -> None:
        """Raises Died."""
        ...

    def point(self) -> None:
        """A place where the process may die. Raises Died."""
        ...

    async def answers(self) -> None:
        """Return when the broker does. Raises Died, LogUnreachable."""
        ...


class MemoryReader:
    """See Reader."""

    def __init__(self, log: Process, *, committed: bool = True) -> None:
        self._log = log
        self._committed = committed
        self._positions: dict[Partition, int] = {}
        self._turn = 0

    def assign(self, starts: Mapping[Partition, int]) -> None:
        self._positions = dict(starts)

    def seek(self, partition: Partition, offset: int) -> None:
        """See Reader. Raises KeyError for a partition that is not assigned."""
        if partition not in self._assigned_places():
            raise KeyError(f"{partition.topic}[{partition.number}] is not assigned to this reader")
        self._positions[partition] = offset

    def position(self, partition: Partition) -> int:
        return self._positions[partition]

    async def poll(self, *, max_records: int = 500, timeout_s: float = 0.1) -> list[Record]:
        self._log.alive()
        await asyncio.sleep(0)
        if not self._log.broker.serves:
            await self._log.broker.changed(timeout_s)
            return []
        found = self._take(max_records)
        if not found and await self._log.broker.changed(timeout_s) and self._log.broker.serves:
            self._log.alive()
            found = self._take(max_records)
        return found

    def _assigned_places(self) -> Collection[Partition]:
        return self._positions

    def _take(self, max_records: int) -> list[Record]:
        names = sorted(self._positions)
        if self._log.order is not None:
            self._log.order.shuffle(names)
        elif names:  # no partition starves another
            self._turn = (self._turn + 1) % len(names)
            names = names[self._turn :] + names[: self._turn]
        found: list[Record] = []
        for name in names:
            records, self._positions[name] = self._log.broker.read(
                name, self._positions[name], max_records - len(found), committed=self._committed
            )
            found += records
        return found


class MemoryGroupReader(MemoryReader):
    """See GroupReader. Rebalances happen inside poll, eagerly: every member gives up everything, then all get anew."""

    def __init__(self, log: Process, group: str, member: Member, assigned: Assigned, revoked: Assigned) -> None:
        super().__init__(log)
        self._group = group
        self._member = member
        self._assigned = assigned
        self._revoked = revoked
        self._held: frozenset[int] = frozenset()
        self._settled = -1
        """Generation whose assignment this reader holds."""
        self._failed: BaseException | None = None

    async def poll(self, *, max_records: int = 500, timeout_s: float = 0.1) -> list[Record]:
        self._log.alive()
        await asyncio.sleep(0)
        if self._failed is not None:
            raise self._failed
        if self._log.broker.serves and self._settled != self._log.broker.group(self._group).generation:
            try:
                await self._rebalance(timeout_s)
            except BaseException as error:  # out of this poll and of every later one
                self._failed = error
                raise
        if len(self._positions) < len(self._held) * len(self._member.topics):
            return []  # a unit was not sought yet
        return await super().poll(max_records=max_records, timeout_s=timeout_s)

    async def commit(self, commits: Mapping[Partition, Commit]) -> None:
        self._log.point()
        await self._log.answers()
        check_metadata(commits)
        self._log.broker.group(self._group).commits.update(commits)

    async def leave(self) -> None:
        """Say goodbye; the callback for what is held runs first."""
        await self._give_up()
        self._log.broker.leave(self._group, self._member)

    def _assigned_places(self) -> Collection[Partition]:
        return {Partition(topic, unit) for topic in self._member.topics for unit in self._held}

    async def _rebalance(self, timeout_s: float) -> None:
        await self._give_up()
        broker = self._log.broker
        if not broker.rejoin(self._group, self._member) and not await broker.changed(timeout_s):
            return
        self._log.alive()
        if broker.rejoin(self._group, self._member):
            self._settled = broker.group(self._group).generation
            self._held = broker.assignment(self._group, self._member)
            await self._assigned(self._held)

    async def _give_up(self) -> None:
        held, self._held, self._positions = self._held, frozenset(), {}
        if held:
            await self._revoked(held)


def check_metadata(commits: Mapping[Partition, Commit]) -> None:
    """Raises Oversized for metadata that a broker would refuse."""
    for name, commit in commits.items():
        size = len(commit.metadata.encode())
        if size > METADATA_LIMIT_BYTES:
            raise Oversized(
                f"{name.topic}[{name.number}]: commit metadata of {size} bytes; "
                f"the broker accepts at most {METADATA_LIMIT_BYTES}"
            )
