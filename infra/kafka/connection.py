"""The connection settings, limits and typed errors that all aiokafka clients of a KafkaLog share.

aiokafka is imported only within `infra.kafka`. (confluent-kafka was considered: it has two to three times the
throughput, but runs callbacks on its own thread and has no asyncio consumer groups whose listeners can be awaited.)
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakSet

import aiokafka.client
import aiokafka.producer.message_accumulator
import aiokafka.producer.sender
import aiokafka.producer.transaction_manager
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.client import AIOKafkaClient, ConnectionGroup, CoordinationType
from aiokafka.conn import AIOKafkaConnection, CloseReason
from aiokafka.errors import (
    ClusterAuthorizationFailedError,
    CommitFailedError,
    CoordinatorNotAvailableError,
    GroupAuthorizationFailedError,
    GroupIdNotFound,
    InvalidProducerEpoch,
    InvalidTimestampError,
    KafkaConnectionError,
    KafkaError,
    KafkaTimeoutError,
    MessageSizeTooLargeError,
    NodeNotReadyError,
    OffsetMetadataTooLargeError,
    ProducerFenced,
    RecordTooLargeError,
    RequestTimedOutError,
    TopicAuthorizationFailedError,
    TransactionalIdAuthorizationFailed,
    UnknownTopicOrPartitionError,
    for_code,
)
from aiokafka.errors import OffsetOutOfRangeError as OutOfRange
from aiokafka.protocol.admin import DeleteGroupsRequest, DescribeConfigsRequest
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.coordination import FindCoordinatorRequest
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.protocol.types import (
    Array,
    Boolean,
    CompactArray,
    CompactString,
    Int16,
    Int32,
    Int64,
    Schema,
    String,
    TaggedFields,
)
from aiokafka.structs import OffsetAndMetadata
from prometheus_client import Counter

from turnlog.infra.kafka.security import Login
from turnlog.infra.log import (
    ClockRefused,
    ClusterNotAuthorized,
    Commit,
    Fenced,
    GroupNotAuthorized,
    LogError,
    LogUnavailable,
    LogUnreachable,
    NotAuthorized,
    OffsetOutOfRange,
    Oversized,
    Partition,
    TopicMissing,
    TopicNotAuthorized,
    TransactionalIdNotAuthorized,
)
from turnlog.kafka_settings import KafkaSettings
from turnlog.schemas.topics import MAX_MESSAGE_BYTES

log = logging.getLogger(__name__)
T = TypeVar("T")
METADATA_LIMIT_BYTES = 4096
"""Kafka's default `offset.metadata.max.bytes`. A broker's refusal of larger metadata kills the whole transactional
producer."""
REQUEST_TIMEOUT_MS = 40_000
"""Time-out of one request in milliseconds. The broker's long polls and the append of a large batch take less."""
ANSWER_TIMEOUT_S = 60.0
"""Seconds after which an acknowledgement counts as lost (LogUnavailable). A broker restart after kill -9 takes up to
12 s."""
UNSEEN = "run `turnlog topics apply`, or grant this principal Describe on it (`turnlog topics acls`)"
"""Remedy for a missing topic. Kafka also hides topics that the principal may not see."""
DENIED = "this principal lacks the ACL for this on {}; `turnlog topics acls` prints the ACLs that each role needs"
DENIALS: dict[type[KafkaError], tuple[type[NotAuthorized], str]] = {
    TopicAuthorizationFailedError: (TopicNotAuthorized, "this topic"),
    GroupAuthorizationFailedError: (GroupNotAuthorized, "this group"),
    TransactionalIdAuthorizationFailed: (TransactionalIdNotAuthorized, "this transactional id"),
    ClusterAuthorizationFailedError: (ClusterNotAuthorized, "the cluster"),
}
CONNECT_S, QUICK_S = 5.0, 10.0
"""Seconds within which a live broker opens a connection, and answers a request for leaders or coordinators."""
SILENT_S, GLANCE_S = 10.0, 0.5
"""A broker that failed to connect in time gets only GLANCE_S per connection attempt for SILENT_S. Otherwise the clients
of a process would wait CONNECT_S for it one after another."""
RETRY_S = 0.05
"""Seconds between two checks of a coordinator that is loading, of offsets of an open transaction, or of a topic that is
being created or deleted. Kafka offers no way to await any of these."""
CLOSE_TIMEOUT_S = 10.0
"""Maximum seconds for closing a client. Closing flushes, and a broker that is gone must not delay a process further."""

