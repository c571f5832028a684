"""All changes of turnlog to aiokafka's behaviour, as subclasses that only clients of turnlog instantiate.

Importing this module changes nothing for another user of aiokafka in the same process. aiokafka's classes find each
other through the globals of their modules, so a subclass alone would still create the original collaborators.
`_with_globals` copies a method of aiokafka so that it finds ours instead.

Each docstring names the fault of aiokafka that its change mends, and the upstream issue if one was found. Every fault
is present in 0.14.0 (the pinned version) and in the source of 0.15.0rc1; no release mends any of them yet.
tests/unit/infra/test_aiokafka_faults.py shows the faults on aiokafka's own classes. If a test there fails after an
update of aiokafka, delete the change that it names.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import random
import time
from collections.abc import Awaitable, Iterable
from contextlib import suppress
from types import FunctionType
from typing import Any

import aiokafka.conn
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.client import AIOKafkaClient, ConnectionGroup, CoordinationType
from aiokafka.conn import AIOKafkaConnection, CloseReason
from aiokafka.errors import (
    AuthenticationFailedError,
    CoordinatorNotAvailableError,
    KafkaConnectionError,
    KafkaError,
    KafkaTimeoutError,
    NodeNotReadyError,
    RequestTimedOutError,
    SaslAuthenticationFailed,
    UnknownTopicOrPartitionError,
)
from aiokafka.producer.message_accumulator import MessageAccumulator, MessageBatch
from aiokafka.producer.sender import AddPartitionsToTxnHandler, Sender
from aiokafka.producer.transaction_manager import TransactionManager
from aiokafka.protocol.admin import DescribeConfigsRequest, SaslAuthenticateRequest, SaslHandShakeRequest
from aiokafka.protocol.coordination import FindCoordinatorRequest
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.protocol.produce import ProduceRequest
from prometheus_client import Counter

from turnlog.infra.kafka.extra_requests import StaticGoodbye
from turnlog.infra.kafka.paced_fetcher import PacedFetcher
from turnlog.infra.kafka.security import SPENT, Login
from turnlog.infra.log import TlsFailed, TokenUnavailable
from turnlog.infra.roles.probe import is_loopback

log = logging.getLogger(__name__)
CONNECT_S, QUICK_S = 5.0, 10.0
"""Seconds within which a live broker opens a connection, and answers a request for leaders or coordinators."""
SILENT_S, GLANCE_S = 10.0, 0.5
"""A broker that failed to connect in time gets only GLANCE_S per connection attempt for SILENT_S. Otherwise the clients
of a process would wait CONNECT_S for it one after another."""
QUICK = {MetadataRequest, FindCoordinatorRequest, DescribeConfigsRequest}
"""Requests that a live broker answers at once. They are abstract base classes, whose isinstance costs 0.5 us."""
CLEAR = "Sending username and password in the clear"
"""Warning that aiokafka logs at each connection, whatever the host."""
CONCURRENT_S = 0.002
"""Seconds before the first send of a transaction is repeated. The markers of a transaction are written after its commit
is answered (KAFKA-5477); until then the next one gets CONCURRENT_TRANSACTIONS. Measured with 10 records per
transaction: aiokafka's constant of 20 ms gives 36 transactions/s, 2 ms give 92."""
SECONDS = Counter("turnlog_kafka_throttled_seconds", "Seconds for which a quota throttled this process", ["request"])
THROTTLED = {ProduceRequest: SECONDS.labels("produce"), FetchRequest: SECONDS.labels("fetch")}

_silent: dict[tuple[str, int], float] = {}
"""(host, port) -> time on the monotonic clock until which the broker counts as silent."""


