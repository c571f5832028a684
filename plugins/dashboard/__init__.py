"""The dashboard: a run in the browser, from the index and the records that it names.

It is a consumer like any other: the training loop does not depend on it.

DashboardFailure
├── Unknown          the index has no such session, group, batch, record or image
├── Refused          a rejected request: foreign Host or Origin, no login, or a form of another login
└── NotRunning       no dashboard of the run has stored its address: there is nothing to log in to
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
    """Remedy: use an id that the pages link to. The index may be behind the log."""


def require_found(found: T | None, what: str) -> T:
    """Return a result of the index. Raises Unknown if it is None."""
    if found is None:
        raise Unknown(f"the index has no {what}")
    return found


class Refused(DashboardFailure):
    """Remedy: see the message."""

    def __init__(self, status: int, message: str) -> None:
        """`status` is the HTTP status of the answer."""
        super().__init__(message)
        self.status = status


class NotRunning(DashboardFailure):
    """Remedy: start `turnlog dashboard`."""


class CachedQuery(Generic[T]):
    """Cache of a slow query: one result serves all pages that ask within some seconds."""

    def __init__(self, look: Callable[[], Awaitable[T]], clock: Callable[[], float] = time.monotonic) -> None:
        self._look, self._clock = look, clock
        self._one = asyncio.Lock()
        self._last: tuple[float, T] | None = None

    async def within(self, seconds: float) -> T:
        """Return the last result if it is younger than `seconds`, else a new one. Raises what the query raises; errors
        are not cached."""
        async with self._one:
            now = self._clock()
            if self._last is None or now - self._last[0] >= seconds:
                self._last = now, await self._look()
            return self._last[1]