# The markers of a transaction are written after its commit is answered (KAFKA-5477). Until then the first send of the
# next transaction gets CONCURRENT_TRANSACTIONS and waits this long. Measured with 10 records per transaction:
# aiokafka's 20 ms give 36 transactions/s, 2 ms give 92.
aiokafka.producer.sender.BACKOFF_OVERRIDE = 0.002


def _silent_future() -> asyncio.Future[Any]:
    """Return a future whose exception is always retrieved.

    aiokafka fails batches that nobody waits for, and replaces waiters that have failed (a producer is fenced, a
    transaction times out); asyncio would report each of them at garbage collection. No error is lost: every record sent
    also has a future of our own (`infra.kafka.producers.answered`).
    """
    future = asyncio.get_running_loop().create_future()
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


aiokafka.producer.message_accumulator.create_future = _silent_future
aiokafka.producer.transaction_manager.create_future = _silent_future


SECONDS = Counter("turnlog_kafka_throttled_seconds", "Seconds for which a quota throttled this process", ["request"])
THROTTLED = {ProduceRequest: SECONDS.labels("produce"), FetchRequest: SECONDS.labels("fetch")}

# The patches below keep one unresponsive broker from blocking a client. aiokafka waits for a broker that accepts
# connections but does not answer (stopped, cut off) for as long as an append may take, while it holds its only lock.
QUICK = (MetadataRequest, FindCoordinatorRequest, DescribeConfigsRequest)
_connect, _request = aiokafka.client.create_conn, AIOKafkaConnection.send
_ask, _look_up = AIOKafkaClient.send, AIOKafkaClient.coordinator_lookup
_wait_on_metadata, _bootstrap = AIOKafkaClient._wait_on_metadata, AIOKafkaClient.bootstrap
_update_metadata = AIOKafkaClient.force_metadata_update
_bootstrapping: ContextVar[list[AIOKafkaConnection] | None] = ContextVar("connections of a bootstrap", default=None)
_closed: WeakSet[AIOKafkaClient] = WeakSet()
"""Clients that have been closed and must open no new connection."""
_silent: dict[tuple[str, int], float] = {}
"""(host, port) -> time on the monotonic clock until which the broker counts as silent."""


async def _open_connection(host: str, port: int, **how: Any) -> AIOKafkaConnection:
    """Open a connection within CONNECT_S; the client opens no other one meanwhile."""
    owner = getattr(how.get("on_close"), "__self__", None)
    if owner in _closed:
        # A background task outlived the close of its client, which a time limit cuts off. After any other error it
        # would retry for ever.
        raise asyncio.CancelledError
    glance = time.monotonic() < _silent.get((host, port), 0.0)
    try:
        async with asyncio.timeout(GLANCE_S if glance else CONNECT_S):
            made: AIOKafkaConnection = await _connect(host, port, **how)
    except TimeoutError:
        if not glance:
            _silent[host, port] = time.monotonic() + SILENT_S
        raise
    except (OSError, KafkaError):
        raise
    except Exception as error:  # any other exception would end aiokafka's background tasks, which never start again
        raise KafkaConnectionError(f"{host}:{port}: {error!r}") from error
    if owner in _closed:
        await made.close(reason=CloseReason.SHUTDOWN)
        raise asyncio.CancelledError
    opened = _bootstrapping.get()
    if opened is not None and how.get("on_close") is None:  # tasks started by a bootstrap inherit its context
        opened.append(made)
    return made


