"""What every aiokafka client of one KafkaLog shares: where the cluster is, the prefix of names, limits, typed errors.

aiokafka stays within the modules `infra.kafka*`. (confluent-kafka was weighed: two to three times the throughput, but
callbacks on its own thread, and no asyncio consumer groups whose listeners can be awaited.)
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
"""Kafka's default `offset.metadata.max.bytes`. Above it a broker's refusal kills the whole transactional producer."""
REQUEST_TIMEOUT_MS = 40_000
"""Of one request; the broker's long polls and the append of a large batch stay below."""
ANSWER_TIMEOUT_S = 60.0
"""After that an acknowledgement counts as lost (LogUnavailable): a broker restart after kill -9 takes up to 12 s."""
UNSEEN = "run `turnlog topics apply`, or give this principal Describe on it (`turnlog topics acls`)"
"""Of a topic that is not there: Kafka hides those that one may not see."""
DENIED = "this principal has no such ACL on {}; `turnlog topics acls` prints those that each role needs"
DENIALS: dict[type[KafkaError], tuple[type[NotAuthorized], str]] = {
    TopicAuthorizationFailedError: (TopicNotAuthorized, "this topic"),
    GroupAuthorizationFailedError: (GroupNotAuthorized, "this group"),
    TransactionalIdAuthorizationFailed: (TransactionalIdNotAuthorized, "this transactional id"),
    ClusterAuthorizationFailedError: (ClusterNotAuthorized, "the cluster"),
}
CONNECT_S, QUICK_S = 5.0, 10.0
"""Within which a broker that lives opens a connection, and says where leaders and coordinators are."""
SILENT_S, GLANCE_S = 10.0, 0.5
"""One that did not is given no more than a glance for so long: the clients of a process ask it one after another."""
RETRY_S = 0.05
"""Between two looks at a coordinator that loads, at offsets of an open transaction, at a topic that comes or goes: none
can be awaited."""
CLOSE_TIMEOUT_S = 10.0
"""Closing flushes; a broker that is gone must not hold a process up for longer."""

# The markers of a transaction are written after its commit is answered (KAFKA-5477). Until then the next transaction's
# first send is told CONCURRENT_TRANSACTIONS and waits this long. Measured with 10 records per transaction: aiokafka's
# 20 ms give 36 transactions/s, 2 ms give 92.
aiokafka.producer.sender.BACKOFF_OVERRIDE = 0.002


def _retrieved() -> asyncio.Future[Any]:
    """A future whose error is retrieved. aiokafka fails batches that nobody waits for and replaces waiters that have
    failed (a producer is fenced, a transaction times out), and asyncio would report each when it is collected. What is
    sent has a future of ours beside (kafka_producers.answered), which has the error, too."""
    future = asyncio.get_running_loop().create_future()
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


aiokafka.producer.message_accumulator.create_future = _retrieved
aiokafka.producer.transaction_manager.create_future = _retrieved


SECONDS = Counter("turnlog_kafka_throttled_seconds", "For how long a quota held this process back", ["request"])
THROTTLED = {ProduceRequest: SECONDS.labels("produce"), FetchRequest: SECONDS.labels("fetch")}

# What follows keeps one broker of several from taking a client down with it: aiokafka waits for a broker that accepts
# connections and says nothing (stopped, cut off) as long as an append may take, with its only lock held.
QUICK = (MetadataRequest, FindCoordinatorRequest, DescribeConfigsRequest)
_connect, _request = aiokafka.client.create_conn, AIOKafkaConnection.send
_ask, _look_up = AIOKafkaClient.send, AIOKafkaClient.coordinator_lookup
_wait_on_metadata, _bootstrap = AIOKafkaClient._wait_on_metadata, AIOKafkaClient.bootstrap
_update_metadata = AIOKafkaClient.force_metadata_update
_bootstrapping: ContextVar[list[AIOKafkaConnection] | None] = ContextVar("connections of a bootstrap", default=None)
_closed: WeakSet[AIOKafkaClient] = WeakSet()
"""Clients that make no connection any more."""
_silent: dict[tuple[str, int], float] = {}
"""Until when a broker counts as silent, by the monotonic clock."""


