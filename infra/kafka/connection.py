"""The connection settings, limits and typed errors that all aiokafka clients of a KafkaLog share.

aiokafka is imported only within `infra.kafka`. (confluent-kafka was considered: it has two to three times the
throughput, but runs callbacks on its own thread and has no asyncio consumer groups whose listeners can be awaited.)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiokafka import TopicPartition
from aiokafka.errors import (
    ClusterAuthorizationFailedError,
    CommitFailedError,
    GroupAuthorizationFailedError,
    InvalidProducerEpoch,
    InvalidTimestampError,
    KafkaError,
    KafkaTimeoutError,
    MessageSizeTooLargeError,
    OffsetMetadataTooLargeError,
    ProducerFenced,
    RecordTooLargeError,
    TopicAuthorizationFailedError,
    TransactionalIdAuthorizationFailed,
    UnknownTopicOrPartitionError,
)
from aiokafka.errors import OffsetOutOfRangeError as OutOfRange
from aiokafka.structs import OffsetAndMetadata

from turnlog.infra.kafka.aiokafka_changes import MendedConsumer, MendedProducer
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
RETRY_S = 0.05
"""Seconds between two checks of a coordinator that is loading, of offsets of an open transaction, or of a topic that is
being created or deleted. Kafka offers no way to await any of these."""
CLOSE_TIMEOUT_S = 10.0
"""Maximum seconds for closing a client. Closing flushes, and a broker that is gone must not delay a process further."""


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
async def parting(connection: Connection, client: MendedConsumer | MendedProducer | None = None) -> AsyncIterator[None]:
    """Run a client's last requests, at the end of a block, within `close_s`, and log errors instead of raising them.

    A broker that is gone must not hide the error that ended the block, and it notices by itself that the client left.
    All connections of `client` are closed afterwards.
    """
    try:
        async with asyncio.timeout(connection.close_s):
            yield
    except Exception as error:
        log.info("a client of %s did not close cleanly: %r", connection.bootstrap, error)
    finally:
        if client is not None:
            client.leave()


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
