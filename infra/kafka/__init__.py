"""The log on Apache Kafka: `KafkaLog` is `infra.log.Log` over aiokafka.

Ownership comes before reading: after a crash, enter the transactor of a unit first (it fences the last owner and waits
for what that one left open), then read `commits`. Until then they may be older than what that owner committed.

What a group committed is asked for as Kafka gives it to one who wants stable offsets (OffsetFetch 7, KIP-447).
aiokafka's own request ends at version 3, whose answer may be older than what a reader of the topics sees already: the
markers of a transaction go to each partition that it wrote to, that of the offsets among them, one after another.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from itertools import groupby
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic, RecordsToDelete
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaError, TopicAlreadyExistsError, for_code
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import Boolean, CompactArray, CompactString, Int16, Int32, Int64, Schema, TaggedFields

from turnlog.infra.kafka.connection import (
    ANSWER_TIMEOUT_S,
    REQUEST_TIMEOUT_MS,
    Connection,
    Membership,
    typed,
    typed_error,
)
from turnlog.infra.kafka.producers import KafkaAppender, KafkaTransactor, producing
from turnlog.infra.kafka.readers import KafkaGroupReader, KafkaReader, consuming
from turnlog.infra.log import (
    Appender,
    Assigned,
    BrokenAssignment,
    Commit,
    GroupReader,
    Partition,
    Reader,
    TopicMissing,
    TopicSpec,
    Transactor,
)

RETRY_S = 0.05
"""Between two looks at a coordinator that loads, or at offsets of an open transaction: neither can be awaited."""
OFFSET_FETCH = 9
UNSTABLE_OFFSET_COMMIT = 88
"""A transaction that commits offsets of the partition is not over."""
TAGS = ("tags", TaggedFields)


class _Answer(Response):  # type: ignore[misc]
    API_KEY = OFFSET_FETCH
    API_VERSION = 7
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("topics", CompactArray(
            ("name", CompactString("utf-8")),
            ("partitions", CompactArray(
                ("partition", Int32), ("offset", Int64), ("leader_epoch", Int32), ("metadata", CompactString("utf-8")),
                ("error_code", Int16), TAGS,
            )),
            TAGS,
        )),
        ("error_code", Int16),
        TAGS,
    )  # fmt: skip


class _Question(RequestStruct):  # type: ignore[misc]
    API_KEY = OFFSET_FETCH
    API_VERSION = 7
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _Answer
    SCHEMA = Schema(
        ("group", CompactString("utf-8")),
        ("topics", CompactArray(("name", CompactString("utf-8")), ("partitions", CompactArray(Int32)), TAGS)),
        ("require_stable", Boolean),
        TAGS,
    )


class _StableOffsets(Request[_Question]):  # type: ignore[misc]
    API_KEY = OFFSET_FETCH

    def __init__(self, group: str, places: Sequence[TopicPartition]) -> None:
        self._group = group
        self._places = sorted(places)

    def build(self, request_struct_class: type[_Question]) -> _Question:
        topics: list[Any] = [(topic, [place.partition for place in places], {})
                  for topic, places in groupby(self._places, key=lambda place: place.topic)]  # fmt: skip
        return request_struct_class(self._group, topics, True, {})


async def stable_commits(
    admin: AIOKafkaAdminClient, group: str, places: Sequence[TopicPartition]
) -> Mapping[TopicPartition, Commit]:
    """The group's commits, once its coordinator has them and no transaction that commits one is under way."""
    while True:
        try:
            answer = await admin._send_request(_StableOffsets(group, places), await admin.find_coordinator(group))
            found, codes = _read(answer)
        except KafkaError as error:
            if not error.retriable:
                raise
        else:
            if not codes:
                return found
            if UNSTABLE_OFFSET_COMMIT not in codes and not all(for_code(code).retriable for code in codes):
                raise for_code(max(codes))(f"offsets of {group}")
        await asyncio.sleep(RETRY_S)


def _read(answer: Any) -> tuple[dict[TopicPartition, Commit], set[int]]:
    """Commits, and the error codes of the group and of its partitions."""
    found: dict[TopicPartition, Commit] = {}
    codes = {answer.error_code}
    for topic, partitions, _ in answer.topics:
        for partition, offset, _, metadata, code, _ in partitions:
            codes.add(code)
            if offset >= 0:
                found[TopicPartition(topic, partition)] = Commit(offset, metadata or "")
    return found, codes - {0}


"""Between two looks at a coordinator that loads or a topic that is being made: neither can be awaited."""