async def _connected(host: str, port: int, **how: Any) -> AIOKafkaConnection:
    """A connection, within CONNECT_S: the client opens no other one meanwhile."""
    owner = getattr(how.get("on_close"), "__self__", None)
    if owner in _closed:
        # A background task outlived its client's close, which a time limit cuts off. Any other error it would try
        # again after, for ever.
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
    except Exception as error:  # aiokafka's background tasks end over any other, and never start again
        raise KafkaConnectionError(f"{host}:{port}: {error!r}") from error
    if owner in _closed:
        await made.close(reason=CloseReason.SHUTDOWN)
        raise asyncio.CancelledError
    opened = _bootstrapping.get()
    if opened is not None and how.get("on_close") is None:  # tasks that a bootstrap starts inherit its context
        opened.append(made)
    return made


def _requested(connection: AIOKafkaConnection, request: Any, expect_response: bool = True) -> Awaitable[Any]:
    """What every broker says at once: of one that does not, another is asked. And what a quota may hold back.

    uvloop's transport raises a bare RuntimeError once its connection is lost, where asyncio's raises an OSError or
    nothing: aiokafka retries only what is an OSError or an error of its own."""
    try:
        answer: Awaitable[Any] = _request(connection, request, expect_response)
    except KafkaError:
        raise
    except RuntimeError as lost:
        connection.close(reason=CloseReason.CONNECTION_BROKEN, exc=lost)
        raise KafkaConnectionError(f"Connection at {connection.host}:{connection.port} broken: {lost}") from lost
    if isinstance(request, QUICK):
        return _quick(connection, answer)
    return _throttled(answer, THROTTLED[type(request)]) if type(request) in THROTTLED else answer


async def _throttled(answer: Awaitable[Any], seconds: Counter) -> Any:
    """The answer. Until its quota allows, the broker reads nothing more of this connection (KIP-219)."""
    said = await answer
    if milliseconds := getattr(said, "throttle_time_ms", 0):  # without acknowledgements there is no answer
        seconds.inc(milliseconds / 1000)
    return said


async def _quick(connection: AIOKafkaConnection, answer: Awaitable[Any]) -> Any:
    try:
        async with asyncio.timeout(QUICK_S):
            return await answer
    except TimeoutError:
        connection.close(reason=CloseReason.CONNECTION_TIMEOUT)  # or the next question takes the same way
        raise


async def _asked(
    client: AIOKafkaClient, node_id: int, request: Any, *, group: ConnectionGroup = ConnectionGroup.DEFAULT
) -> Any:
    """When two requests of one connection time out, the second finds it gone: a KeyError, which ends the sender."""
    try:
        return await _ask(client, node_id, request, group=group)
    except KeyError as gone:
        if (node_id, group) in client._conns:
            raise
        raise RequestTimedOutError from gone


async def _bootstrapped(client: AIOKafkaClient) -> None:
    """aiokafka leaves the connection open over which it asks for the cluster's first metadata, if it is cancelled
    meanwhile: every start that a time limit cuts off would leak one."""
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
    """Whether it was, from the task that updates it. Of a closed client that task has ended, and whoever waits for it
    is cancelled."""
    if client not in _closed:
        waiting: Awaitable[bool] = _update_metadata(client)
        return waiting
    never = asyncio.get_running_loop().create_future()
    never.cancel()
    return never


async def _looked_up(client: AIOKafkaClient, kind: CoordinationType, key: str) -> int:
    """The broker that was asked may go down over it, or none may be known while all restart. aiokafka's sender ends
    then; what it asks again after is this."""
    try:
        found: int = await _look_up(client, kind, key)
    except (KafkaConnectionError, AssertionError) as gone:
        raise CoordinatorNotAvailableError(str(gone)) from gone
    return found


async def _waited_for(client: AIOKafkaClient, topic: str) -> Any:
    """The numbers of its partitions. aiokafka takes a topic for missing of which no broker told it in time, also when
    no broker answers at all."""
    try:
        return await _wait_on_metadata(client, topic)
    except UnknownTopicOrPartitionError as unknown:
        if await client.force_metadata_update():
            raise
        raise KafkaTimeoutError(f"no broker tells the partitions of {topic}") from unknown


aiokafka.client.create_conn = _connected
AIOKafkaConnection.send = _requested
AIOKafkaClient.send = _asked
AIOKafkaClient.coordinator_lookup = _looked_up
AIOKafkaClient._wait_on_metadata = _waited_for
AIOKafkaClient.bootstrap = _bootstrapped
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
    """DescribeLogDirs 1 (KIP-113), which aiokafka has not."""

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
    """ListTransactions 0 (KIP-664), which aiokafka has not."""

    API_KEY = 66

    def build(self, request_struct_class: type[_AskTransactions]) -> _AskTransactions:
        return request_struct_class([], [], {})


