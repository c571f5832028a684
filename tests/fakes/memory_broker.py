"""The state of the log in memory: what a cluster would hold. Clients of it are in `tests.fakes.memory_log`.

Offsets behave as in Kafka: a transaction's commit or abort marker takes an offset in every partition it wrote to,
readers stop at the last stable offset and never see aborted records.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from turnlog.infra.log import (
    BrokenAssignment,
    Commit,
    Fenced,
    LogUnreachable,
    OffsetOutOfRange,
    Oversized,
    Partition,
    Record,
    TopicMissing,
    TopicSpec,
)
from turnlog.schemas.topics import MAX_MESSAGE_BYTES


class Fate(Enum):
    """What became of a transaction."""

    open = "open"
    committed = "committed"
    aborted = "aborted"


@dataclass(slots=True)
class Transaction:
    """One transaction: its fate decides what readers see of its entries."""

    fate: Fate = Fate.open
    first: dict[Partition, int] = field(default_factory=dict)
    """Offset of its first record per partition."""
    commits: list[tuple[str, dict[Partition, Commit]]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Entry:
    """What stands at one offset: a record, or a transaction marker (None)."""

    record: Record | None
    transaction: Transaction | None


@dataclass(slots=True)
class PartitionLog:
    """Entries from `start` on."""

    start: int = 0
    entries: list[Entry] = field(default_factory=list)
    open: list[Transaction] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Next offset to be written."""
        return self.start + len(self.entries)

    def stable(self, name: Partition) -> int:
        """Last stable offset: the first record of the oldest open transaction, or the end."""
        return min((transaction.first[name] for transaction in self.open), default=self.end)


@dataclass(slots=True)
class Owner:
    """The present owner of a transactional id."""

    epoch: int = 0
    transaction: Transaction | None = None


@dataclass(slots=True, eq=False)
class Member:
    """One member of a group. `joined` is the generation it has (re)joined."""

    id: str
    topics: tuple[str, ...]
    instance: str | None
    joined: int = -1


@dataclass(slots=True)
class Group:
    """Members and commits of a consumer group."""

    generation: int = 0
    members: list[Member] = field(default_factory=list)
    commits: dict[Partition, Commit] = field(default_factory=dict)


