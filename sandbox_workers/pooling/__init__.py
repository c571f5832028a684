"""The pools of one worker: of the local backend, and of each further one that [sandbox] backends names."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnlog.infra.offers import offered
from turnlog.names import EntryPointGroup
from turnlog.sandbox_settings import LOCAL, SandboxSettings
from turnlog.sandbox_workers.pooling.pool import Pool
from turnlog.sandbox_workers.protocol import BackendUnavailable, ImageMissing, Provider, SandboxUnavailable, Shape

if TYPE_CHECKING:
    from turnlog.settings import Settings

log = logging.getLogger(__name__)

GROUP = EntryPointGroup.SANDBOX_BACKENDS
HERE = {
    "bubblewrap": "turnlog.sandbox_workers.backends.bubblewrap:Bubblewrap",
    "subprocess": "turnlog.sandbox_workers.backends.subprocess_backend:Subprocess",
}
"""The backends of this machine, which no package can replace; all others are offered under GROUP."""


class Pools:
    """One worker's, by the backend that a call names."""

    def __init__(self, pools: dict[str, Pool], *, fallback: bool) -> None:
        self._pools = pools
        self.fallback = fallback
        """bubblewrap was asked for and subprocess stands in for it, as a setting allows."""

    @classmethod
    @asynccontextmanager
    async def opened(cls, settings: Settings | SandboxSettings, *, ca: Path | None = None) -> AsyncIterator[Pools]:
        """Every backend of the settings, its sandboxes warm, watched while the block runs; all ended after it.
        `ca`: see Provider. Raises BackendUnavailable: a backend that is configured must work."""
        chosen = settings if isinstance(settings, SandboxSettings) else settings.sandbox
        async with AsyncExitStack() as stack:
            provider, fallback = await local(chosen, ca=ca)
            pool = await _filled(stack, provider, chosen)
            pools = dict.fromkeys(LOCAL, pool)
            for name in dict.fromkeys(chosen.backends):
                if name not in pools:
                    pools[name] = await _filled(stack, await backend(name, chosen, ca=ca), chosen)
            yield cls(pools, fallback=fallback)

    @property
    def served(self) -> tuple[str, ...]:
        """Backends that a call may ask for."""
        return tuple(self._pools)

    @property
    def local(self) -> Pool:
        """Of the backend of this machine."""
        return self._pools[LOCAL[0]]

    def pool(self, backend: str) -> Pool | None:
        """None: this worker does not serve the backend."""
        return self._pools.get(backend)

    def release(self, session: str) -> None:
        """The session will not come back to this worker: nothing of it is held any more."""
        for pool in set(self._pools.values()):
            pool.release(session)

    def snapshot(self) -> dict[str, object]:
        """For people; JSON."""
        pools = dict.fromkeys(self._pools.values())
        return {"fallback": self.fallback, "pools": [pool.snapshot() for pool in pools]}


async def backend(name: str, settings: SandboxSettings, *, ca: Path | None = None) -> Provider:
    """Open one backend by its name. Raises BackendUnavailable."""
    provider: Provider = await found(name).open(settings, ca=ca)
    return provider


def found(name: str) -> Any:
    """The class of a backend, imported now. Raises BackendUnavailable."""
    points = known()
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
            f"backend {name} ({point.value}, {GROUP}) does not import: {type(error).__name__}: {error}; mend or "
            "uninstall its package"
        ) from error


def known() -> dict[str, EntryPoint]:
    """Every backend by its name: those of this machine, then what packages offer, ours among them. Raises
    BackendUnavailable where two offer one name."""
    return offered(GROUP, "backend", BackendUnavailable, HERE)


async def local(settings: SandboxSettings, *, ca: Path | None = None) -> tuple[Provider, bool]:
    """The backend of this machine, and whether it stands in for bubblewrap, which a setting has to allow.
    Raises BackendUnavailable."""
    if settings.backend not in LOCAL:
        raise BackendUnavailable(
            f"[sandbox] backend = {settings.backend!r} is not one of {', '.join(LOCAL)}; others go into backends"
        )
    try:
        return await backend(settings.backend, settings, ca=ca), False
    except BackendUnavailable as error:
        if settings.backend == "subprocess" or not settings.allow_unisolated:
            raise
        log.warning("TOOLS RUN WITHOUT ISOLATION: subprocess and rlimits stand in for bubblewrap. %s", error)
        return await backend("subprocess", settings, ca=ca), True


async def unisolated(settings: SandboxSettings) -> str:
    """Why tools would run as plain processes on this machine, in place of the bubblewrap that the settings ask for;
    empty where it works. Takes a sandbox's start."""
    if settings.backend != "bubblewrap":
        return ""
    try:
        await (await backend(settings.backend, settings)).close()
    except BackendUnavailable as error:
        return str(error)
    return ""


async def _filled(stack: AsyncExitStack, provider: Provider, settings: SandboxSettings) -> Pool:
    """A warm pool that is watched. Raises BackendUnavailable."""
    stack.push_async_callback(provider.close)
    prewarm = 0 if provider.costly else settings.prewarm
    pool = Pool(provider, slots=settings.slots, prewarm=prewarm, max_uses=settings.max_uses)
    stack.push_async_callback(pool.close)
    try:
        await pool.prefill(Shape(disk_bytes=settings.disk_bytes))
    except (SandboxUnavailable, ImageMissing) as error:
        raise BackendUnavailable(f"backend {provider.name} works here, but no sandbox comes up: {error}") from error
    watcher = asyncio.create_task(_watch(pool, settings.health_s, sweeps=provider.name in LOCAL))
    watcher.add_done_callback(functools.partial(_unwatched, pool))
    stack.push_async_callback(_end, watcher)
    return pool


async def _watch(pool: Pool, every_s: float, *, sweeps: bool) -> None:
    """Check idle sandboxes again and again; with the local ones, what dead workers left on this machine."""
    from turnlog.sandbox_workers.backends.cgroups import sweep

    while True:
        await asyncio.sleep(every_s)
        await pool.check()
        if sweeps:
            pool.leaked(sum(sweep().values()))


def _unwatched(pool: Pool, watcher: asyncio.Task[None]) -> None:
    """A pool that nobody watches any more must not serve: callers are told why."""
    if not watcher.cancelled() and (error := watcher.exception()) is not None:
        pool.fail(error)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
