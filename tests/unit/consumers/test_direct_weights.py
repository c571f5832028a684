"""Versions that training ranks send straight into an engine, over a log, a store and an engine in memory (ADR 50)."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.fakes.direct_engine import DirectEngine, Outcome, Ranks, digests_of
from tests.unit.consumers.test_loader import (
    URL,
    Gate,
    GatedBlobs,
    asked,
    publish,
    reported,
    role,
    said,
    until,
)
from turnlog.consumers.loader import EngineSwapFailed
from turnlog.consumers.loader.role import Loader
from turnlog.infra.engines.protocol import LOADING, EngineDead, EngineRefused, TransferFailed
from turnlog.infra.engines.sglang import CACHE, WEIGHTS
from turnlog.infra.log import Fenced
from turnlog.infra.roles.role import Role
from turnlog.schemas.events import EngineGone, EngineWeightsLoaded, EngineWeightsRefused, SampleBatchFormed
from turnlog.schemas.releases import example
from turnlog.settings import EngineSettings

__all__ = ["role"]
ENGINE = "engine-0"
FAILED = "TransferFailed: a rank is away"


@pytest.fixture
def ranks(role: Role) -> Ranks:
    return Ranks(role)


@pytest.fixture
def engine(role: Role) -> DirectEngine:
    return DirectEngine(Path(role.settings.model.path))


@asynccontextmanager
async def loading(role: Role, engine: DirectEngine) -> AsyncIterator[asyncio.Task[None]]:
    """A loader of the engine, while the block runs."""
    role.stopping.clear()
    task = asyncio.create_task(Loader(role, engine, ENGINE, URL).run())
    yield task
    role.stopping.set()
    if not task.done():
        await task


def hurry(role: Role, timeout_s: float = 0.3) -> None:
    """Let the loader wait no longer for a transfer."""
    role.settings = dataclasses.replace(
        role.settings, loader=dataclasses.replace(role.settings.loader, timeout_s=timeout_s)
    )


async def killed(task: asyncio.Task[None]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def serves_first(role: Role) -> None:
    """Version 0, which goes through the store."""
    await publish(role, 0)
    await said(role, 2)


async def test_an_announced_version_is_awaited_received_compared_and_acknowledged(
    role: Role, engine: DirectEngine, ranks: Ranks
) -> None:
    async with loading(role, engine):
        await serves_first(role)
        await ranks.announce(1)
        (awaited,) = await ranks.awaited(1)
        assert (awaited.awaited_version, awaited.attempt, awaited.ranks, awaited.cause) == (1, 0, 1, "")
        assert (awaited.engine_id, awaited.state, awaited.version) == (ENGINE, "serving", 0)
        await ranks.begin(1, "another", ENGINE)
        loaded = (await said(role, 3))[2]
    assert isinstance(loaded, EngineWeightsLoaded)
    assert (loaded.version, loaded.state, loaded.superseded) == (1, "serving", ())
    assert set(loaded.seconds) == {"join", "pause", "load", "check", "resume"}
    (transfer,) = engine.transfers
    assert (transfer.group, transfer.first_rank, transfer.world_size, transfer.attempt) == ("group-1-0", 2, 3, 0)
    assert ((await engine.model_info()).version, engine.paused, engine.loads) == (1, False, [0, 1])


async def test_a_durable_copy_of_what_was_received_changes_nothing(
    role: Role, engine: DirectEngine, ranks: Ranks
) -> None:
    async with loading(role, engine):
        await serves_first(role)
        await ranks.offer(1, ENGINE, reports=1)
        await said(role, 3)
        await ranks.store(1)
        await ranks.offer(2, ENGINE, reports=2)
        assert reported(await said(role, 4))[3] == ("EngineWeightsLoaded", 2, None, "serving")
    assert engine.loads == [0, 1, 2]


async def test_an_engine_without_the_plugin_says_what_to_install_and_waits_for_the_durable_copy(
    role: Role, engine: DirectEngine, ranks: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    engine.ranks = 0
    async with loading(role, engine):
        await serves_first(role)
        for number in (1, 2):
            await ranks.announce(number)
            awaited = (await ranks.awaited(number))[-1]
            assert (awaited.awaited_version, awaited.ranks) == (number, 0)
            assert "pip install turnlog" in awaited.cause
            await ranks.store(number)
            loaded = (await said(role, 2 + number))[-1]
            assert isinstance(loaded, EngineWeightsLoaded)
            assert (loaded.version, "fetch" in loaded.seconds) == (number, True)
    lines = [line for line in caplog.records if "plugin" in line.message and line.levelno == logging.WARNING]
    assert len(lines) == 1
    assert not engine.transfers


async def test_an_engine_that_a_transfer_begins_without_waits_for_the_durable_copy(
    role: Role, engine: DirectEngine, ranks: Ranks
) -> None:
    async with loading(role, engine):
        await serves_first(role)
        await ranks.offer(1, "another", reports=1)
        await ranks.store(1)
        assert reported(await said(role, 3))[2] == ("EngineWeightsLoaded", 1, None, "serving")
    assert not engine.transfers


@pytest.mark.parametrize(
    ("digests", "cause"),
    [
        ({"a": "0:2x3"}, "TensorsMismatch"),
        ({"a": "0:3x2", "b": "0:4"}, "ShapeMismatch"),
        ({"a": "0:2x3", "b": "0:4", "c": "0:"}, "TensorsMismatch"),
    ],
)
async def test_an_announced_version_that_does_not_fit_is_refused_at_once(
    role: Role, engine: DirectEngine, ranks: Ranks, digests: dict[str, str], cause: str
) -> None:
    async with loading(role, engine):
        await serves_first(role)
        await ranks.announce(1, digests)
        refused = (await said(role, 3))[2]
        assert isinstance(refused, EngineWeightsRefused)
        assert (refused.refused_version, refused.version, refused.cause) == (1, 0, cause)
        await ranks.announce(2)
        assert (await ranks.awaited(1))[0].awaited_version == 2
        await ranks.begin(2, ENGINE)
        assert reported(await said(role, 4))[3] == ("EngineWeightsLoaded", 2, None, "serving")


async def test_an_engine_with_tensors_of_two_versions_takes_no_turns_until_the_next_attempt(
    role: Role, engine: DirectEngine, ranks: Ranks
) -> None:
    engine.outcomes = [TransferFailed("a rank is away")]
    async with loading(role, engine):
        await serves_first(role)
        await ranks.offer(1, ENGINE, reports=1)
        again = (await ranks.awaited(2))[1]
        assert (again.awaited_version, again.attempt, again.cause) == (1, 1, FAILED)
        assert (again.state, again.version, engine.paused) == ("starting", -1, True)
        assert reported(await said(role, 3))[2] == ("EngineRegistered", -1, None, "starting")
        await ranks.begin(1, ENGINE, attempt=1)
        assert reported(await said(role, 4))[3] == ("EngineWeightsLoaded", 1, None, "serving")
    assert (engine.paused, engine.served_mixed, engine.loads) == (False, False, [0, 1])


async def test_it_stays_paused_if_it_refuses_the_next_attempt_or_the_files(
    role: Role, engine: DirectEngine, ranks: Ranks
) -> None:
    engine.outcomes = [TransferFailed("a rank is away"), EngineRefused("no sender")]
    async with loading(role, engine):
        await serves_first(role)
        await ranks.announce(1)
        for attempt in (0, 1):
            await ranks.awaited(1 + attempt)
            await ranks.begin(1, ENGINE, attempt=attempt)
        await ranks.awaited(3)
        assert (engine.paused, reported(await said(role, 3))[2:]) == (
            True,
            [("EngineRegistered", -1, None, "starting")],
        )
        engine.refuses_files_of = 1
        await ranks.store(1)
        events = await said(role, 5)
        assert isinstance(events[3], EngineWeightsRefused)
        assert events[3].refused_version == 1
        assert reported(events)[4] == ("EngineWeightsLoaded", 0, None, "serving")
    assert not engine.served_mixed


async def test_an_engine_that_restarts_finds_a_durable_version_behind_many_that_were_announced(
    role: Role, engine: DirectEngine, ranks: Ranks
) -> None:
    async with loading(role, engine):
        await serves_first(role)
        for number in range(1, 11):
            await ranks.offer(number, ENGINE, reports=number)
            await said(role, 2 + number)
        engine.restart()
        assert reported(await said(role, 14))[12:] == [
            ("EngineRegistered", -1, None, "starting"),
            ("EngineWeightsLoaded", 0, None, "serving"),
        ]


async def test_it_loads_the_newest_durable_version_if_nothing_comes_in_time(
    role: Role, engine: DirectEngine, ranks: Ranks
) -> None:
    engine.outcomes = [TransferFailed("a rank is away")]
    hurry(role)
    async with loading(role, engine):
        await serves_first(role)
        await ranks.offer(1, ENGINE, reports=1)
        assert reported(await said(role, 4))[2:] == [
            ("EngineRegistered", -1, None, "starting"),
            ("EngineWeightsLoaded", 0, None, "serving"),
        ]
        await ranks.offer(2, ENGINE, reports=3)
        loaded = (await said(role, 5))[4]
        assert isinstance(loaded, EngineWeightsLoaded)
        assert (loaded.version, loaded.superseded) == (2, (1,))
    assert not engine.served_mixed


async def test_it_loads_the_durable_copy_or_a_newer_version_that_comes_first(
    role: Role, engine: DirectEngine, ranks: Ranks
) -> None:
    engine.outcomes = [TransferFailed("a rank is away")]
    async with loading(role, engine):
        await serves_first(role)
        await ranks.offer(1, ENGINE, reports=1)
        await ranks.awaited(2)
        await ranks.store(1)
        assert reported(await said(role, 4))[3] == ("EngineWeightsLoaded", 1, None, "serving")
        engine.outcomes = [TransferFailed("a rank is away")]
        await ranks.offer(2, ENGINE, reports=3)
        await ranks.awaited(4)
        await ranks.announce(3)
        newer = (await ranks.awaited(5))[4]
        assert (newer.awaited_version, newer.attempt, newer.version) == (3, 0, -1)
        await ranks.begin(3, ENGINE)
        loaded = (await said(role, 6))[5]
        assert isinstance(loaded, EngineWeightsLoaded)
        assert (loaded.version, loaded.superseded) == (3, (2,))
    assert not engine.served_mixed


async def test_an_engine_that_refuses_a_transfer_goes_on_with_its_old_weights(
    role: Role, engine: DirectEngine, ranks: Ranks
) -> None:
    engine.outcomes = [EngineRefused("no sender")]
    async with loading(role, engine):
        await serves_first(role)
        await ranks.offer(1, ENGINE, reports=1)
        again = (await ranks.awaited(2))[1]
        assert (again.attempt, again.state, again.version) == (1, "serving", 0)
        assert (engine.paused, (await engine.model_info()).version) == (False, 0)
        await ranks.begin(1, ENGINE, attempt=1)
        assert reported(await said(role, 3))[2] == ("EngineWeightsLoaded", 1, None, "serving")


@pytest.mark.parametrize(
    ("found", "cause"),
    [
        (digests_of(7), "DigestMismatch: version 1: 2 tensors differ"),
        ({**digests_of(1), "b": "7:4"}, "DigestMismatch: version 1: 1 tensors differ"),
        ({"a": digests_of(1)["a"]}, "TensorsMismatch: version 1: 1 tensors are missing or unknown, the first is b"),
        ({**digests_of(1), "c": "7:4"}, "TensorsMismatch: version 1: 1 tensors are missing or unknown, the first is c"),
    ],
    ids=["all", "one", "missing", "unknown"],
)
async def test_weights_with_wrong_digests_never_serve_and_are_refused_the_second_time(
    role: Role, engine: DirectEngine, ranks: Ranks, found: Outcome, cause: str
) -> None:
    engine.outcomes = [found, found]
    async with loading(role, engine):
        await serves_first(role)
        await ranks.offer(1, ENGINE, reports=1)
        again = (await ranks.awaited(2))[1]
        assert again.cause.startswith(cause)
        assert (again.attempt, engine.paused) == (1, True)
        assert (await engine.model_info()).weight_version == f"{LOADING}1"
        await ranks.begin(1, ENGINE, attempt=1)
        events = await said(role, 5)
    assert isinstance(events[3], EngineWeightsRefused)
    assert (events[3].refused_version, events[3].cause) == (1, cause.partition(":")[0])
    assert reported(events)[4] == ("EngineWeightsLoaded", 0, None, "serving")
    assert not engine.served_mixed


async def test_an_engine_that_dies_of_a_transfer_is_gone_and_begins_with_the_newest_durable_version(
    role: Role, engine: DirectEngine, ranks: Ranks
) -> None:
    engine.outcomes = [EngineDead("dropped")]
    hurry(role)
    async with loading(role, engine) as task:
        await serves_first(role)
        await ranks.offer(1, ENGINE, reports=1)
        with pytest.raises(EngineSwapFailed, match="died while it received version 1"):
            await task
    assert isinstance((await said(role, 3))[2], EngineGone)
    engine.restart()
    async with loading(role, engine):
        assert (await ranks.awaited(2))[1].attempt == 1
        assert reported(await said(role, 5))[3:] == [
            ("EngineRegistered", -1, None, "starting"),
            ("EngineWeightsLoaded", 0, None, "serving"),
        ]


async def test_an_engine_that_restarts_has_lost_what_only_the_ranks_had_and_does_not_wait_for_it(
    role: Role, engine: DirectEngine, ranks: Ranks
) -> None:
    async with loading(role, engine):
        await serves_first(role)
        await ranks.offer(1, ENGINE, reports=1)
        await said(role, 3)
        engine.restart(label="0")
        assert reported(await said(role, 4))[3] == ("EngineRegistered", 0, None, "serving")
        engine.restart()
        assert reported(await said(role, 6))[4:] == [
            ("EngineRegistered", -1, None, "starting"),
            ("EngineWeightsLoaded", 0, None, "serving"),
        ]
        await ranks.store(1)
        loaded = (await said(role, 7))[6]
        assert isinstance(loaded, EngineWeightsLoaded)
        assert (loaded.version, loaded.superseded) == (1, ())
        assert len(await ranks.awaited(1)) == 1


async def test_an_engine_that_starts_with_old_weights_serves_them_if_the_newest_version_does_not_come(
    role: Role, engine: DirectEngine, ranks: Ranks
) -> None:
    hurry(role)
    async with loading(role, engine):
        await serves_first(role)
        await asked(role, "gone")
        await said(role, 4)
        await ranks.announce(1)
        await asked(role, "serving")
        assert reported(await said(role, 6))[4:] == [
            ("EngineRegistered", 0, None, "starting"),
            ("EngineRegistered", 0, None, "serving"),
        ]
        assert (await ranks.awaited(1))[0].state == "starting"


async def test_a_loader_that_starts_late_does_not_wait_for_what_was_sent_without_it(
    role: Role, engine: DirectEngine, ranks: Ranks
) -> None:
    await publish(role, 0)
    for number in (1, 2, 3):
        await ranks.announce(number)
        await ranks.begin(number, "another")
        if number == 1:
            await ranks.store(number)
    async with loading(role, engine):
        awaited = (await ranks.awaited(1))[0]
        assert (awaited.awaited_version, awaited.attempt) == (3, 1)
        await ranks.begin(3, "another", attempt=1)
        loaded = (await said(role, 2))[1]
    assert isinstance(loaded, EngineWeightsLoaded)
    assert (loaded.version, loaded.superseded) == (1, (0,))


async def test_weights_of_a_trainer_that_died_are_not_awaited_any_more(
    role: Role, engine: DirectEngine, ranks: Ranks
) -> None:
    async with loading(role, engine):
        await serves_first(role)
        await ranks.announce(1)
        await ranks.awaited(1)
        await publish(role, 2, step=0, incarnation=1)
        await said(role, 3)  # it is loaded
        await ranks.announce(3, step=1, incarnation=1)
        awaited = (await ranks.awaited(2))[1]
        assert (awaited.awaited_version, awaited.version) == (3, 2)
        await ranks.begin(3, ENGINE)
        events = await said(role, 4)
    loaded = [event for event in events if isinstance(event, EngineWeightsLoaded)]
    assert [(event.version, event.superseded) for event in loaded] == [(0, ()), (2, (1,)), (3, ())]


async def test_an_engine_does_not_miss_what_is_sent_while_its_loader_fetches_older_files(
    role: Role, engine: DirectEngine, ranks: Ranks
) -> None:
    blobs = GatedBlobs()
    async with loading(role, engine):
        await serves_first(role)
    role = dataclasses.replace(role, blobs=blobs)
    ranks = Ranks(role)
    async with loading(role, engine):
        await publish(role, 1)
        await blobs.gate.reached.wait()
        await ranks.offer(2, ENGINE, reports=1)
        loaded = (await said(role, 4))[3]
        assert isinstance(loaded, EngineWeightsLoaded)
        assert (loaded.version, loaded.superseded) == (2, (1,))
        blobs.gate.open.set()
        await publish(role, 3)
        await said(role, 5)
    assert engine.loads == [0, 2, 3]


async def test_an_engine_that_is_silent_or_leaves_awaits_nothing(
    role: Role, engine: DirectEngine, ranks: Ranks
) -> None:
    async with loading(role, engine):
        await serves_first(role)
        engine.requests = 1
        await asked(role, "gone")
        await said(role, 3)
        await ranks.announce(1)
        engine.requests = 0
        await said(role, 4)
        await asked(role, "serving")
        awaited = await ranks.awaited(1)
        assert [event.state for event in awaited] == ["starting"], "it was asked for after it came back"


async def test_a_released_engine_receives_a_version_and_takes_its_memory_back(
    role: Role, engine: DirectEngine, ranks: Ranks
) -> None:
    role.settings = dataclasses.replace(role.settings, engine=EngineSettings(colocate=True))
    async with loading(role, engine):
        await serves_first(role)
        await role.events.append(dataclasses.replace(example(SampleBatchFormed), run_id="run", batch_index=0))
        assert reported(await said(role, 3))[2] == ("EngineDraining", 0, None, "released")
        assert engine.memory == set()
        await ranks.announce(1, batch_index=0)
        assert (await ranks.awaited(1))[0].state == "released"
        engine.outcomes = [EngineRefused("no sender"), TransferFailed("a rank is away")]
        for attempt in (0, 1):
            await ranks.begin(1, ENGINE, attempt=attempt)
            again = (await ranks.awaited(2 + attempt))[-1]
            assert (again.state, engine.memory, engine.paused) == ("starting", {CACHE, WEIGHTS}, True)
        await ranks.begin(1, ENGINE, attempt=2)
        assert reported(await said(role, 5))[3:] == [
            ("EngineRegistered", -1, None, "starting"),
            ("EngineWeightsLoaded", 1, None, "serving"),
        ]
    assert (engine.memory, engine.paused, engine.alive) == ({CACHE, WEIGHTS}, False, True)


async def test_a_loader_that_wakes_up_behind_its_successor_labels_nothing(
    role: Role, engine: DirectEngine, ranks: Ranks
) -> None:
    gate = Gate()
    engine.gate = gate.pass_through
    zombie = asyncio.create_task(Loader(role, engine, ENGINE, URL).run())
    await serves_first(role)
    await ranks.offer(1, ENGINE, reports=1)
    await gate.reached.wait()
    successor = asyncio.create_task(Loader(role, engine, ENGINE, URL).run())
    awaited = (await ranks.awaited(2))[1]
    assert (awaited.attempt, awaited.version, awaited.state) == (1, -1, "starting")
    gate.open.set()
    with pytest.raises(Fenced):
        await zombie
    assert (await engine.model_info()).weight_version == f"{LOADING}1"
    assert engine.paused
    await ranks.begin(1, ENGINE, attempt=1)
    assert reported(await said(role, 4))[2:] == [
        ("EngineRegistered", -1, None, "starting"),
        ("EngineWeightsLoaded", 1, None, "serving"),
    ]
    role.stopping.set()
    await successor


async def test_a_loader_that_was_killed_before_the_transfer_is_followed_by_one_that_joins_it(
    role: Role, engine: DirectEngine, ranks: Ranks
) -> None:
    async with loading(role, engine) as task:
        await serves_first(role)
        await ranks.announce(1)
        await ranks.awaited(1)
        await killed(task)
    async with loading(role, engine):
        again = (await ranks.awaited(2))[1]
        assert (again.attempt, again.version, again.state) == (0, 0, "serving")
        await ranks.begin(1, ENGINE)
        assert reported(await said(role, 4))[3] == ("EngineWeightsLoaded", 1, None, "serving")


@pytest.mark.parametrize("sent", [False, True], ids=["while it received", "before it acknowledged"])
async def test_what_a_killed_loader_left_is_followed_by_the_next_attempt_or_the_durable_copy(
    role: Role, engine: DirectEngine, ranks: Ranks, sent: bool
) -> None:
    gate = Gate()
    async with loading(role, engine) as task:
        await serves_first(role)
        if sent:
            engine.gate_resume = gate.pass_through
        else:
            engine.gate = gate.pass_through
        await ranks.offer(1, ENGINE, reports=1)
        await gate.reached.wait()
        await killed(task)
    gate.open.set()
    assert (await engine.model_info()).weight_version == ("1" if sent else f"{LOADING}1")
    async with loading(role, engine):
        again = (await ranks.awaited(2))[1]
        assert (again.attempt, again.version, again.state) == (1, -1, "starting")
        if sent:
            await ranks.store(1)
        else:
            await ranks.begin(1, ENGINE, attempt=1)
        events = await said(role, 4)
    assert reported(events)[2:] == [
        ("EngineRegistered", -1, None, "starting"),
        ("EngineWeightsLoaded", 1, None, "serving"),
    ]
    await until(lambda: not engine.paused)
