"""The pool: what is reused, what is replaced, who waits and in which order; over workspaces in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from tests.fakes.memory_backend import Memory, MemorySandbox
from turnlog.sandbox_workers.pooling.pool import Lease, Pool
from turnlog.sandbox_workers.pooling.upkeep import FIRST_S
from turnlog.sandbox_workers.protocol import ImageMissing, Sandbox, SandboxUnavailable, Shape
from turnlog.schemas.types import BlobRef

SHAPE = Shape(disk_bytes=1000)
OTHER = Shape(disk_bytes=2000)
FILES = BlobRef(sha256="1" * 64, size=1)


class HeldClock:
    """Time passes when the test says so."""

    def __init__(self) -> None:
        self._now = 0.0
        self._sleeping: list[tuple[float, asyncio.Future[None]]] = []

    def now(self) -> float:
        """See Clock."""
        return self._now

    async def sleep(self, seconds: float) -> None:
        """See Clock."""
        until: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleeping.append((self._now + seconds, until))
        await until

    async def advance(self, seconds: float) -> None:
        """Let so much time pass, once those that are about to sleep do so."""
        for _ in range(3):
            await asyncio.sleep(0)
        self._now += seconds
        for at, until in self._sleeping:
            if at <= self._now and not until.done():
                until.set_result(None)


@pytest.fixture
def provider() -> Memory:
    """Counts what it starts and what lives."""
    return Memory()


@pytest.fixture
def clock() -> HeldClock:
    """The pool's."""
    return HeldClock()


@pytest.fixture
async def pool(provider: Memory, clock: HeldClock) -> AsyncIterator[Pool]:
    """Two slots, one of them to be kept ready."""
    pool = Pool(provider, slots=2, prewarm=1, max_uses=50, clock=clock)
    await pool.prefill(SHAPE)
    yield pool
    await pool.close()
    assert provider.alive == set()


async def files(sandbox: Sandbox) -> list[str]:
    """What is in the workspace."""
    return [entry.path for entry in await sandbox.index()]


