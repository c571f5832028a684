"""The dashboard: a run in the browser, from the index and the records that it names. One more consumer: the loop does
not know of it.

DashboardFailure
├── Unknown          the index has no such session, group, batch, record or image
├── Refused          a request that is not served: a foreign Host or Origin, no login, a form of another login
└── NotRunning       no dashboard of the run says where it is: there is nothing to log in to
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class DashboardFailure(Exception):
    """Base of the tree above."""


class Unknown(DashboardFailure):
    """Remedy: an id that the pages link to; the index may be behind the log."""


def known(found: T | None, what: str) -> T:
    """What the index gave. Raises Unknown where that is nothing."""
    if found is None:
        raise Unknown(f"the index has no {what}")
    return found


class Refused(DashboardFailure):
    """Remedy: what the message says."""

    def __init__(self, status: int, message: str) -> None:
        """`status`: of the answer."""
        super().__init__(message)
        self.status = status


class NotRunning(DashboardFailure):
    """Remedy: `turnlog dashboard`."""


class Looks(Generic[T]):
    """At something that takes a while: one serves all pages that ask within a time."""

    def __init__(self, look: Callable[[], Awaitable[T]], clock: Callable[[], float] = time.monotonic) -> None:
        self._look, self._clock = look, clock
        self._one = asyncio.Lock()
        self._last: tuple[float, T] | None = None

    async def within(self, seconds: float) -> T:
        """What was seen last, if that is younger, else what is seen now. Raises as the look, which is then not kept."""
        async with self._one:
            now = self._clock()
            if self._last is None or now - self._last[0] >= seconds:
                self._last = now, await self._look()
            return self._last[1]
