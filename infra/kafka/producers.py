"""Producers of KafkaLog: the plain idempotent one and the transactional one.

Both: acks=all, idempotent, no linger (one request is in flight per broker, and what arrives meanwhile goes with the
next), no compression: zstd makes 1.8 of 1 bytes of a turn at about 60 MB/s of a core (benchmarks/g4_turns.py), which
costs the producer more than the appends themselves. Where disks or networks are the limit, set `compression.type` on
the topics: the broker then compresses.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Mapping
from typing import Any

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError

from turnlog.infra.kafka.connection import (
    ANSWER_TIMEOUT_S,
    CLOSE_TIMEOUT_S,
    REQUEST_TIMEOUT_MS,
    Connection,
    typed,
    typed_error,
)
from turnlog.infra.log import (
    Commit,
    Fenced,
    Headers,
    LogError,
    LogUnavailable,
    LogUnreachable,
    Oversized,
    Partition,
    TopicMissing,
    TransactionFailed,
)
from turnlog.schemas.topics import MAX_MESSAGE_BYTES

BATCH_BYTES = 1 << 20
"""Of one partition in one request; a larger record travels alone. One batch per partition is open at a time, so a
small limit would make every large record wait for the one before."""
TRANSACTION_TIMEOUT_MS = 10_000
"""An abandoned transaction holds every read_committed reader back for this long (60 s by default)."""
RETRY_MS = 100
"""Between attempts of a plain producer, as aiokafka has it."""
TRANSACTION_RETRY_MS = 20
"""Of a transactional one: a transaction that begins with its offsets, while the markers of the last one are still being
written, waits so long (kafka_connection.py shortens only the wait of one that begins with a send). With 100 every group
that ended meanwhile waited, too: p99 of G6 128 ms, with 20 about 55."""

Known = Callable[[str, int | None], Awaitable[None]]
"""Raises TopicMissing for a topic, or a partition of it, that does not exist; free once the topic is known."""


@contextlib.asynccontextmanager
async def producing(connection: Connection, transactional_id: str | None = None) -> AsyncIterator[AIOKafkaProducer]:
    """A started aiokafka producer. With a transactional id, starting it fences the last owner, aborts what that one
    left open and waits for its markers (KIP-98). Raises LogUnavailable."""
    producer = AIOKafkaProducer(
        bootstrap_servers=connection.bootstrap,
        acks="all",
        enable_idempotence=True,
        linger_ms=0,
        max_batch_size=BATCH_BYTES,
        max_request_size=MAX_MESSAGE_BYTES,
        request_timeout_ms=REQUEST_TIMEOUT_MS,
        retry_backoff_ms=RETRY_MS if transactional_id is None else TRANSACTION_RETRY_MS,
        transactional_id=None if transactional_id is None else connection.full(transactional_id),
        transaction_timeout_ms=TRANSACTION_TIMEOUT_MS,
    )
    try:
        with typed(connection, f"start producer {transactional_id or ''}".rstrip()):
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await producer.start()
        yield producer
    finally:
        # A dead broker or a fenced producer must not hide the error that ends the block.
        with contextlib.suppress(KafkaError, TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await asyncio.sleep(0)  # aiokafka's stop falls over tasks of its own that have not run yet
                await producer.stop()


def answered(
    connection: Connection, sent: asyncio.Future[Any], where: str, *, quiet: bool = False
) -> asyncio.Future[tuple[int, int]]:
    """A future of (partition, offset) that follows aiokafka's `sent`, with errors of our tree and LogUnavailable after
    ANSWER_TIMEOUT_S. A future, so that gathering thousands makes no tasks; cancelling it leaves `sent` alone. `quiet`:
    somebody else raises its error, so asyncio need not report one that nobody retrieved."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[tuple[int, int]] = loop.create_future()

    def fail(error: BaseException) -> None:
        if not answer.done():
            answer.set_exception(error)
            if quiet:
                answer.exception()

    def settle(done: asyncio.Future[Any]) -> None:
        timer.cancel()
        error = asyncio.CancelledError() if done.cancelled() else done.exception()
        if isinstance(error, KafkaError):
            fail(typed_error(connection, f"append to {where}", error))
        elif error is not None:
            fail(LogUnavailable(f"append to {where}: {error!r}"))
        elif not answer.done():
            placed = done.result()
            answer.set_result((placed.partition, placed.offset))

    timer = loop.call_later(
        ANSWER_TIMEOUT_S,
        lambda: fail(
            LogUnreachable(f"append to {where}: {connection.bootstrap} did not answer; check [kafka] bootstrap")
        ),
    )
    sent.add_done_callback(settle)
    return answer


