"""Pauses between starts that fail: of each shape its own, doubling up to a limit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from turnlog.sandbox_workers.protocol import Shape

FIRST_S = 0.25
LONGEST_S = 30.0


class Clock(Protocol):
    """Time that a test may hold in its hands."""

    def now(self) -> float:
        """Seconds since whenever."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Until so much later."""
        ...


class LoopClock:
    """The event loop's."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


@dataclass(slots=True)
class _Pause:
    failures: int
    timer: asyncio.Task[None]


class Backoff:
    """Which shapes wait before they are started again. `due` is called when a pause is over."""

    def __init__(self, clock: Clock, due: Callable[[], None]) -> None:
        self._clock = clock
        self._due = due
        self._pauses: dict[Shape, _Pause] = {}

    def failed(self, shape: Shape) -> tuple[int, float]:
        """A start failed: how many in a row by now, and the pause in seconds that begins."""
        before = self._pauses.get(shape)
        failures = 1 if before is None else before.failures + 1
        if before is not None:
            before.timer.cancel()
        pause_s = min(LONGEST_S, FIRST_S * 2.0 ** min(failures - 1, 20))
        self._pauses[shape] = _Pause(failures, asyncio.create_task(self._sleep(pause_s)))
        return failures, pause_s

    def succeeded(self, shape: Shape) -> None:
        """Forget its failures."""
        if (pause := self._pauses.pop(shape, None)) is not None:
            pause.timer.cancel()

    def over(self, shape: Shape) -> bool:
        """No pause runs."""
        pause = self._pauses.get(shape)
        return pause is None or pause.timer.done()

    async def close(self) -> None:
        """End the timers."""
        timers = [pause.timer for pause in self._pauses.values()]
        self._pauses.clear()
        for timer in timers:
            timer.cancel()
        await asyncio.gather(*timers, return_exceptions=True)

    async def _sleep(self, pause_s: float) -> None:
        await self._clock.sleep(pause_s)
        asyncio.get_running_loop().call_soon(self._due)  # when this task is done, so that `over` says so
