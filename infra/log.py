"""The log, as the rooms see it. `infra.kafka` is Apache Kafka, `tests.fakes.memory_log` the fake; both pass a contract.

LogError
├── LogUnavailable      the broker did not do it: retried by the caller, or the process ends uncommitted
│   └── LogUnreachable  it gave no answer, or one that says to try again
├── Fenced              another owner started with the same transactional id: this process must end
├── TopicMissing        name it and say `turnlog topics apply`
├── OffsetOutOfRange    the log no longer holds what was asked for
├── Oversized           a record or commit metadata above the limit: refused before it is sent, never retried
├── BrokenAssignment    a group assigned less than whole units: this process must end
└── TransactionFailed   never repaired in place: close the transactor, end the process
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from turnlog.infra.roles import Unreachable

Headers = Sequence[tuple[str, bytes]]
REACHED_EVERY_S = 1.0
"""Between two commits that nothing but lag is told from."""


class LogError(Exception):
    """Base of the tree above."""


class LogUnavailable(LogError):
    """The broker did not do what was asked."""


class LogUnreachable(LogUnavailable, Unreachable):
    """No broker answered in time."""


class Fenced(LogError):
    """A newer owner of the transactional id exists."""


class TopicMissing(LogError):
    """The topic does not exist. Remedy: `turnlog topics apply`."""


class OffsetOutOfRange(LogError):
    """The asked offset lies outside the log."""


class Oversized(LogError):
    """The broker would refuse it for its size."""


class BrokenAssignment(LogError):
    """The group's assignment is not whole units. Remedy: `turnlog topics check`."""


class TransactionFailed(LogError):
    """The transaction did not commit; nothing of it is visible."""


class Partition(NamedTuple):
    """One partition of a topic."""

    topic: str
    number: int


@dataclass(frozen=True, slots=True)
class Record:
    """A record where it stands."""

    topic: str
    partition: int
    offset: int
    key: bytes
    value: bytes
    headers: tuple[tuple[str, bytes], ...]
    timestamp_ms: int


@dataclass(frozen=True, slots=True)
class Commit:
    """A group's committed offset in one partition, with its metadata string (at most 4,096 bytes).

    The offset is where a restart begins. Metadata that is a JSON object may say how far the group is in fact: `high`,
    the first record that was not taken, and `under_way`, how many below it were taken and are not over.
    """

    offset: int
    metadata: str = ""

    @classmethod
    def low_water(cls, offset: int, *, high: int, under_way: int = 0, **more: int) -> Commit:
        """A restart begins at `offset`; `more` is for that restart alone."""
        return cls(offset, json.dumps({**more, "high": high, "under_way": under_way}, separators=(",", ":")))

    def reached(self) -> tuple[int, int]:
        """`high` and `under_way`; the offset itself and 0 of a group that does not say them."""
        try:
            said = json.loads(self.metadata)
            return int(said["high"]), int(said.get("under_way", 0))
        except (ValueError, TypeError, KeyError):
            return self.offset, 0


@dataclass(frozen=True, slots=True)
class TopicSpec:
    """What a topic should be or is."""

    name: str
    partitions: int
    replication: int
    config: Mapping[str, str]


class Appender(Protocol):
    """A plain idempotent producer, acks=all. Keys are placed by murmur2, as Kafka's own clients do."""

    async def append(
        self, topic: str, key: bytes, value: bytes, *, headers: Headers = (), partition: int | None = None
    ) -> tuple[int, int]:
        """Append and wait for the acknowledgement; (partition, offset). Many may wait at once; order per partition
        is the order of the calls. Raises LogUnavailable, TopicMissing."""
        ...

    async def submit(
        self, topic: str, key: bytes, value: bytes, *, headers: Headers = (), partition: int | None = None
    ) -> Awaitable[tuple[int, int]]:
        """Hand over for sending (fixes the order), return what to await for the acknowledgement."""
        ...


class Transactor(Protocol):
    """A transactional producer. Entering it fences the last owner of the id and aborts what that one left open."""

    async def begin(self) -> None:
        """Raises Fenced, TransactionFailed."""
        ...

    async def send(
        self, topic: str, partition: int, key: bytes, value: bytes, *, headers: Headers = ()
    ) -> Awaitable[tuple[int, int]]:
        """Hand over for sending; the awaitable gives (partition, offset)."""
        ...

    async def offsets(self, group: str, commits: Mapping[Partition, Commit]) -> None:
        """Commit input offsets with the transaction."""
        ...

    async def commit(self) -> None:
        """Everything or nothing becomes visible. Raises Fenced, TransactionFailed."""
        ...

    async def abort(self) -> None:
        """Drop the open transaction."""
        ...


class Reader(Protocol):
    """Reads assigned partitions in offset order, read_committed."""

    def assign(self, starts: Mapping[Partition, int]) -> None:
        """Read exactly these partitions from these offsets."""
        ...

    def seek(self, partition: Partition, offset: int) -> None:
        """Continue there."""
        ...

    def position(self, partition: Partition) -> int:
        """Next offset to deliver. Advances past transaction markers and aborted records as they are passed over."""
        ...

    async def poll(self, *, max_records: int = 500, timeout_s: float = 0.1) -> list[Record]:
        """What is there, grouped by partition and in offset order; empty after `timeout_s`. Raises OffsetOutOfRange."""
        ...


