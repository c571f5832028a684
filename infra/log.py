"""Interface of the log for all packages. `infra.kafka` implements it on Apache Kafka, `tests.fakes.memory_log` in
memory; both pass one contract test.

LogError
├── LogUnavailable      the broker did not do it: the caller retries, or the process ends without a commit
│   ├── LogUnreachable  no answer, or an answer that says to try again
│   │   ├── LoginRefused      the broker rejects our credentials; retried like an outage, because secrets may be rotated
│   │   ├── TlsFailed         a certificate is missing, expired or not trusted, on either side
│   │   └── TokenUnavailable  the token endpoint does not answer, or refuses a token
│   ├── ClockRefused    the broker rejects the timestamps of this machine's clock
│   ├── TransactionHanging  an open transaction that nobody will end: its markers are missing
│   ├── LacksReplicas   the broker answers, but has fewer replicas in sync than its topics require for appends
│   ├── ProducerDied    the client stopped sending: this process must end
│   └── NotAuthorized   an ACL is missing: `turnlog topics acls` prints those that each role needs
│       └── TopicNotAuthorized, GroupNotAuthorized, TransactionalIdNotAuthorized, ClusterNotAuthorized
├── Fenced              another owner started with the same transactional id: this process must end
├── TopicMissing        the topic does not exist; the message names it and `turnlog topics apply`
├── OffsetOutOfRange    the log no longer contains the requested offset
├── Oversized           a record or commit metadata above the limit: rejected before it is sent, never retried
├── BrokenAssignment    a group assigned incomplete partition tasks: this process must end
├── PartitionsChanged   the number of partitions of a topic differs from the settings: nothing is written there
├── OtherInputs         a group has commits of topics that its role does not read
├── CommitsExpired      the commits of a partition task are gone, and so is input from before them
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
PATIENT_S = 0.5
"""Seconds that a patient reader pauses after each fetch that returned records."""
REACHED_EVERY_S = 1.0
"""Minimum seconds between two commits that serve only to show the consumer lag."""
FOR_EVER = (1 << 63) - 1
"""An offset that no record can reach."""


class LogError(Exception):
    """Base class of all errors of the log; see the module docstring."""


class LogUnavailable(LogError):
    """The broker did not do what was requested."""


class LogUnreachable(LogUnavailable, Unreachable):
    """No broker answered in time."""


class LoginRefused(LogUnreachable, Explained):
    """The broker refused the login. Remedy: [kafka] sasl_mechanism, username, password, oauth_ settings."""


class TlsFailed(LogUnreachable, Explained):
    """No encrypted connection. Remedy: [kafka] security_protocol, ca_file, certificate_file, key_file."""


class TokenUnavailable(LogUnreachable, Explained):
    """No token for the login. Remedy: [kafka] oauth_ settings."""


class NotAuthorized(LogUnavailable):
    """The principal lacks a right. Remedy: the ACL that the message names."""


class TopicNotAuthorized(NotAuthorized):
    """A right on a topic is missing."""


class GroupNotAuthorized(NotAuthorized):
    """A right on a consumer group is missing."""


class TransactionalIdNotAuthorized(NotAuthorized):
    """A right on a transactional id is missing."""


class ClusterNotAuthorized(NotAuthorized):
    """A right on the cluster itself is missing: to create topics, or to write idempotently on an old broker."""


class LacksReplicas(LogUnavailable, Explained):
    """Fewer replicas than `min.insync.replicas` are in sync and answer. Remedy: restart the missing brokers."""


class ClockRefused(LogUnavailable, Explained):
    """A record's timestamp differs from the broker's clock by more than its topic allows. Remedy: set this machine's
    clock."""


class TransactionHanging(LogUnavailable, Unreachable):
    """A transaction has been open for longer than any of turnlog's may be. Remedy: end it with Kafka's own tool, as the
    message describes."""


class ProducerDied(LogUnavailable):
    """The producer sends nothing any more."""


class Fenced(LogError):
    """A newer owner of the transactional id exists."""


class TopicMissing(LogError):
    """The topic does not exist. Remedy: `turnlog topics apply`."""


class OffsetOutOfRange(LogError):
    """The requested offset lies outside the log."""


class Oversized(LogError):
    """The broker would reject it because of its size."""


class BrokenAssignment(LogError):
    """The group assigned incomplete partition tasks. Remedy: `turnlog topics check`."""


class PartitionsChanged(LogError, Explained):
    """A topic was given more partitions, so keys of the run's records would map to others than before, which nobody
    reads. Kafka cannot remove partitions. Remedy: `turnlog run fork` under another [kafka] prefix."""


class OtherInputs(LogError):
    """The group was used by another release, in which the role reads other topics. Remedy: use that release. A release
    that changes the inputs of a role gives it a new group (docs/upgrades.md)."""


class CommitsExpired(LogError):
    """A partition task began long ago, and its progress is no longer known. Remedy: restore its commits or its input,
    and set a larger offsets.retention.minutes on the brokers."""


class TransactionFailed(LogError):
    """The transaction did not commit; nothing of it is visible. A newer owner that starts at this moment can be the
    cause: Kafka then answers a commit with UNKNOWN_SERVER_ERROR in the place of a fencing."""


class Partition(NamedTuple):
    """A partition of a topic."""

    topic: str
    number: int


@dataclass(frozen=True, slots=True)
class Record:
    """A record and its position in the log."""

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

    A restart begins at the offset. Metadata that is a JSON object may state the actual progress: `high` is the first
    record that was not consumed, `under_way` the number of records below it that were consumed and are not finished.
    """

    offset: int
    metadata: str = ""

    @classmethod
    def low_water(cls, offset: int, *, high: int, under_way: int = 0, **more: int) -> Commit:
        """Return the commit for a restart at `offset`. `more` is further metadata for that restart alone."""
        return cls(offset, json.dumps({**more, "high": high, "under_way": under_way}, separators=(",", ":")))

    def keeping(self, last: Commit | None) -> Commit:
        """Return this commit with those metadata keys of the previous commit that it lacks. A newer release may have
        written them and must find them again."""
        more = _parse_metadata(last)
        own = _parse_metadata(self) if self.metadata else {"high": self.offset, "under_way": 0}
        if not more or not own or more.keys() <= own.keys():
            return self
        return Commit(self.offset, json.dumps({**more, **own}, separators=(",", ":")))

    def read_progress(self) -> tuple[int, int]:
        """`high` and `under_way` of the metadata, or (offset, 0) if it does not state them."""
        try:
            said = json.loads(self.metadata)
            return int(said["high"]), int(said.get("under_way", 0))
        except (ValueError, TypeError, KeyError):
            return self.offset, 0


