"""Whatever is cancelled, and whenever: nothing is left over, nobody waits for ever, no two callers meet."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.memory_backend import Memory, MemorySandbox
from turnlog.sandbox_workers.pooling.pool import Pool
from turnlog.sandbox_workers.pooling.upkeep import LoopClock
from turnlog.sandbox_workers.protocol import Command, Kind, SandboxUnavailable, Shape
from turnlog.schemas.events import SandboxLimits

SHAPES = (Shape(disk_bytes=1000), Shape(disk_bytes=2000))
LIMITS = SandboxLimits(wall_s=5.0)
TICKS = 40
"""More steps of the event loop than any of the scenarios below takes."""
Scenario = Callable[[Pool], Coroutine[Any, Any, None]]


async def prefills(pool: Pool) -> None:
    """Start what is kept ready."""
    await pool.prefill(SHAPES[0])


async def calls(pool: Pool) -> None:
    """Lease, run, keep; lease again, and give back."""
    for keeps in (True, False):
        async with pool.lease(SHAPES[0], session="s", fresh=keeps) as lease:
            await lease.sandbox.exec(Command(kind=Kind.shell, source="true"), LIMITS)
            if keeps:
                lease.keep(None)


async def waits(pool: Pool) -> None:
    """Stand in a queue that moves."""

    async def one(shape: Shape) -> None:
        async with pool.lease(shape):
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as callers:
        for number in range(4):
            callers.create_task(one(SHAPES[number % 2]))


async def checks(pool: Pool) -> None:
    """Look at idle sandboxes, one of them dead."""
    async with pool.lease(SHAPES[0], session="s") as lease:
        lease.keep(None)
    async with pool.lease(SHAPES[0]) as dead:
        pass
    assert isinstance(dead.sandbox, MemorySandbox)
    dead.sandbox.die()
    await pool.check()


async def closes(pool: Pool) -> None:
    """End a pool at work."""
    pool.expect({SHAPES[0]: 2})
    async with pool.lease(SHAPES[1]):
        await pool.close()


@pytest.mark.parametrize("scenario", [prefills, calls, waits, checks, closes])
async def test_a_cancel_at_any_step_leaks_nothing_and_blocks_nobody(scenario: Scenario) -> None:
    finished = False
    for ticks in range(TICKS):
        provider = Memory()
        pool = Pool(provider, slots=2, prewarm=2)
        task = asyncio.create_task(scenario(pool))
        for _ in range(ticks):
            await asyncio.sleep(0)
        finished = task.done()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        if scenario is not closes:
            async with asyncio.timeout(5), pool.lease(SHAPES[0]) as one, pool.lease(SHAPES[1]) as two:
                assert (await one.sandbox.index(), await two.sandbox.index()) == ((), ())
        await pool.close()
        assert provider.alive == set(), ticks
    assert finished, "TICKS is too small to reach the scenario's end"


@pytest.mark.parametrize("scenario", [prefills, calls, waits, checks])
async def test_a_pool_that_is_closed_at_any_step_ends_everything(scenario: Scenario) -> None:
    for ticks in range(TICKS):
        provider = Memory()
        pool = Pool(provider, slots=2, prewarm=2)
        task = asyncio.create_task(scenario(pool))
        for _ in range(ticks):
            await asyncio.sleep(0)
        await pool.close()
        assert provider.alive == set(), ticks
        async with asyncio.timeout(5):
            await asyncio.wait([task])
        assert provider.alive == set(), ticks
        if (error := task.exception()) is not None:
            causes = error.exceptions if isinstance(error, BaseExceptionGroup) else (error,)
            assert {type(cause).__name__ for cause in causes} <= {"SandboxUnavailable", "SandboxDied"}, causes
        with pytest.raises(SandboxUnavailable, match="closed"):
            async with pool.lease(SHAPES[0]):
                pass


class HastyClock(LoopClock):
    """Pauses are over as soon as everybody else has had a turn."""

    async def sleep(self, seconds: float) -> None:
        """See Clock."""
        await asyncio.sleep(0)


class Caller:
    """One of a crowd: leases, looks whether the sandbox is what it was promised, and stays until told."""

    inside: ClassVar[set[int]] = set()

    def __init__(self, pool: Pool, session: str | None, shape: Shape, *, fresh: bool, keeps: bool) -> None:
        self.session = session
        self.go_on = asyncio.Event()
        self.task = asyncio.create_task(self._run(pool, shape, fresh=fresh, keeps=keeps))

    async def _run(self, pool: Pool, shape: Shape, *, fresh: bool, keeps: bool) -> None:
        async with pool.lease(shape, session=self.session, fresh=fresh) as lease:
            me = id(lease.sandbox)
            assert me not in self.inside
            self.inside.add(me)
            try:
                if is_alive(lease.sandbox):
                    expected = [f"of-{self.session}"] if lease.held else []
                    assert [entry.path for entry in await lease.sandbox.index()] == expected
                    await lease.sandbox.write(f"of-{self.session}", b"")
                await self.go_on.wait()
                if keeps and self.session is not None:
                    lease.keep(None)
            finally:
                self.inside.discard(me)


def is_alive(sandbox: object) -> bool:
    """It was not killed while nobody looked."""
    assert isinstance(sandbox, MemorySandbox)
    return sandbox in sandbox.provider.alive


Step = tuple[str, int, int]
ACTS = ("lease", "lease", "lease", "end", "end", "cancel", "die", "check", "expect", "release", "refuse")
STEPS = st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, 7), st.integers(0, 7)), max_size=40)


class Crowd:
    """Callers around one pool, and a backend that lets them down."""

    def __init__(self) -> None:
        self.provider = Memory()
        self.pool = Pool(self.provider, slots=3, prewarm=2, max_uses=4, clock=HastyClock())
        self.callers: list[Caller] = []
        self.checks: list[asyncio.Task[None]] = []

    def act(self, what: str, number: int, other: int) -> None:
        """Do one thing."""
        caller = self.callers[number % len(self.callers)] if self.callers else None
        match what:
            case "lease":
                self._lease(f"s{number % 4}" if number < 6 else None, other)
            case "end" if caller:
                caller.go_on.set()
            case "cancel" if caller:
                caller.task.cancel()
            case "die" if self.provider.alive:
                alive = sorted(self.provider.alive, key=lambda each: each.number)
                alive[number % len(alive)].die()
            case "check":
                self.checks.append(asyncio.create_task(self.pool.check()))
            case "expect":
                self.pool.expect({SHAPES[0]: number, SHAPES[1]: other})
            case "release":
                self.pool.release(f"s{number % 4}")
            case "refuse":
                self.provider.refuses = SandboxUnavailable("no") if number == 0 else None

    async def ends(self) -> None:
        """Everybody ends well or is told why; a last caller is served; nothing is left."""
        self.provider.refuses = None
        for caller in self.callers:
            caller.go_on.set()
        tasks = [caller.task for caller in self.callers]
        async with asyncio.timeout(20):
            answers = await asyncio.gather(*tasks, *self.checks, return_exceptions=True)
        for answer in answers:
            assert answer is None or isinstance(answer, asyncio.CancelledError | SandboxUnavailable), answer
        while self._at_work():  # noqa: ASYNC110 - a snapshot is all that a pool shows
            await asyncio.sleep(0)
        await self.pool.check()  # the dead ones; a call that meets one would be told, and tried again
        async with asyncio.timeout(20), self.pool.lease(SHAPES[0]) as one, self.pool.lease(SHAPES[1]) as two:
            assert (await one.sandbox.index(), await two.sandbox.index()) == ((), ())
        await self.pool.close()
        assert self.provider.alive == set()

    def _at_work(self) -> int:
        slots = self.pool.snapshot()["slots"]
        assert isinstance(slots, dict)
        return sum(slots[state] for state in ("starting", "resetting", "checking"))

    def _lease(self, session: str | None, choice: int) -> None:
        if session is None or session not in {caller.session for caller in self.callers if not caller.task.done()}:
            shape = SHAPES[choice % 2]
            self.callers.append(Caller(self.pool, session, shape, fresh=choice > 5, keeps=bool(choice & 4)))


async def crowd(steps: list[Step]) -> None:
    """A whole story."""
    Caller.inside.clear()
    among = Crowd()
    for what, number, other in steps:
        among.act(what, number, other)
        for _ in range(other % 5):
            await asyncio.sleep(0)
    await among.ends()


@given(STEPS)
def test_a_crowd_of_callers_never_meets_and_always_gets_what_was_promised(steps: list[Step]) -> None:
    asyncio.run(crowd(steps))