class Admin(AIOKafkaAdminClient):  # type: ignore[misc]
    """Puts a question that every broker answers to another one when the first is away: aiokafka's own asks one at
    random, of those that were there when it last looked. Names are full ones."""

    async def members(self, group: str) -> tuple[str, ...]:
        """CLIENT at HOST of each. One group a question: aiokafka reads version 3 by the schema of version 2, which
        loses its place behind the first."""

        async def ask(coordinator: int) -> tuple[str, ...]:
            (answer,) = await self.describe_consumer_groups([group], coordinator)
            code, *_, members = answer.groups[0][:6]
            if code:
                raise for_code(code)(f"group {group}")
            return tuple(f"{client} at {host.lstrip('/')}" for _, client, host, *_ in members)

        return await self._of_coordinator(group, ask)

    async def forget(self, group: str) -> None:
        """Delete what a group has committed; of one that is not known, nothing happens."""

        async def ask(coordinator: int) -> None:
            for _, code in (await self._send_request(DeleteGroupsRequest([group]), coordinator)).results:
                if code and for_code(code) is not GroupIdNotFound:
                    raise for_code(code)(f"group {group}")

        await self._of_coordinator(group, ask)

    async def sizes(self, counts: Mapping[str, int]) -> dict[str, int]:
        """Topic -> bytes of all its copies, of brokers that tell it to this principal. `counts`: of partitions."""
        found: dict[str, int] = {}
        for answer in await self._of_all(_LogDirs(counts)):
            for _, _, topics in answer.results:
                for name, partitions in topics:
                    found[name] = found.get(name, 0) + sum(size for _, size, *_ in partitions)
        return found

    async def transactional_ids(self) -> set[str]:
        """Those that a broker knows and this principal may see."""
        return {found for answer in await self._of_all(_ListTransactions()) for found, *_ in answer.states}

    async def _of_coordinator(self, group: str, ask: Callable[[int], Awaitable[T]]) -> T:
        """Once it has loaded the group."""
        while True:
            try:
                return await ask(await self.find_coordinator(group))
            except KafkaError as error:
                if not error.retriable:
                    raise
            await asyncio.sleep(RETRY_S)

    async def _of_all(self, request: Any) -> list[Any]:
        """What each broker answers."""
        return [await self._send_request(request, broker.nodeId) for broker in self._client.cluster.brokers()]

    async def _send_request(self, request: Any, node_id: int | None = None) -> Any:
        if node_id is not None:
            return await super()._send_request(request, node_id)
        nodes = [broker.nodeId for broker in self._client.cluster.brokers()]
        if not nodes:
            raise NodeNotReadyError("the broker that answered knows of none yet")
        *others, last = random.sample(nodes, len(nodes))
        for other in others:
            with suppress(NodeNotReadyError, RequestTimedOutError, KafkaConnectionError, TimeoutError):
                return await super()._send_request(request, other)
        return await super()._send_request(request, last)


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """Time-outs of a member of a consumer group, in milliseconds (KIP-62)."""

    session_ms: int = 6_000
    """A member that was killed holds its units for this long (the least that brokers allow by default)."""
    heartbeat_ms: int = 1_000
    rebalance_ms: int = 60_000
    """How long the group waits for a member that works on a batch to come back to poll()."""
    max_poll_interval_ms: int = 300_000
    """A member that does not poll for longer loses its units."""
    metadata_ms: int = 30_000
    """How old what a reader knows of topics may be: partitions that were added are seen so late."""


