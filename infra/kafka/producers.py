"""Producers of KafkaLog: the plain idempotent one and the transactional one.

Both: acks=all, idempotent, no linger (one request is in flight per broker, and what arrives meanwhile goes with the
next), no compression: zstd makes 1.8 of 1 bytes of a turn at about 60 MB/s of a core (benchmarks/g4_turns.py), which
costs the producer more than the appends themselves. Where disks or networks are the limit, set `compression.type` on
the topics: the broker then compresses.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Mapping
from typing import Any

from aiokafka import AIOKafkaProducer
from aiokafka.errors import IllegalOperation, KafkaError, KafkaTimeoutError

from turnlog.infra.kafka.connection import (
    QUICK_S,
    Connection,
    parting,
    typed,
    typed_error,
)
from turnlog.infra.log import (
    Commit,
    Fenced,
    Headers,
    LogError,
    LogUnavailable,
    NotAuthorized,
    Oversized,
    Partition,
    ProducerDied,
    TopicMissing,
    TransactionFailed,
    partition_of,
)
from turnlog.infra.roles import now_s
from turnlog.infra.roles.measures import BYTES
from turnlog.schemas.topics import MAX_MESSAGE_BYTES

log = logging.getLogger(__name__)
ASK_ALL_S = 3 * QUICK_S
"""Two brokers of three may take connections and say nothing."""
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

Known = Callable[[str, int | None], Awaitable[int]]
"""How many partitions the topic has. Raises TopicMissing for a topic, or a partition of it, that does not exist; free
once the topic is known."""


@contextlib.asynccontextmanager
async def producing(connection: Connection, transactional_id: str | None = None) -> AsyncIterator[AIOKafkaProducer]:
    """A started aiokafka producer. With a transactional id, starting it fences the last owner, aborts what that one
    left open and waits for its markers (KIP-98). Raises LogUnavailable."""
    producer = AIOKafkaProducer(
        **connection.options(),
        acks="all",
        enable_idempotence=True,
        linger_ms=0,
        max_batch_size=BATCH_BYTES,
        max_request_size=MAX_MESSAGE_BYTES,
        retry_backoff_ms=RETRY_MS if transactional_id is None else TRANSACTION_RETRY_MS,
        transactional_id=None if transactional_id is None else connection.full(transactional_id),
        transaction_timeout_ms=TRANSACTION_TIMEOUT_MS,
    )
    try:
        with typed(connection, f"start producer {transactional_id or ''}".rstrip()):
            async with asyncio.timeout(connection.answer_s):
                await producer.start()
        yield producer
    finally:
        async with parting(connection, producer.client):
            await asyncio.sleep(0)  # aiokafka's stop falls over tasks of its own that have not run yet
            await producer.stop()
        # A stop that was cut off leaves the sender, which would try again for ever.
        if producer._sender.sender_task is not None:
            producer._sender.sender_task.cancel()


@contextlib.asynccontextmanager
async def while_it_sends(connection: Connection, producer: AIOKafkaProducer) -> AsyncIterator[None]:
    """Raises ProducerDied, cancelling the block, when aiokafka's sender ends under it: the client tells nobody, and of
    one that was cancelled nothing that waits for it ever fails."""
    owner, ended = asyncio.current_task(), asyncio.Event()
    sender: asyncio.Task[None] = producer._sender.sender_task
    assert owner is not None

    def end(_: asyncio.Task[None]) -> None:
        ended.set()
        owner.cancel()

    sender.add_done_callback(end)
    try:
        yield
    except asyncio.CancelledError:
        if not ended.is_set():
            raise
        owner.uncancel()
        cause = None if sender.cancelled() else sender.exception()
        raise ProducerDied(
            f"the producer on {connection.bootstrap} sends no more ({cause or 'without a reason'}): this process must "
            "end, what it had not been acknowledged is open"
        ) from cause
    finally:
        sender.remove_done_callback(end)


Held = Callable[[], Awaitable[bool]]
"""Whether an append that is not acknowledged in time is worth waiting on."""


class Patience:
    """Calls `fail` after `answer_s`, and so long again each time that `held` says so."""

    def __init__(self, where: str, answer_s: float, fail: Callable[[], None], held: Held | None) -> None:
        self._where, self._answer_s, self._fail, self._held = where, answer_s, fail, held
        self._loop = asyncio.get_running_loop()
        self._wait: asyncio.TimerHandle | asyncio.Task[None] = self._loop.call_later(self._answer_s, self._ended)

    def over(self) -> None:
        """It was answered."""
        self._wait.cancel()

    def _ended(self) -> None:
        if self._held is None:
            self._fail()
        else:
            self._wait = self._loop.create_task(self._asked(self._held))

    async def _asked(self, held: Held) -> None:
        if not await held():
            self._fail()
            return
        log.warning("append to %s: no acknowledgement, but the log answers: waiting on", self._where)
        self._wait = self._loop.call_later(self._answer_s, self._ended)


def answered(
    connection: Connection, sent: asyncio.Future[Any], where: str, *, quiet: bool = False, held: Held | None = None
) -> asyncio.Future[tuple[int, int]]:
    """A future of (partition, offset) that follows aiokafka's `sent`, with errors of our tree and LogUnreachable after
    its `answer_s`, unless it is `held`. A future, so that gathering thousands makes no tasks; cancelling it leaves
    `sent` alone. `quiet`: somebody else raises its error, so asyncio need not report one that nobody retrieved."""
    answer: asyncio.Future[tuple[int, int]] = asyncio.get_running_loop().create_future()

    def fail(error: BaseException) -> None:
        if not answer.done():
            answer.set_exception(error)
            if quiet:
                answer.exception()

    def settle(done: asyncio.Future[Any]) -> None:
        patience.over()
        error = asyncio.CancelledError() if done.cancelled() else done.exception()
        if isinstance(error, KafkaError):
            fail(typed_error(connection, f"append to {where}", error))
        elif error is not None:
            fail(LogUnavailable(f"append to {where}: {error!r}"))
        elif not answer.done():
            placed = done.result()
            answer.set_result((placed.partition, placed.offset))

    unanswered = connection.unanswered
    patience = Patience(where, connection.answer_s, lambda: fail(unanswered(f"append to {where}")), held)
    sent.add_done_callback(settle)
    return answer


def _now_ms() -> int:
    """The date of a record."""
    return int(now_s() * 1000)


class KafkaAppender:
    """See Appender. It waits as long as some broker answers: what the log cannot take for want of replicas is held, and
    so is who appends it. After LogUnavailable it is open whether the record is on the log; the same producer goes on
    trying and cannot write it twice."""

    def __init__(self, connection: Connection, producer: AIOKafkaProducer, known: Known) -> None:
        self._connection = connection
        self._producer = producer
        self._known = known
        self._written = BYTES.labels(connection.role, "written")
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
        count = await self._known(topic, partition)
        if partition is None:
            partition = partition_of(key, count)
        async with self._order:
            with typed(self._connection, f"append to {topic}"):
                future = await self._sent(self._connection.full(topic), key, value, headers, partition)
        self._written.inc(len(key) + len(value))
        return answered(self._connection, future, topic, held=self._log_answers)

    async def _sent(
        self, topic: str, key: bytes, value: bytes, headers: Headers, partition: int | None
    ) -> asyncio.Future[Any]:
        """aiokafka's future of the acknowledgement, once there is room. Raises KafkaTimeoutError where no broker
        answers."""
        while True:
            try:
                sent: asyncio.Future[Any] = await self._producer.send(
                    topic, value, key=key, partition=partition, headers=list(headers), timestamp_ms=_now_ms()
                )
                return sent
            except KafkaTimeoutError:
                if not await self._log_answers():
                    raise

    async def _log_answers(self) -> bool:
        """Whether some broker does."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ASK_ALL_S):
                return bool(await self._producer.client.force_metadata_update())
        return False