def _parse_metadata(commit: Commit | None) -> dict[str, object]:
    """Return the metadata if it is a JSON object, else an empty dict."""
    try:
        said = json.loads(commit.metadata) if commit is not None else None
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


@dataclass(frozen=True, slots=True)
class TopicSpec:
    """Desired or actual properties of a topic."""

    name: str
    partitions: int
    replication: int
    config: Mapping[str, str]


class Appender(Protocol):
    """A plain idempotent producer with acks=all. Murmur2 maps keys to partitions, as in Kafka's own clients."""

    async def append(
        self, topic: str, key: bytes, value: bytes, *, headers: Headers = (), partition: int | None = None
    ) -> tuple[int, int]:
        """Append, wait for the acknowledgement and return (partition, offset). Any number of calls may wait at once;
        the order within a partition is that of the calls. Raises LogUnavailable, TopicMissing."""
        ...

    async def submit(
        self, topic: str, key: bytes, value: bytes, *, headers: Headers = (), partition: int | None = None
    ) -> Awaitable[tuple[int, int]]:
        """Hand a record over for sending, which fixes its order, and return an awaitable for the acknowledgement."""
        ...


class Transactor(Protocol):
    """A transactional producer. Entering it fences the last owner of the id and aborts the transaction that it left
    open."""

    async def begin(self) -> None:
        """Begin a transaction. Raises Fenced, TransactionFailed."""
        ...

    async def send(
        self, topic: str, partition: int, key: bytes, value: bytes, *, headers: Headers = ()
    ) -> Awaitable[tuple[int, int]]:
        """Hand a record over for sending. The awaitable returns (partition, offset)."""
        ...

    async def offsets(self, group: str, commits: Mapping[Partition, Commit]) -> None:
        """Commit input offsets with the transaction."""
        ...

    async def commit(self) -> None:
        """Commit the transaction: all of it becomes visible, or nothing. Raises Fenced, TransactionFailed."""
        ...

    async def abort(self) -> None:
        """Abort the open transaction."""
        ...