class MemoryBroker:
    """Topics, transactions and groups, shared by every connection made to it."""

    def __init__(self, since_ms: int = 1_700_000_000_000, *, every_ms: int = 1) -> None:
        """`since_ms`: time of the first record; each other one is `every_ms` later."""
        self.specs: dict[str, TopicSpec] = {}
        self.logs: dict[Partition, PartitionLog] = {}
        self.owners: dict[str, Owner] = {}
        self.groups: dict[str, Group] = {}
        self._member_ids = itertools.count()
        self._clock_ms = itertools.count(since_ms, every_ms)
        self._waiters: set[asyncio.Future[None]] = set()
        self.serves = True
        """False while it is away: what it holds stays."""

    def stop(self) -> None:
        """It answers nobody until `start`."""
        self.serves = False

    def start(self) -> None:
        """It is back."""
        self.serves = True
        self.notify()

    async def answers(self, patience_s: float) -> None:
        """Return when it serves, as a client waits for it. Raises LogUnreachable."""
        deadline = asyncio.get_running_loop().time() + patience_s
        while not self.serves:
            left_s = deadline - asyncio.get_running_loop().time()
            if left_s <= 0:
                raise LogUnreachable(f"no broker has answered for {patience_s:g} s")
            await self.changed(min(left_s, 60.0))

    # -- topics ------------------------------------------------------------------------------------------------

    def create(self, specs: Iterable[TopicSpec]) -> None:
        """Create what does not exist."""
        for spec in specs:
            if spec.name not in self.specs:
                self.specs[spec.name] = spec
                self.logs |= {Partition(spec.name, number): PartitionLog() for number in range(spec.partitions)}

    def delete(self, name: str) -> None:
        """A topic, and what groups have committed of it."""
        self.specs.pop(name, None)
        self.logs = {place: log for place, log in self.logs.items() if place.topic != name}
        for group in self.groups.values():
            group.commits = {place: commit for place, commit in group.commits.items() if place.topic != name}

    def partitions(self, topic: str) -> int:
        """Raises TopicMissing."""
        if topic not in self.specs:
            raise TopicMissing(f"{topic} does not exist: run `turnlog topics apply`")
        return self.specs[topic].partitions

    def log_of(self, name: Partition) -> PartitionLog:
        """Raises TopicMissing."""
        self.partitions(name.topic)
        if name not in self.logs:
            raise TopicMissing(f"{name.topic} has no partition {name.number}")
        return self.logs[name]

    def truncate(self, name: Partition, before: int) -> None:
        """Delete the entries below `before`, as Kafka's DeleteRecords does."""
        log = self.log_of(name)
        drop = max(0, min(before, log.end) - log.start)
        del log.entries[:drop]
        log.start += drop

    # -- records -----------------------------------------------------------------------------------------------

    def write(
        self,
        name: Partition,
        key: bytes,
        value: bytes,
        headers: Sequence[tuple[str, bytes]],
        transaction: Transaction | None = None,
    ) -> int:
        """Append one record; its offset. Raises Oversized, TopicMissing."""
        if len(key) + len(value) > MAX_MESSAGE_BYTES:
            raise Oversized(
                f"{name.topic}: a record of {len(key) + len(value)} bytes; the topic takes {MAX_MESSAGE_BYTES}"
            )
        log = self.log_of(name)
        offset = log.end
        record = Record(name.topic, name.number, offset, key, value, tuple(headers), next(self._clock_ms))
        if transaction is not None and name not in transaction.first:
            transaction.first[name] = offset
            log.open.append(transaction)
        log.entries.append(Entry(record, transaction))
        self.notify()
        return offset

    def read(self, name: Partition, offset: int, limit: int, *, committed: bool = True) -> tuple[list[Record], int]:
        """At most `limit` records from `offset` on, and the next position. Raises OffsetOutOfRange."""
        log = self.log_of(name)
        if not log.start <= offset <= log.end:
            raise OffsetOutOfRange(
                f"{name.topic}[{name.number}]: offset {offset} was requested, "
                f"but the log holds {log.start} to {log.end}"
            )
        found: list[Record] = []
        end = log.stable(name) if committed else log.end
        while offset < end and len(found) < limit:
            entry = log.entries[offset - log.start]
            offset += 1
            settled = entry.transaction is None or entry.transaction.fate is Fate.committed
            if entry.record is not None and (settled or not committed):
                found.append(entry.record)
        return found, offset

    # -- transactions ------------------------------------------------------------------------------------------

    def fence(self, transactional_id: str) -> int:
        """Start a new epoch of the id: the last owner's open transaction is aborted first. The new epoch."""
        owner = self.owners.setdefault(transactional_id, Owner())
        owner.epoch += 1
        self.end(owner, Fate.aborted)
        return owner.epoch

    def owner(self, transactional_id: str, epoch: int) -> Owner:
        """Raises Fenced unless `epoch` is the newest."""
        owner = self.owners[transactional_id]
        if owner.epoch != epoch:
            raise Fenced(f"{transactional_id}: a newer owner started; this process must exit")
        return owner

    def end(self, owner: Owner, fate: Fate) -> None:
        """Write the markers and, on commit, the offsets of the owner's open transaction, if there is one."""
        transaction, owner.transaction = owner.transaction, None
        if transaction is None:
            return
        transaction.fate = fate
        for name in transaction.first:
            log = self.logs[name]
            log.open.remove(transaction)
            log.entries.append(Entry(None, transaction))
        if fate is Fate.committed:
            for group, commits in transaction.commits:
                self.group(group).commits.update(commits)
        self.notify()

    def committing(self, group: str, partitions: Iterable[Partition]) -> bool:
        """Whether an open transaction commits offsets of one of them."""
        open_ = [owner.transaction for owner in self.owners.values() if owner.transaction is not None]
        pending = {name for transaction in open_ for named, commits in transaction.commits if named == group
                   for name in commits}  # fmt: skip
        return not pending.isdisjoint(partitions)

    # -- groups ------------------------------------------------------------------------------------------------

    def group(self, name: str) -> Group:
        """The group, made on first use."""
        return self.groups.setdefault(name, Group())

    def join(self, group: str, topics: Sequence[str], instance: str | None) -> Member:
        """A new member; one with the same instance is replaced. Raises TopicMissing, BrokenAssignment."""
        if len({self.partitions(topic) for topic in topics}) != 1:
            raise BrokenAssignment(
                f"{group}: {', '.join(topics)} differ in partitions, so partition tasks cannot move as a whole"
            )
        found = self.group(group)
        found.members = [m for m in found.members if instance is None or m.instance != instance]
        member = Member(f"member-{next(self._member_ids):06d}", tuple(topics), instance)
        found.members.append(member)
        self._rebalance(found)
        return member

    def leave(self, group: str, member: Member) -> None:
        """Goodbye, or the session time-out of a member that said none."""
        found = self.group(group)
        if member in found.members:
            found.members.remove(member)
            self._rebalance(found)

    def rejoin(self, group: str, member: Member) -> bool:
        """The member gave up its units and joins the present generation; True when every member has."""
        found = self.group(group)
        if member not in found.members:  # its session had timed out
            found.members.append(member)
            self._rebalance(found)
        if member.joined != found.generation:
            member.joined = found.generation
            self.notify()
        return all(other.joined == found.generation for other in found.members)

    def assignment(self, group: str, member: Member) -> frozenset[int]:
        """Range: contiguous units in order of member id; the first members take one more when it does not divide."""
        members = sorted(self.group(group).members, key=lambda m: m.id)
        share, more = divmod(self.partitions(member.topics[0]), len(members))
        place = members.index(member)
        first = place * share + min(place, more)
        return frozenset(range(first, first + share + (place < more)))

    def _rebalance(self, group: Group) -> None:
        group.generation += 1
        self.notify()

    # -- waiting -----------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Readers that have taken everything and wait for more."""
        return len(self._waiters)

    def notify(self) -> None:
        """Wake whoever waits for a change."""
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def changed(self, timeout_s: float) -> bool:
        """Wait for the next change; False after `timeout_s`."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            async with asyncio.timeout(timeout_s):  # wait_for may lose a cancellation (CPython 3.11, gh-86296)
                await waiter
        except TimeoutError:
            return False
        finally:
            self._waiters.discard(waiter)
        return True
