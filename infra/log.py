"""The log, as the rooms see it. `infra.kafka` is Apache Kafka, `tests.fakes.memory_log` the fake; both pass a contract.

LogError
├── LogUnavailable      the broker did not do it: retried by the caller, or the process ends uncommitted
│   ├── LogUnreachable  it gave no answer, or one that says to try again
│   │   ├── LoginRefused      it does not take who we say we are; waited for as an outage is: a secret may be rotated
│   │   ├── TlsFailed         a certificate is missing, expired or not trusted, on either side
│   │   └── TokenUnavailable  the token endpoint is away, or refuses a token
│   ├── ClockRefused    the broker takes no record that is dated by this machine's clock
│   ├── TransactionHanging  one that nobody will end is open: its markers are missing
│   ├── LacksReplicas   it answers, and cannot keep what is appended on as many brokers as its topics ask for
│   ├── ProducerDied    the client stopped sending: this process must end
│   └── NotAuthorized   an ACL is missing: `turnlog topics acls` prints those that each role needs
│       └── TopicNotAuthorized, GroupNotAuthorized, TransactionalIdNotAuthorized, ClusterNotAuthorized
├── Fenced              another owner started with the same transactional id: this process must end
├── TopicMissing        name it and say `turnlog topics apply`
├── OffsetOutOfRange    the log no longer holds what was asked for
├── Oversized           a record or commit metadata above the limit: refused before it is sent, never retried
├── BrokenAssignment    a group assigned less than whole units: this process must end
├── PartitionsChanged   a topic has not as many partitions as the settings say: nothing is written there
├── OtherInputs         a group has commits of topics that its role does not read
├── CommitsExpired      a unit's commits are gone, and so is input from before them
└── TransactionFailed   never repaired in place: close the transactor, end the process
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from turnlog.infra.roles import Explained, Unreachable

log = logging.getLogger(__name__)
Headers = Sequence[tuple[str, bytes]]
REACHED_EVERY_S = 1.0
"""Between two commits that nothing but lag is told from."""
FOR_EVER = (1 << 63) - 1
"""No offset is behind it."""


class LogError(Exception):
    """Base of the tree above."""


class LogUnavailable(LogError):
    """The broker did not do what was asked."""


class LogUnreachable(LogUnavailable, Unreachable):
    """No broker answered in time."""


class LoginRefused(LogUnreachable, Explained):
    """The broker refused the login. Remedy: [kafka] sasl_mechanism, username, password, oauth_ settings."""


class TlsFailed(LogUnreachable, Explained):
    """No encrypted connection. Remedy: [kafka] security_protocol, ca_file, certificate_file, key_file."""


class TokenUnavailable(LogUnreachable, Explained):
    """No token to log in with. Remedy: [kafka] oauth_ settings."""


class NotAuthorized(LogUnavailable):
    """The principal may not do it. Remedy: the ACL that is named."""


class TopicNotAuthorized(NotAuthorized):
    """Of a topic."""


class GroupNotAuthorized(NotAuthorized):
    """Of a consumer group."""


class TransactionalIdNotAuthorized(NotAuthorized):
    """Of a transactional id."""


class ClusterNotAuthorized(NotAuthorized):
    """Of the cluster itself: making topics, or writing idempotently on an old broker."""


class LacksReplicas(LogUnavailable, Explained):
    """Fewer replicas are in sync, or answer, than `min.insync.replicas` says. Remedy: the brokers that are away."""


class ClockRefused(LogUnavailable, Explained):
    """The date of a record is further from the broker's clock than its topic allows. Remedy: this machine's clock."""


class TransactionHanging(LogUnavailable, Unreachable):
    """A transaction is open for longer than any of ours may be. Remedy: end it by Kafka's own tool, as is said."""


class ProducerDied(LogUnavailable):
    """Nothing that is handed to the producer is sent any more."""


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


class PartitionsChanged(LogError, Explained):
    """Somebody gave a topic more partitions: keys of the run's records would go elsewhere, where nobody reads. Kafka
    takes none away. Remedy: `turnlog run fork` under another [kafka] prefix."""


class OtherInputs(LogError):
    """Another release of the role reads other topics under the same group. Remedy: use that release; a release that
    changes the inputs of a role gives it a new group (docs/upgrades.md)."""


class CommitsExpired(LogError):
    """A unit began long ago, and nothing says how far it came. Remedy: restore its commits or its input; give brokers a
    larger offsets.retention.minutes."""


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

    def keeping(self, last: Commit | None) -> Commit:
        """This, and whatever else the metadata of the commit before it says: a newer release may have put it there, and
        is to find it again."""
        more = _said(last)
        own = _said(self) if self.metadata else {"high": self.offset, "under_way": 0}
        if not more or not own or more.keys() <= own.keys():
            return self
        return Commit(self.offset, json.dumps({**more, **own}, separators=(",", ":")))

    def reached(self) -> tuple[int, int]:
        """`high` and `under_way`; the offset itself and 0 of a group that does not say them."""
        try:
            said = json.loads(self.metadata)
            return int(said["high"]), int(said.get("under_way", 0))
        except (ValueError, TypeError, KeyError):
            return self.offset, 0


