"""The content of a session is encrypted under its own key, and is gone for good once that key is."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.fakes.memory_broker import Entry, MemoryBroker
from tests.fakes.memory_log import Died, MemoryAppender, MemoryLog
from tests.fakes.sealed_events import MASTER, PLANTED, event_of
from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.event_log import EventLog, dead_letter
from turnlog.infra.log import Appender, Headers, Partition, Record
from turnlog.infra.registry import MemoryRegistry, RegistryUnavailable
from turnlog.infra.session_keys import PLACE, REFRESH_S, MasterKeys, SessionKeys
from turnlog.infra.topics_admin import specs
from turnlog.schemas import (
    MasterKeyMissing,
    SessionIsErased,
    SessionKeyLost,
    UndecodableRecord,
    WrongMasterKey,
    topics,
)
from turnlog.schemas.codec import Codec
from turnlog.schemas.content import HiddenContent, holds_erased, is_erased, sealable
from turnlog.schemas.events import ALL, Event, SessionKeyCreated, SessionKeyErased
from turnlog.schemas.topics import INLINE_LIMIT_BYTES
from turnlog.schemas.types import BlobRef
from turnlog.settings import Settings

OTHER = "0123456789abcdef-two"


class Stage:
    """A log in memory, to which processes connect."""

    def __init__(self) -> None:
        self.broker, self.registry, self.now_s = MemoryBroker(), MemoryRegistry(), 0.0
        self.broker.create(specs(Settings()))

    @asynccontextmanager
    async def events(
        self, master: str = MASTER, log: MemoryLog | None = None, blobs: MemoryBlobs | None = None
    ) -> AsyncIterator[EventLog]:
        """A process; without a master key it encrypts nothing."""
        keys = SessionKeys(MasterKeys(master), "run", clock=lambda: self.now_s) if master else None
        log = log or MemoryLog(self.broker)
        async with EventLog.open(log, self.registry, writer="test", keys=keys, blobs=blobs) as events:
            yield events

    def compact(self) -> None:
        """Keep only the last record of each key."""
        log = self.broker.log_of(PLACE)
        last = {entry.record.key: at for at, entry in enumerate(log.entries) if entry.record is not None}
        for at, entry in enumerate(log.entries):
            if entry.record is not None and last[entry.record.key] != at:
                log.entries[at] = Entry(None, None)

    def records(self, topic: str) -> list[Record]:
        found = []
        for number in range(self.broker.partitions(topic)):
            found += self.broker.read(Partition(topic, number), 0, 10**9)[0]
        return found


class HeldLog(MemoryLog):
    """A connection whose next append to session-keys waits until the test lets it go."""

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(broker)
        self.arrived, self.let_go = asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def appender(self) -> AsyncIterator[Appender]:
        yield HeldAppender(self)


class HeldAppender(MemoryAppender):
    """See HeldLog."""

    def __init__(self, log: HeldLog) -> None:
        super().__init__(log)
        self._held = log

    async def submit(
        self, topic: str, key: bytes, value: bytes, *, headers: Headers = (), partition: int | None = None
    ) -> Awaitable[tuple[int, int]]:
        if topic == topics.SESSION_KEYS.name:
            self._held.arrived.set()
            await self._held.let_go.wait()
        return await super().submit(topic, key, value, headers=headers, partition=partition)


def keys_in(events: EventLog) -> SessionKeys:
    assert events.keys is not None
    return events.keys


@pytest.mark.parametrize("name", sealable(ALL))
async def test_no_content_is_in_the_clear_and_all_of_it_comes_back(name: str) -> None:
    stage, event = Stage(), event_of(name)
    async with stage.events() as events:
        await events.append(event)
        (record,) = stage.records(topics.TOPIC_OF[name].name)
        assert PLANTED not in record.value
        assert b"session-1" in record.value
        assert await events.decode(record) == event
    async with stage.events() as other:
        assert await other.decode(record) == event


async def test_the_same_event_gives_the_same_bytes_and_equal_content_of_two_events_does_not() -> None:
    stage = Stage()
    async with stage.events() as events, stage.events() as other:
        values = [await events.encode(event_of("TurnCompleted")), await other.encode(event_of("TurnCompleted"))]
        assert values[0] == values[1]
        again = await events.encode(event_of("TurnCompleted", event_id="event-2"))
        assert again.replace(b"event-2", b"event-1") != values[0]


async def test_content_in_a_type_that_only_fastavro_writes_gives_the_same_bytes() -> None:
    stage, event = Stage(), event_of("TurnCompleted")
    async with stage.events() as events:
        unusual = dataclasses.replace(event, response=bytearray(PLANTED))
        assert await events.encode(unusual) == await events.encode(event)


async def test_content_without_a_byte_and_references_survive() -> None:
    stage = Stage()
    reference = BlobRef("a" * 64, 12)
    event = dataclasses.replace(event_of("TurnCompleted", planted=b""), tools=reference, base_echo=None)
    async with stage.events() as events:
        await events.append(event)
        assert await events.decode(stage.records("agent.turns")[0]) == event


async def test_records_of_a_run_without_erasure_are_as_they_were() -> None:
    stage, plain = Stage(), event_of("TurnCompleted")
    async with stage.events("") as events:
        value = await events.encode(plain)
        await events.append(plain)
    assert value == events.codec.encode(plain)
    assert PLANTED in value
    async with stage.events() as sealing:  # which reads both
        assert await sealing.decode(stage.records("agent.turns")[0]) == plain
    assert not stage.records(topics.SESSION_KEYS.name)


async def test_an_erased_session_is_gone_for_every_reader_and_no_other_session_is() -> None:
    stage = Stage()
    async with stage.events() as events:
        for session in ("gone", "kept"):
            await events.append(event_of("TokenSnapshot", session, f"event-{session}", PLANTED + b"!!"))
        gone, kept = stage.records("agent.token-snapshots")
        assert events.keys is not None
        assert len(await events.keys.erase("gone", "an operator")) == 1
        for reader in (events, None):
            async with stage.events() as other:
                found = await (reader or other).decode(gone)
                assert holds_erased(found)
                assert found.output_ids == bytes(28)
                assert is_erased(found.output_ids)
                assert PLANTED in (await (reader or other).decode(kept)).output_ids
        with pytest.raises(SessionIsErased, match="gone"):
            await events.append(event_of("TurnCompleted", "gone"))


async def test_json_and_texts_of_an_erased_session_still_parse() -> None:
    stage = Stage()
    async with stage.events() as events:
        await events.append(event_of("TurnCompleted"))
        await events.append(event_of("ToolCallCompleted", event_id="call"))
        assert events.keys is not None
        await events.keys.erase("session-1", "an operator")
        turn = await events.decode(stage.records("agent.turns")[0])
        call = await events.decode(stage.records("agent.tool-results")[0])
    assert (turn.new_messages, turn.stopped_by) == (b"[]", "[erased]")
    assert (call.output, {request.url for request in call.requests}) == (b"[erased]", {"[erased]"})


async def test_what_is_referenced_of_an_erased_session_has_a_value_too_since_its_blob_is_deleted() -> None:
    stage = Stage()
    event = dataclasses.replace(event_of("TokenSnapshot"), output_ids=BlobRef("a" * 64, 8))
    async with stage.events() as events:
        await events.append(event)
        assert events.keys is not None
        await events.keys.erase("session-1", "an operator")
        assert (await events.decode(stage.records("agent.token-snapshots")[0])).output_ids == bytes(8)


async def test_two_writers_that_begin_at_once_may_have_two_keys_and_both_are_erased() -> None:
    stage = Stage()
    held = HeldLog(stage.broker)
    async with stage.events(log=held) as one, stage.events() as two, asyncio.TaskGroup() as group:
        group.create_task(one.append(event_of("TurnCompleted", event_id="a")))
        await held.arrived.wait()  # it has read that there is no key
        await two.append(event_of("TurnCompleted", event_id="b"))
        held.let_go.set()
    async with stage.events() as one:
        for record in stage.records("agent.turns"):
            assert PLANTED in (await one.decode(record)).response
        assert len(await keys_in(one).erase("session-1", "an operator")) == 2
        async with stage.events() as reader:
            for record in stage.records("agent.turns"):
                assert holds_erased(await reader.decode(record))


@pytest.mark.parametrize("point", range(1, 6))
async def test_a_writer_that_dies_anywhere_leaves_no_record_whose_key_is_not_on_the_log(point: int) -> None:
    stage, log = Stage(), MemoryLog()
    log.broker, log.dies_at = stage.broker, point
    with contextlib.suppress(Died):
        async with stage.events(log=log) as events:
            await events.append(event_of("TurnCompleted"))
    assert log.dead == (point < 5)
    async with stage.events() as other:
        for record in stage.records("agent.turns"):
            assert PLANTED in (await other.decode(record)).response
        await other.append(event_of("TurnCompleted"))  # the retry
        assert len({record.value for record in stage.records("agent.turns")}) == 1


async def test_readers_without_the_right_key_say_which_setting_to_mend() -> None:
    stage = Stage()
    async with stage.events() as events:
        await events.append(event_of("TurnCompleted"))
        (record,) = stage.records("agent.turns")
    async with stage.events("") as without:
        with pytest.raises(MasterKeyMissing, match="master_keys"):
            await without.decode(record)
    async with stage.events(OTHER) as wrong:
        with pytest.raises(WrongMasterKey, match="master_keys"):
            await wrong.decode(record)
    stage.broker.log_of(PLACE).entries.clear()
    stage.broker.log_of(PLACE).start = stage.broker.log_of(PLACE).end
    async with stage.events() as bereft:
        with pytest.raises(SessionKeyLost, match="session-keys"):
            await bereft.decode(record)


async def test_a_reader_that_hides_content_reads_it_as_erased_and_writes_none() -> None:
    stage = Stage()
    async with stage.events() as events:
        await events.append(event_of("TurnCompleted"))
        (record,) = stage.records("agent.turns")
        schema = await events.schema(int.from_bytes(record.value[1:5], "big"))
    codec = Codec({}, sealed_ids={"TurnCompleted": 1}, cipher=HiddenContent())
    codec.hold(int.from_bytes(record.value[1:5], "big"), schema)
    assert holds_erased(codec.decode(record.value))
    with pytest.raises(MasterKeyMissing, match="session session-1 must be encrypted: set"):
        codec.encode(event_of("TurnCompleted"))


async def test_a_content_field_that_no_writer_encrypted_is_named() -> None:
    stage = Stage()
    async with stage.events() as events:
        await events.append(event_of("TurnCompleted"))
        (record,) = stage.records("agent.turns")
        clear = events.codec.encode(event_of("TurnCompleted"), sealed=False)
        with pytest.raises(UndecodableRecord, match="event-1: a content field is not valid ciphertext"):
            await events.decode(dataclasses.replace(record, value=record.value[:5] + clear[5:]))


async def test_content_that_was_altered_or_moved_to_another_event_is_refused() -> None:
    stage = Stage()
    async with stage.events() as events:
        await events.append(event_of("TurnCompleted", event_id="event-1"))
        (record,) = stage.records("agent.turns")
        for value in (record.value.replace(b"event-1", b"event-2"), record.value[:-200] + b"?" + record.value[-199:]):
            with pytest.raises(UndecodableRecord):
                await events.decode(dataclasses.replace(record, value=value))


async def test_a_new_master_key_wraps_every_key_again_and_the_former_one_is_no_longer_needed() -> None:
    stage = Stage()
    async with stage.events() as events:
        await events.append(event_of("TurnCompleted"))
        (record,) = stage.records("agent.turns")
    async with stage.events(f"{OTHER} {MASTER}") as rotating:
        assert rotating.keys is not None
        assert (await rotating.keys.rewrap(), await rotating.keys.rewrap()) == (1, 0)
    stage.compact()
    async with stage.events(OTHER) as later:
        assert PLANTED in (await later.decode(record)).response


@pytest.mark.parametrize("dies", [False, True])
async def test_a_key_that_is_erased_while_it_is_wrapped_again_stays_erased(dies: bool) -> None:
    stage = Stage()
    held = HeldLog(stage.broker)
    async with stage.events() as events:
        await events.append(event_of("TurnCompleted"))
    held.dies_at = 2 if dies else None  # after the key, and before what would erase it again
    with contextlib.suppress(Died):
        async with stage.events(f"{OTHER} {MASTER}", held) as rotating:
            rewrapping = asyncio.create_task(keys_in(rotating).rewrap())
            await held.arrived.wait()
            async with stage.events() as eraser:
                await keys_in(eraser).erase("session-1", "an operator")
            held.let_go.set()
            assert await rewrapping == 1
    assert held.dead == dies
    stage.compact()
    async with stage.events(f"{OTHER} {MASTER}") as again:
        await keys_in(again).refresh()
        assert len(keys_in(again).keys_of("session-1")) == dies  # what a repeated command finds
        assert holds_erased(await again.decode(stage.records("agent.turns")[0]))
        await keys_in(again).rewrap()
        assert not keys_in(again).keys_of("session-1")
        stage.compact()
        left = await all_keys(again, stage)
    assert {(type(key), key.by) for key in left} == {(SessionKeyErased, "an operator")}


async def test_no_key_is_on_the_log_in_the_clear() -> None:
    stage = Stage()
    async with stage.events() as events:
        await events.append(event_of("TurnCompleted"))
        assert events.keys is not None
        (key,) = await all_keys(events, stage)
        about = f"run\nsession-1\n{key.key_id}".encode()
        plain = MasterKeys(MASTER).unwrap(key.master_id, key.wrapped, about)
        assert plain not in b"".join(record.value for record in stage.records(topics.SESSION_KEYS.name))
        with pytest.raises(WrongMasterKey):
            MasterKeys(MASTER).unwrap(key.master_id, key.wrapped, about.replace(b"session-1", b"session-2"))


@pytest.mark.parametrize("known", [False, True], ids=["without a key", "with a key"])
async def test_a_writer_that_has_read_the_keys_before_an_erasure_and_creates_one_after_it_writes_nothing(
    known: bool,
) -> None:
    stage = Stage()
    held = HeldLog(stage.broker)
    async with stage.events(log=held) as late, stage.events() as eraser:
        writing = asyncio.create_task(late.append(event_of("TurnCompleted", event_id="late")))
        await held.arrived.wait()
        if known:
            await eraser.append(event_of("TurnCompleted", event_id="before"))
        assert len(await keys_in(eraser).erase("session-1", "an operator")) == known
        held.let_go.set()
        with pytest.raises(SessionIsErased, match="session-1"):
            await writing
    assert len(stage.records("agent.turns")) == known
    await nothing_stands(stage, "session-1")


async def test_a_key_that_is_created_while_the_session_is_erased_is_erased_as_well() -> None:
    stage = Stage()
    held = HeldLog(stage.broker)
    async with stage.events() as writer, stage.events(log=held) as eraser:
        erasing = asyncio.create_task(keys_in(eraser).erase("session-1", "an operator"))
        await held.arrived.wait()  # it has read that there is no key
        await writer.append(event_of("TurnCompleted"))
        held.let_go.set()
        assert len(await erasing) == 1
    await nothing_stands(stage, "session-1")
    async with stage.events() as reader:
        assert holds_erased(await reader.decode(stage.records("agent.turns")[0]))


async def nothing_stands(stage: Stage, session: str) -> None:
    """No key of the session is left on the topic, and nobody writes for it."""
    stage.compact()
    async with stage.events() as events:
        assert not [key for key in await all_keys(events, stage) if isinstance(key, SessionKeyCreated)]
        with pytest.raises(SessionIsErased, match=session):
            await events.append(event_of("TurnCompleted", session))


async def test_keys_of_requeued_calls_are_erased_with_the_session_that_made_them() -> None:
    stage = Stage()
    async with stage.events() as events, stage.events() as late:
        keys = keys_in(events)
        await keys.prepare("copy", origin="session-1")
        await keys.prepare("copy of the copy", origin="copy")
        await events.append(event_of("TurnCompleted", "copy of the copy"))
        await events.append(event_of("TurnCompleted", "other"))
        await keys_in(late).refresh()
        assert keys.sessions_of("session-1") == ["session-1", "copy", "copy of the copy"]
        assert len(keys.keys_of("session-1")) == 2
        assert len(await keys.erase("session-1", "an operator")) == 2
        assert [holds_erased(await events.decode(record)) for record in stage.records("agent.turns")] in (
            [True, False], [False, True],
        )  # fmt: skip
        for process in (keys, keys_in(late)):
            with pytest.raises(SessionIsErased, match="copy 2"):
                await process.prepare("copy 2", origin="session-1")
    await nothing_stands_but(stage, "other")


async def nothing_stands_but(stage: Stage, session: str) -> None:
    stage.compact()
    async with stage.events() as events:
        left = [key for key in await all_keys(events, stage) if isinstance(key, SessionKeyCreated)]
    assert [key.session_id for key in left] == [session]


class FailingRegistry(MemoryRegistry):
    """Knows some schemas only at the second request."""

    def __init__(self, registry: MemoryRegistry) -> None:
        super().__init__()
        self._registry = registry
        self._asked: set[int] = set()

    async def schema(self, schema_id: int) -> Mapping[str, Any]:
        schema = await self._registry.schema(schema_id)
        if schema["name"] == SessionKeyErased.__name__ and schema_id not in self._asked:
            self._asked.add(schema_id)
            raise RegistryUnavailable("away")
        return schema


async def test_keys_are_read_on_where_a_failure_of_the_registry_has_stopped_the_reader() -> None:
    stage = Stage()
    async with stage.events() as events:
        await events.append(event_of("TurnCompleted"))
        await events.append(event_of("TurnCompleted", "kept"))
        await keys_in(events).erase("session-1", "an operator")
        await events.append(event_of("TurnCompleted", "later"))
    keys = SessionKeys(MasterKeys(MASTER), "run")
    keys.attach(EventLog(MemoryLog(stage.broker), FailingRegistry(stage.registry), Codec({}), "reader"))
    with pytest.raises(RegistryUnavailable):
        await keys.refresh()
    async with asyncio.timeout(30):
        await keys.refresh()
    assert keys.erased == {"session-1"}
    assert [len(keys.keys_of(session)) for session in ("session-1", "kept", "later")] == [0, 1, 1]
    await keys.close()


async def test_a_process_with_another_master_key_creates_no_key_that_would_stop_the_others() -> None:
    stage = Stage()
    async with stage.events(OTHER) as wrong:
        async with stage.events() as events:
            await events.append(event_of("TurnCompleted"))
        with pytest.raises(WrongMasterKey, match="master_keys"):
            await wrong.append(event_of("TurnCompleted", "session-2"))
    assert len(stage.records("agent.turns")) == len(stage.records(topics.SESSION_KEYS.name)) == 1


async def test_a_record_without_content_needs_no_key_and_is_written_for_an_erased_session_too() -> None:
    stage = Stage()
    finished = dataclasses.replace(event_of("SessionFinished"), reason="")
    async with stage.events() as events:
        await events.append(finished)
        assert not stage.records(topics.SESSION_KEYS.name)
        await keys_in(events).erase("session-1", "an operator")
        await events.append(finished)
        for record in stage.records("agent.sessions"):
            assert await events.decode(record) == finished
        reference = dataclasses.replace(event_of("TurnCompleted", planted=b""), response=BlobRef("a" * 64, 12))
        with pytest.raises(SessionIsErased, match="session-1"):
            await events.append(reference)


async def test_no_payload_of_a_refused_event_is_stored() -> None:
    stage, blobs = Stage(), MemoryBlobs()
    async with stage.events(blobs=blobs) as events:
        await keys_in(events).erase("session-1", "an operator")
        large = dataclasses.replace(event_of("TokenSnapshot"), output_ids=bytes(2 * INLINE_LIMIT_BYTES))
        with pytest.raises(SessionIsErased, match="session-1"):
            await events.append(large)
        assert not await blobs.names("")


async def test_a_writer_that_decodes_nothing_notices_an_erasure_too() -> None:
    stage = Stage()
    async with stage.events() as writer, stage.events() as eraser:
        await writer.append(event_of("TurnCompleted"))
        await keys_in(eraser).erase("session-1", "an operator")
        stage.now_s += REFRESH_S + 1
        with pytest.raises(SessionIsErased, match="session-1"):
            await writer.append(event_of("TurnCompleted"))
    assert len(stage.records("agent.turns")) == 1


async def test_keys_are_read_for_topics_with_content_only_since_other_readers_may_not() -> None:
    stage = Stage()
    async with stage.events() as writer, stage.events() as events:
        await writer.append(event_of("TurnCompleted"))
        (turn,) = stage.records("agent.turns")
        await writer.append(dead_letter(turn, ValueError("why"), run_id="run", role="test"))
        (letter,) = stage.records("dead-letters")
        await events.decode(letter)
        assert keys_in(events).is_due
        await events.decode(turn)
        assert not keys_in(events).is_due


async def all_keys(events: EventLog, stage: Stage) -> list[Event]:
    return [await events.decode(record) for record in stage.records(topics.SESSION_KEYS.name)]
