"""The log with events instead of bytes: catalogue, codec and schema registry combined."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from prometheus_client import Counter

from turnlog.infra.blobs import Blobs, externalize_payloads
from turnlog.infra.code_version import code_version
from turnlog.infra.log import Appender, Headers, Log, Record, Transactor, partition_of
from turnlog.infra.redaction.redactor import Redactor
from turnlog.infra.registry import Registry
from turnlog.infra.session_keys import SessionKeys, key_lost
from turnlog.names import CODE_HEADER, OUTPUT_TOKENS_HEADER, RECORD_HEADER, WRITER_HEADER
from turnlog.schemas import LaterKind, NotHeldYet, OtherRegistry, UndecodableRecord, UnknownSchemaId, UnknownSessionKey
from turnlog.schemas.avsc import stored_schema
from turnlog.schemas.codec import HEADER, Codec
from turnlog.schemas.content import WITH_CONTENT, sealable, sealed_schema
from turnlog.schemas.events import ALL, DeadLetter, Event, RunConfigured, TokenSnapshot, sampled_tokens
from turnlog.schemas.ids import dead_letter_id
from turnlog.schemas.topics import INLINE_LIMIT_BYTES, TOPIC_OF

log = logging.getLogger(__name__)
SEALED_TOPICS = frozenset(topic.name for topic in WITH_CONTENT)
CODE_RECORDS = frozenset({
    "RunConfigured", "RunPlanned", "RolloutRequested", "SessionStarted", "RewardAssigned", "RewardFailed",
    "ToolCallStarted", "GroupScored", "SampleBatchFormed", "StepCompleted", "WeightVersionPublished",
    "EngineRegistered",
})  # fmt: skip
"""Records whose header names the version of turnlog that wrote them: one or a few for each step on the way from a task
to weights. The many records of turns and tokens repeat what these say."""


class EventSink(Protocol):
    """Takes events that a runner or a sandbox worker writes."""

    @property
    def redactor(self) -> Redactor | None:
        """Masks texts before they are stored; None if [redaction] is off."""
        ...

    @property
    def keys(self) -> SessionKeys | None:
        """Keys that encrypt the content of sessions; None if [erasure] is off."""
        ...

    async def append(self, event: Event) -> tuple[int, int]:
        """Take an event, wait until it is durable, and return (partition, offset)."""
        ...

    async def submit(self, event: Event) -> Awaitable[tuple[int, int]]:
        """Take an event, which fixes its order, and return an awaitable for its position."""
        ...


class EventLog:
    """Appends and decodes events of the catalogue.

    `writer` names the role and its instance in a header. With `blobs`, payloads that are too large for a record are
    stored there first. Without `appender`, the log can only decode and transact. With `redactor`, texts are masked
    before a payload or a record is stored, and before they are encrypted. With `keys`, which the codec must have as its
    cipher, content is encrypted.
    """

    def __init__(
        self,
        log: Log,
        registry: Registry,
        codec: Codec,
        writer: str,
        *,
        blobs: Blobs | None = None,
        appender: Appender | None = None,
        keys: SessionKeys | None = None,
        redactor: Redactor | None = None,
    ) -> None:
        self.log = log
        self.keys = keys
        self.codec = codec
        self.redactor = redactor
        self._registry = registry
        self._writer = writer.encode()
        self._blobs = blobs
        self._appender = appender

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        log: Log,
        registry: Registry,
        *,
        writer: str,
        blobs: Blobs | None = None,
        keys: SessionKeys | None = None,
        redactor: Redactor | None = None,
    ) -> AsyncIterator[EventLog]:
        """Register every schema of the catalogue and start one producer. With `keys`, which are closed at the end,
        content is encrypted. Raises SchemaIncompatible, LogUnavailable."""
        sealed = {} if keys is None else await sealed_schema_ids(registry)
        codec = Codec(await schema_ids(registry), sealed_ids=sealed, cipher=keys)
        await asyncio.to_thread(code_version)  # git is asked once, and not while a record waits
        async with log.appender() as appender:
            events = cls(log, registry, codec, writer, blobs=blobs, appender=appender, keys=keys, redactor=redactor)
            if keys is None:
                yield events
                return
            keys.attach(events)
            try:
                yield events
            finally:
                await keys.close()

    @property
    def writable(self) -> bool:
        """Whether events can be appended, unlike to an archive."""
        return self._appender is not None

    async def append(self, event: Event) -> tuple[int, int]:
        """Append to the event's topic, wait for acks=all and return (partition, offset)."""
        return await (await self.submit(event))

    async def submit(self, event: Event, *, output_tokens: int | None = None) -> Awaitable[tuple[int, int]]:
        """Hand the event over, which fixes its order, and return an awaitable for the acknowledgement. Raises Oversized
        if the event is too large even without its payloads. Raises StoreUnavailable, SessionIsErased."""
        assert self._appender is not None
        topic = TOPIC_OF[type(event).__name__]
        await self._refresh_keys(topic.name)
        self.check_not_erased(event)
        if self.redactor is not None:
            event = await self.redactor.redact(event)
        if self._blobs is not None:
            event = await externalize_payloads(event, self._blobs)
        headers = self.headers(event, output_tokens=output_tokens)
        return await self._appender.submit(topic.name, topic.key_of(event), await self.encode(event), headers=headers)

    async def _refresh_keys(self, topic: str) -> None:
        """Look which sessions were erased, if that is due, for a record of a topic with content. Processes that handle
        no content have no right to."""
        if self.keys is not None and topic in SEALED_TOPICS:
            await self.keys.refresh_due()

    def check_not_erased(self, event: Event) -> None:
        """Raise SessionIsErased if the event holds content of a session that is known to be erased. For writers that
        store its payloads themselves: those of a refused event would stay until `turnlog gc` deletes them."""
        if self.codec.is_erased(event):
            self.codec.encode(event)

    async def encode(self, event: Event) -> bytes:
        """Return the value of an event's record. If content is encrypted, the key of the session is on the log before
        this returns. Raises SessionIsErased, WrongMasterKey, LogUnavailable, RegistryUnavailable, and the errors of
        `Codec.encode`."""
        try:
            return self.codec.encode(event)
        except UnknownSessionKey:
            assert self.keys is not None, "without a cipher, the codec asks for no key"
            await self.keys.prepare(event.session_id)
        return self.codec.encode(event)

    async def transact(self, transactor: Transactor, events: Sequence[Event], *, partitions: int = 1) -> None:
        """Append all of `events`, in order, in one transaction, or none. `partitions` is the partition count of those
        topics among them that have more than one.

        Everything is encoded before the transaction begins. Raises Fenced, TransactionFailed, Oversized,
        LogUnavailable, SessionIsErased. A failed transaction is never repaired: the caller's process ends.
        """
        await asyncio.gather(*await self.begin(transactor, events, lambda key: partition_of(key, partitions)))
        await transactor.commit()

    async def begin(
        self, transactor: Transactor, events: Sequence[Event], number: Callable[[bytes], int]
    ) -> list[Awaitable[tuple[int, int]]]:
        """Begin a transaction and hand `events` over in order. Return the awaitables, each for (partition, offset),
        that must complete before the commit. `number` maps a key to a partition in topics with more than one. Raises as
        `transact`."""
        if self.redactor is not None:
            events = [self.redactor.event(event) for event in events]
        values = [await self.encode(event) for event in events]
        await transactor.begin()
        acks = []
        for event, value in zip(events, values, strict=True):
            topic = TOPIC_OF[type(event).__name__]
            key = topic.key_of(event)
            partition = 0 if topic.partitions == "one" else number(key)
            acks.append(await transactor.send(topic.name, partition, key, value, headers=self.headers(event)))
        return acks

    def headers(self, event: Event, *, output_tokens: int | None = None) -> Headers:
        """Return the headers of an event's record: writer, record name, the version of turnlog for CODE_RECORDS, and
        the number of output tokens of a snapshot."""
        headers = [(WRITER_HEADER, self._writer), (RECORD_HEADER, type(event).__name__.encode())]
        if type(event).__name__ in CODE_RECORDS:
            headers.append((CODE_HEADER, code_version().encode()))
        if isinstance(event, TokenSnapshot):
            count = sampled_tokens(event) if output_tokens is None else output_tokens
            headers.append((OUTPUT_TOKENS_HEADER, str(count).encode()))
        return headers

    async def decode(self, record: Record) -> Event:
        """Return the event of a record.

        Raises LaterKind, which is counted, for a record to be skipped. Raises UndecodableRecord for a record to be
        dead-lettered; its subclass OtherRegistry means that the record itself may be intact. Raises
        RegistryUnavailable: retry, then end. Raises ContentKeyError if the content is encrypted and this process cannot
        read it; content whose key was erased has values that stand for it (schemas/content.py).
        """
        await self._refresh_keys(record.topic)
        try:
            event = await self._decode_record(record)
        except LaterKind as later:
            check_written(record, later.name)
            passed_over(record, later)
            raise
        except OtherRegistry:
            raise
        except UndecodableRecord as broken:
            check_written(record, self._schema_name(record.value, broken))
            raise
        check_written(record, type(event).__name__)
        return event

    async def decode_fast(self, record: Record) -> Event:
        """Return the event of a record as `decode` does, but without a look at the header and at keys that were erased
        meanwhile, if all that is needed is held here. For readers of whole partitions, whose own code looks at keys."""
        try:
            return self.codec.decode(record.value)
        except NotHeldYet:
            return await self.decode(record)

    def _schema_name(self, value: bytes, broken: UndecodableRecord) -> str:
        """Return the name of the schema that the registry has under the id of an undecodable value, or "" if the value
        has no id."""
        try:
            return self.codec.frame(value)[0]
        except (UndecodableRecord, UnknownSchemaId):
            return f"what cannot be used ({broken})" if value[:1] == b"\0" and len(value) >= HEADER.size else ""

    async def decode_known(self, record: Record) -> Event | None:
        """Return the event of a record for readers that do not own its topic. Returns None for a kind that only a newer
        release knows, and for a record that is not an event, which the owner of the topic dead-letters. Raises
        RegistryUnavailable."""
        try:
            return await self.decode(record)
        except LaterKind:
            return None
        except UndecodableRecord as broken:
            log.warning("passed over %s: %s", where(record), broken)
            return None

    async def _decode_record(self, record: Record) -> Event:
        try:
            return await self._decode_held(record)
        except UnknownSchemaId as unknown:
            try:
                schema = await self._registry.schema(unknown.schema_id)
            except KeyError:
                check_written(record, f"no schema under id {unknown.schema_id}")
                raise UndecodableRecord(
                    f"{record.topic}[{record.partition}]@{record.offset}: the registry has no schema id "
                    f"{unknown.schema_id}; was the record written with another registry?"
                ) from None
            try:
                self.codec.hold(unknown.schema_id, schema)
            except UndecodableRecord:
                check_written(record, repr(schema.get("name") if isinstance(schema, Mapping) else schema)[:100])
                raise
            return await self._decode_held(record)

    async def _decode_held(self, record: Record) -> Event:
        """Decode a record, and fetch the key of its session if it is not held yet."""
        try:
            return self.codec.decode(record.value)
        except UnknownSessionKey:
            assert self.keys is not None, "without a cipher, the codec asks for no key"
            await self.keys.refresh()
        try:
            return self.codec.decode(record.value)
        except UnknownSessionKey as unknown:
            raise key_lost(unknown) from unknown

    async def schema(self, schema_id: int) -> Mapping[str, Any]:
        """Return the schema registered under an id. Raises KeyError if there is none. Raises RegistryUnavailable."""
        return await self._registry.schema(schema_id)