async def until(condition: Callable[[], object]) -> None:
    """The pool's tasks go on until it holds."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - a snapshot is all that a pool shows
            await asyncio.sleep(0)


async def settled(pool: Pool) -> None:
    """No slot is starting, resetting or checking any more."""
    await until(lambda: not sum(slots(pool)[state] for state in ("starting", "resetting", "checking")))


def slots(pool: Pool) -> dict[str, int]:
    """By state."""
    found = pool.snapshot()["slots"]
    assert isinstance(found, dict)
    return found


def count(pool: Pool, name: str) -> object:
    """Of a snapshot."""
    return pool.snapshot()[name]


def inside(lease: Lease) -> MemorySandbox:
    """The sandbox, with the switches that a test may turn."""
    assert isinstance(lease.sandbox, MemorySandbox)
    return lease.sandbox


async def waiting(pool: Pool, callers: int) -> None:
    """So many wait."""
    await until(lambda: count(pool, "waiting") == callers)


async def test_the_next_lease_gets_the_warm_sandbox_empty(pool: Pool, provider: Memory) -> None:
    for _ in range(3):
        async with pool.lease(SHAPE) as lease:
            assert (await files(lease.sandbox), lease.held) == ([], False)
            await lease.sandbox.write("left", b"")
        await settled(pool)
    assert provider.started == [(0, SHAPE)]
    assert (count(pool, "hits"), count(pool, "misses")) == (3, 0)


async def test_leaving_waits_for_no_reset(pool: Pool) -> None:
    async with pool.lease(SHAPE):
        pass
    assert slots(pool)["resetting"] == 1
    await settled(pool)
    assert slots(pool)["ready"] == 1


async def test_a_fresh_lease_gets_a_sandbox_that_never_ran(pool: Pool, provider: Memory) -> None:
    async with pool.lease(SHAPE, fresh=True) as first:
        pass
    await settled(pool)
    async with pool.lease(SHAPE, fresh=True) as second:
        assert second.sandbox is not first.sandbox
    assert len(provider.started) == 2


async def test_another_shape_takes_an_empty_slot_before_it_replaces_a_ready_one(pool: Pool, provider: Memory) -> None:
    async with pool.lease(OTHER):
        assert provider.started == [(0, SHAPE), (1, OTHER)]
        assert slots(pool)["ready"] == 1
    await settled(pool)
    async with pool.lease(OTHER), pool.lease(OTHER):
        assert provider.started[2:] == [(0, OTHER)]
    assert count(pool, "renewals") == {"shape": 1}


async def test_a_session_finds_its_files_again_and_nobody_else_does(pool: Pool) -> None:
    async with pool.lease(SHAPE, session="s") as lease:
        await lease.sandbox.write("mine", b"1")
        lease.keep(FILES)
    async with pool.lease(SHAPE, session="other") as lease:
        assert (await files(lease.sandbox), lease.held, lease.workspace) == ([], False, None)
    async with pool.lease(SHAPE, session="s") as lease:
        assert (await files(lease.sandbox), lease.held, lease.workspace) == (["mine"], True, FILES)


async def test_what_a_session_does_not_keep_is_reset(pool: Pool) -> None:
    async with pool.lease(SHAPE, session="s") as lease:
        lease.keep(FILES)
    async with pool.lease(SHAPE, session="s") as lease:
        assert lease.held
    async with pool.lease(SHAPE, session="s") as lease:
        assert (lease.held, lease.workspace) == (False, None)


async def test_the_longest_idle_session_makes_room_and_hears_that_it_holds_nothing(
    pool: Pool, provider: Memory
) -> None:
    for session in ("a", "b", "c"):
        async with pool.lease(SHAPE, session=session) as lease:
            assert await files(lease.sandbox) == []
            await lease.sandbox.write(session, b"")
            lease.keep(None)
    async with pool.lease(SHAPE, session="b") as b, pool.lease(SHAPE, session="c") as c:
        assert (b.held, c.held) == (True, True)
        b.keep(None)
        c.keep(None)
    async with pool.lease(SHAPE, session="a") as a:
        assert (a.held, await files(a.sandbox)) == (False, [])
    assert len(provider.started) == 2  # a reset makes room: nothing had to be started for it


async def test_a_session_whose_interpreter_lives_makes_room_last(pool: Pool) -> None:
    for session in ("cells", "files"):
        async with pool.lease(SHAPE, session=session) as lease:
            inside(lease).interpreter = session == "cells"
            lease.keep(None)
    async with pool.lease(SHAPE):
        pass
    async with pool.lease(SHAPE, session="cells") as cells, pool.lease(SHAPE, session="files") as files:
        assert (cells.held, files.held) == (True, False)


async def test_a_released_session_frees_its_slot(pool: Pool) -> None:
    async with pool.lease(SHAPE, session="s") as lease:
        lease.keep(None)
    pool.release("s")
    await settled(pool)
    assert (slots(pool)["held"], slots(pool)["ready"]) == (0, 1)
    pool.release("s")


async def test_a_session_that_changes_its_shape_starts_without_its_files(pool: Pool) -> None:
    async with pool.lease(SHAPE, session="s") as lease:
        lease.keep(FILES)
    async with pool.lease(OTHER, session="s") as lease:
        assert (lease.held, await files(lease.sandbox)) == (False, [])
        lease.keep(FILES)
    await settled(pool)
    assert slots(pool)["held"] == 1


async def test_two_calls_of_one_session_at_once_are_a_mistake(pool: Pool) -> None:
    async with pool.lease(SHAPE, session="s"):
        with pytest.raises(RuntimeError, match="one after the other"):
            async with pool.lease(SHAPE, session="s"):
                pass


async def test_a_lease_that_ends_in_an_error_is_not_reused(pool: Pool) -> None:
    async def fails() -> Lease:
        async with pool.lease(SHAPE, session="s") as lease:
            lease.keep(FILES)
            leases.append(lease)
            raise ZeroDivisionError

    leases: list[Lease] = []
    with pytest.raises(ZeroDivisionError):
        await fails()
    async with pool.lease(SHAPE, session="s") as again:
        assert not again.held
        assert again.sandbox is not leases[0].sandbox
    assert count(pool, "renewals") == {"error": 1}


async def test_a_reset_that_proves_nothing_is_a_leak_and_the_sandbox_is_replaced(pool: Pool) -> None:
    async with pool.lease(SHAPE) as lease:
        inside(lease).sticky = True
    async with pool.lease(SHAPE) as again:
        assert again.sandbox is not lease.sandbox
    assert (count(pool, "renewals"), count(pool, "leaks")) == ({"unclean": 1}, 1)


async def test_a_sandbox_that_died_in_a_lease_is_replaced_and_no_leak(pool: Pool) -> None:
    async with pool.lease(SHAPE) as lease:
        inside(lease).die()
    await settled(pool)
    assert (count(pool, "renewals"), count(pool, "leaks"), slots(pool)["ready"]) == ({"died": 1}, 0, 1)


async def test_a_sandbox_that_died_idle_is_replaced_before_a_call_meets_it(pool: Pool) -> None:
    async with pool.lease(SHAPE) as lease:
        pass
    async with pool.lease(SHAPE, session="s") as kept:
        kept.keep(FILES)
    await settled(pool)
    for each in (lease, kept):
        inside(each).die()
    await pool.check()
    assert slots(pool)["ready"] == 2 or slots(pool)["empty"] == 1
    async with pool.lease(SHAPE, session="s") as again:
        assert (again.held, await files(again.sandbox)) == (False, [])


async def test_a_session_that_comes_while_its_sandbox_is_checked_gets_it(pool: Pool) -> None:
    async with pool.lease(SHAPE, session="s") as lease:
        lease.keep(FILES)
    checking = asyncio.create_task(pool.check())
    await until(lambda: slots(pool)["checking"])
    async with pool.lease(SHAPE, session="s") as again:
        assert (again.held, again.workspace) == (True, FILES)
        again.keep(FILES)
    await checking
    assert slots(pool)["held"] == 1


async def test_a_sandbox_is_replaced_after_max_uses(provider: Memory, clock: HeldClock) -> None:
    pool = Pool(provider, slots=1, max_uses=3, clock=clock)
    seen = []
    for _ in range(6):
        async with pool.lease(SHAPE) as lease:
            seen.append(lease.sandbox)
    assert len({id(sandbox) for sandbox in seen}) == 2
    await pool.close()


@pytest.mark.parametrize("odd", [SHAPE, OTHER])
async def test_callers_are_served_first_come_first_served(pool: Pool, odd: Shape) -> None:
    order: list[int] = []

    async def one(number: int) -> None:
        async with pool.lease(odd if number == 4 else SHAPE):
            order.append(number)

    async with pool.lease(SHAPE), pool.lease(SHAPE):
        callers = [asyncio.create_task(one(number)) for number in range(20)]
        await waiting(pool, 20)
    await asyncio.gather(*callers)
    others = [number for number in range(20) if number != 4]
    assert [number for number in order if number != 4] == others
    assert order.index(4) <= 4 + 6 * (odd is OTHER)  # a start takes longer than a reset; no one comes in its way


async def test_waiting_is_measured(pool: Pool, clock: HeldClock) -> None:
    async def one() -> None:
        async with pool.lease(SHAPE):
            pass

    async with pool.lease(SHAPE), pool.lease(SHAPE):
        caller = asyncio.create_task(one())
        await waiting(pool, 1)
        await clock.advance(2.0)
    await caller
    waits = count(pool, "wait_ms")
    assert isinstance(waits, dict)
    assert waits["p99"] == 2000.0


async def test_idle_slots_take_the_shape_that_waits_most_but_never_a_held_one(pool: Pool) -> None:
    async with pool.lease(SHAPE, session="s") as lease:
        lease.keep(FILES)
    await settled(pool)
    pool.expect({OTHER: 5, SHAPE: 1})
    await settled(pool)
    assert (slots(pool)["held"], slots(pool)["ready"]) == (1, 1)
    async with pool.lease(OTHER):
        assert (count(pool, "hits"), count(pool, "misses")) == (2, 0)
    async with pool.lease(SHAPE, session="s") as lease:
        assert lease.held


async def test_no_more_is_prepared_than_prewarm_allows(provider: Memory, clock: HeldClock) -> None:
    pool = Pool(provider, slots=8, prewarm=2, clock=clock)
    pool.expect({SHAPE: 100})
    await settled(pool)
    assert slots(pool)["ready"] == 2
    await pool.close()


async def test_a_failed_start_is_told_with_its_count_and_tried_again_later(provider: Memory, clock: HeldClock) -> None:
    pool = Pool(provider, slots=2, clock=clock)
    provider.refuses = SandboxUnavailable("no more user namespaces")
    with pytest.raises(SandboxUnavailable, match=r"no more user namespaces \(failure 1 in a row"):
        async with pool.lease(SHAPE):
            pass

    async def one() -> bool:
        async with pool.lease(SHAPE):
            return True

    caller = asyncio.create_task(one())
    await waiting(pool, 1)
    await clock.advance(FIRST_S)
    with pytest.raises(SandboxUnavailable, match="failure 2 in a row"):
        await caller
    provider.refuses = None
    caller = asyncio.create_task(one())
    await waiting(pool, 1)
    await clock.advance(FIRST_S)
    assert count(pool, "waiting") == 1  # the second pause is longer
    await clock.advance(FIRST_S)
    assert await caller
    assert (count(pool, "failures"), count(pool, "errors")) == (2, [])
    await pool.close()


async def test_one_shape_that_fails_holds_nobody_else_up(pool: Pool, provider: Memory) -> None:
    provider.refuses = SandboxUnavailable("no")
    with pytest.raises(SandboxUnavailable):
        async with pool.lease(OTHER):
            pass
    provider.refuses = None
    async with pool.lease(SHAPE), pool.lease(SHAPE):
        pass


async def test_a_missing_image_is_told_to_all_that_ask_for_it(pool: Pool, provider: Memory) -> None:
    provider.refuses = ImageMissing("there is no image 'x'")

    async def one() -> None:
        async with pool.lease(Shape(image="x", disk_bytes=1)):
            pass

    answers = await asyncio.gather(*(one() for _ in range(5)), return_exceptions=True)
    assert [type(answer) for answer in answers] == [ImageMissing] * 5
    assert count(pool, "failures") == 0


async def test_prefill_raises_what_keeps_sandboxes_from_starting(provider: Memory) -> None:
    pool = Pool(provider, slots=2, prewarm=2)
    provider.refuses = SandboxUnavailable("no")
    with pytest.raises(SandboxUnavailable):
        await pool.prefill(SHAPE)
    await pool.close()


async def test_a_lost_start_is_made_up_for_when_nobody_asks(pool: Pool, provider: Memory, clock: HeldClock) -> None:
    provider.refuses = SandboxUnavailable("no")
    async with pool.lease(SHAPE) as lease:
        inside(lease).die()
    await until(lambda: slots(pool)["failed"])
    provider.refuses = None
    await clock.advance(FIRST_S)
    await until(lambda: slots(pool)["ready"])


async def test_a_backend_that_breaks_its_contract_is_told_to_every_caller(provider: Memory) -> None:
    class Broken(Memory):
        async def start(self, slot: int, shape: Shape) -> MemorySandbox:
            raise ZeroDivisionError

    pool = Pool(Broken(), slots=1)

    async def one() -> None:
        async with pool.lease(SHAPE):
            pass

    answers = await asyncio.gather(*(one() for _ in range(3)), return_exceptions=True)
    assert [type(answer) for answer in answers] == [ZeroDivisionError] * 3
    with pytest.raises(ZeroDivisionError):
        await one()
    await pool.close()


async def test_no_slots_is_refused(provider: Memory) -> None:
    with pytest.raises(ValueError, match="slots"):
        Pool(provider, slots=0)


async def test_a_lease_without_a_session_cannot_be_kept(pool: Pool) -> None:
    with pytest.raises(ValueError, match="session"):
        async with pool.lease(SHAPE) as lease:
            lease.keep(FILES)
