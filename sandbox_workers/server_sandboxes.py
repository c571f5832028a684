"""Sandboxes of servers that tools start: each is one call without end, outside of every pool.

They end with their worker, also if it is killed, as every sandbox does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from turnlog.sandbox_workers.protocol import Provider, Sandbox, Shape


class ServerSandboxes:
    """Starts sandboxes for servers, on this machine's backend."""

    def __init__(self, provider: Provider, *, slots: int) -> None:
        """Create it. `slots` is the number of slots of the backend's pool, whose host users are in use already."""
        self.backend = provider.name
        self.most = slots
        """Maximum number of servers of one kind; as many as the calls that run at once."""
        self._provider, self._first, self._used = provider, slots, set[int]()

    @asynccontextmanager
    async def start(self, shape: Shape) -> AsyncIterator[Sandbox]:
        """Start a sandbox, and close it at the end. Raises SandboxUnavailable, ImageMissing."""
        number = next(each for each in range(self._first, self._first + len(self._used) + 1) if each not in self._used)
        self._used.add(number)
        try:
            sandbox = await self._provider.start(number, shape)
            try:
                yield sandbox
            finally:
                await sandbox.close()
        finally:
            self._used.discard(number)
