"""An event loop whose time jumps to the next timer as soon as nothing else is to be done: hours of waiting take no
time, and what comes of them does not depend on the machine."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from typing import Any

IDLE_S = 0.05
"""For which a loop without timers waits for its sockets at a time."""


class _Jumping(selectors.DefaultSelector):
    """Never waits for what a timer would end: the clock jumps there."""

    jump: Callable[[float], None]

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """See BaseSelector."""
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            return super().select(IDLE_S)
        self.jump(timeout)
        return []


class JumpingLoop(asyncio.SelectorEventLoop):
    """See the module. What is handed to threads runs at once: no time passes for it."""

    def __init__(self) -> None:
        selector = _Jumping()
        super().__init__(selector)
        self._now = 0.0
        selector.jump = self._jump

    def _jump(self, seconds: float) -> None:
        self._now += seconds

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """See AbstractEventLoop."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future