def _send_with_timeout(connection: AIOKafkaConnection, request: Any, expect_response: bool = True) -> Awaitable[Any]:
    """Send a request. Requests that a live broker answers at once time out after QUICK_S, so that the client tries
    another broker. Throttling by quotas is counted.

    uvloop's transport raises a bare RuntimeError after its connection is lost, where asyncio's raises an OSError or
    nothing. It is converted to KafkaConnectionError, because aiokafka retries only OSErrors and its own errors.
    """
    try:
        answer: Awaitable[Any] = _request(connection, request, expect_response)
    except KafkaError:
        raise
    except RuntimeError as lost:
        connection.close(reason=CloseReason.CONNECTION_BROKEN, exc=lost)
        raise KafkaConnectionError(f"Connection at {connection.host}:{connection.port} broken: {lost}") from lost
    if isinstance(request, QUICK):
        return _quick(connection, answer)
    return _count_throttling(answer, THROTTLED[type(request)]) if type(request) in THROTTLED else answer


async def _count_throttling(answer: Awaitable[Any], seconds: Counter) -> Any:
    """Return the answer and count its throttle time, during which the broker reads nothing more from this connection
    (KIP-219)."""
    said = await answer
    if milliseconds := getattr(said, "throttle_time_ms", 0):  # with acks=0 there is no answer
        seconds.inc(milliseconds / 1000)
    return said


async def _quick(connection: AIOKafkaConnection, answer: Awaitable[Any]) -> Any:
    try:
        async with asyncio.timeout(QUICK_S):
            return await answer
    except TimeoutError:
        connection.close(reason=CloseReason.CONNECTION_TIMEOUT)  # otherwise the next request would use it, too
        raise


async def _send_to_node(
    client: AIOKafkaClient, node_id: int, request: Any, *, group: ConnectionGroup = ConnectionGroup.DEFAULT
) -> Any:
    """Send a request, and raise RequestTimedOutError if its connection is already gone. If two requests on one
    connection time out, aiokafka raises KeyError for the second, which would end its sender task."""
    try:
        return await _ask(client, node_id, request, group=group)
    except KeyError as gone:
        if (node_id, group) in client._conns:
            raise
        raise RequestTimedOutError from gone


async def _bootstrap_client(client: AIOKafkaClient) -> None:
    """Bootstrap the client, and close its connections on failure. If cancelled, aiokafka leaves the connection open
    over which it requests the first metadata, so every start that a time limit cuts off would leak one."""
    opened: list[AIOKafkaConnection] = []
    token = _bootstrapping.set(opened)
    try:
        await _bootstrap(client)
    except BaseException:
        for connection in opened:
            connection.close(reason=CloseReason.SHUTDOWN)
        raise
    finally:
        _bootstrapping.reset(token)


def _metadata_updated(client: AIOKafkaClient) -> Awaitable[bool]:
    """Request a metadata update and return whether it succeeded. A closed client's update task has ended, so its
    callers get a cancelled future instead of waiting for ever."""
    if client not in _closed:
        waiting: Awaitable[bool] = _update_metadata(client)
        return waiting
    never = asyncio.get_running_loop().create_future()
    never.cancel()
    return never


async def _looked_up(client: AIOKafkaClient, kind: CoordinationType, key: str) -> int:
    """Find a coordinator. The broker asked may go down during the request, or no broker may be known while all restart.
    aiokafka's sender ends on either error, but retries after CoordinatorNotAvailableError."""
    try:
        found: int = await _look_up(client, kind, key)
    except (KafkaConnectionError, AssertionError) as gone:
        raise CoordinatorNotAvailableError(str(gone)) from gone
    return found


async def _waited_for(client: AIOKafkaClient, topic: str) -> Any:
    """Return the partition numbers of `topic`. aiokafka reports a topic as missing if no broker described it in time,
    even if no broker answers at all. That case raises KafkaTimeoutError here."""
    try:
        return await _wait_on_metadata(client, topic)
    except UnknownTopicOrPartitionError as unknown:
        if await client.force_metadata_update():
            raise
        raise KafkaTimeoutError(f"no broker reports the partitions of {topic}") from unknown