def _with_globals(function: Any, **names: Any) -> Any:
    """Return a copy of a function of aiokafka that finds `names` instead of the globals of its module."""
    found = {**function.__globals__, **names}
    copied = FunctionType(function.__code__, found, None, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return functools.update_wrapper(copied, function)


class PromptConnection(AIOKafkaConnection):  # type: ignore[misc]
    """Connection on which an unresponsive broker cannot block a client, and which counts throttling.

    aiokafka has one time-out for all requests, which must be as long as an append may take, and reports nowhere for how
    long a quota throttled a request.
    """

    def send(self, request: Any, expect_response: bool = True) -> Awaitable[Any]:
        """Send a request. Requests that a live broker answers at once time out after QUICK_S, so that the client tries
        another broker.

        uvloop's transport raises a bare RuntimeError after its connection is lost, where asyncio's raises an OSError or
        nothing. It is converted to KafkaConnectionError, because aiokafka retries only OSErrors and its own errors
        (aio-libs/aiokafka#1038, open).
        """
        try:
            answer: Awaitable[Any] = super().send(request, expect_response)
        except KafkaError:
            raise
        except RuntimeError as lost:
            self.close(reason=CloseReason.CONNECTION_BROKEN, exc=lost)
            raise KafkaConnectionError(f"Connection at {self.host}:{self.port} broken: {lost}") from lost
        if type(request) in QUICK:
            return self._quick(answer)
        return _count_throttling(answer, THROTTLED[type(request)]) if type(request) in THROTTLED else answer

    async def _quick(self, answer: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(QUICK_S):
                return await answer
        except TimeoutError:
            self.close(reason=CloseReason.CONNECTION_TIMEOUT)  # otherwise the next request would use it, too
            raise


async def _count_throttling(answer: Awaitable[Any], seconds: Counter) -> Any:
    """Return the answer and count its throttle time, during which the broker reads nothing more from this connection
    (KIP-219)."""
    said = await answer
    if milliseconds := getattr(said, "throttle_time_ms", 0):  # with acks=0 there is no answer
        seconds.inc(milliseconds / 1000)
    return said


class _WithoutClear(logging.LoggerAdapter[logging.Logger]):
    """Logger of aiokafka's handshake that drops the warning CLEAR, which ours replaces."""

    def warning(self, msg: object, *args: object, **kwargs: Any) -> None:
        if msg != CLEAR:
            super().warning(msg, *args, **kwargs)


_handshake = _with_globals(AIOKafkaConnection._do_sasl_handshake, log=_WithoutClear(logging.getLogger("aiokafka.conn")))


class ReauthenticatingConnection(PromptConnection):
    """Connection that logs in with the current credentials of its Login, and again before its session ends. Requests
    wait during a login, because the broker accepts no other request then.

    aiokafka keeps username, password and certificate for good. A broker that limits sessions (KIP-368) closes a
    connection that is used after its session has ended, and aiokafka does not re-authenticate (aio-libs/aiokafka#1105,
    an open pull request).
    """

    renew_at = math.inf
    """Time on the loop's clock; the first request after it waits for another login."""
    _renewing: asyncio.Task[None] | None = None
    _left = False
    """True if the client closed the connection, so that a pending login counts as abandoned and not as failed."""

    @property
    def _login(self) -> Login | None:
        own = self._sasl_oauth_token_provider
        return own if isinstance(own, Login) else None

    async def connect(self) -> Any:
        """See AIOKafkaConnection. The outcome is recorded in its Login."""
        login = self._login
        if login is None:
            return await super().connect()
        try:
            if login.is_tls:
                self._ssl_context = login.context()
            streams = await super().connect()
        except (OSError, KafkaError, TimeoutError) as error:
            login.record_refusal(error)
            raise
        except (TlsFailed, TokenUnavailable) as error:  # aiokafka counts only errors of its own as a failed connection
            login.record_refusal(error)
            raise AuthenticationFailedError(str(error)) from error
        login.refused = None
        return streams

    async def _do_sasl_handshake(self) -> None:
        self.renew_at = math.inf
        if self._login is not None:
            self._sasl_plain_username, self._sasl_plain_password = self._login.name_and_password()
            in_clear = (self._security_protocol, self._sasl_mechanism) == ("SASL_PLAINTEXT", "PLAIN")
            if in_clear and not is_loopback(self.host):
                log.warning(
                    "%s:%s receives the password in the clear: see [kafka] sasl_mechanism", self.host, self.port
                )
        try:
            await _handshake(self)
        except ValueError as error:  # aiokafka's own for SCRAM, which is mutual
            raise AuthenticationFailedError(f"the broker did not prove that it knows the password ({error})") from error

    def send(self, request: Any, expect_response: bool = True) -> Awaitable[Any]:
        if type(request) is SaslAuthenticateRequest:
            return self._read_auth_response(super().send(Discreet(request._payload)))
        if type(request) is SaslHandShakeRequest:
            return super().send(request)
        if self._renewing is None and self._loop.time() >= self.renew_at:
            self._renewing = self._loop.create_task(self._renew())
        if self._renewing is None:
            return super().send(request, expect_response)
        return self._later(self._renewing, request, expect_response)

    async def _later(self, renewing: asyncio.Task[None], request: Any, expect_response: bool) -> Any:
        await asyncio.shield(renewing)
        return await super().send(request, expect_response)

    async def _read_auth_response(self, answer: Awaitable[Any]) -> Any:
        response = await answer
        if self._sasl_mechanism == "OAUTHBEARER" and response.sasl_auth_bytes:
            # A refusal (RFC 7628, 3.2.2), which aiokafka treats as success.
            raise SaslAuthenticationFailed(response.sasl_auth_bytes.decode(errors="replace"))
        lifetime_ms = getattr(response, "session_lifetime_ms", 0)
        if lifetime_ms > 0:
            self.renew_at = self._loop.time() + SPENT * lifetime_ms / 1000
        return response

    def close(self, reason: CloseReason | None = None, exc: Exception | None = None) -> Any:
        if self.connected():
            self._left = reason in (None, CloseReason.IDLE_DROP, CloseReason.SHUTDOWN)
        return super().close(reason, exc)

    async def _renew(self) -> None:
        try:
            await self._do_sasl_handshake()
        except (OSError, KafkaError, TimeoutError, TlsFailed, TokenUnavailable) as error:
            if self._left:
                return
            if self._login is not None:
                self._login.record_refusal(error)
            log.warning("%s:%s: the session could not be renewed: %s", self.host, self.port, error)
            self.close(reason=CloseReason.AUTH_FAILURE, exc=error)  # waiting requests fail, and the client reconnects
        finally:
            self._renewing = None


class Discreet(SaslAuthenticateRequest):  # type: ignore[misc]
    """Authentication request whose payload, a password or token, does not appear in aiokafka's debug log."""

    def build(self, request_struct_class: Any) -> Any:
        """See Request."""

        class Unshown(request_struct_class):  # type: ignore[misc]
            def __repr__(self) -> str:
                return "SaslAuthenticateRequest(...)"

        return Unshown(self._payload)


create_connection = _with_globals(aiokafka.conn.create_conn, AIOKafkaConnection=ReauthenticatingConnection)
"""aiokafka's `create_conn`, which creates a ReauthenticatingConnection."""


async def _open_connection(host: str, port: int, **how: Any) -> Any:
    """Open a connection within CONNECT_S.

    aiokafka waits for a broker that accepts connections but does not answer (stopped, cut off) for as long as an append
    may take, while it holds its only lock. Any exception but an OSError or KafkaError would end its background tasks,
    which never start again.
    """
    glance = time.monotonic() < _silent.get((host, port), 0.0)
    try:
        async with asyncio.timeout(GLANCE_S if glance else CONNECT_S):
            return await create_connection(host, port, **how)
    except TimeoutError:
        if not glance:
            _silent[host, port] = time.monotonic() + SILENT_S
        raise
    except (OSError, KafkaError):
        raise
    except Exception as error:
        raise KafkaConnectionError(f"{host}:{port}: {error!r}") from error


async def _open_for_client(host: str, port: int, *, on_close: Any, **how: Any) -> Any:
    """Open a connection for the client whose method `on_close` is. Raises CancelledError if the client has left: a
    background task outlived the close of its client, which a time limit cut off, and would retry for ever after any
    other error."""
    client: MendedClient = on_close.__self__
    if client.left:
        raise asyncio.CancelledError
    made = await _open_connection(host, port, on_close=on_close, **how)
    if client.left:
        await made.close(reason=CloseReason.SHUTDOWN)
        raise asyncio.CancelledError
    return made


class MendedClient(AIOKafkaClient):  # type: ignore[misc]
    """Client of brokers that may be silent, restart, or go away while the client closes."""

    left = False
    """True once `leave` was called."""

    _get_conn = _with_globals(AIOKafkaClient._get_conn, create_conn=_open_for_client)

    async def bootstrap(self) -> None:
        """Bootstrap the client, and close its connections on failure. If cancelled, aiokafka leaves the connection open
        over which it requests the first metadata, so every start that a time limit cuts off would leak one."""
        opened: list[AIOKafkaConnection] = []

        async def open_connection(host: str, port: int, **how: Any) -> AIOKafkaConnection:
            opened.append(await _open_connection(host, port, **how))
            return opened[-1]

        try:
            await _with_globals(AIOKafkaClient.bootstrap, create_conn=open_connection)(self)
        except BaseException:
            for connection in opened:
                connection.close(reason=CloseReason.SHUTDOWN)
            raise

    async def send(self, node_id: int, request: Any, *, group: ConnectionGroup = ConnectionGroup.DEFAULT) -> Any:
        """Send a request, and raise RequestTimedOutError if its connection is already gone. If two requests on one
        connection time out, aiokafka raises KeyError for the second, which would end its sender task."""
        try:
            return await super().send(node_id, request, group=group)
        except KeyError as gone:
            if (node_id, group) in self._conns:
                raise
            raise RequestTimedOutError from gone

    async def coordinator_lookup(self, coordinator_type: CoordinationType, coordinator_key: str) -> Any:
        """Find a coordinator. The broker asked may go down during the request, or no broker may be known while all
        restart. aiokafka's sender ends on either error, but retries after CoordinatorNotAvailableError."""
        try:
            return await super().coordinator_lookup(coordinator_type, coordinator_key)
        except (KafkaConnectionError, AssertionError) as gone:
            raise CoordinatorNotAvailableError(str(gone)) from gone

    async def _wait_on_metadata(self, topic: str) -> Any:
        """Return the partition numbers of `topic`. aiokafka reports a topic as missing if no broker described it in
        time, even if no broker answers at all. That case raises KafkaTimeoutError here."""
        try:
            return await super()._wait_on_metadata(topic)
        except UnknownTopicOrPartitionError as unknown:
            if await self.force_metadata_update():
                raise
            raise KafkaTimeoutError(f"no broker reports the partitions of {topic}") from unknown

    def force_metadata_update(self) -> Awaitable[bool]:
        """Request a metadata update and return whether it succeeded. A closed client's update task has ended, so
        callers of aiokafka's method wait for ever. They get a cancelled future here."""
        if not self.left:
            return super().force_metadata_update()  # type: ignore[no-any-return]
        never = asyncio.get_running_loop().create_future()
        never.cancel()
        return never

    def leave(self) -> None:
        """Close all connections now and open none again. aiokafka's own stop closes them last and may be cut off before
        that."""
        self.left = True
        if self._sync_task is not None:
            self._sync_task.cancel()
        if self._md_update_fut is not None:
            self._md_update_fut.cancel()  # the task that ended would have set it, and others wait for it
        for open_one in self._conns.values():
            open_one.close(reason=CloseReason.SHUTDOWN)


def _silent_future() -> asyncio.Future[Any]:
    """Return a future whose exception is always retrieved.

    aiokafka fails batches that nobody waits for, and replaces waiters that have failed (a producer is fenced, a
    transaction times out); asyncio would report each of them at garbage collection. No error is lost: every record sent
    also has a future of our own (`infra.kafka.producers.track_ack`).
    """
    future = asyncio.get_running_loop().create_future()
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


class _SilentBatch(MessageBatch):  # type: ignore[misc]
    __init__ = _with_globals(MessageBatch.__init__, create_future=_silent_future)
    reset_drain = _with_globals(MessageBatch.reset_drain, create_future=_silent_future)


class _SilentAccumulator(MessageAccumulator):  # type: ignore[misc]
    _append_batch = _with_globals(MessageAccumulator._append_batch, MessageBatch=_SilentBatch)


class _SilentTransactions(TransactionManager):  # type: ignore[misc]
    begin_transaction = _with_globals(TransactionManager.begin_transaction, create_future=_silent_future)
    aborting_transaction = _with_globals(TransactionManager.aborting_transaction, create_future=_silent_future)
    fatal_error = _with_globals(TransactionManager.fatal_error, create_future=_silent_future)
    add_offsets_to_txn = _with_globals(TransactionManager.add_offsets_to_txn, create_future=_silent_future)


class _QuickAddPartitions(AddPartitionsToTxnHandler):  # type: ignore[misc]
    handle_response = _with_globals(AddPartitionsToTxnHandler.handle_response, BACKOFF_OVERRIDE=CONCURRENT_S)


class _QuickSender(Sender):  # type: ignore[misc]
    _do_add_partitions_to_txn = _with_globals(
        Sender._do_add_partitions_to_txn, AddPartitionsToTxnHandler=_QuickAddPartitions
    )


class MendedProducer(AIOKafkaProducer):  # type: ignore[misc]
    """Producer with a MendedClient, whose sender is quick and whose futures are silent."""

    __init__ = _with_globals(
        AIOKafkaProducer.__init__, AIOKafkaClient=MendedClient, MessageAccumulator=_SilentAccumulator,
        TransactionManager=_SilentTransactions, Sender=_QuickSender,
    )  # fmt: skip

    @property
    def sender_task(self) -> asyncio.Task[None]:
        """Task that sends. The producer notifies nobody of its end."""
        return self._sender.sender_task  # type: ignore[no-any-return]

    async def stop(self) -> None:
        """Stop the producer. aiokafka's stop fails if its own tasks have not started yet."""
        await asyncio.sleep(0)
        await super().stop()

    def leave(self) -> None:
        """Close all connections now. A stop that was cut off leaves the sender task running, which would retry for
        ever."""
        self.client.leave()
        if self._sender.sender_task is not None:
            self._sender.sender_task.cancel()


class MendedConsumer(AIOKafkaConsumer):  # type: ignore[misc]
    """Consumer with a MendedClient and a PacedFetcher that stops at once, and leaves its group at once."""

    __init__ = _with_globals(AIOKafkaConsumer.__init__, AIOKafkaClient=MendedClient)
    start = _with_globals(AIOKafkaConsumer.start, Fetcher=PacedFetcher)

    def add_topics(self, topics: Iterable[str]) -> None:
        """Register topics with the client, so that one request finds all leaders. aiokafka itself asks for one topic,
        waits 0.1 s and asks for the next: a role that starts on the whole catalogue would wait two seconds."""
        for topic in topics:
            self._client.add_topic(topic)

    async def stop(self) -> None:
        """Stop the consumer. aiokafka's stop fails if its own tasks have not started yet (aio-libs/aiokafka#647, open).
        It cancels its fetch tasks and awaits them: a task that pauses between two attempts, as all do while no broker
        answers, cancels the stop in turn before its connections are closed."""
        await asyncio.sleep(0)
        task = asyncio.current_task()
        try:
            await super().stop()
        except asyncio.CancelledError:
            if task is None or task.cancelling():
                raise
            await self._client.close()

    def leave(self) -> None:
        """Close all connections now."""
        self._client.leave()

    def check_group(self) -> None:
        """Raise the error for which the coordinator stopped, if there is one."""
        self._coordinator.check_errors()

    async def stop_coordination(self) -> None:
        """Take no further part in rebalances. During one, aiokafka's stop would join once more, wait for every other
        member to do so, and only then leave."""
        self._coordinator._coordination_task.cancel()
        await asyncio.wait({self._coordinator._coordination_task})

    def drop_membership(self) -> None:
        """Forget the membership, so that no LeaveGroup request is sent."""
        self._coordinator.reset_generation()

    async def send_goodbye(self) -> None:
        """Send a LeaveGroup request for a static member, which aiokafka omits: its partition tasks would idle for the
        rest of the Kafka session (decision 28). A successor with the same instance name is not removed, because its
        member id differs."""
        coordinator = self._coordinator
        if coordinator._group_instance_id is None:
            return
        await coordinator._stop_heartbeat_task()
        if coordinator.generation > 0:
            member = (coordinator.member_id, coordinator._group_instance_id)
            await coordinator._send_req(StaticGoodbye(coordinator.group_id, *member))


class MendedAdminClient(AIOKafkaAdminClient):  # type: ignore[misc]
    """Admin client that retries a request at another broker if the first one is away. aiokafka's own asks one random
    broker among those of its last metadata update."""

    __init__ = _with_globals(AIOKafkaAdminClient.__init__, AIOKafkaClient=MendedClient)

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