async def schema_ids(registry: Registry) -> dict[str, int]:
    """Return the schema id of every record of the catalogue, and register missing schemas. Raises SchemaIncompatible,
    RegistryUnavailable."""
    return {name: await registry.register(name, stored_schema(name)) for name in ALL}


async def sealed_schema_ids(registry: Registry) -> dict[str, int]:
    """Return the schema id of every record whose content is encrypted, and register missing schemas. Raises
    SchemaIncompatible, RegistryUnavailable."""
    return {name: await registry.register(name, sealed_schema(name)) for name in sealable(ALL)}


def is_configuration(record: Record) -> bool:
    """Return True if the writer's header marks the record as RunConfigured, which defines the run."""
    return (RECORD_HEADER, RunConfigured.__name__.encode()) in record.headers


def check_written(record: Record, found: str) -> None:
    """Check that the record kind in the writer's header is the one that the registry has under the record's schema id.
    Raises OtherRegistry if not: the header is part of the record, while ids are valid in one registry only."""
    named = next((value for name, value in record.headers if name == RECORD_HEADER), b"").decode(errors="replace")
    if named in ALL and found and named != found:
        number = HEADER.unpack_from(record.value)[1]
        raise OtherRegistry(
            f"{where(record)} was written as {named} with schema id {number}, and the registry holds {found}: "
            "[registry] url is not the registry that the run was written with, or its schemas were restored under "
            "other ids. Restore them with their ids (mode IMPORT of Confluent's), or name the registry that has them"
        )


