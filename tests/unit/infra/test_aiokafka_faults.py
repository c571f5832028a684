"""Faults of aiokafka that infra/kafka/aiokafka_changes.py mends, shown on aiokafka's own classes.

A test that fails after an update of aiokafka says that a change is no longer needed: delete both.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import struct
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import aiokafka.client
import aiokafka.conn
import aiokafka.consumer.fetcher
import aiokafka.producer.sender
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.client import AIOKafkaClient, ConnectionGroup, CoordinationType
from aiokafka.conn import AIOKafkaConnection, OAuthAuthenticator, ScramAuthenticator, create_conn
from aiokafka.consumer.group_coordinator import GroupCoordinator
from aiokafka.errors import (
    ConcurrentTransactions,
    CoordinatorNotAvailableError,
    KafkaConnectionError,
    KafkaError,
    KafkaTimeoutError,
    NodeNotReadyError,
    RequestTimedOutError,
    StaleMetadata,
    UnknownTopicOrPartitionError,
)
from aiokafka.protocol.admin import ApiVersionRequest, SaslAuthenticateRequest
from aiokafka.protocol.api import RequestStruct
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.structs import BrokerMetadata

from tests.fakes.broken_connections import Breaker
from turnlog.infra.embedded.ports import HOST, free_ports
from turnlog.infra.kafka import KafkaLog, extra_requests
from turnlog.infra.kafka.admin import Admin
from turnlog.infra.kafka.aiokafka_changes import (
    CONCURRENT_S,
    Discreet,
    MendedClient,
    MendedConsumer,
    MendedProducer,
    create_connection,
)
from turnlog.infra.log import TopicSpec

API_VERSIONS = ApiVersionRequest.API_KEY
MAIN = (0, ConnectionGroup.DEFAULT)
TIMEOUT_MS = 200
SOON_S = 0.2


class SilentBroker:
    """Server that reports the versions of requests, unless it is `mute`, and answers nothing else."""

    def __init__(self, *, mute: bool = False) -> None:
        self._mute = mute
        self.port = 0
        self._writers: list[asyncio.StreamWriter] = []
        self.requested = asyncio.Event()
        """Set once a request came that will not be answered."""

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[SilentBroker]:
        async with await asyncio.start_server(self._serve, HOST, 0) as server:
            self.port = server.sockets[0].getsockname()[1]
            yield self
            for writer in self._writers:
                writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                (size,) = struct.unpack(">i", await reader.readexactly(4))
                key, _, correlation = struct.unpack(">hhi", (await reader.readexactly(size))[:8])
                if key == API_VERSIONS and not self._mute:
                    keys = range(64)
                    body = b"".join(struct.pack(">hhh", each, 0, 3) for each in keys)
                    answer = struct.pack(">ihi", correlation, 0, len(keys)) + body
                    writer.write(struct.pack(">i", len(answer)) + answer)
                else:
                    self.requested.set()
        writer.close()


@pytest.fixture
async def broker() -> AsyncIterator[SilentBroker]:
    async with SilentBroker().serving() as broker:
        yield broker


@pytest.fixture
async def breaker() -> AsyncIterator[Breaker]:
    breaker = Breaker()
    with breaker.around(asyncio.get_running_loop()):
        yield breaker


def client_of(kind: type[Any], *ports: int, **options: Any) -> Any:
    """Client that knows brokers 0, 1, ... without having bootstrapped."""
    client = kind(bootstrap_servers=f"{HOST}:{ports[0]}", **options)
    client.cluster._brokers = {number: BrokerMetadata(number, HOST, port, None) for number, port in enumerate(ports)}
    return client


async def end(client: Any) -> None:
    await asyncio.gather(*(connection.close() for connection in client._conns.values()))


def test_one_time_out_holds_for_connecting_and_for_every_request() -> None:
    """An append takes long, a request for a leader does not. Mended by PromptConnection and `_open_connection`."""
    assert {name for name in inspect.signature(AIOKafkaClient).parameters if "timeout" in name} == {
        "request_timeout_ms"
    }
    waits = inspect.signature(AIOKafkaConnection.send).parameters.keys() - {"self", "request", "expect_response"}
    assert not waits


async def test_a_broker_that_does_not_answer_holds_up_connections_to_the_others() -> None:
    async with SilentBroker(mute=True).serving() as mute:
        client = client_of(AIOKafkaClient, mute.port, *free_ports(1))
        slow = asyncio.create_task(client.ready(0))
        await mute.requested.wait()
        other = asyncio.create_task(client.ready(1))
        done, _ = await asyncio.wait({other}, timeout=SOON_S)
        assert not done, "there is one lock, which the first connection holds"
        slow.cancel()
        assert not await other
        await asyncio.wait({slow})


async def test_an_error_of_the_event_loop_escapes_from_a_connection_attempt(
    breaker: Breaker, broker: SilentBroker
) -> None:
    """Mended by `_open_connection`."""
    breaker.arm("connecting: lost in the handshake", 0, lasting=True)
    with pytest.raises(RuntimeError):
        await client_of(AIOKafkaClient, broker.port).ready(0)
    assert not await client_of(MendedClient, broker.port).ready(0)


async def test_a_connection_that_uvloop_lost_raises_an_error_that_nobody_retries(
    breaker: Breaker, broker: SilentBroker
) -> None:
    """Mended by PromptConnection.send."""
    for create, error in ((create_conn, RuntimeError), (create_connection, KafkaConnectionError)):
        breaker.heal()
        connection = await create(HOST, broker.port)
        breaker.arm("writing: uvloop", 0, lasting=False)
        with pytest.raises(error):
            connection.send(MetadataRequest([]))
        await connection.close()


def test_throttling_is_reported_nowhere() -> None:
    """Mended by PromptConnection.send."""
    for module in (aiokafka.client, aiokafka.conn, aiokafka.consumer.fetcher, aiokafka.producer.sender):
        assert "throttle" not in inspect.getsource(module)


async def test_a_closed_client_connects_again(broker: SilentBroker) -> None:
    """Mended by MendedClient.leave."""
    client = client_of(AIOKafkaClient, broker.port)
    await client.close()
    assert await client.ready(0)
    await end(client)
    client = client_of(MendedClient, broker.port)
    client.leave()
    with pytest.raises(asyncio.CancelledError):
        await client.ready(0)


async def test_who_asks_a_closed_client_for_metadata_waits_for_ever(broker: SilentBroker) -> None:
    """Mended by MendedClient.force_metadata_update."""
    client = client_of(AIOKafkaClient, broker.port)
    await client.close()
    done, _ = await asyncio.wait({client.force_metadata_update()}, timeout=SOON_S)
    assert not done
    client = client_of(MendedClient, broker.port)
    client.leave()
    assert client.force_metadata_update().cancelled()


async def test_a_request_whose_connection_another_one_replaced_fails_with_a_key_error(broker: SilentBroker) -> None:
    """Mended by MendedClient.send."""
    for kind, error in ((AIOKafkaClient, KeyError), (MendedClient, RequestTimedOutError)):
        client = client_of(kind, broker.port, request_timeout_ms=TIMEOUT_MS)
        broker.requested.clear()
        sending = asyncio.create_task(client.send(0, MetadataRequest([])))
        await broker.requested.wait()
        gone = client._conns.pop(MAIN)  # as another request does if the connection is closed
        with pytest.raises(error):
            await sending
        await gone.close()


async def test_a_lookup_without_a_broker_fails_with_an_assertion(broker: SilentBroker) -> None:
    """Mended by MendedClient.coordinator_lookup."""
    for kind, error in ((AIOKafkaClient, AssertionError), (MendedClient, CoordinatorNotAvailableError)):
        with pytest.raises(error):
            await kind().coordinator_lookup(CoordinationType.GROUP, "group")


async def test_a_lookup_whose_broker_goes_away_fails_with_an_error_that_ends_a_producer(broker: SilentBroker) -> None:
    """Mended by MendedClient.coordinator_lookup."""
    retried = inspect.getsource(aiokafka.producer.sender.Sender._find_coordinator)
    assert "KafkaConnectionError" not in retried
    assert "Errors.CoordinatorNotAvailableError" in retried
    for kind, error in ((AIOKafkaClient, KafkaConnectionError), (MendedClient, CoordinatorNotAvailableError)):
        client = client_of(kind, broker.port)
        broker.requested.clear()
        looking = asyncio.create_task(client.coordinator_lookup(CoordinationType.GROUP, "group"))
        await broker.requested.wait()
        await client._conns[MAIN].close()
        with pytest.raises(error):
            await looking


async def test_a_topic_counts_as_missing_if_no_broker_answers() -> None:
    """Mended by MendedClient._wait_on_metadata."""
    for kind, error in ((AIOKafkaClient, UnknownTopicOrPartitionError), (MendedClient, KafkaTimeoutError)):
        client = client_of(kind, *free_ports(1), request_timeout_ms=1, retry_backoff_ms=1)
        client._sync_task = asyncio.create_task(client._md_synchronizer())
        with pytest.raises(error):
            await client._wait_on_metadata("topic")
        await client.close()


async def cut_off(client: Any, broker: SilentBroker) -> None:
    broker.requested.clear()
    starting = asyncio.create_task(client.bootstrap())
    await broker.requested.wait()
    starting.cancel()
    await asyncio.wait({starting})
    del starting
    gc.collect()


async def test_a_start_that_is_cut_off_leaves_its_connection_open(broker: SilentBroker) -> None:
    """Mended by MendedClient.bootstrap."""
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # the collector reports it there as well
    with pytest.warns(ResourceWarning, match="Unclosed AIOKafkaConnection"):
        await cut_off(client_of(AIOKafkaClient, broker.port), broker)
    await cut_off(client_of(MendedClient, broker.port), broker)  # a warning fails this test


async def unretrieved(kind: type[Any]) -> list[str]:
    """Return what asyncio reports of a batch and of a transaction that failed, and that nobody waits for."""
    reported: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["message"]))
    producer = kind(enable_idempotence=True)
    accumulator, transactions = producer._message_accumulator, type(producer._txn_manager)("owner", 1000)
    batch = accumulator._append_batch(accumulator.create_builder(), TopicPartition("topic", 0))
    batch.failure(KafkaError("batch"))
    transactions.set_pid_and_epoch(1, 0)
    transactions.begin_transaction()
    transactions.error_transaction(KafkaError("transaction"))
    accumulator._batches.clear()
    await producer.stop()
    del batch, transactions
    await asyncio.sleep(0)
    gc.collect()
    return reported


async def test_errors_that_nobody_waits_for_are_reported_as_never_retrieved() -> None:
    """Mended by `_silent_future`."""
    assert await unretrieved(AIOKafkaProducer) == ["Future exception was never retrieved"] * 3
    assert await unretrieved(MendedProducer) == []


async def test_a_transaction_waits_for_the_markers_of_the_last_one_for_a_constant_time() -> None:
    """Mended by `_QuickAddPartitions`."""
    answer = SimpleNamespace(errors=[("topic", [(0, ConcurrentTransactions.errno)])])
    for kind, backoff in ((AIOKafkaProducer, 0.02), (MendedProducer, CONCURRENT_S)):
        producer = kind(transactional_id="owner", retry_backoff_ms=1000)
        handler = type(producer._sender)._do_add_partitions_to_txn.__globals__["AddPartitionsToTxnHandler"]
        assert handler(producer._sender, []).handle_response(answer) == backoff
        await producer.stop()


async def test_a_session_is_not_renewed_and_a_refused_token_counts_as_accepted() -> None:
    """Mended by ReauthenticatingConnection."""
    assert "session_lifetime" not in inspect.getsource(aiokafka.conn)

    class Tokens:
        async def token(self) -> str:
            return "token"

    authenticator = OAuthAuthenticator(sasl_oauth_token_provider=Tokens())
    await authenticator.step(None)
    assert await authenticator.step(b'{"status": "invalid_token"}') is None, "as after an empty answer"


async def test_a_broker_that_does_not_know_the_password_raises_a_value_error() -> None:
    """Mended by ReauthenticatingConnection."""
    scram = ScramAuthenticator(
        loop=asyncio.get_running_loop(),
        sasl_plain_password="p",
        sasl_plain_username="u",
        sasl_mechanism="SCRAM-SHA-256",
    )
    await scram.step(None)
    await scram.step(f"r={scram._nonce}x,s=c2FsdA==,i=4096".encode())
    with pytest.raises(ValueError, match="signature"):
        await scram.step(b"v=d3Jvbmc=")


def test_a_password_appears_in_the_debug_log_of_requests() -> None:
    """Mended by Discreet."""
    versions = {SaslAuthenticateRequest.API_KEY: (0, 1)}
    assert "secret" in repr(SaslAuthenticateRequest(b"secret").prepare(versions))
    assert "secret" not in repr(Discreet(b"secret").prepare(versions))


async def drop(consumer: AIOKafkaConsumer) -> None:
    """Stop it, and close what a stop that fails leaves open."""
    with contextlib.suppress(asyncio.CancelledError):
        await consumer.stop()
    await consumer._fetcher.close()
    await consumer._client.close()


@pytest.mark.kafka
async def test_a_consumer_that_stops_at_once_raises_a_cancellation(kafka: str) -> None:
    """Mended by MendedConsumer.stop."""
    consumer = AIOKafkaConsumer(bootstrap_servers=kafka)
    await consumer.start()
    with pytest.raises(asyncio.CancelledError):
        await consumer.stop()
    await drop(consumer)
    consumer = MendedConsumer(bootstrap_servers=kafka)
    await consumer.start()
    await consumer.stop()


@pytest.mark.kafka
async def test_a_producer_whose_stop_is_cut_off_goes_on_sending(kafka: str) -> None:
    """Mended by MendedProducer.leave."""
    for kind in (AIOKafkaProducer, MendedProducer):
        producer = kind(bootstrap_servers=kafka)
        await producer.start()
        accumulator = producer._message_accumulator
        batch = accumulator._append_batch(accumulator.create_builder(), TopicPartition("absent", 0))
        batch.append(b"key", b"value", None)
        stopping = asyncio.create_task(producer.stop())
        await asyncio.wait({stopping}, timeout=SOON_S)
        stopping.cancel()
        await asyncio.wait({stopping})
        sender = producer._sender.sender_task
        assert not sender.done()
        if isinstance(producer, MendedProducer):
            producer.leave()
            await asyncio.wait({sender})
        else:
            sender.cancel()
            await producer.client.close()
        batch.failure(KafkaError("dropped"))


@pytest.mark.kafka
async def test_offsets_are_looked_up_one_topic_after_another(kafka: str) -> None:
    """Mended by MendedConsumer.add_topics."""
    prefix = f"t{uuid4().hex[:8]}-"
    consumer = AIOKafkaConsumer(bootstrap_servers=kafka)
    await consumer.start()
    with pytest.raises(StaleMetadata):
        await consumer._fetcher._proc_offset_requests({TopicPartition(f"{prefix}{name}", 0): 0 for name in "ab"})
    assert len(consumer._client._topics) == 1
    await drop(consumer)


def test_a_member_takes_part_in_a_rebalance_before_it_stops() -> None:
    """Mended by MendedConsumer.stop_coordination."""
    assert "await self._coordination_task" in inspect.getsource(GroupCoordinator.close)


@pytest.mark.kafka
async def test_a_static_member_leaves_its_group_without_a_word(kafka: str) -> None:
    """Mended by MendedConsumer.send_goodbye."""
    prefix = f"t{uuid4().hex[:8]}-"
    log = KafkaLog(kafka, prefix=prefix)
    await log.create_topics([TopicSpec("in", 1, 1, {})])
    for kind, left in ((AIOKafkaConsumer, 1), (MendedConsumer, 0)):
        group = f"group-{left}"
        member = kind(f"{prefix}in", bootstrap_servers=kafka, group_id=prefix + group, group_instance_id="one")
        await member.start()
        if isinstance(member, MendedConsumer):
            await member.stop_coordination()
            await member.send_goodbye()
        await member.stop()
        assert len(await log.members(group)) == left
    await log.close()


@pytest.mark.kafka
async def test_an_admin_client_asks_a_broker_that_is_away_although_others_are_there(kafka: str) -> None:
    """Mended by MendedAdminClient."""
    [nobody] = free_ports(1)

    async def count_failures(kind: type[Any]) -> int:
        failures = 0
        admin = kind(bootstrap_servers=kafka)
        await admin.start()
        try:
            for _ in range(64):  # it asks one at random
                admin._client.cluster._brokers[99] = BrokerMetadata(99, HOST, nobody, None)
                try:
                    await admin._send_request(MetadataRequest([]))
                except NodeNotReadyError:
                    failures += 1
        finally:
            await admin.close()
        return failures

    assert await count_failures(AIOKafkaAdminClient) > 8
    # A machine may stand still for so long that the broker which is there does not answer in time.
    assert await count_failures(Admin) <= 2


def test_aiokafka_lacks_the_requests_that_are_added() -> None:
    """See infra/kafka/extra_requests.py."""
    known = {
        (kind.API_KEY, kind.API_VERSION)
        for kind in RequestStruct.__subclasses__()
        if kind.__module__.startswith("aiokafka.")
    }
    ours = [kind for kind in RequestStruct.__subclasses__() if kind.__module__ == extra_requests.__name__]
    assert {kind.API_KEY for kind in ours} == {9, 13, 35, 66}
    for kind in ours:
        assert not [version for key, version in known if key == kind.API_KEY and version >= kind.API_VERSION]
