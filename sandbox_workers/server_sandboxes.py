"""Sandboxes of servers that tools start: each is one call without end, outside of every pool.

They end with their worker, also if it is killed, as every sandbox does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Protocol, runtime_checkable

from turnlog.sandbox_settings import LOCAL
from turnlog.sandbox_workers.protocol import ImageCommand, Provider, Sandbox, SandboxUnavailable, Shape


@runtime_checkable
class ImageBackend(Protocol):
    """A backend whose images name a command."""

    async def image_command(self, image: str) -> ImageCommand:
        """Return the command of an image. Raises ImageMissing, SandboxUnavailable."""
        ...


class ServerSandboxes:
    """Starts sandboxes for servers, on the backends of a worker."""

    def __init__(self, providers: Mapping[str, Provider], *, slots: int) -> None:
        """Create it. `providers` are the worker's backends by name, this machine's among them; `slots` is the number of
        slots of a backend's pool, whose host users are in use already."""
        self.most = slots
        """Maximum number of servers of one kind; as many as the calls that run at once."""
        self._providers, self._first, self._used = providers, slots, set[int]()

    def provider(self, backend: str = "") -> Provider:
        """Return the backend of that name; this machine's for an empty one. Raises SandboxUnavailable."""
        found = self._providers.get(backend or LOCAL[0])
        if found is None:
            raise SandboxUnavailable(
                f"this worker does not serve backend {backend!r}; it serves {', '.join(self._providers)}: add it to "
                "[sandbox] backends"
            )
        return found

    @asynccontextmanager
    async def start(self, shape: Shape, backend: str = "") -> AsyncIterator[Sandbox]:
        """Start a sandbox, and close it at the end. Raises SandboxUnavailable, ImageMissing."""
        provider = self.provider(backend)
        number = next(each for each in range(self._first, self._first + len(self._used) + 1) if each not in self._used)
        self._used.add(number)
        try:
            sandbox = await provider.start(number, shape)
            try:
                yield sandbox
            finally:
                await sandbox.close()
        finally:
            self._used.discard(number)