class KafkaAppender:
    """See Appender. After LogUnavailable it is open whether the record is on the log; the same producer goes on trying
    and cannot write it twice."""

    def __init__(self, connection: Connection, producer: AIOKafkaProducer, known: Known) -> None:
        self._connection = connection
        self._producer = producer
        self._known = known
        self._order = asyncio.Lock()
        """aiokafka's send may wait for a full batch to leave: without it a later call could overtake."""

    async def append(
        self, topic: str, key: bytes, value: bytes, *, headers: Headers = (), partition: int | None = None
    ) -> tuple[int, int]:
        """See Appender. Raises Oversized, too."""
        return await (await self.submit(topic, key, value, headers=headers, partition=partition))

    async def submit(
        self, topic: str, key: bytes, value: bytes, *, headers: Headers = (), partition: int | None = None
    ) -> Awaitable[tuple[int, int]]:
        """See Appender. Raises Oversized, too. Waits while the partition's open batch is full: back-pressure."""
        await self._known(topic, partition)
        async with self._order:
            with typed(self._connection, f"append to {topic}"):
                future = await self._producer.send(
                    self._connection.full(topic), value, key=key, partition=partition, headers=list(headers)
                )
        return answered(self._connection, future, topic)


class KafkaTransactor:
    """See Transactor. Its first error is its last: every later call raises it again."""

    def __init__(self, connection: Connection, producer: AIOKafkaProducer, known: Known, transactional_id: str) -> None:
        self._connection = connection
        self._producer = producer
        self._known = known
        self._id = transactional_id
        self._order = asyncio.Lock()
        self._sent: list[asyncio.Future[Any]] = []
        self._open = False
        self._failed: LogError | None = None

    async def begin(self) -> None:
        with self._latched("begin"):
            if self._open:
                raise TransactionFailed(f"{self._id}: a transaction is open already")
            await self._producer.begin_transaction()
            self._open = True
            self._sent = []

    async def send(
        self, topic: str, partition: int, key: bytes, value: bytes, *, headers: Headers = ()
    ) -> Awaitable[tuple[int, int]]:
        """See Transactor. Raises Fenced, TransactionFailed, TopicMissing, Oversized; the awaitable Fenced, too."""
        with self._latched(f"send to {topic}[{partition}]"):
            self._require_open()
            await self._known(topic, partition)
            async with self._order:
                future = await self._producer.send(
                    self._connection.full(topic), value, key=key, partition=partition, headers=list(headers)
                )
            self._sent.append(future)
            return answered(self._connection, future, f"{topic} in a transaction of {self._id}", quiet=True)

    async def offsets(self, group: str, commits: Mapping[Partition, Commit]) -> None:
        """See Transactor. Raises Fenced, TransactionFailed, Oversized (before anything is sent)."""
        with self._latched(f"offsets of {group}"):
            self._require_open()
            places = self._connection.commits(commits)
            if places:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    await self._producer.send_offsets_to_transaction(places, self._connection.full(group))

    async def commit(self) -> None:
        """See Transactor. Every send is acknowledged before the commit is asked for. Raises LogUnavailable when the
        broker's answer did not come: the outcome is open until the next owner of the id has started."""
        with self._latched("commit"):
            self._require_open()
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await asyncio.gather(*self._sent)
                await self._producer.commit_transaction()
            self._open = False

    async def abort(self) -> None:
        with self._latched("abort"):
            if self._open:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    await self._producer.abort_transaction()
            self._open = False

    async def leave(self) -> None:
        """Abort what is open. What the producer's state does not allow to abort is left to the broker: the next
        owner's start aborts it, or the transaction time-out does."""
        if self._open and not isinstance(self._failed, Fenced):
            with contextlib.suppress(KafkaError, TimeoutError, AssertionError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self._producer.abort_transaction()

    def _require_open(self) -> None:
        if not self._open:
            raise TransactionFailed(f"{self._id}: begin() comes first")

    @contextlib.contextmanager
    def _latched(self, doing: str) -> Generator[None]:
        """Raise the first error of this producer for ever: it is never repaired in place."""
        if self._failed is not None:
            raise self._failed
        try:
            with typed(self._connection, f"{self._id}: {doing}"):
                yield
        except (Fenced, Oversized, TopicMissing, TransactionFailed) as error:
            self._failed = error
            raise
        except LogUnavailable as error:
            if isinstance(error.__cause__, TimeoutError):
                self._failed = error
                raise
            self._failed = TransactionFailed(str(error))
            raise self._failed from error
        except AssertionError as error:  # aiokafka's state machine after an error that nobody awaited
            self._failed = TransactionFailed(f"{self._id}: {doing}: {error}")
            raise self._failed from error