class Reader(Protocol):
    """Reads assigned partitions in offset order; read_committed unless opened with `committed=False`."""

    def assign(self, starts: Mapping[Partition, int]) -> None:
        """Read exactly these partitions from these offsets."""
        ...

    def seek(self, partition: Partition, offset: int) -> None:
        """Continue at `offset`."""
        ...

    def position(self, partition: Partition) -> int:
        """Return the next offset to deliver. It advances past transaction markers and aborted records as the reader
        skips them."""
        ...

    async def poll(self, *, max_records: int = 500, timeout_s: float = 0.1) -> list[Record]:
        """Return available records, grouped by partition and in offset order, or none after `timeout_s`. Raises
        OffsetOutOfRange."""
        ...


Assigned = Callable[[frozenset[int]], Awaitable[None]]


class GroupReader(Reader, Protocol):
    """A member of a consumer group.

    The topics have the same number of partitions and are assigned by range, so that whole partition tasks (partition p
    of every topic) move together; anything else ends the process. Offsets come from `Log.commits`, never from the group
    protocol: after an assignment nothing is delivered until `seek` was called for each assigned partition.
    """

    async def commit(self, commits: Mapping[Partition, Commit]) -> None:
        """Commit offsets with metadata outside a transaction, for roles without transactions."""
        ...


class Log(Protocol):
    """A connection to the log."""

    async def close(self) -> None:
        """Close every client created by this log."""
        ...

    async def cluster(self) -> str:
        """Return the cluster's id, which never changes. Clusters that earlier releases embedded share one id."""
        ...

    async def topics(self, *, configs: bool = False) -> dict[str, TopicSpec]:
        """Return the existing topics. Configurations are included only with `configs`, which takes a
        right of its own."""
        ...

    async def create_topics(self, specs: Sequence[TopicSpec]) -> None:
        """Create topics and wait until each is usable."""
        ...

    async def delete_before(self, offsets: Mapping[Partition, int]) -> None:
        """Delete the records of each partition below its offset, for good. Only `turnlog log archive prune` does
        this."""
        ...

    def appender(self) -> AbstractAsyncContextManager[Appender]:
        """Open a plain producer."""
        ...

    def transactor(self, transactional_id: str) -> AbstractAsyncContextManager[Transactor]:
        """Open a transactional producer. Entering fences the last owner; leaving aborts an open transaction."""
        ...

    def reader(self, *, patient: bool = False, committed: bool = True) -> AbstractAsyncContextManager[Reader]:
        """Open a reader without a group.

        With `patient`, records that follow others may arrive up to half a second later, for a fraction of the broker's
        work (for displays and reports). Without `committed`, records of open and of aborted transactions are delivered
        as well.
        """
        ...

    def group_reader(
        self, group: str, topics: Sequence[str], *, assigned: Assigned, revoked: Assigned, instance: str | None = None,
        pause_s: float = 0.0,
    ) -> AbstractAsyncContextManager[GroupReader]:  # fmt: skip
        """Open a member of `group`. The callbacks receive the numbers of the assigned or revoked partition tasks, and
        are awaited before delivery continues. An exception of a callback is raised by the next poll(). `instance` makes
        the membership static. Each fetch that returned records is followed by a pause of `pause_s`, so that later
        records arrive together; PATIENT_S is the pause of a patient `reader`."""
        ...

    async def start_offsets(self, partitions: Sequence[Partition]) -> dict[Partition, int]:
        """Return the first retained offset of each partition."""
        ...

    async def end_offsets(self, partitions: Sequence[Partition], *, committed: bool = True) -> dict[Partition, int]:
        """Return the offset after the last record (with `committed`: after the last stable record)."""
        ...

    async def offset_since(self, partition: Partition, since_ms: int) -> int:
        """Return the offset of the first record with a timestamp of `since_ms` (ms since 1970) or later; the end if
        there is none."""
        ...

    async def groups(self) -> frozenset[str]:
        """Return the groups that have committed offsets or have members."""
        ...

    async def commits(self, group: str, partitions: Sequence[Partition]) -> dict[Partition, Commit]:
        """Return the group's commits; partitions without one are absent. Waits for open transactions that commit one of
        them, so that the result is no older than any output of such a transaction that a reader can see."""
        ...

    async def committed_partitions(self, group: str) -> frozenset[Partition]:
        """Return the partitions, of any topic, for which the group has commits. Does not wait for transactions."""
        ...

    async def members(self, group: str) -> tuple[str, ...]:
        """Return a readable name of each current member of a group."""
        ...


