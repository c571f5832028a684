"""The backend for E2B's machines: each sandbox is a microVM of that service, with the init of the local backends in it.

The init is sent over a command's input and answers over its output, so a call needs no request to start it, and limits,
files and sessions are the same as elsewhere. A machine costs money while it lives. Therefore a request for one is never
abandoned half-way; the machine lives for START_TTL_S until it is known to work, and then for TTL_S after the last
contact of its worker."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from turnlog.plugins.e2b.relay import CA
from turnlog.plugins.e2b.sandbox import E2bSandbox, end_machine
from turnlog.plugins.e2b.service import (
    REQUEST_S,
    await_answer,
    check_installed,
    describe_error,
    key,
    list_remedy,
    template_missing,
)
from turnlog.plugins.e2b.stream import E2bStream, fingerprint
from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers.backends.roots import owned_prefix
from turnlog.sandbox_workers.inside.loader import UNFIT
from turnlog.sandbox_workers.protocol import BackendUnavailable, ImageMissing, SandboxDied, SandboxUnavailable, Shape

if TYPE_CHECKING:
    from e2b import AsyncSandbox

START_S = 60.0
START_TTL_S = 90
TTL_S = 300
NO_PYTHON = "python3: not found", "python3: command not found", "exec: python3"


class E2b:
    """The backend of an account at E2B, or of a server of one's own."""

    name = "e2b"
    costly = True
    places = False
    sessions = True
    networks: ClassVar[frozenset[str]] = frozenset({"none", "allowlist"})
    """Networks served. Every machine is requested with allow_internet_access=False. With "allowlist", connections to
    the egress proxy are carried over the stream to the init (`relay`), so that the worker needs no address that the
    service can reach."""
    ca_inside = CA
    """Path at which programs find the certificates for the egress proxy."""

    def __init__(
        self, settings: SandboxSettings, connection: Mapping[str, str] | None = None, *, ca: Path | None = None
    ) -> None:
        """Create the backend. `connection` has arguments for the SDK's calls that take precedence over its environment,
        for a server of one's own; `ca` is a PEM file that programs with network "allowlist" trust."""
        self._settings = settings
        self._ca = ca
        self._connection: Any = dict(connection or {})
        self.ttl_s = TTL_S
        """Seconds that a machine lives after the last contact of its worker."""
        self._known: dict[str, Mapping[str, str]] = {}
        self._starting: set[asyncio.Task[AsyncSandbox]] = set()
        self._ending: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(cls, settings: SandboxSettings, *, ca: Path | None = None, cache: Path | None = None) -> Self:
        """Check that the SDK is installed and that the service accepts the key. `cache` is not used. Raises
        BackendUnavailable."""
        check_installed()
        key()
        from e2b import AsyncSandbox

        try:
            await await_answer(AsyncSandbox.list(limit=1, request_timeout=REQUEST_S).next_items())
        except SandboxUnavailable as error:
            raise BackendUnavailable(f"{error}; {list_remedy(error)}") from error
        return cls(settings, ca=ca)

    async def start(self, slot: int, shape: Shape) -> E2bSandbox:
        if shape.network not in self.networks:
            served = ", ".join(sorted(self.networks))
            raise SandboxUnavailable(f"network {shape.network!r}: the e2b backend serves {served}")
        template = shape.image or self._settings.e2b_template
        certificates = b""
        if shape.network == "allowlist" and self._ca is not None:
            certificates = await asyncio.to_thread(self._ca.read_bytes)
        machine = await self._create_machine(template)
        try:
            stream = E2bStream(shape.network, certificates)
        except OSError as error:
            await end_machine(machine)
            raise SandboxUnavailable(f"the worker has no room for a machine's connections: {error}") from error
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
            why = words or describe_error(error)
            raise SandboxUnavailable(f"template {template!r}, not ready within {START_S:.0f} s: {why}") from error
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def environment(self, shape: Shape) -> Mapping[str, str]:
        """See Provider. Starts a machine to ask, once per template."""
        template = shape.image or self._settings.e2b_template
        if template not in self._known:
            machine = await self._create_machine(template)
            try:
                about = await await_answer(machine.get_info(request_timeout=REQUEST_S))
            finally:
                await end_machine(machine)
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
        """See Provider. Waits for machines whose start was abandoned."""
        while waiting := [*self._starting, *self._ending]:
            await asyncio.wait(waiting)
            await asyncio.sleep(0)  # let the callbacks of finished tasks start their work

    async def _create_machine(self, template: str) -> AsyncSandbox:
        """Create a machine. If this is cancelled, the machine is ended as soon as it exists. Raises SandboxUnavailable,
        ImageMissing."""
        from e2b import AsyncSandbox

        request = AsyncSandbox.create(
            template=template,
            timeout=START_TTL_S,
            metadata={"turnlog": owned_prefix()},
            allow_internet_access=False,
            request_timeout=REQUEST_S,
            **self._connection,
        )
        starting = asyncio.create_task(await_answer(request))
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
        ending = asyncio.create_task(end_machine(starting.result()))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