class KafkaTransactor:
    """See Transactor. Its first error is its last: every later call raises it again."""

    def __init__(self, connection: Connection, producer: AIOKafkaProducer, known: Known, transactional_id: str) -> None:
        self._connection = connection
        self._producer = producer
        self._known = known
        self._id = transactional_id
        self._written = BYTES.labels(connection.role, "written")
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
                try:
                    future = await self._producer.send(
                        self._connection.full(topic), value, key=key, partition=partition, headers=list(headers),
                        timestamp_ms=_now_ms(),
                    )  # fmt: skip
                except IllegalOperation:  # the transaction ended with an error of what was sent before: that one counts
                    async with asyncio.timeout(self._connection.answer_s):
                        await asyncio.gather(*self._sent)
                    raise
            self._sent.append(future)
            self._written.inc(len(key) + len(value))
            return answered(self._connection, future, f"{topic} in a transaction of {self._id}", quiet=True)

    async def offsets(self, group: str, commits: Mapping[Partition, Commit]) -> None:
        """See Transactor. Raises Fenced, TransactionFailed, Oversized (before anything is sent)."""
        with self._latched(f"offsets of {group}"):
            self._require_open()
            places = self._connection.commits(commits)
            if places:
                async with asyncio.timeout(self._connection.answer_s):
                    await self._producer.send_offsets_to_transaction(places, self._connection.full(group))

    async def commit(self) -> None:
        """See Transactor. Every send is acknowledged before the commit is asked for. Raises LogUnavailable when the
        broker's answer did not come: the outcome is open until the next owner of the id has started."""
        with self._latched("commit"):
            self._require_open()
            async with asyncio.timeout(self._connection.answer_s):
                await asyncio.gather(*self._sent)
                await self._producer.commit_transaction()
            self._open = False

    async def abort(self) -> None:
        with self._latched("abort"):
            if self._open:
                async with asyncio.timeout(self._connection.answer_s):
                    await self._producer.abort_transaction()
            self._open = False

    async def leave(self) -> None:
        """Abort what is open. What the producer's state does not allow to abort is left to the broker: the next
        owner's start aborts it, or the transaction time-out does."""
        if self._open and not isinstance(self._failed, Fenced):
            async with parting(self._connection):
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
        except (Fenced, NotAuthorized, Oversized, TopicMissing, TransactionFailed) as error:
            self._failed = error
            raise
        except LogUnavailable as error:
            if isinstance(error.__cause__, TimeoutError):
                self._failed = error
                raise
            self._failed = TransactionFailed(str(error))
            raise self._failed from error