aiokafka.client.create_conn = _open_connection
AIOKafkaConnection.send = _send_with_timeout
AIOKafkaClient.send = _send_to_node
AIOKafkaClient.coordinator_lookup = _looked_up
AIOKafkaClient._wait_on_metadata = _waited_for
AIOKafkaClient.bootstrap = _bootstrap_client
AIOKafkaClient.force_metadata_update = _metadata_updated


class _Sizes(Response):  # type: ignore[misc]
    API_KEY = 35
    API_VERSION = 1
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("results", Array(
            ("error_code", Int16), ("folder", String("utf-8")),
            ("topics", Array(("topic", String("utf-8")), ("partitions", Array(
                ("partition", Int32), ("size", Int64), ("lag", Int64), ("is_future", Boolean),
            )))),
        )),
    )  # fmt: skip


class _AskSizes(RequestStruct):  # type: ignore[misc]
    API_KEY = 35
    API_VERSION = 1
    RESPONSE_TYPE = _Sizes
    SCHEMA = Schema(("topics", Array(("topic", String("utf-8")), ("partitions", Array(Int32)))))


class _LogDirs(Request[_AskSizes]):  # type: ignore[misc]
    """DescribeLogDirs version 1 (KIP-113), which aiokafka lacks."""

    API_KEY = 35

    def __init__(self, counts: Mapping[str, int]) -> None:
        self._topics = [(name, list(range(count))) for name, count in counts.items()]

    def build(self, request_struct_class: type[_AskSizes]) -> _AskSizes:
        return request_struct_class(self._topics)


class _Transactions(Response):  # type: ignore[misc]
    API_KEY = 66
    API_VERSION = 0
    SCHEMA = Schema(
        ("throttle_time_ms", Int32), ("error_code", Int16), ("unknown", CompactArray(CompactString("utf-8"))),
        ("states", CompactArray(
            ("id", CompactString("utf-8")), ("producer", Int64), ("state", CompactString("utf-8")),
            ("tags", TaggedFields),
        )),
        ("tags", TaggedFields),
    )  # fmt: skip


class _AskTransactions(RequestStruct):  # type: ignore[misc]
    API_KEY = 66
    API_VERSION = 0
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _Transactions
    SCHEMA = Schema(
        ("states", CompactArray(CompactString("utf-8"))), ("producers", CompactArray(Int64)), ("tags", TaggedFields)
    )


class _ListTransactions(Request[_AskTransactions]):  # type: ignore[misc]
    """ListTransactions version 0 (KIP-664), which aiokafka lacks."""

    API_KEY = 66

    def build(self, request_struct_class: type[_AskTransactions]) -> _AskTransactions:
        return request_struct_class([], [], {})


