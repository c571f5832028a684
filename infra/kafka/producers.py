"""Producers of KafkaLog: the plain idempotent one and the transactional one.

Both use acks=all and idempotence. There is no linger: one request is in flight per broker, and records that arrive
meanwhile go with the next one. There is no compression: zstd shrinks a turn by a factor of 1.8 at about 60 MB/s per
core (benchmarks/g4_turns.py), which costs the producer more than the appends themselves. If disks or networks are the
limit, set `compression.type` on the topics; the broker then compresses.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Mapping
from typing import Any

from aiokafka.errors import IllegalOperation, KafkaError, KafkaTimeoutError

from turnlog.infra.kafka.aiokafka_changes import QUICK_S, MendedProducer
from turnlog.infra.kafka.connection import (
    Connection,
    convert_errors,
    parting,
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
"""Seconds to ask up to three brokers for metadata, since two of three may accept connections and not answer."""
BATCH_BYTES = 1 << 20
"""Maximum bytes of one partition in one request; a larger record travels alone. Only one batch per partition is open at
a time, so a small limit would make every large record wait for the previous one."""
TRANSACTION_TIMEOUT_MS = 10_000
"""Transaction time-out. An abandoned transaction blocks every read_committed reader for this long (Kafka's default: 60
s)."""
RETRY_MS = 100
"""Milliseconds between attempts of a plain producer, aiokafka's default."""
TRANSACTION_RETRY_MS = 20
"""Milliseconds between attempts of a transactional producer. A transaction that begins with its offsets waits this long
while the markers of the previous one are being written (`infra.kafka.aiokafka_changes` shortens only the wait of a
transaction that begins with a send). All groups that end meanwhile wait as well: with 100 ms the p99 of benchmark G6 is
128 ms, with 20 ms about 55 ms."""

Known = Callable[[str, int | None], Awaitable[int]]
"""Returns the number of partitions of a topic. Raises TopicMissing if the topic, or the given partition, does not
exist. Free of cost once the topic is known."""


@contextlib.asynccontextmanager
async def producing(connection: Connection, transactional_id: str | None = None) -> AsyncIterator[MendedProducer]:
    """Start an aiokafka producer and stop it at the end. With a transactional id, the start fences the last owner,
    aborts its open transaction and waits for the markers (KIP-98). Raises LogUnavailable."""
    producer = MendedProducer(
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
        with convert_errors(connection, f"start producer {transactional_id or ''}".rstrip()):
            async with asyncio.timeout(connection.answer_s):
                await producer.start()
        yield producer
    finally:
        async with parting(connection, producer):
            await producer.stop()


@contextlib.asynccontextmanager
async def while_it_sends(connection: Connection, producer: MendedProducer) -> AsyncIterator[None]:
    """Cancel the block and raise ProducerDied if aiokafka's sender task ends. The client notifies nobody of it, and if
    the task was cancelled, its pending appends would never fail."""
    owner, ended = asyncio.current_task(), asyncio.Event()
    sender = producer.sender_task
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
            f"the producer on {connection.bootstrap} has stopped sending ({cause or 'without a reason'}): this "
            "process must exit; records without an acknowledgement may or may not be in the log"
        ) from cause
    finally:
        sender.remove_done_callback(end)


Held = Callable[[], Awaitable[bool]]
"""Returns True if an append that was not acknowledged in time is worth waiting for."""


class AppendTimer:
    """Timer that calls `fail` after `answer_s`, and starts anew each time that `held` returns True."""

    def __init__(self, where: str, answer_s: float, fail: Callable[[], None], held: Held | None) -> None:
        self._where, self._answer_s, self._fail, self._held = where, answer_s, fail, held
        self._loop = asyncio.get_running_loop()
        self._wait: asyncio.TimerHandle | asyncio.Task[None] = self._loop.call_later(self._answer_s, self._on_timeout)

    def over(self) -> None:
        """Stop the timer: the append was answered."""
        self._wait.cancel()

    def _on_timeout(self) -> None:
        if self._held is None:
            self._fail()
        else:
            self._wait = self._loop.create_task(self._extend_wait(self._held))

    async def _extend_wait(self, held: Held) -> None:
        if not await held():
            self._fail()
            return
        log.warning("append to %s: no acknowledgement yet, but the log answers: still waiting", self._where)
        self._wait = self._loop.call_later(self._answer_s, self._on_timeout)


def track_ack(
    connection: Connection, sent: asyncio.Future[Any], where: str, *, quiet: bool = False, held: Held | None = None
) -> asyncio.Future[tuple[int, int]]:
    """Return a future of (partition, offset) that follows aiokafka's future `sent`.

    Errors are those of `infra.log`. LogUnreachable is set after `answer_s` of the connection, unless `held` returns
    True. It is a future and not a coroutine, so that gathering thousands creates no tasks. Cancelling it leaves `sent`
    alone. With `quiet` its error is also raised elsewhere, and asyncio does not report it as never retrieved.
    """
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

    unanswered = connection.unanswered_error
    patience = AppendTimer(where, connection.answer_s, lambda: fail(unanswered(f"append to {where}")), held)
    sent.add_done_callback(settle)
    return answer


