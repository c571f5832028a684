"""Which sessions can be erased, and what a plan takes from the archive, from skips and from earlier erasures."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager

import pytest

from tests.fakes.memory_log import MemoryLog
from tests.fakes.memory_readers import MemoryReader
from tests.unit.consumers.conftest import SETTINGS
from tests.unit.consumers.test_erasure import SealedRun, open_group, trained_session
from turnlog.consumers.erasure import NotErasable, plan_erasure, rewrap
from turnlog.consumers.pruning import prunable
from turnlog.consumers.replay.source import NothingToReplay
from turnlog.consumers.replay.verify import Memory, run
from turnlog.infra.archive import ArchiveIndex
from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.log import Partition, Reader, Record, partition_of
from turnlog.infra.roles.role import RunPhase
from turnlog.infra.roles.runs import configuration, set_phase
from turnlog.infra.session_keys import SessionKeys
from turnlog.schemas import topics
from turnlog.schemas.content import holds_erased
from turnlog.schemas.events import (
    Event,
    GroupClosed,
    GroupRequested,
    GroupScored,
    Purpose,
    RewardAssigned,
    SampleBatchFormed,
    SandboxSpec,
    SegmentSample,
    SessionErased,
    SessionFinished,
    SessionStarted,
    SkipRequested,
    TokenSnapshot,
    ToolCallCompleted,
    ToolCallRequested,
    ToolStatus,
)
from turnlog.schemas.types import BlobRef, TurnId

EVER = 1 << 60


async def begun(*, without: type | tuple[type, ...] = ()) -> tuple[SealedRun, list[Event], str]:
    """A run with the records of a group of two sessions that was folded, and the second of them, without its records
    of some kinds."""
    made = await SealedRun.begin()
    await made.configure()
    events = open_group(made)
    second = events[-1].session_id
    await made.append(event for event in events if event.session_id != second or not isinstance(event, without))
    await made.fold()
    return made, events, second


def unit_of(made: SealedRun, event: Event) -> int:
    return partition_of(event.group_id.encode(), made.settings.kafka.groups)


async def close_group(made: SealedRun, events: list[Event], reason: str = "operator") -> None:
    """Close the group, and let the assembler fold that. An operator names both sessions, the reaper only the first."""
    end = made.broker.log_of(Partition(topics.SESSIONS.name, unit_of(made, events[0]))).end
    await made.append([
        GroupClosed(
            event_id=f"close by {reason}", run_id="run", group_id=events[0].group_id, floor=0, reason=reason, seen=end,
            members=tuple(sorted({event.session_id for event in events[: None if reason == "operator" else 1]})),
        )
    ])  # fmt: skip
    await made.fold()


async def check_identical(made: SealedRun) -> None:
    await made.fold()
    verdict = await run(made.role())
    assert verdict.identical, verdict.divergence


@pytest.mark.parametrize(
    ("without", "why"),
    [
        (RewardAssigned, "has finished, and awaits its reward"),
        ((SessionFinished, RewardAssigned), "has not finished"),
    ],
)
async def test_a_session_that_goes_on_or_awaits_its_reward_is_erased_once_its_group_has_settled(
    without: tuple[type, ...], why: str
) -> None:
    made, events, session = await begun(without=without)
    with pytest.raises(NotErasable, match=why):
        await made.erase(session)
    assert not any(isinstance(event, SessionErased) for event in await made.read(topics.SESSIONS))
    await close_group(made, events)
    assert (await made.erase(session)).is_done
    await check_identical(made)


async def test_a_settled_session_whose_records_the_log_lacks_is_erased_once_its_group_is_scored() -> None:
    made, events, session = await begun(without=TokenSnapshot)
    for reason, scored in (("operator", False), ("deadline", True)):
        with pytest.raises(NotErasable, match="lacks records of its turns"):
            await made.erase(session)
        await close_group(made, events, reason)
        assert any(isinstance(event, GroupScored) for event in await made.read(topics.SAMPLES)) == scored
    assert (await made.erase(session)).is_done
    await check_identical(made)


async def test_an_unknown_session_and_one_of_another_run_are_not_erased() -> None:
    made, events, _ = await begun()
    with pytest.raises(NotErasable, match="no record says"):
        await made.erase("nobody")
    made.settings = dataclasses.replace(made.settings, run=dataclasses.replace(made.settings.run, id="other"))
    with pytest.raises(NothingToReplay, match="belongs to run 'run'"):
        await made.erase(events[0].session_id)


def call_of(started: SessionStarted, *, caller: str = "") -> ToolCallRequested:
    return ToolCallRequested(
        event_id="call", run_id="run", group_id=started.group_id, session_id=started.session_id, floor=0,
        rollout_id=started.rollout_id, call_id="the-call", call_seq=0, tool="shell", arguments=b"{}",
        sandbox=SandboxSpec(), workspace=None, deadline_s=1.0, caller=caller,
    )  # fmt: skip


def result_of(call: ToolCallRequested) -> ToolCallCompleted:
    return ToolCallCompleted(
        event_id="result", run_id="run", group_id=call.group_id, session_id=call.session_id, floor=0,
        rollout_id=call.rollout_id, call_id=call.call_id, call_seq=0, status=ToolStatus.ok, reason="", exit_code=0,
        output=b"said", full_output=None, duration_s=0.0, queue_s=0.0, workspace=None, attempt=1, worker="w",
        cached=False,
    )  # fmt: skip


async def test_a_session_whose_tool_call_still_runs_is_not_erased() -> None:
    made, events, session = await begun(without=(SessionFinished, RewardAssigned))
    started = next(event for event in events if isinstance(event, SessionStarted) and event.session_id == session)
    await close_group(made, events)
    await made.append([call_of(started)])
    with pytest.raises(NotErasable, match="tool call the-call has no result yet"):
        await made.erase(session)
    await made.append([result_of(call_of(started))])
    assert (await made.erase(session)).is_done


async def test_a_call_that_a_program_made_is_not_waited_for() -> None:
    made, events, session = await begun()
    started = next(event for event in events if isinstance(event, SessionStarted) and event.session_id == session)
    await made.append([call_of(started, caller="mcp_proxy")])
    assert (await made.erase(session)).is_done


async def test_every_session_of_a_closed_run_can_be_erased() -> None:
    made, events, session = await begun(without=(SessionFinished, RewardAssigned))
    started = next(event for event in events if isinstance(event, SessionStarted) and event.session_id == session)
    await made.append([call_of(started)])
    log = MemoryLog(made.broker)
    async with log.appender() as appender:
        await set_phase(made.role("run", log, appender), RunPhase.CLOSED)
    assert (await made.erase(session)).is_done
    await check_identical(made)


async def test_a_run_that_does_not_encrypt_refuses_to_erase_and_to_wrap() -> None:
    made = await SealedRun.begin()
    await made.configure(configuration(SETTINGS))
    with pytest.raises(NotErasable, match="does not encrypt"):
        await plan_erasure(made.role(), "any")
    with pytest.raises(NotErasable, match="does not encrypt"):
        await rewrap(made.role())


async def test_a_process_without_master_keys_is_told_to_name_them() -> None:
    made = await SealedRun.begin()
    await made.configure()
    role = made.role()
    role.events.keys = None
    with pytest.raises(NotErasable, match="TURNLOG_ERASURE_MASTER_KEYS_FILE"):
        await plan_erasure(role, "any")


async def pruned_run() -> tuple[SealedRun, str]:
    """A run whose records are only in the archive, as far as no role reads them again, and a session that trained."""
    made = await SealedRun.begin()
    await made.good_days(groups=6)
    session = await trained_session(made)
    await made.append([
        GroupRequested(
            event_id="asked", run_id="run", group_id="g", draw=0, dataset="d", dataset_epoch=0, index=0,
            purpose=Purpose.train, group_size=1,
        )
    ])  # fmt: skip
    await made.archive()
    return made, session


async def prune(made: SealedRun, kept: Iterable[topics.Topic] = ()) -> None:
    role = made.role()
    index = ArchiveIndex(role.blobs, "run")
    await index.load()
    limits = await prunable(role, index, EVER)
    assert limits
    names = {topic.name for topic in kept}
    await role.log.delete_before({place: at for place, at in limits.items() if place.topic not in names})


@pytest.mark.parametrize("kept", [(), (topics.SESSIONS,)])
async def test_a_pruned_session_is_erased_with_its_structure_and_replays(kept: tuple[topics.Topic, ...]) -> None:
    """`kept`: topics that still have all of their records."""
    made, session = await pruned_run()
    await prune(made, kept)
    done = await made.erase(session)
    assert done.is_done
    assert done.batches
    (recorded,) = done.recorded
    assert recorded.turns
    assert (await made.erase(session)).recorded == (recorded,)
    await made.archive()
    verdict = await run(await made.archived())
    assert verdict.identical, verdict.divergence


async def test_each_batch_is_named_once_however_often_a_session_is_erased() -> None:
    made = await SealedRun.begin()
    await made.good_days(groups=4)
    session = await trained_session(made)
    await made.erase(session)
    manifest = next(event for event in await made.read(topics.BATCHES) if isinstance(event, SampleBatchFormed)
                    and session in {row.session_id for row in event.samples})  # fmt: skip
    await made.append([dataclasses.replace(manifest, event_id="later", batch_index=99)])
    for _ in range(3):
        done = await made.erase(session)
    assert 99 in done.batches
    first, second = (event for event in await made.read(topics.SESSIONS) if isinstance(event, SessionErased))
    assert first.batches == (manifest.batch_index,)
    assert second.batches == (manifest.batch_index, 99)


async def test_a_group_with_a_skipped_record_is_erased_and_replays() -> None:
    made = await SealedRun.begin()
    await made.configure()
    events = open_group(made)
    unit, session = unit_of(made, events[0]), events[0].session_id
    snapshot = next(event for event in events if isinstance(event, TokenSnapshot))
    lost = dataclasses.replace(
        snapshot, event_id="lost", turn=TurnId(snapshot.turn.epoch, 9), parent_turn=None, base_len=0,
        delta_ids=BlobRef(hashlib.sha256(b"lost").hexdigest(), 4),
    )  # fmt: skip
    skip = SkipRequested(
        event_id="skip", run_id="run", group_id=events[0].group_id, floor=0, topic=topics.SNAPSHOTS.name,
        partition=unit, offset=made.broker.log_of(Partition(topics.SNAPSHOTS.name, unit)).end, reason="it is lost",
    )  # fmt: skip
    await made.append([events[0], lost, skip, *events[1:]])
    await made.fold()
    assert (await made.erase(session)).is_done
    await check_identical(made)


class ErasingLog(MemoryLog):
    """A log of which a session is erased before some poll of turns, which its reader notices at once."""

    def __init__(self, made: SealedRun, session: str, at: int) -> None:
        super().__init__(made.broker)
        self.made, self.session, self.left = made, session, at
        self.keys: SessionKeys | None = None

    @asynccontextmanager
    async def reader(self, *, patient: bool = False, committed: bool = True) -> AsyncIterator[Reader]:
        yield ErasingReader(self, committed=committed)

    async def poll_turns(self) -> None:
        self.left -= 1
        if self.left == 0:
            assert self.keys is not None
            await self.made.erase(self.session)
            await self.keys.refresh()


class ErasingReader(MemoryReader):
    """A reader of that log."""

    def __init__(self, log: ErasingLog, *, committed: bool) -> None:
        super().__init__(log, committed=committed)
        self._of, self._turns = log, False

    def assign(self, starts: Mapping[Partition, int]) -> None:
        self._turns = any(place.topic == topics.TURNS.name for place in starts)
        super().assign(starts)

    async def poll(self, *, max_records: int = 500, timeout_s: float = 0.1) -> list[Record]:
        if self._turns:
            await self._of.poll_turns()
        return await super().poll(max_records=max_records, timeout_s=timeout_s)


@pytest.mark.parametrize("at", range(1, 6))
async def test_a_replay_during_which_a_session_is_erased_finds_no_difference(at: int) -> None:
    made = await SealedRun.begin()
    await made.good_days(groups=4)
    log = ErasingLog(made, await trained_session(made), at)
    role = made.role("replay", log)
    log.keys = role.events.keys
    verdict = await run(role, memory=Memory(poll_records=3))
    assert verdict.identical, verdict.divergence
    assert log.left <= 0
    samples = [event for event in await made.read(topics.SAMPLES) if isinstance(event, SegmentSample)]
    assert any(map(holds_erased, samples))


async def test_a_session_is_erased_while_its_group_is_scored() -> None:
    made, events, session = await begun()
    await asyncio.gather(made.erase(session), made.fold())
    assert (await made.erase(session)).is_done
    assert events
    await check_identical(made)


class ErasingStore(MemoryBlobs):
    """A store of a run of which a session is erased before the first blob is read, which its reader notices at once."""

    def __init__(self, made: SealedRun, session: str) -> None:
        super().__init__()
        like = made.objects
        self.folder, self.objects, self.named, self.times = like.folder, like.objects, like.named, like.times
        self.made, self.session, self.reads = made, session, 0
        self.keys: SessionKeys | None = None

    async def get(self, ref: BlobRef) -> bytes:
        self.reads += 1
        if self.reads == 1:
            assert self.keys is not None
            await self.made.erase(self.session)
            await self.keys.refresh()
        return await super().get(ref)


async def test_a_batch_of_which_a_session_is_erased_between_samples_and_file_does_not_differ() -> None:
    made = await SealedRun.begin()
    await made.good_days(groups=4)
    first = next(event for event in await made.read(topics.BATCHES) if isinstance(event, SampleBatchFormed))
    store = ErasingStore(made, first.samples[0].session_id)
    role = dataclasses.replace(made.role("replay"), blobs=store)
    store.keys = role.events.keys
    verdict = await run(role)
    assert verdict.identical, verdict.divergence
    assert verdict.batches_compared == store.reads - 1, "one was compared twice"