class Admin(AIOKafkaAdminClient):  # type: ignore[misc]
    """Admin client that retries a request at another broker if the first one is away.

    aiokafka's own client asks one random broker among those of its last metadata update. All names are full names.
    """

    async def members(self, group: str) -> tuple[str, ...]:
        """Return "CLIENT at HOST" for each member of `group`. Only one group per request: aiokafka parses version 3
        with the schema of version 2 and misreads everything after the first group."""

        async def ask(coordinator: int) -> tuple[str, ...]:
            (answer,) = await self.describe_consumer_groups([group], coordinator)
            code, *_, members = answer.groups[0][:6]
            if code:
                raise for_code(code)(f"group {group}")
            return tuple(f"{client} at {host.lstrip('/')}" for _, client, host, *_ in members)

        return await self._of_coordinator(group, ask)

    async def forget(self, group: str) -> None:
        """Delete the committed offsets of `group`. An unknown group is ignored."""

        async def ask(coordinator: int) -> None:
            for _, code in (await self._send_request(DeleteGroupsRequest([group]), coordinator)).results:
                if code and for_code(code) is not GroupIdNotFound:
                    raise for_code(code)(f"group {group}")

        await self._of_coordinator(group, ask)

    async def sizes(self, counts: Mapping[str, int]) -> dict[str, int]:
        """Return topic -> bytes of all replicas, as reported by the brokers that let this principal see them. `counts`
        maps each topic to its number of partitions."""
        found: dict[str, int] = {}
        for answer in await self._of_all(_LogDirs(counts)):
            for _, _, topics in answer.results:
                for name, partitions in topics:
                    found[name] = found.get(name, 0) + sum(size for _, size, *_ in partitions)
        return found

    async def transactional_ids(self) -> set[str]:
        """Return the transactional ids that brokers know and this principal may see."""
        return {found for answer in await self._of_all(_ListTransactions()) for found, *_ in answer.states}

    async def _of_coordinator(self, group: str, ask: Callable[[int], Awaitable[T]]) -> T:
        """Call `ask` with the group's coordinator, and retry on retriable errors, such as a coordinator that is still
        loading."""
        while True:
            try:
                return await ask(await self.find_coordinator(group))
            except KafkaError as error:
                if not error.retriable:
                    raise
            await asyncio.sleep(RETRY_S)

    async def _of_all(self, request: Any) -> list[Any]:
        """Send the request to every broker and return all answers."""
        return [await self._send_request(request, broker.nodeId) for broker in self._client.cluster.brokers()]

    async def _send_request(self, request: Any, node_id: int | None = None) -> Any:
        if node_id is not None:
            return await super()._send_request(request, node_id)
        nodes = [broker.nodeId for broker in self._client.cluster.brokers()]
        if not nodes:
            raise NodeNotReadyError("the broker that answered does not know any brokers yet")
        *others, last = random.sample(nodes, len(nodes))
        for other in others:
            with suppress(NodeNotReadyError, RequestTimedOutError, KafkaConnectionError, TimeoutError):
                return await super()._send_request(request, other)
        return await super()._send_request(request, last)


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """Time-outs of a member of a consumer group, in milliseconds (KIP-62)."""

    session_ms: int = 6_000
    """Session time-out: a killed member keeps its partition tasks for this long. Brokers allow no less by default."""
    heartbeat_ms: int = 1_000
    rebalance_ms: int = 60_000
    """Time that the group waits for a member that works on a batch to return to poll()."""
    max_poll_interval_ms: int = 300_000
    """Maximum time between polls; a slower member loses its partition tasks."""
    metadata_ms: int = 30_000
    """Maximum age of a reader's topic metadata, hence the delay until it sees added partitions."""


@dataclass(frozen=True, slots=True)
class Connection:
    """Address, name prefix, group time-outs and login of one cluster."""

    bootstrap: str
    prefix: str = ""
    membership: Membership = Membership()
    login: Login = field(default_factory=lambda: Login(KafkaSettings()))
    answer_s: float = ANSWER_TIMEOUT_S
    close_s: float = CLOSE_TIMEOUT_S
    role: str = ""
    """Role under whose name bytes are counted."""
    request_ms: int = REQUEST_TIMEOUT_MS
    """Time-out of one request in milliseconds."""

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments common to all aiokafka clients. Raises TlsFailed."""
        return {"bootstrap_servers": self.bootstrap, "request_timeout_ms": self.request_ms, **self.login.options()}

    def unanswered_error(self, doing: str, said: str = "no answer") -> LogUnreachable:
        """Return the error for an operation that no broker answered. If the login was refused, it states the reason."""
        if self.login.refused is not None:
            kind, why = self.login.refused
            return kind(f"{doing}: {why}")
        return LogUnreachable(
            f"{doing}: {said}; check [kafka] bootstrap ({self.bootstrap}) and security_protocol "
            f"({self.login.kafka.security_protocol})"
        )

    def full(self, name: str) -> str:
        """Return the name on the cluster of a topic, group or transactional id."""
        return self.prefix + name

    def short(self, name: str) -> str:
        """Return the name without the prefix; the inverse of `full`."""
        return name[len(self.prefix) :]

    def place(self, partition: Partition) -> TopicPartition:
        """Convert a partition to aiokafka's type."""
        return TopicPartition(self.prefix + partition.topic, partition.number)

    def commits(self, commits: Mapping[Partition, Commit]) -> dict[TopicPartition, OffsetAndMetadata]:
        """Convert commits to aiokafka's type. Raises Oversized if metadata is too long; sending it would end a
        transactional producer."""
        for partition, commit in commits.items():
            size = len(commit.metadata.encode())
            if size > METADATA_LIMIT_BYTES:
                raise Oversized(
                    f"{partition.topic}[{partition.number}]: commit metadata of {size} bytes; the broker accepts at "
                    f"most {METADATA_LIMIT_BYTES} (offset.metadata.max.bytes)"
                )
        return {self.place(name): OffsetAndMetadata(commit.offset, commit.metadata) for name, commit in commits.items()}


