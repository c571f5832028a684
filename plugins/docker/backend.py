"""The backend for images: each sandbox is a container of a Docker daemon, under the runtime that [sandbox] names.

The container's first process is python3 of the image, running the init of the local backends over the streams that the
Engine API attaches. So a call needs no request to the daemon, and limits, files and sessions are the same as
elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from turnlog.plugins.docker.sandbox import (
    PRYING,
    REMEDY,
    ContainerSandbox,
    ContainerStream,
    Daemon,
    call_daemon,
    connect,
    container_arguments,
    detach,
    fingerprint,
    is_init_protected,
    listening_in,
    program,
    reachable,
    sweep,
)
from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers.backends import seccomp
from turnlog.sandbox_workers.inside.attached import UNFIT as UNFIT_FOLDER
from turnlog.sandbox_workers.inside.loader import UNFIT
from turnlog.sandbox_workers.protocol import (
    BackendUnavailable,
    Command,
    ImageCommand,
    ImageMissing,
    SandboxDied,
    SandboxError,
    SandboxUnavailable,
    Shape,
)

log = logging.getLogger(__name__)


START_S = 30.0
RUNTIMES = {"runc": ("runc", "io.containerd.runc.v2"), "runsc": ("runsc",), "kata": ("kata", "kata-runtime")}
"""Names under which daemons know the runtimes."""
NOT_FOUND = 127
"""Exit code of a container whose command is not in its image (docker run, "Exit status")."""
STREAMS = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}


class Docker:
    """The backend of one Docker daemon, which makes a container for each sandbox."""

    name = "docker"
    costly = False
    places = True
    sessions = True
    networks = frozenset({"none"})

    def __init__(
        self, daemon: Daemon, settings: SandboxSettings, ca: Path | None, *, denied: bytes, probe: Command = PRYING
    ) -> None:
        """Create the backend. `denied` is a seccomp program, or empty; `probe` is a command that tries to reach into
        the init."""
        self._daemon = daemon
        self._client = daemon.client
        self._settings = settings
        self._ca = ca
        self._runtime = daemon.runtime or str(daemon.about["DefaultRuntime"])
        self._filter = denied
        self._probe = probe
        self._guarded: bool | None = None
        if reachable(str(daemon.client.base_url), self._runtime):
            self.networks = frozenset({"none", "allowlist"})

    @classmethod
    async def open(cls, settings: SandboxSettings, *, ca: Path | None = None, cache: Path | None = None) -> Self:
        """Find the daemon, check that it knows the runtime, and remove what dead workers left. Raises
        BackendUnavailable."""
        client = await asyncio.to_thread(connect)
        try:
            about = await call_daemon(client.info)
            daemon = Daemon(client, about, known_runtime(about, settings.docker_runtime))
            warn(about)
            await sweep(client)
        except SandboxUnavailable as error:
            client.close()
            raise BackendUnavailable(f"{error}; {REMEDY}") from error
        except BaseException:
            client.close()
            raise
        return cls(daemon, settings, ca, denied=filter_for(about))

    async def start(self, slot: int, shape: Shape) -> ContainerSandbox:
        if shape.network not in self.networks:
            raise SandboxUnavailable(f"docker serves network {shape.network!r} with runc on its own machine alone")
        shown = self._ca if shape.network == "allowlist" else None
        arguments = container_arguments(self._daemon, self._settings, slot, shape, shown)
        image = arguments["image"]
        # A thread cannot be cancelled, so wait for its container and remove that.
        making = asyncio.create_task(self._create_container(arguments, shape))
        try:
            sandbox = await asyncio.shield(making)
        except asyncio.CancelledError:
            with contextlib.suppress(SandboxError):
                await (await making).close()
            raise
        try:
            async with asyncio.timeout(START_S):
                await self._prepare_container(sandbox, arguments["name"], shape)
        except (TimeoutError, SandboxDied, OSError) as error:
            said = await sandbox.last_words()
            if UNFIT in said or UNFIT_FOLDER in said:
                raise ImageMissing(f"{image}: {said}") from error
            raise SandboxUnavailable(f"{image}: {said or error or 'its init was not ready in time'}") from error
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def environment(self, shape: Shape) -> Mapping[str, str]:
        found = await self._inspect_image(shape.image or self._settings.docker_image)
        return {
            "image": found["Id"],
            "runtime": self._runtime,
            "init": fingerprint(),
            "seccomp": hashlib.sha256(self._filter).hexdigest() if self._filter else "none",
            "docker": str(self._daemon.about["ServerVersion"]),
        }

    async def image_command(self, image: str) -> ImageCommand:
        """Return ENTRYPOINT and CMD of an image, and how they are run. Raises ImageMissing, SandboxUnavailable."""
        config = (await self._inspect_image(image)).get("Config") or {}
        argv = (*(config.get("Entrypoint") or ()), *(config.get("Cmd") or ()))
        return ImageCommand(argv=argv, cwd=config.get("WorkingDir") or "/", user=config.get("User") or "")

    async def close(self) -> None:
        await asyncio.to_thread(self._client.close)

    async def _inspect_image(self, image: str) -> Mapping[str, Any]:
        try:
            found: Mapping[str, Any] = await call_daemon(self._client.inspect_image, image)
        except ImageMissing as error:
            raise missing(image) from error
        return found

    async def _create_container(self, arguments: Mapping[str, Any], shape: Shape) -> ContainerSandbox:
        """Create a container, start it and attach to it. Raises SandboxUnavailable, ImageMissing."""
        image = arguments["image"]
        try:
            container = (await call_daemon(self._client.create_container, **arguments))["Id"]
        except ImageMissing as error:
            raise missing(image) from error
        try:
            return await self._start_attached(container, image, shape)
        except BaseException:
            with contextlib.suppress(SandboxUnavailable):
                await call_daemon(self._client.remove_container, container, force=True)
            raise

    async def _start_attached(self, container: str, image: str, shape: Shape) -> ContainerSandbox:
        """Start a container with its streams attached. Raises SandboxUnavailable, ImageMissing."""
        attached = await call_daemon(self._client.attach_socket, container, STREAMS)
        try:
            await call_daemon(self._client.start, container)
            pid = (await call_daemon(self._client.inspect_container, container))["State"]["Pid"]
        except SandboxUnavailable as error:
            detach(attached)
            state = (await call_daemon(self._client.inspect_container, container))["State"]
            if state["ExitCode"] == NOT_FOUND:
                raise ImageMissing(f"{image} has no python3 on its PATH, and sandboxes need one") from error
            raise
        return ContainerSandbox(self._client, container, ContainerStream(attached, pid), shape)

    async def _prepare_container(self, sandbox: ContainerSandbox, name: str, shape: Shape) -> None:
        """Prepare a container: first its listener, while there is no init yet that would take this for a call's, then
        its init. Check once whether sandboxes of this runtime can be reused. Raises SandboxDied, SandboxUnavailable,
        OSError."""
        proxy = None
        if shape.network == "allowlist":
            proxy = await asyncio.to_thread(listening_in, sandbox.process.pid, name)
        try:
            await asyncio.to_thread(sandbox.stream.sendall, program(self._filter, shape))
            await sandbox.ready()
        finally:
            sandbox.proxy = proxy
        if shape.folders:  # never reset; and its root may list descriptors of the init, but open none
            return
        if self._guarded is None:
            self._guarded = await is_init_protected(sandbox, self._probe)
            if not self._guarded:
                log.warning("under %s a call can reach the init: every lease gets a new container", self._runtime)
        sandbox.guarded = self._guarded


def missing(image: str) -> ImageMissing:
    """Return the error for an image that the daemon does not have."""
    return ImageMissing(f"the Docker daemon has no image {image!r}: run `docker pull {image}` where the daemon runs")


def known_runtime(about: Mapping[str, Any], wanted: str) -> str | None:
    """Return the daemon's name for a runtime, or None for its default. Raises BackendUnavailable."""
    if not wanted or wanted.startswith("io.containerd."):  # a shim's name, which daemons since version 23 resolve
        return wanted or None
    known = about.get("Runtimes") or {}
    for name in RUNTIMES.get(wanted, (wanted,)):
        if name in known:
            return name
    raise BackendUnavailable(
        f"[sandbox] docker_runtime = {wanted!r}: the Docker daemon knows {', '.join(sorted(known)) or 'none'}; "
        "install the runtime and name it under `runtimes` of the daemon's daemon.json"
    )


def filter_for(about: Mapping[str, Any]) -> bytes:
    """Return the seccomp program of the local backends, or an empty one if the daemon's machine has other system calls
    than this one."""
    if about.get("Architecture") != os.uname().machine:
        log.warning("the Docker daemon is on %s: only its own seccomp profile applies", about.get("Architecture"))
        return b""
    return seccomp.program() or b""


def warn(about: Mapping[str, Any]) -> None:
    """Log the limits that this daemon cannot set."""
    for figure, what in (("MemoryLimit", "memory"), ("PidsLimit", "processes"), ("CpuCfsQuota", "CPU")):
        if not about.get(figure):
            log.warning(
                "the Docker daemon cannot limit %s of a container: only the checks of the sandbox's init do", what
            )
