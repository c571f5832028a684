"""What every aiokafka client of one KafkaLog shares: where the cluster is, the prefix of names, limits, typed errors.

aiokafka stays within the modules `infra.kafka*`. (confluent-kafka was weighed: two to three times the throughput, but
callbacks on its own thread, and no asyncio consumer groups whose listeners can be awaited.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import aiokafka.producer.message_accumulator
import aiokafka.producer.sender
import aiokafka.producer.transaction_manager
from aiokafka import TopicPartition
from aiokafka.errors import (
    CommitFailedError,
    InvalidProducerEpoch,
    KafkaError,
    KafkaTimeoutError,
    MessageSizeTooLargeError,
    OffsetMetadataTooLargeError,
    ProducerFenced,
    RecordTooLargeError,
    UnknownTopicOrPartitionError,
)
from aiokafka.errors import OffsetOutOfRangeError as OutOfRange
from aiokafka.structs import OffsetAndMetadata

from turnlog.infra.log import (
    Commit,
    Fenced,
    LogError,
    LogUnavailable,
    LogUnreachable,
    OffsetOutOfRange,
    Oversized,
    Partition,
    TopicMissing,
)
from turnlog.schemas.topics import MAX_MESSAGE_BYTES

METADATA_LIMIT_BYTES = 4096
"""Kafka's default `offset.metadata.max.bytes`. Above it a broker's refusal kills the whole transactional producer."""
REQUEST_TIMEOUT_MS = 40_000
"""Of one request; the broker's long polls and the append of a large batch stay below."""
ANSWER_TIMEOUT_S = 60.0
"""After that an acknowledgement counts as lost (LogUnavailable): a broker restart after kill -9 takes up to 12 s."""
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


@dataclass(frozen=True, slots=True)
class Connection:
    """Where the cluster is, what our names are prefixed with there, and how patient groups are with their members."""

    bootstrap: str
    prefix: str = ""
    membership: Membership = Membership()

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
    """Turn aiokafka's errors and time-outs into the tree of `infra.log`; `doing` says what, where."""
    try:
        yield
    except TimeoutError as error:
        raise LogUnreachable(f"{doing}: {connection.bootstrap} did not answer; check [kafka] bootstrap") from error
    except KafkaError as error:
        raise typed_error(connection, doing, error) from error


def typed_error(connection: Connection, doing: str, error: KafkaError) -> LogError:
    """The error of our tree for one of aiokafka's; its cause decides where the client wrapped it in its base class."""
    wrapped = type(error) is KafkaError and isinstance(error.__cause__, KafkaError)
    reason = error.__cause__ if wrapped else error
    said = f"{doing}: {type(reason).__name__} {reason}".rstrip()
    match reason:
        case ProducerFenced() | InvalidProducerEpoch():
            return Fenced(f"{doing}: a newer owner started, or the transaction timed out; this process must end")
        case CommitFailedError():
            return Fenced(f"{doing}: the group went on without this member; this process must end")
        case UnknownTopicOrPartitionError():
            return TopicMissing(f"{doing}: no such topic or partition; run `turnlog topics apply`")
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
            silent = reason.retriable or bare or isinstance(reason, KafkaTimeoutError)
            kind = LogUnreachable if silent else LogUnavailable
            return kind(f"{said}; check [kafka] bootstrap ({connection.bootstrap})")
