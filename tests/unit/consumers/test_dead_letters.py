"""`turnlog log dead-letters` over the log in memory: what it lists, what it appends again, what it lets pass."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import AsyncIterator

import pytest

from tests.fakes.memory_log import MemoryLog
from tests.fakes.sealed_events import MASTER
from turnlog.consumers.dead_letters import AmbiguousLetter, LetterError, NoSuchLetter, NotRequeueable, NotSkippable
from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.event_log import EventLog, dead_letter
from turnlog.infra.log import Partition, Record, partition_of
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.role import Role, session_keys
from turnlog.infra.topics_admin import apply
from turnlog.schemas.events import DeadLetter, SandboxSpec, SkipRequested, ToolCallRequested
from turnlog.schemas.topics import SESSIONS, TOOL_CALLS, TURNS
from turnlog.settings import ErasureSettings, KafkaSettings, RunSettings, Settings
from turnlog.verbs.dead_letters import ACTIONS, dead_letters_arguments

SETTINGS = Settings(run=RunSettings(id="run"), kafka=KafkaSettings(groups=2, rollouts=2))
CALL = ToolCallRequested(
    event_id="e", run_id="run", group_id="g", session_id="s", floor=3, rollout_id="r", call_id="c", call_seq=4,
    tool="shell", arguments=b'{"command": "exit"}', sandbox=SandboxSpec(), workspace=None, deadline_s=60.0,
)  # fmt: skip


class Refused(Exception):
    """Why the records of these tests were parked."""


@pytest.fixture
async def role() -> AsyncIterator[Role]:
    """A process on an empty log."""
    log = MemoryLog()
    await apply(log, SETTINGS)
    async with EventLog.open(log, MemoryRegistry(), writer="test") as events:
        yield Role("test", "test-0", SETTINGS, log, events, MemoryBlobs(), Health("test"))


async def all_of(role: Role, topic: str) -> list[Record]:
    places = [Partition(topic, number) for number in range(2)]
    ends = await role.log.end_offsets(places)
    found: list[Record] = []
    async with role.log.reader() as reader:
        reader.assign(dict.fromkeys(places, 0))
        while any(reader.position(place) < ends[place] for place in places):
            found += await reader.poll()
    return found


async def parked(role: Role, topic: str, value: bytes, *, key: bytes = b"r", cause: str = "no reason") -> DeadLetter:
    """A record that stands in a topic, and its letter."""
    async with role.log.appender() as appender:
        place = await appender.append(topic, key, value, headers=[("record", b"Some")])
    letter = dead_letter(Record(topic, *place, key, value, (), 0), Refused(cause), run_id="run", role="sandbox")
    await role.events.append(letter)
    return letter


async def ran(role: Role, *words: str) -> int:
    """The exit status of a command line."""
    parser = argparse.ArgumentParser()
    dead_letters_arguments(parser)
    arguments = parser.parse_args(words)
    return await ACTIONS[arguments.action](role, arguments)


async def test_letters_are_listed_by_what_is_asked_for(role: Role, capsys: pytest.CaptureFixture[str]) -> None:
    first = await parked(role, TURNS.name, b"garbage", cause="one")
    second = await parked(role, TOOL_CALLS.name, b"rubbish", cause="two")
    await role.events.append(first)  # found twice, by two roles
    assert await ran(role, "list", "--json") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["id"], line["message"]) for line in lines] == [(first.event_id, "one"), (second.event_id, "two")]
    assert await ran(role, "list", "--topic", TOOL_CALLS.name) == 0
    shown = capsys.readouterr().out
    assert second.event_id[:10] in shown
    assert first.event_id[:10] not in shown
    assert await ran(role, "list", "--cause", "Unheard") == 0
    assert capsys.readouterr().out == "run 'run' has no dead letters that match\n"


async def test_a_letter_is_shown_with_what_can_be_read_of_its_record(
    role: Role, capsys: pytest.CaptureFixture[str]
) -> None:
    readable = await parked(role, TOOL_CALLS.name, role.events.codec.encode(CALL))
    broken = await parked(role, TOOL_CALLS.name, b"\x00\x01garbage")
    assert await ran(role, "show", readable.event_id[:6]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["record"]["ToolCallRequested"]["arguments"] == '{"command": "exit"}'
    assert (body["cause"], body["requeued"], body["headers"]) == ("Refused", 0, {"record": "Some"})
    assert await ran(role, "show", broken.event_id) == 0
    assert "undecodable" in json.loads(capsys.readouterr().out)["record"]
    with pytest.raises(NoSuchLetter, match="'zz'"):
        await ran(role, "show", "zz")
    with pytest.raises(AmbiguousLetter, match="2 letters"):
        await ran(role, "show", "")


async def test_what_a_record_brought_moves_no_cursor_and_begins_no_line(
    role: Role, capsys: pytest.CaptureFixture[str]
) -> None:
    planted = "\x1b[2J[/red]\x9b31m\u202e\n9f8e7d6c5b  all is well"
    letter = await parked(role, TURNS.name, b"\x00", key=planted.encode(), cause=planted)
    for words in (["list"], ["list", "--json"], ["show", letter.event_id], ["show", letter.event_id, "--json"]):
        assert await ran(role, *words) == 0
        shown = capsys.readouterr().out
        assert all(char.isprintable() or char == "\n" for char in shown), words
        assert "[/red]" in "".join(shown.split())
        assert not any(line.startswith("9f8e7d6c5b") for line in shown.splitlines())
    await ran(role, "show", letter.event_id)
    body = json.loads(capsys.readouterr().out)
    assert (body["message"], body["key"]) == (planted, planted)


async def test_a_record_goes_out_again_as_it_was_and_only_once(role: Role, capsys: pytest.CaptureFixture[str]) -> None:
    letter = await parked(role, TURNS.name, b"garbage")
    assert await ran(role, "requeue", letter.event_id) == 0
    first, again = await all_of(role, TURNS.name)
    assert (again.key, again.value, again.partition) == (first.key, first.value, first.partition)
    assert again.headers == (("record", b"Some"), ("requeued", letter.event_id.encode()))
    assert await ran(role, "requeue", "--cause", "Refused", "--yes") == 1
    assert "requeued 1 times" in capsys.readouterr().out
    assert await ran(role, "requeue", "--again", letter.event_id) == 0
    assert len(await all_of(role, TURNS.name)) == 3
    with pytest.raises(LetterError, match="by ID, or choose them with --cause"):
        await ran(role, "requeue")


async def test_a_tool_call_goes_out_as_a_call_of_its_own(role: Role) -> None:
    letter = await parked(role, TOOL_CALLS.name, role.events.codec.encode(CALL))
    await ran(role, "requeue", letter.event_id)
    await ran(role, "requeue", "--again", letter.event_id)
    events = [await role.events.decode(record) for record in await all_of(role, TOOL_CALLS.name)]
    assert len({event.call_id for event in events}) == 3
    assert len({event.session_id for event in events}) == 3
    assert {(event.tool, event.arguments, event.call_seq, event.rollout_id) for event in events} == {
        ("shell", CALL.arguments, 4, "r")
    }


@pytest.fixture
async def sealed() -> AsyncIterator[Role]:
    """A process of a run that encrypts content, on an empty log."""
    settings = dataclasses.replace(SETTINGS, erasure=ErasureSettings(master_keys=MASTER))
    log = MemoryLog()
    await apply(log, settings)
    async with EventLog.open(log, MemoryRegistry(), writer="test", keys=session_keys(settings)) as events:
        yield Role("test", "test-0", settings, log, events, MemoryBlobs(), Health("test"))


async def test_an_encrypted_call_goes_out_again_and_is_erased_with_the_session_that_made_it(sealed: Role) -> None:
    events = sealed.events
    letter = await parked(sealed, TOOL_CALLS.name, await events.encode(CALL))
    await ran(sealed, "requeue", letter.event_id)
    _, again = await all_of(sealed, TOOL_CALLS.name)
    assert CALL.arguments not in again.value
    call = await events.decode(again)
    assert (call.arguments, call.session_id != CALL.session_id) == (CALL.arguments, True)
    second = await parked(sealed, TOOL_CALLS.name, again.value)
    await ran(sealed, "requeue", second.event_id)
    assert events.keys is not None
    assert len(await events.keys.erase(CALL.session_id, "an operator")) == 3
    found = await all_of(sealed, TOOL_CALLS.name)
    assert [(await events.decode(record)).arguments for record in found] == [b"{}"] * 4
    for again_of in (letter, second):
        with pytest.raises(NotRequeueable, match="was erased"):
            await ran(sealed, "requeue", "--again", again_of.event_id)
    assert len(await all_of(sealed, TOOL_CALLS.name)) == 4


async def test_a_unit_is_let_past_a_record_by_an_order_that_reaches_it(role: Role) -> None:
    key = next(name for name in ("a", "b", "c", "d") if partition_of(name.encode(), 2) == 1)
    async with role.log.appender() as appender:
        await appender.append(TURNS.name, key.encode(), b"readable key", partition=1)
        await appender.append(TURNS.name, b"\xff\xfe", b"unreadable key", partition=1)
    for offset in (0, 1):
        assert await ran(role, "skip", f"agent.turns[1]@{offset}", "--reason", "mended") == 0
    records = await all_of(role, SESSIONS.name)
    orders = [await role.events.decode(record) for record in records]
    assert {record.partition for record in records} == {1}
    assert all(isinstance(order, SkipRequested) for order in orders)
    assert [(order.topic, order.partition, order.offset, order.reason) for order in orders] == [
        ("agent.turns", 1, 0, "mended"), ("agent.turns", 1, 1, "mended"),
    ]  # fmt: skip
    assert orders[0].group_id == key
    for place in ("agent.turns[1]@2", "agent.turns[9]@0", "tasks[0]@0", "agent.turns"):
        with pytest.raises(NotSkippable):
            await ran(role, "skip", place, "--reason", "x")