PARKED = Counter("turnlog_dead_letters", "Records stored in dead-letters", ["role", "cause"])


LATER = Counter("turnlog_later_records", "Records read whose kind only a newer release knows", ["topic", "record"])


def passed_over(record: Record, later: LaterKind) -> None:
    """Count a record of a newer release, which is skipped: its writer can wait until this release is gone."""
    LATER.labels(record.topic, later.name).inc()


def where(record: Record) -> str:
    """Return the position of a record as "topic[partition]@offset"."""
    return f"{record.topic}[{record.partition}]@{record.offset}"


def dead_letter(record: Record, cause: Exception, *, run_id: str, role: str) -> DeadLetter:
    """Create and count the dead letter of a record. Its id is derived from the record's position, so that a record is
    dead-lettered once, whoever finds it.

    The cause is given by its type and message. Bytes beyond the inline limit are cut; the record itself stays in its
    topic.
    """
    PARKED.labels(role, type(cause).__name__).inc()
    cut = len(record.value) > INLINE_LIMIT_BYTES
    return DeadLetter(
        event_id=dead_letter_id(record.topic, record.partition, record.offset),
        run_id=run_id,
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        key=record.key,
        value=record.value[:INLINE_LIMIT_BYTES],
        role=role,
        cause=type(cause).__name__,
        message=f"{cause}; cut to {INLINE_LIMIT_BYTES} bytes" if cut else str(cause),
    )