@contextmanager
def convert_errors(connection: Connection, doing: str) -> Iterator[None]:
    """Convert every exception of an aiokafka call to the error tree of `infra.log`. `doing` states the action and its
    object. Exceptions of asyncio, uvloop or ssl mean that the connection was lost."""
    try:
        yield
    except LogError:
        raise
    except TimeoutError as error:
        raise connection.unanswered_error(doing) from error
    except KafkaError as error:
        raise typed_error(connection, doing, error) from error
    except (OSError, EOFError, RuntimeError) as error:
        raise connection.unanswered_error(doing, repr(error)) from error
    except Exception as error:
        raise LogUnavailable(f"{doing}: aiokafka failed with {error!r}") from error


@asynccontextmanager
async def parting(connection: Connection, client: AIOKafkaClient | None = None) -> AsyncIterator[None]:
    """Run a client's last requests, at the end of a block, within `close_s`, and log errors instead of raising them.

    A broker that is gone must not hide the error that ended the block, and it notices by itself that the client left.
    All connections of `client` are closed afterwards, because its own stop closes them last and may be cut off before
    that.
    """
    try:
        async with asyncio.timeout(connection.close_s):
            yield
    except Exception as error:
        log.info("a client of %s did not close cleanly: %r", connection.bootstrap, error)
    finally:
        if client is not None:
            _closed.add(client)
            if client._sync_task is not None:
                client._sync_task.cancel()
            if client._md_update_fut is not None:
                client._md_update_fut.cancel()  # the task that ended would have set it, and others wait for it
            for open_one in client._conns.values():
                open_one.close(reason=CloseReason.SHUTDOWN)


def typed_error(connection: Connection, doing: str, error: KafkaError) -> LogError:
    """Convert an error of aiokafka to the error tree of `infra.log`. If the client wrapped it in its base class, the
    cause decides."""
    reason = error
    while type(reason) is KafkaError and isinstance(reason.__cause__, KafkaError):
        reason = reason.__cause__
    said = f"{doing}: {type(reason).__name__} {reason}".rstrip()
    if type(reason) in DENIALS:
        denied, what = DENIALS[type(reason)]
        return denied(f"{doing}: {DENIED.format(what)}")
    match reason:
        case ProducerFenced() | InvalidProducerEpoch():
            return Fenced(f"{doing}: a newer owner started, or the transaction timed out; this process must exit")
        case CommitFailedError():
            return Fenced(f"{doing}: the consumer group continued without this member; this process must exit")
        case UnknownTopicOrPartitionError():
            return TopicMissing(f"{doing}: no such topic or partition; {UNSEEN}")
        case InvalidTimestampError():
            return ClockRefused(
                f"{doing}: this machine's clock differs too much from the broker's for it to accept records "
                "(message.timestamp.after.max.ms, message.timestamp.before.max.ms): synchronize both with NTP"
            )
        case OutOfRange():
            return OffsetOutOfRange(said)
        case MessageSizeTooLargeError() | RecordTooLargeError() | OffsetMetadataTooLargeError():
            return Oversized(
                f"{said}; a record may have at most {MAX_MESSAGE_BYTES} bytes: put larger content into the object "
                "store and refer to it by a BlobRef"
            )
        case _:
            # The client raises the bare base class if no broker gave it the metadata.
            bare = type(reason) is KafkaError and reason.__cause__ is None
            if reason.retriable or bare or isinstance(reason, KafkaTimeoutError):
                return connection.unanswered_error(doing, f"{type(reason).__name__} {reason}".rstrip())
            return LogUnavailable(f"{said}: refused by the broker at {connection.bootstrap}")