class KafkaLog:
    """See Log. One per event loop; clients are made when they are first needed, so making one costs nothing."""

    def __init__(self, bootstrap: str, *, prefix: str = "", membership: Membership | None = None) -> None:
        """`bootstrap` is host:port[,host:port]; `prefix` goes before every topic, group and transactional id;
        `membership`: time-outs of its group readers, if not the usual ones."""
        self._connection = Connection(bootstrap, prefix, membership or Membership())
        self._shared = AsyncExitStack()
        self._making = asyncio.Lock()
        self._admin: AIOKafkaAdminClient | None = None
        self._offsets: dict[bool, AIOKafkaConsumer] = {}
        self._partitions: dict[str, int] = {}
        """Of topics that were seen; topics are never deleted, and their counts never change."""

    async def close(self) -> None:
        """Release the clients for topics, offsets and commits; appenders and readers are released by their blocks."""
        await self._shared.aclose()
        self._admin = None
        self._offsets = {}

    async def topics(self) -> dict[str, TopicSpec]:
        """See Log. Each with its whole configuration, defaults of the broker included."""
        described = await self._described(self._ours)
        specs = {(name := self._connection.short(full)): replace(spec, name=name) for full, spec in described.items()}
        self._partitions |= {name: spec.partitions for name, spec in specs.items()}
        return specs

    async def internal_topics(self) -> dict[str, TopicSpec]:
        """Where Kafka keeps offsets and transactions, as far as these were used. Raises LogUnavailable."""
        return await self._described(lambda topic: bool(topic["is_internal"]))

    async def _described(self, wanted: Callable[[dict[str, object]], bool]) -> dict[str, TopicSpec]:
        """By full name."""
        admin = await self._admin_client()
        with typed(self._connection, "describe topics"):
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                found = [topic for topic in await admin.describe_topics() if wanted(topic)]
                configs = await _configs(admin, [topic["topic"] for topic in found])
        return {
            (name := topic["topic"]): TopicSpec(
                name, len(topic["partitions"]), min((len(one["replicas"]) for one in topic["partitions"]), default=0),
                configs[name],
            )
            for topic in found
        }  # fmt: skip

    async def create_topics(self, specs: Sequence[TopicSpec]) -> None:
        """See Log. A topic that exists is left as it is. Raises LogUnavailable."""
        admin = await self._admin_client()
        wanted = [
            NewTopic(
                self._connection.full(spec.name), spec.partitions, spec.replication, topic_configs=dict(spec.config)
            )
            for spec in specs
        ]
        with typed(self._connection, "create topics"):
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                answer = await admin.create_topics(wanted)
                for name, code, *said in answer.topic_errors:
                    kind = for_code(code)
                    if code and kind is not TopicAlreadyExistsError:
                        raise typed_error(self._connection, f"create topic {name}", kind(*said))
                await self._until_usable({topic.name for topic in wanted})

    async def delete_before(self, offsets: Mapping[Partition, int]) -> None:
        """See Log. Raises TopicMissing, LogUnavailable."""
        places = {place: offsets[name] for place, name in (await self._places(list(offsets))).items()}
        admin = await self._admin_client()
        with typed(self._connection, "delete records"):
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await admin.delete_records({place: RecordsToDelete(offset) for place, offset in places.items()})

    @asynccontextmanager
    async def appender(self) -> AsyncIterator[Appender]:
        """See Log. Leaving flushes."""
        async with producing(self._connection) as producer:
            yield KafkaAppender(self._connection, producer, self._known)

    @asynccontextmanager
    async def transactor(self, transactional_id: str) -> AsyncIterator[Transactor]:
        async with producing(self._connection, transactional_id) as producer:
            transactor = KafkaTransactor(self._connection, producer, self._known, transactional_id)
            try:
                yield transactor
            finally:
                await transactor.leave()

    @asynccontextmanager
    async def reader(self, *, patient: bool = False) -> AsyncIterator[Reader]:
        async with consuming(self._connection, patient=patient) as consumer:
            yield KafkaReader(self._connection, consumer)

    @asynccontextmanager
    async def group_reader(
        self, group: str, topics: Sequence[str], *, assigned: Assigned, revoked: Assigned, instance: str | None = None,
        patient: bool = False,
    ) -> AsyncIterator[GroupReader]:  # fmt: skip
        """See Log. Entering does not wait for the assignment: poll() does. Leaving calls `revoked` for what is held.
        Raises TopicMissing, BrokenAssignment for topics that differ in partitions, LogUnavailable."""
        for topic in topics:
            await self._known(topic, None)
        counts = {topic: self._partitions[topic] for topic in topics}
        if len(set(counts.values())) != 1:
            raise BrokenAssignment(f"{group}: units cannot move as a whole, partition counts differ: {counts}")
        async with (
            consuming(self._connection, patient=patient) as consumer,
            consuming(self._connection, group=group, instance=instance) as member,
        ):
            reader = KafkaGroupReader(self._connection, consumer, member, topics, assigned, revoked)
            try:
                yield reader
            finally:
                await reader.leave()

    async def start_offsets(self, partitions: Sequence[Partition]) -> dict[Partition, int]:
        """See Log. Raises TopicMissing, LogUnavailable."""
        places, consumer = await self._places(partitions), await self._offset_client(committed=True)
        with typed(self._connection, "start offsets"):
            _ask_of_all(consumer, places)
            found = await consumer.beginning_offsets(list(places))
        return {places[place]: offset for place, offset in found.items()}

    async def end_offsets(self, partitions: Sequence[Partition], *, committed: bool = True) -> dict[Partition, int]:
        """See Log. Raises TopicMissing, LogUnavailable."""
        places, consumer = await self._places(partitions), await self._offset_client(committed=committed)
        with typed(self._connection, "end offsets"):
            _ask_of_all(consumer, places)
            found = await consumer.end_offsets(list(places))
        return {places[place]: offset for place, offset in found.items()}

    async def groups(self) -> frozenset[str]:
        """See Log. Raises LogUnavailable."""
        admin, prefix = await self._admin_client(), self._connection.prefix
        with typed(self._connection, "list groups"):
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                found = [str(name) for name, _ in await admin.list_consumer_groups()]
        return frozenset(self._connection.short(name) for name in found if name.startswith(prefix))

    async def commits(self, group: str, partitions: Sequence[Partition]) -> dict[Partition, Commit]:
        """See Log. Raises LogUnavailable, also for a transaction that is open for longer than an answer may take."""
        places = {self._connection.place(name): name for name in partitions}
        admin = await self._admin_client()
        with typed(self._connection, f"commits of {group}"):
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                found = await stable_commits(admin, self._connection.full(group), list(places))
        return {places[place]: commit for place, commit in found.items()}

    async def _admin_client(self) -> AIOKafkaAdminClient:
        async with self._making:
            if self._admin is None:
                admin = AIOKafkaAdminClient(
                    bootstrap_servers=self._connection.bootstrap, request_timeout_ms=REQUEST_TIMEOUT_MS
                )
                try:
                    with typed(self._connection, "connect"):
                        await admin.start()
                except BaseException:
                    await admin.close()
                    raise
                self._shared.push_async_callback(admin.close)
                self._admin = admin
        return self._admin

    async def _offset_client(self, *, committed: bool) -> AIOKafkaConsumer:
        """A consumer that fetches nothing: a long poll would hold its answers up."""
        async with self._making:
            if committed not in self._offsets:
                client = consuming(self._connection, committed=committed)
                self._offsets[committed] = await self._shared.enter_async_context(client)
        return self._offsets[committed]

    async def _places(self, partitions: Iterable[Partition]) -> dict[TopicPartition, Partition]:
        for name in partitions:
            await self._known(name.topic, name.number)
        return {self._connection.place(name): name for name in partitions}

    async def _known(self, topic: str, partition: int | None) -> None:
        """Raises TopicMissing, at once: the client itself would look for the topic until its request timed out."""
        if topic not in self._partitions:
            admin = await self._admin_client()
            with typed(self._connection, f"look up {topic}"):
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    found = await admin.describe_topics()
            self._partitions |= {
                self._connection.short(topic["topic"]): len(topic["partitions"]) for topic in found if self._ours(topic)
            }
        if topic not in self._partitions:
            raise TopicMissing(f"{self._connection.full(topic)} does not exist: run `turnlog topics apply`")
        if partition is not None and not 0 <= partition < self._partitions[topic]:
            raise TopicMissing(f"{topic} has no partition {partition}: it has {self._partitions[topic]}")

    def _ours(self, topic: dict[str, object]) -> bool:
        return not topic["is_internal"] and str(topic["topic"]).startswith(self._connection.prefix)

    async def _until_usable(self, names: set[str]) -> None:
        """Wait until every partition of these topics (full names) has a leader."""
        admin = await self._admin_client()
        while True:
            topics = {topic["topic"]: topic for topic in await admin.describe_topics()}
            found = [topics[name] for name in names if name in topics and not topics[name]["error_code"]]
            if len(found) == len(names) and all(p["leader"] >= 0 for topic in found for p in topic["partitions"]):
                return
            await asyncio.sleep(RETRY_S)


def _ask_of_all(consumer: AIOKafkaConsumer, places: Iterable[TopicPartition]) -> None:
    """Let one request find the leaders of all these topics: aiokafka itself asks for one topic, waits 0.1 s, asks for
    the next (a role that starts on the whole catalogue stood for two seconds)."""
    for topic in {place.topic for place in places}:
        consumer._client.add_topic(topic)


async def _configs(admin: AIOKafkaAdminClient, names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Configuration of topics by full name."""
    if not names:
        return {}
    answers = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, name) for name in names])
    return {
        name: {str(entry[0]): str(entry[1]) for entry in entries}
        for answer in answers
        for _, _, _, name, entries in answer.resources
    }