@dataclass(frozen=True, slots=True)
class Connection:
    """Where the cluster is, what our names are prefixed with there, how patient groups are with their members, and how
    we log in."""

    bootstrap: str
    prefix: str = ""
    membership: Membership = Membership()
    login: Login = field(default_factory=lambda: Login(KafkaSettings()))
    answer_s: float = ANSWER_TIMEOUT_S
    close_s: float = CLOSE_TIMEOUT_S
    role: str = ""
    """Under whose name bytes are counted."""
    request_ms: int = REQUEST_TIMEOUT_MS
    """How long aiokafka waits for the answer to one request."""

    def options(self) -> dict[str, Any]:
        """What every aiokafka client of it is made with. Raises TlsFailed."""
        return {"bootstrap_servers": self.bootstrap, "request_timeout_ms": self.request_ms, **self.login.options()}

    def unanswered(self, doing: str, said: str = "no answer") -> LogUnreachable:
        """The error of what no broker did: what the login was refused for, if it was."""
        if self.login.refused is not None:
            kind, why = self.login.refused
            return kind(f"{doing}: {why}")
        return LogUnreachable(
            f"{doing}: {said}; check [kafka] bootstrap ({self.bootstrap}) and security_protocol "
            f"({self.login.kafka.security_protocol})"
        )

    def full(self, name: str) -> str:
        """The name on the cluster of a topic, group or transactional id."""
        return self.prefix + name

    def short(self, name: str) -> str:
        """The inverse of `full`."""
        return name[len(self.prefix) :]

    def place(self, partition: Partition) -> TopicPartition:
        """aiokafka's name of a partition."""
        return TopicPartition(self.prefix + partition.topic, partition.number)

    def commits(self, commits: Mapping[Partition, Commit]) -> dict[TopicPartition, OffsetAndMetadata]:
        """Commits as aiokafka takes them. Raises Oversized, which would end a transactional producer if sent."""
        for partition, commit in commits.items():
            size = len(commit.metadata.encode())
            if size > METADATA_LIMIT_BYTES:
                raise Oversized(
                    f"{partition.topic}[{partition.number}]: commit metadata of {size} bytes; "
                    f"the broker takes {METADATA_LIMIT_BYTES} (offset.metadata.max.bytes)"
                )
        return {self.place(name): OffsetAndMetadata(commit.offset, commit.metadata) for name, commit in commits.items()}


@contextmanager
def typed(connection: Connection, doing: str) -> Iterator[None]:
    """Turn whatever a call of aiokafka raises into the tree of `infra.log`; `doing` says what, where. What asyncio,
    uvloop or ssl raise under it means that the connection was lost."""
    try:
        yield
    except LogError:
        raise
    except TimeoutError as error:
        raise connection.unanswered(doing) from error
    except KafkaError as error:
        raise typed_error(connection, doing, error) from error
    except (OSError, EOFError, RuntimeError) as error:
        raise connection.unanswered(doing, repr(error)) from error
    except Exception as error:
        raise LogUnavailable(f"{doing}: aiokafka failed by {error!r}") from error


@asynccontextmanager
async def parting(connection: Connection, client: AIOKafkaClient | None = None) -> AsyncIterator[None]:
    """For what is said to a broker at the end of a block, within `close_s`. A broker that is gone must not hide the
    error that ends the block; it finds out by itself that we have left. `client` has no connection afterwards: what
    stops it closes them last, and may not come so far."""
    try:
        async with asyncio.timeout(connection.close_s):
            yield
    except Exception as error:
        log.info("a client of %s left without a goodbye: %r", connection.bootstrap, error)
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
    """The error of our tree for one of aiokafka's; its cause decides where the client wrapped it in its base class."""
    reason = error
    while type(reason) is KafkaError and isinstance(reason.__cause__, KafkaError):
        reason = reason.__cause__
    said = f"{doing}: {type(reason).__name__} {reason}".rstrip()
    if type(reason) in DENIALS:
        denied, what = DENIALS[type(reason)]
        return denied(f"{doing}: {DENIED.format(what)}")
    match reason:
        case ProducerFenced() | InvalidProducerEpoch():
            return Fenced(f"{doing}: a newer owner started, or the transaction timed out; this process must end")
        case CommitFailedError():
            return Fenced(f"{doing}: the group went on without this member; this process must end")
        case UnknownTopicOrPartitionError():
            return TopicMissing(f"{doing}: no such topic or partition; {UNSEEN}")
        case InvalidTimestampError():
            return ClockRefused(
                f"{doing}: this machine's clock is too far from the broker's for it to take records "
                "(message.timestamp.after.max.ms, message.timestamp.before.max.ms): set both by NTP"
            )
        case OutOfRange():
            return OffsetOutOfRange(said)
        case MessageSizeTooLargeError() | RecordTooLargeError() | OffsetMetadataTooLargeError():
            return Oversized(
                f"{said}; a record takes {MAX_MESSAGE_BYTES} bytes at most: put what is larger into the object store "
                "and name it by a BlobRef"
            )
        case _:
            # Its base class without a cause is what the client says when no broker gave it the metadata.
            bare = type(reason) is KafkaError and reason.__cause__ is None
            if reason.retriable or bare or isinstance(reason, KafkaTimeoutError):
                return connection.unanswered(doing, f"{type(reason).__name__} {reason}".rstrip())
            return LogUnavailable(f"{said}: the broker at {connection.bootstrap} refuses it")
