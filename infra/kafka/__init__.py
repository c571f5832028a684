"""The log on Apache Kafka: `KafkaLog` is `infra.log.Log` over aiokafka.

Ownership comes before reading: after a crash, enter the transactor of a unit first (it fences the last owner and waits
for what that one left open), then read `commits`. Until then they may be older than what that owner committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic, RecordsToDelete
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import TopicAlreadyExistsError, for_code

from turnlog.infra.kafka.commits import stable_commits
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
        admin = await self._admin_client()
        with typed(self._connection, "describe topics"):
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                found = [topic for topic in await admin.describe_topics() if self._ours(topic)]
                configs = await _configs(admin, [topic["topic"] for topic in found])
        specs = {}
        for topic in found:
            name = self._connection.short(topic["topic"])
            replication = min((len(partition["replicas"]) for partition in topic["partitions"]), default=0)
            specs[name] = TopicSpec(name, len(topic["partitions"]), replication, configs[topic["topic"]])
        self._partitions |= {name: spec.partitions for name, spec in specs.items()}
        return specs

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
