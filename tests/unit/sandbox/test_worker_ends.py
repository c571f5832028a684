"""Calls that are ended from outside: cancelled, too late, stopped, limited."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from turnlog.schemas.events import SandboxLimits, SandboxSpec, ToolStatus


async def test_a_cancelled_call_ends_and_one_that_waits_never_runs(house: Any) -> None:
    async with house.worker():
        await house.ask(house.shell("runs", "sleep 60"), house.call("waits", 1))
        await house.until(1, house.starts)
        await house.ask(house.cancelled("waits"), house.cancelled("runs"))
        answers = await house.completed(2)
    assert [(answer.call_id, answer.status) for answer in answers] == [
        ("runs", ToolStatus.cancelled),
        ("waits", ToolStatus.cancelled),
    ]
    assert len(await house.starts()) == 1


async def test_a_call_that_waits_for_a_sandbox_is_cancelled_at_once(house: Any) -> None:
    async with house.worker(slots=1):
        await house.ask(house.shell("runs", "sleep 60"))
        await house.until(1, house.starts)
        twice = [house.cancelled("waits")] * 2
        await house.ask(house.call("waits", session="t", rollout_id="s"), *twice)
        (answer,) = await house.completed(1)
        await house.ask(house.cancelled("runs"))
    assert (answer.call_id, answer.status) == ("waits", ToolStatus.cancelled)
    assert len(await house.starts()) == 1


async def test_cancelling_an_answered_call_changes_nothing(house: Any) -> None:
    async with house.worker():
        await house.answer(house.call("a"))
        await house.ask(house.cancelled("a"))
        after = await house.answer(house.call("b", 1))
        assert len(await house.completed(2)) == 2
    assert after.status is ToolStatus.ok
    assert sum((await house.committed()).values()) == 3


async def test_a_cancelled_call_of_a_durable_session_leaves_what_it_had_written(house: Any) -> None:
    async with house.worker():
        await house.ask(house.durable("a", "echo 1 > f; sleep 60", 0, None))
        await house.until(1, house.starts)
        await house.ask(house.cancelled("a"))
        (first,) = await house.completed(1)
        second = await house.answer(house.durable("b", "ls", 1, first.workspace))
    assert first.status is ToolStatus.cancelled
    assert (second.status, second.output) in ((ToolStatus.ok, b"f\n"), (ToolStatus.ok, b""))


async def test_a_stop_lets_the_running_call_end_and_leaves_the_waiting_ones(house: Any) -> None:
    await house.ask(house.shell("runs", "sleep 0.3; echo ended"), house.call("waits", 1))
    async with house.worker():
        await house.until(1, house.starts)
    (answer,) = await house.completed(1)
    assert answer.output == b"ended\n"
    assert sum((await house.committed()).values()) == 1
    async with house.worker():
        answers = await house.completed(2)
    assert [answer.call_id for answer in answers] == ["runs", "waits"]


async def test_a_stop_waits_for_a_call_as_long_as_a_call_may_take(house: Any) -> None:
    """Longer than for one whose partition moves, for which a whole group waits."""
    house.pace = {"move_s": 0.1}
    await house.ask(house.shell("runs", "sleep 1.5; echo ended"))
    async with house.worker():
        await house.until(1, house.starts)
    (answer,) = await house.completed(1)
    assert (answer.status, answer.output) == (ToolStatus.ok, b"ended\n")


async def test_a_stop_ends_a_call_that_takes_longer_than_calls_may(house: Any) -> None:
    house.pace = {"move_s": 0.1, "stop_s": 0.5}
    await house.ask(house.shell("runs", "sleep 60"))
    began = time.monotonic()
    async with house.worker():
        await house.until(1, house.starts)
    assert time.monotonic() - began < 20
    assert await house.completed(0) == []


async def test_a_call_that_nobody_waits_for_does_not_run(house: Any) -> None:
    await house.ask(house.call("a", deadline_s=0.0))
    async with house.worker():
        (answer,) = await house.completed(1)
    assert (answer.status, answer.reason) == (ToolStatus.timeout, "deadline_s")
    assert await house.starts() == []


async def test_a_call_whose_deadline_passes_while_it_waits_for_a_sandbox_is_answered_then(house: Any) -> None:
    began, frozen = time.monotonic(), house.clock()
    house.clock = lambda: frozen + time.monotonic() - began
    async with house.worker(slots=1):
        await house.ask(house.shell("runs", "sleep 60"))
        await house.until(1, house.starts)
        waits = house.call("waits", session="t", rollout_id="s", deadline_s=house.clock() - frozen + 1.5)
        answer = await house.answer(waits)
        await house.ask(house.cancelled("runs"))
    assert (answer.status, answer.reason) == (ToolStatus.timeout, "deadline_s")
    assert len(await house.starts()) == 1


async def test_a_request_gets_no_more_than_the_worker_grants(house: Any) -> None:
    house.settings = dataclasses.replace(
        house.settings, sandbox=dataclasses.replace(house.settings.sandbox, wall_s=0.3)
    )
    greedy = SandboxSpec(backend="subprocess", limits=SandboxLimits(wall_s=float("inf")))
    async with house.worker():
        answer = await house.answer(house.shell("a", "sleep 60", sandbox=greedy))
    assert (answer.status, answer.reason) == (ToolStatus.timeout, "wall_s")
