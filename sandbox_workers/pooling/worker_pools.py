"""The sandbox pools of one worker: one for the local backend and one for each further backend in [sandbox] backends.

Also the backends by name: which there are, and how one is opened."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnlog.infra.offers import find_plugins
from turnlog.names import EntryPointGroup
from turnlog.sandbox_settings import LOCAL, SandboxSettings
from turnlog.sandbox_workers.pooling.pool import Pool
from turnlog.sandbox_workers.protocol import BackendUnavailable, ImageMissing, Provider, SandboxUnavailable, Shape

if TYPE_CHECKING:
    from turnlog.settings import Settings

log = logging.getLogger(__name__)


HEALTH_S = 10.0
"""Seconds between checks of idle sandboxes. A check takes milliseconds, and a call that meets a dead sandbox only waits
for another one."""


class SandboxPools:
    """The pools of one worker, by the backend that a call names."""

    def __init__(self, pools: dict[str, Pool], *, fallback: bool) -> None:
        self._pools = pools
        self.fallback = fallback
        """True if bubblewrap is configured but does not work, and subprocess replaces it, as a setting allows."""

    @classmethod
    @asynccontextmanager
    async def open(
        cls, settings: Settings | SandboxSettings, *, ca: Path | None = None, health_s: float = HEALTH_S
    ) -> AsyncIterator[SandboxPools]:
        """Open every backend of the settings with warm sandboxes, check them every `health_s` while the block runs, and
        end all after it.

        `ca` is passed to the backends. Raises BackendUnavailable: a backend that is configured must work."""
        chosen = settings if isinstance(settings, SandboxSettings) else settings.sandbox
        async with AsyncExitStack() as stack:
            provider, fallback = await local(chosen, ca=ca)
            pool = await _create_pool(stack, provider, chosen, health_s)
            pools = dict.fromkeys(LOCAL, pool)
            for name in dict.fromkeys(chosen.backends):
                if name not in pools:
                    pools[name] = await _create_pool(stack, await backend(name, chosen, ca=ca), chosen, health_s)
            yield cls(pools, fallback=fallback)

    @property
    def served_backends(self) -> tuple[str, ...]:
        """Backends that a call may ask for."""
        return tuple(self._pools)

    @property
    def providers(self) -> dict[str, Provider]:
        """The backends by the names that a call may ask for."""
        return {name: pool.provider for name, pool in self._pools.items()}

    @property
    def local(self) -> Pool:
        """The pool of this machine's backend."""
        return self._pools[LOCAL[0]]

    def pool(self, backend: str) -> Pool | None:
        """Return the pool of the backend, or None if this worker does not serve it."""
        return self._pools.get(backend)

    def release(self, session: str) -> None:
        """Give up the slots that the session holds; it will not come back to this worker."""
        for pool in set(self._pools.values()):
            pool.release(session)

    def snapshot(self) -> dict[str, object]:
        """Return the state of all pools as JSON, for people."""
        pools = dict.fromkeys(self._pools.values())
        return {"fallback": self.fallback, "pools": [pool.snapshot() for pool in pools]}


async def _create_pool(stack: AsyncExitStack, provider: Provider, settings: SandboxSettings, health_s: float) -> Pool:
    """Create a warm pool and watch it. Raises BackendUnavailable."""
    stack.push_async_callback(provider.close)
    prewarm = 0 if provider.costly else settings.prewarm
    pool = Pool(provider, slots=settings.slots, prewarm=prewarm)
    stack.push_async_callback(pool.close)
    try:
        await pool.prefill(Shape(disk_bytes=settings.disk_bytes))
    except (SandboxUnavailable, ImageMissing) as error:
        raise BackendUnavailable(f"backend {provider.name} works here, but no sandbox starts: {error}") from error
    watcher = asyncio.create_task(_watch(pool, health_s, sweeps=provider.name in LOCAL))
    watcher.add_done_callback(functools.partial(_on_watcher_end, pool))
    stack.push_async_callback(_end, watcher)
    return pool


async def _watch(pool: Pool, every_s: float, *, sweeps: bool) -> None:
    """Check idle sandboxes periodically. With `sweeps`, also remove what dead workers left on this machine."""
    from turnlog.sandbox_workers.backends.cgroups import sweep

    while True:
        await asyncio.sleep(every_s)
        await pool.check()
        if sweeps:
            pool.count_leaks(sum(sweep().values()))


def _on_watcher_end(pool: Pool, watcher: asyncio.Task[None]) -> None:
    """Fail the pool if its watcher died: an unwatched pool must not serve, and its callers get the error."""
    if not watcher.cancelled() and (error := watcher.exception()) is not None:
        pool.fail(error)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


GROUP = EntryPointGroup.SANDBOX_BACKENDS
HERE = {
    "bubblewrap": "turnlog.sandbox_workers.backends.bubblewrap:Bubblewrap",
    "subprocess": "turnlog.sandbox_workers.backends.subprocess_backend:Subprocess",
}
"""Backends of this machine, which no package can replace; all others are found under GROUP."""


async def backend(name: str, settings: SandboxSettings, *, ca: Path | None = None) -> Provider:
    """Open one backend by its name. Raises BackendUnavailable."""
    provider: Provider = await load_backend(name).open(settings, ca=ca)
    return provider


def load_backend(name: str) -> Any:
    """Import and return the class of a backend. Raises BackendUnavailable."""
    points = find_backends()
    if name not in points:
        raise BackendUnavailable(f"there is no backend {name!r}; [sandbox] backends may name {', '.join(points)}")
    point = points[name]
    try:
        return point.load()
    except Exception as error:  # a module may raise anything while it is imported
        if isinstance(error, ModuleNotFoundError) and point.module.startswith("turnlog."):
            extra = "sandbox" if name in LOCAL else name
            raise BackendUnavailable(f"backend {name} needs {error.name}: pip install turnlog[{extra}]") from error
        raise BackendUnavailable(
            f"backend {name} ({point.value}, {GROUP}) does not import: {type(error).__name__}: {error}; fix or "
            "uninstall its package"
        ) from error


def find_backends() -> dict[str, EntryPoint]:
    """Return every backend by its name: those of this machine, then those offered by packages, including ours. Raises
    BackendUnavailable if two packages offer the same name."""
    return find_plugins(GROUP, "backend", BackendUnavailable, HERE)


async def local(settings: SandboxSettings, *, ca: Path | None = None) -> tuple[Provider, bool]:
    """Open the backend of this machine. The second value is True if it replaces bubblewrap, which a setting has to
    allow. Raises BackendUnavailable."""
    if settings.backend not in LOCAL:
        raise BackendUnavailable(
            f"[sandbox] backend = {settings.backend!r} is not one of {', '.join(LOCAL)}; set other backends in "
            "[sandbox] backends"
        )
    try:
        return await backend(settings.backend, settings, ca=ca), False
    except BackendUnavailable as error:
        if settings.backend == "subprocess" or not settings.allow_unisolated:
            raise
        log.warning("TOOLS RUN WITHOUT ISOLATION: subprocess and rlimits stand in for bubblewrap. %s", error)
        return await backend("subprocess", settings, ca=ca), True


async def find_isolation_failure(settings: SandboxSettings) -> str:
    """Return why tools would run as plain processes on this machine although the settings ask for bubblewrap; empty if
    bubblewrap works. Starts a sandbox to find out."""
    if settings.backend != "bubblewrap":
        return ""
    try:
        await (await backend(settings.backend, settings)).close()
    except BackendUnavailable as error:
        return str(error)
    return ""
