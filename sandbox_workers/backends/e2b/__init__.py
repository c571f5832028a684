"""The backend for E2B's machines: each sandbox is a microVM of that service, with the init of the local backends in it.

The init is sent over a command's input and answers over its output, so a call costs no request for a start, and
limits, files and sessions are as everywhere. A machine costs money while it lives: a request for one is never left
half-way, it lives for START_TTL_S until it is known to work, and for TTL_S after its worker was last heard of.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers.backends.e2b.sandbox import (
    KEY,
    REQUEST_S,
    E2bSandbox,
    E2bStream,
    asked,
    ended,
    fingerprint,
    installed,
    key,
    said,
    template_missing,
)
from turnlog.sandbox_workers.backends.leftovers import owned_prefix
from turnlog.sandbox_workers.inside.loader import UNFIT
from turnlog.sandbox_workers.protocol import BackendUnavailable, ImageMissing, SandboxDied, SandboxUnavailable, Shape

if TYPE_CHECKING:
    from e2b import AsyncSandbox

log = logging.getLogger(__name__)

START_S = 60.0
START_TTL_S = 90
TTL_S = 300
NO_PYTHON = "python3: not found", "python3: command not found", "exec: python3"


class E2b:
    """One account at E2B, or a server of one's own."""

    name = "e2b"
    costly = True
    sessions = True
    networks: ClassVar[frozenset[str]] = frozenset({"none"})
    """By allow_internet_access=False of the request for a machine; there is no way to the worker's egress proxy."""

    def __init__(self, settings: SandboxSettings, connection: Mapping[str, str] | None = None) -> None:
        """`connection`: arguments for the SDK's calls that stand above its environment, for a server of one's own."""
        self._settings = settings
        self._connection: Any = dict(connection or {})
        self.ttl_s = TTL_S
        """Seconds that a machine lives after its worker was last heard of."""
        self._known: dict[str, Mapping[str, str]] = {}
        self._starting: set[asyncio.Task[AsyncSandbox]] = set()
        self._ending: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(cls, settings: SandboxSettings, *, ca: Path | None = None, cache: Path | None = None) -> Self:
        """See that the SDK is there and that the service takes the key. `ca` and `cache` have no use here.
        Raises BackendUnavailable."""
        installed()
        key()
        from e2b import AsyncSandbox

        try:
            await asked(AsyncSandbox.list(limit=1, request_timeout=REQUEST_S).next_items())
        except SandboxUnavailable as error:
            raise BackendUnavailable(f"{error}; is {KEY} right, and is the service reached?") from error
        return cls(settings)

    async def start(self, slot: int, shape: Shape) -> E2bSandbox:
        if shape.network not in self.networks:
            raise SandboxUnavailable(f"network {shape.network!r}: the e2b backend has machines without network alone")
        template = shape.image or self._settings.e2b_template
        machine = await self._created(template)
        stream = E2bStream()
        sandbox = E2bSandbox(machine, stream, self.ttl_s, shape.disk_bytes)
        try:
            async with asyncio.timeout(START_S):
                await stream.open(machine)
                await sandbox.begin()
        except (TimeoutError, SandboxDied, SandboxUnavailable) as error:
            words = " ".join((await sandbox.last_words()).split())
            await sandbox.close()
            if UNFIT in words or any(no in words for no in NO_PYTHON):
                raise ImageMissing(f"template {template!r} has no python3 that sandboxes can use: {words}") from error
            why = words or said(error)
            raise SandboxUnavailable(f"template {template!r}, not ready within {START_S:.0f} s: {why}") from error
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def environment(self, shape: Shape) -> Mapping[str, str]:
        """See Provider. Starts a machine to ask, once per template."""
        template = shape.image or self._settings.e2b_template
        if template not in self._known:
            machine = await self._created(template)
            try:
                about = await asked(machine.get_info(request_timeout=REQUEST_S))
            finally:
                await ended(machine)
            self._known[template] = {
                "template": about.template_id,
                "envd": about.envd_version,
                "cpus": str(about.cpu_count),
                "memory_mb": str(about.memory_mb),
                "init": fingerprint(),
                "sdk": version("e2b"),
            }
        return self._known[template]

    async def close(self) -> None:
        """See Provider: waits for machines whose start was given up."""
        while waiting := [*self._starting, *self._ending]:
            await asyncio.wait(waiting)
            await asyncio.sleep(0)  # for what their ends have started

    async def _created(self, template: str) -> AsyncSandbox:
        """A machine. Cancelled, it is ended as soon as it is there. Raises SandboxUnavailable, ImageMissing."""
        from e2b import AsyncSandbox

        request = AsyncSandbox.create(
            template=template,
            timeout=START_TTL_S,
            metadata={"turnlog": owned_prefix()},
            allow_internet_access=False,
            request_timeout=REQUEST_S,
            **self._connection,
        )
        starting = asyncio.create_task(asked(request))
        self._starting.add(starting)
        starting.add_done_callback(self._starting.discard)
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(self._given_up)
            raise
        except SandboxUnavailable as error:
            raise template_missing(error, template) or error from None

    def _given_up(self, starting: asyncio.Task[AsyncSandbox]) -> None:
        if starting.cancelled() or starting.exception() is not None:
            return
        ending = asyncio.create_task(ended(starting.result()))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
