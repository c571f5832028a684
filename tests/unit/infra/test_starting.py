"""Servers that come later, go away and come back; and what a signal does before and after a role has begun."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

import pytest

from turnlog.infra.log import LogUnreachable, TopicMissing
from turnlog.infra.registry import RegistryUnavailable
from turnlog.infra.roles import starting
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.starting import RequiredServer, Servers, run_until_stopped, watch_servers


class Far:
    """A server that is there when it is told to be."""

    def __init__(self, name: str = "Kafka", **more: bool) -> None:
        self.trouble: Exception | None = LogUnreachable("nobody listens")
        self.asked = asyncio.Semaphore(0)
        self.server = RequiredServer(
            name=name, address="kafka:9092", setting="[kafka] bootstrap", answers=self.answers, **more
        )

    async def answers(self) -> None:
        self.asked.release()
        if self.trouble is not None:
            raise self.trouble

    async def looked_at(self, times: int) -> None:
        """So often more."""
        async with asyncio.timeout(20):
            for _ in range(times):
                await self.asked.acquire()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what time alone brings."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - a state of the health, which tells nobody
            await asyncio.sleep(0.01)


@pytest.fixture
def health() -> Health:
    return Health("assembler", work_s=60.0)


async def test_each_server_is_waited_for_and_named_with_its_address_its_setting_and_since_when(health: Health) -> None:
    kafka, store = Far(), Far("store")
    there = asyncio.create_task(Servers([kafka.server, store.server], health).there())
    await asyncio.gather(kafka.looked_at(2), store.looked_at(2))
    assert not there.done()
    said = health.waiting
    assert set(said) == {"start", "Kafka", "store"}
    assert re.fullmatch(
        r"Kafka at kafka:9092 does not answer \(nobody listens\); "
        r"start it, or set \[kafka\] bootstrap \(TURNLOG_KAFKA_BOOTSTRAP\) to its address; "
        r"\d attempts since \d{4}-\d\d-\d\dT[\d:]+\+00:00",
        said["Kafka"],
    )
    assert health.living()[0]
    store.trouble = None
    await store.looked_at(1)
    kafka.trouble = TopicMissing("runs does not exist: run `turnlog topics apply`")
    await kafka.looked_at(2)
    assert set(health.waiting) == {"start", "Kafka"}
    assert "turnlog topics apply" in health.waiting["Kafka"]
    kafka.trouble = None
    await asyncio.wait_for(there, 20)
    assert set(health.waiting) == {"start"}


async def test_pauses_grow_up_to_a_bound_and_differ_between_roles(health: Health) -> None:
    pauses: list[float] = []
    far = Far()

    async def asleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 12:
            far.trouble = None

    await Servers([far.server], health, sleep=asleep).there()
    bounds = [min(starting.FIRST_S * 2**number, starting.LONGEST_S) for number in range(12)]
    assert all(bound / 2 <= found <= bound for bound, found in zip(bounds, pauses, strict=True))
    assert bounds[-1] == starting.LONGEST_S
    assert len({found / bound for bound, found in zip(bounds, pauses, strict=True)}) > 1


async def test_a_server_that_is_silent_is_away(health: Health) -> None:
    never = asyncio.Event().wait
    silent = RequiredServer(name="registry", address="http://r", setting="[registry] url", answers=never, look_s=0.05)
    there = asyncio.create_task(Servers([silent], health).there())
    await until(lambda: "gave no answer within" in health.waiting.get("registry", ""))
    there.cancel()


async def test_a_fault_that_no_waiting_mends_comes_out_and_ends_the_waiting_for_others(health: Health) -> None:
    away, wrong = Far(), Far("registry")
    wrong.trouble = RegistryUnavailable("http://r answered 401")
    with pytest.raises(RegistryUnavailable, match="401"):
        await asyncio.wait_for(Servers([away.server, wrong.server], health).there(), 20)
    looks = away.asked._value
    await asyncio.sleep(2 * starting.FIRST_S)
    assert away.asked._value == looks


async def test_a_server_that_is_asked_for_later_does_not_stand_in_the_way_before(health: Health) -> None:
    gateway = Far("gateway", later=True)
    servers = Servers([gateway.server], health)
    await servers.there()
    assert "gateway" not in health.waiting
    gateway.trouble = None
    await servers.there(later=True)


async def test_an_outage_is_said_hangs_nobody_and_is_over_when_it_is_over() -> None:
    health, kafka, registry = Health("assembler", work_s=0.5), Far(), Far("registry", lasting=False)
    kafka.trouble = registry.trouble = None
    servers = Servers([kafka.server, registry.server], health, watch_s=0.05, longest_s=0.1)
    await servers.there()
    health.mark_started()
    health.beat()  # and never again
    async with watch_servers(servers):
        await kafka.looked_at(2)
        assert health.waiting == {}
        kafka.trouble = registry.trouble = LogUnreachable("nobody listens")
        await kafka.looked_at(8)
        assert set(health.waiting) == {"Kafka"}
        rounds = health.living()[1]["loops"]["work"]["rounds"]  # type: ignore[index]
        await asyncio.sleep(1.0)
        await kafka.looked_at(2)
        alive, said = health.living()
        assert alive, "the loop stands still for want of Kafka"
        assert said["loops"]["work"]["rounds"] > rounds  # type: ignore[index] - a supervisor compares rounds
        kafka.trouble = None
        await until(lambda: not health.waiting)
        await until(lambda: not health.living()[0])  # the loop still stands still, and Kafka is there


async def test_asked_to_stop_before_it_works_a_role_is_cancelled_and_afterwards_it_drains(health: Health) -> None:
    stopping, drained = asyncio.Event(), asyncio.Event()

    async def waits() -> str:
        await asyncio.Event().wait()
        return "never"

    async def works() -> str:
        health.mark_started()
        await stopping.wait()
        drained.set()
        return "drained"

    asyncio.get_running_loop().call_later(0.05, stopping.set)
    assert await asyncio.wait_for(run_until_stopped(waits(), stopping, health), 20) is None
    stopping.clear()
    asyncio.get_running_loop().call_later(0.05, stopping.set)
    assert await asyncio.wait_for(run_until_stopped(works(), stopping, health), 20) == "drained"
    assert drained.is_set()
    assert health.waiting == {"stop": "asked to stop"}


async def test_what_ends_a_role_comes_out_and_a_role_that_is_cancelled_by_itself_has_failed(health: Health) -> None:
    async def fails() -> None:
        raise ZeroDivisionError

    async def cancels() -> None:
        raise asyncio.CancelledError

    with pytest.raises(ZeroDivisionError):
        await run_until_stopped(fails(), asyncio.Event(), health)
    with pytest.raises(asyncio.CancelledError):
        await run_until_stopped(cancels(), asyncio.Event(), health)
