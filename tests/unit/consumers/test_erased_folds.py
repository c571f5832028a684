"""The fold of a session whose content was erased gives what it gave before, whatever its records were."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np
import pytest

from tests.fakes.sessions import GroupName, Shape, whole_group
from tests.unit.consumers.test_erasure import SealedRun
from turnlog.consumers.replay.verify import run
from turnlog.infra.blobs import externalize_payloads
from turnlog.infra.log import Partition
from turnlog.infra.roles.runs import Configured
from turnlog.processors.core.fold_versions import INPUTS
from turnlog.processors.runtime.assembler import AssemblerRunner, assembler_plan
from turnlog.schemas import topics
from turnlog.schemas.content import holds_erased
from turnlog.schemas.events import (
    Event,
    GroupScored,
    SessionErased,
    SessionFinished,
    TokenSnapshot,
    TurnTreeAssembled,
)
from turnlog.schemas.topics import INLINE_LIMIT_BYTES
from turnlog.schemas.types import BlobRef, pack_float32s, pack_int32s

NAN = float("nan")
Change = Callable[[TokenSnapshot], TokenSnapshot]
BAD: dict[str, Change] = {
    "not finite": lambda event: dataclasses.replace(event, output_logprobs=pack_float32s([NAN] * 4)),
    "out of range": lambda event: dataclasses.replace(event, output_ids=pack_int32s([-1, 1, 2, 3])),
    "other prompt": lambda event: dataclasses.replace(event, prompt_sha256="0" * 64),
}


def group_of(shape: Shape, number: int = 0) -> list[Event]:
    """The records of a group of two sessions with two turns each."""
    name = GroupName("run", f"group-{number}", 0, 2)
    return list(whole_group(name, np.random.default_rng(number), turns=2, shape=shape))


async def scored_run(events: Iterable[Event]) -> tuple[SealedRun, str]:
    """A run of these records that was folded, and the first of its sessions."""
    made, events = await SealedRun.begin(), list(events)
    await made.configure()
    await made.append(events)
    await made.fold()
    return made, next(event.session_id for event in events if isinstance(event, SessionFinished))


async def derived(made: SealedRun) -> list[Event]:
    """The trees and scores on the log."""
    found = [event for topic in (topics.TREES, topics.SAMPLES) for event in await made.read(topic)]
    return [event for event in found if isinstance(event, TurnTreeAssembled | GroupScored)]


async def check_erased(made: SealedRun, session: str) -> SessionErased:
    """Erase a session, and check that a new assembler stops at nothing and that replay finds no difference. The record
    of the erasure."""
    before = await derived(made)
    await made.erase(session)
    await made.append(group_of(Shape(), number=9))
    await made.fold()
    snapshots = [event for event in await made.read(topics.SNAPSHOTS) if event.session_id == session]
    assert snapshots
    assert all(map(holds_erased, snapshots))
    verdict = await run(made.role())
    assert verdict.identical, verdict.divergence
    after = {event.event_id: event for event in await derived(made)}
    assert [after[event.event_id] for event in before] == before
    (erased,) = [event for event in await made.read(topics.SESSIONS) if isinstance(event, SessionErased)]
    return erased


@pytest.mark.parametrize("shape", [Shape(6, 0), Shape(1, 4)])
async def test_turns_without_output_replay_after_their_session_was_erased(shape: Shape) -> None:
    made, session = await scored_run(group_of(shape))
    erased = await check_erased(made, session)
    assert len(erased.turns) == 2


def changed(events: Iterable[Event], change: Change, turn: int) -> list[Event]:
    """The records, with the snapshots of one turn of the first session changed."""
    events = list(events)
    session = events[0].session_id
    return [
        change(event)
        if isinstance(event, TokenSnapshot) and event.session_id == session and event.turn.index == turn
        else event
        for event in events
    ]


@pytest.mark.parametrize("name", BAD)
async def test_a_session_refused_for_its_content_stays_refused_after_it_was_erased(name: str) -> None:
    made, session = await scored_run(changed(group_of(Shape()), BAD[name], turn=0))
    erased = await check_erased(made, session)
    assert erased.refused
    assert [turn.index for turn in erased.refused_turns] == [0, 1], "the second turn has no parent then"
    assert not erased.turns
    (scored,) = [event for event in await derived(made) if getattr(event, "group_id", "") == "group-0"][-1:]
    assert isinstance(scored, GroupScored)
    assert [one.excluded_reason for one in scored.rollouts if one.session_id == session] == ["refused"]


@pytest.mark.parametrize("named", [True, False])
async def test_a_refused_snapshot_of_no_named_turn_is_counted_as_refused_after_the_erasure(named: bool) -> None:
    """`named`: whether the finish names any turn at all."""
    events = changed(group_of(Shape()), BAD["not finite"], turn=1)
    finished = next(event for event in events if isinstance(event, SessionFinished))
    turns = finished.turns[:1] if named else ()
    events[events.index(finished)] = dataclasses.replace(finished, turns=turns)
    made, session = await scored_run(events)
    (before,) = [event for event in await derived(made) if isinstance(event, GroupScored)]
    assert "refused" in before.books.masked
    erased = await check_erased(made, session)
    assert not erased.refused
    assert [turn.index for turn in erased.refused_turns] == [1]
    assert len(erased.turns) == len(turns)


@pytest.mark.parametrize("delta", [6, INLINE_LIMIT_BYTES // 4 + 1])
async def test_an_assembler_that_folds_again_while_a_session_is_erased_goes_on(delta: int) -> None:
    """Its content is gone, or a payload of it, and the assembler was opened before that."""
    made = await SealedRun.begin()
    await made.configure()
    events = [await externalize_payloads(event, made.objects) for event in group_of(Shape(delta, 4))]
    session = events[0].session_id
    payloads = [event.delta_ids for event in events if isinstance(event, TokenSnapshot) and event.session_id == session]
    await made.append(event for event in events if getattr(event, "session_id", "") == session)
    await made.fold()  # the group stays open, so that the next assembler folds it again
    role = made.role("assembler")
    plan = dataclasses.replace(assembler_plan(Configured.today(made.settings), made.settings.assembler), pauses_s=())
    runner = AssemblerRunner(plan, role.log, role.events, role.blobs, role.health, clock=lambda: 0.0)
    async with runner.join_group("assembler-1") as reader:
        await runner.turn(reader, poll_s=0.001)
        assert len(runner.units) == made.settings.kafka.groups
        await made.erase(session)
        assert role.events.keys is not None
        if delta == 6:
            await role.events.keys.refresh()
        for payload in payloads:
            if isinstance(payload, BlobRef):
                made.objects.objects.pop(payload.sha256, None)
        for more in ([], [event for event in events if getattr(event, "session_id", "") != session]):
            await made.append(more)
            ends = await role.log.end_offsets([Partition(topic, n) for topic in INPUTS for n in runner.units])
            while any(runner.units[place.number].position[place.topic] < end for place, end in ends.items()):
                await runner.turn(reader, poll_s=0.001)
                assert runner.stopped == {}
    (scored,) = [event for event in await derived(made) if isinstance(event, GroupScored)]
    assert len(scored.rollouts) == 2
    verdict = await run(made.role())
    assert verdict.identical, verdict.divergence