class RemovableLog(Log, Protocol):
    """The further operations that `turnlog run delete` needs."""

    async def delete_topics(self, names: Sequence[str]) -> None:
        """Delete topics with all their records, for good, and wait until they are gone. Topics that do not exist are
        skipped."""
        ...

    async def delete_groups(self, groups: Sequence[str]) -> None:
        """Delete the commits of groups without members. Groups that do not exist are skipped."""
        ...

    async def sizes(self, topics: Sequence[str]) -> dict[str, int]:
        """Return bytes of topics on the brokers' disks, all replicas together, as far as the brokers report them."""
        ...

    async def transactional_ids(self) -> frozenset[str]:
        """Return the transactional ids that the cluster remembers and this principal may see."""
        ...


async def check_commits(
    client: Log, group: str, inputs: Sequence[Partition], missing: Collection[Partition], outputs: Sequence[Partition]
) -> None:
    """Check that the group may begin at the start of `missing`, the `inputs` for which it has no commit.

    It may if it is new, or if its input is complete, because what it has written to `outputs` is not written twice.
    Raises OtherInputs. Raises CommitsExpired if the group has worked before and input is gone. Raises LogUnavailable,
    TopicMissing.
    """
    held = await client.committed_partitions(group)
    topics = {place.topic for place in inputs}
    if others := sorted({place.topic for place in held} - topics):
        raise OtherInputs(
            f"consumer group {group} has commits for {', '.join(others)}, but this release reads "
            f"{', '.join(sorted(topics))} with it: start the release that made the commits, or wait until the roles "
            "of that release have ended and delete these offsets (docs/upgrades.md, Inputs of a role)"
        )
    if not missing or not (held or any((await client.end_offsets(outputs)).values())):
        return
    starts = await client.start_offsets(sorted(missing))
    if pruned := [f"{topic}[{number}] begins at {start}" for (topic, number), start in starts.items() if start]:
        raise CommitsExpired(
            f"consumer group {group} has worked before, but its commits are gone and {', '.join(pruned)}: brokers "
            "forget the commits of a group that is idle for offsets.retention.minutes; restore the topics from the "
            "archive or start a new run, and set that broker option above the longest pause of a run"
        )
    log.info("consumer group %s has no commit for %s: it reads from the beginning", group, sorted(missing))