Assigned = Callable[[frozenset[int]], Awaitable[None]]


class GroupReader(Reader, Protocol):
    """A member of a consumer group. Range assignment over identical partition counts: whole units (partition p of
    every topic) move together; anything else ends the process. Offsets come from `Log.commits`, never from the group
    protocol: after an assignment nothing is delivered until `seek` was called for each assigned partition."""

    async def commit(self, commits: Mapping[Partition, Commit]) -> None:
        """Plain commit with metadata, for roles without transactions."""
        ...


class Log(Protocol):
    """A connection to the log."""

    async def close(self) -> None:
        """Release every client made from here."""
        ...

    async def topics(self) -> dict[str, TopicSpec]:
        """Topics that exist."""
        ...

    async def create_topics(self, specs: Sequence[TopicSpec]) -> None:
        """Create and wait until each is usable."""
        ...

    async def delete_before(self, offsets: Mapping[Partition, int]) -> None:
        """Delete the records of each partition below its offset, for good. Only `turnlog archive prune` does."""
        ...

    def appender(self) -> AbstractAsyncContextManager[Appender]:
        """A plain producer."""
        ...

    def transactor(self, transactional_id: str) -> AbstractAsyncContextManager[Transactor]:
        """Entering fences. Leaving aborts an open transaction."""
        ...

    def reader(self, *, patient: bool = False) -> AbstractAsyncContextManager[Reader]:
        """A reader without a group. `patient`: what is new may come up to half a second later, at a fraction of the
        broker's work (for displays and reports)."""
        ...

    def group_reader(
        self, group: str, topics: Sequence[str], *, assigned: Assigned, revoked: Assigned, instance: str | None = None,
        patient: bool = False,
    ) -> AbstractAsyncContextManager[GroupReader]:  # fmt: skip
        """A member of `group`. The callbacks get the unit numbers that come or go and are awaited before delivery
        goes on; what a callback raises comes out of the next poll(). `instance` makes the membership static;
        `patient` is as for `reader`."""
        ...

    async def start_offsets(self, partitions: Sequence[Partition]) -> dict[Partition, int]:
        """First offset still held."""
        ...

    async def end_offsets(self, partitions: Sequence[Partition], *, committed: bool = True) -> dict[Partition, int]:
        """Next offset after the last record (committed: after the last stable one)."""
        ...

    async def groups(self) -> frozenset[str]:
        """Groups that have committed anything, or have members."""
        ...

    async def commits(self, group: str, partitions: Sequence[Partition]) -> dict[Partition, Commit]:
        """The group's commits; partitions without one are absent. Waits for an open transaction that commits one, so
        what is told is no older than any output of it that a reader can see."""
        ...


_SEED = 0x9747B28C
_MIX = 0x5BD1E995
_WORD = 0xFFFFFFFF


def murmur2(key: bytes) -> int:
    """The unsigned 32-bit hash of `key`."""
    value = _SEED ^ len(key)
    whole = len(key) & ~3
    for at in range(0, whole, 4):
        word = int.from_bytes(key[at : at + 4], "little") * _MIX & _WORD
        word = (word ^ word >> 24) * _MIX & _WORD
        value = (value * _MIX & _WORD) ^ word
    if whole != len(key):
        value = (value ^ int.from_bytes(key[whole:], "little")) * _MIX & _WORD
    value = (value ^ value >> 13) * _MIX & _WORD
    return value ^ value >> 15


def partition_of(key: bytes, partitions: int) -> int:
    """The partition of `key` among `partitions`."""
    return (murmur2(key) & 0x7FFFFFFF) % partitions


class Reached:
    """How far a role without a group has come, committed under its fence for whoever asks for its lag. No restart of
    the role begins there; what the transactor refuses says that another owner has started."""

    def __init__(self, transactor: Transactor, group: str, commits: Mapping[Partition, Commit]) -> None:
        """`commits`: what stands now, or nothing of which anybody should think that it was reached."""
        self._transactor = transactor
        self._group = group
        self._said = dict(commits)
        self._said_at = float("-inf")

    @classmethod
    async def recalled(cls, log: Log, transactor: Transactor, group: str, places: Sequence[Partition]) -> Reached:
        """With what the last owner of `transactor` said. Raises LogUnavailable, TopicMissing."""
        starts = {place: Commit(offset) for place, offset in (await log.start_offsets(places)).items()}
        return cls(transactor, group, starts | await log.commits(group, places))

    async def check_owner(self) -> None:
        """Commit again what was said last. Raises Fenced, TransactionFailed, LogUnavailable."""
        await self._commit()

    async def say(self, commits: Mapping[Partition, Commit], *, last: bool = False) -> None:
        """Commit them, if they are news and the `last`, or the news before are a second old. To be called again and
        again, between two transactions. Raises Fenced, TransactionFailed, LogUnavailable."""
        now = asyncio.get_running_loop().time()
        if (last or now - self._said_at >= REACHED_EVERY_S) and not commits.items() <= self._said.items():
            self._said |= commits
            self._said_at = now
            await self._commit()

    async def _commit(self) -> None:
        await self._transactor.begin()
        await self._transactor.offsets(self._group, self._said)
        await self._transactor.commit()
