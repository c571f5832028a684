"""A consumer of one's own: every event at least once, none skipped, nothing written but its commits."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes.memory_broker import MemoryBroker
from tests.fakes.memory_log import MemoryLog
from tests.fakes.sealed_events import MASTER, PLANTED, event_of
from turnlog.consumers.follow import Events, MixedPartitions, UnknownTopic, check, follow_on
from turnlog.infra.event_log import EventLog
from turnlog.infra.log import Partition, TopicSpec
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.session_keys import MasterKeys, SessionKeys
from turnlog.infra.topics_admin import specs
from turnlog.schemas import MasterKeyMissing
from turnlog.schemas.content import holds_erased
from turnlog.schemas.events import SkipRequested
from turnlog.settings import KafkaSettings, Settings

SESSIONS = "agent.sessions"


def skip(number: int) -> SkipRequested:
    return SkipRequested(
        event_id=str(number), run_id="r", group_id=f"g{number}", floor=0, topic="t", partition=0, offset=0, reason=""
    )


async def numbers(events: Events) -> list[int]:
    return [int(event.event_id) async for event in events]


class Cluster:
    """A log in memory with four partitions of agent.sessions and one group that follows it."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.registry = MemoryRegistry()
        self.broker.create([TopicSpec(SESSIONS, 4, 1, {})])

    async def append(self, *numbers: int) -> None:
        async with EventLog.open(MemoryLog(self.broker), self.registry, writer="test") as events:
            for number in numbers:
                await events.append(skip(number))

    def follow(self, **changes: object) -> object:
        options = {"group": "report", "until_end": True, "commit_s": 0.0, **changes}
        return follow_on(MemoryLog(self.broker), self.registry, [SESSIONS], **options)

    async def read(self) -> list[int]:
        async with self.follow() as events:
            return sorted(await numbers(events))


@pytest.fixture
async def cluster() -> Cluster:
    made = Cluster()
    await made.append(*range(20))
    return made


async def test_it_reads_everything_once_and_goes_on_where_it_was(cluster: Cluster) -> None:
    assert await cluster.read() == list(range(20))
    assert await cluster.read() == []
    await cluster.append(20, 21)
    assert await cluster.read() == [20, 21]


async def test_the_event_in_hand_at_an_error_comes_again_and_those_before_it_do_not(cluster: Cluster) -> None:
    seen: list[int] = []

    async def fall_over_at_the_eighth() -> None:
        async with cluster.follow(commit_s=60.0) as events:
            async for event in events:
                if len(seen) == 7:
                    raise ZeroDivisionError
                await events.commit()
                seen.append(int(event.event_id))

    with pytest.raises(ZeroDivisionError):
        await fall_over_at_the_eighth()
    again = await cluster.read()
    assert set(seen) | set(again) == set(range(20))
    assert set(seen) & set(again) == {seen[-1]}, "its turn of the loop had ended, but no commit had come since"


async def test_the_event_in_hand_at_a_break_is_done(cluster: Cluster) -> None:
    async with cluster.follow() as events:
        async for event in events:
            assert events.record.offset >= 0
            first = int(event.event_id)
            break
    assert await cluster.read() == [number for number in range(20) if number != first]


async def test_members_of_one_group_share_the_partitions(cluster: Cluster) -> None:
    async with cluster.follow() as one, cluster.follow() as two:
        shares = await asyncio.gather(*(numbers(member) for member in (one, two)))
    assert all(shares)
    assert sorted(shares[0] + shares[1]) == list(range(20))


async def test_what_does_not_decode_is_passed_over_and_counted(cluster: Cluster) -> None:
    async with MemoryLog(cluster.broker).appender() as appender:
        await appender.append(SESSIONS, b"g", b"poison")
        await appender.append(SESSIONS, b"g", b"\0\0\0\xff\xffunknown id")
    async with cluster.follow() as events:
        assert len([event async for event in events]) == 20
        assert isinstance(events, Events)
        assert events.undecodable == 2


async def test_it_registers_no_schema_and_appends_nothing(cluster: Cluster) -> None:
    def state() -> tuple[object, list[int]]:
        logs = [cluster.broker.log_of(Partition(SESSIONS, number)) for number in range(4)]
        return dict(cluster.registry.schemas), [held.end for held in logs]

    before = state()
    assert await cluster.read() == list(range(20))
    assert state() == before


async def test_what_is_gone_from_the_log_is_told(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    async with cluster.follow() as events:
        await anext(events)
    for number in range(4):
        name = Partition(SESSIONS, number)
        cluster.broker.truncate(name, cluster.broker.log_of(name).end)
    await cluster.append(20)
    assert await cluster.read() == [20]
    assert "are gone from the log" in caplog.text


def test_topics_that_cannot_be_followed_together_are_named() -> None:
    kafka = KafkaSettings(groups=4, rollouts=8)
    check(["segment-samples", "turn-trees"], kafka)
    with pytest.raises(MixedPartitions, match=r"segment-samples by group_id, tasks by rollout_id"):
        check(["segment-samples", "tasks"], kafka)
    with pytest.raises(MixedPartitions, match="no topic"):
        check([], kafka)
    with pytest.raises(UnknownTopic, match=r"'samples'.*docs/events\.md"):
        check(["samples"], kafka)


async def test_lists_of_events_are_done_as_a_whole(cluster: Cluster) -> None:
    seen: list[int] = []

    async def fall_over_in_the_second_list() -> None:
        async with cluster.follow() as events:
            async for batch in events.batches():
                if seen:
                    raise ZeroDivisionError
                seen.extend(int(event.event_id) for event in batch)
                await cluster.append(20, 21)
                events._ends = await events._log.end_offsets(list(events._ends))

    with pytest.raises(ZeroDivisionError):
        await fall_over_in_the_second_list()
    again = await cluster.read()
    assert sorted(seen + again) == list(range(22)), "the first list is committed, the second one comes again"


async def test_what_is_done_is_committed_in_the_middle_of_a_fetch(cluster: Cluster) -> None:
    async with cluster.follow() as events:
        passed = 0
        async for _ in events:
            passed += 1
            if passed == 5:
                break
        names = [Partition(SESSIONS, number) for number in range(4)]
        commits = await events._log.commits("report", names)
        assert events._ready, "the fetch has brought more"
        assert sum(commit.offset for commit in commits.values()) == 4, "all but the one in hand"


async def test_content_that_is_encrypted_is_read_with_the_keys_of_the_run() -> None:
    broker, registry, turns = MemoryBroker(), MemoryRegistry(), "agent.turns"
    broker.create(specs(Settings()))
    writers = SessionKeys(MasterKeys(MASTER), "run")
    async with EventLog.open(MemoryLog(broker), registry, writer="test", keys=writers) as events:
        for session in ("kept", "gone"):
            await events.append(event_of("TurnCompleted", session))
        await writers.erase("gone", "an operator")
    keys = SessionKeys(MasterKeys(MASTER), "run")
    options = {"until_end": True, "commit_s": 0.0}
    async with follow_on(MemoryLog(broker), registry, [turns], group="a", keys=keys, **options) as followed:
        found = {event.session_id: event async for event in followed}
    assert found["kept"].response == PLANTED
    assert holds_erased(found["gone"])
    with pytest.raises(MasterKeyMissing, match="master_keys"):
        async with follow_on(MemoryLog(broker), registry, [turns], group="b", **options) as followed:
            await anext(aiter(followed))
