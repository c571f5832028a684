"""Connections to servers outside of sandboxes that a worker keeps from call to call, for each session its own.

A connection is state that no record holds: it is lost with its worker, when the session's partition moves, or after
IDLE_S without a call. A tool decides what a call that finds none may do (`turnlog.sandbox_workers.tools`)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol, TypeVar

log = logging.getLogger(__name__)
IDLE_S = 3600.0
"""Seconds after its last call at which the connections of a session are closed, if no record says that it has ended:
agents other than the built-in loop write none, and the runner that would have may be gone."""
MOST = 4096
"""Maximum number of sessions with connections; beyond it those of the session that was idle longest are closed."""


class SessionConnection(Protocol):
    """A connection of one session."""

    async def close(self) -> None:
        """End it. Never raises."""
        ...


C = TypeVar("C", bound=SessionConnection)


class SessionConnections:
    """The connections of one session, by name. One call uses them at a time."""

    def __init__(self, keep: Callable[[SessionConnections], None] = lambda _: None) -> None:
        """Create them. `keep` is called when there is one to keep."""
        self._known: dict[str, SessionConnection] = {}
        self._keep = keep

    def find(self, name: str) -> Any:
        """Return the connection of that name, or None."""
        return self._known.get(name)

    async def open(self, name: str, make: Callable[[], Awaitable[C]]) -> C:
        """Return the connection of that name; `make` it if there is none. Raises what `make` raises."""
        found = self._known.get(name)
        if found is None:
            found = self._known[name] = await make()
            self._keep(self)
        return found  # type: ignore[return-value]  # a name has one kind of connection

    async def drop(self, name: str) -> None:
        """Close and forget a connection, if there is one."""
        if (found := self._known.pop(name, None)) is not None:
            await found.close()

    async def close(self) -> None:
        """Close all of them."""
        for name in tuple(self._known):
            await self.drop(name)

    def __len__(self) -> int:
        return len(self._known)


class WorkerConnections:
    """The connections of all sessions of one worker, by the worker's name for the session (PARTITION/SESSION)."""

    def __init__(
        self, *, idle_s: float = IDLE_S, most: int = MOST, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._idle_s, self._most, self._clock = idle_s, most, clock
        self._sessions: OrderedDict[str, tuple[SessionConnections, float]] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    def of(self, session: str) -> SessionConnections:
        """Return the session's connections, for a call that begins now."""
        found = self._sessions.get(session)
        if found is None:  # kept with its first connection: most calls open none, and must push out nobody else's
            return SessionConnections(partial(self._keep, session))
        self._keep(session, found[0])
        return found[0]

    def sweep(self) -> None:
        """Close the connections of sessions that were idle for too long, or that are too many."""
        limit = self._clock() - self._idle_s
        while self._sessions:
            session, (connections, used) = next(iter(self._sessions.items()))
            if used > limit and len(self._sessions) <= self._most:
                return
            del self._sessions[session]
            if len(connections):
                log.info("session %s: closing its connections, unused for %.0f s", session, self._clock() - used)
                self._close_soon(connections)

    def forget(self, session: str) -> None:
        """Close the connections of a session that is over."""
        if (found := self._sessions.pop(session, None)) is not None:
            self._close_soon(found[0])

    def release(self, partition: int) -> None:
        """Close the connections of all sessions of a partition, which another worker has now."""
        for session in [name for name in self._sessions if name.startswith(f"{partition}/")]:
            self._close_soon(self._sessions.pop(session)[0])

    async def close(self) -> None:
        """Close every connection."""
        while self._sessions:
            self._close_soon(self._sessions.popitem()[1][0])
        if self._closing:
            await asyncio.wait(self._closing)

    def _keep(self, session: str, connections: SessionConnections) -> None:
        self._sessions[session] = connections, self._clock()
        self._sessions.move_to_end(session)

    def _close_soon(self, connections: SessionConnections) -> None:
        task = asyncio.create_task(connections.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