def _said(commit: Commit | None) -> dict[str, object]:
    """Metadata that is a JSON object; of any other, nothing."""
    try:
        said = json.loads(commit.metadata) if commit is not None else None
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


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
    """Reads assigned partitions in offset order, read_committed unless it was made otherwise."""

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

    async def cluster(self) -> str:
        """The cluster's own id, which it keeps for life; those that earlier releases embedded share one."""
        ...

    async def topics(self, *, configs: bool = False) -> dict[str, TopicSpec]:
        """Topics that exist, with their configuration only if that is asked for: it takes a right of its own."""
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

    def reader(self, *, patient: bool = False, committed: bool = True) -> AbstractAsyncContextManager[Reader]:
        """A reader without a group. `patient`: what is new may come up to half a second later, at a fraction of the
        broker's work (for displays and reports). Not `committed`: records of open and of aborted transactions come,
        too."""
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

    async def offset_since(self, partition: Partition, since_ms: int) -> int:
        """Offset of the first record that is no older than this, in ms since 1970; the end where every one is older."""
        ...

    async def groups(self) -> frozenset[str]:
        """Groups that have committed anything, or have members."""
        ...

    async def commits(self, group: str, partitions: Sequence[Partition]) -> dict[Partition, Commit]:
        """The group's commits; partitions without one are absent. Waits for an open transaction that commits one, so
        what is told is no older than any output of it that a reader can see."""
        ...

    async def committed(self, group: str) -> frozenset[Partition]:
        """Where the group has commits, of whatever topics. Waits for no transaction."""
        ...

    async def members(self, group: str) -> tuple[str, ...]:
        """Who is in a group now, each as people may look for it."""
        ...


class RemovableLog(Log, Protocol):
    """What `turnlog run delete` needs of a log beside."""

    async def delete_topics(self, names: Sequence[str]) -> None:
        """Delete topics with all that they hold, for good, and wait until they are gone; what is not there is passed
        over."""
        ...

    async def delete_groups(self, groups: Sequence[str]) -> None:
        """Forget what groups without members have committed; what is not there is passed over."""
        ...

    async def sizes(self, topics: Sequence[str]) -> dict[str, int]:
        """Bytes of topics on the brokers' disks, all copies together; of those that it tells."""
        ...

    async def transactional_ids(self) -> frozenset[str]:
        """Those that it remembers and this principal may see."""
        ...


async def check_commits(
    client: Log, group: str, inputs: Sequence[Partition], missing: Collection[Partition], outputs: Sequence[Partition]
) -> None:
    """Whether the group may begin at the start of `missing`, those of its `inputs` of which it has no commit.

    It may where it is new, and where nothing of its input is gone: what it wrote to `outputs` does not come out twice.
    Raises OtherInputs; CommitsExpired where it has worked before and input is gone; LogUnavailable, TopicMissing.
    """
    held = await client.committed(group)
    topics = {place.topic for place in inputs}
    if others := sorted({place.topic for place in held} - topics):
        raise OtherInputs(
            f"group {group} has commits of {', '.join(others)}, this release reads {', '.join(sorted(topics))} under "
            "it: start the release that made them, or wait until that one's roles have ended and delete these offsets "
            "(docs/upgrades.md, Inputs of a role)"
        )
    if not missing or not (held or any((await client.end_offsets(outputs)).values())):
        return
    starts = await client.start_offsets(sorted(missing))
    if pruned := [f"{topic}[{number}] begins at {start}" for (topic, number), start in starts.items() if start]:
        raise CommitsExpired(
            f"group {group} has worked before, but its commits are gone and {', '.join(pruned)}: brokers forget what a "
            "group committed that stands still for offsets.retention.minutes; restore the topics from the archive or "
            "start a new run, and set that above the longest pause of a run"
        )
    log.info("group %s has no commit of %s: it begins at the start", group, sorted(missing))


HANGING_S = 30.0
"""Ours last 10 s at most (`transaction.timeout.ms`), and brokers look for those that are over every 10 s."""
LOOK_AGAIN_S = 0.05
"""No end of a transaction can be awaited."""


async def own_ends(client: Log, places: Sequence[Partition], *, patience_s: float = HANGING_S) -> dict[Partition, int]:
    """Ends of partitions that the caller alone writes, by transactions, to be asked for after the fence: all that the
    owner before has committed lies below them.

    A coordinator skips the markers of partitions that have no leader when a transaction ends, and takes it for ended:
    what it wrote there is hidden until somebody's later marker covers it, and an owner that cannot see it would write
    it again. Raises TransactionHanging, TopicMissing, LogUnavailable."""
    deadline = asyncio.get_running_loop().time() + patience_s
    while True:
        written = await client.end_offsets(places, committed=False)
        ends = await client.end_offsets(places)
        hidden = [
            f"{place.topic}[{place.number}] from {ends[place]}" for place in places if ends[place] < written[place]
        ]
        if not hidden:
            return ends
        if asyncio.get_running_loop().time() > deadline:
            raise hanging(f"{', '.join(hidden)} is hidden")
        await asyncio.sleep(LOOK_AGAIN_S)


def hanging(what: str) -> TransactionHanging:
    """The error, with the remedy."""
    return TransactionHanging(
        f"{what} by a transaction that is open for longer than any of ours may be: its markers are missing; find it by "
        "`kafka-transactions.sh find-hanging` and see docs/operations.md before you end it"
    )


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


@functools.lru_cache(maxsize=1 << 12)  # the records of a group come together, and all have its key
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
        commits = {place: commit.keeping(self._said.get(place)) for place, commit in commits.items()}
        if (last or now - self._said_at >= REACHED_EVERY_S) and not commits.items() <= self._said.items():
            self._said |= commits
            self._said_at = now
            await self._commit()

    async def leave(self) -> None:
        """From now on nothing waits for the group, whatever comes, until it says again what it has reached. Raises as
        say."""
        left = {place: Commit.low_water(commit.offset, high=FOR_EVER) for place, commit in self._said.items()}
        await self.say(left, last=True)

    async def _commit(self) -> None:
        await self._transactor.begin()
        await self._transactor.offsets(self._group, self._said)
        await self._transactor.commit()