def _now_ms() -> int:
    """Return the timestamp of a new record in milliseconds."""
    return int(now_s() * 1000)


class KafkaAppender:
    """See Appender. It waits as long as some broker answers: if replicas are lacking, records are retained and their
    callers wait. After LogUnavailable it is unknown whether the record is on the log; the producer goes on trying and
    cannot write it twice."""

    def __init__(self, connection: Connection, producer: MendedProducer, known: Known) -> None:
        self._connection = connection
        self._producer = producer
        self._known = known
        self._written = BYTES.labels(connection.role, "written")
        self._order = asyncio.Lock()
        """Keeps appends in order. aiokafka's send may wait for a full batch to leave; without the lock a later call
        could overtake."""

    async def append(
        self, topic: str, key: bytes, value: bytes, *, headers: Headers = (), partition: int | None = None
    ) -> tuple[int, int]:
        """See Appender. Also raises Oversized."""
        return await (await self.submit(topic, key, value, headers=headers, partition=partition))

    async def submit(
        self, topic: str, key: bytes, value: bytes, *, headers: Headers = (), partition: int | None = None
    ) -> Awaitable[tuple[int, int]]:
        """See Appender. Also raises Oversized. Waits while the partition's open batch is full (back-pressure)."""
        count = await self._known(topic, partition)
        if partition is None:
            partition = partition_of(key, count)
        async with self._order:
            with convert_errors(self._connection, f"append to {topic}"):
                future = await self._enqueue(self._connection.full(topic), key, value, headers, partition)
        self._written.inc(len(key) + len(value))
        return track_ack(self._connection, future, topic, held=self._log_answers)

    async def _enqueue(
        self, topic: str, key: bytes, value: bytes, headers: Headers, partition: int | None
    ) -> asyncio.Future[Any]:
        """Return aiokafka's future of the acknowledgement once there is room in the batch. Raises KafkaTimeoutError if
        no broker answers."""
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
        """Return True if some broker answers."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ASK_ALL_S):
                return bool(await self._producer.client.force_metadata_update())
        return False


class KafkaTransactor:
    """See Transactor. The first error is final: every later call raises it again."""

    def __init__(self, connection: Connection, producer: MendedProducer, known: Known, transactional_id: str) -> None:
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
        with self._latch_errors("begin"):
            if self._open:
                raise TransactionFailed(f"{self._id}: a transaction is open already")
            await self._producer.begin_transaction()
            self._open = True
            self._sent = []

    async def send(
        self, topic: str, partition: int, key: bytes, value: bytes, *, headers: Headers = ()
    ) -> Awaitable[tuple[int, int]]:
        """See Transactor. Raises Fenced, TransactionFailed, TopicMissing, Oversized. The awaitable also raises
        Fenced."""
        with self._latch_errors(f"send to {topic}[{partition}]"):
            self._require_open()
            await self._known(topic, partition)
            async with self._order:
                try:
                    future = await self._producer.send(
                        self._connection.full(topic), value, key=key, partition=partition, headers=list(headers),
                        timestamp_ms=_now_ms(),
                    )  # fmt: skip
                except IllegalOperation:  # the transaction failed over an earlier send: raise the error of that one
                    async with asyncio.timeout(self._connection.answer_s):
                        await asyncio.gather(*self._sent)
                    raise
            self._sent.append(future)
            self._written.inc(len(key) + len(value))
            return track_ack(self._connection, future, f"{topic} in a transaction of {self._id}", quiet=True)

    async def offsets(self, group: str, commits: Mapping[Partition, Commit]) -> None:
        """See Transactor. Raises Fenced, TransactionFailed. Raises Oversized before anything is sent."""
        with self._latch_errors(f"offsets of {group}"):
            self._require_open()
            places = self._connection.commits(commits)
            if places:
                async with asyncio.timeout(self._connection.answer_s):
                    await self._producer.send_offsets_to_transaction(places, self._connection.full(group))

    async def commit(self) -> None:
        """See Transactor. All sends are acknowledged before the commit is requested. Raises LogUnavailable if the
        broker does not answer; the outcome is then unknown until the next owner of the id has started."""
        with self._latch_errors("commit"):
            self._require_open()
            async with asyncio.timeout(self._connection.answer_s):
                await asyncio.gather(*self._sent)
                await self._producer.commit_transaction()
            self._open = False

    async def abort(self) -> None:
        with self._latch_errors("abort"):
            if self._open:
                async with asyncio.timeout(self._connection.answer_s):
                    await self._producer.abort_transaction()
            self._open = False

    async def leave(self) -> None:
        """Abort the open transaction. If the producer's state does not allow that, the start of the next owner or the
        transaction time-out aborts it."""
        if self._open and not isinstance(self._failed, Fenced):
            async with parting(self._connection):
                await self._producer.abort_transaction()

    def _require_open(self) -> None:
        if not self._open:
            raise TransactionFailed(f"{self._id}: call begin() first")

    @contextlib.contextmanager
    def _latch_errors(self, doing: str) -> Generator[None]:
        """Raise the first error of this producer at every later call: a failed producer is never repaired."""
        if self._failed is not None:
            raise self._failed
        try:
            with convert_errors(self._connection, f"{self._id}: {doing}"):
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