HANGING_S = 30.0
"""Seconds after which an open transaction counts as hanging. turnlog's last 10 s at most (`transaction.timeout.ms`),
and brokers look for expired ones every 10 s."""
LOOK_AGAIN_S = 0.05
"""Seconds between two checks; the end of a transaction cannot be awaited."""


async def own_ends(client: Log, places: Sequence[Partition], *, patience_s: float = HANGING_S) -> dict[Partition, int]:
    """Return the ends of partitions that only the caller writes, and only by transactions. Call it after the fence: all
    commits of the previous owner lie below these ends.

    When a transaction ends, a coordinator skips the markers of partitions that have no leader and considers it ended.
    Its records there stay hidden until a later marker covers them, and a new owner that cannot see them would write
    them again. Raises TransactionHanging, TopicMissing, LogUnavailable.
    """
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
    """Return a TransactionHanging error that states the remedy."""
    return TransactionHanging(
        f"{what} by a transaction that has been open for longer than any of turnlog's may be: its markers are "
        "missing; find it with `kafka-transactions.sh find-hanging` and read docs/operations.md before you abort it"
    )


_SEED = 0x9747B28C
_MIX = 0x5BD1E995
_WORD = 0xFFFFFFFF


def murmur2(key: bytes) -> int:
    """Return the unsigned 32-bit murmur2 hash of `key`."""
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


@functools.lru_cache(maxsize=1 << 12)  # consecutive records of a group share its key
def partition_of(key: bytes, partitions: int) -> int:
    """Return the partition of `key` among `partitions`."""
    return (murmur2(key) & 0x7FFFFFFF) % partitions


class Reached:
    """Progress of a role without a consumer group, committed under its fence so that its lag can be measured. A restart
    does not begin there. An error of the transactor means that another owner has started."""

    def __init__(self, transactor: Transactor, group: str, commits: Mapping[Partition, Commit]) -> None:
        """`commits`: the current commits; empty if none should count as progress."""
        self._transactor = transactor
        self._group = group
        self._said = dict(commits)
        self._said_at = self._computed_at = float("-inf")

    @classmethod
    async def from_log(cls, log: Log, transactor: Transactor, group: str, places: Sequence[Partition]) -> Reached:
        """Create it with the commits of the last owner of `transactor`. Raises LogUnavailable, TopicMissing."""
        starts = {place: Commit(offset) for place, offset in (await log.start_offsets(places)).items()}
        return cls(transactor, group, starts | await log.commits(group, places))

    async def check_owner(self) -> None:
        """Commit the last reported offsets again. Raises Fenced, TransactionFailed, LogUnavailable."""
        await self._commit()

    async def say(self, commits: Mapping[Partition, Commit], *, last: bool = False) -> None:
        """Commit `commits` if they are new, and either the `last` or at least REACHED_EVERY_S after the previous ones.
        To be called repeatedly between two transactions. Raises Fenced, TransactionFailed, LogUnavailable."""
        now = asyncio.get_running_loop().time()
        commits = {place: commit.keeping(self._said.get(place)) for place, commit in commits.items()}
        if (last or now - self._said_at >= REACHED_EVERY_S) and not commits.items() <= self._said.items():
            self._said |= commits
            self._said_at = now
            await self._commit()

    async def say_in_time(self, commits: Callable[[], Mapping[Partition, Commit]]) -> None:
        """`say` what `commits` returns, which is called once in REACHED_EVERY_S: it may cost more than a poll."""
        now = asyncio.get_running_loop().time()
        if now - self._computed_at >= REACHED_EVERY_S:
            self._computed_at = now
            await self.say(commits())

    async def leave(self) -> None:
        """Report a lag of zero, whatever is appended, until the next `say`. Raises the errors of `say`."""
        left = {place: Commit.low_water(commit.offset, high=FOR_EVER) for place, commit in self._said.items()}
        await self.say(left, last=True)

    async def _commit(self) -> None:
        await self._transactor.begin()
        await self._transactor.offsets(self._group, self._said)
        await self._transactor.commit()
