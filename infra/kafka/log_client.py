"""The log on Apache Kafka: `KafkaLog` implements `infra.log.Log` with aiokafka.

After a crash, take ownership before you read: enter the transactor of a partition task first, then read `commits`.
Entering fences the last owner and waits for the transactions that it left open. Commits that are read earlier may be
older than what that owner committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

from aiokafka import TopicPartition
from aiokafka.admin import NewTopic, RecordsToDelete
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaError, TopicAlreadyExistsError, UnknownTopicOrPartitionError, for_code
from aiokafka.protocol.metadata import MetadataRequest

from turnlog.infra.kafka.admin import Admin
from turnlog.infra.kafka.aiokafka_changes import MendedConsumer
from turnlog.infra.kafka.connection import (
    ANSWER_TIMEOUT_S,
    CLOSE_TIMEOUT_S,
    REQUEST_TIMEOUT_MS,
    RETRY_S,
    UNSEEN,
    Connection,
    Membership,
    convert_errors,
    typed_error,
)
from turnlog.infra.kafka.producers import KafkaAppender, KafkaTransactor, producing, while_it_sends
from turnlog.infra.kafka.readers import KafkaGroupReader, KafkaReader, consuming, stable_commits
from turnlog.infra.kafka.security import Login
from turnlog.infra.log import (
    HANGING_S,
    PATIENT_S,
    Appender,
    Assigned,
    BrokenAssignment,
    Commit,
    GroupReader,
    LacksReplicas,
    Partition,
    PartitionsChanged,
    Reader,
    TopicMissing,
    TopicSpec,
    Transactor,
)
from turnlog.kafka_settings import KafkaSettings
from turnlog.schemas.topics import BY_NAME, CATALOGUE

INTERNAL = ("__consumer_offsets", "__transaction_state")
LOOK_S = 3.0
"""Seconds within which a broker must answer to count as alive."""


class KafkaLog:
    """See Log. Create one per event loop. Clients are created when they are first needed, so the constructor is
    cheap."""

    def __init__(
        self,
        bootstrap: str,
        *,
        prefix: str = "",
        membership: Membership | None = None,
        login: Login | None = None,
        answer_s: float = ANSWER_TIMEOUT_S,
        close_s: float = CLOSE_TIMEOUT_S,
        role: str = "",
        request_ms: int = REQUEST_TIMEOUT_MS,
        counts: Mapping[str, int] | None = None,
    ) -> None:
        """Set the address and the limits; nothing is connected yet.

        * `bootstrap`: host:port[,host:port].
        * `prefix`: put before the name of every topic, group and transactional id.
        * `membership`: time-outs of the group readers; defaults to `Membership()`.
        * `login`: defaults to PLAINTEXT.
        * `answer_s`: seconds after which a missing acknowledgement raises LogUnavailable.
        * `close_s`: maximum seconds for closing a client.
        * `role`: role under whose name bytes read and written are counted.
        * `request_ms`: time-out of one request in milliseconds.
        * `counts`: number of partitions that each topic must have.
        """
        self._connection = Connection(
            bootstrap,
            prefix,
            membership or Membership(),
            login or Login(KafkaSettings()),
            answer_s,
            close_s,
            role,
            request_ms,
        )
        self._shared = AsyncExitStack()
        self._making = asyncio.Lock()
        self._looking = asyncio.Lock()
        self._admin: Admin | None = None
        self._offsets: dict[bool, MendedConsumer] = {}
        self._partitions: dict[str, int] = {}
        """Partition counts of the topics seen so far. Entries stay valid, because only `run delete` deletes topics."""
        self._counts = counts or {}

    @classmethod
    def of(cls, kafka: KafkaSettings, membership: Membership | None = None, *, role: str = "") -> KafkaLog:
        """Create the log that `kafka` describes. `kafka.bootstrap` must be filled in."""
        counts = {topic.name: kafka.count(topic.partitions) for topic in CATALOGUE}
        return cls(
            kafka.bootstrap, prefix=kafka.prefix, membership=membership, login=Login(kafka), role=role, counts=counts
        )

    async def close(self) -> None:
        """Close the clients for topics, offsets and commits. Appenders and readers are closed by their own context
        managers."""
        await self._shared.aclose()
        self._admin = None
        self._offsets = {}

    async def cluster(self) -> str:
        """See Log. Raises LogUnavailable."""
        admin = await self._admin_client()
        with convert_errors(self._connection, "request the cluster's id"):
            async with asyncio.timeout(self._connection.answer_s):
                return str((await admin._send_request(MetadataRequest([]))).to_object()["cluster_id"])

    async def topics(self, *, configs: bool = False) -> dict[str, TopicSpec]:
        """See Log. Each configuration is complete, broker defaults included. It is empty if this principal lacks
        DescribeConfigs."""
        described = await self._describe_topics(self._ours, configs=configs)
        specs = {(name := self._connection.short(full)): replace(spec, name=name) for full, spec in described.items()}
        self._partitions |= {name: spec.partitions for name, spec in specs.items()}
        return specs

    async def internal_topics(self) -> dict[str, TopicSpec]:
        """Return the topics in which Kafka stores offsets and transactions, as far as they exist. Raises
        LogUnavailable."""
        return await self._describe_topics(lambda topic: bool(topic["is_internal"]), configs=True)

    async def brokers(self) -> dict[int, dict[str, str]]:
        """Return the configuration of every broker by broker id, as far as this principal may see it. Raises
        LogUnavailable."""
        admin = await self._admin_client()
        with convert_errors(self._connection, "describe brokers"):
            async with asyncio.timeout(self._connection.answer_s):
                names = [str(broker["node_id"]) for broker in (await admin.describe_cluster())["brokers"]]
                found = await _configs(admin, names, ConfigResourceType.BROKER)
        return {int(name): found[name] for name in names}

    async def _describe_topics(
        self, wanted: Callable[[dict[str, object]], bool], *, configs: bool
    ) -> dict[str, TopicSpec]:
        """Return the topics for which `wanted` is true, by full name."""
        admin = await self._admin_client()
        with convert_errors(self._connection, "describe topics"):
            async with asyncio.timeout(self._connection.answer_s):
                found = [topic for topic in await admin.describe_topics() if wanted(topic)]
                known = await _configs(admin, [topic["topic"] for topic in found] if configs else ())
        return {
            (name := topic["topic"]): TopicSpec(
                name, len(topic["partitions"]), min((len(one["replicas"]) for one in topic["partitions"]), default=0),
                known.get(name, {}),
            )
            for topic in found
        }  # fmt: skip

    async def create_topics(self, specs: Sequence[TopicSpec]) -> None:
        """See Log. Topics that already exist are left unchanged. Raises LogUnavailable."""
        admin = await self._admin_client()
        wanted = [
            NewTopic(
                self._connection.full(spec.name), spec.partitions, spec.replication, topic_configs=dict(spec.config)
            )
            for spec in specs
        ]
        with convert_errors(self._connection, "create topics"):
            async with asyncio.timeout(self._connection.answer_s):
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
        with convert_errors(self._connection, "delete records"):
            async with asyncio.timeout(self._connection.answer_s):
                await admin.delete_records({place: RecordsToDelete(offset) for place, offset in places.items()})

    async def delete_topics(self, names: Sequence[str]) -> None:
        """See RemovableLog. Raises LogUnavailable."""
        admin, full = await self._admin_client(), {self._connection.full(name) for name in names}
        with convert_errors(self._connection, "delete topics"):
            async with asyncio.timeout(self._connection.answer_s):
                there = {topic["topic"] for topic in await admin.describe_topics()} & full
                answer = await admin.delete_topics(sorted(there)) if there else None
                for name, code in answer.topic_error_codes if answer else ():
                    if code and for_code(code) is not UnknownTopicOrPartitionError:
                        raise typed_error(self._connection, f"delete topic {name}", for_code(code)())
                while full & {topic["topic"] for topic in await admin.describe_topics()}:  # noqa: ASYNC110
                    await asyncio.sleep(RETRY_S)
        for name in names:
            self._partitions.pop(name, None)

    async def delete_groups(self, groups: Sequence[str]) -> None:
        """See RemovableLog. Raises LogUnavailable."""
        admin = await self._admin_client()
        for group in groups:
            with convert_errors(self._connection, f"delete group {group}"):
                async with asyncio.timeout(self._connection.answer_s):
                    await admin.forget(self._connection.full(group))

    async def members(self, group: str) -> tuple[str, ...]:
        """See Log. Raises LogUnavailable."""
        admin = await self._admin_client()
        with convert_errors(self._connection, f"members of {group}"):
            async with asyncio.timeout(self._connection.answer_s):
                return await admin.members(self._connection.full(group))

    async def sizes(self, topics: Sequence[str]) -> dict[str, int]:
        """See RemovableLog. Raises LogUnavailable."""
        counts = {self._connection.full(name): await self._partition_count(name, None) for name in topics}
        admin = await self._admin_client()
        with convert_errors(self._connection, "request log sizes"):
            async with asyncio.timeout(self._connection.answer_s):
                found = await admin.sizes(counts)
        return {self._connection.short(name): size for name, size in found.items()}

    async def transactional_ids(self) -> frozenset[str]:
        """See RemovableLog. Raises LogUnavailable."""
        admin, prefix = await self._admin_client(), self._connection.prefix
        with convert_errors(self._connection, "list transactional ids"):
            async with asyncio.timeout(self._connection.answer_s):
                found = await admin.transactional_ids()
        return frozenset(self._connection.short(name) for name in found if name.startswith(prefix))

    @asynccontextmanager
    async def appender(self) -> AsyncIterator[Appender]:
        """See Log. Leaving the block flushes. Cancels the block and raises ProducerDied if the client's sender task
        ends."""
        async with producing(self._connection) as producer, while_it_sends(self._connection, producer):
            yield KafkaAppender(self._connection, producer, self._checked_partition_count)

    @asynccontextmanager
    async def transactor(self, transactional_id: str) -> AsyncIterator[Transactor]:
        async with producing(self._connection, transactional_id) as producer:
            transactor = KafkaTransactor(self._connection, producer, self._checked_partition_count, transactional_id)
            try:
                yield transactor
            finally:
                await transactor.leave()

    @asynccontextmanager
    async def reader(self, *, patient: bool = False, committed: bool = True) -> AsyncIterator[Reader]:
        pause_s = PATIENT_S if patient else 0.0
        async with consuming(self._connection, committed=committed, pause_s=pause_s) as consumer:
            yield KafkaReader(self._connection, consumer)

    @asynccontextmanager
    async def group_reader(
        self, group: str, topics: Sequence[str], *, assigned: Assigned, revoked: Assigned, instance: str | None = None,
        pause_s: float = 0.0,
    ) -> AsyncIterator[GroupReader]:  # fmt: skip
        """See Log. Entering does not wait for the assignment; poll() does. Leaving calls `revoked` for the assigned
        partition tasks. Raises TopicMissing, PartitionsChanged, LogUnavailable. Raises BrokenAssignment if the topics
        differ in their number of partitions."""
        for topic in topics:
            await self._checked_partition_count(topic, None)
        counts = {topic: self._partitions[topic] for topic in topics}
        if len(set(counts.values())) != 1:
            raise BrokenAssignment(
                f"{group}: partition tasks cannot move as a whole, because partition counts differ: {counts}"
            )
        async with (
            consuming(self._connection, pause_s=pause_s) as consumer,
            consuming(self._connection, group=group, instance=instance) as member,
        ):
            units = min(counts.values())
            reader = KafkaGroupReader(self._connection, consumer, member, topics, assigned, revoked, units=units)
            try:
                yield reader
            finally:
                await reader.leave()

    async def start_offsets(self, partitions: Sequence[Partition]) -> dict[Partition, int]:
        """See Log. Raises TopicMissing, LogUnavailable."""
        places, consumer = await self._places(partitions), await self._offset_client(committed=True)
        with convert_errors(self._connection, "start offsets"):
            consumer.add_topics({place.topic for place in places})
            found = await consumer.beginning_offsets(list(places))
        return {places[place]: offset for place, offset in found.items()}

    async def end_offsets(self, partitions: Sequence[Partition], *, committed: bool = True) -> dict[Partition, int]:
        """See Log. Raises TopicMissing, LogUnavailable."""
        places, consumer = await self._places(partitions), await self._offset_client(committed=committed)
        with convert_errors(self._connection, "end offsets"):
            consumer.add_topics({place.topic for place in places})
            found = await consumer.end_offsets(list(places))
        return {places[place]: offset for place, offset in found.items()}

    async def offset_since(self, partition: Partition, since_ms: int) -> int:
        """See Log. Raises TopicMissing, LogUnavailable."""
        [place], consumer = await self._places([partition]), await self._offset_client(committed=True)
        with convert_errors(self._connection, "offsets by time"):
            consumer.add_topics([place.topic])
            found = (await consumer.offsets_for_times({place: max(since_ms, 0)}))[place]
        return found.offset if found else (await self.end_offsets([partition]))[partition]

    async def groups(self) -> frozenset[str]:
        """See Log. Raises LogUnavailable."""
        admin, prefix = await self._admin_client(), self._connection.prefix
        with convert_errors(self._connection, "list groups"):
            async with asyncio.timeout(self._connection.answer_s):
                found = [str(name) for name, _ in await admin.list_consumer_groups()]
        return frozenset(self._connection.short(name) for name in found if name.startswith(prefix))

    async def commits(self, group: str, partitions: Sequence[Partition]) -> dict[Partition, Commit]:
        """See Log. Raises LogUnavailable. Raises TransactionHanging if a transaction that commits one of them never
        ends."""
        places = {self._connection.place(name): name for name in partitions}
        admin = await self._admin_client()
        with convert_errors(self._connection, f"commits of {group}"):
            async with asyncio.timeout(self._connection.answer_s):
                found = await stable_commits(
                    admin, self._connection.full(group), list(places),
                    patience_s=min(HANGING_S, self._connection.answer_s / 2),
                )  # fmt: skip
        return {places[place]: commit for place, commit in found.items()}

    async def committed_partitions(self, group: str) -> frozenset[Partition]:
        """See Log. Raises LogUnavailable."""
        admin = await self._admin_client()
        with convert_errors(self._connection, f"commits of {group}"):
            async with asyncio.timeout(self._connection.answer_s):
                found = await stable_commits(admin, self._connection.full(group), None)
        return frozenset(Partition(self._connection.short(topic), number) for topic, number in found)

    async def check_replicas(self, topic: str) -> None:
        """Check that partitions accept appends now and that their number is as configured.

        This covers `topic`, the catalogue's topics seen so far, and Kafka's internal topics for offsets and
        transactions. Raises LacksReplicas, PartitionsChanged, TopicMissing, LogUnavailable.
        """
        await self._checked_partition_count(topic, None)
        admin = await self._admin_client()
        names = [self._connection.full(name) for name in self._partitions if name == topic or name in BY_NAME]
        with convert_errors(self._connection, "describe replicas"):
            question = MetadataRequest([*names, *INTERNAL], allow_auto_topic_creation=False)
            described = (await admin._send_request(question)).to_object()["topics"]
            for found in described:
                if found["partitions"]:
                    self._check_count(self._connection.short(found["topic"]), len(found["partitions"]))
            partitions = [(found["topic"], one) for found in described for one in found["partitions"]]
            await admin._client.force_metadata_update()  # without it, a broker that came back is not asked at all
            brokers = sorted({broker for _, one in partitions for broker in one["isr"]})
            answers = await asyncio.gather(*(_answers(admin, broker) for broker in brokers))
            there = {broker for broker, answers_us in zip(brokers, answers, strict=True) if answers_us}
            doubtful = [(name, one) for name, one in partitions if len(there & {*one["isr"]}) < len(one["replicas"])]
            configs = await _configs(admin, sorted({name for name, _ in doubtful}))
        short = [(name, one, have, want) for name, one in doubtful
                 if (have := len(there & {*one["isr"]})) < (want := _in_sync(configs[name], one))]  # fmt: skip
        if short:
            name, one, have, want = short[0]
            away = sorted({broker for _, one, *_ in short for broker in one["replicas"]} - there)
            raise LacksReplicas(
                f"{len(short)} partitions accept no appends, {name}[{one['partition']}] among them: {have} of "
                f"{len(one['replicas'])} replicas are in sync and answer, min.insync.replicas is {want}; brokers away "
                f"or behind: {', '.join(map(str, away)) or 'none'}; bring them back"
            )

    async def _admin_client(self) -> Admin:
        async with self._making:
            if self._admin is None:
                admin = Admin(**self._connection.options())
                try:
                    with convert_errors(self._connection, "connect"):
                        await admin.start()
                except BaseException:
                    await admin.close()
                    raise
                self._shared.push_async_callback(admin.close)
                self._admin = admin
        return self._admin

    async def _offset_client(self, *, committed: bool) -> MendedConsumer:
        """Return a consumer that fetches nothing, because a long poll would delay its answers about offsets."""
        async with self._making:
            if committed not in self._offsets:
                client = consuming(self._connection, committed=committed)
                self._offsets[committed] = await self._shared.enter_async_context(client)
        return self._offsets[committed]

    async def _places(self, partitions: Iterable[Partition]) -> dict[TopicPartition, Partition]:
        for name in partitions:
            await self._partition_count(name.topic, name.number)
        return {self._connection.place(name): name for name in partitions}

    async def _checked_partition_count(self, topic: str, partition: int | None) -> int:
        """Like `_partition_count`, for callers that write or own partition tasks. Also raises PartitionsChanged."""
        count = await self._partition_count(topic, partition)
        self._check_count(topic, count)
        return count

    def _check_count(self, topic: str, count: int) -> None:
        if count != (due := self._counts.get(topic, count)):
            raise PartitionsChanged(
                f"{self._connection.full(topic)} has {count} partitions, but the settings ask for {due} ([kafka] "
                "groups and rollouts): keyed records would go to other partitions than before, and to some that "
                "nobody reads. Kafka cannot remove partitions: set the number that the run began with, or continue "
                "with `turnlog run fork` under another [kafka] prefix"
            )

    async def _partition_count(self, topic: str, partition: int | None) -> int:
        """Return the number of partitions of `topic`. Raises TopicMissing at once; the client itself would look for the
        topic until its request timed out."""
        if topic not in self._partitions:
            async with self._looking:  # hundreds may ask at once, and each answer describes the whole cluster
                if topic not in self._partitions:
                    await self._look_up(topic)
        if topic not in self._partitions:
            raise TopicMissing(f"{self._connection.full(topic)} does not exist: {UNSEEN}")
        if partition is not None and not 0 <= partition < self._partitions[topic]:
            raise TopicMissing(f"{topic} has no partition {partition}: it has {self._partitions[topic]}")
        return self._partitions[topic]

    async def _look_up(self, topic: str) -> None:
        admin = await self._admin_client()
        with convert_errors(self._connection, f"look up {topic}"):
            async with asyncio.timeout(self._connection.answer_s):
                found = await admin.describe_topics()
        self._know(one for one in found if self._ours(one))

    def _know(self, topics: Iterable[Mapping[str, Any]]) -> None:
        self._partitions |= {self._connection.short(one["topic"]): len(one["partitions"]) for one in topics}

    def _ours(self, topic: dict[str, object]) -> bool:
        return not topic["is_internal"] and str(topic["topic"]).startswith(self._connection.prefix)

    async def _until_usable(self, names: set[str]) -> None:
        """Wait until every partition of these topics (full names) has a leader, and remember their partition counts:
        another broker may not know the topics yet."""
        admin = await self._admin_client()
        while True:
            topics = {topic["topic"]: topic for topic in await admin.describe_topics()}
            found = [topics[name] for name in names if name in topics and not topics[name]["error_code"]]
            if len(found) == len(names) and all(p["leader"] >= 0 for topic in found for p in topic["partitions"]):
                self._know(found)
                return
            await asyncio.sleep(RETRY_S)


async def _answers(admin: Admin, broker: int) -> bool:
    """Return True if the broker answers now. A broker that is stopped, or that lost its controllers along with the
    other brokers, still counts as in sync."""
    with suppress(KafkaError, OSError):
        async with asyncio.timeout(LOOK_S):
            await admin._send_request(MetadataRequest([]), broker)
            return True
    return False


def _in_sync(config: Mapping[str, str], partition: Mapping[str, Any]) -> int:
    """Return how many in-sync replicas an append needs. If this principal may not read the configuration, assume the
    value that `topics apply` sets."""
    count = len(partition["replicas"])
    return min(count, int(config.get("min.insync.replicas", max(1, count - 1))))


async def _configs(
    admin: Admin, names: Sequence[str], kind: ConfigResourceType = ConfigResourceType.TOPIC
) -> dict[str, dict[str, str]]:
    """Return configurations, of topics by full name or of brokers by id."""
    if not names:
        return {}
    answers = await admin.describe_configs([ConfigResource(kind, name) for name in names])
    return {
        name: {str(entry[0]): str(entry[1]) for entry in entries}
        for answer in answers
        for _, _, _, name, entries in answer.resources
    }
